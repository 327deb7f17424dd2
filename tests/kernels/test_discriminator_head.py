"""The discriminator's head and loss kernels: errors against fp64 no larger than torch's in the same precision."""

import math

import pytest
import torch
import torch.nn.functional as F
from ahead_of_time import MAX_SHARED_BYTES, compile_kernel

from electra_fast.config.config import Config
from electra_fast.kernels import discriminator_head as head
from electra_fast.model.heads import DiscriminatorHead
from electra_fast.ops import dispatch
from electra_fast.ops import operations as ops

# Triton 3.6's interpreter converts arrays in a way that NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = (64, 256, 768, 1024)


def make_head(num_tokens, width, dtype=torch.float32, seed=0):
    """Activations and parameters large enough that no gradient is lost in rounding."""
    random = torch.Generator().manual_seed(seed)
    h_TD = (torch.randn(num_tokens, width, generator=random) * 2).to(dtype)
    bias_D, weight_1D = torch.randn(width, generator=random), torch.randn(1, width, generator=random) / width**0.5
    return [x.to(DEVICE).requires_grad_() for x in (h_TD, bias_D, weight_1D, torch.tensor([0.3]))]


def eager_logits(h_TD, bias_D, weight_1D, bias_1):
    """As the reference computes them, from where the dense layer's product is known."""
    return ops.token_logits(F.gelu(h_TD + bias_D.to(h_TD.dtype)), weight_1D, bias_1)


def results(compute, arguments, upstream_T):
    """Logits and the four gradients, in fp64."""
    leaves = [x.detach().clone().requires_grad_() for x in arguments]
    logits_T = compute(*leaves)
    logits_T.backward(upstream_T.to(logits_T.dtype))
    for leaf in leaves:
        assert leaf.grad.dtype == leaf.dtype and leaf.grad.shape == leaf.shape
    return [x.double() for x in (logits_T.detach(), *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 64), (507, 64), (255, 256), (37, 768), (33, 1024), (70, 100)])
def test_head_is_no_worse_than_eager(num_tokens, width, dtype):
    arguments = make_head(num_tokens, width, dtype)
    upstream_T = torch.randn(num_tokens, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    exact = [x.detach().double() for x in arguments]
    truth = results(lambda h, b, w, c: F.linear(F.gelu(h + b), w, c).squeeze(-1), exact, upstream_T)
    eager = results(eager_logits, arguments, upstream_T)
    kernel = results(head.gelu_logit, arguments, upstream_T)
    for name, true, theirs, ours in zip(
        ("logits", "h", "bias", "weight", "constant"), truth, eager, kernel, strict=True
    ):
        scale = true.abs().max().item()
        # dh is rounded to the activations' dtype, all else is fp32 whatever that is.
        rounding = torch.finfo(dtype if name == "h" else torch.float32).eps
        error = (ours - true).abs().max().item()
        assert error <= (theirs - true).abs().max().item() + 4 * rounding * scale, name


@pytest.mark.parametrize("width", [64, 256, 768])
def test_logits_of_bf16_activations_are_fp32(width):
    """They equal the exact sum to fp32's rounding and none tie; in bf16 only a few hundred would be distinct."""
    h_TD, bias_D, weight_1D, constant = make_head(2000, width, torch.bfloat16)
    weight_1D = weight_1D.detach() * 1e-2
    h, bias, weight = (x.detach().double() for x in (h_TD, bias_D, weight_1D))
    terms_TD = F.gelu(h + bias) * weight
    logits_T = head.gelu_logit(h_TD, bias_D, weight_1D, constant)
    bound_T = width * torch.finfo(torch.float32).eps * (terms_TD.abs().sum(1) + 0.3)
    assert ((logits_T - terms_TD.sum(1) - constant.double()).abs() <= bound_T).all()
    assert logits_T.unique().numel() > 1950


def test_gelu_over_its_range():
    """Value and derivative from -12 to 12 and far outside equal fp64 to fp32's rounding, like torch's in fp32."""
    x_T = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([-1e4, -50.0, 50.0, 1e4]))).to(DEVICE)
    zero, one = torch.zeros(1, device=DEVICE), torch.ones(1, 1, device=DEVICE)

    def value_and_derivative(compute, x_T):
        h_T1 = x_T[:, None].clone().requires_grad_()
        y_T = compute(h_T1)
        y_T.sum().backward()
        return y_T.detach().double().flatten(), h_T1.grad.double().flatten()

    truth = value_and_derivative(F.gelu, x_T.double())
    theirs = value_and_derivative(F.gelu, x_T)
    ours = value_and_derivative(lambda h: head.gelu_logit(h, zero, one, zero), x_T)
    for true, eager, found in zip(truth, theirs, ours, strict=True):
        bound = true.abs().clamp(min=1)
        assert ((found - true).abs() / bound).max() <= 2e-7
        assert ((found - true).abs() / bound).max() <= ((eager - true).abs() / bound).max() + 1e-7
    assert ours[0][-4:].tolist() == [0, 0, 50, 1e4]


