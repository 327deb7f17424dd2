"""`evaluate` on fine-tuned models gives the same scores and report as fine-tuning, and reads files in the same way."""

import json

import in_process
import pytest
from tiny_reading import SETTINGS, articles, tagged_sentences
from tiny_task import QUICK, sentences

import electra_fast as ef
from electra_fast.errors import InputError
from electra_fast.finetuning import inference


def rows_of(task, count, seed):
    """Labeled rows with additional columns; some have the names of prediction fields."""
    others = {"channel": "mail", "gold": 0.5}
    if task == "tagging":
        task_rows = [{"tokens": words, "tags": tags} for words, tags in tagged_sentences(count, seed)]
    elif task == "question-answering":
        task_rows = [
            {"question": qa["question"], "context": paragraph["context"], "answers": qa["answers"]}
            for article in articles(count // 2, seed)
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
        ]
    else:
        texts = list(sentences(count, seed))
        labels = {
            "classification": lambda label: f"class {label}",
            "multi-label": lambda label: ["long", "good"][label:],
            "regression": lambda label: 1.7e9 + 5000 * label + 0.25,  # seconds; single precision has steps of 128 here
        }[task]
        task_rows = [{"body": text, "topic": labels(label)} for text, label in texts]
    return [{"id": f"{seed}-{n}"} | row | others for n, row in enumerate(task_rows)]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def trained(encoder_folder, tmp_path_factory):
    """A function that trains a task and returns its output folder, its result, and its files."""
    finished = {}

    def trained(task):
        if task not in finished:
            out = tmp_path_factory.mktemp(task)
            files = {
                name: write_rows(out / f"{name}.jsonl", rows_of(task, 24, n)) for n, name in enumerate(("train", "dev"))
            }
            columns = {"text": "body", "label": "topic"} if "topic" in files["dev"].read_text() else {}
            settings = SETTINGS if task in ("tagging", "question-answering") else QUICK
            settings = {"finetune.learning_rate": "3e-4"} | settings
            name = "classification" if task == "multi-label" else task
            results = ef.finetune(encoder_folder, task=name, out=out / "out", overrides=settings, **files, **columns)
            finished[task] = (out / "out" / name, results[name]["runs"][0], files)
        return finished[task]

    return trained


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("task", ["classification", "multi-label", "regression", "tagging", "question-answering"])
def test_evaluation_repeats_scores_and_report_of_training(trained, tmp_path, task):
    folder, result, files = trained(task)
    report = ef.evaluate(folder / "seed-0" / "model", files["dev"], out=tmp_path / "out", precision="fp32")
    evaluated = records(tmp_path / "out" / "predictions.jsonl")
    trained_answers = records(folder / "seed-0" / "predictions.dev.jsonl")
    for evaluated_answer, other, row in zip(evaluated, trained_answers, records(files["dev"]), strict=True):
        assert evaluated_answer.keys() == other.keys() and {"id", "channel", "gold", "input"} <= evaluated_answer.keys()
        assert (evaluated_answer["id"], evaluated_answer["gold"], evaluated_answer["input"]["gold"]) == (
            other["id"],
            other["gold"],
            0.5,
        )
        assert (
            evaluated_answer["id"] == row["id"]
            if task != "question-answering"
            else evaluated_answer["id"].startswith("1-")
        )
    for name, score in report["scores"].items():
        assert score["model"] == pytest.approx(result[name], rel=1e-4, abs=1e-4)  # of rounded answers
    if task == "regression":
        assert (
            len({answer["value"] for answer in evaluated}) == len(evaluated)
            and report["scores"]["pearson"]["model"] != 0
        )
        assert [answer["value"] for answer in evaluated] == pytest.approx(
            [answer["value"] for answer in trained_answers], abs=1e-2
        )
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    trained_report = json.loads((folder / "report.json").read_text())
    assert written == json.loads(report.to_json())
    assert trained_report.keys() - written.keys() <= {"label_shares", "duplicates"} and "duplicates" in trained_report
    assert [error["id"] for error in written["errors"]] == [error["id"] for error in trained_report["errors"]]
    pictures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert pictures and pictures | {"curves.png"} == {path.name for path in folder.glob("*.png")}


def test_command_prints_scores_and_refuses_options_of_other_models(trained, tmp_path, encoder_folder):
    folder, result, files = trained("classification")
    model = folder / "seed-0" / "model"
    done = in_process.run("evaluate", model, files["dev"], "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert f"accuracy model {result['accuracy']:.6g} majority" in " ".join(done.stdout.split())
    assert "report.md: 24 examples" in done.stderr
    for words, message in {
        (model, files["dev"], "--max-batches", "3"): "--max-batches: is for pre-trained models, and",
        (model, files["dev"], "--scheme", "IO"): "--scheme: is not for classification",
        (model, files["dev"], "other"): "on a file of labeled examples; pass a single file",
        (model,): "is evaluated on a file of labeled examples; pass the file after the model",
        (encoder_folder, files["dev"]): "not fine-tuned, so it cannot predict the labels of",
        (encoder_folder, tmp_path, "--label", "x"): "--label: is for fine-tuned models, and",
    }.items():
        done = in_process.run("evaluate", *words)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_batch_size_and_refused_corpora_and_devices(trained, tiny_corpus, monkeypatch):
    folder, result, files = trained("classification")
    model = folder / "seed-0" / "model"
    sizes = []
    with pytest.raises(
        InputError, match="labeled examples, but .* is a corpus; pass such a file, or a pre-trained model"
    ):
        ef.evaluate(model, tiny_corpus)
    with pytest.raises(InputError, match="device = 'cuda:7': this machine has"):
        ef.evaluate(model, files["dev"], device="cuda:7")
    pack = inference.pack
    monkeypatch.setattr(
        inference, "pack", lambda *arguments, **how: sizes.append(len(arguments[1])) or pack(*arguments, **how)
    )
    report = ef.evaluate(model, files["dev"], batch_size=5, precision="fp32")
    assert sizes == [5, 5, 5, 5, 4] and report.scores["accuracy"]["model"] == pytest.approx(result["accuracy"])
    assert str(report).startswith("accuracy") and "examples" in dir(report) and report.examples == 24


def test_unknown_labels_are_counted_and_skipped_on_request(trained, tmp_path):
    folder, _, files = trained("classification")
    model = folder / "seed-0" / "model"
    rows = records(files["dev"])
    wrong = [row | {"topic": topic} for row, topic in zip(rows, ["Class 9"] * 3 + ["x"], strict=False)]
    other = write_rows(tmp_path / "other.jsonl", wrong + rows[4:])
    message = "4 bad rows: .*: labels unknown to the model: 'Class 9' 3, 'x' 1; known: 'class 0', 'class 1'"
    with pytest.raises(InputError, match=message):
        ef.evaluate(model, other, skip_bad_rows=3)
    assert ef.evaluate(model, other, skip_bad_rows=4, text=["body"])["examples"] == 20
    assert ef.evaluate(model, other, skip_bad_rows=1, label_map="Class 9=class 1")["examples"] == 23
    changes = {"tagging": {"tokens": ["a", "b"], "tags": ["B-ORG", "O"]}, "multi-label": {"topic": ["good", "new"]}}
    for task, change in changes.items():
        folder, _, files = trained(task)
        first, *rows = records(files["dev"])
        other = write_rows(tmp_path / f"{task}.jsonl", [first | change, *rows])
        message = "unknown to the model: '(ORG|new)' 1; known: '(LOC|good)', '(PER|long)'"
        with pytest.raises(InputError, match=message):
            ef.evaluate(folder / "seed-0" / "model", other)
        assert ef.evaluate(folder / "seed-0" / "model", other, skip_bad_rows=1)["examples"] == 23


def test_unlabeled_file_is_refused(trained, tmp_path):
    for task, column, message in (
        ("classification", "topic", "no label column; available columns: id, body"),
        ("tagging", "tags", "no label column; available columns: id, tokens"),
        ("question-answering", "answers", "no column 'answers'"),
    ):
        folder, _, files = trained(task)
        rows = [{name: row[name] for name in row if name != column} for row in records(files["dev"])]
        with pytest.raises(InputError, match=message):
            ef.evaluate(folder / "seed-0" / "model", write_rows(tmp_path / f"{task}.jsonl", rows))
