"""Update rules against torch's, and against explicit formulas of their sources."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from electra_fast.config.config import OptimizerConfig
from electra_fast.optimizers.optimizer import Optimizer, lr_scale
from electra_fast.optimizers.rules import Stack, orthogonalize, stacks

STEPS = 6


def parameters(seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = {"x.weight": (8, 5), "wide.weight": (4, 16), "x.bias": (8,), "e.token": (11, 6)}
    return {n: nn.Parameter(torch.randn(s, generator=random, dtype=torch.float32)) for n, s in shapes.items()}


def gradients(named, step):
    random = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(p.shape, generator=random) for name, p in named.items()}


def update(optimizer, scale=1.0):
    optimizer.set_step_scalars(scale)
    return optimizer.step()


def take_steps(named, update):
    for step in range(STEPS):
        for name, gradient in gradients(named, step).items():
            named[name].grad = gradient
        update()


def train(config, scale=1.0, dtype=torch.float32):
    named = parameters()
    optimizer = Optimizer(named.items(), config, matrix_dtype=dtype)
    take_steps(named, lambda: update(optimizer, scale))
    return named


def plain(**changes):
    defaults = {"name": "adamw", "learning_rate": 0.01, "muon_learning_rate": 0.02, "beta2": 0.999}
    defaults |= {"clip_norm": 0.0, "weight_decay": 0.1, "bias_correction": True}
    return OptimizerConfig(**(defaults | changes))


def test_adamw_equals_torch():
    ours = train(plain())
    named = parameters()
    decayed = [p for p in named.values() if p.dim() == 2]
    rest = [p for p in named.values() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    take_steps(named, torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-6).step)
    for name, parameter in named.items():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-5, atol=1e-6)


def test_sparse_gradients_update_like_dense_ones():
    """Also if rows, or a whole gradient, are added to one; and values of one step do not remain in the next.

    As long as few rows have moments, only these are updated, and the others decay.
    """
    config = plain(clip_norm=0.5)
    random = torch.Generator().manual_seed(0)
    results = []
    steps = [(torch.randint(9, (4,), generator=random), torch.randn(4, 3, generator=random)) for _ in range(8)]
    for is_sparse in (True, False):
        table = torch.nn.Parameter(torch.ones(60, 3))
        optimizer = Optimizer([("table", table)], config)
        for number, (rows, values) in enumerate(steps):
            optimizer.zero_grad()
            (torch.nn.functional.embedding(rows, table, sparse=is_sparse) * values).sum().backward()
            assert table.grad.is_sparse == is_sparse
            gradient = optimizer.gradients()["table"]
            if number == 2:
                optimizer.add_rows("table", rows + torch.tensor([0, 0, 0, -rows[3]]), values)
            if number == 4:  # now more rows have moments
                optimizer.load_state_dict(
                    {n: x.roll(20, 0) if x.dim() else x for n, x in optimizer.state_dict().items()}
                )
            if number == 6:
                gradient += 1.0
                optimizer.forget_rows("table")
            update(optimizer)
        results.append(table.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_adamw_without_bias_correction():
    """As in BERT's AdamWeightDecay."""
    ours = train(plain(bias_correction=False), scale=0.5)
    named = parameters()
    for name, parameter in named.items():
        weight = parameter.detach().double()
        exp_avg = torch.zeros_like(weight)
        exp_avg_sq = torch.zeros_like(weight)
        for step in range(STEPS):
            gradient = gradients(named, step)[name].double()
            exp_avg = 0.9 * exp_avg + 0.1 * gradient
            exp_avg_sq = 0.999 * exp_avg_sq + 0.001 * gradient**2
            decay = 0.1 if weight.dim() == 2 else 0.0
            weight = weight - 0.5 * 0.01 * (exp_avg / (exp_avg_sq.sqrt() + 1e-6) + decay * weight)
        torch.testing.assert_close(ours[name].double(), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_equals_torch_up_to_bf16(dtype):
    """torch.optim.Muon iterates in bf16, so matrices agree to its precision; all other parameters use AdamW."""
    ours = train(plain(name="muon", muon_learning_rate=0.02), dtype=dtype)
    adamw = train(plain())
    named = parameters()
    matrices = [named["x.weight"], named["wide.weight"]]
    theirs = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="original")
    take_steps(named, theirs.step)
    for name in ("x.weight", "wide.weight"):
        moved = (parameters()[name] - named[name]).norm()
        assert (ours[name] - named[name]).norm() < 5 * 2**-8 * moved  # five iterations with bf16 rounding
    for name in ("x.bias", "e.token"):
        assert torch.equal(ours[name], adamw[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 40), (2, 40, 8)])
