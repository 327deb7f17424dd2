"""The command line without a process of its own: what it prints and returns, without Python's start and torch's import.

For what a command does and says. That a command also runs from a fresh interpreter, with its streams and its exit
code, is shown by tests that start one.
"""

import contextlib
import io
import signal
from subprocess import CompletedProcess

from electra_fast.cli import main


def run(*arguments: object) -> "CompletedProcess[str]":
    """As `subprocess.run` of `python -m electra_fast` with captured text; an unexpected error is raised instead."""
    words = [str(argument) for argument in arguments]
    output = io.StringIO()
    errors = io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = main(words)
    except SystemExit as stop:  # argparse, after --help and --version
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return CompletedProcess(words, code, output.getvalue(), errors.getvalue())