def test_head_of_no_tokens():
    leaves = make_head(0, 64)
    head.gelu_logit(*leaves).sum().backward()
    assert all((leaf.grad == 0).all() for leaf in leaves)


def test_head_of_strided_activations():
    """Columns of a wider buffer, and an expanded upstream gradient."""
    wide, bias, weight, constant = make_head(9, 128)
    halves = []
    for h in (wide[:, :64], wide[:, :64].contiguous()):
        leaves = [x.detach().clone().requires_grad_() for x in (bias[:64], weight[:, :64], constant)]
        h = h.detach().requires_grad_()
        head.gelu_logit(h, *leaves).sum().backward()
        halves.append([h.grad, *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*halves, strict=True))


def make_loss(num_tokens, case="mixed", dtype=torch.float32):
    random = torch.Generator().manual_seed(num_tokens)
    logits_T = torch.randn(num_tokens, generator=random) * 4
    replaced_T, valid_T = (torch.rand(num_tokens, generator=random) < p for p in (0.2, 0.8))
    if case == "extreme":
        logits_T = logits_T.sign() * 100
    if case == "small":
        logits_T = logits_T * 1e-4
    if case in ("all valid", "none valid"):
        valid_T.fill_(case == "all valid")
    if case == "all replaced":
        replaced_T.fill_(True)
    return [x.to(DEVICE) for x in (logits_T.to(dtype), replaced_T, valid_T)]


def loss_results(compute, arguments, scale):
    logits_T = arguments[0].detach().clone().requires_grad_()
    loss, totals = compute(logits_T, *arguments[1:])
    assert not totals.requires_grad and loss.dtype == torch.float32
    (loss * scale).backward()
    return loss.detach().double(), logits_T.grad, totals


CASES = ("mixed", "extreme", "small", "all valid", "none valid", "all replaced")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_tokens", [1, 255, 507, 3000])
def test_loss_equals_truth(num_tokens, case):
    arguments, scale = make_loss(num_tokens, case), 50 / num_tokens
    z, y, valid = (x.double() for x in arguments)
    losses = (z.clamp(min=0) - z * y + torch.log1p(torch.exp(-z.abs()))) * valid
    gradient = scale * (torch.sigmoid(z) - y) * valid
    loss, dlogits_T, totals = loss_results(head.discriminator_loss, arguments, scale)
    eager, _, expected_totals = loss_results(ops.discriminator_loss_reference, arguments, scale)
    assert totals.dtype == expected_totals.dtype and torch.equal(totals, expected_totals)
    rounding = 4 * torch.finfo(torch.float32).eps
    assert (loss - losses.sum()).abs() <= (eager - losses.sum()).abs() + rounding * losses.sum()
    # Relative for each token: sigmoid - y must not cancel.
    assert ((dlogits_T - gradient).abs() <= 1e-6 * gradient.abs() * (1 + z.abs()) + 1e-37).all()


