"""Every objective against its formula: one token at a time, in fp64, with separate segments instead of packed rows."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from test_electra import COMPUTE, KEY, LOCAL, SLOTS, make_batch, make_config, make_model, run
from variants import VARIANTS

from electra_fast.model.attention import AttentionMask
from electra_fast.objectives import objective_of
from electra_fast.objectives.electra import restore_some_segments
from electra_fast.objectives.objective import MicroBatch, RngKey, generate, read_inputs

VOCAB = 11
SEGMENTS = ((0, 5), (5, 10))


def model_and_batch(**changes):
    """Returns a model in the objective's last stage, and a batch."""
    model = make_model(make_config(**{"model.vocab_size": str(VOCAB)} | changes))
    for name in objective_of(model.config).stages()[-1].frozen:
        model.get_submodule(name).requires_grad_(False)
    return model, make_batch(vocab=VOCAB)


def samples_of(model, batch):
    """Returns each masked slot's replacement: the generator's sample, or the original in an unchanged segment."""
    inputs = read_inputs(model, MicroBatch(batch, COMPUTE, RngKey(KEY)))
    with torch.no_grad():
        sample_M = generate(model, inputs, RngKey(KEY)).sample_M
    if model.config.objective.contrastive_weight:
        sample_M = restore_some_segments(inputs, sample_M, RngKey(KEY))
    return sample_M.view(-1, SLOTS)


def linear(layer, state):
    return layer.weight @ state + (0 if layer.bias is None else layer.bias)


class Transcription:
    """The loss of a batch in fp64, from a copy of a model."""

    def __init__(self, model):
        self.model = copy.deepcopy(model).double()
        self.config = model.config
        self.right = {"generator": [], "discriminator": []}

    def hidden(self, role, ids):
        positions = torch.arange(len(ids))
        types = torch.zeros(len(ids), dtype=torch.int64)
        window = self.config.model.local_attention
        mask = AttentionMask.padded(1, len(ids), torch.ones(1, len(ids)) if window else None, window)
        return self.model.hidden(role, torch.tensor(ids), positions, types, mask, torch.float64)

    def log_probabilities(self, role, state):
        """Returns the log-probabilities of the vocabulary at one position."""
        head = self.model.get_submodule(f"{role}_head")
        table = (self.model.generator_embeddings if role == "generator" else self.model.embeddings).table
        if self.config.model.heads == "plain":
            state = state if head.projection is None else linear(head.projection, state)
            return torch.log_softmax(table @ state, 0)
        x = self.normed(head, F.gelu(linear(head.dense, state)))
        if head.projection is not None:
            x = linear(head.projection, x)
        return torch.log_softmax(table @ x + head.bias, 0)

    def replaced(self, state, first):
        """Returns the probability that the discriminator detects a replaced token, from its segment's first state."""
        head = self.model.discriminator_head
        if self.config.model.heads == "plain":
            return self.sigmoid("discriminator_head", state)
        if self.config.model.architecture == "deberta":
            state = self.normed(head, state + first)
        x = F.gelu(linear(head.dense, state))
        if self.config.model.architecture == "modernbert":
            x = self.normed(head, x)
        return torch.sigmoid(linear(head.classifier, x)[0])

    def sigmoid(self, name, state):
        return torch.sigmoid(linear(self.model.get_submodule(name).classifier, state)[0])

    def normed(self, head, x):
        return F.layer_norm(x, x.shape, head.norm.weight, head.norm.bias, self.config.model.eps)

    def loss(self, batch, samples, counted=None):
        objective = self.config.objective
        name = self.config.objective.name
        sums = dict.fromkeys(("gen", "disc", "enc", "base", "fix", "sent"), 0.0)
        counts = [0, 0, 0]
        for row, (start, end) in itertools.product(range(4), SEGMENTS):
            masked_ids = batch["input_ids"][row, start:end].tolist()
            slots = {
                int(batch["masked_positions"][row, slot]) - start: slot
                for slot in range(SLOTS)
                if batch["masked_weights"][row, slot] and start <= batch["masked_positions"][row, slot] < end
            }
            original = {at: int(batch["masked_ids"][row, slot]) for at, slot in slots.items()}
            sample = {at: int(samples[row, slot]) for at, slot in slots.items()}
            corrupted = [sample.get(at, token) for at, token in enumerate(masked_ids)]
            wrong = [at in slots and sample[at] != original[at] for at in range(end - start)]
            counts = [counts[0] + len(slots), counts[1] + end - start, counts[2] + 1]

            if "generator" in self.model.networks:
                states = self.hidden("generator", masked_ids)
                for at in slots:
                    log_p = self.log_probabilities("generator", states[at])
                    sums["gen"] = sums["gen"] - log_p[original[at]]
                    self.right["generator"].append(log_p.argmax() == original[at])
            if name == "mlm":
                continue
            if "encoder" in self.model.networks:
                hidden = self.hidden("encoder", corrupted)
                for at in range(end - start):
                    truth = original.get(at, masked_ids[at])
                    p = self.log_probabilities("encoder", hidden[at]).exp()[truth]
                    if name == "all-tokens-mlm":
                        copied = self.sigmoid("copy_head", hidden[at])
                        p = copied * (corrupted[at] == truth) + (1 - copied) * p
                    if name == "all-tokens-mlm" or at in slots:
                        sums["enc"] = sums["enc"] - p.log()
                continue
            hidden = self.hidden("discriminator", corrupted)
            for at in range(end - start):
                p = self.replaced(hidden[at], hidden[0])
                right = p if wrong[at] else 1 - p
                if name == "electra15" and not (at in slots if counted is None else counted[row, start + at]):
                    continue
                sums["disc"] = sums["disc"] - right.log()
                self.right["discriminator"].append(right > 0.5)
                if name == "adversarial" and at in slots:
                    state = states[at]
                    reward = -right.detach().log()
                    value = self.sigmoid("baseline_head", state.detach())
                    advantage = reward + value.detach().log()
                    log_p = self.log_probabilities("generator", state)[sample[at]]
                    sums["base"] = sums["base"] - advantage * log_p * objective.gen_weight
                    q = right.detach()
                    sums["base"] = sums["base"] - q * value.log() - (1 - q) * (1 - value).log()
                if objective.corrective_weight and at in slots:
                    sums["fix"] = sums["fix"] - self.log_probabilities("corrective", hidden[at])[original[at]]
            if objective.contrastive_weight:
                p = self.sigmoid("sentence_head", hidden[0])
                sums["sent"] = sums["sent"] - (p if any(wrong) else 1 - p).log()
        masked, tokens, segments = counts
        has_likelihood = name not in ("adversarial", "two-stage")
        return (
            objective.gen_weight * sums["gen"] / masked * has_likelihood
            + objective.disc_weight * sums["disc"] / (masked if name == "electra15" else tokens)
            + objective.encoder_weight * sums["enc"] / (tokens if name == "all-tokens-mlm" else masked)
            + sums["base"] / masked
            + objective.corrective_weight * sums["fix"] / masked
            + objective.contrastive_weight * sums["sent"] / segments
        )


