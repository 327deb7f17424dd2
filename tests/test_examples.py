"""The files of examples/ run: those for clusters with fakes of what a cluster has, the others on small data.

All are short, in the table of examples/README.md, and run here.
"""

import contextlib
import io
import itertools
import json
import os
import random
import re
import runpy
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import onnx
import optuna
import pytest
import tokenizers
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
# In place of a command: appends its arguments and environment to a file of its name, and exits as told.
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
    """A PATH with fake commands, and what they were called with."""

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
        """Of the last call; None if there was none."""
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
    """What torchrun of the installed torch makes of its arguments."""
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args(arguments)


# An srun whose time limit is near: its script gets a signal, and ends it.
WARNED = """#!/bin/bash
trap 'exit {code}' TERM
kill -USR1 $PPID
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize("code, is_requeued", [(1, True), (0, False)])
def test_a_slurm_job_is_requeued_after_a_warning_unless_it_is_complete(tmp_path, code, is_requeued):
    cluster = Cluster(tmp_path, "srun", "scontrol")
    (tmp_path / "srun").write_text(WARNED.format(code=code))
    # A failed requeue does not hide how the run ended.
    assert cluster.run(str(EXAMPLES / "slurm.sh"), *ARGUMENTS, SLURM_JOB_ID="1234", FAKE_SCONTROL="9") == code
    assert cluster.arguments("scontrol") == (["requeue", "1234"] if is_requeued else None)


@pytest.mark.parametrize("code", [0, 1])
def test_a_slurm_job_starts_a_torchrun_per_node(tmp_path, code):
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


def test_the_options_of_sbatch_come_before_the_first_command():
    """sbatch ignores those after it."""
    text = (EXAMPLES / "slurm.sh").read_text()
    options = re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE)
    assert {"--signal=B:USR1@120", "--requeue", "--ntasks-per-node=1", "--open-mode=append"} <= set(options)
    first_command = re.search(r"^[^#\n]", text, re.MULTILINE).start()
    assert text.rindex("#SBATCH") < first_command


NODES = {
    "one node": ({}, ("1", "gpu", "localhost:0")),
    "several": ({"NUM_NODES": "2", "RDZV_ENDPOINT": "node1:29400"}, ("2", "gpu", "node1:29400")),
    "so many ranks": ({"RANKS_PER_NODE": "3"}, ("1", "3", "localhost:0")),
}


@pytest.mark.parametrize("settings, expected", NODES.values(), ids=NODES)
def test_torchrun_takes_its_options(tmp_path, settings, expected):
    cluster = Cluster(tmp_path, "torchrun")
    assert cluster.run(str(EXAMPLES / "torchrun.sh"), *ARGUMENTS, FAKE_TORCHRUN="5", **settings) == 5
    options = torchrun_options(cluster.arguments("torchrun"))
    assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == expected
    assert (options.rdzv_backend, options.max_restarts) == ("c10d", 3)
    assert options.module and options.training_script == "electra_fast"
    assert options.training_script_args == PRETRAIN
    assert {"SIGTERM", "SIGINT", "SIGUSR1"} <= set(options.signals_to_handle.split(","))


def test_scripts_want_a_corpus_and_a_run(tmp_path):
    cluster = Cluster(tmp_path, "torchrun", "srun")
    for name, command in [("torchrun.sh", "torchrun"), ("slurm.sh", "srun")]:
        assert cluster.run(str(EXAMPLES / name), "/a corpus") != 0
        assert cluster.arguments(command) is None


@pytest.fixture
def kubernetes():
    """The objects of the file by kind."""
    objects = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))
    return {each["kind"]: each for each in objects}


@pytest.mark.parametrize("index, is_host", [("0", "1"), ("1", "0")])
def test_a_pod_starts_torchrun(kubernetes, tmp_path, index, is_host):
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
    """A function that runs an example in this process, in a folder of its own, and returns what it printed."""

    def run(name, *arguments):
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
            patch.chdir(tmp_path_factory.mktemp(Path(name).stem))
            patch.setattr("electra_fast.finetuning.config.MIN_STEPS", 20)  # what is learned does not matter here
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
    """The folder that own_language.py leaves, and what it printed."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "texts.txt").write_text("\n\n".join(tiny_text))
    return folder / "work", run_script("own_language.py", folder / "texts.txt", labeled, folder / "work", "tiny", 8)


