"""A `python` that starts immediately: a process that has imported torch forks for every call.

Replacement programs in a folder on PATH (`NAMES`) send it their arguments, folder, environment and streams, and exit
with the fork's exit code. A fork runs as `__main__`, so processes that it starts import the same as from a script.
"""

import atexit
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from contextlib import contextmanager, suppress
from pathlib import Path

# The module whose `main` a console script calls.
NAMES = {"python": "", "electra-fast": "electra_fast.cli", "torchrun": "torch.distributed.run"}
CLIENT = """#!{python} -SE
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"."], [0, 1, 2])
server.sendall(json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode() + b"\\n")
sys.exit(int(server.recv(9) or 1))
"""


@contextmanager
def stand_ins(folder):
    """Writes the replacement programs into a folder. They work within the context."""
    address = str(folder / "socket")
    for name in NAMES:
        (folder / name).write_text(CLIENT.format(python=sys.executable, address=address))
        (folder / name).chmod(0o755)
    command = [sys.executable, __file__, address, str(folder / "python")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout.read(1), "the process that forks has ended"
        yield folder


def serve(address, python):
    from ranks import import_first

    import_first()
    sys.executable = python
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    os.write(1, b".")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while select.select([listener, sys.stdin], [], [])[0] == [listener]:  # until the end of standard input
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            attend(connection)
        connection.close()


def attend(connection):
    """Forks, waits, and sends the exit code."""
    _, streams, *_ = socket.recv_fds(connection, 1, 3)
    (name, *words), folder, environment = json.loads(connection.makefile().readline())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if child := os.fork():
        threading.Thread(target=end_with, args=(connection, child), daemon=True).start()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(str(code if code >= 0 else 128 - code).encode())
        os._exit(0)
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    leave(become, os.path.basename(name), words)


def end_with(connection, child):
    """Ends a fork if its replacement program was killed."""
    connection.recv(1)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM)


def become(name, words):
    """Runs the command in this process."""
    while words[0] in ("-u", "-P"):  # a program with -P sets the path itself
        del words[0]
    if NAMES[name]:
        sys.argv = [name, *words]
        return importlib.import_module(NAMES[name]).main()
    sys.path[0] = os.getcwd()
    sys.argv = words
    if words[0] == "-m":
        del words[0]
        return runpy.run_module(words[0], run_name="__main__", alter_sys=True) and None
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-c":
        path = "<string>"
        code = words.pop(1)
    else:
        path = main.__file__ = os.path.abspath(words[0])
        sys.path[0] = os.path.dirname(path)
        code = Path(path).read_text(encoding="utf-8")
    exec(compile(code, path, "exec"), vars(main))
    return None


def leave(function, *arguments):
    """Calls a function and ends the process like Python, but skips the second of cleaning up."""
    try:
        code = function(*arguments)
    except SystemExit as exit:
        code = exit.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


if __name__ == "__main__":
    serve(*sys.argv[1:])