@pytest.mark.parametrize(
    ("name", "architecture", "tying"),
    [(name, "bert", "none") for name in VARIANTS if name != "electra"]
    + [("electra", "bert", "embeddings"), ("all-tokens-mlm", "bert", "embeddings")]
    + [(name, "modernbert", "none") for name in ("corrective", "all-tokens-mlm", "local attention")]
    + [("corrective", "deberta", "disentangled"), ("mlm", "deberta", "none"), ("adversarial", "deberta", "embeddings")],
)
def test_loss_and_gradients_equal_the_formula(name, architecture, tying):
    changes = {"model.tying": tying, "objective.gen_weight": "1.5", "objective.encoder_weight": "0.75"}
    model, batch = model_and_batch(**changes | {"model.architecture": architecture} | VARIANTS.get(name, LOCAL))
    objective = objective_of(model.config)
    output = run(model, batch)
    output.loss.backward()

    counted = None
    samples = batch["masked_ids"]
    if name != "mlm":
        samples = samples_of(model, batch)
        assert (samples != batch["masked_ids"])[batch["masked_weights"] > 0].any()
    if "random" in name:
        inputs = read_inputs(model, MicroBatch(batch, COMPUTE, RngKey(KEY)))
        counted = objective.counted(inputs, RngKey(KEY)).view(4, -1)
    written_out = Transcription(model)
    expected = written_out.loss(batch, samples, counted)
    expected.backward()
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    theirs = dict(written_out.model.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        gradient = theirs[parameter_name].grad
        actual = parameter.grad
        if gradient is None:
            assert actual is None or not actual.any(), parameter_name
            continue
        bound = 1e-4 * max(1e-3, gradient.abs().max().item())
        assert (actual - gradient).abs().max() <= bound, parameter_name
    assert sum(gradient.grad is not None for gradient in theirs.values()) > 15
    summary = objective.metrics({total: float(value) for total, value in output.totals.items()})
    assert summary["loss"] == pytest.approx(expected.item(), rel=1e-5)
    for role, right in written_out.right.items():
        assert not right or summary[f"{role}_accuracy"] == pytest.approx(sum(map(float, right)) / len(right))


def test_replace_mlm_loss_includes_correct_samples():
    """At temperature 0, a model that is always right would still have a loss."""
    cold = VARIANTS["replace-mlm"] | {"objective.temperature": "0.001"}
    model, batch = model_and_batch(**cold)
    samples = samples_of(model, batch)
    batch["masked_ids"] = torch.where(batch["masked_weights"] > 0, samples, 0).int()  # now all samples are correct
    output = run(model, batch)
    assert output.totals["replaced"] == 0 and output.totals["encoder_loss"] > 1
    assert output.totals["masked_weight"] == batch["masked_weights"].sum()


def test_copying_is_stable_when_probabilities_underflow():
    model, batch = model_and_batch(**VARIANTS["all-tokens-mlm"])
    with torch.no_grad():
        model.encoder_head.bias.copy_(torch.linspace(-300, 300, VOCAB))
        model.copy_head.classifier.weight.mul_(1000)
    output = run(model, batch)
    output.loss.backward()
    assert math.isfinite(output.loss.item())
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
