"""Messages to the user. Text from files and arguments in them cannot control the terminal."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator

MAX_ERROR_LENGTH = 1000
# Set by --quiet; the processes that a command starts inherit it.
QUIET = "ELECTRA_FAST_QUIET"
# The documentation page to print after the next warning.
_pointer: list[str] = []
WARNING = re.compile(r"([^{]*: )?warning: ")
# Marks of the messages that --quiet keeps.
KEPT = re.compile(r"(^|: )(warning|error): ")
# Control characters, line and paragraph separators, directional overrides and isolates, and halves of surrogate pairs.
UNSAFE = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Escapes line breaks and whatever would control a terminal, as Python does: \n, \x1b, \u202e."""
    return UNSAFE.sub(lambda match: repr(match[0])[1:-1], text)


def escape_unencodable() -> None:
    """Makes standard streams write characters outside their encoding as Python escapes instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def error_line(text: str) -> str:
    """Returns an error message as one printable line; a very long one loses its middle."""
    line = printable(text.strip())
    half = MAX_ERROR_LENGTH // 2
    return line if len(line) <= MAX_ERROR_LENGTH else f"{line[:half]}…{line[1 - half :]}"


@contextlib.contextmanager
def pointing_to_reference() -> Iterator[None]:
    """Context in which a line with the address of docs/reference/messages.md follows the first warning."""
    _pointer[:] = ["reference/messages/"]
    try:
        yield
    finally:
        _pointer.clear()


def pointer(messages: Iterable[str]) -> list[str]:
    """Returns the line with the address, if the first warning is among these messages; otherwise nothing."""
    if not _pointer or not any(map(WARNING.match, messages)):
        return []
    from importlib.metadata import PackageNotFoundError, metadata  # slow

    urls: dict[str, str] = {}
    with contextlib.suppress(PackageNotFoundError):
        urls.update(url.split(", ") for url in metadata("electra-fast").get_all("Project-URL", []))
    return [f"electra-fast: causes and remedies of warnings: {urls.get('Documentation', 'docs/')}{_pointer.pop()}"]


def show(lines: Iterable[str]) -> None:
    """Prints lines of a result on standard output; a line break within one comes from user data and is escaped."""
    lines = list(lines)
    print("\n".join(map(printable, lines)))
    for line in pointer(lines):
        print(line, file=sys.stderr)


def is_quiet() -> bool:
    """Returns whether only warnings, errors and results are printed."""
    return bool(os.environ.get(QUIET))


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Context in which this process and the processes that it starts are quiet."""
    before = os.environ.get(QUIET)
    os.environ[QUIET] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[QUIET]


def is_shown(message: str) -> bool:
    """Returns whether a message is printed: with `--quiet`, only if it is marked as a warning or an error."""
    return not is_quiet() or KEPT.search(message) is not None


def say(message: str) -> None:
    """Prints a line on standard error; with `--quiet`, only a warning or an error."""
    if is_shown(message):
        print(printable(message), *pointer([message]), sep="\n", file=sys.stderr)
