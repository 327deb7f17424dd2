"""File formats, malformed records, line ends and bounded vocabulary training: what is read, what is reported."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from electra_fast import progress
from electra_fast.data.corpus import Corpus, Tokenizer
from electra_fast.data.prepare import prepare, train_vocab

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(100))]
BAD = ['{"text": "w1', '{"body": "w2"}', '{"text": 3}', b'{"text": "\xff"}']
UNIT = " " * (4 << 20)


@pytest.fixture
def vocab(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(VOCAB))
    return path


def texts_of(folder):
    corpus = Corpus(folder)
    return [Tokenizer.of(corpus).decode(ids) for ids in corpus]


def write_records(path, lines):
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))


def test_any_file_can_be_read_as_text(vocab, tmp_path, capfd):
    folder = tmp_path / "in"
    (folder / ".git").mkdir(parents=True)
    (folder / "a.md").write_text("w1")
    (folder / "b.py.gz").write_bytes(gzip.compress(b"w2"))
    (folder / "README").write_text("w3")
    for hidden in (".hidden", ".git/c"):
        (folder / hidden).write_text("w9")
    with pytest.raises(ValueError, match=r"No files matched .*3 of other kinds.*--format text reads any file as text"):
        prepare([folder], vocab=vocab, out=tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match=r"a\.md: unknown kind of file; known are .*--format text reads any file"):
        prepare([folder / "a.md"], vocab=vocab, out=tmp_path / "out", progress=False)
    for number, inputs in enumerate(([folder], [folder / "*"], [folder / "**/*"])):
        prepare(inputs, vocab=vocab, out=tmp_path / f"{number}", format="text", progress=False)
        assert texts_of(tmp_path / f"{number}") == ["w3", "w1", "w2"]
    with pytest.raises(ValueError, match='format is "pdf"; it can be one of'):
        prepare([folder], vocab=vocab, out=tmp_path / "out", format="pdf", progress=False)
    command = [sys.executable, "-m", "electra_fast", "vocab", folder, "--format", "text", "--out", tmp_path / "v.txt"]
    done = subprocess.run([*command, "--size", "40"], capture_output=True, text=True, check=True)
    assert "entries" in done.stderr


def test_other_endings_of_json_lines(vocab, tmp_path):
    (tmp_path / "a.ndjson").write_text('{"text": "w1"}\n{"text": "w2 w3"}\n')
    prepare([tmp_path / "a.ndjson"], vocab=vocab, out=tmp_path / "out", format="jsonl", progress=False)
    assert texts_of(tmp_path / "out") == ["w1", "w2 w3"]
    assert json.loads((tmp_path / "out/manifest.json").read_text())["options"]["format"] == "jsonl"


def test_options_at_their_defaults_leave_no_trace(vocab, tmp_path):
    (tmp_path / "a.txt").write_text("w1")
    prepare([tmp_path / "a.txt"], vocab=vocab, out=tmp_path / "out", progress=False)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert sorted(manifest["options"]) == ["documents", "holdout", "invalid_utf8", "text_fields"]
    assert "skipped_records" not in manifest and not (tmp_path / "out/skipped.jsonl").exists()
    again = prepare([tmp_path / "a.txt"], vocab=vocab, out=tmp_path / "out", skip_bad_records=3, progress=False)
    assert again.already_complete


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_record_names_the_option(vocab, tmp_path, bad):
    write_records(tmp_path / "a.jsonl", ['{"text": "w1"}', bad])
    with pytest.raises(ValueError, match=r"a\.jsonl: line 2.*; --skip-bad-records N leaves up to N such records out"):
        prepare([tmp_path / "a.jsonl"], vocab=vocab, out=tmp_path / "out", progress=False)


def test_bad_records_are_skipped_and_listed(vocab, tmp_path, capfd):
    write_records(tmp_path / "a.jsonl", ['{"text": "w1"}', *BAD, '{"text": "w2"}'])
    common = {"vocab": vocab, "out": tmp_path / "out"}
    with pytest.raises(
        ValueError, match=r"line 5.*; 3 bad records were skipped before it: --skip-bad-records 3 allows"
    ):
        prepare([tmp_path / "a.jsonl"], skip_bad_records=3, progress=False, **common)
    report = prepare([tmp_path / "a.jsonl"], skip_bad_records=4, **common)
    assert texts_of(tmp_path / "out") == ["w1", "w2"]
    listed = [json.loads(line) for line in (tmp_path / "out/skipped.jsonl").read_text().splitlines()]
    assert [(record["file"], record["line"]) for record in listed] == [("a.jsonl", line) for line in (2, 3, 4, 5)]
    reasons = ["column 12: broken JSON", 'no text field "text"', 'field "text" is a number', "invalid UTF-8 at byte"]
    assert all(record["reason"].startswith(reason) for record, reason in zip(listed, reasons, strict=True))
    assert report.skipped_records == 4
    assert report.first_skipped == tuple((r["file"], r["line"], r["reason"]) for r in listed)
    stderr = capfd.readouterr().err
    assert (
        "4 bad records were skipped; all of them are in" in stderr and "\n  a.jsonl:2: column 12: broken JSON" in stderr
    )
    again = prepare([tmp_path / "a.jsonl"], progress=False, **common)
    assert again.already_complete and again.first_skipped == report.first_skipped


def test_skipped_records_survive_an_interruption_and_more_may_be_allowed_later(vocab, tmp_path):
    for number in range(3):
        write_records(tmp_path / f"{number}.jsonl", [f'{{"text": "w{number}"}}', "{", UNIT])
    inputs, common = [tmp_path / "*.jsonl"], {"vocab": vocab, "progress": False}
    with pytest.raises(ValueError, match=r"2\.jsonl: line 2.* 2 bad records were skipped before it"):
        prepare(inputs, out=tmp_path / "out", skip_bad_records=2, threads=1, **common)
    finished = sorted(path.name for path in (tmp_path / "out/parts").glob("unit-*"))
    assert finished and "skipped" in (tmp_path / "out/parts" / finished[0]).read_text()
    with pytest.raises(ValueError, match=r"bad records were skipped so far, and --skip-bad-records allows 0"):
        prepare(inputs, out=tmp_path / "out", **common)
    assert prepare(inputs, out=tmp_path / "out", skip_bad_records=3, **common).skipped_records == 3
    prepare(inputs, out=tmp_path / "whole", skip_bad_records=99, **common)
    for name in ("skipped.jsonl", "manifest.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_partitions_bring_their_skipped_records_together(vocab, tmp_path):
    for number in range(2):
        write_records(tmp_path / f"{number}.jsonl", [f'{{"text": "w{number}"}}', "{", UNIT])
    inputs, common = [tmp_path / "*.jsonl"], {"vocab": vocab, "out": tmp_path / "out", "progress": False}
    first = prepare(inputs, partition="2/2", skip_bad_records=1, **common)
    assert not first.complete and (first.skipped_records, first.first_skipped[0][:2]) == (1, ("1.jsonl", 2))
    with pytest.raises(ValueError, match="1 bad records were skipped before it"):
        prepare(inputs, partition="1/2", skip_bad_records=1, **common)
    assert prepare(inputs, partition="1/2", skip_bad_records=2, **common).skipped_records == 2
    listed = (tmp_path / "out/skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["file"] for line in listed] == ["0.jsonl", "1.jsonl"]


def test_vocab_skips_bad_records(tmp_path, capfd):
    write_records(tmp_path / "a.jsonl", [*['{"text": "word words wording"}'] * 9, *BAD])
    with pytest.raises(ValueError, match="line 10.*--skip-bad-records N"):
        train_vocab([tmp_path / "a.jsonl"], out=tmp_path / "v.txt", size=40)
    train_vocab([tmp_path / "a.jsonl"], out=tmp_path / "v.txt", size=40, skip_bad_records=4)
    assert "4 bad records were skipped\n  a.jsonl:10: column 12" in capfd.readouterr().err


def test_line_ends_of_old_macs(vocab, tmp_path):
    """As Python's `open` reads them; in a file with line feeds, a stray carriage return is whitespace."""
    documents = "w1 w2\nw3\n\nw4\n\n\nw5\n"
    hashes = set()
    for name, ends in {"unix": "\n", "windows": "\r\n", "mac": "\r"}.items():
        (tmp_path / f"{name}.txt").write_bytes(documents.replace("\n", ends).encode())
        report = prepare([tmp_path / f"{name}.txt"], vocab=vocab, out=tmp_path / name, progress=False)
        hashes.add((report.content_hash, report.num_documents))
    assert len(hashes) == 1 and next(iter(hashes))[1] == 3
    (tmp_path / "stray.txt").write_bytes(b"w1\rw2\nw3")
    prepare([tmp_path / "stray.txt"], vocab=vocab, out=tmp_path / "stray", documents="line", progress=False)
    assert texts_of(tmp_path / "stray") == ["w1 w2", "w3"]


