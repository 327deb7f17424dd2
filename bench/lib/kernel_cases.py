"""The cases of `bench/kernels.py`: operations with a kernel, and their shapes.

A new case is a function of a few lines with `@case`, such as the last ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from electra_fast.model import attention
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import use_impl

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

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal numbers, by default in the activations' dtype."""
        return torch.randn(shape, device=self.device).to(dtype or self.dtype).requires_grad_()

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
    kernel: Function
    num_flops: float = 0.0
    num_bytes: float = 0.0


CASES: dict[str, Callable[[Setting], Iterator[Case]]] = {}


def case(name: str) -> Callable[[Callable[[Setting], Iterator[Case]]], None]:
    """Registers a function that yields an operation's cases, shape by shape."""
    return partial(CASES.__setitem__, name)


def kernel(name: str) -> Function:
    """A kernel's launcher, imported when called: Triton's interpreter must be enabled before Triton is imported."""
    return lambda *inputs: getattr(importlib.import_module("electra_fast.kernels.launchers"), name)(*inputs)


@case("attention of short rows, with the bias of qkv")
def _(setting: Setting) -> Iterator[Case]:
    for num_rows, length, num_heads, head_dim in setting.shapes(
        [(1024, 128, 4, 64), (1024, 128, 1, 64)], (2, 32, 2, 16)
    ):
        ids = torch.ones(num_rows, length, dtype=torch.int32, device=setting.device)
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
            num_flops=3 * 4 * num_tokens * length * width,
            num_bytes=11 * num_tokens * width * inputs[0].element_size(),
        )


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
            f"M={num_slots} E={width} V={vocab_size}",
            inputs,
            ops.generator_head_reference,
            kernel("generator_head"),
            num_flops=3 * 2 * num_slots * width * vocab_size,
        )


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


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), 1e-12)


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
                return _norm(residual + F.dropout(h + bias.to(h.dtype), p), w, b)

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
                return _norm(x + F.dropout(F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2), p), w, b)

            def ours(x: Tensor, *weights: Tensor, dropout: ops.Dropout = dropout) -> Tensor:
                with use_impl("kernel"):
                    return ops.feed_forward(x, ops.SublayerWeights(*weights), 1e-12, dropout)

            yield Case(
                f"T={num_tokens} D={width} F={inner} dropout={p}",
                (x, *weights),
                reference,
                ours,
                num_flops=3 * 4 * num_tokens * width * inner,
                num_bytes=5 * x.numel() * x.element_size(),
            )


@case("qkv layer of attention, with rotary positions")
def _(setting: Setting) -> Iterator[Case]:
    for num_tokens, width, num_heads in setting.shapes([(65_536, 768, 12)], (7, 32, 2)):
        x, weight = setting.normal(num_tokens, width), setting.weight(3 * width, width)
        angles = ops.rotary_angles(torch.arange(num_tokens, device=setting.device) % 512, width // num_heads, 1e4)

        def ours(*inputs: Any) -> Any:
            with use_impl("kernel"):
                return ops.rotary_qkv(*inputs)

        yield Case(
            f"T={num_tokens} D={width}",
            (x, weight, *angles, num_heads),
            ops.rotary_qkv_reference,
            ours,
            num_flops=3 * 2 * num_tokens * 3 * width * width,
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
            return _norm(x if x.dtype == torch.float64 else x.to(setting.dtype), *inputs[6:])

        def ours(*inputs: Tensor) -> Any:
            return kernel("embedding_norm")(*inputs, 1e-12, setting.dtype, 0.0, None, 0)

        norm = (setting.weight(width), setting.weight(width))
        yield Case(f"T={num_tokens} E={width}", (*ids, *tables, *norm), reference, ours)
