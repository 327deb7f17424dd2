# mypy: no-warn-return-any

"""The operations of the networks except attention: contract, choice of implementation, and reference in plain PyTorch.

`NAME_reference` is the specification of `NAME`; other implementations may change its speed, never its meaning. By
default, operations run as Triton kernels on CUDA (in `fused` if an autograd node has several) and elsewhere as their
CPU form (`cpu_ops`), if any, or their references; `use_choices` and `use_impl` override this. Weights are fp32 and cast
to the activations' dtype at each use; on a GPU, `weight_casts` casts all at once, and `cast` returns those copies.

Shapes: B rows, L row length, T = B*L tokens of the flat buffer, M masked slots, V vocabulary,
E embedding, D hidden, N heads, H head dimension, F feed-forward; I inputs and O outputs of a linear layer.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from electra_fast.kernels import gather_rows as row_kernels
from electra_fast.ops import cpu_ops, fused
from electra_fast.ops.fused import SublayerWeights, cast, kernels
from electra_fast.ops.sampling import modify_logits, philox, sample_alias_reference, sample_categorical, wide

# The counts over valid tokens that `discriminator_loss` returns, in this order.
DISCRIMINATOR_TOTALS = ("discriminator_correct", "true_positives", "predicted_positives", "replaced", "tokens")

Impl = Literal["kernel", "reference"]
# None: `_choices` decide, or else the device. Plain globals, because torch 2.11 cannot compile a ContextVar.
_impl: Impl | None = None
_choices: dict[str, str] = {}
# Replaces every operation while kernels are checked (`observe`).
_observer: Observer | None = None
# Set by the tests: a call of an operation that is not among the choices raises LookupError.
is_strict = False

OPERATIONS: set[str] = set()

P = ParamSpec("P")
R = TypeVar("R")
Observer = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def operation(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that has a kernel and a reference; the function's name is the key of the choice."""
    OPERATIONS.add(function.__name__)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _observer is not None:
            return _observer(function.__name__, function, args, kwargs)
        return function(*args, **kwargs)

    return call


@contextmanager
def observe(observer: Observer | None) -> Iterator[None]:
    """Calls `observer(name, function, args, kwargs)` in place of each operation within the context."""
    global _observer
    previous = _observer
    _observer = observer
    try:
        yield
    finally:
        _observer = previous


@contextmanager
def use_choices(choices: Mapping[str, str]) -> Iterator[None]:
    """Selects implementations within the context; keys are results of `choice_key`, values are results of `choice`.

    A bare operation name applies to all widths, and "*" to all other operations; the rest run as their references.
    Without any choices, operations run as their kernels on CUDA. `use_impl` takes precedence.
    """
    global _choices
    previous = _choices
    _choices = dict(choices)
    try:
        yield
    finally:
        _choices = previous


def choice_key(name: str, x: Tensor | None) -> str:
    """Returns an operation with the width of its floating-point matrix, such as "layer_norm:256", or just its name."""
    has_width = x is not None and x.dim() > 1 and x.is_floating_point()
    return f"{name}:{x.shape[-1]}" if has_width else name  # type: ignore[union-attr]  # has_width


def choice(name: str, x: Tensor) -> str:
    """Returns the implementation of an operation for a tensor: "reference", "kernel", or one of several kernels."""
    if _impl is not None:
        return _impl
    if not _choices:
        return "kernel" if x.is_cuda else "reference"
    for key in (choice_key(name, x), name, "*"):
        if key in _choices:
            return _choices[key]
    if is_strict:
        raise LookupError(f"{choice_key(name, x)} was not checked; checked operations: {', '.join(_choices)}")
    return "reference"


