"""Repeated text: the report of `prepare`, and dropping duplicates in several processes and after kills."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from prepare_programs import IMPORT, contents

from electra_fast.cli import main
from electra_fast.data import prepare_executor
from electra_fast.data.corpus import Corpus
from electra_fast.data.prepare import prepare
from electra_fast.data.prepare_report import RepeatCount

GROUPS = 4
# An input group is 4 MiB of input, mostly blank lines here.
PADDING = "\n" * (4 << 20)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Four input groups of 60 documents; 20 documents occur twice, and all have a common line."""
    folder = tmp_path_factory.mktemp("text")
    for group in range(GROUPS):
        documents = [f"w{n // 2 + 20 * group} w{n}\nw1 w2 w3  \r" for n in range(60)]
        (folder / f"{group}.txt").write_text("\n\n".join(documents + documents[:20]) + PADDING)
    return folder


@pytest.fixture(scope="module")
def once(text, vocab, tmp_path_factory):
    """The corpus in which each line occurs once."""
    out = tmp_path_factory.mktemp("once") / "out"
    prepare([text], vocab=vocab, out=out, drop_duplicates="lines", holdout=0.2, progress=False)
    return out


def test_report_lists_repeated_lines(text, vocab, tmp_path):
    report = prepare([text], vocab=vocab, out=tmp_path / "out")
    lines = [line.rstrip() for path in sorted(text.iterdir()) for line in path.read_text().splitlines() if line.strip()]
    assert report.repeats.lines == RepeatCount(len(lines), len(lines) - len(set(lines)), 1)
    assert report.repeats.documents == RepeatCount(320, 320 - 240, 1)
    assert report.repeats.most_repeated[0] == ("w1 w2 w3", 320)
    assert [count for _, count in report.repeats.most_repeated[1:]] == [2] * 9
    shown = str(report)
    assert "repeated in the input: documents 80 of 320 (25.0%), lines 399 of 640 (62.3%)\n" in shown
    assert "    320 × w1 w2 w3\n" in shown and "duplicate" not in shown


def test_no_duplicate_is_in_training_and_validation_sets(text, vocab, once, tmp_path):
    prepare([text], vocab=vocab, out=tmp_path / "a", drop_duplicates="documents", holdout=0.2, progress=False)
    for corpus in (Corpus(tmp_path / "a"), Corpus(once)):
        train, held_out = ([tuple(ids) for ids in part] for part in (corpus, Corpus(corpus.holdout)))
        assert len(held_out) > 5 and len({*train, *held_out}) == len(train) + len(held_out) == 240


def test_documents_of_an_iterator_are_counted_too(vocab, tmp_path):
    report = prepare(iter(["w1\n", "w2\n\nw1", "w1 \n\n"]), vocab=vocab, out=tmp_path / "out", progress=False)
    assert (report.repeats.documents, report.repeats.lines) == (RepeatCount(3, 1, 1), RepeatCount(4, 2, 1))
    assert str(RepeatCount(1000, 120, 16)) == "about 12.0% of 1,000 (estimated from 1 of 16)"


def test_report_counts_dropped_text(text, vocab, tmp_path):
    report = prepare([text], vocab=vocab, out=tmp_path / "out", drop_duplicates="lines")
    assert (report.num_documents, report.dropped_lines, report.emptied_documents) == (240, 399, 80)
    said = "  399 duplicate lines dropped, 80 documents without other lines dropped\n"
    assert said in str(report)
    again = prepare([text], vocab=vocab, out=tmp_path / "out", drop_duplicates="lines", progress=False)
    assert again.already_complete and (again.dropped_lines, again.emptied_documents) == (399, 80)
    with pytest.raises(ValueError, match="holds a finished corpus of other inputs or options"):
        prepare([text], vocab=vocab, out=tmp_path / "out", drop_duplicates="documents", progress=False)


@pytest.mark.parametrize("part", ["parts", "tasks"])
def test_parts_give_the_same_corpus(part, text, vocab, once, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    arguments = ["prepare", str(text), "--vocab", str(vocab), "--out", str(out)]
    arguments += ["--drop-duplicates", "lines", "--holdout", "0.2", "--partition"]
    if part == "tasks":
        monkeypatch.setattr(prepare_executor, "TASK_BYTES", 1)
        with ThreadPoolExecutor(2) as executor:
            options = {"drop_duplicates": "lines", "holdout": 0.2}
            prepare([text], vocab=vocab, out=out, executor=executor, progress=False, **options)
    else:
        assert main([*arguments, "1/2"]) in (None, 0)
        assert "hashed, but 2 of 4 input groups are not; run it again when all partitions" in capsys.readouterr().out
        for index in (2, 1):
            main([*arguments, f"{index}/2"])
    assert contents(out) == contents(once)


# The process is killed when it has written this file.
KILLED = f"""{IMPORT}
import os, signal, threading, time
def watch():
    while not os.path.exists(sys.argv[4]):
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
options = dict(drop_duplicates="lines", holdout=0.2, threads=1, progress=False)
prepare([sys.argv[1]], vocab=sys.argv[2], out=sys.argv[3], **options)
"""


@pytest.mark.process
def test_run_killed_in_either_pass_resumes(text, vocab, once, tmp_path):
    out = tmp_path / "out"
    for name in ("000001.hashes.json", "000002.drops", "000001.counts"):
        command = [sys.executable, "-c", KILLED, text, vocab, out, out / f"parts/input-group-{name}"]
        killed = subprocess.run(command, stderr=subprocess.PIPE)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    prepare([text], vocab=vocab, out=out, drop_duplicates="lines", holdout=0.2, progress=False)
    assert contents(out) == contents(once)


def test_dropping_duplicates_of_a_pipe_is_refused(vocab, tmp_path):
    options = {"vocab": vocab, "out": tmp_path / "out", "progress": False}
    with pytest.raises(ValueError, match="drop_duplicates: needs files as input, not documents"):
        prepare(iter(["w1"]), drop_duplicates="lines", **options)
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ValueError, match=r"pipe.txt: not a regular file; drop_duplicates reads the text twice"):
        prepare([tmp_path / "pipe.txt"], drop_duplicates="lines", **options)
    with pytest.raises(ValueError, match='drop_duplicates = "words": must be "documents" or "lines"'):
        prepare([tmp_path / "pipe.txt"], drop_duplicates="words", **options)
