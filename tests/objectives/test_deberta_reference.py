"""An explicit step of DeBERTaV3's pre-training with the layers of `transformers`: loss and gradients.

`published_deberta` has the heads that `transformers` lacks.
"""

import pytest
import torch
import torch.nn.functional as F
from published_deberta import hf_class
from test_electra import COMPUTE, KEY, LENGTH, SLOTS, make_batch, make_model, run
from transformers import DebertaV2Config

from electra_fast.config.config import Config
from electra_fast.huggingface import weights
from electra_fast.huggingface.config import describe_encoder, role_shape
from electra_fast.objectives.objective import MicroBatch, RngKey, generate, read_inputs

SEGMENTS = ((0, 5), (5, 10))


def make_config(**changes):
    sizes = {"model.vocab_size": 40, "model.max_positions": 32, "model.position_buckets": 4, "generator.num_layers": 2}
    keys = {"model.dropout": 0, "model.attention_dropout": 0, "model.num_layers": 3, "data.sequence_length": LENGTH}
    return Config.preset("tiny", "deberta").override(sizes | keys | changes)


def published(model, role):
    """Returns a network in fp64 with our parameters."""
    shape = role_shape(model.config, role)
    table = describe_encoder(shape, {"pad": 0}) | {"legacy": False}
    network = hf_class("deberta", role)(DebertaV2Config(**table)).eval()
    network.load_state_dict(weights.to_hf(model.folded(), role, shape))
    return network.double()


@pytest.mark.parametrize("kernel_size", [0, 3])
def test_loss_and_gradients_equal_the_published_step(kernel_size):
    model = make_model(make_config(**{"model.conv_kernel_size": kernel_size}))
    batch = make_batch(vocab=40)
    compute = MicroBatch(batch, COMPUTE, RngKey(KEY))
    with torch.no_grad():
        samples = generate(model, read_inputs(model, compute), RngKey(KEY)).sample_M.view(-1, SLOTS)
    output = run(model, batch)
    output.loss.backward()
    networks = {role: published(model, role) for role in model.networks}
    sums = [0.0, 0.0]
    counts = [0, 0]
    for row in range(len(samples)):
        for start, end in SEGMENTS:
            ids = batch["input_ids"][row, start:end].long()[None]
            chosen = (batch["masked_weights"][row] > 0) & (batch["masked_positions"][row] >= start)
            chosen &= batch["masked_positions"][row] < end
            at, original = (batch[name][row][chosen].long() for name in ("masked_positions", "masked_ids"))
            log_p = networks["generator"](ids).logits.log_softmax(-1)[0]
            sums[0] = sums[0] - log_p[at - start, original].sum()
            corrupted = ids.clone()
            replaced = torch.zeros(end - start, dtype=torch.float64)
            corrupted[0, at - start] = samples[row][chosen]
            replaced[at - start] = (samples[row][chosen] != original).double()
            logits = networks["discriminator"](input_ids=corrupted).logits[0]
            sums[1] = sums[1] + F.binary_cross_entropy_with_logits(logits, replaced, reduction="sum")
            counts = [counts[0] + len(at), counts[1] + end - start]
    loss = sums[0] / counts[0] + 50 * sums[1] / counts[1]
    loss.backward()
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-5)

    ours = {name: p.grad for name, p in model.named_parameters()}
    for role, network in networks.items():
        theirs = {name: p.grad for name, p in network.named_parameters()}
        for name, names in weights.pairs(role, role_shape(model.config, role)):
            expected = torch.cat([theirs[key] for key in names])
            assert (ours[name] - expected).abs().max() <= 1e-4 * max(1e-3, expected.abs().max().item()), name
