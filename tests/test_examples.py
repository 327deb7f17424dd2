"""The files of examples/ run: cluster scripts with fake cluster commands, the others on small data.

All are short, in the table of examples/README.md, and run here.
"""

import asyncio
import contextlib
import http.client
import io
import itertools
import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import optuna
import pytest
import yaml
from tiny_reading import write_conll
from tiny_task import BAD, GOOD, WORDS, sentences

import electra_fast as ef
from electra_fast import demonstration
from electra_fast.cli.parser import build_parser
from electra_fast.config.config import Config
from electra_fast.huggingface.onnx import write_onnx

pytestmark = [pytest.mark.slow, pytest.mark.process]
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FILES = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".ipynb", ".py", ".sh", ".yaml"))
# A fake command: appends its arguments and environment to a file of its name, and exits with the code in a variable.
FAKE = """#!{python}
import json, os, pathlib, sys
own = pathlib.Path(sys.argv[0])
with own.with_suffix(".jsonl").open("a") as file:
    print(json.dumps([sys.argv[1:], dict(os.environ)]), file=file)
sys.exit(int(os.environ.get("FAKE_" + own.name.upper(), "0")))
"""
PRETRAIN = ["pretrain", "/a corpus", "--out", "/a run", "--preset", "small", "--train.steps", "7"]
ARGUMENTS = ["/a corpus", "/a run", *PRETRAIN[4:]]


class Cluster:
    """A PATH with fake commands, and a record of their calls."""

    def __init__(self, folder, *commands):
        self._folder = folder
        for name in commands:
            path = folder / name
            path.write_text(FAKE.format(python=sys.executable))
            path.chmod(0o755)

    def run(self, *command, **environment):
        """The exit code of a command."""
        path = f"{self._folder}{os.pathsep}{os.environ['PATH']}"
        started = subprocess.run(command, env={**os.environ, "PATH": path, **environment}, capture_output=True)
        return started.returncode

    def arguments(self, name):
        """Returns the arguments of the last call, or None."""
        return self.calls(name)[-1][0] if self.calls(name) else None

    def environment(self, name):
        return self.calls(name)[-1][1]

    def calls(self, name):
        """Arguments and environments."""
        path = self._folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_command_line_is_valid(arguments):
    options = build_parser().parse(arguments)
    Config.preset(options.preset).override(options.overrides)
    assert options.command == "pretrain" and options.corpus and options.out


def torchrun_options(arguments):
    """Returns arguments as parsed by the installed torch's torchrun."""
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args(arguments)


