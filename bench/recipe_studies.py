"""What `recipes.py` compares: scales, baselines with the settings that each is tuned over, and single ingredients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

Keys = Mapping[str, str]
TFLOP = 1e12
LEVELS = tuple(each * TFLOP for each in (10, 22, 30, 45, 90, 270, 800))
"""Budgets of the points that curves are drawn through, where there are any."""


@dataclass(frozen=True)
class Scale:
    """A size of model, text and budget at which recipes are compared.

    Args:
        name: On the command line.
        preset: Sizes of the model.
        keys: Configuration that all runs share.
        modern_keys: The same, of runs with the modern encoder: widths at which its FLOPs are those of the other.
        vocab_size: Of the corpus.
        trial_budgets: True FLOPs of the runs of `tune` by side, each twice the one before. Before the discriminator
            has left its plateau, settings cannot be told apart, so the first is not smaller than that takes.
        ingredient_budget: Of a study's runs, if no other is given.
        finetuned_from: Of the runs that are fine-tuned: below, that costs more than such a model.
        corruptor: Configuration of the masked language model that corrupts validation text.
        corruptor_budget: True FLOPs of its training.
        eval_batches: Batches of `recipe_run.EVAL_ROWS` rows that runs are judged on.
    """

    name: str
    preset: str
    keys: Keys
    modern_keys: Keys
    vocab_size: int
    trial_budgets: Mapping[str, tuple[float, ...]]
    ingredient_budget: float
    finetuned_from: float
    corruptor: Keys
    corruptor_budget: float
    eval_batches: int


@dataclass(frozen=True)
class Setting:
    """A contender: keys laid over those of the scale, patches of `recipe_patches`, and what was expected of it.

    `batch_factor` multiplies the scale's rows per step, `length_factor` their length; `muon_factor` and `rest_factor`
    the learning rates, which follow from the number of steps in the recipe `modern`. `early` is how the first half of
    the FLOPs is spent, if otherwise; the learning rate's schedule spans both. One of `parts` of the text is read. A
    `trainer` is the class of `transformers` that its Trainer trains instead of us. With `tokens_per_second`, steps are
    those of a time.
    """

    name: str
    keys: Keys
    patches: tuple[str, ...] = ()
    expected: str = ""
    batch_factor: float = 1.0
    length_factor: float = 1.0
    muon_factor: float = 1.0
    rest_factor: float = 1.0
    early: Setting | None = None
    parts: int = 1
    trainer: str = ""
    tokens_per_second: float = 0.0

    def changed(self, name: str, keys: Keys, patches: tuple[str, ...] = (), expected: str = "") -> Setting:
        """A variant of it."""
        return Setting(name, {**self.keys, **keys}, self.patches + patches, expected)


# One pass over text: no dropout, no dropped or padded text, and masks without repetition, on both sides.
COMMON: Keys = {
    "data.masking": "paper",
    "data.packing": "best-fit",
    "model.dropout": "0",
    "model.attention_dropout": "0",
    "train.precision": "fp32",
    "train.execution": "eager",
    "train.eval_every": "0",
    "train.keep_checkpoints": "1",
}

GOOGLE: Keys = {
    "optimizer.name": "adamw",
    "optimizer.schedule": "product",
    "optimizer.bias_correction": "false",
    "objective.disc_weight": "50",
}
ENCODER: Keys = {
    "model.architecture": "modern",
    "optimizer.schedule": "linear",
    "optimizer.bias_correction": "true",
    "optimizer.beta2": "0.98",
}
ADAMW: Keys = ENCODER | {"optimizer.name": "adamw", "optimizer.learning_rate": "2e-3", "objective.disc_weight": "25"}
MASKS: Keys = {"data.mask_prob": "0.25"}
MUON: Keys = {
    **ENCODER,
    **MASKS,
    "optimizer.name": "muon",
    "optimizer.learning_rate": "0",
    "optimizer.muon_learning_rate": "0",
    "objective.disc_weight": "10",
    "objective.corrective_weight": "1",
}
MODERN = Setting("modern", MUON)

SCALES = {
    "tiny": Scale(
        name="tiny",
        preset="tiny",
        keys={"train.batch_size": "32"},
        modern_keys={"model.intermediate_size": "176"},
        vocab_size=2048,
        trial_budgets={
            "google": (8 * TFLOP, 16 * TFLOP),
            "google-rotary": (4 * TFLOP, 8 * TFLOP),
            "mlm": (4 * TFLOP, 8 * TFLOP),
        },
        ingredient_budget=4 * TFLOP,
        finetuned_from=4 * TFLOP,
        corruptor={**ADAMW, "objective.name": "mlm", "model.intermediate_size": "176"},
        corruptor_budget=3 * TFLOP,
        eval_batches=64,
    ),
    "mini": Scale(
        name="mini",
        preset="mini",
        keys={"train.batch_size": "16", "train.precision": "bf16"},
        modern_keys={"model.intermediate_size": "704"},
        vocab_size=8192,
        trial_budgets={
            "google": (90 * TFLOP, 180 * TFLOP),
            "google-rotary": (45 * TFLOP, 90 * TFLOP),
            "mlm": (45 * TFLOP, 90 * TFLOP),
        },
        ingredient_budget=90 * TFLOP,
        finetuned_from=90 * TFLOP,
        corruptor={
            **ADAMW,
            "objective.name": "mlm",
            "train.precision": "fp32",
            "model.hidden_size": "128",
            "model.num_heads": "2",
            "model.intermediate_size": "352",
        },
        corruptor_budget=20 * TFLOP,
        eval_batches=16,
    ),
}
for _entries in (4096, 16384):
    _name = f"mini-{_entries}"
    SCALES[_name] = replace(SCALES["mini"], name=_name, vocab_size=_entries)


def _rate(value: str) -> Keys:
    return {"optimizer.learning_rate": value}


def _trials_google() -> tuple[Setting, ...]:
    """The published encoder. At these sizes AdamW as published leaves its generator at the unigram distribution."""
    base = Setting("google", GOOGLE)
    corrected = base.changed("", {"optimizer.schedule": "linear", "optimizer.bias_correction": "true"})
    corrected = corrected.changed("", {"optimizer.beta2": "0.98"})
    low = corrected.changed("google, corrected, 2.5e-4", _rate("2.5e-4"))
    high = corrected.changed("google, corrected, 5e-4", _rate("5e-4"))
    return (
        base.changed("google, 2.5e-4", _rate("2.5e-4")),
        low,
        high,
        high.changed(f"{high.name}, wider init", {}, ("init-width",)),
        replace(high, name=f"{high.name}, half the batch", batch_factor=0.5),
        replace(low, name=f"{low.name}, a quarter of the batch", batch_factor=0.25),
    )


def _more_google() -> tuple[Setting, ...]:
    """Rates and batches around the best of `google` with rotary positions."""
    quarter = next(each for each in _trials_google() if each.batch_factor == 0.25)
    rates = (("1.25e-4", 0.25), ("5e-4", 0.25), ("2.5e-4", 0.5), ("1e-3", 0.5), ("2.5e-4", 0.125))
    batches = {0.5: "half the batch", 0.25: "a quarter of the batch", 0.125: "an eighth of the batch"}
    return tuple(
        replace(
            quarter,
            name=f"google, corrected, {rate}, {batches[factor]}",
            keys={**quarter.keys, **_rate(rate)},
            batch_factor=factor,
        )
        for rate, factor in rates
    )


def _rotary(google: Setting) -> Setting:
    """A setting of the published encoder with rotary positions."""
    return replace(google, name=f"{google.name}, rotary positions", patches=(*google.patches, "rotary-positions"))


def _trials_mlm() -> tuple[Setting, ...]:
    """A masked language model with the encoder, the update rule and the rates of `modern`."""
    keys = {key: value for key, value in MUON.items() if not key.startswith("objective.")}
    base = Setting("mlm", {**keys, "objective.name": "mlm", "data.masking": "bert"})
    return (
        base,
        base.changed("mlm, mask_prob 0.15", {"data.mask_prob": "0.15"}),
        base.changed("mlm, mask_prob 0.35", {"data.mask_prob": "0.35"}),
        base.changed("mlm, mask_prob 0.5", {"data.mask_prob": "0.5"}),
        replace(base, name="mlm, twice Muon's rate", muon_factor=2),
        replace(base, name="mlm, half of Muon's rate", muon_factor=0.5),
        replace(base, name="mlm, half the batch", batch_factor=0.5),
    )


BASELINES: dict[str, tuple[Setting, ...]] = {
    "google": _trials_google(),
    "google-rotary": tuple(map(_rotary, _trials_google())),
    "mlm": _trials_mlm(),
}
"""The settings that `tune` tries of each baseline."""


def _scaled(name: str, expected: str, muon: float = 1.0, rest: float = 1.0) -> Setting:
    return replace(MODERN, name=name, expected=expected, muon_factor=muon, rest_factor=rest)


def _one(name: str, expected: str, keys: Keys | None = None, patch: str = "") -> Setting:
    return MODERN.changed(name, keys or {}, (patch,) if patch else (), expected)


_ADAMW = {**ADAMW, **MASKS}
_CORRECTED = {"objective.corrective_weight": "1"}
INGREDIENTS: tuple[Setting, ...] = (
    MODERN,
    Setting("google", {**GOOGLE, **_rate("1e-3")}, (), "far below"),
    *map(_rotary, _more_google()),
    # Objective and update rule together.
    Setting("AdamW, no corrective loss", _ADAMW, (), "-.03"),
    Setting("AdamW, no corrective loss, disc_weight 10", {**_ADAMW, "objective.disc_weight": "10"}, (), "-.03"),
    Setting(
        "AdamW 1e-3, no corrective loss, disc_weight 10",
        {**_ADAMW, **_rate("1e-3"), "objective.disc_weight": "10"},
    ),
    Setting("AdamW with the corrective loss", {**_ADAMW, **_CORRECTED}, (), "-.02"),
    Setting("AdamW 5e-4 with the corrective loss", {**_ADAMW, **_CORRECTED, **_rate("5e-4")}, (), "-.05"),
    Setting("AdamW 1e-3 with the corrective loss", {**_ADAMW, **_CORRECTED, **_rate("1e-3")}, (), "-.03"),
    Setting("AdamW 4e-3 with the corrective loss", {**_ADAMW, **_CORRECTED, **_rate("4e-3")}, (), "-.01"),
    _one("no corrective loss", "stalls, -.1", {"objective.corrective_weight": "0"}),
    # Rates and weights.
    _scaled("half of Muon's rate", "-.01", muon=0.5),
    _scaled("1.5 times Muon's rate", "-.02", muon=1.5),
    _scaled("twice Muon's rate", "-.04", muon=2),
    _scaled("half of the other rate", "-.01", rest=0.5),
    _scaled("twice the other rate", "0", rest=2),
    _one("disc_weight 5", "0", {"objective.disc_weight": "5"}),
    _one("disc_weight 25", "-.01", {"objective.disc_weight": "25"}),
    _one("corrective_weight 0.5", "0", {"objective.corrective_weight": "0.5"}),
    _one("corrective_weight 2", "0", {"objective.corrective_weight": "2"}),
    # Nearly none: without it, the head would be missing.
    replace(
        MODERN,
        name="corrective loss in the first half alone",
        keys={**MUON, "objective.corrective_weight": "1e-6"},
        expected="-.03",
        early=MODERN,
    ),
    _one("beta2 0.999", "0", {"optimizer.beta2": "0.999"}),
    _one("momentum 0.9", "0", {"optimizer.muon_momentum": "0.9"}),
    _one("weight decay 0.1", "0", {"optimizer.weight_decay": "0.1"}),
    _one("Muon by three optimal iterations", "0", patch="three-steps"),
    # The encoder, part by part.
    _one("GELU instead of GeGLU", "-.01", patch="gelu"),
    _one("squared ReLU instead of GeGLU", "0", patch="squared-relu"),
    _one("larger initialization", "0", patch="init-unit"),
    MODERN.changed("GELU and larger initialization", {}, ("gelu", "init-unit"), "0"),
    _one("learned positions instead of rotary ones", "-.03", patch="learned-positions"),
    _one("post-norm", "-.02", patch="post-norm"),
    _one("published initialization", "-.01", patch="init-published"),
    # Tokens per step, by both update rules.
    replace(MODERN, name="half the batch", expected="+.01", batch_factor=0.5),
    replace(MODERN, name="twice the batch", expected="-.02", batch_factor=2),
    replace(MODERN, name="four times the batch", expected="-.05", batch_factor=4),
    replace(MODERN, name="half the batch at first", expected="0", early=replace(MODERN, batch_factor=0.5)),
    replace(
        MODERN,
        name="rows of a quarter at first",
        expected="+.01: cheaper",
        early=replace(MODERN, batch_factor=4, length_factor=0.25),
    ),
    Setting("AdamW, corrective loss, half the batch", {**_ADAMW, **_CORRECTED}, (), "+.01", 0.5),
    Setting("AdamW, corrective loss, twice the batch", {**_ADAMW, **_CORRECTED}, (), "-.04", 2),
    # Generator and masks.
    _one("generator of one layer", "+.01: cheaper", {"generator.num_layers": "1"}),
    _one("generator of half the width", "0", {"generator.fraction": "0.5"}),
    _one("mask_prob 0.15", "-.01", {"data.mask_prob": "0.15"}),
    _one("mask_prob 0.35", "0", {"data.mask_prob": "0.35"}),
    _one("temperature 0.7", "-.01", {"objective.temperature": "0.7"}),
    _one("falling temperature", "0", patch="falling-temperature"),
    _one("never the original", "0", {"objective.disallow_correct": "true"}),
    _one("disentangled embeddings", "-.02", patch="gdes"),
    _one("embeddings not tied", "-.03", {"model.tying": "none"}),
)


def _named(name: str) -> Setting:
    trials = (each for settings in BASELINES.values() for each in settings)
    return next(each for each in trials if each.name == name)


CURVES = (
    MODERN,
    replace(_named("google, corrected, 2.5e-4, a quarter of the batch, rotary positions"), name="google-rotary"),
    replace(_named("mlm, mask_prob 0.35"), name="mlm"),
)
"""`modern` beside the best setting of each baseline."""


def _shape(layers: int, width: int, heads: int, fraction: str) -> Setting:
    keys = {
        "model.num_layers": str(layers),
        "model.hidden_size": str(width),
        "model.num_heads": str(heads),
        "model.intermediate_size": str(11 * width // 4),
        "model.embedding_size": str(min(width, 128)),
        "generator.fraction": fraction,
    }
    return MODERN.changed(f"{layers} layers of {width}", keys)


SIZES = (
    _shape(2, 64, 2, "0.5"),
    _shape(2, 128, 4, "0.25"),
    _shape(4, 128, 4, "0.25"),
    _shape(4, 256, 4, "0.25"),
    _shape(6, 256, 4, "0.25"),
    _shape(8, 384, 8, "0.25"),
)
"""`modern` by layers and width. A generator has whole heads, so that the narrowest is half as wide as its model."""

EPOCHS = tuple(replace(MODERN, name=f"a {parts}th of the text", parts=parts) for parts in (34, 68, 136, 272))
"""`modern` on so little text that 90 TFLOP read it once, twice, four and eight times."""

_THEIRS: Keys = {
    "objective.name": "mlm",
    "optimizer.name": "adamw",
    "optimizer.schedule": "linear",
    "optimizer.bias_correction": "true",
    "model.embedding_size": "256",
}


def _theirs(trainer: str, architecture: str, tokens_per_second: float) -> tuple[Setting, ...]:
    keys = {**_THEIRS, "model.architecture": architecture}
    return tuple(
        Setting(
            f"{trainer}, {rate}",
            {**keys, **_rate(rate)},
            batch_factor=2,
            trainer=trainer,
            tokens_per_second=tokens_per_second,
        )
        for rate in ("2.5e-4", "5e-4", "1e-3", "2e-3")
    )


HOUR = (
    (replace(MODERN, name="electra-fast", batch_factor=2, tokens_per_second=16_000),),
    _theirs("BertForMaskedLM", "bert", 10_200),
    _theirs("ModernBertForMaskedLM", "modern", 11_100),
)
"""What a user has after an hour: our default, and theirs at four rates, all with the preset's batch of 32 rows. Tokens
per second are of both cores of an AMD EPYC, measured alone on it (`recipe_trainer.py`), theirs in bf16, its faster one.
"""
TRIAL_HOURS = 0.1

STUDIES = {"curves": CURVES, "sizes": SIZES, "epochs": EPOCHS, "ingredients": INGREDIENTS}
"""Settings that are run with the same budgets and seeds."""
