"""The cases of `bench/kernels.py`: each operation that has a kernel, its shapes, and who else computes it.

A new case is a function of a few lines with `@case`; see the last ones. Run `bench/kernels.py`.
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

from electra_fast import attention, ops, sampling

VOCAB_SIZE = 30_522
Function = Callable[..., Any]  # inputs → a tensor, or a tuple whose first one is differentiated


@dataclass(frozen=True)
class Setting:
    """Where and how a case is built: device, dtype of activations, and whether its shapes are tiny."""

    device: torch.device
    dtype: torch.dtype
    quick: bool

    def shapes(self, real: list[tuple[int, ...]], tiny: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The shapes worth timing, or the one to rehearse."""
        return [tiny] if self.quick else real

    def normal(self, *shape: int, gradient: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal numbers in the activations' dtype, unless said otherwise."""
        x = torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype or self.dtype)
        return x.requires_grad_(gradient)

    def weight(self, *shape: int) -> Tensor:
        """A parameter: fp32, scaled as networks have it."""
        return (torch.randn(shape, device=self.device) * shape[-1] ** -0.5).requires_grad_()

    def integers(self, high: int, *shape: int) -> Tensor:
        """int64 below `high`."""
        return torch.randint(0, high, shape, device=self.device)


@dataclass(frozen=True)
class Case:
    """One operation on one shape; `num_flops` and `num_bytes` are the least that it has to do."""

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


def kernel(module: str, name: str) -> Function:
    """A kernel's launcher; looked up when called, for the interpreter is chosen before Triton is imported."""
    return lambda *inputs: getattr(importlib.import_module(f"electra_fast.kernels.{module}"), name)(*inputs)


def compiler(device: torch.device) -> str:
    """On the CPU only the tracing is rehearsed: C++ takes minutes to compile."""
    return "inductor" if device.type == "cuda" else "eager"


@case("attention")
def _(at: Setting) -> Iterator[Case]:
    real = [(1024, 128, 4, 64), (1024, 128, 1, 64), (128, 512, 12, 64), (64, 512, 16, 64)]
    for num_rows, length, num_heads, width in at.shapes(real, (2, 32, 2, 16)):
        # A border at every 300th token, so that rows of 512 hold two or three segments.
        starts = torch.rand(num_rows, length, device=at.device) < 1 / 300
        ids = starts.cumsum(1).int() + 1
        starts[:, 0] = True
        ends = torch.tensor([num_rows * length], device=at.device)
        borders = torch.cat((starts.flatten().nonzero().flatten(), ends)).int()

        def whole_rows(q: Tensor, k: Tensor, v: Tensor, rows: int = num_rows, length: int = length) -> Tensor:
            return attention.attention(q, k, v, attention.AttentionMask.padded(rows, length, None))

        yield Case(
            f"B={num_rows} L={length} N={num_heads} H={width}",
            tuple(at.normal(num_rows * length, num_heads, width) for _ in range(3)),
            _backend("sdpa", at, ids, borders),
            peers={
                **{name: _backend(name, at, ids, borders) for name in ("varlen", "flex", "xformers")},
                "sdpa over whole rows (another result)": whole_rows,
            },
            num_flops=3 * 4 * (borders.diff().double() ** 2).sum().item() * num_heads * width,
        )


def _backend(name: str, at: Setting, ids: Tensor, borders: Tensor) -> Function:
    """Attention by one backend; its segments are built once, as for all layers of a step."""
    try:
        attention.choose_attention(name, at.device, at.dtype, 0.0)
    except ValueError as error:
        return partial(refuse, str(error))
    segments = attention.AttentionMask.packed(ids, borders, name)
    return lambda q, k, v: attention.attention(q, k, v, segments)


class Unavailable(Exception):
    """A contender can't run here; says why."""


def refuse(reason: str, *_: Any) -> None:
    """Stands for a function that can't run here."""
    raise Unavailable(reason)


