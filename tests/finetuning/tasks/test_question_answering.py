"""Question answering from the command line and from Python: scores, files for the official scorer, answers."""

import json

import in_process
import numpy as np
import pytest
from tiny_reading import SETTINGS, articles, flags, questions_of

import electra_fast as ef
from electra_fast.errors import InputError
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.readers.question_files import read_questions
from electra_fast.finetuning.tasks.question_answering import QuestionAnswering


@pytest.fixture(scope="module")
def readers(encoder_folder, squad_folder, tmp_path_factory):
    """Models of both versions of SQuAD with two seeds, their results and messages; version 2 has the published head."""
    results = {}
    for name, head in (("squad1", "transformers"), ("squad2", "published")):
        out = tmp_path_factory.mktemp(name)
        run = in_process.run(
            *("finetune", encoder_folder, "--task", name, "--squad", squad_folder, "--out", out),
            *("--seeds", "2", "--json", *flags(SETTINGS | {"finetune.head": head})),
        )
        assert run.returncode == 0, run.stderr
        results[name] = (out / name, json.loads(run.stdout)[name], run.stderr)
    return results


@pytest.mark.parametrize("name, version", [("squad1", "1.1"), ("squad2", "2.0")])
def test_scores_and_files_of_squad(readers, squad_folder, name, version):
    folder, results, stderr = readers[name]
    assert results["metric"] == "f1" and len(results["runs"]) == 2
    assert results["medians"]["f1"] == pytest.approx(np.median([run["f1"] for run in results["runs"]]))
    assert 0 <= results["medians"]["exact_match"] <= results["medians"]["f1"] <= 1
    assert results["runs"][0]["f1_unit"] == "words" and "f1_unit" not in results["medians"]
    assert "training chunks of at most 48 tokens" in stderr
    contexts = {id: context for id, _, context in questions_of(squad_folder / f"dev-v{version}.json")}
    predictions = json.loads((folder / "seed-0" / "predictions.dev.json").read_text())
    assert predictions.keys() == contexts.keys()
    assert all(text and text in contexts[id] for id, text in predictions.items())
    odds = folder / "seed-0" / "predictions.dev.null_odds.json"
    assert odds.exists() == (name == "squad2")
    if name == "squad2":
        assert json.loads(odds.read_text()).keys() == contexts.keys()
        settings = json.loads((folder / "seed-0" / "model" / "config.json").read_text())["electra_fast_settings"]
        assert settings["null_threshold"] == results["runs"][0]["null_threshold"]
        assert settings["doc_stride"] == 12 and settings["max_query_length"] == 16


@pytest.mark.parametrize("name, version", [("squad1", "1.1"), ("squad2", "2.0")])
def test_loaded_model_repeats_predictions(readers, squad_folder, tmp_path, name, version):
    """A model loaded from its folder gives the same answers as at the end of training, in the file's order."""
    folder, _, _ = readers[name]
    file = squad_folder / f"dev-v{version}.json"
    run = in_process.run("predict", folder / "seed-1" / "model", file, "--null-threshold", "1e9", "--n-best", "3")
    assert run.returncode == 0, run.stderr
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    predictions = json.loads((folder / "seed-1" / "predictions.dev.json").read_text())
    assert [answer["id"] for answer in answers] == [id for id, _, _ in questions_of(file)]
    for answer, (_, _, context) in zip(answers, questions_of(file), strict=True):
        assert answer["answer"] == predictions[answer["id"]] == context[answer["start"] : answer["end"]]
        assert answer["n_best"][0]["answer"] == answer["answer"] and len(answer["n_best"]) == 3
        assert answer["score"] == max(candidate["score"] for candidate in answer["n_best"])
    if name == "squad2":
        odds = json.loads((folder / "seed-1" / "predictions.dev.null_odds.json").read_text())
        assert [answer["null_odds"] for answer in answers] == pytest.approx([odds[a["id"]] for a in answers], abs=1e-5)


