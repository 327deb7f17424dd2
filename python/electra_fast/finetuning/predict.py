"""Predictions of a fine-tuned model: `load_finetuned` for scripts, `predict_file` for the command line."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from numpy.typing import NDArray

from electra_fast.attention import choose_attention
from electra_fast.compute import ComputeConfig, choose_device, choose_precision
from electra_fast.data.corpus import Tokenizer
from electra_fast.errors import InputError
from electra_fast.finetuning import batches, tables
from electra_fast.finetuning.answers import Answer, answers
from electra_fast.finetuning.inference import model_outputs
from electra_fast.finetuning.model import SequenceClassifier
from electra_fast.finetuning.own_data import TEXT_COLUMNS
from electra_fast.huggingface.classifier import Classifier, read_classifier
from electra_fast.json_files import json_text

Texts = Iterable[str | tuple[str, ...]]
# Rows that are read, sorted by length and predicted together.
_CHUNK = 4096
# What an example is, by `Classifier.num_texts`.
_READS = {None: "one text or two", 1: "one text", 2: "a pair of texts"}


class FinetunedModel:
    """A fine-tuned model.

    Args:
        classifier: As read from its folder.
        tokenizer: The folder's.
        device: Where it computes.
    """

    def __init__(self, classifier: Classifier, tokenizer: Tokenizer, device: torch.device) -> None:
        self.kind, self.labels, self.num_texts = classifier.kind, classifier.labels, classifier.num_texts
        self._tokenizer, self._max_length = tokenizer, classifier.sequence_length
        precision = choose_precision("auto", device)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        attention = choose_attention("auto", device, dtype, 0.0, classifier.shape.local_attention)
        self._compute = ComputeConfig(attention, dtype)
        self._model = SequenceClassifier(classifier.shape, classifier.head, len(classifier.labels))
        self._model.load_state_dict(dict(classifier.state))
        self._model.to(device).eval()

    def predict(self, texts: Texts) -> list[Answer]:
        """An answer per text, or per pair of texts, in their order.

        `{"label": name, "scores": {name: probability}}` for classes, `{"labels": [...], "scores": {...}}` for several
        labels at once, `{"value": x}` for regression.
        """
        return list(answers(self.kind, self.labels, self.outputs(texts)))

    def outputs(self, texts: Texts) -> NDArray[Any]:
        """Logits, or values for regression; float32 [n, labels]."""
        if isinstance(texts, (str, bytes, Mapping)):
            raise InputError("predict takes a list of texts, or of pairs of texts; put a single one into a list")
        examples = [self._checked(number, each) for number, each in enumerate(texts)]
        return model_outputs(self._model, batches.encode(self._tokenizer, examples, self._max_length), self._compute)

    def _checked(self, number: int, example: object) -> tuple[str, ...]:
        texts = (example,) if isinstance(example, str) else example
        if not isinstance(texts, (tuple, list)) or not all(isinstance(text, str) for text in texts):
            raise InputError(f"example {number} is {example!r}; it must be a text or a pair of texts")
        if len(texts) not in ((1, 2) if self.num_texts is None else (self.num_texts,)):
            raise InputError(f"example {number} has {len(texts)} texts, but this model reads {_READS[self.num_texts]}")
        return tuple(texts)


def load_finetuned(folder: str | Path) -> FinetunedModel:
    """The model of a folder that `finetune` wrote, or of another one of `transformers`' sequence classification.

    Raises FileNotFoundError, or ValueError naming the file, field, value and remedy.
    """
    folder = Path(folder)
    classifier, tokenizer = read_classifier(folder), Tokenizer(folder)
    if tokenizer.vocab_size > classifier.shape.vocab_size:
        raise InputError(
            f"{tokenizer.path}: has {tokenizer.vocab_size:,} entries, but the model has "
            f"{classifier.shape.vocab_size:,}; put the model's own tokenizer there"
        )
    return FinetunedModel(classifier, tokenizer, choose_device())


def predict_file(
    model: str | Path,
    file: str | Path,
    out: str | Path | None = None,
    *,
    text: Sequence[str] = (),
    quoting: tables.Quoting = "auto",
) -> int:
    """Writes an answer per row of a file, as lines of JSON in its order, to `out` or standard output.

    Reads and writes in a stream: the file may be larger than memory. Returns the number of rows.

    Args:
        model: A fine-tuned folder.
        file: .txt (a text per line), .tsv, .csv, .jsonl or .parquet.
        out: Replaced when all is written.
        text: The column of the text, or those of a pair; by default what `own_data.read` takes.
        quoting: As for `tables.iterate_rows`.
    """
    file = Path(file)
    if out is not None and (Path(out).is_dir() or not Path(out).parent.is_dir()):
        raise InputError(f"{out}: cannot be written; --out names a file in a folder that exists")
    columns = tuple(text) or _default_columns(file, quoting)
    loaded, count, started = load_finetuned(model), 0, time.monotonic()
    if loaded.num_texts not in (None, len(columns)):
        raise InputError(
            f"{file}: {' and '.join(columns)}: this model reads {_READS[loaded.num_texts]}; "
            "choose the columns with --text"
        )
    with _output(Path(out) if out is not None else None) as stream:
        rows = tables.iterate_rows(file, columns, quoting=quoting)
        for chunk in _chunks(rows):
            texts = [tuple(tables.text_of(file, line, row, name) for name in columns) for line, row in chunk]
            stream.writelines(json_text(answer) for answer in loaded.predict(texts))
            stream.flush()
            count += len(chunk)
    seconds = time.monotonic() - started
    print(f"{file}: {count:,} predictions in {seconds:.1f} s ({count / seconds:,.0f} per second)", file=sys.stderr)
    return count


def _default_columns(file: Path, quoting: tables.Quoting) -> tuple[str, ...]:
    _, first = next(tables.iterate_rows(file, quoting=quoting))
    for columns in TEXT_COLUMNS:
        if set(columns) <= first.keys():
            return columns
    raise InputError(f"{file}: no text column; {tables.there_are(first)}; choose with --text")


def _chunks(rows: Iterator[tuple[int, tables.Row]]) -> Iterator[list[tuple[int, tables.Row]]]:
    while chunk := list(itertools.islice(rows, _CHUNK)):
        yield chunk


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that takes its name only when it is whole; a pipe or a device is written at once."""
    if path is None:
        yield sys.stdout
        return
    path = path.resolve()
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as stream:
            yield stream
        return
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            yield stream
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
