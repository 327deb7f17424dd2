"""Faults that tests let a run meet: `ELECTRA_FAST_FAULT=KIND[:VALUE]@STEP/RANK`, several with commas.

They strike before the step with that number (0-based), and only in the first attempt of a launcher that restarts.

    kill                SIGKILL to the process itself
    hang                the rank never goes on
    sleep:SECONDS       the rank sleeps before this step and every later one
    nan                 the rank's loss is NaN
    spike:FACTOR        the rank's loss is so many times as large
    flip                one bit of one of the rank's weights changes
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from electra_fast.errors import InputError

VARIABLE = "ELECTRA_FAST_FAULT"
_FORM = re.compile(r"(kill|hang|sleep|nan|spike|flip)(?::([0-9.]+))?@(\d+)/(\d+)")


@dataclass(frozen=True)
class _Fault:
    kind: str
    value: float
    step: int


class Faults:
    """The faults of one rank, by the environment; none by default."""

    def __init__(self, rank: int, attempt: int = 0, environment: Mapping[str, str] = os.environ) -> None:
        text = environment.get(VARIABLE, "") if attempt == 0 else ""
        self._faults = [fault for fault in _parse(text, rank)] if text else []

    def strike(self, step: int, model: nn.Module) -> None:
        """Lets the rank meet what is to happen before a step."""
        for fault in self._due(step):
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "hang":
                time.sleep(1e6)
            elif fault.kind == "sleep":
                time.sleep(fault.value)
            elif fault.kind == "flip":
                bits = next(model.parameters()).detach().view(torch.int32).view(-1)
                bits[len(bits) // 2] ^= 1 << 22  # the highest of the fraction: no update rounds it away

    def denominators(self, step: int, denominators: Tensor) -> Tensor:
        """What this rank divides its losses by, which makes them what they are to be."""
        for fault in self._due(step):
            if fault.kind == "nan":
                denominators = denominators * float("nan")
            elif fault.kind == "spike":
                denominators = denominators / fault.value
        return denominators

    def _due(self, step: int) -> Iterator[_Fault]:
        for fault in self._faults:
            if fault.step == step or (fault.kind == "sleep" and fault.step < step):
                yield fault


def _parse(text: str, rank: int) -> Iterator[_Fault]:
    for part in text.split(","):
        match = _FORM.fullmatch(part.strip())
        if match is None:
            raise InputError(f"{VARIABLE}: {part!r} is not KIND[:VALUE]@STEP/RANK, such as sleep:0.5@10/1")
        if int(match[4]) == rank:
            yield _Fault(match[1], float(match[2] or 0), int(match[3]))
