"""Folders of fine-tuned models: the `transformers` classes for the task types, with our encoders.

Some of the published heads have no class in `transformers`. If another class can compute the same outputs,
`TaskType.to_transformers` converts them. Otherwise the folder contains the encoder as ElectraModel or a similar class,
which `AutoModel` loads, and in addition the head's tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from electra_fast.config.config import ModelConfig
from electra_fast.config.section import present_name
from electra_fast.errors import InputError
from electra_fast.files.json_files import read_object, write_object
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.readers.labels import truncated
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.huggingface.config import (
    CLASSES,
    HEADLESS,
    MODEL_TYPES,
    ONNX_FILE,
    describe_encoder,
    named_classes,
    num_detector_labels,
    read_encoder_shape,
    read_table,
)
from electra_fast.huggingface.model_types import ORIGINAL_KEY, original
from electra_fast.huggingface.settings import HEAD_KEYS, check_settings
from electra_fast.huggingface.tensor_files import weights_file

if TYPE_CHECKING:
    from torch import Tensor

# Our keys in config.json.
HEAD_KEY = "electra_fast_head"
"""For a head without a class in `transformers`: "published"."""
KIND_KEY = "electra_fast_kind"
"""The task type, for a head without a class."""
LENGTH_KEY = "electra_fast_sequence_length"
"""Length of the longest training example, in tokens."""
TEXTS_KEY = "electra_fast_num_texts"
"""1 if an example is a text, 2 if it is a pair."""
COLUMNS_KEY = "electra_fast_text_columns"
LABEL_COLUMNS_KEY = "electra_fast_label_columns"
"""The columns of the user's data, the columns of the training file first."""
SETTINGS_KEY = "electra_fast_settings"
"""The task type's settings for prediction."""
ONNX_KEY = "electra_fast_onnx"
"""For a folder with a model.onnx and no weights: its `precision`, `fp32` or `int8`."""
DEV_FILE = "dev.jsonl"
"""The validation examples, in the folder of a task, above the folders of its models."""
RAW_CLASSES: dict[str, str] = {architecture: HEADLESS[name] for name, architecture in MODEL_TYPES.items()}
_FAMILIES: dict[str, str] = {architecture: name.removesuffix("Model") for architecture, name in RAW_CLASSES.items()}


@dataclass(frozen=True)
class Finetuned:
    """The description of a fine-tuned model in its folder.

    Args:
        head: `transformers` or `published`.
        kind: The task type, a key of `TASK_TYPES`.
        labels: Names of the head's outputs by class id.
        num_texts: 1 if an example is a text, 2 if it is a pair; None if the folder does not say.
        state: fp32 parameters, named as in a module with `embeddings`, `encoder` and `head`; empty if not read.
        text_columns: Text columns of the training and validation tables; empty if the folder does not say.
        label_columns: Label columns of these tables; empty if the folder does not say.
        onnx: The precision of model.onnx; empty if the folder has weights.
    """

    shape: ModelConfig
    head: str
    kind: str
    labels: tuple[str, ...]
    sequence_length: int
    num_texts: int | None
    state: Mapping[str, Tensor] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    text_columns: tuple[tuple[str, ...], ...] = ()
    label_columns: tuple[tuple[str, ...], ...] = ()
    onnx: str = ""


def class_name(architecture: str, kind: str) -> str:
    return f"{_FAMILIES[architecture]}For{TASK_TYPES[kind].hf.ending}"


