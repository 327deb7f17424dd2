"""A corpus on disk changes while it is read: the reader fails with one line that names the file."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from electra_fast.data.corpus import Corpus
from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.errors import InputError


def overwrite(content):
    """Returns a function that overwrites a file in place, from byte 64 up to the index, with `content(size)`."""

    def change(path):
        with path.open("r+b") as file:
            file.seek(64)
            file.write(content(path.stat().st_size // 2))

    return change


def append(path):
    with path.open("ab") as file:
        file.write(b"more")


def forge(path):
    """Changes bytes and restores the modification time."""
    times = path.stat()
    overwrite(lambda size: b"\xff" * size)(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


# The system sets the time before the length, so a reader may see only one of the changes.
GROWN = r"(\d+ bytes instead of \d+: changed|written to) while in use"
CHANGES = {
    "one id": ("tokens", overwrite(lambda size: b"\x05\x00" * (size // 2)), "written to while in use"),

    "other ids in secret": ("tokens", forge, "id 65535 is not in the vocabulary of"),
    "growth": ("tokens", append, GROWN),
    # Or they contradict the documents, if the reader is just reading these.
    "other lines": ("lines", overwrite(os.urandom), r"written to while in use|document \d+: "),

}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_reader_reports_changed_corpus(tiny_corpus, tmp_path, name):
    kind, change, message = CHANGES[name]
    corpus = shutil.copytree(tiny_corpus, tmp_path / "corpus")
    size = Corpus(corpus).vocab_size
    loader = BatchLoader(corpus, sequence_length=16, batch_size=8, seed=0, cut_at="line")
    for _ in range(1000):
        next(loader)  # several epochs: every block has been verified
    (path,) = corpus.glob(f"*.{kind}")
    change(path)
    with pytest.raises(InputError, match=rf"{path.name}: .*({message}).*; restore the file from a copy") as caught:
        for _ in range(20_000):
            assert int(to_torch(next(loader))["input_ids"].max()) < size
    assert "\n" not in str(caught.value)


CUT_OFF = """
import os, signal, sys
from electra_fast.cli import main
from electra_fast.data.loader import BatchLoader
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGBUS
    assert main(["verify", sys.argv[2], "--quiet"]) == 0
corpus = sys.argv[2 if child else 1]
loader = BatchLoader(corpus, sequence_length=16, batch_size=1, seed=0)
next(loader)
os.truncate(os.path.join(corpus, sys.argv[3]), 0)
for _ in loader:
    pass
"""


@pytest.mark.slow
def test_command_line_explains_a_truncated_mapped_file(tiny_corpus, tmp_path):
    """The page is gone, and the system sends SIGBUS. In a user's program, the library leaves the signal alone."""
    corpora = [shutil.copytree(tiny_corpus, tmp_path / name) for name in "ab"]
    command = [sys.executable, "-c", CUT_OFF, *corpora, next(tiny_corpus.glob("*.tokens")).name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    message = "electra-fast: error: a memory-mapped file cannot be read: it was truncated .* run again\n"
    assert done.returncode == 2 and re.fullmatch(message, done.stderr), done.stderr
