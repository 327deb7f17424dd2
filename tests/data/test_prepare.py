"""`prepare` resumed, partitioned, interrupted and refused: the corpus always has the same bytes."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from prepare_programs import IMPORT, contents

import electra_fast as ef
from electra_fast import _data
from electra_fast.data.corpus import Corpus, Tokenizer, verify
from electra_fast.data.prepare import prepare

RUN = f"""{IMPORT}
print("ready", flush=True)
prepare([sys.argv[1]], vocab=sys.argv[2], out=sys.argv[3])
"""
GROUPS = 5
# An input group is 4 MiB of input, mostly blank lines here to keep the tests fast.
PADDING = "\n" * (4 << 20)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of files of one input group each, with 60 documents per file."""
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(5)
    for number in range(GROUPS):
        documents = [" ".join(f"w{rng.randrange(500)}" for _ in range(rng.randint(1, 900))) for _ in range(60)]
        (folder / f"{number}.txt").write_text("\n\n".join(documents) + PADDING)
    return folder


@pytest.fixture(scope="module")
def whole(text, vocab, tmp_path_factory):
    """The corpus of an uninterrupted run, with a validation set."""
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare([text], vocab=vocab, out=out, holdout=0.2, progress=False)
    return out


def ids_of(folder):
    return [tuple(ids.tolist()) for ids in Corpus(folder)]


def test_files_of_a_corpus(whole):
    shards = [f"shard-{group:06}-000.{kind}" for group in range(GROUPS) for kind in ("tokens", "lines")]
    names = [*shards, "manifest.json", "vocab.txt"]
    assert sorted(contents(whole)) == sorted([*names, "inputs.json", *(f"holdout/{name}" for name in names)])
    assert verify(whole)


def test_small_files_give_the_bytes_of_older_releases(vocab, tmp_path):
    """The values come from the release before parts, lanes and leases."""
    (tmp_path / "in").mkdir()
    for number in range(3):
        documents = "\n\n".join(f"w{number} w{n}\nw{n % 7}" for n in range(100))
        (tmp_path / f"in/{number}.txt").write_text(documents + PADDING)
    (tmp_path / "in/z.jsonl").write_text("".join(json.dumps({"text": f"w{n}"}) + "\n" for n in range(50)))
    prepare([tmp_path / "in"], vocab=vocab, out=tmp_path / "out", holdout=0.1, progress=False)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["job"] == "11d098fd67fc233620188a088eed0f01"
    assert manifest["content_hash"] == "05584862e51ee2bd984080ba09292a5b"
    assert manifest["checksum"] == "2eb678879adb7c583a92e6f77c28ff09"
    (tmp_path / "a.md").write_text("w1 w2\n\nw3")
    prepare([tmp_path / "a.md"], vocab=vocab, out=tmp_path / "txt", format="txt", progress=False)  # once "text"
    assert json.loads((tmp_path / "txt/manifest.json").read_text())["job"] == "45383c6a79cdda93ea7cf2a999f09bd0"


def test_unfinished_work_of_an_older_release_is_resumed(vocab, tmp_path):
    """Left on another machine by a killed process of the release before text versions."""
    path = tmp_path / "a.txt"
    out = tmp_path / "out"
    path.write_text("\n\n".join(f"w{n} w{n % 7}" for n in range(60)))
    os.utime(path, ns=(1_700_000_000_000_000_000,) * 2)
    with zipfile.ZipFile(Path(__file__).parents[1] / "golden/unfinished.zip") as unfinished:
        unfinished.extractall(out)
    finished = {file: file.stat().st_ino for file in out.rglob("shard-*")}

    def run(out):
        arguments = {"files": [str(path)], "text_fields": ["text"], "holdout": 0.1, "_part_bytes": 300}
        return _data.prepare(_data.Tokenizer(str(vocab)), str(out), **arguments)

    assert run(out)["content_hash"] == run(tmp_path / "whole")["content_hash"]
    assert contents(out) == contents(tmp_path / "whole")
    assert finished and all(file.stat().st_ino == inode for file, inode in finished.items())  # not written again


def test_partitions_share_the_parts_of_a_huge_file(vocab, tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(f"w{n}" for n in range(500)))

    def parts(out, part_bytes=300, **options):
        arguments = {"files": [str(tmp_path / "a.txt")], "text_fields": ["text"], "_part_bytes": part_bytes, **options}
        return _data.prepare(_data.Tokenizer(str(vocab)), str(tmp_path / out), **arguments)

    reports = [parts("out", partition=(i, 3)) for i in (1, 2, 3)]
    assert [report["complete"] for report in reports] == [False, False, True]
    assert reports[-1]["content_hash"] == parts("whole")["content_hash"] and reports[-1]["num_input_groups"] > 3
    parts("undivided", None)
    assert ids_of(tmp_path / "out") == ids_of(tmp_path / "undivided")


