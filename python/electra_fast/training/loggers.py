"""Receivers of a run's metrics: loggers, and the callbacks of its caller.

TensorBoard, Weights & Biases and MLflow show the lines of metrics.jsonl and evaluations.jsonl, which remain the source
of truth. A session first sends each logger the lines that it has not received, so that a logger added later shows the
whole run. A line that a resumed run repeats is not sent again. `loggers.json` in the run's folder has the id of each
logger's run and the last step that it has received.
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
    """Makes the next session start a new run in each logger if a logger has lines after `step`, now outdated."""
    path = folder / FILE
    seen = [last for state in read_object(path).values() for last in state["steps"].values()] if path.exists() else []
    if max(seen, default=step) > step:
        remove(path)


class Logger(ABC):
    """A run of one logger."""

    def arrived(self, state: Mapping[str, Any]) -> dict[str, int]:
        """Returns, by kind, the last step whose line a kill cannot have lost. `state` is from loggers.json."""
        steps: dict[str, int] = state["steps"]  # for loggers whose `log` writes the line before it returns
        return steps

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Sends values by name."""

    @abstractmethod
    def close(self) -> None:
        """Ends the session."""


class Loggers:
    """A context manager for the loggers of a run. A logger that raises an error is reported and removed.

    Args:
        names: The names in `train.loggers`.
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
            ((kind, record) for kind, records in earlier.items() for record in records),
            key=lambda line: line[1]["step"],
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
        """Sends a record to loggers that have not received it, with its `kind` (train, validation) before each name."""
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
        say(f"warning: {name}: {type(error).__name__}: {error}; training continues without it")

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
    """Weights & Biases. Its environment variables choose the project and the mode."""

    def __init__(self, folder: Path, title: str, state: dict[str, Any], settings: Record, last: int) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        options = {"id": state["id"], "dir": str(folder)}
        self._run = self._wandb.init(project=project, name=title, config=dict(settings), resume="allow", **options)

    def arrived(self, state: Mapping[str, Any]) -> dict[str, int]:
        """Returns the last steps before the last clean end. W&B writes in blocks, and a kill loses the last block."""
        return dict(state.get("closed", {}))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._wandb.finish()


class _Mlflow(Logger):
    """MLflow, on the server or in the database of MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path, title: str, state: dict[str, Any], settings: Record, last: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client = MlflowClient()
        self._metric = Metric
        if "run" not in state:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            existing = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if existing is None else existing.experiment_id
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
    """The callbacks of `pretrain` or `finetune`. Each is called with a copy of a record.

    An exception in a callback is reported once. `StopTraining` is stored in `stop`; training raises it after a
    checkpoint.
    """

    def __init__(
        self,
        on_log: Callback | None = None,
        on_evaluation: Callback | None = None,
        on_checkpoint: Callback | None = None,
    ) -> None:
        callbacks = {"on_log": on_log, "on_evaluation": on_evaluation, "on_checkpoint": on_checkpoint}
        self._callbacks = {name: callback for name, callback in callbacks.items() if callback is not None}
        self._failed: set[str] = set()
        self.stop: StopTraining | None = None

    def __call__(self, name: str, record: Record) -> None:
        if (callback := self._callbacks.get(name)) is not None:
            try:
                callback(dict(record))
            except StopTraining as stop:
                self.stop = stop
            except Exception as error:
                if name not in self._failed:
                    self._failed.add(name)
                    say(f"warning: {name} raised {type(error).__name__}: {error}; training continues, calling it again")
