"""Corpora and inputs in a local S3 server: the same as on disk, and one line for each error."""

import gzip
import json
import pickle
import threading
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import object_store
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import run

import electra_fast as ef
from electra_fast._data import list_objects, upload
from electra_fast.errors import InputError

WORDS = ["the", "of", "and", "cat", "dog", "sees", "a", "blue", "house", "runs", "##s", "##ing"]
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


@pytest.fixture(autouse=True)
def credentials(s3, monkeypatch, tmp_path):
    object_store.use(s3, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def text(seed, documents=40):
    generator = np.random.default_rng(seed)
    lines = [" ".join(generator.choice(WORDS[:-2], 12)) for _ in range(documents * 3)]
    return "\n\n".join("\n".join(lines[3 * number : 3 * number + 3]) for number in range(documents)) + "\n"


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("\n".join(VOCAB) + "\n")
    return path


@pytest.fixture(scope="module")
def local(vocab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text(text(0, 400))
    ef.prepare(folder / "a.txt", vocab=vocab, out=folder / "shards", holdout=0.05, progress=False)
    return folder / "shards"


@pytest.fixture(scope="module")
def remote(s3, local):
    return s3.upload(local, "corpora/shards")


def content(batch):
    """The columns of a batch, without the padding between them."""
    return pickle.dumps(pa.record_batch(batch).to_pydict())


def batches(corpus, **options):
    arguments = {"sequence_length": 64, "batch_size": 16, "epochs": 2, **options}
    return [content(batch) for batch in ef.BatchLoader(corpus, **arguments)]


@pytest.mark.process
def test_corpus_in_a_bucket_equals_the_local_corpus(local, remote):
    ours = ef.Corpus(local)
    theirs = ef.Corpus(remote)
    assert (len(ours), ours.num_tokens, ours.content_hash) == (len(theirs), theirs.num_tokens, theirs.content_hash)
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert np.array_equal(ours.token_counts(), theirs.token_counts())
    assert theirs.path == remote and theirs.holdout == f"{remote}/holdout"
    assert len(ef.Corpus(theirs.holdout)) == len(ef.Corpus(ours.holdout or ""))
    assert ef.Tokenizer.of(theirs).content_hash == ef.Tokenizer.of(ours).content_hash
    assert pickle.loads(pickle.dumps(theirs)).num_tokens == ours.num_tokens
    assert ef.verify(remote)["content_hash"] == ours.content_hash


@pytest.mark.slow
def test_batches_equal_local_batches_after_resume_and_pickle(local, remote):
    options = {"masking": "whole-word", "cut_at": "line"}
    assert batches(Path(remote), **options) == batches(local, **options)  # a Path merges the slashes of a URL
    expected = batches(local)
    loader = ef.BatchLoader(remote, sequence_length=64, batch_size=16, epochs=2)
    assert [content(next(loader)) for _ in range(3)] == expected[:3]
    assert [content(batch) for batch in pickle.loads(pickle.dumps(loader))] == expected[3:]


@pytest.mark.slow
def test_mixture_of_local_and_stored_corpora(vocab, local, remote, tmp_path):
    ef.prepare([text(7)], vocab=vocab, out=tmp_path / "other", kind="documents", progress=False)
    other = tmp_path / "other"
    assert batches({remote: 0.7, str(other): 0.3}) == batches({str(local): 0.7, str(other): 0.3})


PRETRAIN = ["pretrain", "--preset", "tiny", "--train.steps", "6", "--train.batch_size", "8", "--train.log_every", "1"]
PRETRAIN += ["--data.sequence_length", "64", "--train.checkpoint_every", "2", "--train.eval_every", "3"]
PRETRAIN += ["--train.precision", "fp32", "--train.matmul", "default"]


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line.get("grad_norm", 0)) for line in lines if "loss" in line]


