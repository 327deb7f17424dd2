"""Messages to the user, in which text from files and arguments cannot control the terminal."""

from __future__ import annotations

import re
import sys

MAX_ERROR_LENGTH = 1000
# Control characters, line and paragraph separators, directional overrides and isolates, and halves of surrogate pairs.
UNSAFE = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Escapes line breaks and whatever would control a terminal, as Python does: \n, \x1b, \u202e."""
    return UNSAFE.sub(lambda match: repr(match[0])[1:-1], text)


def error_line(text: str) -> str:
    """Returns an error message as one printable line, without the middle of a very long one."""
    line = printable(text.strip())
    half = MAX_ERROR_LENGTH // 2
    return line if len(line) <= MAX_ERROR_LENGTH else f"{line[:half]}…{line[1 - half :]}"


def say(message: str) -> None:
    """Prints a line on standard error."""
    print(printable(message), file=sys.stderr)
