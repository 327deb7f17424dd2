"""Processes that run this package's code: where they find modules, and why they ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

MAX_REASON_LENGTH = 300


def search_path() -> list[str]:
    """Returns this process's `sys.path` without the current folder, in which a `torch` or a `random.py` is the user's.

    It stays if this package is in it, as in a checkout, or if PYTHONPATH names it.
    """
    try:
        here = os.getcwd()
    except OSError:  # it has been removed
        return [each for each in sys.path if each]
    named = [Path(each).resolve() for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    if Path(here).resolve() in [*named, Path(__file__).resolve().parent.parent]:
        return list(sys.path)
    return [each for each in sys.path if os.path.abspath(each) != here]


def python_command(program: str, *arguments: str) -> list[str]:
    """Returns a command that runs `program` in another Python, with `arguments` as `sys.argv[1:]`.

    It imports what this process would import, except from the current folder.
    """
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {search_path()!r}; {program}", *arguments]


def describe_end(code: int, errors: str = "") -> str:
    """Says why a process ended: by which signal, or with which last line.

    Args:
        code: Its exit code; negative, the signal that killed it.
        errors: What it wrote to standard error.
    """
    import re
    import signal

    if code == -signal.SIGKILL:
        return "killed by SIGKILL, as the system does when memory runs out"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # The line of the exception: torch adds several about its own settings.
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return f"exit code {code}: {([*lines, *named] or ['it wrote nothing'])[-1][:MAX_REASON_LENGTH]}"


def lacked_memory(code: int, errors: str) -> bool:
    """Returns whether a process may have ended because it lacked memory."""
    return code == -9 or any(text in errors for text in ("out of memory", "can't allocate memory", "MemoryError"))
