"""A step of DeBERTaV3's pre-training, written out over the layers of `transformers`: loss and gradients.

Its generator decodes as in the published code (EnhancedMaskDecoder): twice through its last layer, whose queries begin
as the states before it plus absolute positions. Its discriminator adds the state of [CLS] to every token's. Neither is
in `transformers`, whose layers take `query_states` all the same.
"""

import pytest
import torch
import torch.nn.functional as F
from test_electra import COMPUTE, KEY, LENGTH, SLOTS, make_batch, make_model, run
from torch import nn
from transformers import DebertaV2Config, DebertaV2Model

from electra_fast.config.config import Config
from electra_fast.huggingface import weights
from electra_fast.huggingface.config import role_shape
from electra_fast.objectives.objective import MicroBatch, RngKey, generate, read_inputs

SEGMENTS = ((0, 5), (5, 10))


def make_config(**changes):
    sizes = {"model.vocab_size": 40, "model.max_positions": 32, "model.position_buckets": 4, "generator.num_layers": 2}
    keys = {"model.dropout": 0, "model.attention_dropout": 0, "model.num_layers": 3, "data.sequence_length": LENGTH}
    return Config.preset("tiny", "deberta").override(sizes | keys | changes)


class Published(nn.Module):
    """A network in fp64 with the parameters of ours, by the names of the published code."""

    def __init__(self, model, role):
        super().__init__()
        shape = role_shape(model.config, role)
        self.deberta = DebertaV2Model(
            DebertaV2Config(
                vocab_size=shape.vocab_size,
                hidden_size=shape.hidden_size,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_heads,
                intermediate_size=shape.intermediate_size,
                max_position_embeddings=shape.max_positions,
                conv_kernel_size=shape.conv_kernel_size,
                conv_act="gelu",
                position_buckets=shape.position_buckets,
                relative_attention=True,
                pos_att_type=["p2c", "c2p"],
                norm_rel_ebd="layer_norm",
                share_att_key=True,
                position_biased_input=False,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
        tensors = weights.to_hf(model.state_dict() | {"embeddings.token": model.embeddings.table}, role, shape)
        self.heads = nn.ParameterDict()
        for name, tensor in tensors.items():
            if name.startswith("deberta.") and "position_embeddings" not in name:
                self.get_parameter(name).data.copy_(tensor)
            else:
                self.heads[name.replace(".", "/")] = nn.Parameter(tensor.clone())
        self.double()

    def gradients(self):
        return {name.removeprefix("heads.").replace("/", "."): p.grad for name, p in self.named_parameters()}

    def head(self, name, x):
        weight, bias = (self.heads[f"{name}.{kind}".replace(".", "/")] for kind in ("weight", "bias"))
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-7) if "LayerNorm" in name else F.linear(x, weight, bias)

    def log_probabilities(self, ids):
        embedded = self.deberta.embeddings(input_ids=ids, mask=torch.ones_like(ids))
        encoder, mask = self.deberta.encoder, torch.ones_like(ids)
        before_last = encoder(embedded, mask, output_hidden_states=True).hidden_states[-2]
        queries = before_last + self.heads["deberta/embeddings/position_embeddings/weight"][: ids.shape[1]]
        shared = {"relative_pos": encoder.get_rel_pos(embedded), "rel_embeddings": encoder.get_rel_embedding()}
        for _ in range(2):
            queries, _ = encoder.layer[-1](
                before_last, encoder.get_attention_mask(mask), query_states=queries, **shared
            )
        x = F.gelu(self.head("lm_predictions.lm_head.dense", queries))
        table = self.deberta.embeddings.word_embeddings.weight
        logits = self.head("lm_predictions.lm_head.LayerNorm", x) @ table.T
        return torch.log_softmax(logits + self.heads["lm_predictions/lm_head/bias"], -1)[0]

    def replaced_logits(self, ids):
        hidden = self.deberta(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        x = self.head("mask_predictions.LayerNorm", hidden[:, :1] + hidden)
        return self.head("mask_predictions.classifier", F.gelu(self.head("mask_predictions.dense", x)))[0, :, 0]


@pytest.mark.parametrize("kernel_size", [0, 3])
def test_loss_and_gradients_are_those_of_the_published_step(kernel_size):
    model, batch = make_model(make_config(**{"model.conv_kernel_size": kernel_size})), make_batch(vocab=40)
    compute = MicroBatch(batch, COMPUTE, RngKey(KEY))
    with torch.no_grad():
        samples = generate(model, read_inputs(model, compute), RngKey(KEY)).sample_M.view(-1, SLOTS)
    output = run(model, batch)
    output.loss.backward()
    networks = {role: Published(model, role) for role in model.networks}
    sums, counts = [0.0, 0.0], [0, 0]
    for row in range(len(samples)):
        for start, end in SEGMENTS:
            ids = batch["input_ids"][row, start:end].long()[None]
            chosen = (batch["masked_weights"][row] > 0) & (batch["masked_positions"][row] >= start)
            chosen &= batch["masked_positions"][row] < end
            at, original = (batch[name][row][chosen].long() for name in ("masked_positions", "masked_ids"))
            sums[0] = sums[0] - networks["generator"].log_probabilities(ids)[at - start, original].sum()
            corrupted, replaced = ids.clone(), torch.zeros(end - start, dtype=torch.float64)
            corrupted[0, at - start] = samples[row][chosen]
            replaced[at - start] = (samples[row][chosen] != original).double()
            logits = networks["discriminator"].replaced_logits(corrupted)
            sums[1] = sums[1] + F.binary_cross_entropy_with_logits(logits, replaced, reduction="sum")
            counts = [counts[0] + len(at), counts[1] + end - start]
    loss = sums[0] / counts[0] + 50 * sums[1] / counts[1]
    loss.backward()
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-5)

    ours = {name: p.grad for name, p in model.named_parameters()}
    for role, network in networks.items():
        theirs = network.gradients()
        for name, names in weights.pairs(role, role_shape(model.config, role)):
            expected = torch.cat([theirs[each] for each in names])
            assert (ours[name] - expected).abs().max() <= 1e-4 * max(1e-3, expected.abs().max().item()), name
