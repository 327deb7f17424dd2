"""A teacher: a fine-tuned model whose outputs a student learns from, in addition to labels.

Its answers are computed once per text and stored in blocks below the output folder, keyed by hashes of the teacher and
the text.

Shapes: n examples, C outputs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from electra_fast.config.config import AUTO
from electra_fast.data.corpus import Tokenizer
from electra_fast.errors import InputError, Interrupted
from electra_fast.files.atomic_files import replace_file
from electra_fast.files.json_files import read_object
from electra_fast.finetuning.batches import TrainingSet
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.loading import load_finetuned
from electra_fast.finetuning.model_folder import is_finetuned, models_inside
from electra_fast.finetuning.predictor import Predictor
from electra_fast.finetuning.readers.labels import truncated
from electra_fast.finetuning.task import Split, Task, select
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.finetuning.tasks.task_type import TeachableType
from electra_fast.interruption import stop_requests
from electra_fast.messages import say
from electra_fast.progress import EncodingProgress

Array = NDArray[Any]
# Number of answers per stored block; a kill loses at most one block.
BLOCK = 256
# Models of `transformers`: classes of teachers, texts per batch, and maximum tokens per text.
_HF_CLASSES = ("ForSequenceClassification", "ForTokenClassification")
_HF_BATCH = 16
_HF_LENGTH = 512
# Number of examples in a speed measurement.
_TIMED = 200
# Bytes per hash of a text.
_DIGEST = 16


class HuggingFaceModel:
    """A sequence or token classifier of any architecture and vocabulary, loaded by `transformers`."""

    num_texts: int | None = None

    def __init__(self, folder: Path, device: torch.device) -> None:
        try:
            import transformers  # optional, and slow to import
        except ImportError:
            raise InputError(f"--teacher {folder}: needs `transformers`; pip install electra-fast[hf]") from None
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            is_tagging = any(name.endswith(_HF_CLASSES[1]) for name in config.architectures or ())
            kind = transformers.AutoModelForSequenceClassification
            if is_tagging:
                kind = transformers.AutoModelForTokenClassification
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model = kind.from_pretrained(folder, local_files_only=True).float().to(device).eval()
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"--teacher {folder}: `transformers` cannot load the model: {reason}") from None
        self.labels = tuple(config.id2label[number] for number in range(config.num_labels))
        usual = "regression" if config.num_labels == 1 else "single_label_classification"
        forms = {task_type.hf.problem_type: name for name, task_type in TASK_TYPES.items() if task_type.hf.problem_type}
        self.kind = "tagging" if is_tagging else forms[config.problem_type or usual]
        room = getattr(config, "max_position_embeddings", _HF_LENGTH)
        # RoBERTa's positions begin after the padding position.
        room -= 1 + config.pad_token_id if "roberta" in config.model_type or config.model_type == "camembert" else 0
        self._length = min(self._tokenizer.model_max_length, room, _HF_LENGTH)

    @torch.no_grad()
    def outputs_of(self, split: Split) -> Array:
        """Returns logits, or values in the units of the data, [n, C]; for tagging [words, C], NaN without an answer."""
        counts = np.ones(len(split.texts), np.int64) if split.words is None else np.array([*map(len, split.words)])
        outputs = np.full((int(counts.sum()), len(self.labels)), np.nan, np.float32)
        begins = np.cumsum(counts) - counts
        order = sorted(np.flatnonzero(counts).tolist(), key=lambda row: sum(map(len, split.texts[row])))
        for start in range(0, len(order), _HF_BATCH):
            rows = order[start : start + _HF_BATCH]
            encoding = self._encoded(split, rows)
            logits = self._model(**encoding.to(self._model.device)).logits.float().cpu().numpy()
            for number, row in enumerate(rows):
                if split.words is None:
                    outputs[begins[row]] = logits[number]
                    continue
                words = encoding.word_ids(number)
                for place in reversed(range(len(words))):  # the first token of a word is written last
                    if words[place] is not None:
                        outputs[begins[row] + words[place]] = logits[number, place]
        return outputs

    def _encoded(self, split: Split, rows: Sequence[int]) -> Any:
        options = {"truncation": True, "max_length": self._length, "padding": True, "return_tensors": "pt"}
        if split.words is None:
            columns = zip(*(split.texts[row] for row in rows), strict=True)
            return self._tokenizer(*map(list, columns), **options)
        words = [[split.texts[row][0][start:end] for start, end in split.words[row]] for row in rows]
        return self._tokenizer(words, is_split_into_words=True, **options)


Model = Predictor | HuggingFaceModel


class Teacher:
    """A fine-tuned model with a cache of its answers, in the folder `cache`.

    Raises FileNotFoundError, or InputError for a folder without a task head.
    """

    def __init__(self, folder: Path, cache: Path, device: torch.device) -> None:
        self.folder = folder
        self.notes: tuple[str, ...] = ()
        """Lines for the user; set by `check`."""
        self._model = _read(folder, device)
        self.kind = self._model.kind
        self.labels = self._model.labels
        self.num_texts = self._model.num_texts
        self.content_hash = _content_hash(folder)
        self._blocks = cache / self.content_hash[:_DIGEST]
        self._known: dict[bytes, Array] | None = None

    def check(self, task: Task, num_texts: int) -> list[int]:
        """Returns the teacher's output index for each output of the task; raises InputError if it cannot teach it."""
        if self.kind != task.kind:
            raise InputError(f"--teacher {self.folder}: is for {self.kind}, but the examples are for {task.kind}")
        if self.num_texts not in (None, num_texts):
            reads = {1: "single texts", 2: "pairs of texts"}
            raise InputError(
                f"--teacher {self.folder}: reads {reads[self.num_texts or 1]}, but the examples are {reads[num_texts]}"
            )
        teacher_labels = self.labels
        task_labels = task.labels
        if not TASK_TYPES[task.kind].has_classes:
            return list(range(len(teacher_labels)))
        for name in (str, str.casefold):
            numbers = {name(label): number for number, label in enumerate(teacher_labels)}
            if len(numbers) == len(teacher_labels) and numbers.keys() == {name(label) for label in task_labels}:
                return [numbers[name(label)] for label in task_labels]
        if len(teacher_labels) == len(task_labels) and teacher_labels == tuple(
            f"LABEL_{number}" for number in range(len(teacher_labels))
        ):
            pairs = ", ".join(f"{a} = {b!r}" for a, b in zip(teacher_labels, task_labels, strict=True))
            self.notes = (f"{self.folder}: has no class names; using the order of --labels: {pairs}",)
            return list(range(len(teacher_labels)))
        parts = [
            f"{description} {truncated([*map(repr, names)])}"
            for description, names in (
                ("missing", [label for label in task_labels if label not in teacher_labels]),
                ("additional", [label for label in teacher_labels if label not in task_labels]),
            )
            if names
        ]
        raise InputError(
            f"--teacher {self.folder}: has other classes ({', '.join(parts)}); rename labels with --label-map"
        )

    def outputs(self, split: Split) -> Array:
        """Returns the model's outputs, float64 [n, C] or [words, C]; computes those that are not cached.

        Raises Interrupted at a signal; finished blocks are kept.
        """
        digests = [_digest(split, row) for row in range(len(split.texts))]
        known = self._cached()
        missing = {digest: row for row, digest in reversed([*enumerate(digests)]) if digest not in known}
        rows = sorted(missing.values())
        with stop_requests() as stop, EncodingProgress("teacher", len(rows), unit="texts") as shown:
            for start in range(0, len(rows), BLOCK):
                if stop:
                    raise Interrupted(
                        stop.signal,
                        f"interrupted; {self._blocks}: {len(known):,} answers of the teacher; run again to resume",
                    )
                block = rows[start : start + BLOCK]
                self._answer(select(split, split.name, block), [digests[row] for row in block])
                shown.advance(len(block))
        return np.concatenate([known[digest] for digest in digests])

    def seconds(self, split: Split) -> float:
        """Returns the `seconds_per_thousand` of the teacher's model."""
        return seconds_per_thousand(self._model, split)

    def _answer(self, split: Split, digests: Sequence[bytes]) -> None:
        """Computes answers and stores them as a block."""
        assert self._known is not None
        answers = np.asarray(self._model.outputs_of(split), np.float64)
        counts = np.ones(len(digests), np.int64) if split.words is None else np.array([*map(len, split.words)])
        content = io.BytesIO()
        np.savez(content, digests=np.frombuffer(b"".join(digests), np.uint8), counts=counts, answers=answers)
        self._blocks.mkdir(parents=True, exist_ok=True)
        replace_file(self._blocks / f"{digests[0].hex()}.npz", content.getvalue())
        self._known |= _by_digest(np.frombuffer(b"".join(digests), np.uint8), counts, answers)

    def _cached(self) -> dict[bytes, Array]:
        if self._known is None:
            self._known = {}
            for path in sorted(self._blocks.glob("*.npz")):
                try:
                    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as block:
                        self._known |= _by_digest(block["digests"], block["counts"], block["answers"])
                except (OSError, ValueError, KeyError, zipfile.BadZipFile):
                    say(f"{path}: damaged; computing its answers again")
        return self._known


