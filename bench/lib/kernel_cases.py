"""The cases of `bench/kernels.py` and `bench/kernel_numerics.py`: operations, their shapes, other implementations.

A new case is a function of a few lines with `@case`, such as the last ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from electra_fast.model import attention, sublayers
from electra_fast.model.compute import choose_attention
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import linear

VOCAB_SIZE = 30_522
Function = Callable[..., Any]  # inputs → a tensor, or a tuple whose first tensor is differentiated


@dataclass(frozen=True)
class Setting:
    """Device, dtype of activations, and whether shapes are tiny."""

    device: torch.device
    dtype: torch.dtype
    quick: bool

    def shapes(self, real: list[tuple[int, ...]], tiny: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The shapes to time, or the one for a rehearsal."""
        return [tiny] if self.quick else real

    def normal(self, *shape: int, gradient: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal numbers, by default in the activations' dtype."""
        x = torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype or self.dtype)
        return x.requires_grad_(gradient)

    def weight(self, *shape: int) -> Tensor:
        """A parameter: fp32, scaled by 1 / sqrt(last dimension)."""
        return (torch.randn(shape, device=self.device) * shape[-1] ** -0.5).requires_grad_()

    def integers(self, high: int, *shape: int) -> Tensor:
        """int64 below `high`."""
        return torch.randint(0, high, shape, device=self.device)


@dataclass(frozen=True)
class Case:
    """One operation on one shape; `num_flops` and `num_bytes` are the minimum that it needs."""

    shape: str
    inputs: tuple[Any, ...]
    reference: Function
    kernel: Function | None = None
    peers: dict[str, Function] = field(default_factory=dict)
    num_flops: float = 0.0
    num_bytes: float = 0.0


CASES: dict[str, Callable[[Setting], Iterator[Case]]] = {}


def case(name: str) -> Callable[[Callable[[Setting], Iterator[Case]]], None]:
    """Registers a function that yields an operation's cases, shape by shape."""
    return partial(CASES.__setitem__, name)


def kernel(name: str) -> Function:
    """A kernel's launcher, imported when called: Triton's interpreter must be enabled before Triton is imported."""
    return lambda *inputs: getattr(importlib.import_module("electra_fast.kernels.launchers"), name)(*inputs)


def compiler(device: torch.device) -> str:
    """On the CPU only tracing is rehearsed, because C++ takes minutes to compile."""
    return "inductor" if device.type == "cuda" else "eager"


@case("attention")
def _(setting: Setting) -> Iterator[Case]:
    real = [(1024, 128, 4, 64), (1024, 128, 1, 64), (128, 512, 12, 64), (64, 512, 16, 64)]
    for num_rows, length, num_heads, head_dim in setting.shapes(real, (2, 32, 2, 16)):
        # A segment starts at every 300th token on average: two or three segments in a row of 512.
        starts = torch.rand(num_rows, length, device=setting.device) < 1 / 300
        ids = starts.cumsum(1).int() + 1
        starts[:, 0] = True
        ends = torch.tensor([num_rows * length], device=setting.device)
        cu_seqlens = torch.cat((starts.flatten().nonzero().flatten(), ends)).int()

        def whole_rows(q: Tensor, k: Tensor, v: Tensor, rows: int = num_rows, length: int = length) -> Tensor:
            return attention.attention(q, k, v, attention.AttentionMask.padded(rows, length, None))

        yield Case(
            f"B={num_rows} L={length} N={num_heads} H={head_dim}",
            tuple(setting.normal(num_rows * length, num_heads, head_dim) for _ in range(3)),
            _backend("sdpa", setting, ids, cu_seqlens),
            peers={
                **{name: _backend(name, setting, ids, cu_seqlens) for name in ("varlen", "flex", "xformers")},
                "sdpa over whole rows (another result)": whole_rows,
            },
            num_flops=3 * 4 * (cu_seqlens.diff().double() ** 2).sum().item() * num_heads * head_dim,
        )


def _backend(name: str, setting: Setting, ids: Tensor, cu_seqlens: Tensor) -> Function:
    """Attention by one backend; its mask is built once, as for all layers of a step."""
    try:
        choose_attention(name, setting.device, setting.dtype, 0.0)
    except ValueError as error:
        return partial(refuse, str(error))
    mask = attention.AttentionMask.packed(ids, cu_seqlens, name)
    return lambda q, k, v: attention.attention(q, k, v, mask)


