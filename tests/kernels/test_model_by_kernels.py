"""Both architectures give equal results with kernels and with references, including dropout."""

import dataclasses

import pytest
import torch
from comparison import DEVICE, assert_same_bits

from electra_fast.config.config import Config
from electra_fast.model.attention import AttentionMask
from electra_fast.model.compute import ComputeConfig
from electra_fast.model.model import Electra
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import use_impl

NUM_ROWS = 3
LENGTH = 16
VOCAB = 90
KEY = torch.tensor([5, 11, 0], device=DEVICE)


def tiny_model(architecture, tying="embeddings"):
    sizes = {"hidden_size": 48, "embedding_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 80}
    config = Config.preset("small", "google")
    model = dataclasses.replace(
        config.model,
        architecture=architecture,
        vocab_size=VOCAB,
        dropout=0.2,
        attention_dropout=0.0,
        tying=tying,
        **sizes,
    )
    generator = dataclasses.replace(config.generator, fraction=1.0 if tying == "all" else 0.5, num_layers=0)
    network = Electra(dataclasses.replace(config, model=model, generator=generator)).to(DEVICE)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():  # a new `modern` encoder is the identity, which would hide errors in its layers
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=random).to(DEVICE)
    return network


def tokens():
    random = torch.Generator().manual_seed(1)
    ids, types = (torch.randint(0, most, (NUM_ROWS * LENGTH,), generator=random).to(DEVICE) for most in (VOCAB, 2))
    positions = torch.arange(LENGTH, device=DEVICE).repeat(NUM_ROWS)
    return ids, positions, types, AttentionMask.padded(NUM_ROWS, LENGTH, None), torch.float32


def replaced_logits(model, *inputs):
    return model.discriminator_head(model.hidden("discriminator", *inputs), inputs[1])


def logits_and_gradients(model, key=KEY, replaced_logits=replaced_logits):
    model.zero_grad()
    hidden = model.hidden("generator", *tokens(), key)
    words = model.generator_head(hidden[::5], model.generator_embeddings.token)
    logits = (words, replaced_logits(model, *tokens(), key))
    sum((x * torch.linspace(-1, 1, x.numel(), device=DEVICE).view(x.shape)).sum() for x in logits).backward()
    return [x.detach() for x in logits], {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning"
)  # raised in torch 2.11
@pytest.mark.parametrize(
    ("architecture", "tying"), [pytest.param("bert", "all", marks=pytest.mark.slow), ("modernbert", "none")]
)
def test_kernels_equal_references_and_compile_without_a_graph_break(architecture, tying):
    """torch.compile traces the whole discriminator and its gradients through the kernels."""
    model = tiny_model(architecture, tying)
    with use_impl("reference"):
        logits, gradients = logits_and_gradients(model)
    with use_impl("kernel"):
        by_kernels, their_gradients = logits_and_gradients(model)
        compiled = torch.compile(replaced_logits, backend="aot_eager", fullgraph=True)
        compiled_logits, gradients_again = logits_and_gradients(model, replaced_logits=compiled)
    assert_same_bits([*compiled_logits, *gradients_again.values()], [*by_kernels, *their_gradients.values()])
    for ours, theirs in zip(by_kernels, logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(their_gradients[name], gradient, rtol=1e-3, atol=1e-3)


def spy_on_dropout(monkeypatch, *names):
    """Records the `Dropout` of every call of these operations, their last positional argument."""
    seen = []

    def watched(original):
        return lambda *args, **options: (seen.append(args[-1]), original(*args, **options))[1]

    for name in names:
        monkeypatch.setattr(ops, name, watched(getattr(ops, name)))
    return seen


def test_every_dropout_has_a_distinct_call_index(monkeypatch):
    """In both networks of a step, even if they are one module."""
    seen = spy_on_dropout(monkeypatch, "dropout_reference")
    with use_impl("reference"):
        logits_and_gradients(tiny_model("bert", "all"))
    call_indices = [dropout.call_index for dropout in seen]
    assert len(call_indices) == len(set(call_indices)) == 2 * (1 + 2 * 2)


def test_objective_passes_the_dropout_key(monkeypatch):
    rng_key = RngKey(torch.tensor([5, 11], device=DEVICE), torch.tensor(4))
    if DEVICE == "cpu":
        assert rng_key.dropout_key(LENGTH) is None
    shape = (NUM_ROWS, LENGTH)
    integers = {name: torch.zeros(shape, dtype=torch.int32) for name in ("input_ids", "token_type_ids", "position_ids")}
    slots = {name: torch.zeros(NUM_ROWS, 2, dtype=torch.int32) for name in ("masked_positions", "masked_ids")}
    batch = integers | slots | {"masked_weights": torch.ones(NUM_ROWS, 2), "segment_ids": torch.ones(shape)}
    batch["cu_seqlens"] = torch.arange(0, NUM_ROWS * LENGTH + 1, LENGTH, dtype=torch.int32)
    batch = {name: x.to(DEVICE) for name, x in batch.items()}
    model = tiny_model("bert")
    compute = ComputeConfig("sdpa", torch.float32)
    objective = objective_of(model.config)
    denominators = objective.loss_denominators(batch)
    seen = spy_on_dropout(monkeypatch, "embedding_norm", "residual_norm")
    with use_impl("kernel"):
        assert rng_key.dropout_key(LENGTH).tolist() == [5, 11, 4 * LENGTH]
        objective.forward(model, MicroBatch(batch, compute, rng_key, denominators))
        assert {tuple(dropout.key.tolist()) for dropout in seen} == {(5, 11, 4 * LENGTH)}
        assert all(dropout.probability == 0.2 for dropout in seen)
        del seen[:]
        objective.forward(model.eval(), MicroBatch(batch, compute, rng_key, denominators))
    assert seen and all(dropout.probability == 0 for dropout in seen)
