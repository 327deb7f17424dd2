"""The switch between kernels and references: it selects, reaches every operation, and survives torch.compile."""

import pytest
import torch
from comparison import DEVICE, zeros
from test_sublayers import LAUNCHERS_OF_SUBLAYERS

from electra_fast.kernels import launchers
from electra_fast.ops import cpu_ops
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout, use_impl, uses_kernels

KEY = torch.tensor([5, 11, 0], device=DEVICE)


def ids(*shape):
    return zeros(*shape, dtype=torch.int64)


def flags(*shape):
    return zeros(*shape, dtype=torch.bool)


TABLES = (zeros(9, 8), zeros(6, 8), zeros(2, 8))
# Operation, its launcher, arguments.
CALLS = [
    ("dropout", "dropout", (zeros(4, 8), Dropout(0.5, KEY))),
    ("layer_norm", "layer_norm", (zeros(4, 8), zeros(8), zeros(8), 1e-5)),
    (
        "residual_norm",
        "residual_norm",
        (zeros(4, 6), zeros(8, 6), zeros(8), zeros(4, 8), zeros(8), None, 1e-5, Dropout()),
    ),
    ("embedding_norm", "embedding_norm", ((ids(4),) * 3, TABLES, zeros(8), zeros(8), 1e-5, torch.float32, Dropout())),
    ("bias_gelu", "bias_gelu", (zeros(4, 8), zeros(6, 8), zeros(6))),
    ("geglu", "geglu", (zeros(4, 8), zeros(12, 8))),
    ("rotary_qkv", "rotate_qkv_", (zeros(4, 8), zeros(24, 8), zeros(4, 1, 2), zeros(4, 1, 2), 2)),
    ("corrupt", "corrupt", (ids(2, 3), ids(4), ids(4), ids(4))),
    ("replaced_logits", "gelu_logit", (zeros(4, 8), zeros(8, 8), zeros(8), zeros(1, 8), zeros(1))),
    ("discriminator_loss", "discriminator_loss", (zeros(4), flags(4), flags(4))),
    ("generator_head", "generator_head", (zeros(4, 8), zeros(9, 8), zeros(9), ids(4), zeros(4), ids(4), KEY[:2])),
    ("sample_alias", "sample_alias", (ids(9, 2), ids(4), KEY[:2])),
]


class Called(Exception):
    """The name of the implementation that was called."""


def refuse(name):
    def raise_called(*_, **__):
        raise Called(name)

    return raise_called


@pytest.mark.parametrize(("name", "launcher", "arguments"), CALLS, ids=[name for name, *_ in CALLS])
def test_selects_kernel_or_reference(monkeypatch, name, launcher, arguments):
    monkeypatch.setattr(launchers, launcher, refuse("kernel"))
    monkeypatch.setattr(ops, f"{name}_reference", refuse("reference"))
    operation = getattr(ops, name)
    has_cpu_form = hasattr(cpu_ops, name)
    if has_cpu_form:
        monkeypatch.setattr(cpu_ops, name, refuse("cpu"))
    for impl in ("kernel", "reference"):
        with use_impl(impl), pytest.raises(Called, match=impl):
            operation(*arguments)
    with pytest.raises(Called, match="kernel" if DEVICE == "cuda" else "cpu" if has_cpu_form else "reference"):
        operation(*arguments)


def test_covers_every_launcher():
    others = ("_backward", "_gradients", "_is_profitable", "_supports", "_sums")
    forward = {name for name, each in vars(launchers).items() if callable(each) and not name.endswith(others)}
    assert {launcher for _, launcher, _ in CALLS} | {*LAUNCHERS_OF_SUBLAYERS.values()} == forward


def test_dropout_without_a_key_has_no_kernel(monkeypatch):
    """torch's own generator draws the mask."""
    monkeypatch.setattr(launchers, "dropout", refuse("kernel"))
    with use_impl("kernel"):
        assert ops.dropout(zeros(4, 8) + 1, Dropout(0.5)).unique().tolist() == [0, 2]


def test_nests_and_is_restored_after_an_error():
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


def test_refuses_kernels_where_there_are_none_and_unknown_names(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match='impl = "kernel" needs a CUDA device'), use_impl("kernel"):
        pass
    unknown = pytest.raises(ValueError, match='impl is "kernel" or "reference", not \'triton\'')
    with unknown, use_impl("triton"):
        pass