def write_finetuned(folder: Path, finetuned: Finetuned, special_ids: Mapping[str, int], head_dropout: float) -> str:
    """Writes config.json and model.safetensors to an existing folder; returns the class that loads it."""
    from electra_fast.checkpoint import write_tensors
    from electra_fast.huggingface import weights

    shape = finetuned.shape
    kind = finetuned.kind
    task_type = TASK_TYPES[finetuned.kind]
    architecture = shape.architecture
    head, state = task_type.to_transformers(architecture, finetuned.head, finetuned.state, shape.hidden_size)
    name = RAW_CLASSES[architecture] if head == "published" else class_name(architecture, kind)
    table = {"architectures": [name]} | describe_encoder(shape, special_ids)
    table |= {
        "classifier_dropout": head_dropout,
        "id2label": {str(i): label for i, label in enumerate(finetuned.labels)},
        "label2id": {label: i for i, label in enumerate(finetuned.labels)},
        LENGTH_KEY: finetuned.sequence_length,
        TEXTS_KEY: finetuned.num_texts,
    }
    for key, columns in ((COLUMNS_KEY, finetuned.text_columns), (LABEL_COLUMNS_KEY, finetuned.label_columns)):
        if columns:
            table[key] = [list(names) for names in columns]
    if task_type.hf.problem_type:
        table["problem_type"] = task_type.hf.problem_type
    else:
        table[KIND_KEY] = kind
    if finetuned.settings:
        table[SETTINGS_KEY] = dict(finetuned.settings)
    if architecture == "modernbert":
        table |= {"classifier_pooling": "cls", "classifier_activation": "gelu", "classifier_bias": False}
    if architecture == "deberta":
        table |= {"cls_dropout": head_dropout, "pooler_dropout": 0.0, "pooler_hidden_act": "gelu"}
    if head == "published":
        table[HEAD_KEY] = head
    write_object(folder / "config.json", table)
    tensors = weights.encoder_to_hf(state, shape)
    for name_here, hf_name in task_type.hf.head_names[architecture, head].items():
        tensors[hf_name] = state[name_here].detach().float().contiguous()
    write_tensors(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return name


def read_finetuned(folder: Path) -> Finetuned:
    """Reads a folder with its weights. Raises the errors of `read_description`."""
    import torch

    from electra_fast.huggingface.encoder import read_state

    description = read_description(folder)
    task_type = TASK_TYPES[description.kind]
    shape = description.shape
    with torch.device("meta"):
        model = task_type.model(shape, FinetuneSection(head=cast(Any, description.head)), len(description.labels))
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    state = read_state(folder, shape, task_type.hf.head_names[shape.architecture, description.head], sizes)
    return dataclasses.replace(description, state=state)


def read_description(folder: Path) -> Finetuned:
    """Reads the config.json of a `transformers` class, written by any tool, or of a published head.

    Raises FileNotFoundError, or ValueError that names the file, field, value and remedy.
    """
    if not (folder / "config.json").is_file():
        problem = "no config.json" if folder.is_dir() else "no such folder"
        if (folder / ONNX_FILE).is_file():
            problem = f"{ONNX_FILE} without its config.json; copy the whole folder that `export` wrote"
            raise FileNotFoundError(f"{folder}: {problem}")
        hint = models_inside(folder) or f"{problem}; pass a fine-tuned model, such as DIR/TASK/seed-0/model"
        raise FileNotFoundError(f"{folder}: {hint}")
    table = read_table(folder)
    path = folder / "config.json"
    if ORIGINAL_KEY in table:  # its heads differ from Electra's
        raise InputError(
            f"{path}: model_type = {original(table)['model_type']!r}: a fine-tuned model must be one of "
            f"{', '.join(MODEL_TYPES)}; fine-tune this encoder with `electra-fast finetune {folder}`"
        )
    architecture = MODEL_TYPES[table["model_type"]]
    head = present_name("finetune.head", str(table.get(HEAD_KEY, "transformers")))
    labels = _labels(path, table)
    kind = _kind(folder, table, architecture, len(labels))
    task_type = TASK_TYPES[kind]
    hf = TASK_TYPES[kind].hf
    pooling = table.get("classifier_pooling", "cls")
    if (architecture, head) not in hf.head_names or (hf.problem_type and pooling != "cls"):
        raise InputError(f"{path}: only heads on [CLS] or on tokens are supported (classifier_pooling, {HEAD_KEY})")
    if task_type.output_names and len(labels) != len(task_type.output_names):
        raise InputError(
            f"{path}: id2label has {len(labels)} labels; {kind} must have {len(task_type.output_names)}: "
            f"{' and '.join(task_type.output_names)}"
        )
    check_settings(path, table, HEAD_KEYS)
    shape = read_encoder_shape(folder, table)
    length = table.get(LENGTH_KEY, shape.max_positions)
    settings = table.get(SETTINGS_KEY, {})
    if type(length) is not int or not 8 <= length <= shape.max_positions:
        raise InputError(f"{path}: {LENGTH_KEY} = {length!r}: must be between 8 and {shape.max_positions}")
    if not isinstance(settings, dict):
        raise InputError(f"{path}: {SETTINGS_KEY} = {settings!r}: must be an object")
    num_texts = table.get(TEXTS_KEY)
    if num_texts not in (None, 1, 2):
        raise InputError(f"{path}: {TEXTS_KEY} = {num_texts!r}: must be 1 or 2")
    text, label = (_columns(path, table, key) for key in (COLUMNS_KEY, LABEL_COLUMNS_KEY))
    onnx = _onnx(folder, table)
    return Finetuned(shape, head, kind, labels, length, num_texts, {}, settings, text, label, onnx)


def _onnx(folder: Path, table: Mapping[str, Any]) -> str:
    """Returns the precision of model.onnx ("fp32" if another tool wrote it), or "" for a folder with weights."""
    if ONNX_KEY not in table:
        return "fp32" if (folder / ONNX_FILE).is_file() and not weights_file(folder).is_file() else ""
    properties = table[ONNX_KEY]
    if not isinstance(properties, dict) or properties.get("precision") not in ("fp32", "int8"):
        raise InputError(f"{folder / 'config.json'}: {ONNX_KEY} = {properties!r}: must have the precision fp32 or int8")
    return str(properties["precision"])


def models_inside(folder: Path) -> str:
    """Returns a hint that lists the fine-tuned models in an output folder of `finetune`, or "" for other folders."""
    if any((folder / name).exists() for name in ("config.json", "checkpoints", "state.json")):
        return ""
    patterns = ("model", "seed-*/model", "*/seed-*/model", "*/*/seed-*/model")
    folders = [path.parent for pattern in patterns for path in sorted(folder.glob(f"{pattern}/config.json"))]
    return f"contains models; pass one of them: {truncated([str(path) for path in folders])}" if folders else ""


def is_finetuned(folder: Path) -> bool:
    """Returns whether a folder has a head for a task; the head of a replaced-token detector does not count."""
    path = folder / "config.json"
    if not path.is_file():
        return (folder / ONNX_FILE).is_file()  # a read then reports the missing files
    table = read_object(path)
    classes = table.get("architectures")
    if classes == [CLASSES["modernbert", "discriminator"]] and KIND_KEY not in table:
        with contextlib.suppress(InputError):
            num_detector_labels(path, table)
            return False
    endings = tuple(f"For{task_type.hf.ending}" for task_type in TASK_TYPES.values())
    named = isinstance(classes, list) and any(str(name).endswith(endings) for name in classes)
    return named or HEAD_KEY in table or KIND_KEY in table


def _columns(path: Path, table: Mapping[str, Any], key: str) -> tuple[tuple[str, ...], ...]:
    columns = table.get(key, [])
    are_names = isinstance(columns, list) and all(
        isinstance(names, list) and names and all(isinstance(name, str) for name in names) for names in columns
    )
    if not are_names:
        raise InputError(f"{path}: {key} = {columns!r}: must be a list of lists of names")
    return tuple(map(tuple, columns))


def _labels(path: Path, table: Mapping[str, Any]) -> tuple[str, ...]:
    number = table.get("num_labels", 2)  # the defaults in transformers
    names = table.get("id2label") or {str(i): f"LABEL_{i}" for i in range(number if type(number) is int else 0)}
    try:
        labels = tuple(str(names[str(i)]) for i in range(len(names)))
    except (KeyError, TypeError):
        labels = ()
    if not labels or len(set(labels)) < len(labels):
        raise InputError(f"{path}: id2label = {names!r}: must have a unique name for each of the ids 0, 1, ...")
    return labels


def _kind(folder: Path, table: Mapping[str, Any], architecture: str, num_labels: int) -> str:
    """Returns the task type for the class and other fields in config.json."""
    path = folder / "config.json"
    classes = named_classes(path, table)
    by_problem = {type_.hf.problem_type: kind for kind, type_ in TASK_TYPES.items() if type_.hf.problem_type}
    for kind, task_type in TASK_TYPES.items():
        if not task_type.hf.problem_type and (class_name(architecture, kind) in classes or table.get(KIND_KEY) == kind):
            return kind
    if HEAD_KEY not in table and not {class_name(architecture, kind) for kind in by_problem.values()} & {*classes}:
        known = ", ".join(dict.fromkeys(class_name(architecture, kind) for kind in TASK_TYPES))
        raise InputError(
            f"{path}: architectures = {classes!r}: not a fine-tuned model ({known}); "
            f"fine-tune it with `electra-fast finetune {folder}`"
        )
    problem_type = table.get("problem_type")
    if problem_type is None:  # as in transformers
        problem_type = "regression" if num_labels == 1 else "single_label_classification"
    if not isinstance(problem_type, str) or problem_type not in by_problem:
        raise InputError(f"{path}: problem_type = {problem_type!r}: must be one of {', '.join(by_problem)}")
    return by_problem[problem_type]
