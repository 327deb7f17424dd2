"""The calls of operations that have kernels: the one table of `bench/kernels.py` and the tests.

The table has arguments of each operation for small and odd sizes to test, and large sizes to time. The check of a run
records the calls of the run's step instead. All are a `Call`, and `excess` measures their error.

Shapes: B rows, L row length, T tokens, M masked slots, S slots per row, V vocabulary, E embedding, D hidden, N heads,
H head dimension, F feed-forward.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from electra_fast.hardware.kernel_check import Call
from electra_fast.model import attention as attention_operations
from electra_fast.model.attention import AttentionMask
from electra_fast.ops import operations as ops
from electra_fast.ops.fused import SublayerWeights
from electra_fast.ops.operations import Dropout
from electra_fast.ops.sampling import alias_table

FP32 = torch.float32
FP16 = torch.float16
BF16 = torch.bfloat16
VOCAB_SIZE = 30_522
EPS = 1e-12
# Arguments of a call, and its sizes in the table.
Args = tuple[Any, ...]
Sizes = tuple[Any, ...]


class Arguments:
    """Random tensors for a call. Parameters are fp32, with values that the activations' dtype represents exactly."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(0)
        self.key = torch.tensor([2**40 + 7, 12, 77], device=device)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, generator=self.generator) * scale
        return x.to(self.device, self.dtype).requires_grad_()

    def weight(self, *shape: int, scale: float = 1.0) -> Tensor:
        """A parameter; a matrix is divided by the root of its inputs."""
        x = torch.randn(shape, generator=self.generator) * scale
        x = x * shape[-1] ** -0.5 if len(shape) > 1 else x
        return x.to(self.dtype).to(self.device, FP32).requires_grad_()

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator).to(self.device)

    def dropout(self, probability: float, call_index: int = 5) -> Dropout:
        return Dropout(probability, self.key, call_index)

    def segments(self, num_rows: int, length: int) -> Tensor:
        """Ids of segments: one per row; in the second of each three three and padding; in the third one per token."""
        ids_BL = torch.ones(num_rows, length, dtype=torch.int32)
        ids_BL[1::3] = torch.arange(length, dtype=torch.int32) * 3 // length + 1
        ids_BL[1::3, length - length // 5 :] = 0
        ids_BL[2::3] = torch.arange(length, dtype=torch.int32) + 1
        return ids_BL.to(self.device)


@dataclass(frozen=True)
class Entry:
    """An operation in the table: a function from sizes to arguments, and the sizes, to test each with a dtype."""

    arguments: Callable[..., Args]
    tested: tuple[Sizes, ...]
    timed: tuple[Sizes, ...]

    def call(self, device: torch.device, dtype: torch.dtype, *sizes: Any) -> Call:
        name = self.arguments.__name__
        function = getattr(attention_operations if name.endswith("attention") else ops, name)
        return Call(name, function, self.arguments(Arguments(device, dtype), *sizes), dtype=dtype)

    def label(self, sizes: Sizes) -> str:
        names = list(inspect.signature(self.arguments).parameters)[1:]
        return ", ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=False))


CASES: dict[str, Entry] = {}


def case(tested: tuple[Sizes, ...], timed: tuple[Sizes, ...]) -> Callable[[Callable[..., Args]], None]:
    """Adds a function that makes an operation's arguments, with the operation's name, to the table."""

    def enter(arguments: Callable[..., Args]) -> None:
        CASES[arguments.__name__] = Entry(arguments, tested, timed)

    return enter


# The first sizes suffice to see that a kernel works. The others have partial tiles, more tiles than programs, and
# widths that no tile divides.


@case(((FP32, 50, 96, 0.1), (FP32, 3, 66, 0.999)), ((131_072, 256, 0.1),))
def dropout(make: Arguments, num_tokens: int, width: int, probability: float) -> Args:
    return make.normal(num_tokens, width), make.dropout(probability)


@case(
    ((FP32, 33, 96, True), (BF16, 17, 1024, True), (FP32, 3, 1500, False)),
    ((131_072, 256, True), (65_536, 768, False)),
)
def layer_norm(make: Arguments, num_tokens: int, width: int, has_bias: bool) -> Args:
    return make.normal(num_tokens, width), make.weight(width), make.weight(width) if has_bias else None, 1e-5


@case(
    ((BF16, 100, 16, 96, 0.1), (FP32, 17, 8, 1024, 0.0), (FP32, 3, 8, 1500, 0.1)),
    tuple((*sizes, p) for sizes in ((131_072, 1024, 256), (131_072, 256, 64), (65_536, 3072, 768)) for p in (0.0, 0.1)),
)
def residual_norm(make: Arguments, num_tokens: int, inner: int, width: int, probability: float) -> Args:
    x_TF = make.normal(num_tokens, inner)
    residual_TD = make.normal(num_tokens, width)
    weight_DF, bias_D, *norm = make.weight(width, inner), *(make.weight(width) for _ in range(3))
    return x_TF, weight_DF, bias_D, residual_TD, *norm, EPS, make.dropout(probability)


@case(
    ((BF16, 100, 16, 96, True, 0.1), (FP32, 17, 8, 1500, False, 0.0), (FP32, 3, 8, 66, False, 0.1)),
    ((131_072, 256, 256, False, 0.0), (131_072, 64, 64, False, 0.0), (65_536, 768, 768, False, 0.1)),
)
def add_norm(make: Arguments, num_tokens: int, inner: int, width: int, has_norm_bias: bool, probability: float) -> Args:
    norm = make.weight(width), make.weight(width) if has_norm_bias else None
    x_TF = make.normal(num_tokens, inner)
    weight_DF = make.weight(width, inner)
    return x_TF, weight_DF, make.normal(num_tokens, width), *norm, EPS, make.dropout(probability)


@case(
    ((BF16, 100, 72, 300, 130, 0.1), (FP32, 17, 1024, 300, 20, 0.0)),
    ((131_072, 128, VOCAB_SIZE, 128, 0.0), (65_536, 768, VOCAB_SIZE, 512, 0.0)),
)
def embedding_norm(
    make: Arguments, num_tokens: int, width: int, vocab_size: int, length: int, probability: float
) -> Args:
    sizes = (vocab_size, length, 2)
    ids = tuple(make.integers(n, num_tokens).int() for n in sizes)
    tables = tuple(make.weight(n, width) for n in sizes)
    return ids, tables, make.weight(width), make.weight(width), EPS, make.dtype, make.dropout(probability)


@case(
    ((FP32, 33, 8, 600, True), (BF16, 100, 8, 96, False)),
    ((131_072, 256, 1024, True), (131_072, 64, 256, True), (65_536, 768, 3072, True)),
)
def bias_gelu(make: Arguments, num_tokens: int, width: int, inner: int, has_bias: bool) -> Args:
    bias_F = make.weight(inner) if has_bias else None
    return make.normal(num_tokens, width, scale=3), make.weight(inner, width), bias_F


@case(((FP32, 33, 8, 600), (BF16, 100, 8, 96)), ((65_536, 768, 1152),))
def geglu(make: Arguments, num_tokens: int, width: int, inner: int) -> Args:
    return make.normal(num_tokens, width, scale=3), make.weight(2 * inner, width)


@case(((FP32, 50, 40, 3, 32), (FP16, 7, 24, 3, 12)), ((65_536, 768, 12, 64),))
def rotary_qkv(make: Arguments, num_tokens: int, width: int, num_heads: int, head_dim: int) -> Args:
    weight = make.weight(3 * num_heads * head_dim, width)
    positions = torch.arange(num_tokens, device=make.device)
    return make.normal(num_tokens, width), weight, *ops.rotary_angles(positions * 7 % 512, head_dim, 1e4), num_heads


@case(
    ((FP32, 2, 150, 20), (FP32, 3, 12, 3), (FP32, 2, 70, 0), (FP32, 0, 12, 3)),
    ((1024, 128, 20), (128, 512, 77)),
)
def corrupt(make: Arguments, num_rows: int, length: int, num_slots: int) -> Args:
    """Unused slots, positions masked more than once, and samples equal to the original token."""
    ids_BL = make.integers(50, num_rows, length)
    column_BS = make.integers(length, num_rows, num_slots)
    original_M = ids_BL.gather(1, column_BS).flatten()
    is_used_BS = make.integers(10, num_rows, num_slots) > 0
    position_BS = column_BS + torch.arange(num_rows, device=make.device)[:, None] * length
    position_M = torch.where(is_used_BS, position_BS, num_rows * length).flatten()
    masked_BL = ids_BL.scatter(1, torch.where(is_used_BS, column_BS, column_BS[:, :1]), 4)
    is_right_M = make.integers(5, num_rows * num_slots) < 2
    sample_M = torch.where(is_right_M, original_M, make.integers(50, num_rows * num_slots))
    return masked_BL.int(), position_M, original_M, sample_M


@case(
    ((FP32, 2, 150, 20, 40), (FP16, 3, 12, 3, 200), (FP32, 2, 70, 0, 16), (FP32, 0, 12, 3, 16)),
    ((1024, 128, 20, 64), (1024, 128, 20, 256), (128, 512, 77, 768)),
)
def slot_states(make: Arguments, num_rows: int, length: int, num_slots: int, width: int) -> Args:
    """Unused slots, and positions masked more than once."""
    first_B1 = torch.arange(num_rows, device=make.device)[:, None] * length
    position_BS = make.integers(length, num_rows, num_slots) + first_B1
    is_used_BS = make.integers(10, num_rows, num_slots) > 0
    position_M = torch.where(is_used_BS, position_BS, num_rows * length).flatten()
    return make.normal(num_rows * length, width), position_M, num_rows


@case(
    (
        (FP32, 37, 512, True),
        (FP32, 37, 512, False),
        (BF16, 200, 64, False),
        (FP16, 70, 100, True),
        (BF16, 9, 768, True),
    ),
    tuple((*sizes, has_norm) for sizes in ((131_072, 256), (65_536, 768)) for has_norm in (False, True)),
)
def replaced_logits(make: Arguments, num_tokens: int, width: int, has_norm: bool) -> Args:
    """A head has a norm or a bias."""
    dense = make.weight(width, width)
    classifier = (make.weight(1, width), make.weight(1))
    bias_D, norm = (None, (make.weight(width), 1e-5)) if has_norm else (make.weight(width), ())
    return make.normal(num_tokens, width, scale=2), dense, bias_D, *classifier, *norm


@case(((FP32, 37, 512, True), (BF16, 200, 100, False)), ((131_072, 256, True),))
def token_logits(make: Arguments, num_tokens: int, width: int, has_bias: bool) -> Args:
    return make.normal(num_tokens, width), make.weight(1, width), make.weight(1) if has_bias else None


@case(((FP32, 3000), (BF16, 507)), ((131_072,),))
def discriminator_loss(make: Arguments, num_tokens: int) -> Args:
    logits_T = make.normal(num_tokens, scale=4)
    return logits_T, make.integers(5, num_tokens) == 0, make.integers(5, num_tokens) > 0


@case(
    (
        (FP32, 37, 48, 300, 0.7, False),
        (FP32, 5, 16, 5, 1.0, False),
        (FP32, 40, 32, 257, 1.0, True),
        (FP16, 40, 64, 300, 1.0, False),
    ),
    ((19_660, 128, VOCAB_SIZE), (9_830, 768, VOCAB_SIZE), (8_192, 1024, VOCAB_SIZE)),
)
def generator_head(
    make: Arguments,
    num_slots: int,
    width: int,
    vocab_size: int,
    temperature: float = 1.0,
    disallow_correct: bool = False,
) -> Args:
    """Half of the targets are the argmax; some slots are unused; indices of slots are beyond int32."""
    x_ME = make.normal(num_slots, width)
    table_VE = make.weight(vocab_size, width, scale=2)
    bias_V = make.weight(vocab_size, scale=0.5)
    target_M = make.integers(vocab_size, num_slots)
    weight_M = make.weight(num_slots).detach()
    target_M[::2] = (x_ME.float() @ table_VE.T + bias_V).argmax(-1)[::2]
    weight_M[1::5] = 0.0
    slot_M = torch.arange(num_slots, device=make.device) + 2**31
    return x_ME, table_VE, bias_V, target_M, weight_M, slot_M, make.key[:2], temperature, disallow_correct


@case(((FP32, 700, VOCAB_SIZE), (FP32, 0, 7)), ((131_072, VOCAB_SIZE),))
def sample_alias(make: Arguments, num_slots: int, vocab_size: int) -> Args:
    weights_V = 1 / (torch.arange(vocab_size, device=make.device).double() + 1)
    weights_V[1 : vocab_size // 3] = 0
    return alias_table(weights_V), make.integers(2**32, num_slots), make.key[:2]


@case(((BF16, 300, 24, 40), (FP16, 7, 24, 40)), ((131_072, 256, 256),))
def linear(make: Arguments, num_tokens: int, width: int, outputs: int) -> Args:
    return make.normal(num_tokens, width), make.weight(outputs, width), make.weight(outputs)


@case(
    (
        (FP32, 3, 17, 3, 16, True, False, 9, 0.1),
        (FP16, 3, 70, 2, 24, True, True, 18, 0.1),
        (FP32, 3, 128, 1, 64, True, False, 0, 0.1),
        (FP16, 3, 128, 1, 64, False, True, 0, 0.0),
        (FP32, 3, 1, 2, 16, True, False, 0, 0.0),
        (FP16, 3, 129, 2, 16, True, True, 0, 0.1),
        (FP16, 3, 200, 1, 40, False, True, 70, 0.1),
        (FP32, 3, 512, 1, 64, True, False, 0, 0.0),
    ),
    (
        *((1024, 128, num_heads, 64, True, False, 0, 0.0) for num_heads in (4, 1)),
        *((128, 512, 12, 64, not is_rotary, is_rotary, 0, 0.0) for is_rotary in (False, True)),
    ),
)
def self_attention(
    make: Arguments,
    num_rows: int,
    length: int,
    num_heads: int,
    head_dim: int,
    has_bias: bool,
    is_rotary: bool,
    local_attention: int,
    probability: float,
) -> Args:
    """With the backend `short`."""
    mask = AttentionMask.packed(make.segments(num_rows, length), None, "short", local_attention)
    width = num_heads * head_dim
    positions = torch.arange(length, device=make.device).repeat(num_rows)
    x_TD = make.normal(num_rows * length, width)
    weight_XD = make.weight(3 * width, width)
    rotary = ops.rotary_angles(positions, head_dim, 1e4) if is_rotary else None
    bias_X = make.weight(3 * width, scale=0.5) if has_bias else None
    return x_TD, weight_XD, bias_X, mask.local or mask, num_heads, make.dropout(probability), rotary


def _sublayer(make: Arguments, width: int, inner: int, outer: int) -> SublayerWeights:
    vectors = [make.weight(width, scale=0.3) for _ in range(3)]
    return SublayerWeights(make.weight(inner, width), make.weight(inner), make.weight(width, outer), *vectors)


@case(((FP16, 3, 24, 2, 16, 0.2), (FP16, 3, 150, 2, 16, 0.2)), ((1024, 128, 4, 64, 0.1), (128, 512, 12, 64, 0.0)))
def attention(make: Arguments, num_rows: int, length: int, num_heads: int, head_dim: int, probability: float) -> Args:
    """With the backend `short`."""
    mask = AttentionMask.packed(make.segments(num_rows, length), None, "short")
    width = num_heads * head_dim
    weights = _sublayer(make, width, 3 * width, width)
    dropouts = (make.dropout(probability, 9), make.dropout(0.1))
    return make.normal(num_rows * length, width), weights, EPS, mask, num_heads, *dropouts


@case(
    ((FP32, 31, 64, 256, 0.0), (FP16, 150, 16, 64, 0.1), (FP32, 70, 40, 72, 0.2), (FP16, 70, 96, 64, 0.0))
    + ((FP16, 70, 136, 264, 0.0),),
    tuple((*sizes, p) for sizes in ((131_072, 256, 1024), (131_072, 64, 256), (65_536, 768, 3072)) for p in (0.0, 0.1)),
)
def feed_forward(make: Arguments, num_tokens: int, width: int, inner: int, probability: float) -> Args:
    x_TD = make.normal(num_tokens, width, scale=2)
    weights = _sublayer(make, width, inner, inner)
    return x_TD, weights, EPS, make.dropout(probability)


@case(
    (
        (FP32, 70, 64, 80, False, 0.2),
        (FP16, 70, 16, 176, True, 0.0),
        (FP16, 70, 136, 88, True, 0.0),
        (FP32, 70, 40, 72, False, 0.2),
        (FP32, 31, 66, 20, True, 0.1),
    ),
    tuple((*sizes, False, 0.0) for sizes in ((131_072, 256, 704), (131_072, 64, 176), (65_536, 768, 1152))),
)
def gated_feed_forward(
    make: Arguments, num_tokens: int, width: int, inner: int, has_norm_bias: bool, probability: float
) -> Args:
    x_TD = make.normal(num_tokens, width, scale=2)
    weights = (make.weight(2 * inner, width), make.weight(width, inner))
    norm = make.weight(width), make.weight(width) if has_norm_bias else None
    return x_TD, *weights, make.normal(num_tokens, width), *norm, EPS, make.dropout(probability)