def test_orthogonalize(shape, dtype):
    """Checks the iteration's known range of singular values, and the directions of the polar factor."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    result = orthogonalize(matrices, dtype)
    assert result.dtype == matrices.dtype
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.4 and values.max() < 1.25
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    polar = u @ vh
    cosine = (result * polar).sum((1, 2)) / (result.norm(dim=(1, 2)) * polar.norm(dim=(1, 2)))
    assert (cosine > 0.97).all()


def test_tall_matrices_share_a_batch_with_wide_ones_on_a_gpu():
    """Merged as on a GPU and separate as on a CPU, they get equal updates, scaled for their shapes."""
    random = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (8, 40), "b.weight": (40, 8), "c.qkv.weight": (120, 8), "d.weight": (8, 8)}
    matrices = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    merged = [Stack(("a.weight",), ("b.weight", "c.qkv.weight"), (8, 40)), Stack(("d.weight",), (), (8, 8))]
    with FakeTensorMode():
        assert stacks({name: torch.empty(shape, device="cuda") for name, shape in shapes.items()}) == merged

    def updates(stacks):
        update = {}
        for stack in stacks:
            update |= stack.split(orthogonalize(stack.join(matrices)), torch.tensor(-0.5))
        return update

    apart = updates(stacks(matrices))
    together = updates(merged)
    assert len(stacks(matrices)) == 3 and apart.keys() == together.keys() == shapes.keys()
    for name, update in together.items():
        torch.testing.assert_close(update, apart[name], rtol=0, atol=1e-5)
        blocks = matrices[name].view(update.shape)
        scale = -0.5 * max(1.0, blocks.shape[1] / blocks.shape[2]) ** 0.5
        torch.testing.assert_close(update, orthogonalize(blocks) * scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_skipped_step_does_not_count_as_update(name):
    """Nor after a checkpoint: the bias corrections count completed steps only."""
    states = []
    for steps in ([0, None, None, 1, None, 2], [0, 1, 2]):
        named = parameters()
        optimizer = Optimizer(named.items(), plain(name=name, learning_rate=0.1))
        for step in steps:
            for key, gradient in gradients(named, step or 0).items():
                named[key].grad = gradient * (step is not None)
            optimizer.set_step_scalars(1.0)
            optimizer.step(torch.tensor(1.0), torch.tensor(float(step is None)))
            optimizer.load_state_dict({key: value.clone() for key, value in optimizer.state_dict().items()})
        states.append((optimizer.num_updates, named))
    (count, skipping), (expected, others) = states
    assert count == expected == 3
    for key, parameter in skipping.items():
        torch.testing.assert_close(parameter, others[key], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_parts_of_a_divided_update_form_the_update(name):
    """Each of three processes has moments of its parameters only; together they update each parameter once."""

    def updated(num_processes):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 40), nn.LayerNorm(40), nn.Linear(40, 40))
        optimizer = Optimizer(
            model.named_parameters(), OptimizerConfig(name=name, learning_rate=0.1, muon_learning_rate=0.02)
        )
        shares = []
        for rank in range(num_processes):
            optimizer.divide(rank, num_processes)
            shares.append(optimizer.own_names)
        for _ in range(2):
            gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
            optimizer.set_step_scalars(1.0)
            for rank in range(num_processes):
                optimizer.divide(rank, num_processes)
                for parameter_name, parameter in model.named_parameters():
                    parameter.grad = gradients[parameter_name].clone()
                optimizer.step()
        return model.state_dict(), shares

    whole, _ = updated(1)
    parts, shares = updated(3)
    assert sorted(name for share in shares for name in share) == sorted(whole) and all(shares)
    for parameter_name, tensor in whole.items():
        torch.testing.assert_close(parts[parameter_name], tensor)


def test_fused_matrices_are_orthogonalized_separately():
    fused = nn.Parameter(torch.zeros(12, 4))
    optimizer = Optimizer([("layer.qkv.weight", fused)], plain(name="muon", weight_decay=0.0))
    fused.grad = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    fused.grad[:4] *= 1e3  # queries' gradients would dominate a joint norm
    update(optimizer)
    sizes = [block.norm() for block in fused.detach().chunk(3)]
    assert max(sizes) < 2 * min(sizes)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_lamb_adapts_each_tensor_of_the_published_layout(bias_correction):
    """Compares fused parameters with their parts, computed separately in float64.

    The gradients of queries and keys are near epsilon, as early in training: one trust ratio over all three would
    equal the values' ratio, and be far too small for the others.
    """
    random = torch.Generator().manual_seed(0)
    fused = {
        "a.qkv.weight": {"query": 1e-6, "key": 1e-7, "value": 1.0},
        "a.geglu_in.weight": {"gelu": 1e-7, "gate": 1.0},
        "a.weight": {"zero": 1.0},
        "a.qkv.bias": {"bias": 1.0},  # neither decayed nor adapted
    }
    scales = {part: scale for parts in fused.values() for part, scale in parts.items()}
    weights = {part: torch.randn(*(12,) if part == "bias" else (4, 4), generator=random) for part in scales}
    weights["zero"].zero_()
    grads = [
        {part: torch.randn(weights[part].shape, generator=random) * scale for part, scale in scales.items()}
        for _ in range(STEPS)
    ]

    def join(of, parts):
        return torch.cat([of[part] for part in parts])

    ours = {name: nn.Parameter(join(weights, parts)) for name, parts in fused.items()}
    optimizer = Optimizer(ours.items(), plain(name="lamb", bias_correction=bias_correction))
    for step in range(STEPS):
        for name, parts in fused.items():
            ours[name].grad = join(grads[step], parts)
        update(optimizer)

    for part, weight in weights.items():
        weight = weight.double()
        exp_avg = torch.zeros_like(weight)
        exp_avg_sq = torch.zeros_like(weight)
        for step in range(STEPS):
            gradient = grads[step][part].double()
            exp_avg = 0.9 * exp_avg + 0.1 * gradient
            exp_avg_sq = 0.999 * exp_avg_sq + 0.001 * gradient**2
            done = step + 1 if bias_correction else math.inf
            change = exp_avg / (1 - 0.9**done) / ((exp_avg_sq / (1 - 0.999**done)).sqrt() + 1e-6)
            if part != "bias":
                change = change + 0.1 * weight
                change = change * (weight.norm() / change.norm() if weight.norm() > 0 else 1.0)
            weight = weight - 0.01 * change
        weights[part] = weight
    for name, parts in fused.items():
        torch.testing.assert_close(ours[name].double(), join(weights, parts), rtol=1e-5, atol=1e-6)


def test_clipping():
    named = parameters()
    optimizer = Optimizer(named.items(), plain(clip_norm=1.0, learning_rate=1.0, weight_decay=0.0, epsilon=1.0))
    for name, gradient in gradients(named, 0).items():
        named[name].grad = gradient.clone()
    expected = math.sqrt(sum(g.square().sum().item() for g in gradients(named, 0).values()))
    assert update(optimizer, 0.0).item() == pytest.approx(expected, rel=1e-6)
    clipped = math.sqrt(sum(m.square().sum().item() for m in optimizer.exp_avg.values())) / (1 - 0.9)
    assert clipped == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("rule", ["adamw", "lamb", "muon"])
def test_frozen_parameters_are_skipped(rule):
    """They are neither updated nor stored nor in the norm; the others are updated as if there were no frozen ones."""
    config = plain(name=rule, clip_norm=1.0)
    named = parameters()
    alone = parameters()
    frozen = ("wide.weight", "x.bias")
    for name in frozen:
        named[name].requires_grad_(False)
        del alone[name]
    optimizer = Optimizer(named.items(), config)
    expected = Optimizer(alone.items(), config)
    for step in range(STEPS):
        for name, gradient in gradients(alone, step).items():
            named[name].grad = gradient.clone()
            alone[name].grad = gradient.clone()
        assert torch.equal(update(optimizer), update(expected))
    for name, parameter in named.items():
        assert torch.equal(parameter, parameters()[name] if name in frozen else alone[name]), name
    state = optimizer.state_dict()
    assert state.keys() == expected.state_dict().keys()

    other = Optimizer(named.items(), config)
    other.load_state_dict(state)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in state.items())
    with pytest.raises(ValueError, match="another model or rule: only one of the two has exp_avg.wide.weight"):
        Optimizer(parameters().items(), config).load_state_dict(state)


def test_missing_gradients_are_reported():
    named = parameters()
    optimizer = Optimizer(named.items(), plain())
    for name, gradient in gradients(named, 0).items():
        named[name].grad = gradient
    named["x.bias"].grad = None
    with pytest.raises(RuntimeError, match="parameter x.bias has no gradient"):
        update(optimizer)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        Optimizer([(name, p.requires_grad_(False)) for name, p in named.items()], plain())


def test_learning_rates_must_be_resolved():
    def update_at(rule, rate, muon_rate):
        config = OptimizerConfig(name=rule, learning_rate=rate, muon_learning_rate=muon_rate)
        Optimizer(parameters().items(), config).set_step_scalars(1.0)

    update_at("adamw", 1e-3, 0.0)
    for rule, rate, muon_rate in (("muon", 1e-3, 0.0), ("muon", 0.0, 0.02), ("adamw", 0.0, 0.02)):
        with pytest.raises(ValueError, match="learning rate = 0: must be derived"):
            update_at(rule, rate, muon_rate)


def test_schedules():
    product = OptimizerConfig(warmup_steps=10, schedule="product")
    assert [lr_scale(product, t, 100) for t in (0, 5, 10, 50, 99)] == pytest.approx([0, 0.475, 0.9, 0.5, 0.01])
    linear = OptimizerConfig(warmup_steps=10, schedule="linear")
    scales = [lr_scale(linear, t, 100) for t in (0, 4, 9, 10, 55, 99)]
    assert scales == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.5, 1 / 90])
    assert lr_scale(OptimizerConfig(warmup_steps=0), 0, 10) == 1.0
