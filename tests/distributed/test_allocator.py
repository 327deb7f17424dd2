"""Memory that a step frees stays with the process."""

import subprocess
import sys

import pytest

PAGE_FAULTS = """
import resource
from electra_fast.distributed.step_processes import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):
        buffers = [b"x" * 40_000_000 for _ in range(3)]  # above 32 MB, which glibc always returns
        del buffers
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
first = faults()
keep_freed_memory()
print(first, min(faults() for _ in range(4)))  # the heap grows at first
"""


@pytest.mark.skipif(sys.platform != "linux", reason="settings of glibc")
def test_freed_memory_is_kept(tmp_path):
    """In a process of its own, since the setting lasts."""
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", PAGE_FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    before, after = map(int, done.stdout.split())
    assert before > 10_000 and after < before / 20
