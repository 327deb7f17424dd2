"""Folders, commands and errors of question answering and tagging."""

import functools
import json
import shutil

import in_process
import pytest
import torch
from tiny_reading import SETTINGS, questions_of, tagged_sentences
from tiny_task import save_encoder

import electra_fast as ef


@pytest.fixture(scope="module")
def trained(tiny_vocab, squad_folder, conll_folder, tmp_path_factory):
    """Returns a cached function that fine-tunes a head; it returns the arguments and the output folder."""

    @functools.cache
    def trained(task, architecture, head):
        out = tmp_path_factory.mktemp("trained")
        files = {name: conll_folder / f"{name}.conll" for name in ("train", "dev")}
        overrides = SETTINGS | {"finetune.head": head, "finetune.calibrate": task == "tagging"}
        arguments = {"model": save_encoder(out / "encoder", tiny_vocab, architecture), "overrides": overrides}
        arguments |= files if task == "tagging" else {"squad": squad_folder}
        ef.finetune(task=task, out=out / "out", **arguments)
        return arguments, out / "out"

    return trained


@pytest.mark.parametrize(
    ("task", "architecture", "head"),
    [
        ("squad2", "bert", "published"),
        pytest.param("squad2", "modernbert", "transformers", marks=pytest.mark.slow),
        pytest.param("squad2", "deberta", "transformers", marks=pytest.mark.slow),
        ("tagging", "bert", "published"),
        pytest.param("tagging", "modernbert", "published", marks=pytest.mark.slow),
        ("tagging", "deberta", "published"),
    ],
)
def test_all_heads_are_saved_and_loaded(trained, squad_folder, tmp_path, monkeypatch, task, architecture, head):
    arguments, original = trained(task, architecture, head)
    folder = shutil.copytree(original, tmp_path / "out") / task / "seed-0"
    reader = ef.load(folder / "model")
    kind = "question-answering" if task == "squad2" else "tagging"
    assert repr(reader).startswith(f"FinetunedModel: {kind}, ") and repr(reader).endswith("on cpu")
    assert "path/to/this/folder" in (folder / "model" / "README.md").read_text()
    if task == "squad2":
        pairs = [(question, context) for _, question, context in questions_of(squad_folder / "dev-v2.0.json")]
        answers = [answer["answer"] for answer in reader.predict(pairs, null_threshold=1e9)]
        assert answers == list(json.loads((folder / "predictions.dev.json").read_text()).values())
    else:
        sentences = [tokens for tokens, _ in tagged_sentences(20, 1, (3, 70))]
        lines = (folder / "predictions.dev.jsonl").read_text().splitlines()
        assert [prediction["tags"] for prediction in reader.predict(sentences)] == [
            json.loads(line)["tags"] for line in lines
        ]
    result = json.loads((folder / "result.json").read_text())
    result["splits"]["dev"]["content"] = "other"
    del result["files"], result["checksum"]  # like an earlier version
    (folder / "result.json").write_text(json.dumps(result))
    ef.finetune(task=task, out=tmp_path / "out", **arguments)
    rescored = json.loads((folder / "result.json").read_text())
    assert numbers(rescored) == pytest.approx(numbers(result), rel=1e-4)
    assert rescored.get("temperature") == result.get("temperature")
    assert ("temperature" in result) == (task == "tagging")
    if not torch.cuda.is_available():  # a CPU's precision is measured
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
        assert ef.load(folder / "model").note.startswith("precision = auto: ")


def numbers(result):
    """Returns the numeric validation scores."""
    return {name: value for name, value in result["splits"]["dev"]["scores"].items() if not isinstance(value, str)}


def test_model_of_another_task_is_refused(trained, squad_folder, tmp_path):
    (tmp_path / "lines.txt").write_text("a line\n")
    questions = squad_folder / "dev-v1.1.json"
    lines = tmp_path / "lines.txt"
    for task, name, file in (("squad2", "question-answering", lines), ("tagging", "tagging", questions)):
        model = trained(task, "bert", "published")[1] / task / "seed-0" / "model"
        for command, message in (("predict", f"is for {name}"), ("detect", "")):
            run = in_process.run(command, model, file)
            assert run.returncode == 2 and len(run.stderr.splitlines()) == 1 and message in run.stderr


def test_detect_command(whole_run, tmp_path):
    (tmp_path / "lines.txt").write_text("A method of teh class.\n\nנame 😀\n")
    command = ("detect", whole_run, tmp_path / "lines.txt")
    run = in_process.run(*command, "--threshold", "0")
    assert run.returncode == 0, run.stderr
    first, empty, last = (json.loads(line) for line in run.stdout.splitlines())
    assert [word["text"] for word in first["errors"]] == ["A", "method", "of", "teh", "class", "."]
    assert (empty["score"], empty["words"]) == (0.0, [])
    assert all("נame 😀"[word["start"] : word["end"]] == word["text"] for word in last["words"])
    for option, message in (("--threshold", "threshold = 2"), ("--n-best", "")):
        run = in_process.run(*command, option, "2")
        assert run.returncode == 2 and len(run.stderr.splitlines()) == 1 and message in run.stderr
