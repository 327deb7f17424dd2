"""Faults for runs under test: `ELECTRA_FAST_FAULT=KIND[:VALUE]@STEP/RANK`, several with commas.

`install` adds them to the steps of this process; `python tests/support/faults.py ARGUMENTS` is `electra-fast` with
faults. They happen before the step with that number (0-based), and only in the first attempt of a launcher that
restarts.

    kill                SIGKILL to the process
    hang                the rank hangs forever
    sleep:SECONDS       the rank sleeps before this step and every later step
    nan                 the rank's loss is NaN
    flip                one bit of one of the rank's weights changes
"""

import os
import re
import signal
import sys
import time
from dataclasses import dataclass

import torch

VARIABLE = "ELECTRA_FAST_FAULT"
_FORM = re.compile(r"(kill|hang|sleep|nan|flip)(?::([0-9.]+))?@(\d+)/(\d+)")


@dataclass(frozen=True)
class Fault:
    kind: str
    value: float
    step: int


class Faults:
    """The faults of one rank."""

    def __init__(self, text, rank):
        matches = [_FORM.fullmatch(part.strip()) for part in text.split(",")]
        self._faults = [Fault(m[1], float(m[2] or 0), int(m[3])) for m in matches if int(m[4]) == rank]

    def inject(self, step, model):
        for fault in self._due(step):
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "hang":
                time.sleep(1e6)
            elif fault.kind == "sleep":
                time.sleep(fault.value)
            elif fault.kind == "flip":
                bits = next(model.parameters()).detach().view(torch.int32).view(-1)
                bits[len(bits) // 2] ^= 1 << 22  # the highest bit of the fraction, which no update rounds away

    def denominators(self, step, denominators):
        """Returns the denominators of this rank's losses, nan if the losses must be nan."""
        for fault in self._due(step):
            if fault.kind == "nan":
                denominators = denominators * float("nan")
        return denominators

    def _due(self, step):
        return [f for f in self._faults if f.step == step or (f.kind == "sleep" and f.step < step)]


def install():
    """Adds the faults in the environment variable to the steps of this process."""
    from electra_fast.distributed.launch import Launch
    from electra_fast.training.step import Backward, TrainStep

    launch = Launch.from_environment()
    text = os.environ.get(VARIABLE, "")
    if not text or launch.attempt > 0:
        return
    faults = Faults(text, launch.rank)
    call = TrainStep.__call__
    load = Backward.load

    def call_with_faults(self, rows, step, *arguments):
        faults.inject(step, self.model)
        return call(self, rows, step, *arguments)

    def load_with_faults(self, batch, step, denominators=None):
        load(self, batch, step, None if denominators is None else faults.denominators(step, denominators))

    TrainStep.__call__ = call_with_faults
    Backward.load = load_with_faults


if __name__ == "__main__":
    install()
    from electra_fast.cli import main

    sys.exit(main(sys.argv[1:]))