class Unavailable(Exception):
    """An implementation cannot run here; the message says why."""


def refuse(reason: str, *_: Any) -> None:
    """Takes the place of a function that cannot run here."""
    raise Unavailable(reason)


def _after_bias(attend: Function) -> Function:
    """A backend on a qkv product without its bias."""

    def function(
        qkv_TX: Tensor, bias_X: Tensor, ids_BL: Tensor, cos: None, sin: None, num_heads: int, _: None
    ) -> Tensor:
        qkv = (qkv_TX + bias_X.to(qkv_TX.dtype)).view(qkv_TX.shape[0], 3, num_heads, -1)
        return attend(*qkv.unbind(1)).flatten(1)

    return function


@case("attention of short rows, with the bias of qkv")
def _(setting: Setting) -> Iterator[Case]:
    for num_rows, length, num_heads, head_dim in setting.shapes(
        [(1024, 128, 4, 64), (1024, 128, 1, 64)], (2, 32, 2, 16)
    ):
        ids = torch.ones(num_rows, length, dtype=torch.int32, device=setting.device)
        offsets = torch.arange(0, num_rows * length + 1, length, dtype=torch.int32, device=setting.device)
        rest = (ids, None, None, num_heads, None)

        def reference(qkv: Tensor, bias: Tensor, *rest: Any) -> Tensor:
            return attention.short_attention_reference(qkv, bias, *rest, ops.Dropout())

        def ours(*inputs: Any) -> Any:
            return kernel("short_attention")(*inputs, 0.0, None, 0)

        num_tokens, width = num_rows * length, num_heads * head_dim
        inputs = (setting.normal(num_tokens, 3 * width), setting.weight(3 * width), *rest)
        yield Case(
            f"B={num_rows} L={length} N={num_heads} H={head_dim}",
            inputs,
            reference,
            ours,
            peers={name: _after_bias(_backend(name, setting, ids, offsets)) for name in ("sdpa", "varlen")},
            num_flops=3 * 4 * num_tokens * length * width,
            num_bytes=11 * num_tokens * width * inputs[0].element_size(),
        )


@case("attention mask")
def _(setting: Setting) -> Iterator[Case]:
    """The cost of building each backend's mask, paid once per micro-batch."""
    for num_rows, length in setting.shapes([(1024, 128), (128, 512)], (2, 32)):
        ids = torch.ones(num_rows, length, dtype=torch.int32, device=setting.device)
        cu_seqlens = torch.arange(0, num_rows * length + 1, length, dtype=torch.int32, device=setting.device)

        def build(name: str, ids: Tensor = ids, cu_seqlens: Tensor = cu_seqlens) -> Function:
            return lambda *_: attention.AttentionMask.packed(ids, cu_seqlens, name)

        yield Case(f"B={num_rows} L={length}", (), build("sdpa"), peers={"flex": build("flex")})


@case("generator head")
def _(setting: Setting) -> Iterator[Case]:
    real = [(19_660, 128, VOCAB_SIZE), (9_830, 768, VOCAB_SIZE), (8_192, 1024, VOCAB_SIZE)]
    for num_slots, width, vocab_size in setting.shapes(real, (5, 16, 300)):
        inputs = (
            setting.normal(num_slots, width),
            setting.weight(vocab_size, width),
            setting.weight(vocab_size),
            setting.integers(vocab_size, num_slots),
            torch.arange(num_slots, device=setting.device),
            torch.tensor([1, 2], device=setting.device),
            1.0,
            False,
        )
        yield Case(
            f"M={num_slots} E={width} V={vocab_size}, with a sample (peers: without)",
            inputs,
            ops.generator_head_reference,
            kernel("generator_head"),
            peers={
                "torch.compile without a sample": torch.compile(_cross_entropy, backend=compiler(setting.device)),
                "cut-cross-entropy, exact, without bias": _cut_cross_entropy,
                "Liger": _liger,
                "torch.nn.functional.linear_cross_entropy": _torch_linear_cross_entropy,
                "the same, chunked": partial(_torch_linear_cross_entropy, chunked=True),
            },
            num_flops=3 * 2 * num_slots * width * vocab_size,
        )


