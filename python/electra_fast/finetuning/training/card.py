"""The model card of a fine-tuned model: what it was trained on and how, its scores, and how to use it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from electra_fast.finetuning.model_folder import RAW_CLASSES
from electra_fast.finetuning.training.results import score_texts
from electra_fast.huggingface.weights import num_parameters
from electra_fast.messages import printable

if TYPE_CHECKING:
    from electra_fast.finetuning.training.job import Job

_PREDICT = "`electra-fast predict path/to/this/folder FILE`"


def write_model_card(folder: Path, job: Job, class_name: str, result: dict[str, Any]) -> None:
    """Writes README.md, with Hugging Face's front matter."""
    task, task_type, architecture = job.task, job.task_type, job.work.shape.architecture
    family = "electra" if architecture == "bert" else "modernbert"
    is_raw = class_name == RAW_CLASSES[architecture]
    summary = printable(task_type.summary(task, len(job.data.train.texts[0])))
    pipeline = f"pipeline_tag: {task_type.pipeline}"
    sections = (
        "\n".join(("---", "library_name: transformers", pipeline, "tags:", f"- {family}", "---")),
        f"# {task.name}\n\n{summary} Class in `transformers`: `{class_name}`.",
        "## Scores\n\n" + "\n".join(_scores(job, result)),
        "## Training\n\n" + "\n".join(_training(folder, job, result)),
        "## Use\n\n" + (_raw_usage(job, class_name) if is_raw else task_type.usage(task, class_name, _PREDICT)),
        task_type.converted_head_note if job.config.head == "google" and not is_raw else "",
    )
    (folder / "README.md").write_text("\n\n".join(filter(None, sections)) + "\n", encoding="utf-8")


def _scores(job: Job, result: dict[str, Any]) -> Iterator[str]:
    yield from (f"- {printable(text)}" for text in score_texts(result, job.majority))
    unit = f"; F1 compares {result['f1_unit']}" if result.get("f1_unit", "words") != "words" else ""
    yield f"\nOn the validation examples, after the last step{unit}."


def _training(folder: Path, job: Job, result: dict[str, Any]) -> Iterator[str]:
    config = job.config
    encoder, whole = num_parameters(folder / "model.safetensors")
    yield f"- {encoder:,} parameters in `AutoModel`, {whole:,} with the head"
    examples = f"{len(job.data.train.texts):,} examples"
    yield f"- {examples}, {config.epochs:g} epochs, {job.num_steps:,} steps of {config.batch_size}"
    yield (
        f"- AdamW, peak learning rate {config.learning_rate:g} ({config.schedule}), layer decay "
        f"{config.layer_decay:g} ({config.layer_decay_form}), weight decay {config.weight_decay:g}"
    )
    yield f"- at most {config.sequence_length} tokens, dropout {config.dropout:g}, seed {result['seed']}"
    yield f"- encoder with content hash `{job.encoder.content_hash[:16]}`, electra-fast {version('electra-fast')}"


def _raw_usage(job: Job, class_name: str) -> str:
    return (
        f"`transformers` has no class for the head: this folder holds the encoder as `{class_name}` and the head's "
        f"tensors beside it. {_PREDICT} reads both{job.task_type.raw_usage()}"
    )
