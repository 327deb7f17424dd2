"""Variants of encoder, initialization, sampling and update that `recipes.py` tries and the package does not have.

Each is a function that changes the package in this process. They change classes and entry points rather than
operations, so that a model that was loaded before, such as a corruptor, computes as ever.

Shapes: T packed tokens, E embedding, D hidden, N heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from electra_fast.config.config import Config, ModelConfig
from electra_fast.model import initialization, model
from electra_fast.model.attention import AttentionMask, Queries, attention, query_attention
from electra_fast.model.layers import Linear
from electra_fast.ops import operations as ops
from electra_fast.ops.linear import linear
from electra_fast.ops.operations import Dropout
from electra_fast.optimizers import muon


def init_width(config: Config) -> None:
    """The published initialization with the deviation of layers and heads scaled to their inputs: 0.02 for 768."""
    original = initialization.initialize

    def initialize(network: nn.Module, architecture: str, seed: int) -> None:
        original(network, architecture, seed)
        # Tables stay: norms follow them. So do Glorot's matrices, which are scaled already.
        others = (".token", ".position", ".token_type", "projection.weight", "classifier.weight")
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if parameter.dim() == 2 and not name.endswith(others):
                    parameter.mul_((768 / parameter.shape[1]) ** 0.5)

    model.initialize = initialize


def init_published(config: Config) -> None:
    """The published initialization in the modern encoder."""

    def initialize(network: nn.Module, architecture: str, seed: int) -> None:
        initialization.initialize(network, "bert", seed)

    model.initialize = initialize


def init_unit(config: Config) -> None:
    """The modern initialization with matrices of variance 1 / inputs instead of a third of it."""

    def initialize(network: nn.Module, architecture: str, seed: int) -> None:
        initialization.initialize(network, architecture, seed)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if parameter.dim() == 2 and not name.endswith("token"):
                    parameter.mul_(3**0.5)

    model.initialize = initialize


class _Layer(model.ModernLayer):
    """A `ModernLayer` for training, with its parts apart."""

    def mixed(self, x_TD: Tensor, mask: AttentionMask, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        assert rotary is not None
        q, k, v = ops.rotary_qkv(x_TD, self.qkv.weight, *rotary, self.num_heads)
        out: Tensor = self.attention_out(attention(q, k, v, mask, 0.0).flatten(1))
        return out

    def fed(self, x_TD: Tensor) -> Tensor:
        out: Tensor = self.feed_forward_out(ops.geglu(x_TD, self.geglu_in.weight))
        return out

    def forward(
        self,
        x_TD: Tensor,
        mask: AttentionMask,
        rotary: tuple[Tensor, Tensor] | None,
        dropout: Dropout,
        queries: Queries | None = None,
    ) -> Tensor:
        assert queries is None
        x_TD = x_TD + self.mixed(x_TD if self.attention_norm is None else self.attention_norm(x_TD), mask, rotary)
        return x_TD + self.fed(self.feed_forward_norm(x_TD))


class _GeluLayer(_Layer):
    """With one input matrix of 1.5 times the width instead of GeGLU's two: the same FLOPs."""

    def __init__(self, config: ModelConfig, is_first: bool) -> None:
        super().__init__(config, is_first)
        width = 3 * config.intermediate_size // 2
        del self.geglu_in
        self.feed_forward_in = Linear(config.hidden_size, width, bias=False)
        self.feed_forward_out = Linear(width, config.hidden_size, bias=False)

    def fed(self, x_TD: Tensor) -> Tensor:
        out: Tensor = self.feed_forward_out(ops.bias_gelu(x_TD, self.feed_forward_in.weight, None))
        return out


class _PostNormLayer(_Layer):
    """With norms after the sums."""

    def __init__(self, config: ModelConfig, is_first: bool) -> None:
        super().__init__(config, is_first=False)

    def forward(
        self,
        x_TD: Tensor,
        mask: AttentionMask,
        rotary: tuple[Tensor, Tensor] | None,
        dropout: Dropout,
        queries: Queries | None = None,
    ) -> Tensor:
        assert self.attention_norm is not None
        x_TD = self.attention_norm(x_TD + self.mixed(x_TD, mask, rotary))
        normed: Tensor = self.feed_forward_norm(x_TD + self.fed(x_TD))
        return normed


