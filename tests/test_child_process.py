"""Child processes import nothing from the user's folder, and report the reason for their exit."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import electra_fast
from electra_fast.child_process import describe_end, lacked_memory, python_command, search_path

PACKAGE = Path(electra_fast.__file__).resolve().parent
PROGRAM = "import json, random, numpy, electra_fast.cli; print(electra_fast.__file__, *sys.argv[1:])"


@pytest.mark.process
def test_child_imports_nothing_from_current_folder(hostile_folder, monkeypatch):
    monkeypatch.syspath_prepend("")  # as in a notebook
    monkeypatch.syspath_prepend(str(hostile_folder))  # as in `python -m`
    command = python_command(PROGRAM, "a b", "ü")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    path, *arguments = done.stdout.split(maxsplit=1)
    assert Path(path).resolve().parent == PACKAGE and arguments == ["a b ü\n"]


def test_intended_folders_stay_on_search_path(hostile_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", ["", str(hostile_folder), str(tmp_path), "/elsewhere"])
    assert search_path() == [str(tmp_path), "/elsewhere"]
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere:{hostile_folder}")
    assert search_path() == sys.path
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(PACKAGE.parent)
    assert search_path() == sys.path


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "end", "is_memory"),
    [
        ("import torch_of_the_user", "exit code 1: ModuleNotFoundError: No module named 'torch_of_the_user'", False),
        ("sys.exit(3)", "exit code 3: no output", False),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV", False),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL, as the system does when memory runs out", True),
        ("raise MemoryError", "exit code 1: MemoryError", True),
        ("raise RuntimeError('DefaultCPUAllocator: can\\'t allocate memory\\n')", "exit code 1: RuntimeError", True),
    ],
)
def test_reason_of_process_exit(program, end, is_memory):
    done = subprocess.run([sys.executable, "-S", "-c", f"import sys; {program}"], capture_output=True, text=True)
    assert describe_end(done.returncode, done.stderr).startswith(end)
    assert lacked_memory(done.returncode, done.stderr) is is_memory
    assert lacked_memory(-signal.SIGKILL, "")


def test_only_one_module_starts_python():
    starts = re.compile(r"sys\.executable|multiprocessing\.(Process|Pool|get_context)|ProcessPoolExecutor\(")
    files = [path for path in PACKAGE.rglob("*.py") if starts.search(path.read_text(encoding="utf-8"))]
    assert [path.name for path in files] == ["child_process.py"]
