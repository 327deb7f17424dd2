"""The model card of a fine-tuned model: what it was trained on and how, its scores, and how to use it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from electra_fast.finetuning.tasks import metrics
from electra_fast.huggingface.finetuned import RAW_CLASSES
from electra_fast.huggingface.weights import num_parameters
from electra_fast.messages import printable

if TYPE_CHECKING:
    from electra_fast.finetuning.training.job import Job


_PIPELINES = {"tagging": "token-classification", "question-answering": "question-answering"}


def write_model_card(folder: Path, job: Job, class_name: str, result: dict[str, Any]) -> None:
    """Writes README.md, with Hugging Face's front matter."""
    task = job.task
    architecture = job.work.shape.architecture
    family = "electra" if architecture == "bert" else "modernbert"
    pipeline = _PIPELINES.get(task.kind, "text-classification")
    is_raw = class_name == RAW_CLASSES[architecture]
    is_rewritten = job.config.head == "google" and not is_raw and task.kind not in _PIPELINES
    sections = (
        "\n".join(("---", "library_name: transformers", f"pipeline_tag: {pipeline}", "tags:", f"- {family}", "---")),
        f"# {task.name}\n\n{_what(job)} Class in `transformers`: `{class_name}`.",
        "## Scores\n\n" + "\n".join(_scores(job, result)),
        "## Training\n\n" + "\n".join(_training(folder, job, result)),
        "## Use\n\n" + (_use_raw(job, class_name) if is_raw else _use(job, class_name, pipeline)),
        _raw_head() if is_rewritten else "",
    )
    (folder / "README.md").write_text("\n\n".join(filter(None, sections)) + "\n", encoding="utf-8")


def _what(job: Job) -> str:
    task = job.task
    labels = printable(", ".join(task.labels))
    if task.kind == "question-answering":
        what = "Given a question and a text, finds the part of the text that answers the question"
        return f"{what}, or that there is none." if task.has_unanswerable else f"{what}."
    if task.kind == "tagging":
        return f"Tags each word of a text with one of {labels}."
    inputs = "a pair of texts" if len(job.data.train.texts[0]) == 2 else "a text"
    if task.kind == "regression":
        return f"Given {inputs}, predicts a value."
    return f"Given {inputs}, predicts {'any' if task.kind == 'multi-label' else 'one'} of {labels}."


def _scores(job: Job, result: dict[str, Any]) -> Iterator[str]:
    yield from (f"- {printable(text)}" for text in metrics.score_texts(result, job.majority))
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


_PREDICT = "`electra-fast predict path/to/this/folder FILE`"


def _use(job: Job, class_name: str, pipeline: str) -> str:
    if pipeline == "question-answering":
        return f"{_PREDICT}, or `{class_name}.from_pretrained`, whose logits are those of an answer's start and end."
    options = ', aggregation_strategy="first"' if job.task.scheme == "IOB2" else ""
    options = ", truncation=True" if pipeline == "text-classification" else options
    return (
        "```python\n"
        "from transformers import pipeline\n"
        f'predict = pipeline("{pipeline}", "path/to/this/folder"{options})\n'
        "```\n\n"
        f"or `{class_name}.from_pretrained`, or {_PREDICT}."
    )


def _use_raw(job: Job, class_name: str) -> str:
    about = (
        f"`transformers` has no class for the head: this folder holds the encoder as `{class_name}` and the head's "
        f"tensors beside it. {_PREDICT} reads both"
    )
    if job.task.kind == "question-answering":
        return (
            f"{about}. The head is the published code's: the end of an answer depends on its start, and a classifier "
            "tells questions without an answer."
        )
    first = "" if job.task.kind == "tagging" else "[:, 0]"
    return (
        f"{about}; in `transformers`:\n\n"
        "```python\n"
        "from safetensors.torch import load_file\n"
        "from transformers import AutoModel, AutoTokenizer\n"
        'tokenizer, model = (c.from_pretrained("path/to/this/folder") for c in (AutoTokenizer, AutoModel))\n'
        'tensors = load_file("path/to/this/folder/model.safetensors")\n'
        f'hidden = model(**tokenizer(["a text"], return_tensors="pt")).last_hidden_state{first}\n'
        'logits = hidden @ tensors["classifier.weight"].T + tensors["classifier.bias"]\n'
        "```"
    )


def _raw_head() -> str:
    return (
        "## Head\n\nIt was trained as one layer on the hidden state of [CLS]. `ElectraClassificationHead` has another "
        "layer and a gelu before that; since gelu(z) - gelu(-z) = z, two of its units carry each output, and the "
        "logits are those of the trained head. To train further, fine-tune the encoder again rather than this head."
    )