@contextmanager
def use_impl(impl: Impl | None) -> Iterator[None]:
    """Runs every operation within the context as its Triton kernel or its reference, on any device; None: as chosen.

    The choice is read when an operation is called or traced: torch.compile recompiles when it changes, but a captured
    CUDA graph does not change. It applies to the whole process, not to one thread. Raises RuntimeError for "kernel"
    without a CUDA device or Triton's interpreter.
    """
    global _impl
    if impl not in ("kernel", "reference", None):
        raise ValueError(f'impl = {impl!r}: must be "kernel", "reference" or None')
    if impl == "kernel" and not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError('impl = "kernel": needs a CUDA device or, in tests, TRITON_INTERPRET=1')
    previous = _impl
    _impl = impl
    try:
        yield
    finally:
        _impl = previous


def uses_kernels(x: Tensor, name: str) -> bool:
    return choice(name, x) != "reference"


def may_use_kernels(device: torch.device) -> bool:
    return device.type == "cuda" or _impl == "kernel"


def uses_cpu_ops(x: Tensor, *, compiled: bool = False) -> bool:
    """Returns whether operations on this tensor run in their CPU form (`cpu_ops`).

    torch.compile traces and fuses the references instead, except for operations that set `compiled`.
    """
    is_free = _impl is None and not _choices
    return x.device.type == "cpu" and is_free and (compiled or not torch.compiler.is_compiling())