def test_loss_of_single_tokens():
    """Relative precision of single tokens' losses, from 0 to where they underflow."""
    z_T = torch.cat((torch.linspace(-80, 80, 33), torch.linspace(-1, 1, 7))).to(DEVICE)
    for z in z_T:
        no = torch.zeros(1, dtype=torch.bool, device=DEVICE)
        loss, _ = head.discriminator_loss(z[None], no, ~no)
        assert loss.item() == pytest.approx(F.softplus(z.double()).item(), rel=1e-5 if z < -10 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loss_of_half_precision_logits(dtype):
    arguments = make_loss(507, dtype=dtype)
    loss, dlogits_T, totals = loss_results(head.discriminator_loss, arguments, 1.0)
    eager, expected_dlogits_T, expected_totals = loss_results(ops.discriminator_loss_reference, arguments, 1.0)
    assert loss.item() == pytest.approx(eager.item(), rel=1e-6) and torch.equal(totals, expected_totals)
    assert dlogits_T.dtype == dtype
    torch.testing.assert_close(dlogits_T, expected_dlogits_T, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_loss_of_more_programs_than_one_tile():
    """The second reduction takes several iterations; totals stay exact."""
    arguments = make_loss(head.SUM_ROWS * head.LOSS_TOKENS + 5)
    loss, _, totals = loss_results(head.discriminator_loss, arguments, 1.0)
    eager, _, expected_totals = loss_results(ops.discriminator_loss_reference, arguments, 1.0)
    assert loss.item() == pytest.approx(eager.item(), rel=1e-6) and torch.equal(totals, expected_totals)


def test_loss_of_no_tokens_and_of_nan():
    loss, totals = head.discriminator_loss(*make_loss(0))
    assert loss == 0 and totals.tolist() == [0] * len(ops.DISCRIMINATOR_TOTALS)
    logits_T, replaced_T, valid_T = make_loss(300)
    logits_T[7] = math.nan
    assert head.discriminator_loss(logits_T, replaced_T, valid_T)[0].isnan()


def test_is_reproducible():
    arguments, upstream_T = make_head(200, 64, torch.bfloat16), torch.randn(200).to(DEVICE)
    first, second = (results(head.gelu_logit, arguments, upstream_T) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    first, second = (loss_results(head.discriminator_loss, make_loss(3000), 0.1) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # opcheck's own
def test_custom_ops():
    arguments = make_head(9, 64)
    torch.library.opcheck(head.gelu_logit, tuple(arguments))
    torch.library.opcheck(head.gelu_logit_backward, (torch.randn(9).to(DEVICE), *(x.detach() for x in arguments[:3])))
    logits_T, replaced_T, valid_T = make_loss(20)
    torch.library.opcheck(head.discriminator_loss, (logits_T.requires_grad_(), replaced_T, valid_T))
    one = torch.ones((), device=DEVICE)
    torch.library.opcheck(head.discriminator_loss_backward, (one, logits_T.detach(), replaced_T, valid_T))


def test_module_by_kernels_equals_module_by_references():
    shape = Config.preset("tiny", "google").model
    random = torch.Generator().manual_seed(0)
    module = DiscriminatorHead(shape).to(DEVICE)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    x_TD = torch.randn(40, shape.hidden_size, generator=random).to(DEVICE)
    _, replaced_T, valid_T = make_loss(40)
    found = []
    for impl in ("reference", "kernel"):
        module.zero_grad()
        with dispatch.use_impl(impl):
            logits_T = module(x_TD)
            loss, totals = ops.discriminator_loss(logits_T, replaced_T, valid_T)
        loss.backward()
        gradients = [p.grad.clone() for p in module.parameters()]
        found.append([logits_T.detach(), loss.detach(), totals, *gradients])
    for eager, kernel in zip(*found, strict=True):
        torch.testing.assert_close(kernel, eager, rtol=1e-5, atol=1e-5)


HEAD_TYPES = {"bias_ptr": "*fp32!", "weight_ptr": "*fp32!", "num_tokens": "i32"}
FORWARD_TYPES = HEAD_TYPES | {"classifier_bias_ptr": "*fp32!", "logits_ptr": "*fp32!"}
BACKWARD_TYPES = HEAD_TYPES | {"dlogits_ptr": "*fp32!", "partial_ptr": "*fp32!"}
BACKWARD_TYPES |= {"rows_per_program": "i32", "partial_stride": "i32"}


def compile_both(kernel, types, constants, most_registers, num_warps=head.NUM_WARPS):
    for capability in (90, 80):
        code = compile_kernel(
            "discriminator_head", kernel, types, constants, capability=capability, num_warps=num_warps
        )
        assert code.spilled_bytes == 0 and code.registers <= most_registers
        assert code.shared_bytes <= min(16 * 1024, MAX_SHARED_BYTES[capability])


# The gate of the backward pass keeps five programs of 128 threads on a multiprocessor, in fp32 four.
@pytest.mark.parametrize(("width", "dtype"), [*((width, "bf16") for width in WIDTHS), (256, "fp32")])
def test_head_compiles_ahead_of_time(width, dtype):
    columns = head.block_columns(width)
    shape = {"D": width, "COLUMNS": columns}
    types = FORWARD_TYPES | {"h_ptr": f"*{dtype}!"}
    compile_both("_gelu_logit_forward_kernel", types, shape | {"ROWS": head.FORWARD_TILE // columns}, 96)
    types = BACKWARD_TYPES | {"h_ptr": f"*{dtype}!", "dh_ptr": f"*{dtype}!"}
    shape["ROWS"] = head.BACKWARD_TILE // columns
    compile_both("_gelu_logit_backward_kernel", types, shape, 128 if dtype == "fp32" else 102)


def test_sums_of_the_loss_compile_ahead_of_time():
    types = {"partial_ptr": "*fp64!", "loss_ptr": "*fp32!", "totals_ptr": "*i64!", "num_partials": "i32"}
    constants = {"ROWS": head.SUM_ROWS, "NUM_TOTALS": head.NUM_TOTALS, "COLUMNS": head.LOSS_COLUMNS}
    compile_both("_loss_sums_kernel", types, constants, 128, head.SUM_WARPS)


def test_loss_compiles_ahead_of_time():
    types = {"logits_ptr": "*fp32!", "replaced_ptr": "*i1!", "valid_ptr": "*i1!", "num_tokens": "i32"}
    constants = {"TOKENS": head.LOSS_TOKENS}
    forward = types | {"partial_ptr": "*fp64!"}
    compile_both("_loss_forward_kernel", forward, constants | {"COLUMNS": head.LOSS_COLUMNS}, 64)
    backward = types | {"dloss_ptr": "*fp32!", "dlogits_ptr": "*fp32!"}
    compile_both("_loss_backward_kernel", backward, constants, 64)