@case("segments of attention")
def _(at: Setting) -> Iterator[Case]:
    """What building each backend's mask costs, once a micro-batch."""
    for num_rows, length in at.shapes([(1024, 128), (128, 512)], (2, 32)):
        ids = torch.ones(num_rows, length, dtype=torch.int32, device=at.device)
        borders = torch.arange(0, num_rows * length + 1, length, dtype=torch.int32, device=at.device)

        def build(name: str, ids: Tensor = ids, borders: Tensor = borders) -> Function:
            return lambda *_: attention.AttentionMask.packed(ids, borders, name)

        yield Case(f"B={num_rows} L={length}", (), build("sdpa"), peers={"flex": build("flex")})


@case("generator head")
def _(at: Setting) -> Iterator[Case]:
    real = [(19_660, 128, VOCAB_SIZE), (9_830, 768, VOCAB_SIZE), (8_192, 1024, VOCAB_SIZE)]
    for num_slots, width, vocab_size in at.shapes(real, (5, 16, 300)):
        inputs = (
            at.normal(num_slots, width),
            at.weight(vocab_size, width),
            at.weight(vocab_size),
            at.integers(vocab_size, num_slots),
            torch.arange(num_slots, device=at.device),
            torch.tensor([1, 2], device=at.device),
            1.0,
            False,
        )
        yield Case(
            f"M={num_slots} E={width} V={vocab_size}, with a sample (peers: without)",
            inputs,
            getattr(ops, "generator_head_reference", _plain_generator_head),
            kernel("generator_head", "generator_head"),
            peers={
                "torch.compile without a sample": torch.compile(_cross_entropy, backend=compiler(at.device)),
                "cut-cross-entropy, exact, without bias": _cut_cross_entropy,
                "Liger": _liger,
                "torch.nn.functional.linear_cross_entropy": _torch_linear_cross_entropy,
                "the same, chunked": partial(_torch_linear_cross_entropy, chunked=True),
            },
            num_flops=3 * 2 * num_slots * width * vocab_size,
        )


def _cross_entropy(x: Tensor, table: Tensor, bias: Tensor, target: Tensor, *_: Any) -> Tensor:
    return ops.masked_cross_entropy(ops.linear(x, table, bias), target).sum()


def _plain_generator_head(x: Tensor, table: Tensor, bias: Tensor, target: Tensor, slot: Tensor, key: Tensor, *_: Any):
    logits = ops.linear(x, table, bias)
    sample = sampling.sample_categorical(logits.detach(), slot, key)
    return ops.masked_cross_entropy(logits, target), sample, logits.argmax(-1) == target


def _cut_cross_entropy(x: Tensor, table: Tensor, bias: Tensor, target: Tensor, *_: Any) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    # Its gradient filter would drop nearly everything at the start of training; the release has no bias.
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
def _(at: Setting) -> Iterator[Case]:
    for num_rows, length, slots in at.shapes([(1024, 128, 20), (128, 512, 77)], (2, 32, 5)):
        first = torch.arange(num_rows, device=at.device)[:, None] * length
        inputs = (
            at.integers(VOCAB_SIZE, num_rows, length).int(),
            (at.integers(length, num_rows, slots) + first).flatten(),
            at.integers(VOCAB_SIZE, num_rows * slots),
            at.integers(VOCAB_SIZE, num_rows * slots),
        )
        reference = getattr(ops, "corrupt_reference", partial(refuse, "ops.corrupt_reference is not in this tree"))
        num_bytes = num_rows * length * 9 + num_rows * slots * 24
        yield Case(
            f"B={num_rows} L={length} N={slots}", inputs, reference, kernel("corrupt", "corrupt"), {}, 0, num_bytes
        )


@case("discriminator head: bias, gelu, classifier")
def _(at: Setting) -> Iterator[Case]:
    for num_tokens, width in at.shapes([(131_072, 256), (65_536, 768)], (7, 64)):
        inputs = (at.normal(num_tokens, width), at.weight(width), at.weight(1, width), at.weight(1))

        def reference(h: Tensor, bias: Tensor, weight: Tensor, classifier_bias: Tensor) -> Tensor:
            return F.linear(F.gelu(h + bias.to(h.dtype)).to(weight.dtype), weight, classifier_bias).squeeze(-1)

        num_bytes = 3 * inputs[0].numel() * inputs[0].element_size()
        launcher = kernel("discriminator_head", "gelu_logit")
        yield Case(f"T={num_tokens} D={width}", inputs, reference, launcher, num_bytes=num_bytes)


