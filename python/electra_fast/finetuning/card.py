"""The model card of a fine-tuned model: what it was trained on and how, its scores, and how to use it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from electra_fast.finetuning import metrics
from electra_fast.huggingface.classifier import RAW_CLASS

if TYPE_CHECKING:
    from electra_fast.finetuning.job import Job


def write_model_card(folder: Path, job: Job, class_name: str, result: dict[str, Any]) -> None:
    """Writes README.md, with Hugging Face's front matter."""
    task = job.task
    family = "electra" if job.work.shape.architecture == "bert" else "modernbert"
    what = "a value" if task.kind == "regression" else f"one of {', '.join(task.labels)}"
    if task.kind == "multi-label":
        what = f"any of {', '.join(task.labels)}"
    inputs = "a pair of texts" if len(job.data.train.texts[0]) == 2 else "a text"
    sections = (
        "\n".join(
            ("---", "library_name: transformers", "pipeline_tag: text-classification", "tags:", f"- {family}", "---")
        ),
        f"# {task.name}\n\nGiven {inputs}, predicts {what}. Class in `transformers`: `{class_name}`.",
        "## Scores\n\n" + "\n".join(_scores(job, result)),
        "## Training\n\n" + "\n".join(_training(job, result)),
        "## Use\n\n" + (_use_raw(job) if class_name == RAW_CLASS else _use(class_name)),
        _raw_head() if job.config.head == "google" and class_name != RAW_CLASS else "",
    )
    (folder / "README.md").write_text("\n\n".join(filter(None, sections)) + "\n", encoding="utf-8")


def _scores(job: Job, result: dict[str, Any]) -> Iterator[str]:
    yield from (f"- {name} {value:.4f}" for name, value in metrics.scores_of(result).items())
    yield "\nOn the validation examples, after the last step."


def _training(job: Job, result: dict[str, Any]) -> Iterator[str]:
    config = job.config
    examples = f"{len(job.data.train.texts):,} examples"
    yield f"- {examples}, {config.epochs:g} epochs, {job.num_steps:,} steps of {config.batch_size}"
    yield (
        f"- AdamW, peak learning rate {config.learning_rate:g} ({config.schedule}), layer decay "
        f"{config.layer_decay:g} ({config.layer_decay_form}), weight decay {config.weight_decay:g}"
    )
    yield f"- at most {config.sequence_length} tokens, dropout {config.dropout:g}, seed {result['seed']}"
    yield f"- encoder with content hash `{job.encoder.content_hash[:16]}`, electra-fast {version('electra-fast')}"


def _use(class_name: str) -> str:
    return (
        "```python\n"
        "from transformers import pipeline\n"
        'classify = pipeline("text-classification", "path/to/this/folder", truncation=True)\n'
        "```\n\n"
        f"or `{class_name}.from_pretrained`, or `electra-fast predict path/to/this/folder FILE`."
    )


def _use_raw(job: Job) -> str:
    return (
        "The head is one layer on the hidden state of [CLS], for which `transformers` has no class: this folder holds "
        f"the encoder as `{RAW_CLASS}` and the head's tensors beside it. `electra-fast predict` reads both; in "
        "`transformers`:\n\n"
        "```python\n"
        "from safetensors.torch import load_file\n"
        "from transformers import AutoModel, AutoTokenizer\n"
        'tokenizer, model = (c.from_pretrained("path/to/this/folder") for c in (AutoTokenizer, AutoModel))\n'
        'tensors = load_file("path/to/this/folder/model.safetensors")\n'
        'hidden = model(**tokenizer(["a text"], return_tensors="pt")).last_hidden_state[:, 0]\n'
        'logits = hidden @ tensors["classifier.weight"].T + tensors["classifier.bias"]\n'
        "```"
    )


def _raw_head() -> str:
    return (
        "## Head\n\nIt was trained as one layer on the hidden state of [CLS]. `ElectraClassificationHead` has another "
        "layer and a gelu before that; since gelu(z) - gelu(-z) = z, two of its units carry each output, and the "
        "logits are those of the trained head. To train further, fine-tune the encoder again rather than this head."
    )
