"""The objective against an explicit computation in plain Python."""

import pytest
import torch
from variants import DIFFERENT

from electra_fast.config.config import Config
from electra_fast.model.compute import ComputeConfig
from electra_fast.model.model import Electra
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey
from electra_fast.ops import operations as ops

VOCAB = 50
LENGTH = 12
SLOTS = 3
MASK = 4
COMPUTE = ComputeConfig("sdpa", torch.float32)
KEY = torch.tensor([11, 3])
LOCAL = {"model.architecture": "modernbert", "model.local_attention": "4", "model.global_attention_every": "2"}


def make_config(**changes: str) -> Config:
    plain = {
        "model.vocab_size": str(VOCAB),
        "model.max_positions": "16",
        "data.sequence_length": str(LENGTH),
        "model.dropout": "0",
        "model.attention_dropout": "0",
    }
    return Config.preset("tiny", "google").override(plain | changes)


def make_model(config: Config) -> Electra:
    """Makes weights large enough that logits differ from 0 and a missing term has an effect."""
    model = Electra(config)
    if config.generator.kind == "unigram":
        model.proposal.set_counts(torch.arange(config.model.vocab_size) % 7)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random) * 0.1)
    return model


def make_batch(num_rows: int = 4, seed: int = 0, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """Returns packed rows of two segments with padding; the last slot of every second row is unused."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, vocab, (num_rows, LENGTH), generator=random, dtype=torch.int32)
    segments = torch.tensor([[1] * 5 + [2] * 5 + [0] * 2], dtype=torch.int32).repeat(num_rows, 1)
    ids[segments == 0] = 0
    positions = torch.stack([torch.randperm(10, generator=random)[:SLOTS] for _ in range(num_rows)]).int()
    weights = torch.ones(num_rows, SLOTS)
    weights[::2, -1] = 0
    originals = ids.gather(1, positions.long())
    masked = ids.clone()
    for row in range(num_rows):
        for slot in range(SLOTS):
            if weights[row, slot]:
                masked[row, positions[row, slot]] = MASK
    borders = [row * LENGTH + edge for row in range(num_rows) for edge in (0, 5, 10)] + [num_rows * LENGTH]
    return {
        "input_ids": masked,
        "token_type_ids": torch.zeros_like(ids),
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0]], dtype=torch.int32).repeat(num_rows, 1),
        "segment_ids": segments,
        "cu_seqlens": torch.tensor(borders, dtype=torch.int32),
        "masked_positions": torch.where(weights > 0, positions, 0).int(),
        "masked_ids": torch.where(weights > 0, originals, 0).int(),
        "masked_weights": weights,
    }


def run(model, batch, key=None, whole=None):
    """Returns the output for a batch, which is a part of the `whole` batch."""
    objective = objective_of(model.config)
    denominators = objective.loss_denominators(whole or batch)
    return objective.forward(model, MicroBatch(batch, COMPUTE, key or RngKey(KEY), denominators))


def halves(batch):
    """Returns a batch of four rows as two, with the first row of each."""
    for i in (0, 2):
        half = {k: v[i : i + 2] for k, v in batch.items() if k != "cu_seqlens"}
        yield i, half | {"cu_seqlens": batch["cu_seqlens"][: 2 * 3 + 1]}


@pytest.mark.parametrize("name", DIFFERENT)
def test_micro_batches_add_up(name):
    """Halves of a batch have the loss, samples and gradients of the whole: accumulation has no effect."""
    model = make_model(make_config(**DIFFERENT[name]))
    batch = make_batch()
    whole = run(model, batch)
    whole.loss.backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    expected = [p.grad.clone() for p in trained]
    model.zero_grad()
    totals = dict.fromkeys(whole.totals, 0.0)
    for first_row, half in halves(batch):
        output = run(model, half, RngKey(KEY, first_row), batch)
        output.loss.backward()
        totals = {name: total + output.totals[name] for name, total in totals.items()}
    for name, total in totals.items():
        torch.testing.assert_close(total, whole.totals[name].to(total.dtype), rtol=1e-6, atol=1e-5)
    for parameter, gradient in zip(trained, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_corrupt():
    masked = torch.tensor([[7, 4, 9, 4, 11, 4]], dtype=torch.int32)
    # Position 1 is masked twice (samples 20 and 25 → 22), 3 has a correct sample, 5 a wrong one; one slot is unused.
    positions = torch.tensor([1, 1, 3, 5, 6])
    originals = torch.tensor([8, 8, 10, 12, 0])
    corrupted, replaced = ops.corrupt(masked, positions, originals, torch.tensor([20, 25, 10, 33, 40]))
    assert corrupted.tolist() == [7, 22, 9, 10, 11, 33]
    assert replaced.tolist() == [False, True, False, False, False, True]
    # The label is true if the token differs from the original; the mean of two samples may equal it by accident.
    both = torch.tensor([0, 0])
    accident = torch.tensor([22, 22])
    corrupted, replaced = ops.corrupt(torch.tensor([[4]]), both, accident, torch.tensor([20, 25]))
    assert corrupted.tolist() == [22] and replaced.tolist() == [False]


def test_disallow_correct_and_temperature():
    batch = make_batch(64)
    correct = {"objective.disallow_correct": "true"}
    output = run(make_model(make_config(**correct)), batch)
    drawn = torch.zeros_like(output.predictions.replaced_T)
    first = torch.arange(64)[:, None] * LENGTH
    used = batch["masked_weights"] > 0
    drawn[(batch["masked_positions"] + first)[used]] = True
    assert torch.equal(output.predictions.replaced_T, drawn)

    cold = run(make_model(make_config(**{"objective.temperature": "0.001"})), batch)
    unchanged = cold.totals["masked_weight"] - cold.totals["replaced"]
    assert unchanged == cold.totals["generator_correct"]  # at temperature 0 the sample is the argmax
