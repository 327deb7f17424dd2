"""What a session of a run writes and says while it trains: two logs and the progress line; one rank does it for all."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from electra_fast.files.json_files import JsonLines, read_records
from electra_fast.objectives.objective import Number
from electra_fast.progress import TrainingProgress


class RunLog:
    """Context manager of metrics.jsonl, evaluations.jsonl and the progress of a session.

    Args:
        run: The run's folder.
        first_step: Step at which the session begins: what the files have of later ones is dropped.
        num_steps: Steps of the run.
        is_silent: Write and say nothing: another rank does.
    """

    def __init__(self, run: Path, first_step: int, num_steps: int, *, is_silent: bool) -> None:
        self._run, self._first_step = run, first_step
        self._files: tuple[JsonLines, JsonLines] | None = None
        self._is_silent = is_silent
        self._progress = TrainingProgress(first_step, num_steps, shown=not is_silent)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:  # closes what is open where the rest cannot be opened
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
        """A line of metrics.jsonl, and of the progress."""
        if self._files is not None:
            self._files[0].write(record)
        self._progress.report(record)

    def write_evaluation(self, record: dict[str, Number]) -> None:
        """A line of evaluations.jsonl."""
        if self._files is not None:
            self._files[1].write(record)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """What evaluations.jsonl has; nothing on a silent rank."""
        return [] if self._files is None else read_records(self._run / "evaluations.jsonl")