@pytest.mark.slow
def test_training_and_evaluation_read_from_a_bucket(local, remote, tmp_path):
    for name, data in (("disk", str(local)), ("bucket", remote)):
        done = run(*PRETRAIN, data, "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "bucket") == losses(tmp_path / "disk")
    evaluated = run("evaluate", tmp_path / "bucket", remote, "--json")
    expected = run("evaluate", tmp_path / "disk", local, "--json")
    assert json.loads(evaluated.stdout) == json.loads(expected.stdout)


@pytest.fixture(scope="module")
def inputs(s3, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "deep").mkdir()
    (folder / "a.txt").write_text(text(1))
    (folder / "b.txt.gz").write_bytes(gzip.compress(text(2).encode()))
    (folder / "deep/c.json").write_text("".join(json.dumps({"text": t}) + "\n" for t in text(3).split("\n\n")))
    rows = text(4, 300).split("\n\n")
    pq.write_table(pa.table({"text": rows}), folder / "deep/d.parquet", row_group_size=50)
    with pa.ipc.new_file(folder / "deep/e.arrow", pa.schema([("text", pa.string())])) as writer:
        for start in range(0, len(rows), 100):
            writer.write_table(pa.table({"text": rows[start : start + 100]}))
    (folder / "deep/settings.json").write_text('{"size": 1}')
    (folder / "deep/_SUCCESS").touch()
    (folder / "notes.md").write_text("of another kind")
    (folder / ".hidden.txt").write_text("the cat")
    s3.upload(folder, "inputs")
    return folder


@pytest.mark.parametrize(
    "suffix", ["", *(pytest.param(suffix, marks=pytest.mark.slow) for suffix in ("/*/*.json", "/deep/d.parquet"))]
)
def test_inputs_and_outputs_can_be_in_a_bucket(suffix, inputs, vocab, tmp_path):
    expected = ef.prepare(f"{inputs}{suffix}", vocab=vocab, out=tmp_path / "disk", progress=False)
    url = f"s3://bucket/{tmp_path.name}"
    made = ef.prepare(f"s3://bucket/inputs{suffix}", vocab=vocab, out=url, progress=False)
    assert made.content_hash == expected.content_hash != "" and ef.verify(url)["content_hash"] == made.content_hash
    assert {name for name, _ in list_objects(url)} == {path.name for path in (tmp_path / "disk").iterdir()}


@pytest.mark.slow
def test_names_can_have_any_characters(s3, vocab, tmp_path):
    names = ["a#1.txt", "a%20b.txt", "a?.txt", "a b+ü.txt"]
    for name in names:
        s3.put(f"bucket/{tmp_path.name}/{urllib.parse.quote(name)}", text(1).encode())
    made = ef.prepare(f"s3://bucket/{tmp_path.name}", vocab=vocab, out=tmp_path / "out", progress=False)
    assert made.num_documents == 40 * len(names)
    s3.put("whole")
    s3.put("whole/a.txt", text(1).encode())
    assert ef.prepare("s3://whole", vocab=vocab, out=tmp_path / "whole", progress=False).num_documents == 40
    with pytest.raises((FileNotFoundError, InputError), match="s3://bucket/inputs/absent"):
        ef.prepare("s3://bucket/inputs/absent", vocab=vocab, out="somewhere", progress=False)
    with pytest.raises(InputError, match="write # in its name as %23"):
        ef.prepare("s3://bucket/inputs#1", vocab=vocab, out=tmp_path / "other", progress=False)


@pytest.mark.slow
def test_vocabulary_is_trained_from_a_bucket(inputs, tmp_path):
    for name, source in (("disk", inputs / "*.txt"), ("bucket", "s3://bucket/inputs/*.txt")):
        (tmp_path / name).mkdir()
        ef.vocab(source, out=tmp_path / name / "vocab.txt", size=40, progress=False)
    assert (tmp_path / "disk/vocab.txt").read_text() == (tmp_path / "bucket/vocab.txt").read_text()


@pytest.mark.slow
def test_object_changed_after_prepare_is_refused(s3, vocab, tmp_path):
    s3.put("bucket/edited/a.txt", text(5).encode())
    for _ in range(2):
        ef.prepare("s3://bucket/edited", vocab=vocab, out=tmp_path / "x", progress=False)
    s3.replace("edited/a.txt", text(5)[::-1])
    with pytest.raises(InputError, match=r"edited/a\.txt: has changed since"):
        ef.prepare("s3://bucket/edited", vocab=vocab, out=tmp_path / "x", progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["d.parquet", "a.txt"])
def test_failing_store_is_not_reported_as_a_damaged_file(s3, name, inputs, vocab, tmp_path):
    class ReplacingExecutor(ThreadPoolExecutor):
        def submit(self, function, /, *arguments, **named):
            s3.replace(f"failing/{name}", "x" * 100_000)
            return super().submit(function, *arguments, **named)

    source = next(inputs.rglob(name))
    s3.put(f"bucket/failing/{name}", source.read_bytes())
    with ReplacingExecutor(1) as executor, pytest.raises(InputError, match=f"{name}: replaced while") as error:
        ef.prepare(f"s3://bucket/failing/{name}", vocab=vocab, out=tmp_path / "x", executor=executor, progress=False)
    assert "download the file again" not in str(error.value)


@pytest.mark.slow
def test_store_without_conditions_is_always_refused(s3, vocab, tmp_path, monkeypatch):
    class Unconditional(BaseHTTPRequestHandler):
        """Forwards requests without their conditions."""

        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            """Prints nothing."""

        def handle_one_request(self):
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {k: v for k, v in self.headers.items() if k.lower() not in ("if-none-match", "host")}
            request = urllib.request.Request(s3.endpoint + self.path, data or None, headers, method=self.command)
            try:
                answer = urllib.request.urlopen(request, timeout=60)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                body = answer.read()
            self.send_response(answer.status)
            for name in ("ETag", "Last-Modified", "Content-Type"):
                if answer.headers[name]:
                    self.send_header(name, answer.headers[name])
            self.send_header("Content-Length", answer.headers["Content-Length"] or str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Unconditional)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    (tmp_path / "a.txt").write_text(text(1))
    url = f"s3://bucket/{tmp_path.name}"
    with ThreadPoolExecutor(1) as executor:
        for options in [{}, {}, {"executor": executor}, {"kind": "documents"}]:
            source = [text(1)] if "kind" in options else tmp_path / "a.txt"
            with pytest.raises(InputError, match="it must support conditional PUT"):
                ef.prepare(source, vocab=vocab, out=url, progress=False, **options)
            assert list_objects(url) == []
    with pytest.raises(InputError, match="it must support conditional PUT"):
        upload(str(tmp_path / "a.txt"), f"{url}/mirror.json", if_absent=True)
    # With files of an older release: the same refusal, before any work.
    s3.put(f"bucket/{tmp_path.name}/parts/job.json", b"{}")
    with pytest.raises(InputError, match="another prepare|conditional PUT"):
        ef.prepare(tmp_path / "a.txt", vocab=vocab, out=url, progress=False)
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_keys_with_empty_parts_do_not_hide_others(s3, vocab, tmp_path, capfd):
    for key in ("a.txt", "/b.txt", "deep//c.txt"):
        s3.put(f"bucket/{tmp_path.name}/{key}", text(1).encode())
    made = ef.prepare(f"s3://bucket/{tmp_path.name}", vocab=vocab, out=tmp_path / "out", progress=False)
    assert made.num_documents == 40
    assert "skipped 2 objects whose names have an empty part (//)" in capfd.readouterr().err


COMPLAINTS = {
    "s3://absent/x": "s3://absent/x/manifest.json: not found; check the URL, the bucket and the region",
    "s3://bucket/absent": "s3://bucket/absent/manifest.json: not found",
    "http://127.0.0.1:1/x": "retried for",
    "gs://bucket/x": "no credentials found; set GOOGLE_APPLICATION_CREDENTIALS",
    "az://container/x": "no credentials found; set AZURE_STORAGE_ACCOUNT_NAME",
}


@pytest.mark.parametrize(
    "url", [pytest.param(url, marks=[pytest.mark.slow] if "127" in url else []) for url in COMPLAINTS]
)
def test_bad_url_is_one_line(url, tmp_path):
    done = run("inspect", url)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert COMPLAINTS[url] in done.stderr
    with pytest.raises(InputError, match="ftp://host/x: unsupported URL; must begin with s3://"):
        ef.Corpus("ftp://host/x")


@pytest.mark.slow
def test_missing_credentials_are_one_line(remote, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    done = run("inspect", remote)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "no credentials found; set AWS_ACCESS_KEY_ID" in done.stderr
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("ELECTRA_FAST_RETRY_SECONDS", "soon")
    assert 'ELECTRA_FAST_RETRY_SECONDS = "soon"' in run("inspect", remote).stderr


@pytest.mark.slow
def test_small_cache_is_refused(remote, tmp_path):
    with pytest.raises(InputError, match=r"cache_bytes = 1000: must be at least \d+; 3 shuffle windows of s3"):
        ef.BatchLoader(remote, sequence_length=64, batch_size=8, cache_bytes=1000)
    done = run(*PRETRAIN, remote, "--out", tmp_path / "run", "--data.cache_bytes", "1000")
    assert done.returncode == 2 and "must be at least" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_counting_tokens_fills_the_loaders_cache(local, remote, tmp_path):
    cache = tmp_path / "shared"
    expected = ef.Corpus(local).token_counts()
    assert np.array_equal(ef.Corpus(remote).token_counts((str(cache), 2**30)), expected)
    fetched = {path.name: path.stat().st_ino for path in cache.rglob("0.*")}
    assert fetched and batches(remote, cache_dir=cache) == batches(local)
    assert {path.name: path.stat().st_ino for path in cache.rglob("0.*")} == fetched


@pytest.mark.slow
def test_caches_of_an_earlier_version_are_reported_once_and_kept(remote, tmp_path, capfd):
    old = tmp_path / "cache/electra-fast/corpora" / ("0" * 32)
    old.mkdir(parents=True)
    (old / "state").touch()
    (old / "lock").touch()
    for expected in (f"note: caches of an earlier version are no longer used; delete {old}\n", ""):
        ef.BatchLoader(remote, sequence_length=64, batch_size=8)
        assert capfd.readouterr().err == expected
    assert sorted(path.name for path in old.iterdir()) == ["lock", "state"]
