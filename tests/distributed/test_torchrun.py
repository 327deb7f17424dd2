"""Runs that torchrun itself starts, on two CPU ranks of this machine."""

import os
import signal
import subprocess
import sys

import faults
import pytest
from ranks import TIMEOUT, wait_for
from tiny_run import command

from electra_fast.files import checkpoint_folder

pytestmark = pytest.mark.slow


def test_ranks_that_torchrun_restarts_resume_and_notice_when_it_is_gone(validation_corpus, tmp_path):
    out, changes = tmp_path / "run", {"train.steps": "5000", "train.eval_every": "0"}
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    process = subprocess.Popen(
        [*start, faults.__file__, *command(validation_corpus, out, **changes)[3:]],
        env=os.environ | {"ELECTRA_FAST_FAULT": "kill@10/1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: out.exists() and [step for step in checkpoint_folder.steps(out) if step > 10])
    process.kill()
    _, said = process.communicate(timeout=TIMEOUT)  # to the end of the ranks, which have its standard error
    assert "resumes at step 9 of 5000" in said and said.count("lost another rank") <= 1
    assert process.returncode == -signal.SIGKILL and said.count("checkpoint written; run again to resume") == 1
