"""The package's own exceptions. The command line shows them in one line; any other exception is a bug of ours.

What the operating system refuses stays an `OSError`, a missing file a `FileNotFoundError`.
"""

from __future__ import annotations


class ElectraFastError(Exception):
    """Base of the errors whose message tells what is wrong, where, and what to do."""


class InputError(ElectraFastError, ValueError):
    """A configuration, an argument or a file cannot be used."""


class ExecutorFailed(ElectraFastError, RuntimeError):
    """An executor lost its workers or cannot reach them; running again resumes."""


class TrainingFailed(ElectraFastError, ArithmeticError):
    """Training cannot continue."""


class Diverged(TrainingFailed):
    """The loss, the gradient or the outputs are not numbers; the same training would end so again."""


class ReportedElsewhere(ElectraFastError):
    """Ends a rank because of an error that another one reports."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped the work. A `KeyboardInterrupt`, so that a notebook stops there as at Ctrl-C.

    Args:
        signal: The signal's number; the command line exits with 128 plus that.
        message: What is kept, and how to resume.
        is_reported: Whether another rank says so.
    """

    def __init__(self, signal: int, message: str = "", *, is_reported: bool = False) -> None:
        super().__init__(message)
        self.signal, self.is_reported = signal, is_reported
