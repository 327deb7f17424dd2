"""Runs that torchrun itself starts, on two CPU ranks of this machine."""

import os
import signal
import subprocess
import sys

import faults
from ranks import TIMEOUT, wait_for
from tiny_run import EXACT, STEPS, command, lines

from electra_fast.files import checkpoint_folder


def torchrun(corpus, out, *options, fault="", **changes):
    """Starts two ranks."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
    return subprocess.Popen(
        [*start, faults.__file__, *command(corpus, out, **changes)[3:]],
        env=os.environ | ({"ELECTRA_FAST_FAULT": fault} if fault else {}),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_ranks_that_torchrun_restarts_meet_again_and_resume(exact_run, validation_corpus, tmp_path):
    process = torchrun(validation_corpus, tmp_path / "run", "--max-restarts", "1", fault="kill@10/1", **EXACT)
    _, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, said
    assert f"resumes at step 9 of {STEPS}" in said and said.count("lost another rank") <= 1
    assert lines(tmp_path / "run") == lines(exact_run)


def test_ranks_notice_that_torchrun_is_gone_and_write_a_checkpoint(validation_corpus, tmp_path):
    out = tmp_path / "run"
    process = torchrun(validation_corpus, out, "--max-restarts", "3", fault="sleep:0.2@0/0")
    wait_for(lambda: out.exists() and checkpoint_folder.steps(out))
    process.kill()
    _, said = process.communicate(timeout=TIMEOUT)  # to the end of the ranks, which have its standard error
    assert process.returncode == -signal.SIGKILL and said.count("checkpoint written; run again to resume") == 1
    assert 0 < checkpoint_folder.steps(out)[-1] < STEPS
