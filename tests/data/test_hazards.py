"""Failures around `prepare`: changing inputs, unwritable folders, a second process, a kill, a lost file."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from electra_fast import BatchLoader, _data
from electra_fast.data.corpus import Corpus, verify
from electra_fast.data.inspect import inspect
from electra_fast.data.prepare import prepare
from electra_fast.errors import InputError

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(100))]
# As in test_prepare: starts without the package's __init__, and so without torch.
IMPORT = f"""
import sys, types
sys.modules["electra_fast"] = types.ModuleType("electra_fast")
sys.modules["electra_fast"].__path__ = [{str(Path(_data.__file__).parent)!r}]
from electra_fast.data.corpus import Corpus, verify
from electra_fast.data.prepare import prepare
"""
RUN = f"""{IMPORT}
prepare([sys.argv[1]], vocab=sys.argv[2], out=sys.argv[3], threads=1, progress=False)
"""
# Words too long for a vocabulary: many bytes, little work.
FILLER = ("x" * 4_000 + "\n") * 256


@pytest.fixture
def vocab(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(VOCAB))
    return path


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rewrite(path):
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"w9")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))


def append(path):
    with path.open("a") as file:
        file.write("w1")


CHANGES = {
    "grows": (append, r"went from \d+ to \d+ bytes"),
    "shrinks": (lambda path: os.truncate(path, 5 << 20), r"went from \d+ to 5242880 bytes"),
    "changes": (rewrite, "was written to"),
    "disappears": (lambda path: path.unlink(), "disappeared"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_an_input_that_changes_under_the_run_is_refused(vocab, tmp_path, how):
    change, message = CHANGES[how]
    path, out, calls = tmp_path / "a.txt", tmp_path / "out", []
    path.write_text("w1 w2\n" + FILLER * 12)

    def once(*_):  # the reader is a few MiB ahead of this call, not twelve
        if not calls:
            change(path)
        calls.append(1)

    tokenizer = _data.Tokenizer(str(vocab))
    with pytest.raises(ValueError, match=rf"a\.txt: {message} while it was in use; run again"):
        _data.prepare(tokenizer, str(out), files=[str(path)], text_fields=["text"], threads=1, progress=once)
    assert not (out / "manifest.json").exists() and not list(out.glob("shard-*"))
    path.write_text("w3 w4")
    assert prepare([path], vocab=vocab, out=out, progress=False).num_tokens == 2


@pytest.fixture
def stuck(tmp_path, vocab):
    """A folder of three input groups whose last file is a pipe, on which a run blocks until something is written."""
    text = tmp_path / "text"
    text.mkdir()
    for name in "abc":
        (text / f"{name}.txt").write_text(f"w1 {name}\n" + FILLER * 5)
    os.mkfifo(text / "d.txt")
    command = [sys.executable, "-c", RUN, text, vocab, tmp_path / "out"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        records = [tmp_path / f"out/parts/input-group-{group:06}.json" for group in range(2)]
        deadline = time.monotonic() + 60
        while not all(path.exists() for path in records):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.01)
        yield process, text, tmp_path / "out"
        process.kill()


def test_finished_units_survive_a_kill_untouched(stuck, vocab, tmp_path):
    process, text, out = stuck
    process.kill()
    process.wait()
    finished = [path for group in range(2) for path in out.glob(f"shard-{group:06}-*")]
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in finished}
    assert len(before) == 4
    (text / "d.txt").unlink()
    (text / "d.txt").write_text("")
    assert prepare([text], vocab=vocab, out=out, progress=False).complete
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in finished} == before
    prepare([text], vocab=vocab, out=tmp_path / "undisturbed", progress=False)
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_a_damaged_record_is_done_again(stuck, vocab, tmp_path):
    process, text, out = stuck
    process.kill()
    process.wait()
    record = out / "parts/input-group-000001.json"
    record.write_text(record.read_text().replace('"documents": 1', '"documents": 2'))
    inodes = [(out / f"shard-00000{group}-000.tokens").stat().st_ino for group in range(2)]
    (text / "d.txt").unlink()
    (text / "d.txt").write_text("")
    prepare([text], vocab=vocab, out=out, progress=False)
    same = [(out / f"shard-00000{group}-000.tokens").stat().st_ino == inodes[group] for group in range(2)]
    assert same == [True, False]
    prepare([text], vocab=vocab, out=tmp_path / "undisturbed", progress=False)
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_a_second_process_is_refused_and_the_first_goes_on(stuck, vocab):
    process, text, out = stuck
    with pytest.raises(ValueError, match="another prepare is running in this folder .*; wait for it or choose another"):
        prepare([text], vocab=vocab, out=out, progress=False)
    with (text / "d.txt").open("w"):
        pass  # end of the pipe, without data
    assert process.wait(60) == 0, process.stderr.read()
    assert verify(out)


# Without capabilities, even root may not write where the mode forbids it.
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
assert verify(corpus)["files"] == 4 and len(Corpus(corpus)[0]) == 1
assert prepare([text], vocab=vocab, out=corpus, progress=False).already_complete
"""


