"""Callbacks of a training. A training never fails because of one; `StopTraining` is the way to stop it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from electra_fast.errors import StopTraining
from electra_fast.messages import say

Record = Mapping[str, Any]
Callback = Callable[[dict[str, Any]], object]


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
        """Calls the callback `name`, if there is one."""
        if (callback := self._given.get(name)) is not None:
            try:
                callback(dict(record))
            except StopTraining as stop:
                self.stop = stop
            except Exception as error:
                if name not in self._failed:
                    self._failed.add(name)
                    say(f"warning: {name} raised {type(error).__name__}: {error}; training goes on, and calls it again")