def test_partitions_of_several_machines_form_one_corpus(text, vocab, whole, tmp_path):
    common = {"vocab": vocab, "holdout": 0.2, "progress": False}
    for index in (3, 1, 2):
        report = prepare([text], out=tmp_path / str(index), partition=f"{index}/3", **common)
        assert not report.complete
        shutil.copytree(tmp_path / str(index), tmp_path / "all", dirs_exist_ok=True)
    assert prepare([text], out=tmp_path / "all", **common).content_hash == Corpus(whole).content_hash
    assert contents(tmp_path / "all") == contents(whole)


def test_summary_has_kept_and_dropped_tokens_of_each_packing(text, vocab, tmp_path):
    report = prepare([text], vocab=vocab, out=tmp_path / "out")
    total = report.num_tokens
    lines = str(report).splitlines()
    assert f"packing best-fit: in rows of 128 keeps {total:,} tokens and drops 0, fill 9" in lines[-2]
    # Every document is one line, truncated to a row of at most two segments.
    dropped = total - sum(min(len(ids), 512 - 2) for ids in Corpus(tmp_path / "out"))
    line = re.search(r"packing examples:.*in rows of 512 keeps ([\d,]+) tokens and drops ([\d,]+) \(", lines[-1])
    kept_tokens, really_dropped = (int(number.replace(",", "")) for number in line.groups())
    assert kept_tokens + really_dropped == total and really_dropped >= dropped > 0


def test_missing_partitions_are_counted(text, vocab, tmp_path):
    report = prepare([text], vocab=vocab, out=tmp_path / "out", partition="2/4")
    assert (report.complete, report.missing_input_groups, report.num_input_groups) == (False, 4, GROUPS)
    assert report.unknown_share is None and report.tokens_per_word is None
    assert "4 of 5 input groups are still missing" in str(report)
    with pytest.raises(FileNotFoundError, match="unfinished"):
        Corpus(tmp_path / "out")


# The kernel kills this process (SIGXFSZ, which Python ignores by default) when a file exceeds the limit.
KILLED = f"""{IMPORT}
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), resource.RLIM_INFINITY))
prepare([sys.argv[1]], vocab=sys.argv[2], out=sys.argv[3], threads=1, progress=False)
"""


@pytest.mark.slow
def test_run_killed_in_any_group_resumes(vocab, tmp_path):
    """Each input group has more tokens than the previous ones, so a file size limit kills the run in a given group."""
    text = tmp_path / "text"
    out = tmp_path / "out"
    text.mkdir()
    for group in range(GROUPS):
        (text / f"{group}.txt").write_text("\n\n".join(["w1 w2 w3 " * 3000] * (group + 1)) + PADDING)
    prepare([text], vocab=vocab, out=tmp_path / "undisturbed", progress=False)
    sizes = [(tmp_path / f"undisturbed/shard-{group:06}-000.tokens").stat().st_size for group in range(GROUPS)]
    inodes = {}
    for group, limit in enumerate([size - 1 for size in sizes]):
        killed = subprocess.run([sys.executable, "-c", KILLED, text, vocab, out, str(limit)], stderr=subprocess.PIPE)
        assert killed.returncode == -signal.SIGXFSZ, killed.stderr
        finished = [path.name for path in sorted((out / "parts").glob("input-group-*.json"))]
        assert finished == [f"input-group-{number:06}.json" for number in range(group)]
        assert len(list(out.glob(".tmp-*.tokens"))) == 1
        current = {path: path.stat().st_ino for path in out.glob("shard-*")}
        assert current.items() >= inodes.items()  # finished shards are not written again
        inodes = current
    prepare([text], vocab=vocab, out=out, progress=False)
    assert contents(out) == contents(tmp_path / "undisturbed")


