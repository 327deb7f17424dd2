"""Folders of fine-tuned models: `transformers`' classes for the kinds of tasks over an Electra or ModernBERT encoder.

Some of the published heads have no class in `transformers`. Of a raw head, one layer on [CLS], Electra's class can
compute the outputs all the same: its head is out(gelu(dense(x))), and gelu(z) - gelu(-z) = z, so that two units of
`dense` carry each output. ModernBERT's heads have a norm after the activation and cannot, and the published reader's
end depends on its start: there the folder holds the encoder as ElectraModel or ModernBertModel, which `AutoModel`
loads, and the head's tensors beside it.

Shapes: C outputs of the head, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from electra_fast.checkpoint import write_tensors
from electra_fast.config.config import ModelConfig
from electra_fast.errors import InputError
from electra_fast.files.json_files import write_object
from electra_fast.huggingface import weights
from electra_fast.huggingface.config import MODEL_TYPES, describe_encoder, read_encoder_shape, read_table
from electra_fast.huggingface.encoder import read_state
from electra_fast.huggingface.weights import State

HEAD_KEY = "electra_fast_head"
"""Our key in config.json, for a head without a class in `transformers`: "google"."""
KIND_KEY = "electra_fast_kind"
"""Our key in config.json: the kind of task, where such a head has no class that tells."""
LENGTH_KEY = "electra_fast_sequence_length"
"""Our key in config.json: the length at which the examples were cut in training."""
TEXTS_KEY = "electra_fast_num_texts"
"""Our key in config.json: 1 where an example is a text, 2 where it is a pair."""
COLUMNS_KEY = "electra_fast_text_columns"
"""Our key in config.json: the text columns of the files of own data, first those of the training file."""
SETTINGS_KEY = "electra_fast_settings"
"""Our key in config.json: how long texts are cut into chunks and answers or entities are found."""
JOINT_WIDTH = 512
"""Of the inner layers of the published reader's head."""
RAW_CLASSES = {"bert": "ElectraModel", "modern": "ModernBertModel"}
_FAMILIES = {"bert": "Electra", "modern": "ModernBert"}
_PROBLEM_TYPES = {
    "classification": "single_label_classification",
    "multi-label": "multi_label_classification",
    "regression": "regression",
}
# The endings of the classes' names by kind.
_FORMS = dict.fromkeys(_PROBLEM_TYPES, "SequenceClassification") | {
    "tagging": "TokenClassification",
    "question-answering": "QuestionAnswering",
}
_CLASSIFIER = {"head.classifier.weight": "classifier.weight", "head.classifier.bias": "classifier.bias"}
_MODERN_HEAD = {"head.dense.weight": "head.dense.weight", "head.norm.weight": "head.norm.weight"} | _CLASSIFIER
_JOINT_HEAD = {
    f"head.{layer}.{part}": f"head.{layer}.{part}"
    for layer in ("start", "end_dense", "end", "answerable_dense", "answerable")
    for part in ("weight", "bias")
}
# Our parameters of a head and their names in `transformers`, by architecture, head and form.
_HEADS: dict[tuple[str, str, str], dict[str, str]] = {
    ("bert", "hf", "SequenceClassification"): {
        "head.dense.weight": "classifier.dense.weight",
        "head.dense.bias": "classifier.dense.bias",
        "head.classifier.weight": "classifier.out_proj.weight",
        "head.classifier.bias": "classifier.out_proj.bias",
    },
    ("bert", "hf", "TokenClassification"): _CLASSIFIER,
    ("bert", "hf", "QuestionAnswering"): {
        "head.classifier.weight": "qa_outputs.weight",
        "head.classifier.bias": "qa_outputs.bias",
    },
    ("bert", "google", "QuestionAnswering"): _JOINT_HEAD,
    ("modern", "hf", "SequenceClassification"): _MODERN_HEAD,
    ("modern", "hf", "TokenClassification"): _MODERN_HEAD,
    ("modern", "hf", "QuestionAnswering"): _MODERN_HEAD,
    ("modern", "google", "SequenceClassification"): _CLASSIFIER,
    ("modern", "google", "TokenClassification"): _CLASSIFIER,
    ("modern", "google", "QuestionAnswering"): _JOINT_HEAD,
}


