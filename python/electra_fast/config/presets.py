"""Sizes and recipes: tables of configuration keys that override the defaults of `config`."""

from __future__ import annotations

from electra_fast.config.file import Scalar

# `small` and larger: table 6 of the paper and `configure_pretraining.py` of the published code.
SIZES: dict[str, dict[str, Scalar]] = {
    "tiny": {
        "model.num_layers": 2,
        "model.hidden_size": 64,
        "model.intermediate_size": 256,
        "model.num_heads": 2,
        "model.embedding_size": 32,
        "model.max_positions": 128,
        "generator.fraction": 0.5,
        "train.batch_size": 16,
        "train.steps": 2_000,
        "train.log_every": 50,
        "train.eval_every": 500,
        "train.checkpoint_every": 500,
    },
    # Learns something in an hour or two on two cores: 20 M tokens at 4,096 per step.
    "mini": {
        "model.num_layers": 4,
        "train.batch_size": 32,
        "train.steps": 5_000,
        "train.log_every": 20,
        "train.eval_every": 500,
        "train.checkpoint_every": 500,
    },
    "small": {"train.steps": 1_000_000},
    "base": {
        "model.hidden_size": 768,
        "model.intermediate_size": 3072,
        "model.num_heads": 12,
        "model.embedding_size": 768,
        "generator.fraction": 1 / 3,
        "data.sequence_length": 512,
        "train.batch_size": 256,
        "train.steps": 766_000,
        "optimizer.learning_rate": 2e-4,
    },
    "large": {
        "model.num_layers": 24,
        "model.hidden_size": 1024,
        "model.intermediate_size": 4096,
        "model.num_heads": 16,
        "model.embedding_size": 1024,
        "generator.fraction": 0.25,
        "data.sequence_length": 512,
        "train.batch_size": 2048,
        "train.steps": 400_000,
        "optimizer.learning_rate": 2e-4,
    },
    # 1.35 G parameters, for planning: no such model has been published, and its learning rate is a guess.
    "xlarge": {
        "model.num_layers": 24,
        "model.hidden_size": 2048,
        "model.intermediate_size": 8192,
        "model.num_heads": 32,
        "model.embedding_size": 2048,
        "generator.fraction": 0.25,
        "data.sequence_length": 512,
        "train.batch_size": 2048,
        "train.steps": 400_000,
        "train.sharding": "full",
        "optimizer.learning_rate": 1e-4,
    },
}

DEFAULT_RECIPE = "modern"

RECIPES: dict[str, dict[str, Scalar]] = {
    "paper": {
        "data.masking": "paper",
        "optimizer.name": "lamb",
        "optimizer.schedule": "linear",
        "optimizer.bias_correction": True,
    },
    "google": {
        "data.masking": "google",
        "data.packing": "google",
        "optimizer.name": "adamw",
        "optimizer.schedule": "product",
        "optimizer.bias_correction": False,
    },
    # Loss weights were tuned at `tiny`, the mask probability also at `mini` (bench/LOG.md). Learning rates of 0 depend
    # on the number of steps: at both sizes Muon's optimum falls with its square root, for one to four times the tokens
    # per step, and its updates have the same spectral norm at any width.
    "modern": {
        "model.architecture": "modern",
        "model.dropout": 0.0,
        "model.attention_dropout": 0.0,
        "data.masking": "paper",
        "data.mask_prob": 0.25,
        "optimizer.name": "muon",
        "optimizer.schedule": "linear",
        "optimizer.bias_correction": True,
        "optimizer.beta2": 0.98,
        "optimizer.learning_rate": 0.0,
        "optimizer.muon_learning_rate": 0.0,
        "objective.disc_weight": 10.0,
        "objective.corrective_weight": 1.0,
    },
}

SIZE_RECIPES: dict[tuple[str, str], dict[str, Scalar]] = {
    ("large", "google"): {"data.mask_prob": 0.25},
    # GeGLU has three matrices instead of two: two thirds of the width for the same FLOPs, rounded to whole tiles, also
    # in the generator.
    ("tiny", "modern"): {"model.intermediate_size": 176},
    ("mini", "modern"): {"model.intermediate_size": 704},
    ("small", "modern"): {"model.intermediate_size": 704},
    ("base", "modern"): {"model.intermediate_size": 2048, "generator.fraction": 0.25},
    ("large", "modern"): {"model.intermediate_size": 2752},
    ("xlarge", "modern"): {"model.intermediate_size": 5504},
}

ADAPTATION: tuple[tuple[dict[str, Scalar], str], ...] = (
    (
        {
            "optimizer.name": "adamw",
            "optimizer.learning_rate": 1e-4,
            "optimizer.schedule": "linear",
            "optimizer.bias_correction": True,
        },
        "a fifth of the rate for beginning, since the weights are trained; Muon's rates are for beginning",
    ),
    (
        {"train.steps": 2_000, "train.batch_size": 64, "data.sequence_length": 128},
        "16 M tokens; take more steps for more text",
    ),
    ({"data.masking": "paper", "data.mask_prob": 0.15, "objective.disc_weight": 50.0}, "as ELECTRA was trained"),
    (
        {"train.log_every": 50, "train.eval_every": 500, "train.checkpoint_every": 500},
        "four times in 2,000 steps",
    ),
)
"""Settings for continuing a pre-trained encoder on text of a domain, and why: `import --generator` sets them."""
