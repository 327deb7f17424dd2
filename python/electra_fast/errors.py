"""The package's exceptions, which the command line reports in one line; any other exception but OSError is a bug."""

from __future__ import annotations

from typing import Self


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


class StopTraining(ElectraFastError):
    """Raise it in a callback to stop `pretrain` or `finetune`: a checkpoint is written, then it passes through."""


class OutOfMemory(ElectraFastError, MemoryError):
    """The memory of a device does not suffice; the message names the value to set."""

    @classmethod
    def at(cls, what: str, error: Exception, remedy: str) -> Self:
        """Returns the error of a place, with the first two sentences of a library's message, and the remedy."""
        return cls(f"{what}: out of memory ({'. '.join(str(error).split('. ')[:2])}); {remedy}")


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether torch, pyarrow or Python failed to allocate memory; torch raises a RuntimeError that says so.

    A CUDA graph that is being captured raises an error of its own after it.
    """
    said = any(text in str(error) for text in ("out of memory", "can't allocate memory", "ALLOC_FAILED"))
    earlier = error.__context__
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, RuntimeError) and said)
        or (isinstance(earlier, Exception) and is_out_of_memory(earlier))
    )


class Interrupted(KeyboardInterrupt):
    """A signal stopped the work. A `KeyboardInterrupt`, so that it stops a notebook as Ctrl-C does.

    Args:
        signal: The signal's number; the command line exits with 128 plus this number.
        message: Says what is kept and how to resume.
        is_reported: True if another rank prints the message.
    """

    def __init__(self, signal: int, message: str = "", *, is_reported: bool = False) -> None:
        super().__init__(message)
        self.signal = signal
        self.is_reported = is_reported