# An srun near its time limit: its script receives a signal and ends it.
WARNED = """#!/bin/bash
trap 'exit {code}' TERM
kill -USR1 $PPID
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize("code, is_requeued", [(1, True), (0, False)])
def test_slurm_job_requeues_after_warning_unless_complete(tmp_path, code, is_requeued):
    cluster = Cluster(tmp_path, "srun", "scontrol")
    (tmp_path / "srun").write_text(WARNED.format(code=code))
    # A failed requeue does not hide how the run ended.
    assert cluster.run(str(EXAMPLES / "slurm.sh"), *ARGUMENTS, SLURM_JOB_ID="1234", FAKE_SCONTROL="9") == code
    assert cluster.arguments("scontrol") == (["requeue", "1234"] if is_requeued else None)


@pytest.mark.parametrize("code", [0, 1])
def test_slurm_job_starts_torchrun_per_node(tmp_path, code):
    cluster = Cluster(tmp_path, "srun", "scontrol")
    job = {"SLURM_JOB_ID": "81234", "SLURM_CPUS_PER_TASK": "8", "SLURM_NNODES": "2", "FAKE_SRUN": str(code)}
    assert cluster.run(str(EXAMPLES / "slurm.sh"), *ARGUMENTS, **job) == code
    assert cluster.arguments("scontrol") is None
    arguments = cluster.arguments("srun")
    start = arguments.index("torchrun")
    assert arguments[:start] == ["--kill-on-bad-exit=0", "--wait=60"]
    options = torchrun_options(arguments[start + 1 :])
    assert (options.nnodes, options.nproc_per_node, options.rdzv_backend) == ("2", "gpu", "c10d")
    assert options.rdzv_endpoint == f"{socket.gethostname()}:21234" and options.rdzv_id == "81234"
    assert options.module and options.training_script == "electra_fast" and options.training_script_args == PRETRAIN
    assert_command_line_is_valid(options.training_script_args)
    assert cluster.environment("srun")["SRUN_CPUS_PER_TASK"] == "8"


def test_sbatch_options_precede_first_command():
    """sbatch ignores options after the first command."""
    text = (EXAMPLES / "slurm.sh").read_text()
    options = re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE)
    assert {"--signal=B:USR1@120", "--requeue", "--ntasks-per-node=1", "--open-mode=append"} <= set(options)
    first_command = re.search(r"^[^#\n]", text, re.MULTILINE).start()
    assert text.rindex("#SBATCH") < first_command


NODES = {
    "one node": ({}, ("1", "gpu", "localhost:0")),
    "several": ({"NUM_NODES": "2", "RDZV_ENDPOINT": "node1:29400"}, ("2", "gpu", "node1:29400")),
    "three ranks": ({"RANKS_PER_NODE": "3"}, ("1", "3", "localhost:0")),
}


@pytest.mark.parametrize("settings, expected", NODES.values(), ids=NODES)
def test_torchrun_accepts_options(tmp_path, settings, expected):
    cluster = Cluster(tmp_path, "torchrun")
    assert cluster.run(str(EXAMPLES / "torchrun.sh"), *ARGUMENTS, FAKE_TORCHRUN="5", **settings) == 5
    options = torchrun_options(cluster.arguments("torchrun"))
    assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == expected
    assert (options.rdzv_backend, options.max_restarts) == ("c10d", 3)
    assert options.module and options.training_script == "electra_fast"
    assert options.training_script_args == PRETRAIN
    assert {"SIGTERM", "SIGINT", "SIGUSR1"} <= set(options.signals_to_handle.split(","))


def test_scripts_require_corpus_and_run(tmp_path):
    cluster = Cluster(tmp_path, "torchrun", "srun")
    for name, command in [("torchrun.sh", "torchrun"), ("slurm.sh", "srun")]:
        assert cluster.run(str(EXAMPLES / name), "/a corpus") != 0
        assert cluster.arguments(command) is None


@pytest.fixture
def kubernetes():
    """The objects of the file by kind."""
    objects = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))
    return {item["kind"]: item for item in objects}


@pytest.mark.parametrize("index, is_host", [("0", "1"), ("1", "0")])
def test_pod_starts_torchrun(kubernetes, tmp_path, index, is_host):
    job = kubernetes["Job"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    cluster = Cluster(tmp_path, "torchrun")
    start = [shutil.which(container["command"][0]), *container["command"][1:], *container["args"]]
    assert cluster.run(*start, JOB_COMPLETION_INDEX=index) == 0
    options = torchrun_options(cluster.arguments("torchrun"))
    assert options.nnodes == str(job["spec"]["completions"])
    assert options.rdzv_endpoint.startswith(f"{job['metadata']['name']}-0.{kubernetes['Service']['metadata']['name']}:")
    assert (options.rdzv_backend, options.rdzv_conf, options.max_restarts) == ("c10d", f"is_host={is_host}", 3)
    assert options.module and options.training_script == "electra_fast"
    assert_command_line_is_valid(options.training_script_args)


@pytest.fixture(scope="module")
def run_script(tmp_path_factory):
    """Returns a function that runs an example in this process, in a new folder, and returns its output."""

    def run(name, *arguments):
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
            patch.chdir(tmp_path_factory.mktemp(Path(name).stem))
            patch.setattr("electra_fast.finetuning.config.MIN_STEPS", 20)  # quality does not matter here
            patch.setattr(sys, "argv", [name, *map(str, arguments)])
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return output.getvalue()

    return run


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    """A table of texts with labels."""
    path = tmp_path_factory.mktemp("labeled") / "labeled.csv"
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in sentences(60)))
    return path


@pytest.fixture(scope="module")
def own_language(tmp_path_factory, run_script, tiny_text, labeled):
    """The folder that own_language.py writes, and its output."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "texts.txt").write_text("\n\n".join(tiny_text))
    return folder / "work", run_script("own_language.py", folder / "texts.txt", labeled, folder / "work", "tiny", 8)


