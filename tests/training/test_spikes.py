"""Which steps are spikes, and that a skipped step changes nothing."""

import pytest
import torch
from test_electra import COMPUTE, make_config
from torch import nn
from variants import VARIANTS

from electra_fast.config.config import OptimizerConfig
from electra_fast.model.model import Electra
from electra_fast.optimizers.optimizer import Optimizer, global_norm
from electra_fast.training.parallel_step import create_step
from electra_fast.training.run_tensors import split_state
from electra_fast.training.spikes import SIGMAS, WINDOW, SpikeGuard

CPU = torch.device("cpu")
USUAL = [False, False]


def values(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (5 + torch.randn(count, 2, generator=generator)).float()


def judged(guard, pairs):
    return [bool(guard.judge(loss, norm)) for loss, norm in pairs]


def fed(count=WINDOW + 40):
    guard, history = SpikeGuard(CPU), values(count)
    assert not any(judged(guard, history))
    return guard, history


@pytest.mark.parametrize("which", [0, 1])
def test_six_standard_deviations_above_the_last_128(which):
    guard, history = fed()
    recent = history[-WINDOW:, which].double()
    limit = recent.mean() + SIGMAS * recent.std(correction=0)
    for factor, is_spike in ((1 + 1e-6, True), (1 - 1e-6, False)):
        pair = history[-1].clone()
        pair[which] = limit * factor
        assert judged(guard, [pair]) == [is_spike]  # a spike leaves the comparison as it is
    guard, history = fed()
    low = history[-1].clone()
    low[which] = -1e9
    assert judged(guard, [low]) == [False]


@pytest.mark.parametrize(("which", "bad"), [(0, torch.nan), (1, torch.nan), (1, torch.inf), (0, -torch.inf)])
def test_what_is_not_finite_is_a_spike_from_the_first_step(which, bad):
    guard, pair = SpikeGuard(CPU), torch.ones(2)
    pair[which] = bad
    assert judged(guard, [pair, torch.ones(2), pair]) == [True, False, True]
    assert all(tensor.isfinite().all() for tensor in guard.state_dict().values())


def test_nothing_is_compared_before_there_are_128():
    guard = SpikeGuard(CPU)
    assert not any(judged(guard, values(WINDOW - 1)))
    assert judged(guard, [torch.tensor([1e9, 5.0])]) == [False]  # the 128th
    guard = SpikeGuard(CPU)
    judged(guard, values(WINDOW))
    assert judged(guard, [torch.tensor([1e9, 5.0])]) == [True]


def test_another_stage_is_not_compared():
    """Its loss is another one; its first steps are no spikes."""
    config = make_config(**VARIANTS["two-stage"] | {"train.skip_spikes": "3"})
    model = Electra(config)
    step = create_step(model, Optimizer(model.named_parameters(), config.optimizer), config, COMPUTE)
    judged(step.spikes, values(WINDOW))
    step._enter_stage(config.train.steps // 2)
    assert judged(step.spikes, [torch.tensor([1e9, 5.0])]) == [False]


def test_rows_of_skipped_steps_are_counted():
    guard, _ = fed()
    good, bad = torch.full((2,), 5.0), torch.tensor([5.0, torch.nan])
    judged(guard, [bad, bad, good, bad, bad, bad, good, bad])
    assert guard.take_longest() == 3 and guard.take_longest() == 0
    judged(guard, [bad])
    assert guard.take_longest() == 2  # it began before


def test_a_restored_guard_judges_alike():
    guard, _ = fed()
    judged(guard, [torch.full((2,), torch.nan)])
    own, spikes = split_state({**guard.state_dict(), "exp_avg.x": torch.ones(1)})
    other = SpikeGuard(CPU)
    for name, tensor in other.state_dict().items():
        tensor.copy_(spikes[name])
    assert own.keys() == {"exp_avg.x"}
    more = values(300, seed=1)
    more[::50] *= 3
    found = judged(guard, more)
    assert found == judged(other, more) and any(found)
    assert guard.take_longest() == other.take_longest()


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_a_skipped_step_changes_nothing_and_one_that_is_taken_is_the_usual(name):
    rates = {"learning_rate": 0.1, "muon_learning_rate": 0.02}
    config = OptimizerConfig(name=name, bias_correction=True, warmup_steps=0, **rates)
    torch.manual_seed(0)
    initial = {"x.weight": torch.randn(6, 4), "x.bias": torch.randn(5), "x.qkv.weight": torch.randn(12, 4)}
    gradients = [{n: torch.randn_like(p) for n, p in initial.items()} for _ in range(3)]

    def trained(skips):
        named = {n: nn.Parameter(p.clone()) for n, p in initial.items()}
        optimizer = Optimizer(named.items(), config)
        for step, skip in enumerate(skips):
            bad = float("nan") if skip else 0.0
            for n, parameter in named.items():
                parameter.grad = gradients[step][n] * (0 if skip else 1)
            optimizer.set_step_scalars(1.0)
            norm = global_norm(optimizer.gradients().values()) + bad
            before = {n: t.clone() for n, t in {**named, **optimizer.state_dict()}.items() if n != "num_updates"}
            optimizer.step(norm, None if skips is USUAL else torch.tensor(float(skip)))
            if skip:
                after = {**named, **optimizer.state_dict()}
                assert all(torch.equal(before[n], after[n]) for n in before)
        return {n: p.detach() for n, p in named.items()}

    usual, taken = trained(USUAL), trained([False, False])
    assert all(torch.equal(usual[n], taken[n]) and not torch.equal(usual[n], initial[n]) for n in usual)
    trained([False, True, False])