def _cross_entropy(x: Tensor, table: Tensor, bias: Tensor, target: Tensor, *_: Any) -> Tensor:
    return ops.masked_cross_entropy(linear(x, table, bias), target).sum()


def _cut_cross_entropy(x: Tensor, table: Tensor, bias: Tensor, target: Tensor, *_: Any) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    # Its gradient filter would drop nearly everything early in training. The released version has no bias.
    return linear_cross_entropy(x, table.to(x.dtype), target, filter_eps=None, reduction="sum")


def _liger(x: Tensor, table: Tensor, bias: Tensor, target: Tensor, *_: Any) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(table.to(x.dtype), x, target, bias.to(x.dtype))


def _torch_linear_cross_entropy(
    x: Tensor, table: Tensor, bias: Tensor, target: Tensor, *_: Any, chunked: bool = False
) -> Tensor:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable(f"needs torch 2.13 or newer, and this is {torch.__version__}")
    options = torch.nn.LinearCrossEntropyOptions() if chunked else None
    weight, bias = table.to(x.dtype), bias.to(x.dtype)
    return F.linear_cross_entropy(x, weight, target, linear_bias=bias, reduction="sum", options=options)


@case("corrupt")
def _(setting: Setting) -> Iterator[Case]:
    for num_rows, length, slots in setting.shapes([(1024, 128, 20), (128, 512, 77)], (2, 32, 5)):
        first = torch.arange(num_rows, device=setting.device)[:, None] * length
        inputs = (
            setting.integers(VOCAB_SIZE, num_rows, length).int(),
            (setting.integers(length, num_rows, slots) + first).flatten(),
            setting.integers(VOCAB_SIZE, num_rows * slots),
            setting.integers(VOCAB_SIZE, num_rows * slots),
        )
        shape, num_bytes = f"B={num_rows} L={length} N={slots}", num_rows * length * 9 + num_rows * slots * 24
        yield Case(shape, inputs, ops.corrupt_reference, kernel("corrupt"), num_bytes=num_bytes)


@case("discriminator head: bias, gelu, classifier")
def _(setting: Setting) -> Iterator[Case]:
    for num_tokens, width in setting.shapes([(131_072, 256), (65_536, 768)], (7, 64)):
        inputs = (setting.normal(num_tokens, width), setting.weight(width), setting.weight(1, width), setting.weight(1))

        def reference(h: Tensor, bias: Tensor, weight: Tensor, classifier_bias: Tensor) -> Tensor:
            return F.linear(F.gelu(h + bias.to(h.dtype)).to(weight.dtype), weight, classifier_bias).squeeze(-1)

        num_bytes = 3 * inputs[0].numel() * inputs[0].element_size()
        yield Case(f"T={num_tokens} D={width}", inputs, reference, kernel("gelu_logit"), num_bytes=num_bytes)


@case("discriminator loss")
def _(setting: Setting) -> Iterator[Case]:
    for (num_tokens,) in setting.shapes([(131_072,)], (50,)):
        inputs = (
            setting.normal(num_tokens, dtype=torch.float32),
            setting.integers(2, num_tokens).bool(),
            torch.ones(num_tokens, dtype=torch.bool, device=setting.device),
        )
        reference, launcher = ops.discriminator_loss_reference, kernel("discriminator_loss")
        yield Case(f"T={num_tokens}", inputs, reference, launcher, num_bytes=16 * num_tokens)


@case("bias + gelu")
def _(setting: Setting) -> Iterator[Case]:
    for num_tokens, width in setting.shapes([(131_072, 1024), (131_072, 256), (65_536, 3072)], (7, 64)):
        inputs = (setting.normal(num_tokens, width), setting.weight(width))
        num_bytes = 5 * inputs[0].numel() * inputs[0].element_size()

        def reference(h: Tensor, bias: Tensor) -> Tensor:
            return F.gelu(h + bias.to(h.dtype))

        yield Case(f"T={num_tokens} F={width}", inputs, reference, kernel("bias_gelu"), num_bytes=num_bytes)