@operation
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in x's dtype; [..., I] → [..., O]."""
    if weight.dtype != x.dtype and uses_kernels(x, "linear") and not torch.compiler.is_compiling():
        return fused.MixedLinear.apply(x, weight, bias)
    weight = weight.to(x.dtype) if torch.is_grad_enabled() else cast(weight, x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def gather_rows(x_RD: Tensor, index_M: Tensor, *, sparse: bool = False) -> Tensor:
    """x[index], with a gradient that is summed in a fixed order; [R, D], int [M] → [M, D].

    With `sparse`, on a CPU, the gradient is a sparse tensor of the gathered rows.
    """
    if uses_cpu_ops(x_RD):
        return F.embedding(index_M, x_RD, sparse=sparse)  # the same operators, without the cost of a custom one
    return row_kernels.gather_rows(x_RD, index_M)


@operation
def slot_states(x_TD: Tensor, position_M: Tensor, num_rows: int) -> Tensor:
    """Hidden states at the masked slots; [T, D] → [M, D].

    A position that was masked more than once gets the sum of its gradients. Unused slots read the last token and pass
    no gradient to it.

    Args:
        x_TD: Hidden states of `num_rows` rows of equal length.
        position_M: The position of each slot in the flat buffer, int64, as in `corrupt`.
        num_rows: Number of rows.
    """
    if uses_kernels(x_TD, "slot_states"):
        return kernels().slot_states(x_TD, position_M, num_rows)
    num_tokens = x_TD.shape[0]
    states_MD = gather_rows(x_TD, position_M.clamp(max=num_tokens - 1))
    return torch.where((position_M < num_tokens)[:, None], states_MD, states_MD.detach())


@dataclass(frozen=True)
class Dropout:
    """One dropout call: zeroes each element with `probability` and divides the others by 1 - probability.

    `key` is int64 [3] on the device: seed, step, and the index within the step of the micro-batch's first token. With a
    key, the mask is a pure function of key, call index, token and column, so micro-batches do not change it, a captured
    graph draws a new one at every replay, and the backward pass draws it again. Otherwise torch's generator draws it.
    """

    probability: float = 0.0
    key: Tensor | None = None
    call_index: int = 0

    def call(self, index: int) -> Dropout:
        """Returns the dropout `index` calls after this one."""
        return replace(self, call_index=self.call_index + index)

    @property
    def has_kernel(self) -> bool:
        """True if kernels can apply it, since it has a key or drops nothing."""
        return self.key is not None or not self.probability

    @property
    def arguments(self) -> tuple[float, Tensor | None, int]:
        return self.probability, self.key if self.probability else None, self.call_index


@operation
def dropout(x_TD: Tensor, dropout: Dropout) -> Tensor:
    """x with dropout applied; [T, D] → [T, D]."""
    if dropout.probability and dropout.has_kernel and uses_kernels(x_TD, "dropout"):
        return kernels().dropout(x_TD, *dropout.arguments)
    return dropout_reference(x_TD, dropout)


def dropout_reference(x_TD: Tensor, dropout: Dropout) -> Tensor:
    """With a key, one Philox call draws the words of four adjacent columns.

    Its counter is (column // 4, token within the step, step, 2^16 + call index); `sampling` uses smaller last words. An
    element is dropped if the upper 24 bits of its word are less than probability * 2^24.
    """
    if not dropout.probability or dropout.key is None:
        if dropout.probability and uses_cpu_ops(x_TD):
            return cpu_ops.unkeyed_dropout(x_TD, dropout.probability)
        return F.dropout(x_TD, dropout.probability)
    num_tokens, width = x_TD.shape
    seed, step, first_token = dropout.key.unbind()
    token_T1 = (torch.arange(num_tokens, device=x_TD.device)[:, None] + first_token) & 0xFFFFFFFF
    quad = torch.arange(-(-width // 4), device=x_TD.device)
    call_index = torch.full_like(step, dropout.call_index + 2**16)
    words = philox((quad, token_T1, step, call_index), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    word_TD = torch.stack(words, dim=-1).flatten(1)[:, :width]
    threshold = round(dropout.probability * 2**24)
    return torch.where(word_TD >> 8 >= threshold, x_TD * (2**24 / (2**24 - threshold)), 0)


@operation
def layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension, with fp32 statistics for any dtype of x; [..., D] → [..., D]."""
    if uses_kernels(x, "layer_norm"):
        return kernels().layer_norm(x, weight_D, bias_D, eps)
    return layer_norm_reference(x, weight_D, bias_D, eps)


def layer_norm_reference(x: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight_D.to(x.dtype), None if bias_D is None else bias_D.to(x.dtype), eps)


@operation
def residual_norm(
    x_TF: Tensor,
    weight_DF: Tensor,
    bias_D: Tensor,
    residual_TD: Tensor,
    norm_weight_D: Tensor,
    norm_bias_D: Tensor | None,
    eps: float,
    dropout: Dropout,
) -> Tensor:
    """LayerNorm(residual + dropout(x @ weight.T + bias)), the end of every post-norm sublayer; → [T, D].

    The kernel adds the bias, so its backward pass yields the bias gradient at no extra cost.
    """
    if dropout.has_kernel and uses_kernels(x_TF, "residual_norm"):
        norm = (residual_TD, norm_weight_D, norm_bias_D, eps, *dropout.arguments)
        return kernels().residual_norm(linear(x_TF, weight_DF), bias_D, *norm)[0]
    h_TD = linear(x_TF, weight_DF, bias_D)
    z_TD = residual_TD + (dropout_reference(h_TD, dropout) if dropout.probability else h_TD)
    return layer_norm_reference(z_TD, norm_weight_D, norm_bias_D, eps)


@operation
def add_norm(
    x_TF: Tensor,
    weight_DF: Tensor,
    residual_TD: Tensor,
    norm_weight_D: Tensor,
    norm_bias_D: Tensor | None,
    eps: float,
    dropout: Dropout,
) -> tuple[Tensor, Tensor]:
    """residual + dropout(x @ weight.T), the end of every pre-norm sublayer, and its LayerNorm; → two [T, D].

    The next sublayer reads the second. The kernel's backward pass adds the gradients of both.
    """
    if dropout.has_kernel and uses_kernels(x_TF, "add_norm"):
        norm = (norm_weight_D, norm_bias_D, eps, *dropout.arguments)
        return fused.AddNorm.apply(x_TF, weight_DF, residual_TD, *norm)
    sum_TD = residual_TD + dropout_reference(linear(x_TF, weight_DF), dropout)
    return sum_TD, layer_norm_reference(sum_TD, norm_weight_D, norm_bias_D, eps)


@operation
def embedding_norm(
    ids: tuple[Tensor, Tensor, Tensor],
    tables: tuple[Tensor, Tensor, Tensor],
    norm_weight_E: Tensor,
    norm_bias_E: Tensor,
    eps: float,
    dtype: torch.dtype,
    dropout: Dropout,
    *,
    sparse: bool = False,
) -> Tensor:
    """dropout(LayerNorm(token + position + type embedding)) in `dtype`; → [T, E].

    `ids` are int [T]: tokens, positions and types (0 or 1). `tables` are fp32 [V, E], [L, E] and [2, E]. `sparse`
    applies to the token table, as in `gather_rows`.
    """
    if dropout.has_kernel and uses_kernels(tables[0], "embedding_norm"):
        return kernels().embedding_norm(*ids, *tables, norm_weight_E, norm_bias_E, eps, dtype, *dropout.arguments)[0]
    token_TE = gather_rows(tables[0], ids[0], sparse=sparse)
    position_TE, type_TE = (gather_rows(table, ids_T) for ids_T, table in zip(ids[1:], tables[1:], strict=True))
    x_TE = (token_TE + position_TE + type_TE).to(dtype)
    return dropout_reference(layer_norm_reference(x_TE, norm_weight_E, norm_bias_E, eps), dropout)


@operation
def bias_gelu(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    """gelu(x @ weight.T + bias) with the exact (erf) GELU; [T, D] → [T, F]."""
    if uses_kernels(x_TD, "bias_gelu"):
        return kernels().bias_gelu(linear(x_TD, weight_FD), bias_F)
    return bias_gelu_reference(x_TD, weight_FD, bias_F)


def bias_gelu_reference(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    return F.gelu(linear(x_TD, weight_FD, bias_F))


@operation
def geglu(x_TD: Tensor, weight: Tensor) -> Tensor:
    """gelu(a) * b, where [a, b] = x @ weight.T, as in ModernBERT; [T, D], [2F, D] → [T, F]."""
    if uses_kernels(x_TD, "geglu"):
        return kernels().geglu(linear(x_TD, weight))
    if uses_cpu_ops(x_TD):
        return cpu_ops.geglu(x_TD, weight)
    return geglu_reference(x_TD, weight)


def geglu_reference(x_TD: Tensor, weight: Tensor) -> Tensor:
    activated, gate = linear(x_TD, weight).chunk(2, dim=-1)
    return F.gelu(activated) * gate


# One kernel for the sublayer; the GELU or GeGLU in the epilogues of the products, with two tilings; a separate GELU.
FEED_FORWARD_KERNELS = ("narrow", "fused", "pipelined", "apart")


def feed_forward_kernels(x_TD: Tensor, inner_width: int, *, is_gated: bool = False) -> list[str]:
    """Returns the `FEED_FORWARD_KERNELS` that `(gated_)feed_forward` can use, the preferred one first."""
    is_narrow = kernels().narrow_feed_forward_supports(x_TD, inner_width, is_gated)
    runs = (is_narrow, kernels().matmul_gelu_is_profitable(x_TD), kernels().matmul_gelu_pipelines(x_TD), True)
    return [name for name, does_run in zip(FEED_FORWARD_KERNELS, runs, strict=True) if does_run]


@operation
def feed_forward(x_TD: Tensor, weights: SublayerWeights, eps: float, dropout: Dropout) -> Tensor:
    """norm(x + dropout(gelu(x @ in_weight.T + in_bias) @ out_weight.T + out_bias)); [T, D] → [T, D]."""
    kernel = choice("feed_forward", x_TD)
    if kernel != "reference" and dropout.has_kernel:
        kernel = feed_forward_kernels(x_TD, weights.in_weight.shape[0])[0] if kernel == "kernel" else kernel
        if kernel == "narrow":
            return fused.NarrowFeedForward.apply(x_TD, *weights, eps, *dropout.arguments)
        return fused.FeedForward.apply(x_TD, *weights, eps, kernel, *dropout.arguments)
    inner_TF = bias_gelu(x_TD, weights.in_weight, weights.in_bias)
    return residual_norm(inner_TF, *weights[2:4], x_TD, *weights[4:], eps, dropout)


@operation
def gated_feed_forward(
    x_TD: Tensor,
    in_weight: Tensor,
    out_weight_DF: Tensor,
    residual_TD: Tensor,
    norm_weight_D: Tensor,
    norm_bias_D: Tensor | None,
    eps: float,
    dropout: Dropout,
) -> tuple[Tensor, Tensor]:
    """residual + dropout((gelu(a) * b) @ out_weight.T), where [a, b] = x @ in_weight.T, and its LayerNorm.

    [T, D], [2F, D], [D, F], [T, D] → two [T, D], as in `add_norm`.
    """
    kernel = choice("gated_feed_forward", x_TD)
    norm = (residual_TD, norm_weight_D, norm_bias_D, eps)
    if kernel != "reference" and dropout.has_kernel:
        inner_width = out_weight_DF.shape[1]
        kernel = feed_forward_kernels(x_TD, inner_width, is_gated=True)[0] if kernel == "kernel" else kernel
        weights = (in_weight, out_weight_DF)
        if kernel == "narrow":
            return fused.NarrowGatedFeedForward.apply(x_TD, *weights, *norm, *dropout.arguments)
        return fused.GatedFeedForward.apply(x_TD, *weights, *norm, kernel, *dropout.arguments)
    return add_norm(geglu(x_TD, in_weight), out_weight_DF, *norm, dropout)


def rotary_angles(
    position_ids_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine, [T, 1, H/2] in `dtype`, of the rotary angles (Su et al., 2021)."""
    exponents = torch.arange(0, head_dim, 2, dtype=dtype, device=position_ids_T.device) / head_dim
    angles_T1H = (position_ids_T[:, None].to(dtype) * (theta**-exponents))[:, None, :]
    return angles_T1H.cos(), angles_T1H.sin()


@operation
def rotary_qkv(
    x_TD: Tensor, weight: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys with rotary position embeddings, and values; [T, D], [3D, D] → [T, N, H] each.

    Implementations may order the dimensions within a head differently, but in the same way for queries and keys.
    """
    if uses_cpu_ops(x_TD):
        qkv_TX = cpu_ops.rotary_qkv(x_TD, weight, cos_T1H, sin_T1H, num_heads)
        q, k, v = qkv_TX.view(x_TD.shape[0], 3, num_heads, -1).unbind(1)
        return q, k, v
    if uses_kernels(x_TD, "rotary_qkv"):
        return fused.RotaryQKV.apply(x_TD, weight, cos_T1H, sin_T1H, num_heads)
    return rotary_qkv_reference(x_TD, weight, cos_T1H, sin_T1H, num_heads)


def rotary_qkv_reference(
    x_TD: Tensor, weight: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = linear(x_TD, weight).view(x_TD.shape[0], 3, num_heads, -1).unbind(1)
    return rotate(q, cos_T1H, sin_T1H), rotate(k, cos_T1H, sin_T1H), v


def rotate(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    """Rotates the pairs of dimensions i and i + H/2, in the angles' dtype; [T, N, H] → [T, N, H] in x's dtype."""
    x1, x2 = x_TNH.to(cos_T1H.dtype).chunk(2, dim=-1)
    return torch.cat((x1 * cos_T1H - x2 * sin_T1H, x2 * cos_T1H + x1 * sin_T1H), dim=-1).to(x_TNH.dtype)


def masked_cross_entropy(logits_MV: Tensor, target_M: Tensor) -> Tensor:
    """-log softmax(logits)[target] in fp32; [M, V], int [M] → [M]."""
    return F.cross_entropy(wide(logits_MV), target_M.long(), reduction="none")


@operation
def corrupt(masked_ids_BL: Tensor, position_M: Tensor, original_M: Tensor, sample_M: Tensor) -> tuple[Tensor, Tensor]:
    """Scatters the samples into the original tokens: the discriminator's input and its labels.

    A position masked more than once gets floor(mean) of its samples, an arbitrary token, as in the published code
    (`scatter_update`). A sample that equals the original token counts as original.

    Args:
        masked_ids_BL: The generator's input, int.
        position_M: The position of each slot in the flat buffer, int64; T if unused. Rows have equal numbers of slots.
        original_M: The token that each slot masks, int64.
        sample_M: The generator's sample for each slot, int64.

    Returns:
        Corrupted ids, [T] in the masked ids' dtype, and bool [T], True for replaced tokens.
    """
    if uses_kernels(masked_ids_BL, "corrupt"):
        return kernels().corrupt(masked_ids_BL, position_M, original_M, sample_M)
    num_tokens = masked_ids_BL.numel()
    # One more element than tokens: unused slots write to it.
    spare = torch.zeros(num_tokens + 1, dtype=torch.int64, device=masked_ids_BL.device)
    original_T = spare.clone()
    original_T[:num_tokens] = masked_ids_BL.flatten()
    original_T = original_T.scatter(0, position_M, original_M)[:num_tokens]
    total_T = spare.index_add(0, position_M, sample_M)[:num_tokens]
    draws_T = spare.index_add(0, position_M, torch.ones_like(sample_M))[:num_tokens]
    corrupted_T = torch.where(draws_T > 0, total_T // draws_T.clamp(min=1), original_T)
    return corrupted_T.to(masked_ids_BL.dtype), corrupted_T != original_T


@operation
def replaced_logits(
    x_TD: Tensor,
    dense_weight_DD: Tensor,
    dense_bias_D: Tensor | None,
    weight_1D: Tensor,
    bias_1: Tensor,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """The discriminator's head: dense layer, GELU, LayerNorm if it has a weight, one logit per token.

    [T, D] → fp32 [T]. The kernel fuses everything after the dense layer's product, in fp32.
    """
    if uses_kernels(x_TD, "replaced_logits"):
        h_TD = linear(x_TD, dense_weight_DD)
        return kernels().gelu_logit(h_TD, dense_bias_D, weight_1D, bias_1, norm_weight_D, eps)
    x_TD = bias_gelu_reference(x_TD, dense_weight_DD, dense_bias_D)
    x_TD = x_TD if norm_weight_D is None else layer_norm_reference(x_TD, norm_weight_D, None, eps)
    return token_logits_reference(x_TD, weight_1D, bias_1)


@operation
def token_logits(x_TD: Tensor, weight_1D: Tensor, bias_1: Tensor | None) -> Tensor:
    """A classifier of tokens; [T, D] → fp32 [T]. Rounded to bf16, most logits early in training would be equal."""
    if uses_kernels(x_TD, "token_logits"):
        return kernels().token_logits(x_TD, weight_1D, bias_1)
    return token_logits_reference(x_TD, weight_1D, bias_1)


def token_logits_reference(x_TD: Tensor, weight_1D: Tensor, bias_1: Tensor | None) -> Tensor:
    return F.linear(wide(x_TD), weight_1D, bias_1).squeeze(-1)


@operation
def discriminator_loss(logits_T: Tensor, replaced_T: Tensor, valid_T: Tensor) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy summed over valid tokens (positive = "replaced"), and totals for metrics.

    Float [T], bool [T] and bool [T] → fp32 scalar, and int64 [5] in the order of `DISCRIMINATOR_TOTALS`.
    """
    if uses_kernels(logits_T, "discriminator_loss"):
        return kernels().discriminator_loss(logits_T, replaced_T, valid_T)
    return discriminator_loss_reference(logits_T, replaced_T, valid_T)


def discriminator_loss_reference(logits_T: Tensor, replaced_T: Tensor, valid_T: Tensor) -> tuple[Tensor, Tensor]:
    loss = (binary_cross_entropy(logits_T, replaced_T) * valid_T).sum()
    predicted_T = (logits_T.detach() > 0) & valid_T
    replaced_T = replaced_T & valid_T
    correct_T = (predicted_T == replaced_T) & valid_T
    return loss, torch.stack([x.sum() for x in (correct_T, predicted_T & replaced_T, predicted_T, replaced_T, valid_T)])


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """max(z, 0) - z*y + log1p(exp(-|z|)) in fp32, elementwise."""
    z = wide(logits)
    return z.clamp(min=0) - z * labels + torch.log1p(torch.exp(-z.abs()))


@operation
def generator_head(
    x_ME: Tensor,
    table_VE: Tensor,
    bias_V: Tensor,
    target_M: Tensor,
    weight_M: Tensor,
    slot_M: Tensor,
    seed_and_step: Tensor | None,
    temperature: float = 1.0,
    disallow_correct: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Cross-entropy, samples and argmax of the generator's logits, x @ table.T + bias.

    Args:
        x_ME: The input of the product with the table.
        table_VE: The embedding table, fp32; cast to x's dtype, as is the bias.
        bias_V: The output bias, fp32.
        target_M: The masked tokens, int64.
        weight_M: The slots' weights in the loss, fp32.
        slot_M: Indices of the masked slots within the step, int64; keys of the samples' random numbers.
        seed_and_step: int64 [2] on x's device; None to draw no samples.
        temperature: Temperature of the samples; the cross-entropy always uses 1.
        disallow_correct: Excludes the target from the samples.

    Returns:
        The weighted sum of the cross-entropies (fp32 scalar; differentiable in x, table and bias), sample_M (int64, see
        `sampling`; None without a seed), and correct_M (bool), True where the target has the largest logit.
    """
    if uses_cpu_ops(x_ME, compiled=True):
        arguments = (target_M, weight_M, slot_M, seed_and_step, temperature, disallow_correct)
        return cpu_ops.generator_head(x_ME, table_VE, bias_V, *arguments)
    head = kernels().generator_head if uses_kernels(x_ME, "generator_head") else generator_head_reference
    nll_M, sample_M, correct_M = head(
        x_ME, table_VE, bias_V, target_M, slot_M, seed_and_step, temperature, disallow_correct
    )
    return (nll_M * weight_M).sum(), sample_M, correct_M


def generator_head_reference(
    x_ME: Tensor,
    table_VE: Tensor,
    bias_V: Tensor,
    target_M: Tensor,
    slot_M: Tensor,
    seed_and_step: Tensor | None,
    temperature: float = 1.0,
    disallow_correct: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the cross-entropy of each slot, fp32 [M], instead of the weighted sum."""
    logits_MV = linear(x_ME, table_VE, bias_V)
    nll_M = masked_cross_entropy(logits_MV, target_M)
    logits_MV = logits_MV.detach()
    correct_M = logits_MV.argmax(-1) == target_M
    if seed_and_step is None:
        return nll_M, None, correct_M
    logits_MV = modify_logits(logits_MV, target_M, temperature, disallow_correct)
    return nll_M, sample_categorical(logits_MV, slot_M, seed_and_step), correct_M


@operation
def sample_alias(table_V2: Tensor, slot_M: Tensor, seed_and_step: Tensor) -> Tensor:
    """One sample per slot from the distribution of a `sampling.alias_table`; [V, 2], int64 [M] → int64 [M]."""
    sample = kernels().sample_alias if uses_kernels(slot_M, "sample_alias") else sample_alias_reference
    return sample(table_V2, slot_M, seed_and_step)
