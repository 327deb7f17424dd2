"""The command line in the process of the test: its output and exit code, without starting Python and importing torch.

Other tests start commands in a fresh interpreter, with its streams and exit code.
"""

import contextlib
import io
import signal
from subprocess import CompletedProcess

from electra_fast.cli import main


def run(*arguments: object) -> "CompletedProcess[str]":
    """As `subprocess.run` of `python -m electra_fast` with captured text, but raises unexpected errors."""
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