@case("discriminator loss")
def _(at: Setting) -> Iterator[Case]:
    for (num_tokens,) in at.shapes([(131_072,)], (50,)):
        inputs = (
            at.normal(num_tokens, dtype=torch.float32),
            at.integers(2, num_tokens).bool(),
            torch.ones(num_tokens, dtype=torch.bool, device=at.device),
        )

        def plain(logits: Tensor, replaced: Tensor, valid: Tensor) -> Tensor:
            return (ops.binary_cross_entropy(logits, replaced) * valid).sum()

        reference = getattr(ops, "discriminator_loss_reference", plain)
        launcher = kernel("discriminator_head", "discriminator_loss")
        yield Case(f"T={num_tokens}", inputs, reference, launcher, num_bytes=16 * num_tokens)


@case("bias + gelu")
def _(at: Setting) -> Iterator[Case]:
    for num_tokens, width in at.shapes([(131_072, 1024), (131_072, 256), (65_536, 3072)], (7, 64)):
        inputs = (at.normal(num_tokens, width), at.weight(width))
        num_bytes = 5 * inputs[0].numel() * inputs[0].element_size()

        def reference(h: Tensor, bias: Tensor) -> Tensor:
            return F.gelu(h + bias.to(h.dtype))

        yield Case(f"T={num_tokens} F={width}", inputs, reference, kernel("bias_gelu", "bias_gelu"), {}, 0, num_bytes)


@case("bias + dropout + residual + norm")
def _(at: Setting) -> Iterator[Case]:
    for num_tokens, width in at.shapes([(131_072, 256), (131_072, 64), (65_536, 768)], (7, 64)):
        for dropout in (0.0, 0.1):
            h, residual = at.normal(num_tokens, width), at.normal(num_tokens, width)
            parameters = (at.weight(width), at.weight(width), at.weight(width))  # of the product and of the norm
            key = torch.tensor([1, 2, 0], device=at.device) if dropout else None

            def reference(
                h: Tensor, bias: Tensor, residual: Tensor, w: Tensor, b: Tensor, p: float = dropout
            ) -> Tensor:
                z = residual + F.dropout(h + bias.to(h.dtype), p)
                return F.layer_norm(z, z.shape[-1:], w.to(z.dtype), b.to(z.dtype), 1e-12)

            def ours(*inputs: Tensor, p: float = dropout, key: Tensor | None = key) -> Any:
                return kernel("residual_norm", "residual_norm")(*inputs, 1e-12, p, key, 0)

            yield Case(
                f"T={num_tokens} D={width} dropout={dropout}",
                (h, parameters[0], residual, *parameters[1:]),
                reference,
                ours,
                num_bytes=8 * h.numel() * h.element_size(),
            )


@case("embedding sum + norm")
def _(at: Setting) -> Iterator[Case]:
    for num_tokens, width, length in at.shapes([(131_072, 128, 128), (65_536, 768, 512)], (7, 16, 8)):
        vocab_size = 300 if at.quick else VOCAB_SIZE
        ids = tuple(at.integers(high, num_tokens) for high in (vocab_size, length, 2))
        tables = tuple(at.weight(rows, width) for rows in (vocab_size, length, 2))

        def reference(*inputs: Tensor) -> Tensor:
            token, position, kind = (F.embedding(i, table) for i, table in zip(inputs[:3], inputs[3:6], strict=True))
            x = token + position + kind
            x = x if x.dtype == torch.float64 else x.to(at.dtype)
            return F.layer_norm(x, x.shape[-1:], inputs[6].to(x.dtype), inputs[7].to(x.dtype), 1e-12)

        def ours(*inputs: Tensor) -> Any:
            return kernel("embedding_norm", "embedding_norm")(*inputs, 1e-12, at.dtype, 0.0, None, 0)

        yield Case(f"T={num_tokens} E={width}", (*ids, *tables, at.weight(width), at.weight(width)), reference, ours)