def cells_of(path):
    """The code of a notebook, by cell."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_notebook_runs(tmp_path, monkeypatch):
    config = demonstration.demo_config().override(steps=20)
    monkeypatch.setattr(demonstration, "demo_config", lambda: config)
    monkeypatch.setattr("electra_fast.finetuning.config.MIN_STEPS", 20)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for cell in cells_of(EXAMPLES / "tour.ipynb"):
        exec(cell, names)
    assert names["vectors"].shape == (len(names["texts"]), 64)
    assert names["results"]["classification"].median > 0 and len(names["classifier"].labels) == 3


def test_own_language_example(own_language):
    folder, printed = own_language
    assert re.search(r"AUC of 0\.\d+ .*\n.*accuracy: [01]\.\d+; of the most frequent label: 0\.\d+", printed), printed
    assert 'language: ["hu"]' in (folder / "model/encoder/README.md").read_text()
    assert json.loads((folder / "tasks/results.json").read_text())["classification"]["runs"][2]


def test_name_tagger_example(run_script, tmp_path, own_language):
    folder = own_language[0]
    files = write_conll(tmp_path)
    arguments = [folder / "run", files / "train.conll", files / "dev.conll", tmp_path / "names"]
    printed = run_script("named_entities.py", *arguments, "object class and file", "the module")
    head, *spans = printed.splitlines()
    assert re.fullmatch(r"f1 of entities in .*dev.conll: [01]\.\d+", head)
    assert all(re.fullmatch(r"(PER|LOC)\t[a-z ]+\t\d+-\d+\t[01]\.\d\d", span) for span in spans), spans
    assert run_script("named_entities.py", *arguments, "the module").startswith(head)  # without another training


def test_tuning_example_resumes(run_script, tmp_path, own_language, labeled):
    for num_trials in (1, 2, 2):
        printed = run_script("tune.py", own_language[0] / "run", labeled, tmp_path / "tuning", num_trials)
        study = optuna.load_study(study_name="finetune", storage=f"sqlite:///{tmp_path / 'tuning/study.db'}")
        assert len(study.trials) == num_trials
        assert printed == f"best of {num_trials} trials: {study.best_value:.3f}, {study.best_params}\n"
    best = json.loads((tmp_path / f"tuning/trial-{study.best_trial.number}/results.json").read_text())
    assert best["classification"]["median"] == study.best_value and len(best["classification"]["runs"]) == 3


def test_ticket_routing_example(run_script, tmp_path, own_language, monkeypatch):
    (tmp_path / "tickets.csv").write_text(
        "subject,body,queue\n"
        + "".join(f"about {i % 7},{text},q{label}\n" for i, (text, label) in enumerate(sentences(60)))
    )
    work = tmp_path / "work"
    printed = run_script("tickets.py", "train", own_language[0] / "run", tmp_path / "tickets.csv", work)
    files = list(work.glob("folds/classification/*/seed-0/predictions.dev.jsonl"))
    answers = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(files) == 5 and len(answers) == 60
    for threshold, routed, right in re.findall(r"^ +([\d.]+) +([\d.]+)% +([\d.]+)%$", printed, re.MULTILINE):
        hits = [a["gold"] == a["label"] for a in answers if a["scores"][a["label"]] >= float(threshold)]
        assert float(routed) == pytest.approx(100 * len(hits) / 60, abs=0.051)
        assert float(right) == pytest.approx(100 * np.mean(hits or [0]), abs=0.051)
    assert printed.count("%") == 16 and Path(printed.split()[-1]).is_file()

    model = ef.load(work / "final/classification/seed-0/model")
    assert "temperature" in (work / "final/results.json").read_text()
    new = [{"id": i, "subject": f"a {i}", "body": text} for i, (text, _) in enumerate(sentences(5, seed=3))]
    expected = model.predict([(row["subject"], row["body"]) for row in new])
    sure = [answer["scores"][answer["label"]] for answer in expected]

    def arriving():
        for number, ticket in enumerate(new):
            assert sys.stdout.getvalue().count("\n") == number  # the tickets before are answered
            yield json.dumps(ticket)

    monkeypatch.setattr(sys, "stdin", arriving())
    printed = run_script("tickets.py", "route", work, sorted(sure)[2])
    assert [json.loads(line) for line in printed.splitlines()] == [
        ticket | {"queue": answer["label"] if probability >= sorted(sure)[2] else None, "probability": probability}
        for ticket, answer, probability in zip(new, expected, sure, strict=True)
    ]


def test_ocr_error_example_reaches_precision(run_script, tmp_path, own_language, tiny_text):
    """A fifth of the words is wrong, and two thirds of these are unknown."""
    rng = random.Random(0)
    right = re.findall(r"[a-z]+", " ".join(tiny_text).lower())[:600]
    kinds = [rng.choices(["", "qx", "class"], [0.8, 0.13, 0.07])[0] for _ in right]
    scanned = [f"{word}qx" if kind == "qx" else kind or word for word, kind in zip(right, kinds, strict=True)]
    is_wrong = np.array(scanned) != right
    for name, words in {"scanned": scanned, "right": right, "other": [*right[300:400], "unheard"]}.items():
        (tmp_path / name).write_text(" ".join(words[:50]) + ".\n" + " ".join(words[50:]))
    detector = ef.load(own_language[0] / "run")

    def probabilities(name):
        [answer] = detector.detect([(tmp_path / name).read_text()])
        words = [word for word in answer["words"] if word["text"] != "."]
        return np.array([word["probability"] if word["text"] in right else 1 for word in words])

    predicted = probabilities("scanned")

    def scores(threshold, part):
        hits = (predicted[part] >= threshold) & is_wrong[part]
        return [hits.sum() / (predicted[part] >= threshold).sum(), hits.sum() / is_wrong[part].sum()]

    first = slice(300)
    second = slice(300, None)
    reached = {number: scores(number, first)[0] for number in predicted[first]}
    wanted = np.quantile(list(reached.values()), 0.9)
    threshold = min(number for number, precision in reached.items() if precision >= wanted)
    arguments = [own_language[0] / "run", *(tmp_path / name for name in ("right", "scanned", "right"))]
    *head, marked, rest = run_script("ocr_errors.py", *arguments, wanted, tmp_path / "other").splitlines()
    printed = [float(number) for number in re.findall(r"\d\.\d+", " ".join(head))]
    expected = [is_wrong[second].mean(), *scores(1, second), threshold, *scores(threshold, second)]
    assert printed == pytest.approx(expected, abs=0.0051) and len(head) == 3
    assert re.sub(r"[][]", "", f"{marked}\n{rest}") == (tmp_path / "other").read_text()
    marked = [word.startswith("[") for word in f"{marked} {rest}".split()]
    assert marked == (probabilities("other") >= threshold).tolist() and marked[-1] and 1 < sum(marked) < 101
    with pytest.raises(SystemExit, match="no threshold reaches a precision of 1.1"):
        run_script("ocr_errors.py", *arguments, 1.1)


@pytest.fixture
def offline(monkeypatch):
    """Libraries do not ask the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