@dataclass(frozen=True)
class Finetuned:
    """A fine-tuned model as its folder describes it.

    Args:
        shape: Of the encoder.
        head: `hf` or `google`.
        kind: Of the task: `classification`, `multi-label`, `regression`, `tagging` or `question-answering`.
        labels: Names by class id; one for regression, which has no meaning, and two for question answering.
        sequence_length: At which examples are cut, in tokens.
        num_texts: 1 where an example is a text, 2 where it is a pair; None where the folder does not say.
        state: fp32 parameters by the names of a module with `embeddings`, `encoder` and `head`.
        settings: Of prediction, by the kind's own names.
        text_columns: Of the tables that it was trained and scored on; empty where the folder does not say.
    """

    shape: ModelConfig
    head: str
    kind: str
    labels: tuple[str, ...]
    sequence_length: int
    num_texts: int | None
    state: Mapping[str, Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)
    text_columns: tuple[tuple[str, ...], ...] = ()


def class_name(architecture: str, kind: str) -> str:
    """The class of `transformers` for a kind of task."""
    return f"{_FAMILIES[architecture]}For{_FORMS[kind]}"


def write_finetuned(folder: Path, finetuned: Finetuned, special_ids: Mapping[str, int], head_dropout: float) -> str:
    """Writes config.json and model.safetensors to an existing folder; returns the class that loads it."""
    shape, kind, head, state = finetuned.shape, finetuned.kind, finetuned.head, dict(finetuned.state)
    form = _FORMS[kind]
    if (shape.architecture, head, form) == ("bert", "google", "SequenceClassification"):
        head, state = "hf", state | _raw_head_as_electra(state, shape.hidden_size)
    if (shape.architecture, head, form) == ("bert", "google", "TokenClassification"):
        head = "hf"  # the same layer
    name = RAW_CLASSES[shape.architecture] if head == "google" else class_name(shape.architecture, kind)
    table = {"architectures": [name]} | describe_encoder(shape, special_ids)
    table |= {
        "classifier_dropout": head_dropout,
        "id2label": {str(i): label for i, label in enumerate(finetuned.labels)},
        "label2id": {label: i for i, label in enumerate(finetuned.labels)},
        LENGTH_KEY: finetuned.sequence_length,
        TEXTS_KEY: finetuned.num_texts,
    }
    if finetuned.text_columns:
        table[COLUMNS_KEY] = [list(names) for names in finetuned.text_columns]
    if kind in _PROBLEM_TYPES:
        table["problem_type"] = _PROBLEM_TYPES[kind]
    else:
        table |= {KIND_KEY: kind, SETTINGS_KEY: dict(finetuned.settings)}
    if shape.architecture == "modern":
        table |= {"classifier_pooling": "cls", "classifier_activation": "gelu", "classifier_bias": False}
    if head == "google":
        table[HEAD_KEY] = head
    write_object(folder / "config.json", table)
    tensors = weights.encoder_to_hf(state, shape)
    for own, theirs in _HEADS[shape.architecture, head, form].items():
        tensors[theirs] = state[own].detach().float().contiguous()
    write_tensors(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return name


def _raw_head_as_electra(state: Mapping[str, Tensor], width: int) -> State:
    """Electra's head with the outputs of a raw one; ValueError where it is not wide enough."""
    weight_CD, bias_C = state["head.classifier.weight"].float(), state["head.classifier.bias"].float()
    num_outputs = len(bias_C)
    if 2 * num_outputs > width:
        raise InputError(
            f"a raw head of {num_outputs} labels does not fit into ElectraForSequenceClassification of width {width}; "
            'use finetune.head = "hf"'
        )
    both, unused = torch.cat((torch.eye(num_outputs), -torch.eye(num_outputs))), width - 2 * num_outputs
    return {
        "head.dense.weight": nn.functional.pad(both @ weight_CD, (0, 0, 0, unused)),
        "head.dense.bias": nn.functional.pad(both @ bias_C, (0, unused)),
        "head.classifier.weight": nn.functional.pad(both.T, (0, unused)),
        "head.classifier.bias": torch.zeros(num_outputs),
    }


def read_finetuned(folder: Path) -> Finetuned:
    """A folder of one of `transformers`' classes, written here or elsewhere, or of a head of ours.

    Raises FileNotFoundError, or ValueError naming the file, field, value and remedy.
    """
    if not (folder / "config.json").is_file():
        what = "no config.json there" if folder.is_dir() else "no such folder"
        raise FileNotFoundError(f"{folder}: {what}; name a fine-tuned model, as DIR/TASK/seed-0/model")
    table, path = read_table(folder), folder / "config.json"
    architecture = MODEL_TYPES[table["model_type"]]
    head = str(table.get(HEAD_KEY, "hf"))
    labels = _labels(path, table)
    kind = _kind(folder, table, architecture, len(labels))
    pooling = table.get("classifier_pooling", "cls")
    if (architecture, head, _FORMS[kind]) not in _HEADS or (kind in _PROBLEM_TYPES and pooling != "cls"):
        raise InputError(f"{path}: only heads on [CLS] or on tokens are supported (classifier_pooling, {HEAD_KEY})")
    if kind == "question-answering" and len(labels) != 2:
        raise InputError(f"{path}: id2label has {len(labels)} labels; question answering has 2, start and end")
    shape = read_encoder_shape(folder, table)
    length, settings = table.get(LENGTH_KEY, shape.max_positions), table.get(SETTINGS_KEY, {})
    if type(length) is not int or not 8 <= length <= shape.max_positions:
        raise InputError(f"{path}: {LENGTH_KEY} = {length!r} must be between 8 and {shape.max_positions}")
    if not isinstance(settings, dict):
        raise InputError(f"{path}: {SETTINGS_KEY} = {settings!r} must be an object")
    num_texts = table.get(TEXTS_KEY)
    if num_texts not in (None, 1, 2):
        raise InputError(f"{path}: {TEXTS_KEY} = {num_texts!r} must be 1 or 2")
    columns = table.get(COLUMNS_KEY, [])
    if not isinstance(columns, list) or not all(_are_names(each) for each in columns):
        raise InputError(f"{path}: {COLUMNS_KEY} = {columns!r} must be a list of lists of names")
    names = _HEADS[architecture, head, _FORMS[kind]]
    state = read_state(folder, shape, names, _head_sizes(shape.hidden_size, len(labels)))
    return Finetuned(shape, head, kind, labels, length, num_texts, state, settings, tuple(map(tuple, columns)))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)


