"""Every kernel in the table of cases: against its reference, in any layout, registered, and compiled for GPUs."""

import importlib
import pkgutil

import pytest
import torch
from ahead_of_time import card_of_target, compile_launches
from comparison import DEVICE, assert_same_bits, zeros
from lib.kernel_cases import BF16, CASES, FP16, FP32
from torch.utils._python_dispatch import TorchDispatchMode

import electra_fast.kernels
from electra_fast.hardware.kernel_check import excess
from electra_fast.kernels import (
    bias_gelu,
    discriminator_head,
    embedding_norm,
    launchers,
    matmul_gelu,
    partial_sums,
    residual_norm,
)
from electra_fast.ops.operations import use_choices, use_impl

# Allowed excess over the reference's error: this factor, and a few last places of fp32 relative to the largest value.
ALLOWED = 1.5
FP32_ROUNDING = 4e-7
# Products on tensor cores; some kernels have none for fp32 factors on a GPU.
WITH_PRODUCTS = {"self_attention", "attention", "feed_forward", "gated_feed_forward", "rotary_qkv"}


def rows():
    """Returns the first sizes of each operation in the fast tests."""
    for name, entry in CASES.items():
        for number, row in enumerate(entry.tested):
            marks = pytest.mark.slow if number else ()
            yield pytest.param(name, *row[:1], row[1:], id=f"{name}-{number}", marks=marks)


def call_of(name, dtype, sizes):
    dtype = BF16 if DEVICE == "cuda" and dtype == FP32 and name in WITH_PRODUCTS else dtype
    return CASES[name].call(torch.device(DEVICE), dtype, *sizes)


def by_kernel(call, kernel="kernel"):
    return use_choices({"*": "kernel", call.key: kernel})


@pytest.fixture
def few_programs(monkeypatch):
    """Limits the programs, so that each has several tiles."""
    for module in pkgutil.iter_modules(electra_fast.kernels.__path__):
        loaded = importlib.import_module(f"electra_fast.kernels.{module.name}")
        if hasattr(loaded, "resident_programs") and module.name != "launch":
            monkeypatch.setattr(loaded, "resident_programs", lambda *_: 3)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("name", "dtype", "sizes"), [*rows()])
def test_equals_reference(name, dtype, sizes):
    """Compares outputs and every gradient, relative to the reference in fp64."""
    call = call_of(name, dtype, sizes)
    with use_impl("reference"):
        truth = call.outcome(torch.float64)
        eager = call.outcome()
    assert call.kernels
    for kernel in call.kernels:
        with by_kernel(call, kernel):
            assert excess(call.outcome(), eager, truth, ALLOWED, FP32_ROUNDING) <= 1, kernel


def strided(x):
    """Returns matrices in column order, and every other element of ids; other vectors are parameters."""
    if not isinstance(x, torch.Tensor) or x.dim() not in (1, 2):
        return x
    if x.dim() == 2:
        return x.T.contiguous().T
    return x if x.is_floating_point() or x.numel() < 4 else torch.stack((x, x), 1)[:, 0]  # a key has three numbers


# The attention sublayer has several of torch's products, whose order of sums depends on the layout.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("linear", "attention")])
def test_results_do_not_depend_on_strides_and_repeat_bitwise(name, monkeypatch):
    dtype, *sizes = CASES[name].tested[0]
    call = call_of(name, dtype, sizes)
    for kernel in call.kernels:
        with by_kernel(call, kernel), monkeypatch.context() as patch:
            expected = call.outcome()
            assert_same_bits(call.outcome(), expected)
            for launcher, launch in vars(launchers).items():
                # These work in place, or on outputs of kernels.
                if callable(launch) and launcher not in ("rotate_qkv_", "partial_sums"):
                    end = 3 if launcher == "embedding_norm" else None  # its tables follow, which are parameters

                    def launch_strided(*args, launch=launch, end=end):
                        return launch(*map(strided, args[:end]), *(args[end:] if end else ()))

                    patch.setattr(launchers, launcher, launch_strided)
            call._upstream = [strided(x) for x in call._upstream]
            assert_same_bits(call.outcome(), expected)


