"""Several ranks of one run, as processes on this machine, with a launcher's environment; commands to be killed.

Importing torch takes seconds, so one process imports it, computes nothing, and forks the ranks.
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
    """A running rank: its process id and its output."""

    def __init__(self, server, environment, arguments, output, folder):
        self._server = server
        self._output = output
        request = {"environment": environment, "arguments": arguments, "output": str(output), "folder": str(folder)}
        self.pid = server.ask(request)

    def output(self):
        """Returns standard output and standard error so far."""
        return self._output.read_text()

    def wait(self, timeout=TIMEOUT):
        """Returns the exit code, negative for a signal. Kills a rank that takes too long, and fails."""
        code = self._server.ask({"wait": self.pid, "timeout": timeout})
        assert code is not None, f"a rank hangs:\n{self.output()}"
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
        """Starts the ranks of a run of `tiny_run`, each in one of the `folders` if there are any."""
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
        """Runs ranks until they exit with 0; returns their outputs."""
        return self.wait(self.start(world_size, corpus, out, environment, **changes))

    def kill_until_done(self, arguments, output, is_resumable):
        """Restarts a fine-tuning run until it finishes; each session is killed at its fourth checkpoint.

        After every kill, `is_resumable` must be true: the next session has work to continue.
        """
        environment = {"ELECTRA_FAST_TEST_KILL_AT_SAVE": "4"}
        codes = []
        while not codes or codes[-1] == -signal.SIGKILL:
            rank = Rank(self, environment, list(map(str, arguments)), output, Path.cwd())
            codes.append(rank.wait())
            assert codes[-1] == 0 or is_resumable(), rank.output()
        assert codes[-1] == 0 and len(codes) > 2, rank.output()

    def wait(self, ranks, codes=0):
        """Waits for ranks, which must exit with these codes; returns their outputs."""
        actual = [rank.wait() for rank in ranks]
        outputs = [rank.output() for rank in ranks]
        assert actual == (codes if isinstance(codes, list) else [codes] * len(ranks)), "\n".join(outputs)
        return outputs


def wait_for(condition, seconds=TIMEOUT):
    """Waits until a condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not true after {seconds} s"
        time.sleep(0.02)


def fork_rank(request):
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    child = os.fork()
    if child:
        os.close(output)
        return child
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
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
    """Delays each checkpoint by the seconds in ELECTRA_FAST_TEST_SLOW_WRITE."""
    seconds = float(os.environ.get("ELECTRA_FAST_TEST_SLOW_WRITE", "0"))
    if seconds:
        from electra_fast import checkpoint

        write = checkpoint.write
        checkpoint.write = lambda *arguments: (time.sleep(seconds), write(*arguments))[1]


def kill_at_save():
    """Kills a fine-tuning run instead of writing its n-th checkpoint, after its last step has been logged."""
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
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for kill in (os.killpg, os.kill):  # also its children, if it leads a process group
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def import_first():
    """Imports modules that forks would import later."""
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