# torch's, on a machine without a GPU
PIN_MEMORY = "ignore:'pin_memory' argument is set as true but no accelerator"


@pytest.mark.filterwarnings(PIN_MEMORY)
def test_search_example(run_script, tmp_path, own_language, offline):
    rng = random.Random(0)
    for number, topic in enumerate(itertools.combinations(WORDS, 2)):
        texts = [" ".join(rng.choices([*topic, *others], k=16)) for others in (BAD[:2], GOOD[:2], ["more", "again"])]
        page = tmp_path / "pages" / f"{number}" / "page.md"
        page.parent.mkdir(parents=True)
        page.write_text(f"# {' '.join(topic)}\n\nToo short.\n\n{texts[0]}\n## Other\n{texts[1]}\n\n{texts[2]}\n")
    arguments = [own_language[0] / "model/encoder", tmp_path / "pages", tmp_path / "tuned", "the class"]
    printed = run_script("search.py", *arguments)
    before, after = re.search(r"ten of 36: (.*)%\n[^%]*after tuning: (.*)%", printed, re.DOTALL).groups()
    first, second, third = printed.splitlines()[-3:]
    assert float(after) > float(before)
    assert all(re.match(r"-?\d\.\d\d  \w+ ", hit) for hit in (first, second, third))
    assert run_script("search.py", *arguments).splitlines() == [first, second, third]  # not tuned again


