"""Exceptions that tell more than what was wrong with the input (which is `ValueError` and `OSError` here)."""

from __future__ import annotations


class Interrupted(KeyboardInterrupt):
    """A signal stopped the work. A `KeyboardInterrupt`, so that a notebook stops there as at Ctrl-C.

    Args:
        signal: The signal's number; the command line exits with 128 plus that.
        message: What is kept, and how to resume.
    """

    def __init__(self, signal: int, message: str = "") -> None:
        super().__init__(message)
        self.signal = signal


class TrainingFailed(ArithmeticError):
    """Training cannot continue: the loss or the gradient is not a number."""
