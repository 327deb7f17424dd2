"""Loaders, corpora and tokenizers in other processes: forked, spawned, pickled. A hang is a failure."""

import multiprocessing
import pickle
import subprocess
import sys
import threading

import pytest
from test_loader import digest

import electra_fast as ef
from electra_fast import BatchLoader, Corpus, Tokenizer, prepare, verify

# Python 3.12 and newer warn about forking a process with threads; these tests do so on purpose.
pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")]
FORK = multiprocessing.get_context("fork")
TIMEOUT = 60.0

EXIT = """
import os, sys
from electra_fast import BatchLoader, Corpus, Tokenizer
loader = BatchLoader(sys.argv[1], sequence_length=64, batch_size=23, num_threads=3)
corpus = Corpus(sys.argv[1])
tokenizer = Tokenizer.of(corpus)
tokenizer.encode_batch(["w7"])
next(loader)
child = os.fork()
if child and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
    sys.exit("the child failed")
"""

DATA_LOADER = """
import sys
import torch
from torch.utils.data import DataLoader, IterableDataset
from electra_fast import BatchLoader, to_torch


class Batches(IterableDataset):
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return map(to_torch, self.loader)


if __name__ == "__main__":
    loader = BatchLoader(sys.argv[1], sequence_length=64, batch_size=23, epochs=1)
    next(loader)
    batches = DataLoader(Batches(loader), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    taken, expected = list(batches), [to_torch(batch) for batch in loader]
    assert len(taken) == len(expected) > 10
    for batch, copy in zip(expected, taken):
        assert all(torch.equal(batch[name], copy[name]) for name in batch)
"""


@pytest.fixture
def loader(corpus):
    """A loader after its first batch, with running threads."""
    loader = BatchLoader(corpus, sequence_length=64, batch_size=23, seed=5, num_threads=2, epochs=2)
    next(loader)
    return loader


def in_child(work):
    """The result of `work` in a forked child."""
    receiver, sender = FORK.Pipe()
    child = FORK.Process(target=lambda: sender.send(work()))
    child.start()
    sender.close()
    try:
        assert receiver.poll(TIMEOUT), "the child hangs"
        return receiver.recv()
    finally:
        child.kill()
        child.join()


def hashes(loader, count=None):
    """Hashes of the next `count` batches, or of all."""
    batches = list(loader) if count is None else [next(loader) for _ in range(count)]
    return [digest([batch]) for batch in batches]


def test_forked_child_continues_like_its_parent(loader):
    def work():
        return loader.state(), loader.num_rows, hashes(loader, 3), in_child(lambda: hashes(loader))

    state, num_rows, first, rest = in_child(work)
    assert (state, num_rows) == (loader.state(), loader.num_rows)
    assert first == hashes(loader, 3)
    assert rest == hashes(loader)


def test_child_restores_and_drops_inherited_loaders(loader):
    start = loader.state()
    expected = hashes(loader, 2)
    inherited = [loader]

    def work():
        inherited[0].restore(start)
        first = hashes(inherited[0], 2)
        inherited.clear()
        return first

    assert in_child(work) == expected
    unused = [loader]
    del loader
    assert in_child(unused.clear) is None


def test_fork_while_a_thread_takes_batches_does_not_hang(corpus):
    loader = BatchLoader(corpus, sequence_length=64, batch_size=23, num_threads=2)
    going = threading.Event()
    going.set()

    def take():
        while going.is_set():
            next(loader)

    def work():
        try:
            return f"{next(loader).num_rows} rows"
        except ValueError as error:
            return str(error)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        outputs = [in_child(work) for _ in range(5)]
    finally:
        going.clear()
        thread.join()
    for line in outputs:
        assert line == "23 rows" or line.endswith("is unknown; open a BatchLoader in this process"), line


def test_corpus_and_tokenizer_work_in_a_forked_child(corpus, tmp_path):
    opened = Corpus(corpus)
    tokenizer = Tokenizer.of(opened)
    texts = ["w7 w8", "w9"] * 50
    text = tmp_path / "text.txt"

    def work():
        process = multiprocessing.current_process().name
        vocabulary = tmp_path / process / "words.txt"
        ef.vocab([text], out=vocabulary, size=60, progress=False)
        report = prepare([text], vocab=tokenizer, out=tmp_path / f"copy-{process}")
        ids = [ids.tolist() for ids in (*tokenizer.encode_batch(texts), *opened[:20])]
        return vocabulary.read_text(), ids, report.content_hash, verify(corpus)["files"], opened.shards

    assert work() == in_child(work)


def test_changed_corpus_is_not_mistaken_for_the_inherited_one(corpus, tmp_path):
    opened = Corpus(corpus)
    text = tmp_path / "other.txt"
    loader = BatchLoader(corpus, sequence_length=64, batch_size=8)
    pickled = [pickle.dumps(value) for value in (opened, loader)]
    text.write_text("w7 w8 w9")
    tokenizer = Tokenizer(tmp_path / "vocab.txt")
    corpus.rename(tmp_path / "old")
    prepare([text], vocab=tokenizer, out=corpus, progress=False)

    def complaint(work):
        with pytest.raises(ValueError) as caught:
            work()
        return str(caught.value)

    assert "changed since it was opened" in in_child(lambda: complaint(lambda: len(opened)))
    assert "state: corpus = " in in_child(lambda: complaint(lambda: next(loader)))
    assert "changed since it was opened" in complaint(lambda: pickle.loads(pickled[0]))
    assert "state: corpus = " in complaint(lambda: pickle.loads(pickled[1]))


def test_pickled_loader_continues_exactly(loader, monkeypatch, corpus):
    monkeypatch.chdir(corpus.parent)
    relative = BatchLoader("shards", sequence_length=64, batch_size=23, seed=5, epochs=2)
    relative.restore(loader.state())
    pickled = [pickle.dumps(loader), pickle.dumps(relative)]
    monkeypatch.chdir("/")
    expected = hashes(loader)
    assert len(expected) > 10
    assert [hashes(pickle.loads(data)) for data in pickled] == [expected, expected]
    assert hashes(pickle.loads(pickle.dumps(loader))) == []  # at the end of the last epoch


def test_corpus_and_tokenizer_are_pickled(corpus, tmp_path):
    opened = pickle.loads(pickle.dumps(Corpus(corpus)))
    assert opened.content_hash == Corpus(corpus).content_hash and opened.path == corpus
    words = tmp_path / "vocab.txt"
    data = pickle.dumps(Tokenizer(words, cased=True))
    words.unlink()  # the pickle contains the file
    tokenizer = pickle.loads(data)
    assert tokenizer.options == {"cased": True, "strip_accents": False}
    assert tokenizer.encode_batch(["w7 W8"])[0].tolist() == [7, 1]


@pytest.mark.slow
def test_forked_interpreter_exits(corpus):
    subprocess.run([sys.executable, "-c", EXIT, corpus], check=True, timeout=TIMEOUT)


@pytest.mark.slow
def test_torch_data_loaders_take_a_loader_to_their_worker(corpus, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(DATA_LOADER)
    subprocess.run([sys.executable, script, corpus], check=True, timeout=2 * TIMEOUT)
