"""FLOPs of a training run: the published count, reproduced exactly, and the true count.

The published count (appendix E of the paper, `flops_computation.py` of its code) is for comparison with published
totals. It counts embedding lookups as dense products and the backward pass like the forward pass, so MFU must not be
computed from it: `flops_per_token` counts the operations that the hardware executes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from electra_fast.config.config import Config, ModelConfig, config_of
from electra_fast.config.presets import OBJECTIVE_SPECS
from electra_fast.errors import InputError
from electra_fast.model.networks import Network
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import Stage
from electra_fast.results import Result

PUBLISHED_VOCABULARY = 30522
# The published count assumes 20 of 128 positions predicted, for any masking probability.
PUBLISHED_PREDICTED = 0.15625


@dataclass(frozen=True)
class Flops:
    """Training FLOPs per token of each part, matrix products and attention only. A discriminator includes its head."""

    discriminator: float = 0.0
    generator: float = 0.0
    generator_head: float = 0.0
    encoder: float = 0.0
    encoder_head: float = 0.0

    @property
    def total(self) -> float:
        return self.discriminator + self.generator + self.generator_head + self.encoder + self.encoder_head


def flops_per_token(config: Config, stages: Sequence[Stage] | None = None, *, of_all_tokens: bool = False) -> Flops:
    """Returns the true FLOPs per token of training the objective's networks.

    A multiply-add counts as two operations, and the backward pass as two forward passes. Attention counts over the row
    length or the local window, lookups do not count, and each head counts for its fraction of the tokens. Shared
    embeddings also count as trained during `objective.generator_first`, since the head computes their gradient.

    Args:
        config: The run's configuration.
        stages: Stages over whose steps to average; by default the whole run.
        of_all_tokens: Counts last layers as if they computed all tokens, even if only masked tokens are needed.
    """
    stages = stages or objective_of(config).stages()
    length = config.data.sequence_length
    num_steps = sum(stage.num_steps for stage in stages)
    parts = dict.fromkeys(asdict(Flops()), 0.0)
    for stage in stages:
        fraction = stage.num_steps / num_steps
        for role, network in stage.objective.networks().items():
            backward = 2 if network.is_trained else 0
            cost = _encoder(network.shape, length)
            if network.shape.architecture == "deberta":
                cost = _deberta_encoder(network.shape, config, is_decoder=role == "generator")
            elif not (of_all_tokens or network.shape.dropout or network.shape.attention_dropout) and all(
                head.is_of_masked for head in network.heads.values()
            ):  # `Electra.hidden` with slots
                cost -= (1 - config.data.mask_prob) * _after_attention(network.shape)
            parts[role] += fraction * (1 + backward) * cost
            head_part = role if role == "discriminator" else f"{role}_head"
            for head in network.heads.values():
                cost = _head(head.kind, network.shape) * (config.data.mask_prob if head.is_of_masked else 1)
                parts[head_part] += fraction * (head.num_forward + backward) * cost
    return Flops(**parts)


def _encoder(shape: ModelConfig, length: int) -> float:
    """Returns forward FLOPs per token."""
    hidden = shape.hidden_size
    layer = 2 * 3 * hidden * hidden + _after_attention(shape)
    window = min(length, 2 * (shape.local_attention // 2) + 1)
    attended = sum(window if shape.is_local(i) else length for i in range(shape.num_layers))
    return shape.num_layers * layer + 2 * 2 * attended * hidden + _projection(shape)


def _after_attention(shape: ModelConfig) -> int:
    """Returns forward FLOPs per token of a layer's output projection and feed-forward."""
    matrices = 3 if shape.architecture == "modernbert" else 2  # GeGLU has a second input matrix
    return 2 * shape.hidden_size * shape.hidden_size + 2 * matrices * shape.hidden_size * shape.intermediate_size


def _deberta_encoder(shape: ModelConfig, config: Config, *, is_decoder: bool) -> float:
    """Returns forward FLOPs per token, with the scores of contents with distances.

    Queries and keys of distances are computed once per micro-batch. With `is_decoder`, the last layer counts twice.
    """
    length = config.data.sequence_length
    train = config.train
    hidden = shape.hidden_size
    num_distances = 2 * length - 1
    num_rows = num_distances if length - 1 <= shape.position_buckets // 2 else 2 * shape.position_buckets
    tokens = train.batch_size // train.num_micro_batches * length
    extra = 2 * 2 * num_distances * hidden + 2 * num_rows * 2 * hidden * hidden / tokens
    one, two = (_encoder(dataclasses.replace(shape, num_layers=n), length) for n in (1, 2))
    convolution = 2 * shape.conv_kernel_size * hidden * hidden if shape.num_layers > is_decoder else 0
    return one - (two - one) + (shape.num_layers + is_decoder) * (two - one + extra) + convolution


def _projection(shape: ModelConfig) -> int:
    return 0 if shape.embedding_size == shape.hidden_size else 2 * shape.embedding_size * shape.hidden_size


def _head(kind: str, shape: ModelConfig) -> int:
    """Returns a head's forward FLOPs per predicted token."""
    hidden = shape.hidden_size
    width = shape.embedding_size
    is_plain = shape.heads == "plain"
    if kind == "logit" or (kind == "replaced_token" and is_plain):
        return 2 * hidden
    if kind == "replaced_token":
        return 2 * hidden * (hidden + 1)
    table = 2 * width * _vocabulary(shape)
    if is_plain:
        return _projection(shape) + table
    if shape.architecture == "modernbert":
        return 2 * hidden * hidden + _projection(shape) + table
    return 2 * hidden * width + table


