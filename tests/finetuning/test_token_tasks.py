"""What question answering and tagging have in common: folders, batches, processes, interruptions and mistakes."""

import json
from dataclasses import replace

import in_process
import numpy as np
import pytest
import torch
from test_finetuning import trained, trained_by
from tiny_reading import SETTINGS, flags, questions_of, tagged_sentences
from tiny_task import NO_DROPOUT, save_encoder

import electra_fast as ef
from electra_fast.finetuning import batches
from electra_fast.finetuning.config import FinetuningConfig
from electra_fast.finetuning.task_data import read_tasks
from electra_fast.finetuning.training.job import make_job
from electra_fast.huggingface.encoder import load_encoder

CPU = torch.device("cpu")


def data_of(task, squad_folder, conll_folder):
    """Arguments of `finetune`."""
    if task.startswith("squad"):
        return {"data": squad_folder}
    return {"train": conll_folder / "train.conll", "dev": conll_folder / "dev.conll"}


@pytest.fixture(scope="module")
def models(encoder_folder, squad_folder, conll_folder, tmp_path_factory):
    out, tasks = tmp_path_factory.mktemp("models"), ("squad1", "tagging")
    for task in tasks:
        own = data_of(task, squad_folder, conll_folder)
        ef.finetune(task, model=encoder_folder, out=out, overrides=SETTINGS | {"finetune.epochs": "0.1"}, **own)
    return {task: out / task / "seed-0" / "model" for task in tasks}


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
    encoder_folder, tiny_vocab, squad_folder, conll_folder, tmp_path, monkeypatch, task, architecture, head
):
    encoder = save_encoder(tmp_path / "encoder", tiny_vocab, architecture)
    own = data_of(task, squad_folder, conll_folder)
    settings = SETTINGS | {"finetune.head": head, "finetune.learning_rate": "2e-3"}
    ef.finetune(task, model=encoder, out=tmp_path / "out", overrides=settings, **own)
    folder = tmp_path / "out" / task / "seed-0"
    reader = ef.load_finetuned(folder / "model")
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
    ef.finetune(task, model=encoder, out=tmp_path / "out", overrides=settings, **own)
    rescored = json.loads((folder / "result.json").read_text())
    assert numbers(rescored) == pytest.approx(numbers(result), rel=1e-4)
    if not torch.cuda.is_available():  # and can be measured
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
        assert ef.load_finetuned(folder / "model").note.startswith("precision = auto: ")


def numbers(result):
    """The scores of dev; some entries are text."""
    return {name: each for name, each in result["splits"]["dev"]["scores"].items() if not isinstance(each, str)}


def job_of(task, encoder_folder, squad_folder, conll_folder, folder, **changes):
    files = data_of(task, squad_folder, conll_folder)
    (data,) = read_tasks(task, files.pop("data", None), files, {})
    config = FinetuningConfig().override(SETTINGS | NO_DROPOUT | changes)
    return make_job(data, config, load_encoder(encoder_folder), folder, CPU)


@pytest.mark.parametrize("task, head", [("squad2", "google"), ("tagging", "hf")])
def test_batches_of_fixed_shape_train_the_same(encoder_folder, squad_folder, conll_folder, tmp_path, task, head):
    """What CUDA graphs replay."""
    job = job_of(task, encoder_folder, squad_folder, conll_folder, tmp_path, **{"finetune.head": head})
    length, size = job.config.sequence_length, job.config.batch_size
    losses, parameters = trained(job, "eager", CPU, lambda chosen: batches.pack(job.examples, chosen))
    static = trained(job, "eager", CPU, lambda chosen: [batches.pack_static(job.examples, chosen, length, size)])
    np.testing.assert_allclose(losses, static[0], rtol=1e-4)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, static[1][name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("task, head", [("squad2", "google"), ("squad1", "hf"), ("tagging", "hf")])
def test_graphs_train_the_same(encoder_folder, squad_folder, conll_folder, tmp_path, task, head):
    job = job_of(
        task,
        encoder_folder,
        squad_folder,
        conll_folder,
        tmp_path,
        **{"finetune.head": head, "finetune.precision": "fp32"},
    )
    job = replace(job, work=replace(job.work, compute=replace(job.work.compute, dtype=torch.float32)))
    length, size, device = job.config.sequence_length, job.config.batch_size, torch.device("cuda")
    pack = lambda chosen: [batches.pack_static(job.examples, chosen, length, size)]  # noqa: E731
    eager, graph = (trained(job, execution, device, pack) for execution in ("eager", "graph"))
    np.testing.assert_allclose(eager[0], graph[0], rtol=1e-5)


def test_two_processes_compute_what_one_computes(encoder_folder, squad_folder, conll_folder, tmp_path):
    """Targets per token follow the tokens to either process."""
    job = job_of("tagging", encoder_folder, squad_folder, conll_folder, tmp_path)
    order = batches.training_order(job.config, len(job.examples), 0)[:4]
    one, two = (trained_by(job, num_processes, order)[0] for num_processes in (1, 2))
    assert one == pytest.approx(two, rel=1e-5)


@pytest.mark.parametrize(
    "task, content, message",
    [
        ("question-answering", '{"question": "a", "context": " ", "answers": []}', "context"),
        (
            "question-answering",
            '{"question": "a", "context": "c c", "answers": [{"text": "c", "answer_start": 9}]}',
            "9",
        ),
        ("question-answering", '{"context": "b c", "answers": []}', "question"),
        ("tagging", '{"tokens": ["a", "b"], "tags": ["O"]}', "line 1"),
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


def test_a_model_of_another_task_is_named(models, conll_folder, squad_folder, tmp_path):
    (tmp_path / "lines.txt").write_text("a line\n")
    reader = models["squad1"]
    run = in_process.run("predict", reader, tmp_path / "lines.txt")
    assert run.returncode == 2 and "is for question-answering" in run.stderr and len(run.stderr.splitlines()) == 1
    run = in_process.run("predict", models["tagging"], squad_folder / "dev-v1.1.json")
    assert run.returncode == 2 and "is for tagging" in run.stderr and len(run.stderr.splitlines()) == 1
    run = in_process.run("predict", models["tagging"], conll_folder / "dev.conll", "--task", "errors")
    assert run.returncode == 2 and len(run.stderr.splitlines()) == 1


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
