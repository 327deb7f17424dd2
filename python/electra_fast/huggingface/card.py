"""The model card of an exported folder: a README.md with Hugging Face's front matter.

`export` reads what the source records about the model's training, its `Origin`. The card states only this and the
configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from electra_fast.config.config import Config
from electra_fast.errors import InputError
from electra_fast.huggingface.config import class_of, role_shape
from electra_fast.messages import printable
from electra_fast.objectives import objective_of


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A model's training, as far as its source records it."""

    token_type_1_trained: bool
    """True if token type 1 occurred in training, here or before an import."""
    steps: int = 0
    """Optimizer steps taken; 0 for a folder or an imported run, which record no training."""
    num_steps: int = 0
    """Optimizer steps of the whole run."""
    imported: bool = False
    """True if the run started from Hugging Face folders."""
    tokens: int | None = None
    corpus: str | None = None
    """Content hash of the corpus."""
    comparable_auc: tuple[int, float] | None = None
    """Step and `unigram_auc` of the last evaluation."""


def metadata(languages: Sequence[str], license: str | None) -> list[str]:
    """Returns lines of the front matter. Raises ValueError for invalid language codes or license identifiers."""
    for code in languages:
        if not re.fullmatch(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|multilingual|code", code):
            raise InputError(f"language {code!r} is not a code such as hu, en or zh-Hant")
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise InputError(f"license {license!r} is not an identifier such as apache-2.0, mit or cc-by-4.0")
    # Quoted, since YAML reads the bare code of Norwegian as false.
    lines = ["language:", *(f'- "{code}"' for code in languages)] if languages else []
    return lines + ([f'license: "{license}"'] if license else [])


def model_card(
    config: Config,
    role: str,
    num_parameters: tuple[int, int],
    origin: Origin,
    front_matter: Sequence[str] = (),
    *,
    headless: bool = False,
) -> str:
    """Returns the README.md of the folder of a role, or of its encoder alone.

    `num_parameters` are those of the encoder and of the whole model; `front_matter` has lines of `metadata`.
    """
    architecture = class_of(config.model.architecture, role, headless)
    title, summary = objective_of(config).describe(role)
    title += ", without its head" if headless else ""
    sections = (
        _front_matter(config, role, front_matter, headless),
        f"# {title}\n\n{summary} Class in `transformers`: `{architecture}`.",
        "## Model\n\n" + "\n".join(_sizes(config, role, num_parameters, origin)),
        "## Training\n\n" + "\n".join(_training(config, role, origin)),
        "## Use\n\n" + _use(architecture, role, headless),
        _token_types() if config.model.architecture == "bert" and not origin.token_type_1_trained else "",
    )
    return "\n\n".join(filter(None, sections)) + "\n"


def _front_matter(config: Config, role: str, more: Sequence[str], headless: bool) -> str:
    task = {"discriminator": "replaced-token-detection", "encoder": "masked-lm", "generator": "fill-mask"}[role]
    family = "electra" if config.model.architecture == "bert" else "modernbert"
    lines = ["library_name: transformers", "tags:", f"- {family}", "- pretraining", f"- {task}"]
    if headless or role == "generator":
        lines.insert(1, f"pipeline_tag: {'feature-extraction' if headless else 'fill-mask'}")
    return "\n".join(("---", *more, *lines, "---"))


def _sizes(config: Config, role: str, num_parameters: tuple[int, int], origin: Origin) -> Iterator[str]:
    shape, length = role_shape(config, role), config.data.sequence_length
    encoder, whole = num_parameters
    yield f"- {encoder:,} parameters" + (f" in `AutoModel`, {whole:,} with the head" if whole > encoder else "")
    yield f"- {shape.num_layers} layers of width {shape.hidden_size}, {shape.num_heads} attention heads"
    yield f"- feed-forward width {shape.intermediate_size}, embeddings of {shape.embedding_size}"
    yield f"- vocabulary of {shape.vocab_size:,}, at most {shape.max_positions:,} positions"
    if origin.steps and length < shape.max_positions:
        where = "here" if origin.imported else "at all"
        yield f"- trained on rows of {length:,} tokens: positions from {length:,} on were not trained {where}"


def _training(config: Config, role: str, origin: Origin) -> Iterator[str]:
    if not origin.steps:
        yield "Exported from Hugging Face folders, whose own cards describe the training."
        return
    data, optimizer, train = config.data, config.optimizer, config.train
    rows = f"{train.batch_size:,} rows of {data.sequence_length} tokens"
    yield f"- objective `{config.objective.name}`, {origin.steps:,} of {origin.num_steps:,} steps of {rows}"
    if origin.steps < origin.num_steps:
        yield "- exported before its training was finished"
    if origin.imported:
        yield "- continued from an imported model: its earlier training is not counted here"
    if origin.tokens is not None:
        yield f"- {origin.tokens:,} tokens seen"
    if origin.comparable_auc is not None and role == "discriminator":
        step, auc = origin.comparable_auc
        yield (
            f"- AUC {auc:.3f} on replacements drawn by frequency in validation text, at step {step:,} (`unigram_auc`, "
            "comparable between models on the same text)"
        )
    if origin.corpus is not None:
        yield f"- corpus with content hash `{printable(origin.corpus)}`"
    yield f"- masking `{data.masking}` of {data.mask_prob:.0%} of the tokens, packing `{data.packing}`"
    yield (
        f"- optimizer `{optimizer.name}`, peak learning rate {optimizer.learning_rate:g}, "
        f"{optimizer.warmup_steps:,} steps of warmup, weight decay {optimizer.weight_decay:g}"
    )
    yield f"- seed {train.seed}, exported by electra-fast {version('electra-fast')}"


def _use(architecture: str, role: str, headless: bool) -> str:
    meaning = (
        "`AutoModelForSequenceClassification` and the like read it too, with a new head to fine-tune."
        if headless
        else "Positive logits mark replaced tokens."
        if role == "discriminator"
        else "The logits are over the vocabulary."
    )
    return (
        "```python\n"
        f"from transformers import AutoTokenizer, {architecture}\n"
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")\n'
        f'model = {architecture}.from_pretrained("path/to/this/folder")\n'
        f"```\n\n{meaning}"
    )


def _token_types() -> str:
    return (
        "## Token types\n\nToken type 1 never occurred in training. Its embedding is a copy of token type 0's, "
        "so that fine-tuning on text pairs starts from trained weights."
    )
