"""`evaluate` of fine-tuned models: the scores and the report of fine-tuning, on a file that is read like training's."""

import json

import in_process
import pytest
from tiny_reading import SETTINGS, articles, tagged_sentences
from tiny_task import QUICK, sentences

import electra_fast as ef
from electra_fast.errors import InputError
from electra_fast.finetuning import inference


def rows_of(task, count, seed):
    """Labelled rows with columns of their own, some of which are named like fields of predictions."""
    others = {"channel": "mail", "gold": 0.5}
    if task == "tagging":
        found = [{"tokens": words, "tags": tags} for words, tags in tagged_sentences(count, seed)]
    elif task == "question-answering":
        found = [
            {"question": each["question"], "context": paragraph["context"], "answers": each["answers"]}
            for article in articles(count // 2, seed)
            for paragraph in article["paragraphs"]
            for each in paragraph["qas"]
        ]
    else:
        texts = list(sentences(count, seed))
        labels = {
            "classification": lambda label: f"class {label}",
            "multi-label": lambda label: ["long", "good"][label:],
            "regression": lambda label: 1.7e9 + 5000 * label + 0.25,  # seconds, which single precision holds to 128
        }[task]
        found = [{"body": text, "topic": labels(label)} for text, label in texts]
    return [{"id": f"{seed}-{n}"} | row | others for n, row in enumerate(found)]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def trained(encoder_folder, tmp_path_factory):
    """A function from a task to its output folder, its result, and its training and validation files."""
    made = {}

    def trained(task):
        if task not in made:
            out = tmp_path_factory.mktemp(task)
            files = {
                name: write_rows(out / f"{name}.jsonl", rows_of(task, 24, n)) for n, name in enumerate(("train", "dev"))
            }
            columns = {"text": "body", "label": "topic"} if "topic" in files["dev"].read_text() else {}
            settings = SETTINGS if task in ("tagging", "question-answering") else QUICK
            settings = {"finetune.learning_rate": "3e-4"} | settings
            name = "classification" if task == "multi-label" else task
            found = ef.finetune(encoder_folder, task=name, out=out / "out", overrides=settings, **files, **columns)
            made[task] = (out / "out" / name, found[name]["runs"][0], files)
        return made[task]

    return trained


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("task", ["classification", "multi-label", "regression", "tagging", "question-answering"])
def test_the_validation_file_has_the_scores_and_the_report_of_fine_tuning(trained, tmp_path, task):
    folder, result, files = trained(task)
    report = ef.evaluate(folder / "seed-0" / "model", files["dev"], out=tmp_path / "out", precision="fp32")
    ours = records(tmp_path / "out" / "predictions.jsonl")
    theirs = records(folder / "seed-0" / "predictions.dev.jsonl")
    for own, other, row in zip(ours, theirs, records(files["dev"]), strict=True):
        assert own.keys() == other.keys() and {"id", "channel", "gold", "input"} <= own.keys()
        assert (own["id"], own["gold"], own["input"]["gold"]) == (other["id"], other["gold"], 0.5)
        assert own["id"] == row["id"] if task != "question-answering" else own["id"].startswith("1-")
    for name, score in report["scores"].items():
        assert score["model"] == pytest.approx(result[name], rel=1e-4, abs=1e-4)  # of rounded answers
    if task == "regression":
        assert len({each["value"] for each in ours}) == len(ours) and report["scores"]["pearson"]["model"] != 0
        assert [each["value"] for each in ours] == pytest.approx([each["value"] for each in theirs], abs=1e-2)
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    trained_report = json.loads((folder / "report.json").read_text())
    assert written == json.loads(report.to_json())
    assert trained_report.keys() - written.keys() <= {"label_shares", "duplicates"} and "duplicates" in trained_report
    assert [error["id"] for error in written["errors"]] == [error["id"] for error in trained_report["errors"]]
    pictures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert pictures and pictures | {"curves.png"} == {path.name for path in folder.glob("*.png")}


def test_the_command_prints_scores_and_the_model_decides_which_options_apply(trained, tmp_path, encoder_folder):
    folder, result, files = trained("classification")
    model = folder / "seed-0" / "model"
    done = in_process.run("evaluate", model, files["dev"], "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert f"accuracy model {result['accuracy']:.6g} majority" in " ".join(done.stdout.split())
    assert "report.md: 24 examples" in done.stderr
    for words, message in {
        (model, files["dev"], "--max-batches", "3"): "--max-batches is for pre-trained models, and",
        (model, files["dev"], "--scheme", "IO"): "--scheme is not for classification",
        (model, files["dev"], "other"): "on a file of labeled examples; name one",
        (model,): "is evaluated on a file of labeled examples; name it after the model",
        (encoder_folder, files["dev"]): "not fine-tuned, so it cannot predict the labels of",
        (encoder_folder, tmp_path, "--label", "x"): "--label is for fine-tuned models, and",
    }.items():
        done = in_process.run("evaluate", *words)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_corpora_and_absent_devices_are_refused_and_batches_are_as_large_as_asked(trained, tiny_corpus, monkeypatch):
    folder, result, files = trained("classification")
    model = folder / "seed-0" / "model"
    sizes = []
    with pytest.raises(InputError, match="labeled examples, and .* is a corpus, on which pre-trained models are"):
        ef.evaluate(model, tiny_corpus)
    with pytest.raises(InputError, match="device = 'cuda:7': this machine has"):
        ef.evaluate(model, files["dev"], device="cuda:7")
    pack = inference.pack
    monkeypatch.setattr(inference, "pack", lambda *given, **how: sizes.append(len(given[1])) or pack(*given, **how))
    report = ef.evaluate(model, files["dev"], batch_size=5, precision="fp32")
    assert sizes == [5, 5, 5, 5, 4] and report.scores["accuracy"]["model"] == pytest.approx(result["accuracy"])
    assert str(report).startswith("accuracy") and "examples" in dir(report) and report.examples == 24


def test_labels_that_the_model_does_not_know_are_counted_and_left_out_if_asked(trained, tmp_path):
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


def test_a_file_without_labels_is_refused(trained, tmp_path):
    for task, column, message in (
        ("classification", "topic", "no label column; available columns: id, body"),
        ("tagging", "tags", "no label column; available columns: id, tokens"),
        ("question-answering", "answers", "no column 'answers'"),
    ):
        folder, _, files = trained(task)
        rows = [{name: row[name] for name in row if name != column} for row in records(files["dev"])]
        with pytest.raises(InputError, match=message):
            ef.evaluate(folder / "seed-0" / "model", write_rows(tmp_path / f"{task}.jsonl", rows))