def cells_of(path):
    """The code of a notebook, by cell."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path, monkeypatch):
    config = demonstration.demo_config().override(steps=20)
    monkeypatch.setattr(demonstration, "demo_config", lambda: config)
    monkeypatch.setattr("electra_fast.finetuning.config.MIN_STEPS", 20)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for cell in cells_of(EXAMPLES / "tour.ipynb"):
        exec(cell, names)
    assert names["vectors"].shape == (len(names["texts"]), 64)
    assert names["results"]["classification"].median > 0 and len(names["classifier"].labels) == 3


def test_an_encoder_of_my_own_language(own_language):
    folder, printed = own_language
    assert re.search(r"AUC of 0\.\d+ .*\n.*accuracy: [01]\.\d+; of the most frequent label: 0\.\d+", printed), printed
    assert 'language: ["hu"]' in (folder / "model/encoder/README.md").read_text()
    assert json.loads((folder / "tasks/results.json").read_text())["classification"]["runs"][2]


def test_a_tagger_that_finds_names(run_script, tmp_path, own_language):
    folder, files = own_language[0], write_conll(tmp_path)
    arguments = [folder / "run", files / "train.conll", files / "dev.conll", tmp_path / "names"]
    printed = run_script("named_entities.py", *arguments, "object class and file", "the module")
    head, *spans = printed.splitlines()
    assert re.fullmatch(r"f1 of entities in .*dev.conll: [01]\.\d+", head)
    assert all(re.fullmatch(r"(PER|LOC)\t[a-z ]+\t\d+-\d+\t[01]\.\d\d", span) for span in spans), spans
    assert run_script("named_entities.py", *arguments, "the module").startswith(head)  # without another training


def test_a_search_for_settings_continues(run_script, tmp_path, own_language, labeled):
    for num_trials in (1, 2, 2):
        printed = run_script("tune.py", own_language[0] / "run", labeled, tmp_path / "tuning", num_trials)
        study = optuna.load_study(study_name="finetune", storage=f"sqlite:///{tmp_path / 'tuning/study.db'}")
        assert len(study.trials) == num_trials
        assert printed == f"best of {num_trials} trials: {study.best_value:.3f}, {study.best_params}\n"
    best = json.loads((tmp_path / f"tuning/trial-{study.best_trial.number}/results.json").read_text())
    assert best["classification"]["median"] == study.best_value and len(best["classification"]["runs"]) == 3


def test_tickets_are_routed_as_they_come(run_script, tmp_path, own_language, monkeypatch):
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
    expected = model.predict([(each["subject"], each["body"]) for each in new])
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


def test_scanning_errors_are_marked_at_a_precision(run_script, tmp_path, own_language, tiny_text):
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

    found = probabilities("scanned")

    def scores(threshold, part):
        hits = (found[part] >= threshold) & is_wrong[part]
        return [hits.sum() / (found[part] >= threshold).sum(), hits.sum() / is_wrong[part].sum()]

    first, second = slice(300), slice(300, None)
    reached = {each: scores(each, first)[0] for each in found[first]}
    wanted = np.quantile(list(reached.values()), 0.9)
    threshold = min(each for each, precision in reached.items() if precision >= wanted)
    arguments = [own_language[0] / "run", *(tmp_path / name for name in ("right", "scanned", "right"))]
    *head, marked, rest = run_script("ocr_errors.py", *arguments, wanted, tmp_path / "other").splitlines()
    printed = [float(each) for each in re.findall(r"\d\.\d+", " ".join(head))]
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
def test_search_over_own_pages(run_script, tmp_path, own_language, offline):
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
def test_reranking_of_a_search(run_script, tmp_path, own_language, offline):
    rng = random.Random(0)
    passages = [" ".join(rng.choices(WORDS, k=15)) for _ in range(12)]
    questions = [(" ".join(rng.sample(passage.split(), 4)), passage) for passage in passages for _ in range(2)]
    (tmp_path / "questions.tsv").write_text("".join(f"{question}\t{passage}\n" for question, passage in questions))
    arguments = [own_language[0] / "model/encoder", tmp_path / "questions.tsv", tmp_path / "reranker", "the class"]
    *_, measured, first, second, third = run_script("rerank.py", *arguments).splitlines()
    assert re.fullmatch(r"mean reciprocal rank: search [01]\.\d{3} rerank [01]\.\d{3}", measured)
    assert len({first, second, third} & set(passages)) == 3
    assert run_script("rerank.py", *arguments).splitlines() == [first, second, third]


# A fresh interpreter, in which torch and transformers cannot be imported.
WITHOUT_TORCH = """
import runpy, sys
sys.modules |= dict.fromkeys(("torch", "transformers", "electra_fast"))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def serve():
    """A function that starts onnx_serving.py on a folder and returns one that asks it."""
    with contextlib.ExitStack() as stack:

        def start(folder):
            command = [sys.executable, "-c", WITHOUT_TORCH, EXAMPLES / "onnx_serving.py", folder, "0"]
            server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(server.terminate)
            address = server.stdout.readline().split()[-1]
            return lambda texts: json.load(urllib.request.urlopen(address, json.dumps(texts).encode()))

        yield start


