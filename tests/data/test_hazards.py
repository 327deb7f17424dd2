"""Failures around `prepare`: changing inputs, unwritable folders, lost files, pipes and devices."""

import os
import subprocess
import sys

import pytest
from prepare_programs import IMPORT, contents

from electra_fast import _data
from electra_fast.data.corpus import Corpus, verify
from electra_fast.data.inspect import inspect
from electra_fast.data.prepare import prepare
from electra_fast.errors import InputError

# Words too long for a vocabulary: many bytes, little work.
FILLER = ("x" * 4_000 + "\n") * 256


def rewrite(path):
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"w9")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))


def append(path):
    with path.open("a") as file:
        file.write("w1")


CHANGES = {
    "grows": (append, r"changed from \d+ to \d+ bytes"),
    "changes": (rewrite, "was modified"),
    "disappears": (lambda path: path.unlink(), "disappeared"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_input_that_changes_during_the_run_is_refused(vocab, tmp_path, how):
    change, message = CHANGES[how]
    path = tmp_path / "a.txt"
    out = tmp_path / "out"
    calls = []
    path.write_text("w1 w2\n" + FILLER * 12)

    def once(*_):  # the reader is a few MiB ahead of this call, not twelve
        if not calls:
            change(path)
        calls.append(1)

    tokenizer = _data.Tokenizer(str(vocab))
    with pytest.raises(ValueError, match=rf"a\.txt: {message} while in use; run again"):
        _data.prepare(tokenizer, str(out), files=[str(path)], text_fields=["text"], threads=1, progress=once)
    assert not (out / "manifest.json").exists() and not list(out.glob("shard-*"))
    path.write_text("w3 w4")
    assert prepare([path], vocab=vocab, out=out, progress=False).num_tokens == 2


# Without capabilities, even root may not write to a folder whose mode forbids it.
POWERLESS = f"""{IMPORT}
import ctypes
header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None, use_errno=True).capset(header, nothing) == 0
text, vocab, folder, corpus = sys.argv[1:]
for out in (folder, folder + "/new"):
    try:
        prepare([text], vocab=vocab, out=out, progress=False)
    except OSError as error:
        print(error)
assert verify(corpus)["files"] == 5 and len(Corpus(corpus)[0]) == 1
assert prepare([text], vocab=vocab, out=corpus, progress=False).already_complete
"""


@pytest.mark.process
def test_read_only_folder_is_reported(vocab, tmp_path):
    (tmp_path / "a.txt").write_text("w1")
    folder = tmp_path / "folder"
    corpus = tmp_path / "corpus"
    folder.mkdir()
    prepare([tmp_path / "a.txt"], vocab=vocab, out=corpus, progress=False)
    before = contents(corpus)
    for path in (folder, corpus, *corpus.iterdir()):
        path.chmod(0o555 if path.is_dir() else 0o444)
    command = [sys.executable, "-c", POWERLESS, tmp_path / "a.txt", vocab, folder, corpus]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for path in (folder, corpus):
        path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all("not writable; choose another --out" in line for line in lines)
    assert contents(folder) == {} and contents(corpus) == before


SPECIAL = {"manifest.json": "pipe", "shard-000000-000.tokens": "device", "vocab.txt": "pipe", "inputs.json": "device"}


@pytest.mark.parametrize("name", SPECIAL)
def test_pipe_or_device_in_a_corpus_is_an_immediate_error(vocab, tmp_path, name):
    special = SPECIAL[name]
    (tmp_path / "a.txt").write_text("w1 w2\n")
    out = tmp_path / "out"
    prepare([tmp_path / "a.txt"], vocab=vocab, out=out, progress=False)
    (out / name).unlink()
    if special == "pipe":
        os.mkfifo(out / name)  # without a writer, opening it would block forever
    else:
        (out / name).symlink_to("/dev/zero")
    message = rf"{name}: .*a {special}: must be a regular file"
    readers = (verify, inspect, Corpus) if name == "manifest.json" else (verify,)
    for read in readers:
        with pytest.raises((OSError, ValueError), match=message):
            read(out)
    if name.endswith(".json"):
        with pytest.raises(OSError, match=message):
            prepare([tmp_path / "a.txt"], vocab=vocab, out=out, progress=False)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz"])
def test_pipe_or_device_as_input_is_refused_in_one_line(vocab, tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / f"in/{name}").symlink_to("/dev/zero")
    inputs = [tmp_path / "in"]
    if name == "a.parquet":
        os.mkfifo(tmp_path / "b.parquet")
        inputs.append(tmp_path / "b.parquet")
    for path in inputs:
        with pytest.raises(InputError, match=r"\w+: a (pipe|device): must be a regular file; copy"):
            prepare([path], vocab=vocab, out=tmp_path / "out", progress=False)
