"""Corpora on a web server that redirects, needs a password or never responds, and URLs with a secret."""

import base64
import contextlib
import itertools
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from subprocess import CompletedProcess

import pytest
from in_process import run

import electra_fast as ef
from electra_fast import _data
from electra_fast.errors import InputError

PASSWORD = "Basic " + base64.b64encode(b"bob:SECRET").decode()


class Server(ThreadingHTTPServer):
    """Serves a corpus; the first part of a path selects the behavior."""

    daemon_threads = True

    def __init__(self, corpus):
        super().__init__(("127.0.0.1", 0), Handler)
        self.corpus = corpus
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.modified = "Tue, 01 Jan 2030 00:00:00 GMT"
        self.released = threading.Event()
        # The process that gets Ctrl-C at a faulty request, the number of that request, and its time.
        self.interrupted = os.getpid()
        self.wanted = 0
        self.struck = 0.0
        self.is_sound = False

    @contextlib.contextmanager
    def sound(self):
        """A context without faults."""
        self.is_sound = True
        yield
        self.is_sound = False

    def strike(self):
        self.wanted -= 1
        while not self.interrupted:
            time.sleep(0.01)
        if self.wanted == 0:
            self.struck = time.monotonic()
            os.kill(self.interrupted, signal.SIGINT)

    def handle_error(self, *_):
        """Ignores clients that have disconnected."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_):
        pass

    def do_GET(self):
        """Sends the file, or the fault that its path selects."""
        mode, _, name = self.path[1:].partition("?")[0].partition("/")
        if self.path.partition("?")[2].startswith("uploads"):
            return self.answer(200, b"<R><Bucket>a</Bucket><Key>b</Key><UploadId>1</UploadId></R>")
        fault, _, of = mode.partition("-")
        if fault in FAULTS and name.endswith(of) and not self.server.is_sound:
            self.server.strike()
            return FAULTS[fault](self)
        if mode == "elsewhere":
            return self.refuse(302, f"{self.server.url.replace('127.0.0.1', 'localhost')}/plain/{name}")
        if mode in ("circle", "here"):
            return self.refuse(302, f"/{'plain' if mode == 'here' else mode}/{name}")
        if mode == "locked" and self.headers["Authorization"] != PASSWORD:
            return self.refuse(401)
        path = self.server.corpus / name
        if not path.is_file():
            return self.refuse(404)
        data = path.read_bytes()
        times = {"Last-Modified": self.server.modified}
        if "Range" not in self.headers:
            return self.answer(200, data, times)
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        return self.answer(206, data[first : last + 1], times | {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def trickle(self):
        """Sends a byte now and then, from the requested range if there is one."""
        if "Range" in self.headers:
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {self.headers['Range'].removeprefix('bytes=')}/1000000000")
        else:
            self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        while not self.server.released.wait(0.1):
            self.wfile.write(b" ")

    def refuse(self, status, location=""):
        self.answer(status, headers={"Location": location} if location else None)

    def answer(self, status, body=b"", headers=None):
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


FAULTS = {
    "silent": lambda handler: handler.server.released.wait(),
    "trickling": Handler.trickle,
    "busy": lambda handler: handler.refuse(503),
}


@pytest.fixture
def web(tiny_corpus, monkeypatch, tmp_path):
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
    "pretrain": ["pretrain", "URL", "--preset", "tiny", "--out", "OUT"],
    "a mixture": ["pretrain", "CORPUS:0.5", "URL:0.5", "--preset", "tiny", "--out", "OUT"],
    "evaluate": ["evaluate", "RUN", "URL"],
}


@pytest.mark.parametrize(
    ("command", "url"), [*((command, SECRETS[0]) for command in COMMANDS), *(("inspect", url) for url in SECRETS[1:])]
)
def test_secret_in_a_url_is_neither_shown_nor_stored(command, url, tiny_vocab, tiny_corpus, whole_run, tmp_path):
    (tmp_path / "a.txt").write_text("the cat sees the dog\n")
    values = {"URL": url, "VOCAB": tiny_vocab, "CORPUS": tiny_corpus, "RUN": whole_run}
    values |= {"TEXT": tmp_path / "a.txt", "OUT": tmp_path / "out"}
    words = [str(values.get(word.split(":")[0], word)) + "".join(word.partition(":")[1:]) for word in COMMANDS[command]]
    done = run(*words)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("electra-fast: error: "), done.stderr
    assert "remove it and" in done.stderr and "SEC" not in done.stderr.replace("AWS_SECRET_ACCESS_KEY", "")
    assert not any(b"SEC" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_password_from_netrc_is_sent_to_its_host_only(web, tiny_corpus, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"check the credentials and their read permission; .*\.netrc"):
        ef.Corpus(f"{web.url}/locked")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login bob password SECRET\n")
    assert ef.Corpus(f"{web.url}/locked").content_hash == ef.Corpus(tiny_corpus).content_hash
    monkeypatch.setenv("ELECTRA_FAST_REDIRECT_HOSTS", "localhost")
    with pytest.raises(InputError, match="the server redirects to another server, http://localhost:"):
        ef.Corpus(f"{web.url}/elsewhere")


def test_redirects_to_other_hosts_need_trust(web, monkeypatch):
    assert ef.verify(f"{web.url}/here")["files"] > 0
    message = "the server redirects to another server, http://localhost:"
    for mode, complaint in (("elsewhere", message), ("circle", "too many redirects")):
        with pytest.raises(InputError, match=f"{web.url}/{mode}/manifest.json: {complaint}"):
            ef.Corpus(f"{web.url}/{mode}")
    monkeypatch.setenv("ELECTRA_FAST_REDIRECT_HOSTS", "example.org, localhost")
    assert ef.verify(f"{web.url}/elsewhere")["files"] > 0


class Case:
    """A store with a fault, and the other arguments of calls."""

    def __init__(self, web, fault, vocab, tmp_path):
        self.web = web
        self.vocab = vocab
        self.tmp = tmp_path
        self.url = f"{web.url}/{fault}"
        self.s3 = f"s3://{fault}/x"
        self.late, self.late_lines, self.late_vocab = (f"{self.url}-{name}" for name in (".tokens", ".lines", ".txt"))
        self.text = tmp_path / "a.txt"
        self.large = tmp_path / "large"
        self.text.write_text("the cat sees the dog\n")
        with self.large.open("wb") as file:
            file.truncate(17 << 20)  # in parts

    def loader(self, url, **options):
        return ef.BatchLoader(url, sequence_length=64, batch_size=8, **options)

    def restored(self):
        loader = self.loader(str(self.web.corpus))
        next(loader)
        self.loader(self.late).restore(loader.state())

    def deleted(self):
        """Deletes a loader whose threads wait for the store."""
        loader = self.loader(self.late)._loader
        with contextlib.suppress(KeyboardInterrupt):
            next(loader)
            pytest.fail("the batch arrived")
        del loader
        raise KeyboardInterrupt

    def inherited(self):
        """Opens a corpus again in a forked child, which is the process to interrupt."""
        with self.web.sound():
            corpus = ef.Corpus(self.url)
        self.web.interrupted = 0
        child = os.fork()
        if not child:
            with contextlib.suppress(KeyboardInterrupt):
                os._exit(corpus.num_tokens > 0)
            os._exit(0)
        self.web.interrupted = child
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            raise KeyboardInterrupt

    def prepare(self, source, out):
        ef.prepare([source], vocab=self.vocab, out=out, progress=False)


CALLS = {
    "inspect": lambda case: run("inspect", case.url),
    "a corpus": lambda case: ef.Corpus(case.url),
    "a corpus in a child": Case.inherited,
    "a document": lambda case: ef.Corpus(case.late)[0],
    "counts": lambda case: ef.Corpus(case.late).token_counts(),
    "coverage": lambda case: ef.Corpus(case.late).coverage(),
    "its tokenizer": lambda case: ef.Tokenizer.of(ef.Corpus(case.late_vocab)),
    "verify": lambda case: ef.verify(case.late),
    "a loader": lambda case: case.loader(case.url),
    "rows": lambda case: case.loader(case.late).num_rows,
    "contents": lambda case: case.loader(case.late)._loader.contents(),
    "weights": lambda case: _data.mixture_weights([(case.url, None)]),
    "lanes": lambda case: _data.auto_lanes([case.url], 8),
    "a batch": lambda case: next(case.loader(case.late)),
    "a batch of lines": lambda case: next(case.loader(case.late_lines, packing="examples")),
    "a restored loader": Case.restored,
    "a deleted loader": Case.deleted,
    "prepare": lambda case: case.prepare(f"{case.url}/a.txt", case.tmp / "out"),
    "prepare to it": lambda case: case.prepare(case.text, case.s3),
    "a job": lambda case: _data.PrepareJob(_data.Tokenizer(str(case.vocab)), case.s3, files=[str(case.text)]),
    "vocab": lambda case: ef.vocab([f"{case.url}/a.txt"], out=case.tmp / "vocab.txt", progress=False),
    "a sample": lambda case: _data.text_sample(files=[f"{case.url}/a.txt"]),
    "upload": lambda case: _data.upload(str(case.text), case.s3),
    "upload in parts": lambda case: _data.upload(str(case.large), case.s3),
    "upload if absent": lambda case: _data.upload(str(case.text), case.s3, True),
    "download": lambda case: _data.download(case.s3, str(case.tmp / "b")),
    "list": lambda case: _data.list_objects(case.s3),
    "delete": lambda case: _data.delete_objects(case.s3, ["a"]),
}


# Each fault and each kind of request once; all combinations are slow tests.
QUICK = {("inspect", "silent"), ("a batch", "trickling"), ("prepare", "busy"), ("upload", "silent"), ("list", "silent")}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("call", "fault"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in itertools.product(CALLS, FAULTS)],
)
def test_ctrl_c_ends_waiting_for_a_store(call, fault, web, tiny_vocab, tmp_path, monkeypatch):
    """The store is a thread of this process, so it can interrupt the call only if the call has released the GIL."""
    keys = {"AWS_ENDPOINT_URL": web.url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "c"}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    web.wanted = 3 if fault == "busy" else 1
    # A call that takes longer was not interrupted.
    deadline = threading.Timer(20, web.released.set)
    deadline.start()
    try:
        done = CALLS[call](Case(web, fault, tiny_vocab, tmp_path))
    except KeyboardInterrupt:
        pass
    else:
        assert isinstance(done, CompletedProcess) and done.returncode == 130, done
        assert done.stderr.splitlines()[-1].startswith("electra-fast: interrupted; ")
    assert time.monotonic() - web.struck < 4
    deadline.cancel()


def test_input_without_an_etag_is_identified_by_its_time(web, tiny_vocab, tmp_path):
    web.corpus = tmp_path
    (tmp_path / "a.txt").write_text("the class function\n" * 100)
    words = ["prepare", f"{web.url}/plain/a.txt", "--vocab", tiny_vocab, "--out", tmp_path / "out"]
    for _ in range(2):
        assert run(*words).returncode == 0
    done = run(*words, "--verify-inputs")
    assert done.returncode == 2 and "has no hash of it, so --verify-inputs cannot compare it" in done.stderr
    web.modified = "Wed, 02 Jan 2030 00:00:00 GMT"
    done = run(*words)
    assert done.returncode == 2 and "a.txt: has changed since" in done.stderr
