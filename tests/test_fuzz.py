"""Some mutated files of each kind, the same ones every time; `fuzz_readers.py` tries more, for as long as one likes."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.process]
READERS = Path(__file__).parent / "support/fuzz_readers.py"


def test_mutated_files_are_read_or_refused_in_one_line(tmp_path):
    # Runs in a separate process, because cases are forks and this process may have threads.
    command = [sys.executable, str(READERS), "--cases", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