def _labels(path: Path, table: Mapping[str, Any]) -> tuple[str, ...]:
    names = table.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # the default in transformers
    try:
        found = tuple(str(names[str(i)]) for i in range(len(names)))
    except (KeyError, TypeError):
        found = ()
    if not found or len(set(found)) < len(found):
        raise InputError(f"{path}: id2label = {names!r} must give each of the ids 0, 1, ... a name of its own")
    return found


def _kind(folder: Path, table: Mapping[str, Any], architecture: str, num_labels: int) -> str:
    """The kind of task, from the class and what config.json says beside it."""
    path, classes = folder / "config.json", table.get("architectures")
    classes = classes if isinstance(classes, list) else []
    for kind in ("tagging", "question-answering"):
        if class_name(architecture, kind) in classes or table.get(KIND_KEY) == kind:
            return kind
    if class_name(architecture, "classification") not in classes and HEAD_KEY not in table:
        known = ", ".join(f"{_FAMILIES[architecture]}For{form}" for form in dict.fromkeys(_FORMS.values()))
        raise InputError(
            f"{path}: architectures = {classes!r}, which is not fine-tuned ({known}); "
            f"fine-tune it with `electra-fast finetune --model {folder}`"
        )
    problem_type = table.get("problem_type")
    if problem_type is None:
        return "regression" if num_labels == 1 else "classification"
    for kind, name in _PROBLEM_TYPES.items():
        if name == problem_type:
            return kind
    raise InputError(f"{path}: problem_type = {problem_type!r} must be one of {', '.join(_PROBLEM_TYPES.values())}")


def _head_sizes(width: int, num_labels: int) -> dict[str, torch.Size]:
    return {
        "head.dense.weight": torch.Size((width, width)),
        "head.dense.bias": torch.Size((width,)),
        "head.norm.weight": torch.Size((width,)),
        "head.classifier.weight": torch.Size((num_labels, width)),
        "head.classifier.bias": torch.Size((num_labels,)),
        "head.start.weight": torch.Size((1, width)),
        "head.start.bias": torch.Size((1,)),
        **{f"head.{name}_dense.weight": torch.Size((JOINT_WIDTH, 2 * width)) for name in ("end", "answerable")},
        **{f"head.{name}_dense.bias": torch.Size((JOINT_WIDTH,)) for name in ("end", "answerable")},
        **{f"head.{name}.weight": torch.Size((1, JOINT_WIDTH)) for name in ("end", "answerable")},
        **{f"head.{name}.bias": torch.Size((1,)) for name in ("end", "answerable")},
    }