@case("bias + dropout + residual + norm")
def _(setting: Setting) -> Iterator[Case]:
    for num_tokens, width in setting.shapes([(131_072, 256), (131_072, 64), (65_536, 768)], (7, 64)):
        for dropout in (0.0, 0.1):
            h, residual = setting.normal(num_tokens, width), setting.normal(num_tokens, width)
            # The linear layer's bias, the norm's weight and bias.
            parameters = tuple(setting.weight(width) for _ in range(3))
            key = torch.tensor([1, 2, 0], device=setting.device) if dropout else None

            def reference(
                h: Tensor, bias: Tensor, residual: Tensor, w: Tensor, b: Tensor, p: float = dropout
            ) -> Tensor:
                z = residual + F.dropout(h + bias.to(h.dtype), p)
                return F.layer_norm(z, z.shape[-1:], w.to(z.dtype), b.to(z.dtype), 1e-12)

            def ours(*inputs: Tensor, p: float = dropout, key: Tensor | None = key) -> Any:
                return kernel("residual_norm")(*inputs, 1e-12, p, key, 0)

            yield Case(
                f"T={num_tokens} D={width} dropout={dropout}",
                (h, parameters[0], residual, *parameters[1:]),
                reference,
                ours,
                num_bytes=8 * h.numel() * h.element_size(),
            )


@case("feed-forward sublayer")
def _(setting: Setting) -> Iterator[Case]:
    """The kernels that the step chooses for its widths, and those of single operations."""
    real = [(131_072, 256, 1024), (131_072, 64, 256), (65_536, 768, 3072)]
    for num_tokens, width, inner in setting.shapes(real, (7, 16, 64)):
        for p in (0.0, 0.1):
            shapes = ((inner, width), (inner,), (width, inner), (width,), (width,), (width,))
            x, weights = setting.normal(num_tokens, width), [setting.weight(*shape) for shape in shapes]
            dropout = ops.Dropout(p, torch.tensor([1, 2, 0], device=setting.device))

            def reference(x: Tensor, *weights: Tensor, p: float = p) -> Tensor:
                w1, b1, w2, b2, w, b = (weight.to(x.dtype) for weight in weights)
                z = x + F.dropout(F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2), p)
                return F.layer_norm(z, z.shape[-1:], w, b, 1e-12)

            def ours(x: Tensor, *weights: Tensor, dropout: ops.Dropout = dropout) -> Tensor:
                with ops.use_impl("kernel"):
                    return sublayers.feed_forward(x, sublayers.SublayerWeights(*weights), 1e-12, dropout)

            def apart(x: Tensor, *weights: Tensor, dropout: ops.Dropout = dropout) -> Tensor:
                with ops.use_impl("kernel"):
                    inner_TF = ops.bias_gelu(x, *weights[:2])
                    return ops.residual_norm(inner_TF, *weights[2:4], x, *weights[4:], 1e-12, dropout)

            yield Case(
                f"T={num_tokens} D={width} F={inner} dropout={p}",
                (x, *weights),
                reference,
                ours,
                peers={"bias + gelu, bias + dropout + residual + norm": apart},
                num_flops=3 * 4 * num_tokens * width * inner,
                num_bytes=5 * x.numel() * x.element_size(),
            )


@case("embedding sum + norm")
def _(setting: Setting) -> Iterator[Case]:
    for num_tokens, width, length in setting.shapes([(131_072, 128, 128), (65_536, 768, 512)], (7, 16, 8)):
        vocab_size = 300 if setting.quick else VOCAB_SIZE
        ids = tuple(setting.integers(high, num_tokens) for high in (vocab_size, length, 2))
        tables = tuple(setting.weight(rows, width) for rows in (vocab_size, length, 2))

        def reference(*inputs: Tensor) -> Tensor:
            token, position, type_ = (F.embedding(i, table) for i, table in zip(inputs[:3], inputs[3:6], strict=True))
            x = token + position + type_
            x = x if x.dtype == torch.float64 else x.to(setting.dtype)
            return F.layer_norm(x, x.shape[-1:], inputs[6].to(x.dtype), inputs[7].to(x.dtype), 1e-12)

        def ours(*inputs: Tensor) -> Any:
            return kernel("embedding_norm")(*inputs, 1e-12, setting.dtype, 0.0, None, 0)

        norm = (setting.weight(width), setting.weight(width))
        yield Case(f"T={num_tokens} E={width}", (*ids, *tables, *norm), reference, ours)
