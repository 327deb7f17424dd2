"""The package's exceptions. The command line reports them, and OSError, in one line; any other exception is a bug."""

from __future__ import annotations

from typing import Self


class ElectraFastError(Exception):
    """Base class of errors; the message names the problem, its place and the remedy."""


class InputError(ElectraFastError, ValueError):
    """A configuration, an argument or a file cannot be used."""


class ExecutorFailed(ElectraFastError, RuntimeError):
    """An executor lost its workers or cannot reach them; rerunning resumes."""


class TrainingFailed(ElectraFastError, ArithmeticError):
    """Training cannot continue."""


class Diverged(TrainingFailed):
    """The loss, gradient or outputs are not finite, or the loss rose too high; retrying would fail again."""


class ReportedElsewhere(ElectraFastError):
    """Ends a rank after an error that another rank reports."""


class StopTraining(ElectraFastError):
    """Raise it in a callback to stop `pretrain` or `finetune`: they write a checkpoint and raise it again."""


class OutOfMemory(ElectraFastError, MemoryError):
    """A device has too little memory; the message names the key to change."""

    @classmethod
    def at(cls, place: str, error: Exception, remedy: str) -> Self:
        """Returns an error with its place, the first two sentences of a library's message, and the remedy."""
        return cls(f"{place}: out of memory ({'. '.join(str(error).split('. ')[:2])}); {remedy}")


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether torch, pyarrow or Python failed to allocate memory.

    torch raises a RuntimeError, and during the capture of a CUDA graph another error after it.
    """
    is_named = any(text in str(error) for text in ("out of memory", "can't allocate memory", "ALLOC_FAILED"))
    earlier = error.__context__
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, RuntimeError) and is_named)
        or (isinstance(earlier, Exception) and is_out_of_memory(earlier))
    )


class Interrupted(KeyboardInterrupt):
    """A signal stopped the work. A `KeyboardInterrupt`, so that it stops a notebook as Ctrl-C does.

    Args:
        signal: The signal's number; the command line exits with 128 plus this number.
        message: States which work is kept and how to resume.
        is_reported: True if another rank prints the message.
    """

    def __init__(self, signal: int, message: str = "", *, is_reported: bool = False) -> None:
        super().__init__(message)
        self.signal = signal
        self.is_reported = is_reported