def test_null_threshold_and_unusable_questions(readers):
    folder, _, _ = readers["squad2"]
    reader = ef.load(folder / "seed-0" / "model")
    pair = ("Which class of it?", "The class of a value.")
    (answer,) = reader.predict([pair], null_threshold=1e9)
    assert answer["answer"] == pair[1][answer["start"] : answer["end"]] != ""
    (nothing,) = reader.predict([pair], null_threshold=-1e9)
    assert (nothing["answer"], nothing["start"], nothing["end"]) == ("", None, None)
    assert nothing["null_odds"] == answer["null_odds"]
    assert reader.predict([{"question": pair[0], "context": pair[1]}], null_threshold=1e9) == [answer]
    assert reader.predict([]) == []
    for wrong in (["text"], [("a", "b", "c")], [{"question": "a"}], [("a", 3)]):
        with pytest.raises(InputError, match="example 0 = |row 1: no 'context'"):
            reader.predict(wrong)
    with pytest.raises(InputError, match="n_best = 0: must be at least 1"):
        reader.predict([pair], n_best=0)
    with pytest.raises(InputError, match="--threshold: is not for question-answering"):
        reader.predict([pair], threshold=0.5)
    with pytest.raises(InputError, match="question 1: its context has no tokens"):
        reader.predict([pair, ("Which?", " \u200b ")])


def test_answers_do_not_depend_on_other_questions(readers):
    """Contexts of one and of many chunks, with emoji and right-to-left text."""
    folder, _, _ = readers["squad2"]
    reader = ef.load(folder / "seed-0" / "model")
    contexts = [
        "The class of a value.",
        "The name of an object, a list. " * 20,
        "שלום עולם class 😀👩‍👩‍👧 of value; 日本 list.",
        "x",
    ]
    pairs = [(f"Which class {i}?", context) for i, context in enumerate(contexts)]
    together = reader.predict(pairs, null_threshold=1e9)
    for number, (pair, answer) in enumerate(zip(pairs, together, strict=True)):
        (alone,) = reader.predict([pair], null_threshold=1e9)
        assert (alone["start"], alone["end"]) == (answer["start"], answer["end"])
        assert alone["score"] == pytest.approx(answer["score"], abs=1e-5)
        assert answer["answer"] == pair[1][answer["start"] : answer["end"]]
        assert answer["id"] == str(number)


def test_finetune_and_predict_questions_of_a_user(encoder_folder, tmp_path):
    rows = []
    for article in articles(20, seed=3, unanswerable=0.3):
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                answers = [answer["text"] for answer in question["answers"]]
                rows.append({"context": paragraph["context"], "question": question["question"], "answers": answers})
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    run = in_process.run(
        *("finetune", encoder_folder, "--task", "question-answering", "--train", tmp_path / "own.jsonl"),
        *("--test", tmp_path / "own.jsonl", "--out", out, *flags(SETTINGS)),
    )
    assert run.returncode == 0, run.stderr
    assert "become the validation set" in run.stderr
    results = json.loads((out / "results.json").read_text())["question-answering"]
    assert {"f1", "exact_match", "null_threshold", "f1_test"} <= results["runs"][0].keys()
    assert "null_threshold_test" not in results["runs"][0]  # the test split uses the validation set's threshold
    model = out / "question-answering" / "seed-0" / "model"
    run = in_process.run("predict", model, tmp_path / "own.jsonl", "--out", tmp_path / "answers.jsonl")
    assert run.returncode == 0, run.stderr
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["id"] for answer in answers] == [str(i) for i in range(len(rows))]
    assert [answer["answers"] for answer in answers] == [row["answers"] for row in rows]  # the other columns


def test_unanswerable_questions_in_dev_only(tmp_path):
    row = {"context": "The class of a value.", "question": "Which?", "answers": ["class"]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "dev.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"answers": []}) + "\n")
    assert read_questions(tmp_path / "train.jsonl", tmp_path / "dev.jsonl", None).task.has_unanswerable
    assert not read_questions(tmp_path / "train.jsonl", tmp_path / "train.jsonl", None).task.has_unanswerable


def test_notes_on_answers_that_are_too_long(tiny_vocab, tmp_path):
    context = "the class of a value " * 30
    golds = ["class", context[:104], context[:-1]]
    rows = [{"context": context, "question": "which?", "answers": [gold]} for gold in golds]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = read_questions(tmp_path / "own.jsonl", tmp_path / "own.jsonl", None)
    config = FinetuneSection(sequence_length=64, max_query_length=8, doc_stride=16, max_answer_length=20)
    method = QuestionAnswering()
    tokenizer = ef.Tokenizer(tiny_vocab)
    chunks = method.training_set(tokenizer, data.task, data.train, config)
    long, nowhere = chunks.notes
    num_tokens = len(tokenizer.encode_batch([golds[1]])[0])
    assert long.startswith("answers to 1 training questions are longer than finetune.max_answer_length = 20 tokens")
    assert long.endswith(f"(longest: {num_tokens}), so they can never be predicted")
    message = "answers to 1 training questions are complete in no chunk of finetune.sequence_length = 64 tokens"
    assert nowhere.startswith(message)
