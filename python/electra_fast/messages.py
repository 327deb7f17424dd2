"""Messages to the user, in which text from files and arguments cannot control the terminal."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator

MAX_ERROR_LENGTH = 1000
# Set by --quiet, and so inherited by the processes that a command starts.
QUIET = "ELECTRA_FAST_QUIET"
# The page of the documentation that the next warning is followed by.
_pointer: list[str] = []
WARNING = re.compile(r"([^{]*: )?warning: ")
# What begins a message that --quiet keeps.
KEPT = re.compile(r"(^|: )(warning|error): ")
# Control characters, line and paragraph separators, directional overrides and isolates, and halves of surrogate pairs.
UNSAFE = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Escapes line breaks and whatever would control a terminal, as Python does: \n, \x1b, \u202e."""
    return UNSAFE.sub(lambda match: repr(match[0])[1:-1], text)


def escape_unencodable() -> None:
    """Writes what the encoding of a standard stream lacks as Python's escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def error_line(text: str) -> str:
    """Returns an error message as one printable line, without the middle of a very long one."""
    line = printable(text.strip())
    half = MAX_ERROR_LENGTH // 2
    return line if len(line) <= MAX_ERROR_LENGTH else f"{line[:half]}…{line[1 - half :]}"


@contextlib.contextmanager
def pointing_to_reference() -> Iterator[None]:
    """Within it, the first warning is followed by a line with the address of docs/reference/messages.md."""
    _pointer[:] = ["reference/messages/"]
    try:
        yield
    finally:
        _pointer.clear()


def pointer(messages: Iterable[str]) -> list[str]:
    """Returns the line that follows these messages: one if the first warning is among them."""
    if not _pointer or not any(map(WARNING.match, messages)):
        return []
    from importlib.metadata import metadata  # slow

    urls = dict(url.split(", ") for url in metadata("electra-fast").get_all("Project-URL", []))
    return [f"electra-fast: causes and remedies of warnings: {urls.get('Documentation', 'docs/')}{_pointer.pop()}"]


def show(lines: Iterable[str]) -> None:
    """Prints lines of a result on standard output. A line break within one is escaped: it came from outside."""
    lines = list(lines)
    print("\n".join(map(printable, lines)))
    for line in pointer(lines):
        print(line, file=sys.stderr)


def is_quiet() -> bool:
    """Whether only warnings, errors and results are wanted."""
    return bool(os.environ.get(QUIET))


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Within it, this process and those that it starts are quiet."""
    before = os.environ.get(QUIET)
    os.environ[QUIET] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[QUIET]


def is_shown(message: str) -> bool:
    """Whether a message is wanted: with `--quiet`, if it says that it is a warning or an error."""
    return not is_quiet() or KEPT.search(message) is not None


def say(message: str) -> None:
    """Prints a line on standard error; with `--quiet`, only a warning or an error."""
    if is_shown(message):
        print(printable(message), *pointer([message]), sep="\n", file=sys.stderr)