class Operators(TorchDispatchMode):
    """Records the calls of our operators."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "electra_fast":
            copies = tuple(x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args)
            self.calls[function] = copies, kwargs or {}
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "linear"])
def test_is_registered(name):
    """Checks the schema of each operator, forward and backward, and the shapes declared to torch.compile."""
    dtype, *sizes = CASES[name].tested[0]
    call = call_of(name, dtype, sizes)
    for kernel in call.kernels:
        with by_kernel(call, kernel), Operators() as operators:
            call.run()
        assert operators.calls
        for operator, (args, kwargs) in operators.calls.items():
            torch.library.opcheck(operator, args, kwargs, test_utils=("test_schema", "test_faketensor"))


NORM = {
    "_residual_norm_forward_kernel": residual_norm.FORWARD_PROGRAMS_PER_SM,
    "_residual_norm_backward_kernel": residual_norm.BACKWARD_PROGRAMS_PER_SM,
}
LOGIT_PROGRAMS = discriminator_head.BACKWARD_PROGRAMS_PER_SM
LOGIT = {f"_gelu_logit_{which}_kernel": LOGIT_PROGRAMS for which in ("forward", "backward")}
SHORT = {f"_short_attention_{which}_kernel": 2 for which in ("forward", "backward")}
BLOCKED = {f"_blocked_attention_{which}_kernel": 2 for which in ("forward", "query_gradient", "key_gradient")}


def programs_of_matmul_gelu(code, width, kernel, gated):
    """Returns the number of programs that fit according to the launcher."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(electra_fast.kernels.launch, "card", lambda _: card_of_target(code.target))
        return matmul_gelu.tiling(zeros(1, width, dtype=BF16), gated, kernel == "pipelined")[1]


GELU = dict.fromkeys(("_matmul_gelu_forward_kernel", "_matmul_gelu_backward_kernel"), programs_of_matmul_gelu)


NARROW = dict.fromkeys(
    ("_narrow_feed_forward_forward_kernel", "_input_gradient_kernel", "_weight_gradient_kernel"),
    lambda code: 8 // code.num_warps,
) | {"_partial_sums_kernel": 3}
# An operation, kernel, target and sizes, with the kernels and the programs of each that must fit into a
# multiprocessor; with everything that needs registers: every operand, dropout, the largest row and head.
COMPILED = [
    ("dropout", "kernel", 90, (32, 256, 0.1), {"_dropout_kernel": 8}),
    ("residual_norm", "kernel", 90, (32, 16, 1024, 0.1), NORM),
    ("add_norm", "kernel", 90, (32, 16, 1024, True, 0.1), NORM),
    (
        *("embedding_norm", "kernel", 80, (32, 128, 300, 128, 0.1)),
        {
            "_embedding_norm_forward_kernel": embedding_norm.FORWARD_PROGRAMS_PER_SM,
            "_embedding_norm_backward_kernel": embedding_norm.BACKWARD_PROGRAMS_PER_SM,
            "_sum_by_position_kernel": 2,
        },
    ),
    (
        *("bias_gelu", "kernel", 90, (32, 16, 3072, True)),
        {f"_bias_gelu_{which}_kernel": bias_gelu.PROGRAMS_PER_SM for which in ("forward", "backward")},
    ),
    (
        *("geglu", "kernel", 90, (32, 16, 3072)),
        {f"_geglu_{which}_kernel": bias_gelu.PROGRAMS_PER_SM for which in ("forward", "backward")},
    ),
    ("rotary_qkv", "kernel", 90, (32, 16, 3, 64), {"_rotary_kernel": 8}),
    ("corrupt", "kernel", 90, (2, 128, 20), {"_corrupt_kernel": 8}),
    *(("slot_states", "kernel", target, (2, 128, 20, 256), {"_slot_gradient_kernel": 4}) for target in (80, 90)),
    ("replaced_logits", "kernel", 90, (64, 256, False), LOGIT),
    ("replaced_logits", "kernel", 80, (64, 768, True), LOGIT),
    ("token_logits", "kernel", 90, (64, 256, True), LOGIT),
    (
        *("discriminator_loss", "kernel", 90, (64,)),
        {"_loss_forward_kernel": 5, "_loss_sums_kernel": 1, "_loss_backward_kernel": 5},
    ),
    ("sample_alias", "kernel", 90, (64, 96), {"_sample_alias_kernel": 8}),
    ("self_attention", "kernel", 90, (3, 128, 4, 64, True, False, 0, 0.1), SHORT),
    ("self_attention", "kernel", 90, (3, 128, 4, 64, False, True, 0, 0.1), SHORT),
    *(("self_attention", "kernel", target, (3, 512, 4, 64, not is_rotary, is_rotary, 0, 0.1), BLOCKED)
      for target in (80, 89, 90, 100, 120) for is_rotary in (False, True)),
    *(("self_attention", "kernel", target, (3, 512, 4, 64, True, False, 0, 0.0), BLOCKED) for target in (80, 90)),
    ("feed_forward", "narrow", 90, (128, 64, 256, 0.1), NARROW),
    ("gated_feed_forward", "narrow", 90, (128, 64, 176, True, 0.1), NARROW),
    *(("feed_forward", kernel, target, (128, *sizes, 0.0), GELU) for kernel, target, *sizes in
      (("fused", 80, 256, 1024), ("fused", 89, 256, 1024), ("fused", 90, 256, 1024), ("pipelined", 90, 256, 1024),
       ("pipelined", 100, 256, 1024), ("fused", 90, 64, 256), ("fused", 89, 128, 512), ("fused", "gfx942", 256, 1024))),
    *(("gated_feed_forward", "fused", target, (128, *sizes, False, 0.0), GELU) for target, *sizes in
      ((90, 256, 704), (89, 256, 704), (80, 128, 352))),
    ("gated_feed_forward", "pipelined", 90, (128, 256, 704, False, 0.0), GELU),
]  # fmt: skip
# Largest spills in bytes per thread; the gradient of x in the gated narrow kernel spills only with Triton 3.6.
SPILLED = {("embedding_norm", "kernel"): 8, ("gated_feed_forward", "narrow"): 104}
WITHOUT_TENSOR_CORES = {"_partial_sums_kernel", *NORM}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernel", "target", "sizes", "programs"),
    COMPILED,
    ids=[f"{case[:2]} {case[2]}" for case in COMPILED],
)
def test_compiles_ahead_of_time(name, kernel, target, sizes, programs):
    """The code has no spills, and the number of programs that the launcher assumes fits."""
    call = CASES[name].call(torch.device(DEVICE), BF16, *sizes)
    with by_kernel(call, kernel):
        codes = compile_launches(call.run, target, tuple(programs))
    assert codes.keys() == programs.keys()
    for kernel_name, code in codes.items():
        fitting = programs[kernel_name]
        if fitting is programs_of_matmul_gelu:
            fitting = fitting(code, sizes[1], kernel, name == "gated_feed_forward")
        code.check(fitting(code) if callable(fitting) else fitting, SPILLED.get((name, kernel), 0))
        if name in WITH_PRODUCTS - {"rotary_qkv"} or kernel_name == "_sum_by_position_kernel":
            assert code.tensor_core_instructions > 0 or kernel_name in WITHOUT_TENSOR_CORES


