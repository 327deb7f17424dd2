"""Child processes that run this package's code: their module search path, and the reason for their exit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

MAX_REASON_LENGTH = 300


def search_path() -> list[str]:
    """Returns this process's `sys.path` without the current folder, which may have a user's `torch` or `random.py`.

    The folder stays if it contains this package, as in a checkout, or if PYTHONPATH lists it.
    """
    try:
        here = os.getcwd()
    except OSError:  # the folder was removed
        return [entry for entry in sys.path if entry]
    listed = [Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if Path(here).resolve() in [*listed, Path(__file__).resolve().parent.parent]:
        return list(sys.path)
    return [entry for entry in sys.path if os.path.abspath(entry) != here]


def python_command(program: str, *arguments: str) -> list[str]:
    """Returns a command that runs `program` in another Python, with `arguments` as `sys.argv[1:]`.

    That Python imports the same modules as this process, but none from the current folder.
    """
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {search_path()!r}; {program}", *arguments]


def describe_end(code: int, errors: str = "") -> str:
    """Returns the reason why a process ended: its signal, or the last line that it wrote.

    Args:
        code: The exit code; if negative, the signal that killed the process.
        errors: The text that it wrote to standard error.
    """
    import re
    import signal

    if code == -signal.SIGKILL:
        return "killed by SIGKILL, as the system does when memory runs out"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # Prefer the exception's line: torch adds lines about its own settings.
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return f"exit code {code}: {([*lines, *named] or ['no output'])[-1][:MAX_REASON_LENGTH]}"


def lacked_memory(code: int, errors: str) -> bool:
    """Returns whether a process may have run out of memory."""
    return code == -9 or any(text in errors for text in ("out of memory", "can't allocate memory", "MemoryError"))
