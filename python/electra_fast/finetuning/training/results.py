"""The files that a finished seed writes in addition to its model: result.json and the model card.

result.json has the seed's scores by name, and the checksums of the files that a later session reads.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from electra_fast.errors import InputError
from electra_fast.files import checkpoint_folder
from electra_fast.files.atomic_files import replace_file
from electra_fast.files.json_files import json_text, read_object
from electra_fast.finetuning.model_folder import RAW_CLASSES
from electra_fast.finetuning.training.job import Job, named_scores
from electra_fast.huggingface.card import front_matter
from electra_fast.huggingface.weights import num_parameters
from electra_fast.messages import printable

RESULT = "result.json"
CHOSEN = ("best_step", "selected_by", "stopped_step", "temperature")
"""Entries of a result about the model: the selected step unless the last step is always kept, the score that selected
it unless that is the task's metric, the step of an early stop, and the temperature."""
_HUB_METRICS = {"matthews": "matthews_correlation", "spearman": "spearmanr"}
_PREDICT = "`electra-fast predict path/to/this/folder FILE`"


def result_of(
    seed: int, scored: Mapping[str, Any], warning: str | None, seconds: float, chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the content of result.json: the `CHOSEN` entries, the scores by name, and the splits' identities."""
    result: dict[str, Any] = {"seed": seed, **chosen}
    for name, split in scored.items():
        result |= named_scores(name, split["scores"])
    return result | ({"warning": warning} if warning else {}) | {"seconds": seconds, "splits": dict(scored)}


def write_result(folder: Path, result: Mapping[str, Any], *, unfinished: Container[str] | None = None) -> None:
    """Writes result.json, with the checksums of the seed's other files that a later session reads.

    While a seed is scored again, `unfinished` are the splits still to be predicted, whose files will change.
    """
    predictions = [path for path in folder.glob("predictions.*") if path.name.split(".")[1] not in (unfinished or ())]
    # Users may edit the model card. config.json has settings that depend on the scores.
    changing = {"README.md", "config.json"} if unfinished is not None else {"README.md"}
    model = [path for path in (folder / "model").iterdir() if path.name not in changing and path.is_file()]
    replace_file(folder / RESULT, json_text(checkpoint_folder.sealed(result, folder, sorted((*predictions, *model)))))


def read_finished(folder: Path, metric: str) -> dict[str, Any]:
    """Returns the result of a seed that an earlier session finished; raises InputError if its folder is incomplete."""
    remedy = f"remove {folder} to train this seed again"
    try:
        result = read_object(folder / RESULT)
    except InputError as error:
        raise InputError(f"{error}; {remedy}") from None
    checksums = {}  # older versions wrote none
    if {"files", "checksum"} & result.keys():
        result = checkpoint_folder.read_sealed(folder / RESULT, remedy)
        checksums = result.pop("files")
    numbers = [result.get(name) for name in ("seed", "seconds", metric)]
    splits = result.get("splits", {})
    is_whole = all(type(number) in (int, float) for number in numbers) and isinstance(splits, dict)
    is_whole = is_whole and all(
        isinstance(split, dict) and {"content", "scores"} <= split.keys() for split in splits.values()
    )
    if not is_whole or not (folder / "model" / "config.json").exists():
        raise InputError(f"{folder}: incomplete (model/ or an entry of {RESULT} is missing); {remedy}")
    checkpoint_folder.verify_files(folder, checksums, remedy)
    return result


def scores_of(result: Mapping[str, Any]) -> dict[str, float]:
    about = ("seed", "seconds", "splits", *CHOSEN)
    return {name: value for name, value in result.items() if name not in about and isinstance(value, int | float)}


def score_texts(result: Mapping[str, Any], majority: Mapping[str, float]) -> Iterator[str]:
    """Yields each score of a result as text, with the score of the majority-class baseline."""
    for name, value in scores_of(result).items():
        yield f"{name} {value:.4f}" + (f" (majority {majority[name]:.4f})" if name in majority else "")


def write_card(folder: Path, job: Job, class_name: str, result: dict[str, Any]) -> None:
    task = job.task
    hf = job.task_type.hf
    architecture = job.work.shape.architecture
    family = read_object(folder / "config.json")["model_type"]
    summary = printable(job.task_type.summary(task, len(job.data.train.texts[0])))
    options = hf.options + (hf.entity_options if task.scheme == "IOB2" else "")
    usage = hf.usage.format(pipeline=hf.pipeline, options=options, class_name=class_name, command=_PREDICT)
    if is_raw := class_name == RAW_CLASSES[architecture]:
        usage = (
            f"`transformers` has no class for the head: this folder contains the encoder as `{class_name}` and the "
            f"head's tensors. {_PREDICT} reads both{hf.raw_usage}"
        )
    metric = {"type": _HUB_METRICS.get(task.metric, task.metric)}
    hub_results = [
        {
            "task": {"type": hf.pipeline},
            "dataset": {"type": task.name, "name": task.name, "split": split.name},
            "metrics": [metric | {"value": result["splits"][split.name]["scores"][task.metric]}],
        }
        for split in job.data.dev
    ]
    sections = (
        front_matter(
            {
                "library_name": "transformers",
                "pipeline_tag": hf.pipeline,
                "tags": [family],
                "model-index": [{"name": task.name, "results": hub_results}],
            }
        ),
        f"# {task.name}\n\n{summary} Class in `transformers`: `{class_name}`.",
        "## Scores\n\n" + "\n".join(_card_scores(job, result)),
        "## Training\n\n" + "\n".join(_card_training(folder, job, result)),
        f"## Use\n\n{usage}",
        hf.converted_head_note if job.config.head == "published" and not is_raw else "",
    )
    (folder / "README.md").write_text("\n\n".join(filter(None, sections)) + "\n", encoding="utf-8")


def _card_scores(job: Job, result: dict[str, Any]) -> Iterator[str]:
    yield from (f"- {printable(text)}" for text in score_texts(result, job.majority))
    unit = f"; F1 compares {result['f1_unit']}" if result.get("f1_unit", "words") != "words" else ""
    when = "after the last step"
    if "best_step" in result:
        when = f"after step {result['best_step']:,}, selected by {job.selection_metric} on {job.data.dev[0].name}"
    thresholds = "; the label thresholds are chosen on these examples" if "thresholds" in result else ""
    yield f"\nOn the validation set, {when}{unit}{thresholds}."


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
    if (lesson := job.lesson) is not None:
        extra = 0 if lesson.unlabeled is None else len(lesson.unlabeled.texts)
        yield (
            f"- taught by a model with content hash `{lesson.teacher.content_hash[:16]}`, also on {extra:,} unlabeled "
            f"examples: weight {config.teacher_weight:g}, temperature {config.teacher_temperature:g}"
        )
    if "temperature" in result:
        yield f"- logits divided by {result['temperature']:.4g}, the temperature that fits the validation set best"
    yield f"- encoder with content hash `{job.encoder.content_hash[:16]}`, electra-fast {version('electra-fast')}"
