"""Rotary queries and keys equal their reference with every gradient, whatever the gradients' strides, and compile."""

import pytest
import torch
from comparison import DEVICE, DOT_DTYPES, assert_no_worse, assert_same_bits
from lib.ahead_of_time import compile_launches

from electra_fast.kernels import rotary as kernels
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import use_impl

NUM_HEADS = 3


def random_inputs(num_tokens, width, head_dim, dtype):
    """x, weight, angles, and the gradients of queries, keys and values; fp64, rounded to the dtype."""
    random = torch.Generator().manual_seed(num_tokens)
    heads = (num_tokens, NUM_HEADS, head_dim)
    shapes = [(num_tokens, width), (3 * NUM_HEADS * head_dim, width), heads, heads, heads]
    x, weight, *dqkv = (torch.randn(shape, generator=random).to(dtype).double().to(DEVICE) for shape in shapes)
    angles = ops.rotary_angles(torch.arange(num_tokens, device=DEVICE) * 7 % 50, head_dim, 1e4)
    return x, weight * width**-0.5, angles, dqkv


def outcome(impl, x, weight, angles, dqkv, dtype):
    """Queries, keys, values, and the gradients of x and the weight, which is fp32 beside 16 bits."""
    x, weight = x.to(dtype).requires_grad_(), weight.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    with use_impl(impl):
        qkv = ops.rotary_qkv(x, weight, *(angle.to(weight.dtype) for angle in angles), NUM_HEADS)
        gradients = torch.autograd.grad(qkv, (x, weight), [each.to(dtype) for each in dqkv])
    return [each.detach() for each in (*qkv, *gradients)]


# More vectors than one program has; a head that is no power of two.
@pytest.mark.parametrize(
    ("num_tokens", "width", "head_dim", "dtype"),
    [(50, 40, 32, DOT_DTYPES[0]), (7, 24, 12, DOT_DTYPES[1])],
)
def test_equals_reference(num_tokens, width, head_dim, dtype):
    inputs = random_inputs(num_tokens, width, head_dim, dtype)
    found, eager = (outcome(impl, *inputs, dtype) for impl in ("kernel", "reference"))
    assert_no_worse(found, eager, outcome("reference", *inputs, torch.float64))


def test_strides_do_not_matter():
    """Gradients as attention backends return them: by row and head, packed, and one number for all."""
    x, weight, angles, dqkv = random_inputs(24, 16, 8, torch.float32)
    dqkv[1] = dqkv[1][:, :1, :1].expand(dqkv[1].shape)
    strided = [dqkv[0].permute(1, 2, 0).contiguous().permute(2, 0, 1), dqkv[1]]
    strided += [torch.stack(dqkv, 1)[:, 2]]
    found = outcome("kernel", x, weight, angles, strided, torch.float32)
    expected = [each.contiguous() for each in dqkv]
    assert_same_bits(found, outcome("kernel", x, weight, angles, expected, torch.float32))


def test_registered_for_compilation():
    x, weight, angles, dqkv = random_inputs(5, 16, 8, torch.float32)
    qkv, dqkv = (x @ weight.T).float(), [each.float() for each in dqkv]
    shapes = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.rotate_qkv_, (qkv, *angles, NUM_HEADS), test_utils=shapes)
    torch.library.opcheck(kernels.rotary_backward, (*dqkv, *angles), test_utils=shapes)


def test_compiles_ahead_of_time():
    _, _, angles, dqkv = random_inputs(32, 16, 64, torch.float32)
    dqkv = [each.bfloat16() for each in dqkv]

    def launch():
        qkv = kernels.rotary_backward(*dqkv, *angles)
        kernels.rotate_qkv_(qkv, *angles, NUM_HEADS)

    (code,) = compile_launches(launch).values()
    code.check(programs_per_sm=8)