@pytest.mark.process
def test_ctrl_c_interrupts_prepare(text, vocab, tmp_path):
    command = [sys.executable, "-c", RUN, text, vocab, tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        while not (tmp_path / "out/parts/job.json").exists():
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode != 0 and b"KeyboardInterrupt" in stderr
    assert not [name for name in contents(tmp_path / "out") if ".tmp-" in name]


def test_finished_corpus_is_unchanged(text, vocab, whole):
    before = contents(whole)
    report = prepare([text], vocab=vocab, out=whole, holdout=0.2, progress=False)
    assert report.already_complete and report.complete and report.content_hash == Corpus(whole).content_hash
    with pytest.raises(ValueError, match="holds a finished corpus of other inputs or options"):
        prepare([text], vocab=vocab, out=whole, holdout=0.3, progress=False)
    with pytest.raises(ValueError, match="holds a finished corpus"):
        prepare(iter(["w1"]), vocab=vocab, out=whole, progress=False)
    assert contents(whole) == before


def test_foreign_files_in_the_output_folder_are_unchanged(text, vocab, tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/vocab.txt").write_text("mine")
    prepare([text], vocab=vocab, out=tmp_path / "out", partition="1/2", progress=False)
    before = contents(tmp_path)
    for out, message in (
        ("foreign", r"contains other files \(vocab\.txt\)"),
        ("foreign/vocab.txt", "not a folder"),
        ("out", "holds unfinished work of other inputs or options"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare([text / "0.txt"], vocab=vocab, out=tmp_path / out, progress=False)
    assert contents(tmp_path) == before
    (tmp_path / "a.jsonl").write_text('{"body": "w1"}')
    arguments = {"vocab": vocab, "out": tmp_path / "new", "progress": False}
    with pytest.raises(ValueError, match="available: body"):
        prepare([tmp_path / "a.jsonl"], **arguments)
    assert prepare([tmp_path / "a.jsonl"], text="body", **arguments).complete  # a wrong option leaves nothing


WAITING = f"""{IMPORT}
def documents():
    yield "w1"
    print("reading", flush=True)
    sys.stdin.read()

prepare(documents(), vocab=sys.argv[1], out=sys.argv[2], progress=False)
"""


@pytest.mark.process
def test_folder_is_locked_by_a_live_run_and_not_by_a_killed_one(vocab, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-c", WAITING, vocab, out]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        (lock,) = out.glob(".lock-all.*")
        taken = rf"another prepare is running in this folder \(process {process.pid} on {socket.gethostname()}\)"
        with pytest.raises(ValueError, match=taken):
            prepare(iter(["w2"]), vocab=vocab, out=out, progress=False)
        process.kill()
    assert lock.exists()
    assert prepare(iter(["w2"]), vocab=vocab, out=out, progress=False).complete
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


def test_validation_set_is_disjoint_and_complete(text, vocab, whole, tmp_path):
    prepare([text], vocab=vocab, out=tmp_path / "out", progress=False)
    everything = ids_of(tmp_path / "out")
    train = ids_of(whole)
    validation = ids_of(Corpus(whole).holdout)
    assert sorted(train + validation) == sorted(everything)
    assert 0.1 < len(validation) / len(everything) < 0.3
    in_order = iter(everything)
    assert all(ids in in_order for ids in train)  # document order is preserved
    assert Corpus(whole).content_hash != Corpus(whole / "holdout").content_hash


def test_last_document_of_a_small_corpus_is_for_validation(vocab, tmp_path):
    documents = iter(["w1", "w2 w2\nw3", "w4\n\nw5"])
    report = prepare(documents, vocab=vocab, out=tmp_path / "a", holdout=1e-9, progress=False)
    assert (report.num_documents, report.holdout_documents) == (2, 1)
    assert [len(ids) for ids in Corpus(tmp_path / "a")] == [1, 3]
    assert ids_of(tmp_path / "a/holdout") == [(5 + 4, 5 + 5)]
    assert verify(tmp_path / "a")
    report = prepare(iter(["w1"]), vocab=vocab, out=tmp_path / "b", holdout=0.001, progress=False)
    assert report.holdout_documents == 0 and Corpus(tmp_path / "b").holdout is None
    with pytest.raises(ValueError, match="validation set took every document"):
        prepare(iter(["w1", "w2"]), vocab=vocab, out=tmp_path / "c", holdout=1 - 1e-9, progress=False)


def test_empty_corpus_is_an_error(vocab, tmp_path):
    (tmp_path / "a.txt").write_text(" \n\n\t\n")
    for inputs in ([tmp_path / "a.txt"], iter([]), iter(["", "\n"])):
        with pytest.raises(ValueError, match="the corpus is empty"):
            prepare(inputs, vocab=vocab, out=tmp_path / "out", progress=False)
        assert not (tmp_path / "out").exists()


LIMITED = f"""{IMPORT}
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), resource.RLIM_INFINITY))
try:
    prepare([sys.argv[1]], vocab=sys.argv[2], out=sys.argv[3], progress=False)
except OSError as error:
    sys.exit(f"said: {{error}}")
"""


@pytest.mark.process
@pytest.mark.parametrize("limit", [40_000, pytest.param(10, marks=pytest.mark.slow)])
def test_full_disk_leaves_no_file_that_looks_complete(text, vocab, tmp_path, limit):
    out = tmp_path / "out"
    command = [sys.executable, "-c", LIMITED, text, vocab, out]
    done = subprocess.run([*command, str(limit)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("said: "), done.stderr
    assert "free some space and run the same command again" in done.stderr and "\n" not in done.stderr.strip()
    assert not (out / "manifest.json").exists()
    assert not [name for name in contents(out) if ".tmp-" in name]
    subprocess.run([*command, str(1 << 30)], check=True)
    prepare([text], vocab=vocab, out=tmp_path / "undisturbed", progress=False)
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_documents_from_python(vocab, tmp_path):
    prepare((f"w{n} w{n}" for n in range(100)), vocab=Tokenizer(vocab), out=tmp_path / "a", progress=False)
    assert ids_of(tmp_path / "a") == [(5 + n, 5 + n) for n in range(100)]
    prepare(["w1 w2", "w3"], vocab=vocab, out=tmp_path / "b", kind="documents", progress=False)
    assert len(Corpus(tmp_path / "b")) == 2

    def broken():
        yield "w1"
        raise RuntimeError("from the generator")

    with pytest.raises(RuntimeError, match="from the generator"):
        prepare(broken(), vocab=vocab, out=tmp_path / "c", progress=False)
    with pytest.raises(TypeError):
        prepare(iter([b"bytes"]), vocab=vocab, out=tmp_path / "c", progress=False)
    assert prepare(iter(["w1"]), vocab=vocab, out=tmp_path / "c", progress=False).complete


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"holdout": float("nan")}, "holdout = NaN"),
        ({"partition": "0/3"}, "partition = '0/3': must be I/N"),
        ({"documents": "page"}, 'documents = "page": must be "blank-line", "file" or "line"'),
        ({"threads": -1}, "threads = -1: must be at least 0"),
        ({"text": " "}, "no text field"),
        ({"kind": "dirs"}, "kind = 'dirs': must be one of"),
    ],
)
def test_options_out_of_range(text, vocab, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        prepare([text], vocab=vocab, out=tmp_path / "out", progress=False, **options)
    assert not (tmp_path / "out").exists()


def test_same_text_gives_same_vocabulary(tmp_path):
    words = ["Tokens", "tokenise", "ising", "shards", "sharding", "masked", "unmasked", "électra"]
    text = " ".join(words[(n * n + n // 7) % len(words)] for n in range(4_000))
    for number in range(4):
        ef.vocab(iter([text] * 9), out=tmp_path / f"{number}/vocab.txt", size=120, progress=False)
    (vocab,) = {(tmp_path / f"{number}/vocab.txt").read_text() for number in range(4)}
    assert vocab.startswith("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nc") and "masked" in vocab.splitlines()


def test_training_a_vocabulary_needs_words(tmp_path):
    with pytest.raises(ValueError, match="no words"):
        ef.vocab(iter(["\n"]), out=tmp_path / "vocab.txt", size=100, progress=False)
    with pytest.raises(ValueError, match=r"size .* = 7: must be at least"):
        ef.vocab(iter(["words"]), out=tmp_path / "vocab.txt", size=7, progress=False)
    for coverage in (0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="character_coverage .* above 0 and at most 1"):
            ef.vocab(iter(["words"]), out=tmp_path / "vocab.txt", character_coverage=coverage, progress=False)
    # Chinese characters never continue a word: 5 + 40 entries. Korean ones can: 5 + 40 + 39.
    for first, joined, needed in [(0x4E00, "", 45), (0xAC00, "", 84), (0xAC00, " ", 45)]:
        text = joined.join(map(chr, range(first, first + 40)))
        with pytest.raises(ValueError, match=rf"size \(--size\) = {needed - 1}: must be at least {needed}"):
            ef.vocab(iter([text]), out=tmp_path / "vocab.txt", size=needed - 1, progress=False)
        out = tmp_path / f"{first}{joined}/v.json"
        assert ef.vocab(iter([text]), out=out, size=needed, progress=False).num_entries == needed
    assert not (tmp_path / "vocab.txt").exists()


def test_character_coverage_selects_frequent_characters(tmp_path, capfd):
    """Counted by hand: of 1,000 characters, the frequent ones are 700 and 290; ASCII is always kept."""
    text = "一" * 700 + "二" * 290 + "三" * 5 + "四" * 4 + "z"
    for coverage, characters, line in [
        (1, "z一三二四", "characters: all 5 of the words counted"),
        (0.99, "z一二", "characters: 3 of the 5 in the words counted; the others (三 四) are 0.900% of the text"),
        (0.7, "z一", "characters: 2 of the 5 in the words counted; the others (二 三 四) are 29.900% of the text"),
    ]:
        ef.vocab(iter([text]), out=tmp_path / str(coverage) / "vocab.txt", character_coverage=coverage)
        entries = (tmp_path / str(coverage) / "vocab.txt").read_text(encoding="utf-8").split()
        assert "".join(entries[5:]) == characters
        assert capfd.readouterr().err.startswith(line)
    rare = "".join(map(chr, range(0x4E00, 0x4E00 + 1500)))  # each makes up more than 0.01 %, the default limit
    assert ef.vocab(iter([rare]), out=tmp_path / "rare/vocab.txt", progress=False).num_entries == 1505