@pytest.mark.filterwarnings(PIN_MEMORY)
def test_reranking_example(run_script, tmp_path, own_language, offline):
    rng = random.Random(0)
    passages = [" ".join(rng.choices(WORDS, k=15)) for _ in range(12)]
    questions = [(" ".join(rng.sample(passage.split(), 4)), passage) for passage in passages for _ in range(2)]
    (tmp_path / "questions.tsv").write_text("".join(f"{question}\t{passage}\n" for question, passage in questions))
    arguments = [own_language[0] / "model/encoder", tmp_path / "questions.tsv", tmp_path / "reranker", "the class"]
    *_, measured, first, second, third = run_script("rerank.py", *arguments).splitlines()
    assert re.fullmatch(r"mean reciprocal rank: search [01]\.\d{3} rerank [01]\.\d{3}", measured)
    assert len({first, second, third} & set(passages)) == 3
    assert run_script("rerank.py", *arguments).splitlines() == [first, second, third]


# Runs serve.py where torch cannot be imported.
WITHOUT_TORCH = """
import runpy, sys
sys.modules |= dict.fromkeys(("torch", "transformers"))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Runs it with a slow model of questions, which refuses the text "bad" and checks the size of batches.
WITH_A_SLOW_MODEL = """
import runpy, sys, time, types
import electra_fast as ef
def predict(examples):
    time.sleep(0.05)
    assert len(examples) <= 256, "too large a batch"
    if "bad" in examples:
        raise ef.InputError(f"example {examples.index('bad')} is bad")
    return [{"id": str(number), "answer": f"to {text}"} for number, text in enumerate(examples)]
ef.load = lambda folder: types.SimpleNamespace(kind="question-answering", labels=(), predict=predict)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Server:
    """A running serve.py."""

    def __init__(self, process):
        self.process = process
        self.log = []
        while not (address := re.search(r"http://localhost:(\d+)", self.log[-1] if self.log else "")):
            self.log.append(process.stderr.readline())
            assert self.log[-1], self.log
        self.port = int(address[1])

    def ask(self, *bodies, then=None):
        """Status, headers and JSON of requests that are all sent before the first answer is read."""
        return asyncio.run(self._ask(bodies, then))

    async def _ask(self, bodies, then):
        pipes = await asyncio.gather(*(asyncio.open_connection("localhost", self.port) for _ in bodies))
        for (_, writer), body in zip(pipes, bodies, strict=True):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            head = f"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
            writer.write(head.encode() + content)
        await asyncio.gather(*(writer.drain() for _, writer in pipes))
        between = await asyncio.to_thread(then) if then else None
        answers = [self._parsed(content) for content in await asyncio.gather(*(reader.read() for reader, _ in pipes))]
        for _, writer in pipes:
            writer.close()
            await writer.wait_closed()
        return (answers, between) if then else answers

    @staticmethod
    def _parsed(content):
        head, body = content.split(b"\r\n\r\n", 1)
        assert f"content-length: {len(body)}" in head.decode()
        is_json = b"application/json" in head
        return int(head.split()[1]), head.decode(), json.loads(body) if is_json else body.decode()

    def health(self):
        with contextlib.closing(http.client.HTTPConnection("localhost", self.port)) as connection:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            return answer.status, json.load(answer)