def test_serving_an_encoder_without_torch(serve, tmp_path, own_language):
    """Its outputs depend on the token and its type alone, so that the embeddings are known."""
    make, folder = onnx.helper, shutil.copytree(own_language[0] / "model/encoder", tmp_path / "encoder")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tables_VD = np.random.default_rng(0).normal(size=(2, tokenizer.get_vocab_size(), 4)).astype(np.float32)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    nodes = [("Gather", ["tokens", "input_ids"], ["a"]), ("Gather", ["types", "token_type_ids"], ["b"])]
    graph = make.make_graph(
        [make.make_node(*node) for node in (*nodes, ("Add", ["a", "b"], ["last_hidden_state"]))],
        "encoder",
        [make.make_tensor_value_info(name, onnx.TensorProto.INT64, ["batch", "sequence"]) for name in names],
        [make.make_tensor_value_info("last_hidden_state", onnx.TensorProto.FLOAT, ["batch", "sequence", 4])],
        [onnx.numpy_helper.from_array(table, name) for table, name in zip(tables_VD, ("tokens", "types"), strict=True)],
    )
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 18)], ir_version=10), folder / "model.onnx")
    texts = ["the class function", "value " * 200]  # the second is longer than the model's 128 positions
    ids = [tokenizer.encode(text).ids for text in texts]
    ids[1] = ids[1][:127] + ids[1][-1:]
    expected = [(tables_VD[0][row] + tables_VD[1][0]).mean(0) for row in ids]
    np.testing.assert_allclose(serve(folder)(texts), expected, rtol=1e-5, atol=1e-5)


def test_serving_a_classifier_without_torch(serve, tmp_path, own_language):
    folder = shutil.copytree(own_language[0] / "tasks/classification/seed-0/model", tmp_path / "classifier")
    write_onnx(folder, "logits")
    texts = ["the class function", "value object string"]
    answers = ef.load(folder, precision="fp32").predict(texts)
    for found, expected in zip(serve(folder)(texts), answers, strict=True):
        assert found["label"] == expected["label"]
        assert abs(found["score"] - expected["scores"][found["label"]]) < 1e-5


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_is_short_in_the_table_and_run_here(path):
    assert re.search(rf'(EXAMPLES / |run_script\()"{path.name}"', Path(__file__).read_text(encoding="utf-8"))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines if path.suffix != ".ipynb" else "\n".join(cells_of(path)).splitlines()) < 60
    assert f"[`{path.name}`]({path.name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


def test_the_table_has_no_other_files():
    linked = re.findall(r"^\| .*\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(linked) == [path.name for path in FILES] == sorted({*linked})
    assert {path.name for path in EXAMPLES.iterdir()} == {*linked, "README.md"}