def test_sums_of_rows():
    """More rows than in one iteration, fewer, and none; columns that end within a block, and wider blocks."""
    random = torch.Generator().manual_seed(0)
    for shapes in (((600, 70), (3, 96)), ((1, 5), (257, 64)), ((0, 32), (2, 1)), ((130, 9000), (2, 1))):
        matrices = [torch.randn(shape, generator=random).to(DEVICE) for shape in shapes]
        exact = torch.cat([x.double().sum(0) for x in matrices])
        torch.testing.assert_close(partial_sums.partial_sums(*matrices).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "width", "expected"), [(75, 64, False), (80, 256, True), (80, 257, False), ("gfx942", 256, True)]
)
def test_gelu_fusion_is_profitable_with_tensor_cores(monkeypatch, target, width, expected):
    monkeypatch.setattr(electra_fast.kernels.launch, "card", lambda _: card_of_target(target))
    assert matmul_gelu.is_profitable(zeros(1, width)) == expected


def test_fused_gelu_reads_fp32_product():
    """It reads the fp32 product, and the bias gradient sums fp32 values; eager PyTorch's errors would hide both."""
    call = CASES["bias_gelu"].call(torch.device(DEVICE), FP16, 100, 64, 96, True)
    x, weight, bias = (tensor.detach() for tensor in call.args)
    weight, next_weight = weight.half(), weight.half().T.contiguous()
    h, y = matmul_gelu.matmul_gelu(x, weight, bias)
    exact_h = x.double() @ weight.double().T + bias.double()
    exact = torch.nn.functional.gelu(exact_h)
    assert ((y - exact).abs() <= 0.55 * torch.finfo(y.dtype).eps * exact.abs() + 1e-5).all()
    leaf = h.double().requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.gelu(leaf) @ next_weight.double().T, leaf, x.double())
    partial = matmul_gelu.matmul_gelu_backward(x, next_weight, h)[1]
    torch.testing.assert_close(partial.sum(0).double(), expected.sum(0), rtol=0, atol=1e-4)
