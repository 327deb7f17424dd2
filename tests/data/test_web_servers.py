"""Corpora at a web server that redirects, wants a password or never answers, and URLs that hold a secret."""

from __future__ import annotations

import base64
import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from in_process import run

import electra_fast as ef
from electra_fast.errors import InputError

PASSWORD = "Basic " + base64.b64encode(b"bob:SECRET").decode()


class Server(ThreadingHTTPServer):
    """Serves a corpus below paths whose first part says how."""

    daemon_threads = True

    def __init__(self, corpus: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.corpus, self.url = corpus, f"http://127.0.0.1:{self.server_port}"
        self.modified = "Tue, 01 Jan 2030 00:00:00 GMT"
        self.when_stalled: Callable[[], None] = lambda: None
        self.released = threading.Event()


class Handler(BaseHTTPRequestHandler):
    """Answers a request."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        """The file, or what its path asks for."""
        _, mode, name = self.path.split("/", 2)
        if mode == "elsewhere":
            return self.refuse(302, f"{self.server.url.replace('127.0.0.1', 'localhost')}/plain/{name}")
        if mode in ("circle", "here"):
            return self.refuse(302, f"/{'plain' if mode == 'here' else mode}/{name}")
        if mode == "locked" and self.headers["Authorization"] != PASSWORD:
            return self.refuse(401)
        if mode == "stalled" or (mode == "stalls" and name.endswith(".tokens")):
            self.server.when_stalled()
            self.server.released.wait()
        path = self.server.corpus / name
        if not path.is_file():
            return self.refuse(404)
        data, status, total = path.read_bytes(), 200, path.stat().st_size
        if "Range" in self.headers:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            data, status = data[first : last + 1], 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{total}")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", self.server.modified)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def refuse(self, status: int, location: str = "") -> None:
        """An answer without a body."""
        self.send_response(status)
        self.send_header("Content-Length", "0")
        if location:
            self.send_header("Location", location)
        self.end_headers()


@pytest.fixture
def web(tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("NO_PROXY", "*")
    server = Server(tiny_corpus)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


SECRETS = ["http://bob:SECRET@127.0.0.1:1/x", "https://127.0.0.1:1/x?sig=SECRET", "s3://KEY:SEC/RET@bucket/x"]
COMMANDS = {
    "inspect": ["inspect", "URL"],
    "verify": ["verify", "URL"],
    "prepare": ["prepare", "URL", "--vocab", "VOCAB", "--out", "OUT"],
    "prepare among others": ["prepare", "TEXT", "URL", "--vocab", "VOCAB", "--out", "OUT"],
    "prepare --out": ["prepare", "TEXT", "--vocab", "VOCAB", "--out", "URL"],
    "prepare --vocab": ["prepare", "TEXT", "--vocab", "URL", "--out", "OUT"],
    "vocab": ["vocab", "URL", "--out", "OUT"],
    "pretrain": ["pretrain", "--preset", "tiny", "--data", "URL", "--out", "OUT"],
    "a mixture": ["pretrain", "--preset", "tiny", "--data", "CORPUS:0.5", "--data", "URL:0.5", "--out", "OUT"],
    "evaluate": ["evaluate", "RUN", "--data", "URL"],
}


@pytest.mark.parametrize(
    ("command", "url"), [*((command, SECRETS[0]) for command in COMMANDS), *(("inspect", url) for url in SECRETS[1:])]
)
def test_a_secret_in_a_url_is_neither_shown_nor_stored(
    command: str, url: str, tiny_vocab: Path, tiny_corpus: Path, whole_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("the cat sees the dog\n")
    values = {"URL": url, "VOCAB": tiny_vocab, "CORPUS": tiny_corpus, "RUN": whole_run}
    values |= {"TEXT": tmp_path / "a.txt", "OUT": tmp_path / "out"}
    words = [str(values.get(word.split(":")[0], word)) + "".join(word.partition(":")[1:]) for word in COMMANDS[command]]
    done = run(*words)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("electra-fast: error: "), done.stderr
    assert "leave it out and" in done.stderr and "SEC" not in done.stderr.replace("AWS_SECRET_ACCESS_KEY", "")
    assert not any(b"SEC" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_password_is_read_from_netrc_and_sent_to_no_other_host(
    web: Server, tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"check the credentials and what they may read; .*\.netrc"):
        ef.Corpus(f"{web.url}/locked")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login bob password SECRET\n")
    assert ef.Corpus(f"{web.url}/locked").content_hash == ef.Corpus(tiny_corpus).content_hash
    monkeypatch.setenv("ELECTRA_FAST_REDIRECT_HOSTS", "localhost")
    with pytest.raises(InputError, match="the server redirects to http://localhost:"):
        ef.Corpus(f"{web.url}/elsewhere")


def test_redirects_stay_on_the_server(web: Server) -> None:
    assert ef.verify(f"{web.url}/here")["files"] > 0
    for mode, complaint in (("elsewhere", "redirects to http://localhost:"), ("circle", "redirects again and again")):
        with pytest.raises(InputError, match=f"{web.url}/{mode}/manifest.json: the server {complaint}"):
            ef.Corpus(f"{web.url}/{mode}")


def test_redirects_to_hosts_that_are_trusted(web: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELECTRA_FAST_REDIRECT_HOSTS", "example.org, localhost")
    assert ef.verify(f"{web.url}/elsewhere")["files"] > 0


CALLS: dict[str, Callable[[str, Path], object]] = {
    "inspect": lambda url, _: run("inspect", f"{url}/stalled"),
    "prepare": lambda url, vocab: run("prepare", f"{url}/stalled/a.txt", "--vocab", vocab, "--out", vocab.parent / "x"),
    "vocab": lambda url, vocab: run("vocab", f"{url}/stalled/a.txt", "--out", vocab.parent / "other.txt"),
    "a document": lambda url, _: ef.Corpus(f"{url}/stalls")[0],
    "coverage": lambda url, _: ef.Corpus(f"{url}/stalls").coverage(),
    "rows": lambda url, _: ef.BatchLoader(f"{url}/stalls", sequence_length=64, batch_size=8).num_rows,
    "a batch": lambda url, _: next(ef.BatchLoader(f"{url}/stalls", sequence_length=64, batch_size=8)),
}


@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_ends_waiting_for_a_store(call: str, web: Server, tiny_vocab: Path) -> None:
    interrupts = iter([lambda: os.kill(os.getpid(), signal.SIGINT)])
    web.when_stalled = lambda: next(interrupts, lambda: None)()
    # A stalled request is given up and sent again after 30 s: whatever takes that long has not been interrupted.
    deadline = threading.Timer(20, web.released.set)
    deadline.start()
    try:
        done = CALLS[call](web.url, tiny_vocab)
    except KeyboardInterrupt:
        pass
    else:
        assert isinstance(done, CompletedProcess) and done.returncode == 130, done
        assert done.stderr.splitlines()[-1].startswith("electra-fast: interrupted; ")
    deadline.cancel()
    assert not web.released.is_set()


def test_an_input_without_an_etag_is_known_by_its_time(web: Server, tiny_vocab: Path, tmp_path: Path) -> None:
    web.corpus = tmp_path
    (tmp_path / "a.txt").write_text("the class function\n" * 100)
    words = ["prepare", f"{web.url}/plain/a.txt", "--vocab", tiny_vocab, "--out", tmp_path / "out"]
    for _ in range(2):
        assert run(*words).returncode == 0
    done = run(*words, "--verify-inputs")
    assert done.returncode == 2 and "holds no hash of it, so --verify-inputs cannot compare it" in done.stderr
    web.modified = "Wed, 02 Jan 2030 00:00:00 GMT"
    done = run(*words)
    assert done.returncode == 2 and "a.txt: has changed since" in done.stderr
