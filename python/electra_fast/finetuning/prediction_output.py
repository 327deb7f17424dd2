"""Writes answers to the examples of a file, a pipe or standard input as JSON lines, for `predict` and `detect`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from electra_fast.data.object_store import local_file
from electra_fast.errors import InputError, Interrupted
from electra_fast.files.atomic_files import temporary_file
from electra_fast.files.json_files import json_text
from electra_fast.finetuning.prediction_input import ExampleReader, Examples, Source, open_examples
from electra_fast.finetuning.readers.rows import Row, with_columns
from electra_fast.finetuning.task import Prediction
from electra_fast.messages import say

# Number of examples that are read, sorted by length and predicted together.
_CHUNK = 4096


def answer_file(
    predict: Callable[[list[Any]], list[Prediction]],
    reader: ExampleReader,
    source: Source,
    out: str | Path | None,
    *,
    preface: str,
    purpose: str,
) -> list[Prediction] | None:
    """Writes one answer per example of a source, in order, as JSON lines, or returns the answers.

    `predict` answers the examples that `reader` reads. The file `out` is written atomically. `preface` is a line for
    the user before the first answer, or empty. `purpose` describes the model's use in the error about a file without
    examples. Raises the errors of `electra_fast.predict`.
    """
    if out is not None and (Path(out).is_dir() or not Path(out).parent.is_dir()):
        raise InputError(f"{out}: cannot be written; --out must be a file in an existing folder")
    returned = list[Prediction]()
    count = 0
    with contextlib.ExitStack() as stack:
        source = dataclasses.replace(source, path=stack.enter_context(local_file(source.path)))
        try:
            examples = stack.enter_context(open_examples(reader, source))
            first = list(itertools.islice(examples.rows, 1))  # raises errors before anything is written
        except InputError as error:
            raise InputError(f"{error}; {purpose}") from None
        examples = dataclasses.replace(examples, rows=itertools.chain(first, examples.rows))
        num_notes = len(examples.notes)
        started = time.monotonic()
        for line in filter(None, (preface, *examples.notes)):
            say(line)
        try:
            with _output(Path(out or "-")) as stream:
                for chunk in _chunks(examples):
                    predicted = zip(predict([example for example, _ in chunk]), chunk, strict=True)
                    answers = [with_columns(answer, row) for answer, (_, row) in predicted]
                    count += len(chunk)
                    if out is None:
                        returned += answers
                        continue
                    stream.writelines(json_text(answer, stream.encoding) for answer in answers)
                    stream.flush()
        except KeyboardInterrupt as stop:
            outcome = "are dropped" if out is None else "are written" if str(out) == "-" else f"are not in {out}"
            number = getattr(stop, "signal", signal.SIGINT)
            raise Interrupted(number, f"interrupted; {source.path}: {count:,} predictions {outcome}") from None
    seconds = time.monotonic() - started
    for line in examples.notes[num_notes:]:
        say(line)
    say(f"{source.path}: {count:,} predictions in {seconds:.1f} s ({count / seconds:,.0f} per second)")
    return returned if out is None else None


def _chunks(examples: Examples) -> Iterator[list[tuple[Any, Row]]]:
    """Yields chunks of at most `_CHUNK` examples that have arrived; raises an error after the last chunk."""
    chunk: list[tuple[Any, Row]] = []
    error = None
    try:
        for example in examples.rows:
            chunk.append(example)
            if len(chunk) == _CHUNK or examples.is_idle():
                yield chunk
                chunk = []
    except InputError as stop:
        error = stop
    if chunk:
        yield chunk
    if error is not None:
        raise error


@contextlib.contextmanager
def _output(path: Path) -> Iterator[TextIO]:
    """Opens standard output, a pipe or device, or a temporary file that is renamed when complete."""
    if str(path) == "-":
        yield sys.stdout
        return
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as stream:
            yield stream
        return
    path = path.resolve()
    with temporary_file(path) as temporary:
        with temporary.open("w", encoding="utf-8") as stream:
            yield stream
        os.replace(temporary, path)