@dataclass(frozen=True)
class Lesson:
    """A teacher and, if there are any, unlabeled examples, for a student to learn from in addition to labels.

    `order` has the index of the teacher's output for each output of the task.
    """

    teacher: Teacher
    order: Sequence[int]
    unlabeled: Split | None

    def answers(self, task: Task, split: Split) -> Array:
        """Returns the teacher's outputs in the student's order and units, [n, C] or [words, C]."""
        outputs = self.teacher.outputs(split)[:, list(self.order)]
        return np.asarray((outputs - task.shift) / task.scale)

    def training_set(
        self, labeled: TrainingSet, tokenizer: Tokenizer, task: Task, train: Split, config: FinetuneSection
    ) -> TrainingSet:
        """Returns labeled and unlabeled examples with the teacher's answers to all of them."""
        task_type = TASK_TYPES[task.kind]
        unlabeled = None
        splits = [train]
        assert isinstance(task_type, TeachableType)
        if self.unlabeled is not None:
            splits.append(self.unlabeled)
            targets = _placeholders(train, self.unlabeled)
            blank = dataclasses.replace(self.unlabeled, targets=targets)
            unweighted = dataclasses.replace(config, class_weights="none")
            unlabeled = task_type.training_set(tokenizer, task, blank, unweighted)
        teach = partial(self.answers, task)
        answers = [task_type.taught_outputs(tokenizer, split, config, teach) for split in splits]
        return labeled.taught(np.concatenate(answers), unlabeled, config.teacher_weight)

    def identity(self, config: FinetuneSection) -> dict[str, Any]:
        """Returns the lesson's part of `Job.identity`."""
        texts = () if self.unlabeled is None else self.unlabeled.texts
        digest = hashlib.sha256("\0".join(part for text in texts for part in text).encode("utf-8", "surrogatepass"))
        return {
            "content": self.teacher.content_hash,
            "unlabeled": digest.hexdigest(),
            "weight": config.teacher_weight,
            "temperature": config.teacher_temperature,
        }


