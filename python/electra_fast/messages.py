"""What is said to the user: text from files and arguments never moves the cursor or reorders a line of the terminal."""

from __future__ import annotations

import re
import sys

MAX_ERROR_LENGTH = 1000
# Control characters, line and paragraph separators, directional overrides and isolates, and halves of surrogate pairs.
UNSAFE = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with what would do something to a terminal or begin a line, written as in Python: \n, \x1b, \u202e."""
    return UNSAFE.sub(lambda match: repr(match[0])[1:-1], text)


def error_line(text: str) -> str:
    """An error's message as one printable line; the middle of a very long one is left out."""
    line = printable(text.strip())
    half = MAX_ERROR_LENGTH // 2
    return line if len(line) <= MAX_ERROR_LENGTH else f"{line[:half]}…{line[1 - half :]}"


def say(message: str) -> None:
    """Prints a line on standard error."""
    print(printable(message), file=sys.stderr)
