"""What question answering and tagging have in common: folders, commands and mistakes."""

import json

import in_process
import pytest
import torch
from tiny_reading import SETTINGS, flags, questions_of, tagged_sentences
from tiny_task import save_encoder

import electra_fast as ef


@pytest.mark.parametrize(
    "task, architecture, head",
    [
        ("squad2", "bert", "google"),
        ("squad2", "modern", "hf"),
        ("tagging", "bert", "google"),
        ("tagging", "modern", "google"),
    ],
)
def test_every_head_survives_its_folder(
    tiny_vocab, own_files, squad_folder, tmp_path, monkeypatch, task, architecture, head
):
    arguments = own_files(task) | {"model": save_encoder(tmp_path / "encoder", tiny_vocab, architecture)}
    overrides = SETTINGS | {"finetune.head": head, "finetune.calibrate": task == "tagging"}
    arguments |= {"out": tmp_path / "out", "overrides": overrides}
    ef.finetune(task, **arguments)
    folder = tmp_path / "out" / task / "seed-0"
    reader = ef.load_finetuned(folder / "model")
    kind = "question-answering" if task == "squad2" else "tagging"
    assert repr(reader).startswith(f"FinetunedModel: {kind}, ") and repr(reader).endswith("on cpu")
    assert "path/to/this/folder" in (folder / "model" / "README.md").read_text()
    if task == "squad2":
        pairs = [(question, context) for _, question, context in questions_of(squad_folder / "dev-v2.0.json")]
        found = [answer["answer"] for answer in reader.predict(pairs, null_threshold=1e9)]
        assert found == list(json.loads((folder / "predictions.dev.json").read_text()).values())
    else:
        found = [
            answer["tags"] for answer in reader.predict([tokens for tokens, _ in tagged_sentences(20, 1, (3, 70))])
        ]
        lines = (folder / "predictions.dev.jsonl").read_text().splitlines()
        assert found == [json.loads(line)["tags"] for line in lines]
    result = json.loads((folder / "result.json").read_text())
    result["splits"]["dev"]["content"] = "other"
    del result["files"], result["checksum"]  # as of a version without them
    (folder / "result.json").write_text(json.dumps(result))
    ef.finetune(task, **arguments)
    rescored = json.loads((folder / "result.json").read_text())
    assert numbers(rescored) == pytest.approx(numbers(result), rel=1e-4)
    assert rescored.get("temperature") == result.get("temperature")
    assert ("temperature" in result) == (task == "tagging")
    if not torch.cuda.is_available():  # and can be measured
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
        assert ef.load_finetuned(folder / "model").note.startswith("precision = auto: ")


def numbers(result):
    """The scores of dev; some entries are text."""
    return {name: each for name, each in result["splits"]["dev"]["scores"].items() if not isinstance(each, str)}


@pytest.mark.parametrize(
    "task, content, message",
    [
        ("question-answering", '{"question": "a", "context": " ", "answers": []}', "context"),
        ("tagging", '{"text": "ab", "spans": [[0, 5, "PER"]]}', "line 1"),
        ("tagging", '{"tokens": ["a"], "tags": ["O"]}', "nothing to learn"),
    ],
)
def test_bad_data_is_one_line(encoder_folder, tmp_path, task, content, message):
    (tmp_path / "data.jsonl").write_text(content + "\n")
    run = in_process.run(
        *("finetune", "--task", task, "--train", tmp_path / "data.jsonl", "--model", encoder_folder),
        *("--out", tmp_path / "out", *flags(SETTINGS)),
    )
    assert run.returncode == 2 and len(run.stderr.splitlines()) == 1, run.stderr
    assert "data.jsonl" in run.stderr and message in run.stderr


def test_a_model_of_another_task_is_named(encoder_folder, squad_folder, own_files, tmp_path):
    (tmp_path / "lines.txt").write_text("a line\n")
    questions, lines = squad_folder / "dev-v1.1.json", tmp_path / "lines.txt"
    for task, name, file in (("squad1", "question-answering", lines), ("tagging", "tagging", questions)):
        overrides = SETTINGS | {"finetune.epochs": "0.1"}
        ef.finetune(task, model=encoder_folder, out=tmp_path / "out", overrides=overrides, **own_files(task))
        for more in ([], ["--task", "errors"]):
            run = in_process.run("predict", tmp_path / "out" / task / "seed-0" / "model", file, *more)
            assert run.returncode == 2 and len(run.stderr.splitlines()) == 1
            assert more or f"is for {name}" in run.stderr


def test_errors_in_text_from_the_command_line(whole_run, tmp_path):
    (tmp_path / "lines.txt").write_text("A method of teh class.\n\nנame 😀\n")
    run = in_process.run("predict", whole_run, tmp_path / "lines.txt", "--task", "errors", "--threshold", "0")
    assert run.returncode == 0, run.stderr
    first, empty, last = (json.loads(line) for line in run.stdout.splitlines())
    assert [word["text"] for word in first["errors"]] == ["A", "method", "of", "teh", "class", "."]
    assert (empty["score"], empty["words"]) == (0.0, [])
    assert all("נame 😀"[word["start"] : word["end"]] == word["text"] for word in last["words"])
    run = in_process.run("predict", whole_run, tmp_path / "lines.txt", "--task", "errors", "--threshold", "2")
    assert run.returncode == 2 and "threshold is 2" in run.stderr
    run = in_process.run("predict", whole_run, tmp_path / "lines.txt", "--task", "errors", "--n-best", "2")
    assert run.returncode == 2 and len(run.stderr.splitlines()) == 1
