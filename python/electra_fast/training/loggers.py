"""Who else sees the lines of a training: loggers, and the functions that its caller gave.

TensorBoard, Weights & Biases and MLflow show the lines of metrics.jsonl and evaluations.jsonl. Those files stay the
truth. A session first sends each logger the lines that it has not seen, so that a logger added later shows the whole
run; a line that a resumed run repeats is not sent again. Which run of the logger it is, and what it has seen, is in
`loggers.json` in the run's folder.
"""

from __future__ import annotations

import importlib
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from electra_fast.errors import InputError, StopTraining
from electra_fast.files.atomic_files import remove, replace_file
from electra_fast.files.json_files import json_text, read_object
from electra_fast.messages import say

FILE = "loggers.json"
PROJECT = "electra-fast"
Record = Mapping[str, Any]
Callback = Callable[[dict[str, Any]], object]


def logger_names(value: str | list[str]) -> list[str]:
    """Returns the names in `train.loggers` or `finetune.loggers`, each once."""
    return [name for name in dict.fromkeys([value] if isinstance(value, str) else value) if name]


def require_loggers(key: str, value: str | list[str]) -> None:
    for name in logger_names(value):
        if find_spec(name) is None:
            raise InputError(f"{key}: {name} is not installed; pip install {name}")


def forget_loggers(folder: Path, step: int) -> None:
    """Makes the next session begin a new run of each logger if one has lines after `step`, which are now outdated."""
    path = folder / FILE
    seen = [last for state in read_object(path).values() for last in state["steps"].values()] if path.exists() else []
    if max(seen, default=step) > step:
        remove(path)


class Logger(ABC):
    """A run of one logger."""

    def arrived(self, state: Mapping[str, Any]) -> dict[str, int]:
        """Returns, by kind, the last step whose line cannot have been lost in a kill; `state` is as in loggers.json."""
        steps: dict[str, int] = state["steps"]  # where `log` returns after the line is written
        return steps

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Sends values by name."""

    @abstractmethod
    def close(self) -> None:
        """Ends the session's part of the run."""


class Loggers:
    """The loggers of a run, as a context manager. What a logger raises is reported once, and ends its logging.

    Args:
        names: Of `train.loggers`.
        folder: The run's folder.
        settings: The resolved configuration, by section.
        earlier: Lines of the run's logs, `kind → records`.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        settings: Mapping[str, Any],
        earlier: Mapping[str, Iterable[Record]],
    ) -> None:
        self._names = names
        self._folder = folder
        self._settings = settings
        self._earlier = sorted(
            ((kind, each) for kind, records in earlier.items() for each in records), key=lambda line: line[1]["step"]
        )
        self._open: dict[str, Logger] = {}
        self._state: dict[str, Any] = {}

    def __enter__(self) -> Self:
        if not self._names:
            return self
        path = self._folder / FILE
        self._state = read_object(path) if path.exists() else {}
        for name in self._names:
            state = self._state.setdefault(name, {"id": secrets.token_hex(4), "steps": {}})
            title = f"{self._folder.resolve().name} {state['id']}"
            last = max(state["steps"].values(), default=-1)
            try:
                self._open[name] = _KINDS[name](self._folder, title, state, self._settings, last)
                state["steps"] = self._open[name].arrived(state)
            except Exception as error:
                self._give_up(name, error)
        replace_file(path, json_text(self._state))
        for kind, record in self._earlier:
            self.log(kind, record)
        return self

    def log(self, kind: str, record: Record) -> None:
        """Sends a record with its `kind` (train, validation) before each name, to loggers that have not seen it."""
        step = int(record["step"])
        values = dict(_numbers(f"{kind}/", record))
        for name, logger in list(self._open.items()):
            steps = self._state[name]["steps"]
            if step <= steps.get(kind, -1):
                continue
            try:
                logger.log(values, step)
            except Exception as error:
                self._give_up(name, error)
            steps[kind] = step
        if self._open:
            replace_file(self._folder / FILE, json_text(self._state))

    def _give_up(self, name: str, error: Exception) -> None:
        self._open.pop(name, None)
        say(f"warning: {name}: {type(error).__name__}: {error}; training goes on without it")

    def __exit__(self, *error: object) -> None:
        for name, logger in list(self._open.items()):
            try:
                logger.close()
                self._state[name]["closed"] = self._state[name]["steps"]
            except Exception as error:
                self._give_up(name, error)
        if self._open:
            replace_file(self._folder / FILE, json_text(self._state))


def _numbers(prefix: str, record: Record) -> Iterable[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{name}/", value)
        elif value is not None and name != "step":
            yield prefix + name, float(value)


class _TensorBoard(Logger):
    """Event files in RUN/tensorboard; events past the last known step are purged."""

    def __init__(self, folder: Path, title: str, state: dict[str, Any], settings: Record, last: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=last + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb(Logger):
    """Weights & Biases, whose environment variables choose project and mode."""

    def __init__(self, folder: Path, title: str, state: dict[str, Any], settings: Record, last: int) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        own = {"id": state["id"], "dir": str(folder)}
        self._run = self._wandb.init(project=project, name=title, config=dict(settings), resume="allow", **own)

    def arrived(self, state: Mapping[str, Any]) -> dict[str, int]:
        """Returns what was sent before the last clean end; W&B writes in blocks, of which a kill loses the last."""
        return dict(state.get("closed", {}))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._wandb.finish()


class _Mlflow(Logger):
    """MLflow, at the server or in the database that MLFLOW_TRACKING_URI names."""

    def __init__(self, folder: Path, title: str, state: dict[str, Any], settings: Record, last: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client = MlflowClient()
        self._metric = Metric
        if "run" not in state:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if found is None else found.experiment_id
            state["run"] = self._client.create_run(experiment, run_name=title).info.run_id
            params = [Param(f"{section}.{key}", str(keys[key])) for section, keys in settings.items() for key in keys]
            self._client.log_batch(state["run"], params=params)
        self._id = state["run"]
        self._client.update_run(self._id, status="RUNNING")

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = time.time_ns() // 1_000_000
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)


_KINDS: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _Mlflow}


class Callbacks:
    """The functions that a caller of `pretrain` or `finetune` gave; each is called with a copy of a record.

    An exception in one is reported once. `StopTraining` is kept in `stop`, for the training to raise after a
    checkpoint.
    """

    def __init__(
        self,
        on_log: Callback | None = None,
        on_evaluation: Callback | None = None,
        on_checkpoint: Callback | None = None,
    ) -> None:
        given = {"on_log": on_log, "on_evaluation": on_evaluation, "on_checkpoint": on_checkpoint}
        self._given = {name: each for name, each in given.items() if each is not None}
        self._failed: set[str] = set()
        self.stop: StopTraining | None = None

    def __call__(self, name: str, record: Record) -> None:
        if (callback := self._given.get(name)) is not None:
            try:
                callback(dict(record))
            except StopTraining as stop:
                self.stop = stop
            except Exception as error:
                if name not in self._failed:
                    self._failed.add(name)
                    say(f"warning: {name} raised {type(error).__name__}: {error}; training goes on, and calls it again")
