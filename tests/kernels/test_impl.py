"""The switch between kernels and references: it selects, reaches every operation, and works with torch.compile."""

import pytest
import torch
from comparison import DEVICE, zeros
from lib.kernel_cases import CASES

from electra_fast.kernels import launchers
from electra_fast.ops import cpu_ops
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout, use_choices, use_impl, uses_kernels

# The first launcher that an operation calls, if it has another name than the operation, or there are several.
LAUNCHERS = {
    ("attention", "kernel"): "short_attention",
    ("self_attention", "kernel"): "short_attention",
    ("feed_forward", "narrow"): "narrow_feed_forward",
    ("feed_forward", "fused"): "matmul_gelu",
    ("feed_forward", "pipelined"): "matmul_gelu",
    ("feed_forward", "apart"): "bias_gelu",
    ("add_norm", "kernel"): "residual_norm",
    ("gated_feed_forward", "narrow"): "narrow_feed_forward",
    ("gated_feed_forward", "fused"): "matmul_geglu",
    ("gated_feed_forward", "pipelined"): "matmul_geglu",
    ("gated_feed_forward", "apart"): "geglu",
    ("replaced_logits", "kernel"): "gelu_logit",
    ("rotary_qkv", "kernel"): "rotate_qkv_",
}
FORWARD = [
    name
    for name, launcher in vars(launchers).items()
    if callable(launcher)
    and not name.endswith(("_backward", "_gradients", "_is_profitable", "_pipelines", "_supports", "_sums"))
]


class Called(Exception):
    """Raised with the name of the implementation that was called."""


def refuse(name):
    def raise_called(*_, **__):
        raise Called(name)

    return raise_called


@pytest.fixture
def refused(monkeypatch):
    """Makes launchers raise `Called`."""
    for name in FORWARD:
        monkeypatch.setattr(launchers, name, refuse(name))


def first_call(name):
    dtype, *sizes = CASES[name].tested[0]
    call = CASES[name].call(torch.device(DEVICE), dtype, *sizes)
    return call, lambda: call.function(*call.args, **call.kwargs)


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("name", [name for name in CASES if name != "linear"])
def test_selects_kernel_or_reference(name, monkeypatch):
    call, run = first_call(name)
    for kernel in call.kernels:
        launcher = LAUNCHERS.get((name, kernel), name)
        with use_choices({"*": "kernel", call.key: kernel}), pytest.raises(Called, match=f"^{launcher}$"):
            run()
    for references in (use_choices({"*": "reference"}), use_impl("reference")):
        with references:
            run()
    has_reference = hasattr(ops, f"{name}_reference")
    has_cpu_form = hasattr(cpu_ops, name)
    monkeypatch.setattr(ops, f"{name}_reference", refuse("reference"), raising=False)
    if has_cpu_form and has_reference:
        monkeypatch.setattr(cpu_ops, name, refuse("cpu"))
    if has_reference:
        with use_impl("reference"), pytest.raises(Called, match="^reference$"):
            run()
        if DEVICE == "cpu":
            with pytest.raises(Called, match="cpu" if has_cpu_form else "reference"):
                run()


def test_every_launcher_has_an_operation_in_the_table():
    kernels = [(name, kernel) for name in CASES if name != "linear" for kernel in first_call(name)[0].kernels]
    assert {LAUNCHERS.get((name, kernel), name) for name, kernel in kernels} == {*FORWARD}
    assert CASES.keys() == ops.OPERATIONS - {
        "vocabulary_nll",
        "disentangled_attention",
    }  # these have no separate kernels


def test_dropout_without_a_key_has_no_kernel(monkeypatch):
    """torch's generator draws the mask."""
    monkeypatch.setattr(launchers, "dropout", refuse("kernel"))
    with use_impl("kernel"):
        assert ops.dropout(zeros(4, 8) + 1, Dropout(0.5)).unique().tolist() == [0, 2]


def test_contexts_nest_and_restore_after_an_error():
    x = zeros(1)
    default = uses_kernels(x, "dropout")
    with use_impl("kernel"):
        with pytest.raises(Called), use_impl("reference"):
            assert not uses_kernels(x, "dropout")
            raise Called
        assert uses_kernels(x, "dropout")
    assert uses_kernels(x, "dropout") == default == (DEVICE == "cuda")


def test_compiled_code_follows_the_switch(monkeypatch):
    monkeypatch.setattr(ops, "geglu_reference", lambda x, weight: x - 1)
    monkeypatch.setattr(launchers, "geglu", lambda h: h + 1)
    compiled = torch.compile(lambda x: ops.geglu(x, torch.eye(2)), backend="eager", fullgraph=True)
    x = torch.ones(1, 2)
    for impl, expected in (("reference", 0), ("kernel", 2), ("reference", 0)):
        with use_impl(impl):
            assert (compiled(x) == expected).all()


def test_rejects_unavailable_kernels_and_unknown_names(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match='impl = "kernel": needs a CUDA device'), use_impl("kernel"):
        pass
    unknown = pytest.raises(ValueError, match='impl = \'triton\': must be "kernel", "reference" or None')
    with unknown, use_impl("triton"):
        pass