@pytest.fixture
def serve():
    """A function that starts serve.py on a folder."""
    with contextlib.ExitStack() as stack:

        def start(folder, *arguments, code=WITH_A_SLOW_MODEL):
            command = [sys.executable, "-c", code, EXAMPLES / "serve.py", folder, "localhost", "0", *arguments]
            process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return Server(process)

        yield start


@pytest.fixture(scope="module")
def classifier(own_language):
    return own_language[0] / "tasks/classification/seed-0/model"


def test_concurrent_requests_equal_predict(serve, classifier, tmp_path):
    """In ONNX, where torch cannot be imported."""
    folder = shutil.copytree(classifier, tmp_path / "onnx")
    write_onnx(folder, "logits")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text()) | {"electra_fast_onnx": {"precision": "fp32"}}
    (folder / "config.json").write_text(json.dumps(config))
    texts = [text for text, _ in sentences(400, seed=5)]
    requests = [texts[i % 400] if i % 4 == 0 else texts[i % 397 : i % 397 + i % 4] for i in range(1000)]
    expected = ef.load(classifier, precision="fp32").predict(texts)
    scores = {text: answer["scores"] for text, answer in zip(texts, expected, strict=True)}
    server = serve(folder, code=WITHOUT_TORCH)
    assert server.health() == (200, {"model": str(folder), "kind": "classification", "labels": ["0", "1"], "queue": 0})
    for request, (status, _, answers) in zip(requests, server.ask(*requests), strict=True):
        assert status == 200
        pairs = (
            zip([request], [answers], strict=True) if isinstance(request, str) else zip(request, answers, strict=True)
        )
        for text, answer in pairs:
            assert answer["scores"] == pytest.approx(scores[text], abs=2e-5)


def test_stopped_server_answers_accepted_requests(serve):
    server = serve("folder")
    requests = [[f"{i} {j}" for j in range(100)] for i in range(60)]

    def stop():
        while (queue := server.health()[1]["queue"]) < 50:
            pass
        server.process.send_signal(signal.SIGTERM)
        while server.health()[0] == 200:
            pass
        return queue, server.health()[0], server.ask("late")[0][:2]

    answers, (queue, health, (late, head)) = server.ask(*requests, then=stop)
    assert health == late == 503 and "retry-after: 1" in head
    answered = [
        (request, answer) for request, (status, _, answer) in zip(requests, answers, strict=True) if status == 200
    ]
    assert len(answered) >= queue and {status for status, *_ in answers} <= {200, 503}
    assert all(
        [item["answer"] for item in answer] == [f"to {text}" for text in request] for request, answer in answered
    )
    assert server.process.wait(timeout=60) == 0
    assert "Traceback" not in server.process.stderr.read()
    with pytest.raises(ConnectionRefusedError):
        server.ask("later")


def test_requests_beyond_queue_are_refused(serve):
    server = serve("folder", "20")
    answers = server.ask(*(["a"] * 100 for _ in range(200)))
    refused = [head for status, head, _ in answers if status == 429]
    assert all("retry-after: 1" in head for head in refused) and 20 <= sum(status == 200 for status, *_ in answers)
    assert len(refused) + sum(status == 200 for status, *_ in answers) == 200 and len(refused) > 50
    assert server.ask("a")[0][0] == 200
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=60) == 0


