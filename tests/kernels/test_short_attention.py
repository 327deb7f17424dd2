"""Attention of short rows equals its reference with every gradient, and compiles for supported GPUs."""

import itertools

import pytest
import torch
from ahead_of_time import MAX_SHARED_BYTES, compile_kernels
from test_bias_gelu import assert_no_worse, output_and_gradients

from electra_fast.kernels import short_attention as kernels
from electra_fast.kernels.dropout import threshold
from electra_fast.model.attention import MAX_SHORT_HEAD, MAX_SHORT_ROW, short_attention_reference
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's bf16 products are wrong; on a GPU the kernels have 16-bit activations only.
DTYPES = [torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32, torch.float16]
DROPOUT = Dropout(0.1, torch.tensor([2**40 + 7, 12, 770], device=DEVICE), 5)
# Row length, heads, head dimension, bias, rotary positions, window, dropout.
SETTINGS = {
    "small": (128, 2, 64, True, False, None, Dropout()),
    "small, dropout": (128, 2, 64, True, False, None, DROPOUT),
    "generator": (128, 1, 64, True, False, None, DROPOUT),
    "modern": (128, 2, 64, False, True, None, Dropout()),
    "modern, dropout, local": (128, 2, 32, False, True, 9, DROPOUT),
    "tiny": (32, 2, 32, True, False, None, DROPOUT),
    "rotary with a bias": (20, 3, 16, True, True, None, DROPOUT),
    "one part": (64, 2, 16, True, False, None, DROPOUT),
    "odd": (17, 3, 16, True, False, 4, DROPOUT),
    "longer than a part": (100, 2, 32, True, False, None, DROPOUT),
    "heads that begin within a quad": (70, 2, 24, True, True, None, DROPOUT),
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETTINGS)
def test_equals_reference(name, dtype):
    reference, kernel, inputs, dout = functions(name)
    truth = output_and_gradients(reference, dout, *inputs)
    inputs = [inputs[0].to(dtype), *(x.float() for x in inputs[1:])]
    eager = output_and_gradients(reference, dout, *inputs)
    assert_no_worse(output_and_gradients(kernel, dout, *inputs), eager, truth)


def test_a_row_depends_on_nothing_else():
    """Neither on the other rows, nor on its place in a micro-batch, given the key of its first token."""
    product, bias, ids, _, dout = random_inputs(32, 2, 16, True, False)
    product, bias, dout = product.to(DTYPES[1]), bias.float(), dout.to(DTYPES[1])
    options = (None, None, 2, None)
    whole = kernels.short_attention(product, bias, ids, *options, *DROPOUT.arguments)
    key = DROPOUT.key + torch.tensor([0, 0, 64], device=DEVICE)
    alone = kernels.short_attention(product[64:], bias, ids[2:], *options, 0.1, key, 5)
    assert torch.equal(alone[0], whole[0][64:]) and torch.equal(alone[1], whole[1][:, 64:])
    given = (dout, product, bias, ids, None, None, whole[1], 2, None)
    gradients = kernels.short_attention_backward(*given, *DROPOUT.arguments)
    own = (dout[64:], product[64:], bias, ids[2:], None, None, alone[1], 2, None)
    assert torch.equal(kernels.short_attention_backward(*own, 0.1, key, 5)[0], gradients[0][64:])


def test_past_the_end_of_a_row_nothing_counts():
    """Neither positions up to the block's end nor the neighbouring row, whatever they hold."""
    _, kernel, (product, bias), dout = functions("rotary with a bias")
    product, bias, dout = product.to(DTYPES[1]), bias.float(), dout.to(DTYPES[1])
    expected = output_and_gradients(kernel, dout, product, bias)
    product[40:], dout[40:] = 1e4, torch.nan
    found = output_and_gradients(kernel, dout, product, bias)
    assert all(torch.equal(a[:40], b[:40]) for a, b in zip(found[:2], expected[:2], strict=True))


def test_strides_do_not_matter_and_bits_repeat():
    _, kernel, (product, bias), dout = functions("tiny")
    product, bias, dout = product.to(DTYPES[1]), bias.float(), dout.to(DTYPES[1])
    expected = output_and_gradients(kernel, dout, product, bias)
    found = output_and_gradients(kernel, dout.T.contiguous().T, product.T.contiguous().T, bias)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_refuses_what_it_has_no_kernel_for():
    assert (MAX_SHORT_ROW, MAX_SHORT_HEAD) == (kernels.MAX_LENGTH, kernels.MAX_HEAD_DIM)
    options = (None, None, 1, None, 0.0, None, 0)
    for length, width in ((129, 16), (16, 66)):
        ids = torch.ones(1, length, dtype=torch.int32, device=DEVICE)
        with pytest.raises(ValueError, match=f"rows of {length} tokens and heads of {width}"):
            kernels.short_attention(torch.zeros(length, 3 * width, device=DEVICE), None, ids, *options)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch 2.15's own opcheck
def test_registered_for_autograd_and_compilation():
    product, bias, ids, angles, dout = random_inputs(16, 2, 16, True, True)
    product, bias, dout = product.half().requires_grad_(), bias.float().requires_grad_(), dout.half()
    options = (2, None, *DROPOUT.arguments)
    torch.library.opcheck(kernels.short_attention, (product, bias, ids, *angles, *options))
    product, bias, shapes = product.detach(), bias.detach(), ("test_schema", "test_faketensor")
    for given in ((bias, ids, *angles), (None, ids, None, None)):
        lse = kernels.short_attention(product, *given, *options)[1]
        arguments = (dout, product, *given, lse, *options)
        torch.library.opcheck(kernels.short_attention_backward, arguments, test_utils=shapes)


def test_compiles_ahead_of_time():
    types = {name: "*bf16!" for name in ("qkv_ptr", "out_ptr", "dout_ptr", "dqkv_ptr")}
    types |= {name: "*fp32!" for name in ("bias_ptr", "cos_ptr", "sin_ptr", "lse_ptr", "partial_ptr")}
    types |= {"ids_ptr": "*i32!", "key_ptr": "*i64!", "num_rows": "i32!", "call_index": "i32"}
    no_rotary, no_bias = {"cos_ptr": None, "sin_ptr": None}, {"bias_ptr": None}
    of_small = kernels.blocks(128) | {"NUM_HEADS": 4, "WIDTH": 64, "WINDOW": None, "PRECISION": "tf32"}
    requests = []
    for absent, probability in itertools.product((no_rotary, no_bias), (0.0, 0.1)):
        constants = (
            of_small | absent | {"THRESHOLD": threshold(probability)} | ({} if probability else {"key_ptr": None})
        )
        no_sums = {"partial_ptr": None} if absent is no_bias else {}
        for name, more in (("forward", {}), ("backward", no_sums)):
            call = (f"_short_attention_{name}_kernel", types, constants | more)
            requests.append(("short_attention", *call, 90, kernels.NUM_WARPS, 3))
    for code in compile_kernels(requests):
        assert code.spilled_bytes == 0 and code.tensor_core_instructions > 0
        # Two programs per multiprocessor: registers are given in eights, and each program takes a kilobyte more.
        assert -(-code.registers // 8) * 8 * 32 * kernels.NUM_WARPS * 2 <= 65_536
        assert 2 * (code.shared_bytes + 1024) <= MAX_SHARED_BYTES[90] + 1024