class _UnrotatedLayer(_Layer):
    """Without rotary positions."""

    def mixed(self, x_TD: Tensor, mask: AttentionMask, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = self.qkv(x_TD).view(x_TD.shape[0], 3, self.num_heads, -1).unbind(1)
        out: Tensor = self.attention_out(attention(q, k, v, mask, 0.0).flatten(1))
        return out


class _PositionEmbeddings(model.Embeddings):
    """Token embeddings plus learned ones of the positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.position = nn.Parameter(torch.empty(config.max_positions, config.embedding_size))

    def forward(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        token_type_ids_T: Tensor,
        dtype: torch.dtype,
        dropout: Dropout,
    ) -> Tensor:
        x_TE: Tensor = super().forward(input_ids_T, position_ids_T, token_type_ids_T, dtype, dropout)
        return x_TE + ops.gather_rows(self.position, position_ids_T).to(dtype)


class _SquaredReluLayer(_GeluLayer):
    """With relu(x)^2 in the place of GELU."""

    def fed(self, x_TD: Tensor) -> Tensor:
        out: Tensor = self.feed_forward_out(linear(x_TD, self.feed_forward_in.weight).relu().square())
        return out


def squared_relu(config: Config) -> None:
    """Squared ReLU instead of GeGLU."""
    model.ModernLayer = _SquaredReluLayer


def gelu(config: Config) -> None:
    """GELU instead of GeGLU."""
    model.ModernLayer = _GeluLayer


def post_norm(config: Config) -> None:
    """Post-norm instead of pre-norm."""
    model.ModernLayer = _PostNormLayer


def learned_positions(config: Config) -> None:
    """Learned positions instead of rotary ones, which begin like the tokens."""
    model.ModernLayer, model.Embeddings = _UnrotatedLayer, _PositionEmbeddings

    def initialize(network: nn.Module, architecture: str, seed: int) -> None:
        initialization.initialize(network, architecture, seed)
        for name, parameter in network.named_parameters():
            if name.endswith(".position"):
                nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04, generator=random)

    random = torch.Generator().manual_seed(config.train.seed)
    model.initialize = initialize


class _RotaryBertLayer(model.BertLayer):
    """A `BertLayer` with rotary positions."""

    def forward(
        self,
        x_TD: Tensor,
        mask: AttentionMask,
        rotary: tuple[Tensor, Tensor] | None,
        dropout: Dropout,
        queries: Queries | None = None,
    ) -> Tensor:
        assert rotary is not None
        q, k, v = self.qkv(x_TD).view(x_TD.shape[0], 3, self.num_heads, -1).unbind(1)
        q, k, dropped = ops.rotate(q, *rotary), ops.rotate(k, *rotary), self.attention_dropout * self.training
        if queries is None:
            mixed = attention(q, k, v, mask, dropped)
        else:
            mixed = query_attention(q[queries.index_n], k, v, queries, dropped)
            x_TD = x_TD[queries.index_n]
        x_TD = self.attention_norm.after_residual(self.attention_out, mixed.flatten(1), x_TD, dropout)
        inner = ops.bias_gelu(x_TD, self.feed_forward_in.weight, self.feed_forward_in.bias)
        normed: Tensor = self.feed_forward_norm.after_residual(self.feed_forward_out, inner, x_TD, dropout.call(1))
        return normed


class _RotaryEncoder(model.Encoder):
    """An `Encoder` whose layers have the angles of rotary positions in `bert` too."""

    def forward(
        self,
        x_TE: Tensor,
        position_ids_T: Tensor,
        mask: AttentionMask,
        dropout: Dropout,
        queries: Queries | None = None,
    ) -> Tensor:
        x_TD = x_TE if self.projection is None else self.projection(x_TE)
        rotary = ops.rotary_angles(position_ids_T, self.head_dim, self.rope_theta, torch.float32)
        for i, layer in enumerate(self.layers):
            only = queries if i == len(self.layers) - 1 else None
            x_TD = layer(x_TD, mask, rotary, dropout.call(1 + 2 * i), only)
        return x_TD


class _OnePositionEmbeddings(model.Embeddings):
    """Embeddings to which all tokens are at position 0, so that its row is a bias."""

    def forward(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        token_type_ids_T: Tensor,
        dtype: torch.dtype,
        dropout: Dropout,
    ) -> Tensor:
        x_TE: Tensor = super().forward(input_ids_T, torch.zeros_like(position_ids_T), token_type_ids_T, dtype, dropout)
        return x_TE


def rotary_positions(config: Config) -> None:
    """Rotary positions instead of learned ones in the published encoder."""
    model.BertLayer, model.Encoder, model.Embeddings = _RotaryBertLayer, _RotaryEncoder, _OnePositionEmbeddings


class _Disentangled(nn.Module):
    """The discriminator's embeddings in DeBERTaV3 (arXiv 2111.09543): the generator's, detached, plus own ones."""

    def __init__(self, shared: model.Embeddings, config: ModelConfig) -> None:
        super().__init__()
        object.__setattr__(self, "shared", shared)  # the generator's module, not a part of this one
        self.delta = model.Embeddings(config)
        self.architecture = "modern"

    @property
    def token(self) -> Tensor:
        return self.shared.token.detach() + self.delta.token

    forward = model.Embeddings.forward


def gdes(config: Config) -> None:
    """Gradient-disentangled embedding sharing."""

    def initialize(network: nn.Module, architecture: str, seed: int) -> None:
        if "discriminator" in network.networks:
            network.embeddings = _Disentangled(network.generator_embeddings, network.config.model)
        initialization.initialize(network, architecture, seed)
        if "discriminator" in network.networks:
            nn.init.zeros_(network.embeddings.delta.token)

    model.initialize = initialize


def falling_temperature(config: Config) -> None:
    """A temperature of 2 at first that falls to 1 exponentially, by e in a tenth of the steps (arXiv 2310.07347)."""
    original, tenth = ops.generator_head, config.train.steps / 10

    def generator_head(*arguments: Any) -> Any:
        *rest, seed_and_step, temperature, disallow_correct = arguments
        if seed_and_step is not None:
            temperature = 1 + math.exp(-int(seed_and_step[1]) / tenth)
        return original(*rest, seed_and_step, temperature, disallow_correct)

    ops.generator_head = generator_head


# The composed polynomials that come closest to 1 for singular values above 0.01 in three steps, each by Remez'
# algorithm on what the one before leaves (Polar Express, arXiv 2505.16932): within 0.27 of it.
_THREE_STEPS = ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))


def three_steps(config: Config) -> None:
    """Muon by three optimal iterations instead of five equal ones."""

    def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        tall = matrices.shape[1] > matrices.shape[2]
        x = matrices.mT if tall else matrices
        x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)
        for a, b, c in _THREE_STEPS:
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return (x.mT if tall else x).to(matrices.dtype)

    muon.orthogonalize = orthogonalize


NUM_ITERATIONS = {"three-steps": 3}
"""Of Muon, where a patch changes it."""
PATCHES: dict[str, Callable[[Config], None]] = {
    "init-width": init_width,
    "init-published": init_published,
    "init-unit": init_unit,
    "gelu": gelu,
    "squared-relu": squared_relu,
    "post-norm": post_norm,
    "learned-positions": learned_positions,
    "rotary-positions": rotary_positions,
    "gdes": gdes,
    "falling-temperature": falling_temperature,
    "three-steps": three_steps,
}


def apply(names: Sequence[str], config: Config) -> None:
    """Changes the package in this process."""
    for name in names:
        PATCHES[name](config)