LISTS = "send a text or a list of examples, each a text or a list of texts"
ODD = {
    "no example": ([], 200, []),
    "one text": ("a", 200, {"id": "0", "answer": "to a"}),
    "two": (["a", "b"], 200, [{"id": "0", "answer": "to a"}, {"id": "1", "answer": "to b"}]),
    "refused by predict": (["a", "bad"], 400, "example 1 is bad"),
    "objects": ([{"text": "a"}], 400, LISTS),
    "an object": ({"text": "a"}, 400, LISTS),
    "not a number": (float("nan"), 400, LISTS),
    "a number in a pair": ([["a", 1]], 400, "sequence item 1: expected str instance, int found"),
    "not JSON": (b"[", 400, "Expecting value: line 1 column 2 (char 1)"),
    "nothing": (b"", 400, "Expecting value: line 1 column 1 (char 0)"),
    "not UTF-8": (b'"\xff"', 400, "'utf-8' codec can't decode byte 0xff in position 1: invalid start byte"),
    "nested": (b"[" * 200_000, 400, "maximum recursion depth exceeded"),
    "long": ("a" * 20_001, 413, "more than 100 examples, or than 20,000 characters in one"),
    "long pair": ([["a" * 10_000, "a" * 10_001]], 413, "more than 100 examples, or than 20,000 characters in one"),
    "many": (["a"] * 101, 413, "more than 100 examples, or than 20,000 characters in one"),
}


def test_malformed_requests_do_not_affect_others(serve):
    server = serve("folder")
    bodies = [body for body, *_ in ODD.values()]
    answers = server.ask(*itertools.chain.from_iterable((body, f"text {i}") for i, body in enumerate(bodies)))
    for (name, (_, *expected)), (status, _, answer) in zip(ODD.items(), answers[::2], strict=True):
        answer = answer[: len(expected[1])] if isinstance(answer, str) else answer
        assert (name, status, answer) == (name, *expected)
    right = [(200, {"id": "0", "answer": f"to text {i}"}) for i in range(len(bodies))]
    assert [(status, answer) for status, _, answer in answers[1::2]] == right


def test_disconnecting_and_idle_clients(serve):
    server = serve("folder")
    for size, content in (
        (3, b'"a'),
        (3, b'"a"'),
        (1_000_001, b""),
    ):  # half a request, a whole one, announced too large
        with socket.create_connection(("localhost", server.port)) as client:
            client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size + content)
            assert size == 3 or client.recv(12) == b"HTTP/1.1 413"
    with contextlib.closing(http.client.HTTPConnection("localhost", server.port)) as connection:
        for text in ("a", "b"):
            connection.request("POST", "/", json.dumps(text))
            used = connection.sock
            answer = connection.getresponse()
            assert json.load(answer) == {"id": "0", "answer": f"to {text}"} and connection.sock is used
        for method, path, status in (
            ("HEAD", "/health", 200),
            ("HEAD", "/", 405),
            ("GET", "/", 405),
            ("POST", "/a", 404),
        ):
            connection.request(method, path)
            answer = connection.getresponse()
            assert answer.status == status and (method != "HEAD" or not answer.read())
            answer.read()
    server.process.terminate()
    assert server.process.wait(timeout=60) == 0 and "Traceback" not in server.process.stderr.read()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_example_is_short_listed_and_tested(path):
    assert re.search(rf'(EXAMPLES / |run_script\()"{path.name}"', Path(__file__).read_text(encoding="utf-8"))
    text = "\n".join(cells_of(path)) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in text.splitlines()) < 60
    assert f"[`{path.name}`]({path.name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


def test_table_lists_only_examples():
    linked = re.findall(r"^\| .*\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(linked) == [path.name for path in FILES] == sorted({*linked})
    assert {path.name for path in EXAMPLES.iterdir()} == {*linked, "README.md"}
