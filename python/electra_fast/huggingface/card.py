"""The model card of an exported folder: a README.md with Hugging Face's front matter.

`export` collects what the source records about the model's training, its `Origin`. The card states
that and the configuration, and nothing that is not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version

from electra_fast.config import Config
from electra_fast.huggingface.config import CLASSES, role_shape
from electra_fast.objectives import objective_of


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a model comes from, as far as its source records it."""

    token_type_1_trained: bool
    """Whether token type 1 occurred in training, here or before an import."""
    steps: int = 0
    """Optimizer steps of the run; 0 for a folder or an imported run, which record no training."""
    imported: bool = False
    """Whether the run started from Hugging Face folders."""
    tokens: int | None = None
    corpus: str | None = None
    """Content hash of the corpus."""


def model_card(config: Config, role: str, num_parameters: int, origin: Origin) -> str:
    """The README.md of one role's folder."""
    architecture = CLASSES[config.model.architecture, role]
    title, summary = objective_of(config).describe(role)
    sections = (
        _front_matter(config, role),
        f"# {title}\n\n{summary} Class in `transformers`: `{architecture}`.",
        "## Model\n\n" + "\n".join(_sizes(config, role, num_parameters)),
        "## Training\n\n" + "\n".join(_training(config, origin)),
        "## Use\n\n" + _use(architecture, role),
        _token_types() if config.model.architecture == "bert" and not origin.token_type_1_trained else "",
    )
    return "\n\n".join(filter(None, sections)) + "\n"


def _front_matter(config: Config, role: str) -> str:
    task = {"discriminator": "replaced-token-detection", "encoder": "masked-lm", "generator": "fill-mask"}[role]
    family = "electra" if config.model.architecture == "bert" else "modernbert"
    lines = ["library_name: transformers", "tags:", f"- {family}", "- pretraining", f"- {task}"]
    if role == "generator":
        lines.insert(1, "pipeline_tag: fill-mask")
    return "\n".join(("---", *lines, "---"))


def _sizes(config: Config, role: str, num_parameters: int) -> Iterator[str]:
    shape = role_shape(config, role)
    yield f"- {num_parameters:,} parameters"
    yield f"- {shape.num_layers} layers of width {shape.hidden_size}, {shape.num_heads} attention heads"
    yield f"- feed-forward width {shape.intermediate_size}, embeddings of {shape.embedding_size}"
    yield f"- vocabulary of {shape.vocab_size:,}, at most {shape.max_positions:,} positions"


def _training(config: Config, origin: Origin) -> Iterator[str]:
    if not origin.steps:
        yield "Exported from Hugging Face folders, whose own cards say how the model was trained."
        return
    data, optimizer, train = config.data, config.optimizer, config.train
    rows = f"{train.batch_size:,} rows of {data.sequence_length} tokens"
    yield f"- objective `{config.objective.name}`, {origin.steps:,} of {train.steps:,} steps of {rows}"
    if origin.imported:
        yield "- continued from an imported model: its earlier training is not counted here"
    if origin.tokens is not None:
        yield f"- {origin.tokens:,} tokens seen"
    if origin.corpus is not None:
        yield f"- corpus with content hash `{origin.corpus}`"
    yield f"- masking `{data.masking}` of {data.mask_prob:.0%} of the tokens, packing `{data.packing}`"
    yield (
        f"- optimizer `{optimizer.name}`, peak learning rate {optimizer.learning_rate:g}, "
        f"{optimizer.warmup_steps:,} steps of warmup, weight decay {optimizer.weight_decay:g}"
    )
    yield f"- seed {train.seed}, exported by electra-fast {version('electra-fast')}"


def _use(architecture: str, role: str) -> str:
    meaning = (
        "Positive logits mark replaced tokens." if role == "discriminator" else "The logits are over the vocabulary."
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
        "so that fine-tuning on pairs of texts starts from trained weights."
    )
