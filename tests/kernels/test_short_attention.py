"""Attention of short rows equals its reference with every gradient, and compiles for supported GPUs."""

import pytest
import torch
from comparison import (
    DEVICE,
    DOT_DTYPES,
    KEY,
    assert_no_worse,
    assert_same_bits,
    assert_strides_do_not_matter,
    output_and_gradients,
)
from lib.ahead_of_time import compile_launches

from electra_fast.kernels import short_attention as kernels
from electra_fast.model.attention import MAX_SHORT_HEAD, MAX_SHORT_ROW, short_attention_reference
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout

DROPOUT = Dropout(0.1, KEY, 5)
# Row length, heads, head dimension, bias, rotary positions, window, dropout.
SETTINGS = {
    "small": (128, 1, 64, True, False, None, DROPOUT),
    "modern": (128, 1, 64, False, True, None, Dropout()),
    "heads that begin within a quad": (70, 2, 24, True, True, 9, DROPOUT),
    "odd, local": (17, 3, 16, True, False, 4, DROPOUT),
    "one token": (1, 2, 16, True, False, None, Dropout()),
}


def segment_ids(num_rows, length):
    """One segment; several and padding; as many as tokens, or padding alone."""
    ids = torch.ones(num_rows, length, dtype=torch.int32)
    ids[1] = torch.arange(length) * 3 // length + 1
    ids[1, length - length // 5 :] = 0
    ids[2] = torch.arange(length) + 1 if length < 100 else 0
    return ids.to(DEVICE)


def random_inputs(length, num_heads, head_dim, has_bias, is_rotary):
    """The product and its bias (both fp64, rounded to fp16), ids, angles, and the gradient of the output."""
    random = torch.Generator().manual_seed(length + num_heads)
    num_tokens, width = 3 * length, num_heads * head_dim
    product, bias, dout = (
        (torch.randn(shape, generator=random) / 2).half().double().to(DEVICE)
        for shape in ((num_tokens, 3 * width), (3 * width,), (num_tokens, width))
    )
    angles = (None, None)
    if is_rotary:
        positions = torch.arange(length, device=DEVICE).repeat(3)
        angles = tuple(x.squeeze(1) for x in ops.rotary_angles(positions, head_dim, 1e4))
    return product, bias if has_bias else None, segment_ids(3, length), angles, dout


def functions(name):
    """Reference and kernel of a setting as functions of the product and, where there is one, its bias; their inputs."""
    length, num_heads, head_dim, has_bias, is_rotary, window, dropout = SETTINGS[name]
    product, bias, ids, angles, dout = random_inputs(length, num_heads, head_dim, has_bias, is_rotary)

    def reference(product, bias=None):
        exact = [None if x is None else x.to(torch.promote_types(product.dtype, torch.float32)) for x in angles]
        return short_attention_reference(product, bias, ids, *exact, num_heads, window, dropout)

    def kernel(product, bias=None):
        options = (num_heads, window, *dropout.arguments)
        return kernels.short_attention(product, bias, ids, *angles, *options)[0]

    return reference, kernel, [product] if bias is None else [product, bias], dout


@pytest.mark.parametrize(("name", "dtype"), [(name, DOT_DTYPES[i % 2]) for i, name in enumerate(SETTINGS)])
def test_equals_reference(name, dtype):
    reference, kernel, inputs, dout = functions(name)
    truth = output_and_gradients(reference, dout, inputs)
    inputs = [inputs[0].to(dtype), *(x.float() for x in inputs[1:])]
    eager = output_and_gradients(reference, dout, inputs)
    assert_no_worse(output_and_gradients(kernel, dout, inputs), eager, truth, factor=1.5)


def test_past_the_end_of_a_row_nothing_counts():
    """Neither positions up to the block's end nor the neighboring row, whatever they hold."""
    _, kernel, (product, bias), dout = functions("odd, local")
    product, bias, dout = product.to(DOT_DTYPES[1]), bias.float(), dout.to(DOT_DTYPES[1])
    expected = output_and_gradients(kernel, dout, (product, bias))
    product[34:], dout[34:] = 1e4, torch.nan
    found = output_and_gradients(kernel, dout, (product, bias))
    assert_same_bits([x[:34] for x in found[:2]], [x[:34] for x in expected[:2]])


def test_strides_do_not_matter():
    _, kernel, (product, bias), dout = functions("odd, local")
    inputs, dout = (product.to(DOT_DTYPES[1]), bias.float()), dout.to(DOT_DTYPES[1])
    assert_strides_do_not_matter(kernel, dout, inputs)


def test_refuses_what_it_has_no_kernel_for():
    assert (MAX_SHORT_ROW, MAX_SHORT_HEAD) == (kernels.MAX_LENGTH, kernels.MAX_HEAD_DIM)
    options = (None, None, 1, None, 0.0, None, 0)
    for length, width in ((129, 16), (16, 66)):
        ids = torch.ones(1, length, dtype=torch.int32, device=DEVICE)
        with pytest.raises(ValueError, match=f"rows of {length} tokens and heads of {width}"):
            kernels.short_attention(torch.zeros(length, 3 * width, device=DEVICE), None, ids, *options)


def test_registered_for_autograd_and_compilation():
    product, bias, ids, angles, dout = random_inputs(4, 1, 16, True, True)
    product, bias, dout = product.half().requires_grad_(), bias.float().requires_grad_(), dout.half()
    options = (1, None, *DROPOUT.arguments)
    torch.library.opcheck(kernels.short_attention, (product, bias, ids, *angles, *options))
    product, bias, shapes = product.detach(), bias.detach(), ("test_schema", "test_faketensor")
    for given in ((bias, ids, *angles), (None, ids, None, None)):
        lse = kernels.short_attention(product, *given, *options)[1]
        arguments = (dout, product, *given, lse, *options)
        torch.library.opcheck(kernels.short_attention_backward, arguments, test_utils=shapes)


@pytest.mark.parametrize("name", ["small", "modern"])
def test_compiles_ahead_of_time(name):
    """At the largest row and head, with what each architecture has and dropout, which takes the most registers."""
    length, _, head_dim, has_bias, is_rotary, window, _ = SETTINGS[name]
    product, bias, ids, angles, dout = random_inputs(length, 4, head_dim, has_bias, is_rotary)
    product, dout, bias = product.bfloat16(), dout.bfloat16(), None if bias is None else bias.float()
    options = (4, window, *DROPOUT.arguments)

    def launch():
        _, lse = kernels.short_attention(product, bias, ids, *angles, *options)
        kernels.short_attention_backward(dout, product, bias, ids, *angles, lse, *options)

    for code in compile_launches(launch).values():
        code.check(programs_per_sm=2)
        assert code.tensor_core_instructions > 0
