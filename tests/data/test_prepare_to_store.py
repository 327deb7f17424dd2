"""`prepare` that writes to a local S3 server: the same corpus as on disk, even after kills and failures."""

import json
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import object_store
import pytest
from in_process import run

import electra_fast as ef
from electra_fast import _data
from electra_fast._data import download, list_objects
from electra_fast.errors import InputError

pytestmark = pytest.mark.slow  # test_object_stores.py has a fast test

WORDS = ["the", "of", "and", "cat", "dog", "sees", "a", "blue", "house", "runs"]
# A run in parts of 20 kB, in a separate process: arguments are the vocabulary, the text, the URL and the partition.
PROGRAM = """
import ast, json, sys
from electra_fast import _data
vocab, text, out, partition = sys.argv[1:]
options = dict(files=[text], holdout=0.02, _part_bytes=20_000, threads=2, partition=ast.literal_eval(partition))
print(json.dumps(_data.prepare(_data.Tokenizer(vocab), out, **options)))
"""


@pytest.fixture(autouse=True)
def credentials(s3, monkeypatch, tmp_path):
    object_store.use(s3, monkeypatch)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    generator = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(" ".join(generator.choice(WORDS, 40)) for _ in range(4_000)))
    return path


@pytest.fixture(scope="module")
def local(vocab, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("local") / "shards"
    subprocess.run([sys.executable, "-c", PROGRAM, str(vocab), str(text), str(out), "None"], check=True)
    return out


def started(vocab, text, url, partition="None"):
    command = [sys.executable, "-c", PROGRAM, str(vocab), str(text), url, partition]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def report_of(process):
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return dict(json.loads(output))


def assert_same(url, local, tmp_path):
    """Asserts that the store has exactly the files of the local corpus, byte for byte."""
    expected = {str(path.relative_to(local)): path.stat().st_size for path in local.rglob("*") if path.is_file()}
    assert dict(list_objects(url)) == expected
    for name in expected:
        download(f"{url}/{name}", str(tmp_path / "file"))
        assert (tmp_path / "file").read_bytes() == (local / name).read_bytes(), name
    assert not list((tmp_path / "tmp").iterdir())


def test_stored_corpus_equals_the_local_corpus(vocab, text, local, tmp_path):
    url = "s3://bucket/same/shards"
    report = report_of(started(vocab, text, url))
    assert report["complete"] and report["content_hash"] == ef.Corpus(local).content_hash
    assert_same(url, local, tmp_path)
    assert ef.verify(url)["content_hash"] == report["content_hash"]
    assert report_of(started(vocab, text, url))["already_complete"]
    with pytest.raises(InputError, match="holds a finished corpus of other inputs or options"):
        ef.prepare(text, vocab=vocab, out=url, progress=False)


def test_command_writes_to_a_url(s3, vocab, tmp_path):
    """Also if the last document is the only one for validation, and if a record is skipped."""
    s3.put("bucket/few/")  # as consoles make a folder
    lines = [json.dumps({"text": f"the cat {number * 'sees '}"}) for number in range(4)]
    (tmp_path / "few.jsonl").write_text("\n".join([*lines, "{"]))
    options = ["--vocab", vocab, "--holdout", "0.0001", "--skip-bad-rows", "1"]
    for out in (tmp_path / "few", "s3://bucket/few"):
        done = run("prepare", tmp_path / "few.jsonl", *options, "--out", out)
        assert done.returncode == 0, done.stderr
        assert (
            f"{out}: 3 documents" in done.stdout
            and f"{out}/skipped.jsonl lists all of them\n  few.jsonl:5: " in done.stderr
        )
    assert_same("s3://bucket/few", tmp_path / "few", tmp_path)
    done = run("prepare", tmp_path / "few.jsonl", *options, "--out", "s3://bucket/few")
    assert done.returncode == 0 and "already complete" in done.stdout and "while parsing" in done.stderr


def test_output_is_not_read_as_input(vocab, text, tmp_path):
    url = f"s3://bucket/{tmp_path.name}"
    _data.upload(str(text), f"{url}/text.txt")
    made = [ef.prepare(url, vocab=vocab, out=f"{url}/shards", progress=False) for _ in range(2)]
    assert made[0].num_files == 1 and made[1].already_complete


def test_killed_run_is_resumed(vocab, text, local, tmp_path):
    url = "s3://bucket/killed"
    for finished in (3, 9):  # twice, so that the second one resumes, too
        process = started(vocab, text, url)
        while len(re.findall(r"parts/input-group-\d+\.json", " ".join(dict(list_objects(url))))) < finished:
            assert process.poll() is None, process.communicate()
        process.kill()
        process.communicate()
    names = [name for name, _ in list_objects(url)]
    assert "manifest.json" not in names and "parts/job.json" in names
    # A file that only a killed attempt has uploaded.
    (tmp_path / "stray").write_text("x")
    for name in ("shard-000001-900.tokens", "holdout/shard-000001-900.lines"):
        _data.upload(str(tmp_path / "stray"), f"{url}/{name}")
    assert report_of(started(vocab, text, url))["content_hash"] == ef.Corpus(local).content_hash
    assert_same(url, local, tmp_path)


FOREIGN = ["notes.txt", "shard-9.tokens", ".lock-mine", "below/shard-000009-000.tokens", "parts/notes"]
FOREIGN += ["parts/below/input-group-000009.json", "holdout/notes", "holdout/below/shard-000009-000.lines"]
STRAY = ["shard-000900-000.tokens", "parts/input-group-000900.counts", "parts/tokenizer.json"]


@pytest.mark.parametrize("holdout", [0.0, 0.02])
def test_only_own_files_of_finished_work_are_deleted(holdout, s3, vocab, text):
    """Names and states as in a local folder: see the tests of `clean_up` in Rust."""
    url = f"s3://bucket/strays-{holdout}"
    foreign = [*FOREIGN]
    stray = [*STRAY]
    # A user's validation corpus, or the remains of a killed attempt.
    (stray if holdout else foreign).extend(f"holdout/shard-000900-000.{kind}" for kind in ("lines", "tokens"))

    def prepare(url, **options):
        arguments = {"files": [str(text)], "holdout": holdout, "_part_bytes": 200_000, **options}
        return _data.prepare(_data.Tokenizer(str(vocab)), url, **arguments)

    def names(url):
        return {name for name, _ in list_objects(url)}

    prepare(url, partition=(1, 2))
    for name in (*foreign, *stray):
        s3.put(f"bucket/strays-{holdout}/{name}", b"x")
    before = names(url)
    with pytest.raises(ValueError, match="of other inputs or options"):
        prepare(url, holdout=0.5)
    assert names(url) == before
    assert prepare(url)["complete"]
    prepare(f"{url}-alone")
    assert names(url) == {*foreign, *names(f"{url}-alone")}
    s3.put(f"bucket/strays-{holdout}/{stray[0]}", b"x")
    before = names(url)
    assert prepare(url)["already_complete"] and names(url) == before


def test_partitions_need_no_shared_folder(vocab, text, local, tmp_path):
    url = "s3://bucket/partitions"
    first = report_of(started(vocab, text, url, "(1, 3)"))
    assert not first["complete"] and first["missing_input_groups"]
    reports = [report_of(process) for process in [started(vocab, text, url, f"({part}, 3)") for part in (2, 3)]]
    assert any(report["complete"] for report in reports)
    assert_same(url, local, tmp_path)


def test_duplicates_are_dropped_in_a_store(vocab, text, tmp_path):
    texts = [tmp_path / name for name in ("a.txt", "b.jsonl")]
    documents = text.read_text().split("\n\n")
    texts[0].write_text("\n\n".join(documents[:900]))
    texts[1].write_text("".join(json.dumps({"text": document}) + "\n" for document in documents[600:1_200]))
    options = {"vocab": vocab, "drop_duplicates": "documents", "progress": False}
    local = ef.prepare(texts, out=tmp_path / "local", **options)
    parts = [f"{part}/2" for part in (1, 2, 1, 2)]
    reports = [ef.prepare(texts, out="s3://bucket/dropped", partition=part, **options) for part in parts]
    assert local.dropped_documents == 300 and any(report.complete for report in reports)
    assert_same("s3://bucket/dropped", tmp_path / "local", tmp_path)


def test_two_simultaneous_runs_lose_nothing(vocab, text, local, tmp_path):
    url = "s3://bucket/twice"
    for report in map(report_of, [started(vocab, text, url) for _ in range(2)]):
        assert report["content_hash"] == ef.Corpus(local).content_hash
    assert_same(url, local, tmp_path)


def test_executor_writes_to_a_store(vocab, text, tmp_path):
    url = "s3://bucket/executor"
    files = [tmp_path / f"{number}.txt" for number in range(6)]
    for number, file in enumerate(files):
        file.write_text(text.read_text()[number * 20_000 : (number + 1) * 20_000] * 50)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        made = ef.prepare(files, vocab=vocab, out=url, holdout=0.02, executor=executor, progress=False)
    expected = ef.prepare(files, vocab=vocab, out=tmp_path / "out", holdout=0.02, progress=False)
    assert made.content_hash == expected.content_hash and made.num_input_groups > 1
    assert_same(url, tmp_path / "out", tmp_path)


def test_documents_are_written_and_two_streams_do_not_mix(vocab, tmp_path):
    url = "s3://bucket/documents"

    def fail():
        yield "the cat sees"
        with pytest.raises(InputError, match="another prepare of other inputs or options is running here"):
            ef.prepare(iter(["a dog"]), vocab=vocab, out=url, progress=False)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        ef.prepare(fail(), vocab=vocab, out=url, progress=False)
    made = ef.prepare(["the cat", "a dog\n"], vocab=vocab, out=url, progress=False)
    expected = ef.prepare(["the cat", "a dog\n"], vocab=vocab, out=tmp_path / "out", progress=False)
    assert made.content_hash == expected.content_hash
    assert dict(list_objects(url)).keys() == {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("other", ["manifest", "job"])
def test_files_of_another_run_are_not_overwritten(other, vocab, text, local, tmp_path):
    """A foreign manifest that appears during the run, or an earlier fingerprint."""
    url = f"s3://bucket/other-{other}"

    def write_manifest(*_):
        _data.upload(str(local / "manifest.json"), f"{url}/manifest.json", if_absent=True)

    if other == "job":
        process = started(vocab, text, url)
        while "parts/job.json" not in dict(list_objects(url)):
            assert process.poll() is None
        process.kill()
        process.communicate()
    message = {
        "manifest": "another program has written manifest.json in the meantime",
        "job": "another prepare of other",
    }
    with pytest.raises(InputError, match=message[other]):
        _data.prepare(_data.Tokenizer(str(vocab)), url, files=[str(text)], progress=write_manifest)
    if other == "manifest":
        download(f"{url}/manifest.json", str(tmp_path / "manifest"))
        assert (tmp_path / "manifest").read_bytes() == (local / "manifest.json").read_bytes()
    else:
        assert report_of(started(vocab, text, url))["complete"]


def test_unusable_output_is_one_line(s3, vocab, text, monkeypatch):
    s3.put("bucket/full/notes.txt", b"mine")
    for url, message in {
        "s3://absent/x": "not found; check the URL, the bucket and the region",
        "https://host/x": "https://host/x: web servers are read-only; pass an s3://, gs:// or az:// URL",
        "s3://bucket/full": "contains other files (notes.txt); choose an empty or new folder for --out",
        "s3://bucket/x?a=b": "remove it",
    }.items():
        done = run("prepare", text, "--vocab", vocab, "--out", url)
        assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    done = run("prepare", text, "--vocab", vocab, "--out", "s3://bucket/away")
    assert done.returncode == 2 and "retried for" in done.stderr.splitlines()[-1], done.stderr


def test_lost_store_ends_the_run_with_one_line(vocab, text, local, tmp_path, monkeypatch):
    url = "s3://bucket/away"
    with object_store.running() as other:
        object_store.use(other, monkeypatch)
        process = started(vocab, text, url)
        while not any(name.startswith("parts/input-group-") for name, _ in list_objects(url)):
            assert process.poll() is None
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and "retried for" in errors.splitlines()[-1]
    assert not list((tmp_path / "tmp").iterdir())


def test_full_disk_is_one_line_and_the_run_resumes(vocab, text, local, tmp_path):
    limited = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, resource.RLIM_INFINITY))\n"
    command = [sys.executable, "-c", limited + PROGRAM, str(vocab), str(text), "s3://bucket/full-disk", "None"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "free some space and run the same command again" in done.stderr.splitlines()[-1], done.stderr
    assert report_of(started(vocab, text, "s3://bucket/full-disk"))["complete"]
    assert_same("s3://bucket/full-disk", local, tmp_path)
