"""The comparisons of `recipes.py`: scales, settings, and the studies that run them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

Keys = Mapping[str, str]
TFLOP = 1e12
LEVELS = tuple(number * TFLOP for number in (10, 22, 30, 45, 90, 270, 800))
"""Budgets at which curves have points, if there are runs."""


@dataclass(frozen=True)
class Scale:
    """Sizes of model, text and budgets.

    `preset` has the model's sizes, `modern_keys` the width that gives the modern encoder equal FLOPs, `corruptor` the
    masked language model that corrupts validation text. Runs with `finetuned_from` FLOPs and more are fine-tuned.
    """

    name: str
    preset: str
    keys: Keys
    modern_keys: Keys
    vocab_size: int
    finetuned_from: float
    corruptor: Keys
    corruptor_budget: float
    eval_batches: int


@dataclass(frozen=True)
class Setting:
    """A recipe to compare.

    Args:
        name: Name in tables, for `--only` and in the results.
        keys: Configuration keys that override the scale's.
        patches: Changes that the package does not have, from `recipe_run.PATCHES`.
        batch_factor: Factor of the scale's rows per step.
        parts: 1 / parts of the text is read.
        trainer: Class of `transformers` that its Trainer trains instead.
        tokens_per_second: Speed that turns hours into a number of steps.
    """

    name: str
    keys: Keys
    patches: tuple[str, ...] = ()
    batch_factor: float = 1.0
    parts: int = 1
    trainer: str = ""
    tokens_per_second: float = 0.0

    def changed(self, name: str, keys: Keys) -> Setting:
        return replace(self, name=name, keys={**self.keys, **keys})


# For one pass over the text: no dropout, no dropped or padded text, no repeated masks.
COMMON: Keys = {
    "data.masking": "tokens",
    "data.packing": "best-fit",
    "model.dropout": "0",
    "model.attention_dropout": "0",
    "train.precision": "fp32",
    "train.execution": "eager",
    "train.eval_every": "0",
    "train.keep_checkpoints": "1",
}
CORRECTED: Keys = {
    "optimizer.schedule": "linear",
    "optimizer.bias_correction": "true",
    "optimizer.beta2": "0.98",
}
MODERN = Setting(
    "modern",
    {
        **CORRECTED,
        "model.architecture": "modernbert",
        "data.mask_prob": "0.25",
        "optimizer.name": "muon",
        "optimizer.learning_rate": "0",
        "optimizer.muon_learning_rate": "0",
        "objective.disc_weight": "10",
        "objective.corrective_weight": "1",
    },
)

_MINI = Scale(
    name="mini",
    preset="mini",
    keys={"train.batch_size": "16", "train.precision": "bf16"},
    modern_keys={"model.intermediate_size": "704"},
    vocab_size=8192,
    finetuned_from=30 * TFLOP,
    corruptor={
        **CORRECTED,
        "model.architecture": "modernbert",
        "optimizer.name": "adamw",
        "optimizer.learning_rate": "2e-3",
        "objective.disc_weight": "25",
        "objective.name": "mlm",
        "train.precision": "fp32",
        "model.hidden_size": "128",
        "model.num_heads": "2",
        "model.intermediate_size": "352",
    },
    corruptor_budget=20 * TFLOP,
    eval_batches=16,
)
SCALES = {"mini": _MINI} | {
    f"mini-{size}": replace(_MINI, name=f"mini-{size}", vocab_size=size) for size in (4096, 16384)
}

# The published encoder and AdamW, with rotary positions, at the best of eleven learning rates and batch sizes (LOG.md).
GOOGLE_ROTARY = Setting(
    "google-rotary",
    {
        **CORRECTED,
        "optimizer.name": "adamw",
        "objective.disc_weight": "50",
        "optimizer.learning_rate": "2.5e-4",
    },
    patches=("rotary-positions",),
    batch_factor=0.25,
)


# A masked language model with the encoder, optimizer and learning rates of `modern`, the best of seven (LOG.md).
MLM = Setting(
    "mlm",
    {key: value for key, value in MODERN.keys.items() if not key.startswith("objective.")}
    | {"objective.name": "mlm", "data.masking": "80-10-10", "data.mask_prob": "0.35"},
)


def _shape(layers: int, width: int) -> Setting:
    keys = {
        "model.num_layers": str(layers),
        "model.hidden_size": str(width),
        "model.num_heads": str({64: 2, 512: 8}.get(width, 4)),
        "model.intermediate_size": str(11 * width // 4),
        "model.embedding_size": str(min(width, 128)),
        "generator.fraction": "0.5" if width == 64 else "0.25",
    }
    return MODERN.changed(f"{layers} layers of {width}", keys)


def _around(rates: Sequence[str]) -> Iterator[tuple[str, Keys]]:
    """Yields the learning rates of the rule, for Muon and for the rest, and other pairs."""
    for muon, rest in zip(rates[::2], rates[1::2], strict=True):
        keys = {"optimizer.muon_learning_rate": muon, "optimizer.learning_rate": rest}
        yield f"Muon {muon}, the rest {rest}", keys


_SMALL = _shape(2, 64)


STUDIES: dict[str, tuple[Setting, ...]] = {
    "curves": (MODERN, GOOGLE_ROTARY, MLM),
    # A generator has whole heads, so the narrowest is half as wide as its model. Among them are the presets' shapes.
    "sizes": (
        *(_shape(layers, width) for layers, width in ((2, 64), (2, 128), (4, 128), (4, 256), (12, 256), (2, 512))),
        replace(_shape(4, 256), name="4 layers of 256, twice the batch", batch_factor=2),
        replace(_shape(4, 256), name="4 layers of 256, four times the batch", batch_factor=4),
        replace(_SMALL.changed("2 layers of 64, rows of 32", {"data.sequence_length": "32"}), batch_factor=4),
    ),
    # The baseline at the smallest size, with the best learning rate there.
    "small-baseline": tuple(
        GOOGLE_ROTARY.changed(
            f"google-rotary, 2 layers of 64, {rate}",
            {
                **{key: value for key, value in _SMALL.keys.items() if key.startswith(("model.", "generator."))},
                "model.architecture": "bert",
                "model.intermediate_size": "256",
                "optimizer.learning_rate": rate,
            },
        )
        for rate in ("5e-4", "1e-3", "2e-3")
    ),
    # Around the rule of learning rates: 1,763 narrow steps with 10 TFLOPs, 19,084 small ones with 30, 1,393 wide
    # ones with 270; with 97, 2 layers of 512 would end on the plateau and hide differences of rates.
    "rates": tuple(
        replace(shape.changed(f"{shape.name}{batch}, {name}", keys), batch_factor=batch_factor)
        for shape, batch, batch_factor, rates in (
            (_SMALL, "", 1, ("2.8e-2", "4.8e-3", "5e-3", "4.8e-3", "1.2e-2", "1.1e-2", "1.2e-2", "2e-3")),
            (
                _SMALL,
                ", batches of 4",
                0.25,
                ("3.4e-3", "1.4e-3", "8e-3", "1.4e-3", "1.4e-3", "1.4e-3", "3.4e-3", "3.3e-3"),
            ),
            (_shape(2, 512), "", 1, ("1.3e-2", "4e-3", "3.2e-2", "4e-3", "5.5e-3", "4e-3", "1.3e-2", "9.6e-3")),
        )
        for name, keys in _around(rates)
    ),
    # Little text: 30 TFLOPs, or 2.8 M tokens, read it 8, 32 and 128 times.
    "epochs": tuple(
        replace(_shape(4, 128), name=f"4 layers of 128, a {parts}th of the text", parts=parts)
        for parts in (249, 995, 3980)
    ),
}


def _transformers(trainer: str, architecture: str, tokens_per_second: float) -> tuple[Setting, ...]:
    keys = {
        "objective.name": "mlm",
        "optimizer.name": "adamw",
        "optimizer.schedule": "linear",
        "optimizer.bias_correction": "true",
        "model.embedding_size": "256",
        "model.architecture": architecture,
    }
    base = Setting("", keys, batch_factor=2, trainer=trainer, tokens_per_second=tokens_per_second)
    rates = ("2.5e-4", "5e-4", "1e-3", "2e-3")
    return tuple(base.changed(f"{trainer}, {rate}", {"optimizer.learning_rate": rate}) for rate in rates)


HOUR = (
    (replace(MODERN, name="electra-fast", batch_factor=2, tokens_per_second=16_000),),
    _transformers("BertForMaskedLM", "bert", 10_200),
    _transformers("ModernBertForMaskedLM", "modernbert", 11_100),
)
"""Models after an hour: our default, and models of `transformers` at four learning rates, all with the preset's 32
rows per batch. The speeds were measured alone on two cores of an AMD EPYC, each in its faster precision, bf16.
"""
TRIAL_HOURS = 0.1