def _vocabulary(shape: ModelConfig) -> int:
    return shape.vocab_size or PUBLISHED_VOCABULARY


@dataclass(frozen=True)
class _Published:
    """A network of the published count: hidden h, layers, length s, vocabulary v, embedding e, FFN i, heads."""

    h: int
    layers: int
    s: int
    e: int
    i: int
    heads: int
    v: int = PUBLISHED_VOCABULARY

    def layer(self) -> int:
        """Returns a layer's forward FLOPs per token. The norm after attention counts 5 in total, as published."""
        h = self.h
        i = self.i
        s = self.s
        heads = self.heads
        attention = 6 * h * h + 3 * h + 2 * h * s + 10 * s * heads + 2 * h * s + 2 * h * h + h + 4 * h + h + 5
        return attention + 4 * h * i + 9 * i + h + 4 * h + h + 5 * h

    def embedding(self) -> int:
        """Returns the FLOPs of lookups (as dense products), sum, norm, dropout and projection."""
        e = self.e
        h = self.h
        return 2 * e * self.v + 2 * e * (self.s + 2) + 11 * e + (2 * h * e + h if e != h else 0)

    def head(self, kind: str, token_fraction: float = PUBLISHED_PREDICTED) -> float:
        """Returns a head's FLOPs per input token; the published count has no single logit."""
        h = self.h
        e = self.e
        if kind == "masked_lm":
            return token_fraction * (2 * e * self.v + 2 * h * e + 14 * e + 7 * self.v)
        return 2 * h * h + 11 * h if kind == "replaced_token" else 2 * h

    def train(self, batch: int, steps: int, heads: float, num_passes: int = 2) -> float:
        """Returns the FLOPs of a run, given the encoder's passes per step and the heads' cost."""
        encoder = num_passes * (self.layers * self.layer() + self.embedding())
        return float(batch * steps * (self.s * (encoder + heads)))


def published_training_flops(config: Config) -> float | None:
    """Returns the published count of a `bert` configuration with dense heads; None for other configurations.

    The published script covers `electra` and `mlm`. For other objectives, its formulas are applied to their networks
    and heads: frozen networks only run forward, and a head on all tokens counts for all tokens.
    """
    if config.model.architecture != "bert" or config.model.heads != "dense":
        return None

    def total(network: Network, num_steps: int) -> float:
        shape = network.shape
        backward = 1 if network.is_trained else 0
        published = _Published(
            shape.hidden_size,
            shape.num_layers,
            config.data.sequence_length,
            shape.embedding_size,
            shape.intermediate_size,
            shape.num_heads,
            _vocabulary(shape),
        )
        heads = 0.0
        for head in network.heads.values():
            fraction = PUBLISHED_PREDICTED if head.is_of_masked else 1.0
            heads += (head.num_forward + backward) * published.head(head.kind, fraction)
        return published.train(config.train.batch_size, num_steps, heads, 1 + backward)

    # The discriminator comes first, in the published script's order of addition.
    return sum(
        total(network, stage.num_steps)
        for stage in objective_of(config).stages()
        for _, network in sorted(stage.objective.networks().items())
    )


def objectives_report(config: Config) -> dict[str, dict[str, float | None]]:
    """Returns each objective's FLOPs per token and the ratio to `electra`, true and, if known, published.

    Values are None for objectives that the configuration does not allow.
    """
    counts = {name: _counts(config, name) for name in OBJECTIVE_SPECS}
    electra = counts["electra"]
    return {
        name: {
            "per_token": true,
            "times_electra": true / electra[0] if true and electra[0] else None,
            "published_times_electra": published / electra[1] if published and electra[1] else None,
        }
        for name, (true, published) in counts.items()
    }


def _counts(config: Config, name: str) -> tuple[float | None, float | None]:
    """Returns the true count per token and the published total of a configuration with another objective."""
    try:
        other = config.with_objective(name)
    except InputError:  # for example, a single step is too few for two stages
        return None, None
    return flops_per_token(other).total, published_training_flops(other)


@dataclass(frozen=True, eq=False, repr=False)
class FlopCount(Result):
    """The result of `flops`: both counts, per token and in total. Published counts may be None."""

    published_total: float | None
    published_per_token: float | None
    per_token: Mapping[str, float]
    """True FLOPs by part, and their `total`."""
    per_step: float
    total: float
    tokens: int
    tokens_per_step: int
    vocab_size: int
    objectives: Mapping[str, Mapping[str, float | None]]
    """`objectives_report`."""


def flops(config: Config | str | os.PathLike[str] | None = None) -> FlopCount:
    """Counts the FLOPs of a training run: the published count of the paper's code, and the true count.

    Args:
        config: The run's configuration, or its TOML file; `Config()` by default.
    """
    config = config_of(config)
    per_token = flops_per_token(config)
    tokens_per_step = config.train.batch_size * config.data.sequence_length
    tokens = config.train.steps * tokens_per_step
    published = published_training_flops(config)
    return FlopCount(
        published_total=published,
        published_per_token=None if published is None else published / tokens,
        per_token={part: count for part, count in asdict(per_token).items() if count} | {"total": per_token.total},
        per_step=per_token.total * tokens_per_step,
        total=per_token.total * tokens,
        tokens=tokens,
        tokens_per_step=tokens_per_step,
        vocab_size=_vocabulary(config.model),
        objectives=objectives_report(config),
    )
