"""FLOPs of a training run: the published count to the digit, and the true one.

The published count (appendix E of the paper, `flops_computation.py` of its code) is for comparison
with published totals. It counts embedding lookups as dense products and the backward pass as much as
the forward pass, so MFU must not be computed from it: `flops_per_token` counts what the hardware
multiplies.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from electra_fast.config import Config, ModelConfig
from electra_fast.errors import InputError
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import Network

PUBLISHED_VOCABULARY = 30522
# The published count has 20 of 128 positions predicted, whatever the masking probability.
PUBLISHED_PREDICTED = 0.15625

# Dense bf16 peak in FLOP/s (V100: fp16), by words of the device's name; the first line that fits counts.
_PEAKS: tuple[tuple[set[str], float], ...] = (
    ({"H100", "PCIE"}, 756e12),
    ({"H100", "NVL"}, 835e12),
    ({"H100"}, 989e12),
    ({"H200", "NVL"}, 835e12),
    ({"H200"}, 989e12),
    ({"B200"}, 2250e12),
    ({"A100"}, 312e12),
    ({"L40S"}, 362e12),
    ({"L4"}, 121e12),
    ({"A10"}, 125e12),
    ({"V100"}, 125e12),
    ({"RTX", "4090"}, 165e12),
    ({"RTX", "3090"}, 71e12),
)
# Slices and slower or faster variants of the same number, whose peak is another.
_VARIANTS = {"MIG", "LAPTOP", "MAX", "TI", "D", "SUPER"}


@dataclass(frozen=True)
class Flops:
    """Training FLOPs per token (forward and backward) of each part: matrix products and attention only."""

    discriminator: float
    generator: float
    generator_head: float

    @property
    def total(self) -> float:
        """All parts together."""
        return self.discriminator + self.generator + self.generator_head


def flops_per_token(config: Config) -> Flops:
    """The true model FLOPs per token of training the objective's networks.

    A multiply-add counts as two operations, the backward pass as two forward passes, attention over the whole row
    length or the window of local attention, lookups as nothing, and each head for its share of the tokens.
    """
    networks, length = objective_of(config).networks(), config.data.sequence_length
    encoders = {role: 3.0 * _encoder(network.shape, length) for role, network in networks.items()}
    heads = {
        role: sum(3.0 * head.token_fraction * _head(head.kind, network.shape) for head in network.heads.values())
        for role, network in networks.items()
    }
    return Flops(
        discriminator=encoders.get("discriminator", 0.0) + heads.get("discriminator", 0.0),
        generator=encoders.get("generator", 0.0),
        generator_head=heads.get("generator", 0.0),
    )


def _encoder(shape: ModelConfig, length: int) -> int:
    """Forward FLOPs per token."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    matrices = 3 if shape.architecture == "modern" else 2  # GeGLU has a second input matrix
    layer = 2 * 4 * hidden * hidden + 2 * matrices * hidden * inner
    window = min(length, 2 * (shape.local_attention // 2) + 1)
    attended = sum(window if shape.is_local(i) else length for i in range(shape.num_layers))
    return shape.num_layers * layer + 2 * 2 * attended * hidden + _projection(shape)


def _projection(shape: ModelConfig) -> int:
    return 0 if shape.embedding_size == shape.hidden_size else 2 * shape.embedding_size * shape.hidden_size


def _head(kind: str, shape: ModelConfig) -> int:
    """Forward FLOPs per token that a head of `model.HEADS` computes for."""
    hidden, width = shape.hidden_size, shape.embedding_size
    if kind == "replaced_token":
        return 2 * hidden * (hidden + 1)
    table = 2 * width * _vocabulary(shape)
    if shape.architecture == "modern":
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
        """Forward FLOPs of a layer per token; the norm after attention counts 5 in all, as published."""
        h, i, s, heads = self.h, self.i, self.s, self.heads
        attention = 6 * h * h + 3 * h + 2 * h * s + 10 * s * heads + 2 * h * s + 2 * h * h + h + 4 * h + h + 5
        return attention + 4 * h * i + 9 * i + h + 4 * h + h + 5 * h

    def embedding(self) -> int:
        """Token, position and type lookups as dense products, sum, norm, dropout, projection."""
        e, h = self.e, self.h
        return 2 * e * self.v + 2 * e * (self.s + 2) + 11 * e + (2 * h * e + h if e != h else 0)

    def train(self, batch: int, steps: int, is_discriminator: bool) -> float:
        """Forward and backward FLOPs of a run."""
        h, e = self.h, self.e
        masked_head = PUBLISHED_PREDICTED * (2 * e * self.v + 2 * h * e + 14 * e + 7 * self.v)
        head = 2 * h * h + 11 * h if is_discriminator else masked_head
        return float(2 * batch * steps * (self.s * (self.layers * self.layer() + self.embedding() + head)))


def _bert(h: int, layers: int, s: int, e: int, batch: int, steps: int) -> float:
    return _Published(h, layers, s, e, 4 * h, max(h // 64, 1)).train(batch, steps, False)


def _electra(h: int, generator: int, layers: int, s: int, e: int, batch: int, steps: int) -> float:
    discriminator = _Published(h, layers, s, e, 4 * h, h // 64).train(batch, steps, True)
    return discriminator + _bert(generator, layers, s, e, batch, steps)


def published_flops(name: str) -> float:
    """A total that the published script prints, to the digit; ValueError lists the names."""
    totals = {
        "electra_small": lambda: _electra(256, 64, 12, 128, 128, 128, 1_000_000),
        "electra_base": lambda: _electra(768, 256, 12, 512, 768, 256, 766_000),
        "electra_400k": lambda: _electra(1024, 256, 24, 512, 1024, 2048, 400_000),
        "electra_1.75M": lambda: _electra(1024, 256, 24, 512, 1024, 2048, 1_750_000),
        "bert_small": lambda: _bert(256, 12, 128, 128, 128, 1_450_000),
        "bert_base": lambda: _bert(768, 12, 512, 768, 256, 1_000_000),
        # Published with the batch of BERT, 256, not the 2048 of ELECTRA-Large.
        "bert_large": lambda: _bert(1024, 24, 512, 1024, 256, 1_000_000),
    }
    if name not in totals:
        raise InputError(f"unknown published model {name!r}; there are {', '.join(totals)}")
    return totals[name]()


def published_training_flops(config: Config) -> float:
    """The published count of any `bert` configuration; ValueError for `modern`, which it doesn't know."""
    if config.model.architecture != "bert":
        raise InputError('the published count is of model.architecture = "bert" only')

    def total(network: Network) -> float:
        shape = network.shape
        published = _Published(
            shape.hidden_size,
            shape.num_layers,
            config.data.sequence_length,
            shape.embedding_size,
            shape.intermediate_size,
            shape.num_heads,
            _vocabulary(shape),
        )
        return published.train(config.train.batch_size, config.train.steps, "discriminator_head" in network.heads)

    networks = objective_of(config).networks()
    return sum(total(networks[role]) for role in ("discriminator", "generator") if role in networks)


def device_peak(name: str) -> float | None:
    """Dense bf16 peak of a GPU in FLOP/s by its name (`torch.cuda.get_device_name`); None if unknown."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if words & _VARIANTS:
        return None
    return next((peak for known, peak in _PEAKS if known <= words), None)


def report(config: Config) -> dict[str, object]:
    """What `electra-fast flops` prints: both counts, per token and in total (published: None for `modern`)."""
    per_token = flops_per_token(config)
    tokens_per_step = config.train.batch_size * config.data.sequence_length
    tokens = config.train.steps * tokens_per_step
    published = published_training_flops(config) if config.model.architecture == "bert" else None
    return {
        "published_total": published,
        "published_per_token": None if published is None else published / tokens,
        "per_token": asdict(per_token) | {"total": per_token.total},
        "per_step": per_token.total * tokens_per_step,
        "total": per_token.total * tokens,
        "tokens": tokens,
        "tokens_per_step": tokens_per_step,
        "vocab_size": _vocabulary(config.model),
    }
