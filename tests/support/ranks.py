"""Several ranks of one run, as processes of this machine that a launcher might have started; commands to be killed.

To import torch takes a process seconds, so one imports it, computes nothing, and forks them.
"""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import faults
import torch
from tiny_run import command
from tiny_task import NUM_LOGS

TIMEOUT = 120.0


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Rank:
    """A running rank: its process id, and what it says."""

    def __init__(self, server, environment, arguments, said, folder):
        self._server = server
        self._said = said
        request = {"environment": environment, "arguments": arguments, "said": str(said), "folder": str(folder)}
        self.pid = server.ask(request)

    def said(self):
        return self._said.read_text()

    def wait(self, timeout=TIMEOUT):
        """The exit code, negative for a signal; a rank that takes too long is killed, and that is a failure."""
        code = self._server.ask({"wait": self.pid, "timeout": timeout})
        assert code is not None, f"a rank hangs:\n{self.said()}"
        return code

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)


class Server:
    """The process that forks ranks."""

    def __init__(self):
        start = [sys.executable, __file__]
        self._process = subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def start(self, world_size, corpus, out, environment=None, folders=None, **changes):
        """Starts the ranks of a run of `tiny_run`, each in a folder of its own if there are several."""
        out = Path(out)
        shared = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(free_port())} | (environment or {})
        arguments = command(corpus, out, **changes)[3:]
        out.parent.mkdir(parents=True, exist_ok=True)
        return [
            Rank(
                self,
                shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                arguments,
                Path(f"{out}-{rank}.txt"),
                folders[rank] if folders else Path.cwd(),
            )
            for rank in range(world_size)
        ]

    def run(self, world_size, corpus, out, environment=None, **changes):
        """A run by so many ranks to its end; returns what they have said."""
        return self.end(self.start(world_size, corpus, out, environment, **changes))

    def kill_until_done(self, arguments, said, is_resumable):
        """Starts a fine-tuning again and again until it ends, each time killed at its fourth checkpoint.

        After every kill, `is_resumable` must be true: there is work that the next session has to continue.
        """
        environment = {"ELECTRA_FAST_TEST_KILL_AT_SAVE": "4"}
        codes = []
        while not codes or codes[-1] == -signal.SIGKILL:
            rank = Rank(self, environment, list(map(str, arguments)), said, Path.cwd())
            codes.append(rank.wait())
            assert codes[-1] == 0 or is_resumable(), rank.said()
        assert codes[-1] == 0 and len(codes) > 2, rank.said()

    def end(self, ranks, codes=0):
        """Waits for ranks that end with these exit codes; returns what they have said."""
        found = [rank.wait() for rank in ranks]
        said = [rank.said() for rank in ranks]
        assert found == (codes if isinstance(codes, list) else [codes] * len(ranks)), "\n".join(said)
        return said


def wait_for(condition, seconds=TIMEOUT):
    """Waits until something is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this never happens"
        time.sleep(0.02)


def fork_rank(request):
    said = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    child = os.fork()
    if child:
        os.close(said)
        return child
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.environ.update(request["environment"])
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        os.chdir(request["folder"])
        slow_down_writing()
        kill_at_save()
        faults.install()
        from electra_fast.cli import main

        code = main(request["arguments"])
    finally:
        sys.stderr.flush()
        os._exit(code)


def slow_down_writing():
    """Makes each checkpoint take so many seconds more as the test wants."""
    seconds = float(os.environ.get("ELECTRA_FAST_TEST_SLOW_WRITE", "0"))
    if seconds:
        from electra_fast import checkpoint

        write = checkpoint.write
        checkpoint.write = lambda *arguments: (time.sleep(seconds), write(*arguments))[1]


def kill_at_save():
    """Kills a fine-tuning instead of its n-th checkpoint, when its last step is in the log and in no checkpoint."""
    number = int(os.environ.get("ELECTRA_FAST_TEST_KILL_AT_SAVE", "0"))
    if number:
        from electra_fast.finetuning.training import seed_run

        save = seed_run.SeedRun._save
        calls = itertools.count(1)
        seed_run._NUM_LOGS = NUM_LOGS
        seed_run.SeedRun._save = lambda run: (
            os.kill(os.getpid(), signal.SIGKILL) if next(calls) == number else save(run)
        )


def wait_for_child(child, timeout):
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for kill in (os.killpg, os.kill):  # its helpers too, if it has become the leader of a group
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def import_first():
    """Imports what forks would import later."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import pyarrow  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import torch._dynamo  # noqa: F401

    import electra_fast.distributed.sharding
    import electra_fast.finetuning.finetune
    import electra_fast.training.trainer  # noqa: F401


def serve():
    import_first()
    for line in sys.stdin:
        request = json.loads(line)
        reply = wait_for_child(request["wait"], request["timeout"]) if "wait" in request else fork_rank(request)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    serve()
