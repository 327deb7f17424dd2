"""Folders of fine-tuned models: `transformers`' sequence classification over an Electra or ModernBERT encoder.

A raw head, one layer on [CLS], has no class in `transformers`. Electra's can compute it all the same: its head is
out(gelu(dense(x))), and gelu(z) - gelu(-z) = z, so that two units of `dense` carry each of the raw head's outputs.
ModernBERT's head has a norm after the activation and cannot: there the folder holds the encoder as ModernBertModel,
which `AutoModel` loads, and the head's tensors beside it.

Shapes: C outputs of the head, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from electra_fast.checkpoint import write_tensors
from electra_fast.config import ModelConfig
from electra_fast.errors import InputError
from electra_fast.huggingface import weights
from electra_fast.huggingface.config import MODEL_TYPES, describe_encoder, read_encoder_shape, read_table
from electra_fast.huggingface.encoder import read_state
from electra_fast.huggingface.weights import State
from electra_fast.json_files import write_object

HEAD_KEY = "electra_fast_head"
"""Our key in config.json, for a raw head without a class in `transformers`: "google"."""
LENGTH_KEY = "electra_fast_sequence_length"
"""Our key in config.json: the length at which the examples were cut in training."""
TEXTS_KEY = "electra_fast_num_texts"
"""Our key in config.json: 1 where an example is a text, 2 where it is a pair."""
CLASSES = {"bert": "ElectraForSequenceClassification", "modern": "ModernBertForSequenceClassification"}
RAW_CLASS = "ModernBertModel"
_PROBLEM_TYPES = {
    "classification": "single_label_classification",
    "multi-label": "multi_label_classification",
    "regression": "regression",
}
# Our parameters of a head and their names in `transformers`, by architecture and head.
_HEADS: dict[tuple[str, str], dict[str, str]] = {
    ("bert", "hf"): {
        "head.dense.weight": "classifier.dense.weight",
        "head.dense.bias": "classifier.dense.bias",
        "head.classifier.weight": "classifier.out_proj.weight",
        "head.classifier.bias": "classifier.out_proj.bias",
    },
    ("modern", "hf"): {
        "head.dense.weight": "head.dense.weight",
        "head.norm.weight": "head.norm.weight",
        "head.classifier.weight": "classifier.weight",
        "head.classifier.bias": "classifier.bias",
    },
    ("modern", "google"): {
        "head.classifier.weight": "classifier.weight",
        "head.classifier.bias": "classifier.bias",
    },
}


@dataclass(frozen=True)
class Classifier:
    """A fine-tuned model as its folder describes it.

    Args:
        shape: Of the encoder.
        head: `hf` or `google`.
        kind: `classification`, `multi-label` or `regression`.
        labels: Names by class id; one for regression, which has no meaning.
        sequence_length: At which examples are cut, in tokens.
        num_texts: 1 where an example is a text, 2 where it is a pair; None where the folder does not say.
        state: fp32 parameters by the names of a module with `embeddings`, `encoder` and `head`.
    """

    shape: ModelConfig
    head: str
    kind: str
    labels: tuple[str, ...]
    sequence_length: int
    num_texts: int | None
    state: Mapping[str, Tensor]


def write_classifier(folder: Path, classifier: Classifier, special_ids: Mapping[str, int], head_dropout: float) -> str:
    """Writes config.json and model.safetensors to an existing folder; returns the class that loads it."""
    shape, head, state = classifier.shape, classifier.head, dict(classifier.state)
    if (shape.architecture, head) == ("bert", "google"):
        head, state = "hf", state | _raw_head_as_electra(state, shape.hidden_size)
    name = RAW_CLASS if head == "google" else CLASSES[shape.architecture]
    table = {"architectures": [name]} | describe_encoder(shape, special_ids)
    table |= {
        "classifier_dropout": head_dropout,
        "id2label": {str(i): label for i, label in enumerate(classifier.labels)},
        "label2id": {label: i for i, label in enumerate(classifier.labels)},
        "problem_type": _PROBLEM_TYPES[classifier.kind],
        LENGTH_KEY: classifier.sequence_length,
        TEXTS_KEY: classifier.num_texts,
    }
    if shape.architecture == "modern":
        table |= {"classifier_pooling": "cls", "classifier_activation": "gelu", "classifier_bias": False}
    if head == "google":
        table[HEAD_KEY] = head
    write_object(folder / "config.json", table)
    tensors = weights.encoder_to_hf(state, shape)
    for own, theirs in _HEADS[shape.architecture, head].items():
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


def read_classifier(folder: Path) -> Classifier:
    """A folder of `transformers`' sequence classification, written here or elsewhere, or a raw head of ours.

    Raises FileNotFoundError, or ValueError naming the file, field, value and remedy.
    """
    if not (folder / "config.json").is_file():
        what = "no config.json there" if folder.is_dir() else "no such folder"
        raise FileNotFoundError(f"{folder}: {what}; name a fine-tuned model, as DIR/TASK/seed-0/model")
    table, path = read_table(folder), folder / "config.json"
    architecture = MODEL_TYPES[table["model_type"]]
    head = str(table.get(HEAD_KEY, "hf"))
    classes = table.get("architectures")
    classes = classes if isinstance(classes, list) else []
    if CLASSES[architecture] not in classes and HEAD_KEY not in table:
        raise InputError(
            f"{path}: architectures = {classes!r}, which is not fine-tuned for classification or regression "
            f"({CLASSES[architecture]}); fine-tune it with `electra-fast finetune --model {folder}`"
        )
    if (architecture, head) not in _HEADS or table.get("classifier_pooling", "cls") != "cls":
        raise InputError(f"{path}: only heads on [CLS] are supported (classifier_pooling, {HEAD_KEY})")
    labels = _labels(path, table)
    shape = read_encoder_shape(folder, table)
    kind, length = _kind(path, table, len(labels)), table.get(LENGTH_KEY, shape.max_positions)
    if type(length) is not int or not 8 <= length <= shape.max_positions:
        raise InputError(f"{path}: {LENGTH_KEY} = {length!r} must be between 8 and {shape.max_positions}")
    num_texts = table.get(TEXTS_KEY)
    if num_texts not in (None, 1, 2):
        raise InputError(f"{path}: {TEXTS_KEY} = {num_texts!r} must be 1 or 2")
    state = read_state(folder, shape, _HEADS[architecture, head], _head_sizes(shape.hidden_size, len(labels)))
    return Classifier(shape, head, kind, labels, length, num_texts, state)


def _labels(path: Path, table: Mapping[str, Any]) -> tuple[str, ...]:
    names = table.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # the default in transformers
    try:
        found = tuple(str(names[str(i)]) for i in range(len(names)))
    except (KeyError, TypeError):
        found = ()
    if not found or len(set(found)) < len(found):
        raise InputError(f"{path}: id2label = {names!r} must give each of the ids 0, 1, ... a name of its own")
    return found


def _kind(path: Path, table: Mapping[str, Any], num_labels: int) -> str:
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
    }