def _placeholders(train: Split, unlabeled: Split) -> Array:
    """Returns zero targets with the shape and dtype of a training split's."""
    if unlabeled.words is None:
        return np.zeros((len(unlabeled.texts), *train.gold.shape[1:]), train.gold.dtype)
    targets = np.empty(len(unlabeled.texts), object)
    targets[:] = [np.zeros(len(words), np.int64) for words in unlabeled.words]
    return targets


def seconds_per_thousand(model: Model, split: Split) -> float:
    """Returns the seconds for 1,000 texts, including tokenization: the shorter of two measurements."""
    sample = select(split, split.name, range(min(_TIMED, len(split.texts))))
    times = []
    for _ in range(2):
        started = time.perf_counter()
        model.outputs_of(sample)
        times.append(time.perf_counter() - started)
    return 1000 * min(times) / len(sample.texts)


def _by_digest(digests: Array, counts: Array, answers: Array) -> Iterator[tuple[bytes, Array]]:
    names = (digest.tobytes() for digest in digests.reshape(-1, _DIGEST))
    return zip(names, np.split(answers, np.cumsum(counts)[:-1]), strict=True)


def _digest(split: Split, row: int) -> bytes:
    content = "\0".join((*split.texts[row], "")).encode("utf-8", "surrogatepass")
    words = b"" if split.words is None else np.ascontiguousarray(split.words[row], np.int64).tobytes()
    return hashlib.sha256(content + words).digest()[:_DIGEST]


def _read(folder: Path, device: torch.device) -> Model:
    if hint := models_inside(folder):
        raise InputError(f"--teacher {folder}: {hint}")
    if not folder.is_dir():
        raise FileNotFoundError(f"--teacher {folder}: no such folder")
    if not is_finetuned(folder):
        raise InputError(
            f"--teacher {folder}: has no task head, so it cannot label examples; fine-tune it first with "
            f"`electra-fast finetune {folder}`"
        )
    try:
        return load_finetuned(folder, str(device), AUTO)
    except InputError:
        classes = read_object(folder / "config.json").get("architectures") or ()
        if (folder / "model.onnx").exists() or not any(str(name).endswith(_HF_CLASSES) for name in classes):
            raise
    return HuggingFaceModel(folder, device)  # a head or setting that only `transformers` supports


def _content_hash(folder: Path) -> str:
    """Returns a hash of everything that determines a model's answers: weights, settings and tokenizer."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix != ".md":
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
