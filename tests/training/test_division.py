"""How a step's rows are divided among ranks, groups and micro-batches, and how the parts add up again."""

import pytest
import torch
from torch import nn

from electra_fast.config.config import TrainConfig
from electra_fast.training.division import Division, share
from electra_fast.training.gradient_buffer import GradientBuffer
from electra_fast.training.world import World


def divisions(world_size, **train):
    return [Division.of(TrainConfig(**train), rank, world_size) for rank in range(world_size)]


@pytest.mark.parametrize(
    ("world_size", "batch_size", "accumulate"), [(1, 10, 2), (2, 12, 3), (3, 10, 2), (4, 3, 1), (7, 12, 3)]
)
def test_every_row_belongs_to_one_micro_batch_of_its_rank(world_size, batch_size, accumulate):
    rows = []
    for rank, division in enumerate(divisions(world_size, batch_size=batch_size, accumulate=accumulate)):
        own = [row for group in division.groups for part in group for row in part]
        assert own == list(division.rows) == list(share(batch_size, rank, world_size))
        assert all(len(group) <= accumulate and all(group) for group in division.groups)
        rows += own
    assert rows == list(range(batch_size))


@pytest.mark.parametrize(("world_size", "batch_size", "accumulate"), [(2, 16, 1), (4, 10, 2), (2, 3, 1)])
def test_exact_groups_are_the_same_for_any_number_of_ranks(world_size, batch_size, accumulate):
    train = {"batch_size": batch_size, "accumulate": accumulate, "reduce": "exact"}
    found = divisions(world_size, **train)
    assert [group for each in found for group in each.groups] == list(divisions(1, **train)[0].groups)
    assert [number for each in found for number in each.own] == [0, 1, 2, 3]
    assert all([row for group in each.groups for part in group for row in part] == list(each.rows) for each in found)


def test_exact_needs_ranks_that_divide_the_groups():
    for world_size in (3, 8):
        with pytest.raises(ValueError, match=rf"needs 1, 2 or 4 ranks, not {world_size}; set train.reduce"):
            divisions(world_size, reduce="exact")


def parameters():
    torch.manual_seed(0)
    return {"a": nn.Parameter(torch.zeros(3, 5)), "b": nn.Parameter(torch.zeros(1)), "c": nn.Parameter(torch.zeros(17))}


def test_groups_add_up_as_a_tree():
    """(0 + 1) + (2 + 3), with numbers whose sum in any row is another."""
    named, (division,) = parameters(), divisions(1, batch_size=4, reduce="exact")
    buffer = GradientBuffer(named, division, is_exact=True, world=World())
    numbers, expected = [1.0, 2.0**-24, 2.0**-24, 2.0**-24], 1 + 2.0**-23
    assert sum(torch.tensor(numbers).unbind()) == 1
    for group, number in enumerate(numbers):
        for parameter in named.values():
            parameter.grad = torch.full_like(parameter, number)
        buffer.collect(group, torch.tensor(float(group)))
    buffer.sum_groups()
    buffer.hand_over()
    for parameter in named.values():
        assert parameter.grad.shape == parameter.shape and (parameter.grad == expected).all()
    assert buffer.loss == 0 + 1 + 2 + 3


def test_a_group_without_rows_adds_nothing():
    named, (division,) = parameters(), divisions(1, batch_size=4)
    buffer = GradientBuffer(named, division, is_exact=False, world=World())
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    buffer.collect(0, torch.tensor(2.0))
    for parameter in named.values():
        parameter.grad = None
    buffer.collect(0, torch.tensor(0.0))
    buffer.hand_over()
    assert all((parameter.grad == 0).all() for parameter in named.values()) and buffer.loss == 0
    named["a"].grad = torch.ones(3, 5)
    named["b"].grad = None
    with pytest.raises(RuntimeError, match="parameter b has no gradient"):
        buffer.collect(0, torch.tensor(0.0))


def test_what_is_discarded_is_zero_even_if_it_was_no_number():
    named, (division,) = parameters(), divisions(1, batch_size=4)
    buffer = GradientBuffer(named, division, is_exact=False, world=World())
    for value, skipped in ((torch.nan, 1.0), (3.0, 0.0)):
        for parameter in named.values():
            parameter.grad = torch.full_like(parameter, value)
        buffer.collect(0, torch.tensor(0.0))
        buffer.hand_over()
        buffer.discard(torch.tensor(skipped))
        expected = 0.0 if skipped else value
        assert all((parameter.grad == expected).all() for parameter in named.values())
