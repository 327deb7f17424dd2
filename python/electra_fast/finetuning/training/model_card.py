"""The model card of a fine-tuned model: README.md with its scores, its training and its use."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from electra_fast.finetuning.model_folder import RAW_CLASSES
from electra_fast.finetuning.training.job import Job
from electra_fast.finetuning.training.results import score_texts
from electra_fast.huggingface.card import front_matter
from electra_fast.huggingface.weights import num_parameters
from electra_fast.messages import printable

_HUB_METRICS = {"matthews": "matthews_correlation", "spearman": "spearmanr"}
_PREDICT = "`electra-fast predict path/to/this/folder FILE`"


def write_card(folder: Path, job: Job, class_name: str, result: dict[str, Any]) -> None:
    """Writes README.md, with Hugging Face's front matter."""
    task, task_type, architecture = job.task, job.task_type, job.work.shape.architecture
    family = "electra" if architecture == "bert" else "modernbert"
    is_raw = class_name == RAW_CLASSES[architecture]
    summary = printable(task_type.summary(task, len(job.data.train.texts[0])))
    sections = (
        front_matter(
            {
                "library_name": "transformers",
                "pipeline_tag": task_type.pipeline,
                "tags": [family],
                "model-index": [{"name": task.name, "results": list(_hub_results(job, result))}],
            }
        ),
        f"# {task.name}\n\n{summary} Class in `transformers`: `{class_name}`.",
        "## Scores\n\n" + "\n".join(_card_scores(job, result)),
        "## Training\n\n" + "\n".join(_card_training(folder, job, result)),
        "## Use\n\n" + (_raw_usage(job, class_name) if is_raw else task_type.usage(task, class_name, _PREDICT)),
        task_type.converted_head_note if job.config.head == "google" and not is_raw else "",
    )
    (folder / "README.md").write_text("\n\n".join(filter(None, sections)) + "\n", encoding="utf-8")


def _hub_results(job: Job, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the task's score on each validation split, as the Hub reads it."""
    task = job.task
    for split in job.data.dev:
        metric = {"type": _HUB_METRICS.get(task.metric, task.metric)}
        yield {
            "task": {"type": job.task_type.pipeline},
            "dataset": {"type": task.name, "name": task.name, "split": split.name},
            "metrics": [metric | {"value": result["splits"][split.name]["scores"][task.metric]}],
        }


def _card_scores(job: Job, result: dict[str, Any]) -> Iterator[str]:
    yield from (f"- {printable(text)}" for text in score_texts(result, job.majority))
    unit = f"; F1 compares {result['f1_unit']}" if result.get("f1_unit", "words") != "words" else ""
    when = "after the last step"
    if "best_step" in result:
        when = f"after step {result['best_step']:,}, chosen by its {job.selection_metric} on {job.data.dev[0].name}"
    thresholds = "; the thresholds of labels are chosen on these examples" if "thresholds" in result else ""
    yield f"\nOn the validation examples, {when}{unit}{thresholds}."


def _card_training(folder: Path, job: Job, result: dict[str, Any]) -> Iterator[str]:
    config = job.config
    encoder, whole = num_parameters(folder / "model.safetensors")
    yield f"- {encoder:,} parameters in `AutoModel`, {whole:,} with the head"
    examples = f"{len(job.data.train.texts):,} examples"
    stopped = f", stopped early at step {result['stopped_step']:,}" if "stopped_step" in result else ""
    yield f"- {examples}, {config.epochs:g} epochs, {job.num_steps:,} steps of {config.batch_size}{stopped}"
    yield (
        f"- AdamW, peak learning rate {config.learning_rate:g} ({config.schedule}), layer decay "
        f"{config.layer_decay:g} ({config.layer_decay_form}), weight decay {config.weight_decay:g}"
    )
    yield f"- at most {config.sequence_length} tokens, dropout {config.dropout:g}, seed {result['seed']}"
    if "temperature" in result:
        yield f"- logits divided by {result['temperature']:.4g}, the temperature that fits the validation examples best"
    yield f"- encoder with content hash `{job.encoder.content_hash[:16]}`, electra-fast {version('electra-fast')}"


def _raw_usage(job: Job, class_name: str) -> str:
    return (
        f"`transformers` has no class for the head: this folder holds the encoder as `{class_name}` and the head's "
        f"tensors beside it. {_PREDICT} reads both{job.task_type.raw_usage()}"
    )
