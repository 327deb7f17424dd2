"""REINFORCE against enumeration: one text with two masked positions, a vocabulary of 11, so 121 corrupted texts."""

import itertools

import pytest
import test_electra
import torch
from test_electra import make_config, make_model
from variants import VARIANTS

from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import RngKey

VOCAB = 11
LENGTH = 8
MASK = 4
ORIGINAL = (2, 7, 5, 9, 6, 8, 10, 3)
MASKED = (2, 5)
NUM_BATCHES = 20
ROWS = 1000
GENERATOR = ("generator_embeddings.", "generator.", "generator_head.")


@pytest.fixture
def model():
    changes = {"model.vocab_size": str(VOCAB), "model.tying": "none", "objective.disc_weight": "0"}
    return make_model(make_config(**VARIANTS["adversarial"] | changes))


def batch_of(num_rows):
    """Returns the masked text, repeated."""
    ids = torch.tensor([ORIGINAL], dtype=torch.int32).repeat(num_rows, 1)
    masked_ids = ids.clone()
    masked_ids[:, list(MASKED)] = MASK
    positions = torch.tensor([MASKED], dtype=torch.int32).repeat(num_rows, 1)
    return {
        "input_ids": masked_ids,
        "token_type_ids": torch.zeros_like(ids),
        "position_ids": torch.arange(LENGTH, dtype=torch.int32).repeat(num_rows, 1),
        "segment_ids": torch.ones_like(ids),
        "cu_seqlens": torch.arange(num_rows + 1, dtype=torch.int32) * LENGTH,
        "masked_positions": positions,
        "masked_ids": ids.gather(1, positions.long()),
        "masked_weights": torch.ones(num_rows, len(MASKED)),
    }


def run(model, num_rows, step):
    return test_electra.run(model, batch_of(num_rows), RngKey(torch.tensor([3, step])))


def enumerated(model):
    """Returns probability, log-probabilities of samples, and rewards for all 121 texts; [121], [121, 2]."""
    pairs = torch.tensor(list(itertools.product(range(VOCAB), repeat=2)))
    masked_ids = torch.tensor(ORIGINAL)
    masked_ids[list(MASKED)] = MASK
    log_p = model.generator_logits(masked_ids[None])[0, list(MASKED)].log_softmax(-1)
    log_p = torch.stack([log_p[at, pairs[:, at]] for at in range(2)], 1)
    texts = torch.tensor([ORIGINAL]).repeat(len(pairs), 1)
    texts[:, list(MASKED)] = pairs
    is_replaced = texts != torch.tensor(ORIGINAL)
    with torch.no_grad():
        p_replaced = torch.sigmoid(model.discriminator_logits(texts).double())
    rewards = -torch.where(is_replaced, p_replaced, 1 - p_replaced).log()[:, list(MASKED)]
    return log_p.detach().sum(1).exp(), log_p, rewards


def expected_reward(model):
    probability, _, rewards = enumerated(model)
    return (probability * rewards.sum(1)).sum().item()


def generator_gradient(model):
    gradients = [p.grad.flatten() for name, p in model.named_parameters() if name.startswith(GENERATOR)]
    return torch.cat(gradients)


def test_estimator_is_unbiased(model):
    """Mean and standard error of 20 means over 1,000 rows, against the gradient summed over all texts."""
    probability, log_p, rewards = enumerated(model)
    (-(probability[:, None] * rewards * log_p).sum() / 2).backward()  # the loss is per masked token
    exact = generator_gradient(model).double()

    estimates = []
    for step in range(NUM_BATCHES):
        model.zero_grad()
        run(model, ROWS, step).loss.backward()
        estimates.append(generator_gradient(model).double())
    estimates = torch.stack(estimates)
    mean = estimates.mean(0)
    error = estimates.std(0) / NUM_BATCHES**0.5
    # Components are correlated, so the distance has few degrees of freedom; a sign, a factor of 1.2 or a reward of the
    # wrong position would be at least 3 errors away. With 200,000 samples, the distance is 2.5 % of the gradient.
    assert error.norm() < 0.08 * exact.norm()
    assert (mean - exact).norm() < 2.2 * error.norm()


def test_metrics_include_the_reward(model):
    output = run(model, 5_000, 0)
    objective = objective_of(model.config)
    metrics = objective.metrics({name: float(total) for name, total in output.totals.items()})
    assert metrics["reward"] == pytest.approx(expected_reward(model) / 2, rel=0.04)
    assert metrics["loss"] == pytest.approx(metrics["policy_loss"] + metrics["baseline_loss"], rel=1e-4)
