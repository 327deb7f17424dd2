"""The logs and the progress line of a session; one rank writes them for all."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from electra_fast.files.json_files import JsonLines, read_records
from electra_fast.objectives.objective import Number
from electra_fast.progress import TrainingProgress


class RunLog:
    """The files metrics.jsonl and evaluations.jsonl and the progress line, as a context manager.

    Args:
        run: The run's folder.
        first_step: Step at which the session begins; lines of later steps are dropped.
        num_steps: Steps of the run.
        is_silent: True on ranks that write and print nothing.
    """

    def __init__(self, run: Path, first_step: int, num_steps: int, *, is_silent: bool) -> None:
        self._run, self._first_step = run, first_step
        self._files: tuple[JsonLines, JsonLines] | None = None
        self._is_silent = is_silent
        self._progress = TrainingProgress(first_step, num_steps, shown=not is_silent)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:  # closes open files if another cannot be opened
            if not self._is_silent:
                metrics, evaluations = (
                    opened.enter_context(JsonLines(self._run / name, self._first_step))
                    for name in ("metrics.jsonl", "evaluations.jsonl")
                )
                self._files = (metrics, evaluations)
            opened.enter_context(self._progress)
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def say(self, message: str) -> None:
        """Prints a permanent line."""
        self._progress.say(message)

    def advance(self, step: int) -> None:
        """Moves the bar."""
        self._progress.advance(step)

    def write_metrics(self, record: dict[str, Any]) -> None:
        """Writes a line of metrics.jsonl, and shows it."""
        if self._files is not None:
            self._files[0].write(record)
        self._progress.report(record)

    def write_evaluation(self, record: dict[str, Number]) -> None:
        """Writes a line of evaluations.jsonl."""
        if self._files is not None:
            self._files[1].write(record)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The records of evaluations.jsonl; none on a silent rank."""
        return [] if self._files is None else read_records(self._run / "evaluations.jsonl")