@pytest.mark.parametrize(("ending", "kind"), [("gz", "gzip"), ("zst", "zstd"), ("xz", "xz")])
def test_plain_text_under_a_compressed_name(vocab, tmp_path, ending, kind):
    path = tmp_path / f"a.txt.{ending}"
    path.write_text("w1 w2")
    with pytest.raises(ValueError, match=rf"a\.txt\.{ending}: is not {kind} data, .* if it is plain text, rename it"):
        prepare([path], vocab=vocab, out=tmp_path / "out", progress=False)


def test_a_sample_is_said_and_repeatable(tmp_path, capfd):
    documents = [f"sharding word{number % 37} shards" for number in range(5_000)]
    size = sum(map(len, documents))
    options = {"size": 90, "kind": "documents"}
    train_vocab(documents, out=tmp_path / "all/v.txt", sample=0, **options)
    stderr = capfd.readouterr().err
    assert "counted words in" not in stderr and "merging the pieces of 39 words" in stderr
    train_vocab(documents, out=tmp_path / "limit/v.txt", sample=size, threads=1, **options)
    assert (tmp_path / "limit/v.txt").read_bytes() == (tmp_path / "all/v.txt").read_bytes()
    capfd.readouterr()
    for threads in (1, 3):
        train_vocab(documents, out=tmp_path / f"{threads}/v.txt", sample=size // 3, seed=4, threads=threads, **options)
        assert re.search(r"counted words in [\d.e-]+ of [\d.e-]+ GB of text \(seed 4\)", capfd.readouterr().err)
    assert (tmp_path / "1/v.txt").read_bytes() == (tmp_path / "3/v.txt").read_bytes()
    for name, value in (("sample", -1), ("seed", -1), ("skip_bad_records", -1)):
        with pytest.raises(ValueError, match=f"{name} is -1; give 0 or more"):
            train_vocab(documents, out=tmp_path / "v.txt", **options, **{name: value})


VOCAB_RUN = """
import re, sys, types
sys.modules["electra_fast"] = types.ModuleType("electra_fast")
sys.modules["electra_fast"].__path__ = [sys.argv[3]]
from electra_fast.data.prepare import train_vocab
train_vocab([sys.argv[1]], out=sys.argv[2], size=60, threads=2, progress=False)
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) // 1024)
"""


@pytest.mark.parametrize("kind", ["one word", "chinese"])
def test_fifty_megabytes_without_a_blank_take_little_memory(tmp_path, kind):
    """A third of that, to keep the test fast; processing it in one piece took 56 times its size."""
    path = tmp_path / "a.txt"
    if kind == "one word":
        path.write_text("a b c sharding shards " * 9 + "x" * (17 << 20))
    else:
        path.write_text("日本語，中国語。" * ((4 << 20) // 24))
    package = str(Path(progress.__file__).parent)
    command = [sys.executable, "-c", VOCAB_RUN, path, tmp_path / "v.txt", package]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 300
    words = (tmp_path / "v.txt").read_text().splitlines()
    assert ("shard" in words and "x" not in words) if kind == "one word" else {"日", "本", "。"} <= set(words)


def test_progress_is_said_in_lines_where_there_is_no_terminal(monkeypatch, capfd):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = progress.ReadingProgress("prepare", shown=True)
    for second in range(1, 26):
        now[0] = 100.0 + second
        bar.update(second * 10**6, 10**8, second, second * 10**5)
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "prepare: 10.0% of 100.0 MB, 1.0 MB/s, eta 0:01:30  10 documents  0.10 Mtok/s",
        "prepare: 20.0% of 100.0 MB, 1.0 MB/s, eta 0:01:20  20 documents  0.10 Mtok/s",
    ]
    silent = progress.ReadingProgress("prepare", shown=False)
    now[0] += 60
    silent.update(1, 2, 3, 4)
    assert capfd.readouterr().err == ""
