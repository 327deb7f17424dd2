"""The package's exceptions, which the command line reports in one line; any other exception but OSError is a bug."""

from __future__ import annotations


class ElectraFastError(Exception):
    """Base of errors whose message says what is wrong, where, and what to do."""


class InputError(ElectraFastError, ValueError):
    """A configuration, an argument or a file cannot be used."""


class ExecutorFailed(ElectraFastError, RuntimeError):
    """An executor lost its workers or cannot reach them; rerunning resumes."""


class TrainingFailed(ElectraFastError, ArithmeticError):
    """Training cannot continue."""


class Diverged(TrainingFailed):
    """The loss, gradient or outputs are not finite, or the loss rose too high; retrying would fail again."""


class ReportedElsewhere(ElectraFastError):
    """Ends a rank because of an error that another rank reports."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped the work. A `KeyboardInterrupt`, so that it stops a notebook as Ctrl-C does.

    Args:
        signal: The signal's number; the command line exits with 128 plus this number.
        message: Says what is kept and how to resume.
        is_reported: True if another rank prints the message.
    """

    def __init__(self, signal: int, message: str = "", *, is_reported: bool = False) -> None:
        super().__init__(message)
        self.signal, self.is_reported = signal, is_reported