def test_a_read_only_folder(vocab, tmp_path):
    (tmp_path / "a.txt").write_text("w1")
    folder, corpus = tmp_path / "folder", tmp_path / "corpus"
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
    assert len(lines) == 2 and all("nothing can be written there; choose another --out" in line for line in lines)
    assert contents(folder) == {} and contents(corpus) == before


@pytest.fixture
def long_corpus(vocab, tmp_path):
    """Several blocks of tokens in one shard; all of its ids, for comparison."""
    out = tmp_path / "long"
    prepare((" ".join(f"w{(n + i) % 100}" for i in range(5_000)) for n in range(30)), vocab=vocab, out=out)
    return out, [ids.tolist() for ids in Corpus(out)]


def test_files_that_are_replaced_or_removed_stay_what_they_were(long_corpus, tmp_path):
    out, expected = long_corpus
    corpus = Corpus(out)
    assert corpus[0].tolist() == expected[0]
    tokens = next(out.glob("*.tokens"))
    (tmp_path / "other").write_bytes(bytes(tokens.stat().st_size))
    os.replace(tmp_path / "other", tokens)
    assert [ids.tolist() for ids in corpus] == expected
    tokens.unlink()
    assert [ids.tolist() for ids in corpus] == expected
    with pytest.raises(ValueError, match="missing, though the manifest names it"):
        Corpus(out)


def test_a_file_that_grows_or_changes_is_noticed_or_harmless(long_corpus):
    out, expected = long_corpus
    corpus = Corpus(out)
    assert corpus[0].tolist() == expected[0]
    tokens = next(out.glob("*.tokens"))
    before = tokens.stat()
    with tokens.open("ab") as file:
        file.write(b"more")
    for read in (lambda: corpus[:5], lambda: Corpus(out)):
        with pytest.raises(ValueError, match="bytes instead of"):
            read()
    with tokens.open("r+b") as file:
        file.truncate(before.st_size)
        file.seek(3 * 65_536 + 9)
        file.write(b"\xff")
    with pytest.raises(ValueError, match="written to while it was in use"):
        list(corpus)
    os.utime(tokens, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match="block 3 of 5 is damaged"):
        list(corpus)


def load(folder):
    return [batch.num_rows for batch in BatchLoader(folder, sequence_length=32, batch_size=8, epochs=1)]


def test_a_loader_needs_manifest_and_tokens_and_looks_at_every_bit_of_them(vocab, tmp_path):
    out = tmp_path / "out"
    prepare(iter(["w1 w2\nw3", "w4 w5"]), vocab=vocab, out=out, progress=False)
    expected = load(out)
    for path in sorted(out.iterdir()):
        sound = path.read_bytes()
        for bit in range(len(sound) * 8):
            if path.suffix != ".tokens" and bit % 37:
                continue  # the crate's own tests cover every bit of the manifest
            flipped = bytearray(sound)
            flipped[bit // 8] ^= 1 << (bit % 8)
            path.write_bytes(flipped)
            if path.suffix in (".tokens", ".json"):
                with pytest.raises(ValueError, match=path.name):
                    load(out)
            else:  # loading reads neither line lengths nor the vocabulary
                assert load(out) == expected
        path.write_bytes(sound)
        shutil.move(path, tmp_path / "away")
        if path.suffix == ".txt":
            assert load(out) == expected
        else:
            with pytest.raises((ValueError, FileNotFoundError), match=path.name):
                load(out)
        shutil.move(tmp_path / "away", path)


@pytest.mark.parametrize("special", ["pipe", "device"])
@pytest.mark.parametrize("name", ["manifest.json", "shard-000000-000.tokens", "vocab.txt", "inputs.json"])
def test_a_corpus_with_a_pipe_or_device_in_it_is_an_error_at_once(vocab, tmp_path, special, name):
    (tmp_path / "a.txt").write_text("w1 w2\n")
    out = tmp_path / "out"
    prepare([tmp_path / "a.txt"], vocab=vocab, out=out, progress=False)
    (out / name).unlink()
    if special == "pipe":
        os.mkfifo(out / name)  # nobody writes: to open it would wait forever
    else:
        (out / name).symlink_to("/dev/zero")
    message = rf"{name}: .*a {special}, where a regular file is needed"
    readers = {"inputs.json": (), "manifest.json": (verify, inspect, Corpus)}.get(name, (verify,))
    for read in readers:
        with pytest.raises((OSError, ValueError), match=message):
            read(out)
    if name.endswith(".json"):
        with pytest.raises(OSError, match=message):
            prepare([tmp_path / "a.txt"], vocab=vocab, out=out, progress=False)


@pytest.mark.parametrize("name", ["a.parquet", "a.txt", "a.jsonl.gz"])
def test_an_input_that_cannot_be_a_pipe_or_device_is_one_line(vocab, tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / f"in/{name}").symlink_to("/dev/zero")
    inputs = [tmp_path / "in"]
    if name == "a.parquet":
        os.mkfifo(tmp_path / "b.parquet")
        inputs.append(tmp_path / "b.parquet")
    for path in inputs:
        with pytest.raises(InputError, match=r"\w+: a (pipe|device), where a regular file is needed; copy"):
            prepare([path], vocab=vocab, out=tmp_path / "out", progress=False)
