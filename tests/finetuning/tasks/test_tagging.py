"""Scores of tags; tagging from the command line and from Python: training, long texts, spans as in transformers."""

import json
import os
import random
import warnings
from dataclasses import replace
from pathlib import Path

import in_process
import numpy as np
import pytest
import squad_reference
import torch
from seqeval import metrics as seqeval_metrics
from tiny_reading import SETTINGS, tagged_sentences
from transformers import AutoModelForTokenClassification, AutoTokenizer, ElectraForTokenClassification, pipeline

import electra_fast as ef
from electra_fast.data.corpus import Tokenizer
from electra_fast.errors import InputError
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.prediction_input import Source, open_examples
from electra_fast.finetuning.readers.table_formats import MemoryTable
from electra_fast.finetuning.readers.tag_files import read_tagging
from electra_fast.finetuning.task import Task
from electra_fast.finetuning.task_data import read_tasks
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.finetuning.tasks.entity_scores import tag_scores
from electra_fast.finetuning.tasks.tagging import Tagging

IOB2 = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


def task_of(labels, scheme="IOB2", metric="f1"):
    return Task(name="tagging", kind="tagging", labels=labels, metric=metric, scheme=scheme)


def ids_of(labels, *sentences):
    return [np.array([labels.index(tag) for tag in sentence.split()]) for sentence in sentences]


def seqeval_scores(truth, predicted):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = {
            "precision": seqeval_metrics.precision_score(truth, predicted, zero_division=0),
            "recall": seqeval_metrics.recall_score(truth, predicted, zero_division=0),
            "f1": seqeval_metrics.f1_score(truth, predicted, zero_division=0),
            "accuracy": seqeval_metrics.accuracy_score(truth, predicted),
        }
        report = seqeval_metrics.classification_report(truth, predicted, zero_division=0, output_dict=True)
    types = {name: row for name, row in report.items() if not name.endswith("avg") and row["support"]}
    return scores | {f"f1_{name}": row["f1-score"] for name, row in types.items()}


def test_scores_without_predicted_or_annotated_entities():
    nothing = ids_of(IOB2, "O O")
    something = ids_of(IOB2, "B-PER O")
    zeros = {"precision": 0, "recall": 0, "f1": 0}
    assert tag_scores(task_of(IOB2), nothing, nothing) == zeros | {"accuracy": 1}
    assert tag_scores(task_of(IOB2), nothing, something) == zeros | {"accuracy": 0.5}
    assert tag_scores(task_of(IOB2), something, nothing) == zeros | {"accuracy": 0.5, "f1_PER": 0}


@pytest.mark.parametrize("prefixes", ["BI", "BIES"])
def test_entity_scores_equal_seqeval(prefixes):
    rng = random.Random(prefixes)
    labels = ("O", *(f"{prefix}-{type_}" for type_ in "XYZ" for prefix in prefixes))
    for _ in range(30):
        truth = [rng.choices(labels, k=rng.randint(1, 10)) for _ in range(rng.randint(1, 20))]
        predicted = [[tag if rng.random() < 0.7 else rng.choice(labels) for tag in sentence] for sentence in truth]
        ids = [ids_of(labels, *map(" ".join, sentences)) for sentences in (truth, predicted)]
        # A split's targets are an array of arrays.
        targets = np.fromiter(ids[0], dtype=object, count=len(ids[0]))
        scores = tag_scores(task_of(labels), targets, ids[1])
        assert scores == pytest.approx(seqeval_scores(truth, predicted), rel=1e-12)
        assert all(type(value) is float for value in scores.values())


def test_tags_without_a_scheme_are_classes():
    task = task_of(tuple("AB"), "none", "accuracy")
    scores = tag_scores(task, [np.array([0, 1]), np.array([1])], [np.array([0, 0]), np.array([1])])
    assert scores == pytest.approx({"accuracy": 2 / 3, "f1_macro": 2 / 3})


@pytest.fixture(scope="module")
def tagger(encoder_folder, conll_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("tagging")
    settings = SETTINGS | {"finetune.epochs": "12", "finetune.learning_rate": "2e-3"}
    arguments = {"train": conll_folder / "train.conll", "dev": conll_folder / "dev.conll"}
    results = ef.finetune(encoder_folder, task="tagging", out=out, overrides=settings, **arguments)
    return out / "tagging", results["tagging"]


def test_logits_equal_transformers(tagger):
    """In a text of several chunks, each word is taken from the chunk in which it has the most context."""
    folder = tagger[0] / "seed-0" / "model"
    reference = AutoModelForTokenClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = next(tokens for tokens, _ in tagged_sentences(50, 9, (60, 80)))
    pieces = [tokenizer.encode(word, add_special_tokens=False) for word in words]
    flat = [piece for word_pieces in pieces for piece in word_pieces]
    first = np.cumsum([0, *map(len, pieces)])
    spans = squad_reference.chunk_spans(len(flat), 46, 12)
    outputs = []
    for start, length in spans:
        ids = [tokenizer.cls_token_id, *flat[start : start + length], tokenizer.sep_token_id]
        with torch.no_grad():
            outputs.append(reference(torch.tensor([ids])).logits[0, 1:-1].numpy())

    chosen = [squad_reference.chunk_of_most_context(spans, piece) for piece in first[:-1]]
    expected = [outputs[chunk][first[i] - spans[chunk][0]] for i, chunk in enumerate(chosen)]
    assert len(set(chosen)) > 2
    np.testing.assert_allclose(ef.load(folder).outputs([words]), expected, atol=1e-5)


def test_spans_equal_the_pipeline(tagger):
    """Words have one piece each, so that `transformers` finds the same entities; offsets count code points."""
    folder = tagger[0] / "seed-0" / "model"
    texts = ["the object of module file", "the 😀 class returns שלום line", "value", ""]
    find = pipeline("token-classification", str(folder), aggregation_strategy="first")
    call = 'pipeline("token-classification", "path/to/this/folder", aggregation_strategy="first")'
    assert call in (folder / "README.md").read_text()
    for text, answer in zip(texts, ef.load(folder).predict(texts), strict=True):
        entities = find(text) if text else []
        expected = [(entity["start"], entity["end"], entity["entity_group"]) for entity in entities]
        assert [(span["start"], span["end"], span["label"]) for span in answer["spans"]] == expected
        assert all(text[span["start"] : span["end"]] == span["text"] for span in answer["spans"])


def test_letters_that_share_a_token_are_in_one_entity(tmp_path):
    """In scripts without spaces each letter is a word, and the first letter of a token decides."""
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "タワー", "##の", "##タワー"]) + "\n"
    )
    train = tmp_path / "train.jsonl"
    train.write_text(json.dumps({"text": "タワーのタワー", "spans": [[0, 3, "X"], [4, 7, "X"]]}) + "\n")
    data = read_tagging(train, train, None)
    method = Tagging()
    config = FinetuneSection()
    tokenizer = Tokenizer(tmp_path)
    features = method.features(tokenizer, data.train, config)
    targets = method.training_set(tokenizer, data.task, data.train, config).targets
    assert [data.task.labels[target] for target in targets[targets >= 0]] == ["B-X", "O", "B-X"]
    outputs = np.eye(3)[targets[features.places]]
    assert method.scores(data.task, data.train, features, outputs, {})["f1"] == 1
    (answer,) = method.answers(data.task, data.train, features, outputs, {})
    assert [(span["start"], span["end"]) for span in answer["spans"]] == [(0, 3), (4, 7)]


def test_prediction_of_files(tagger, conll_folder, tmp_path):
    """The words of long sentences are in several chunks."""
    folder = tagger[0] / "seed-0"
    results = tagger[1]
    assert results["metric"] == "f1" and results["median"] > 0.9
    run = in_process.run("predict", folder / "model", conll_folder / "dev.conll")
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    stored = [json.loads(line) for line in (folder / "predictions.dev.jsonl").read_text().splitlines()]
    assert [answer["tags"] for answer in answers] == [answer["tags"] for answer in stored]
    sentences = [tags for _, tags in tagged_sentences(20, 1, (3, 70))]
    assert [len(answer["tags"]) for answer in answers] == list(map(len, sentences)) and max(map(len, sentences)) > 46
    (tmp_path / "lines.txt").write_text("the object of it\n\nmodule file\n")
    run = in_process.run("predict", folder / "model", tmp_path / "lines.txt")
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert [answer["words"] for answer in answers] == [["the", "object", "of", "it"], [], ["module", "file"]]
    assert [len(answer["tags"]) for answer in answers] == [4, 0, 2]
    with pytest.raises(InputError, match="example 0 = 3: must be a text or a list of words"):
        ef.load(folder / "model").predict([3])


def test_rows_with_lists_of_words_keep_other_columns(tagger, tmp_path):
    folder = tagger[0] / "seed-0/model"
    rows = '{"id": "7", "tokens": ["the", "object"], "tags": "x"}\n{"tokens": [null]}\n'
    (tmp_path / "rows.jsonl").write_text(rows)
    (answer,) = ef.load(folder).predict(["the object"])
    run = in_process.run("predict", folder, tmp_path / "rows.jsonl", "--skip-bad-rows", "1")
    assert json.loads(run.stdout) == {"id": "7"} | answer | {"input": {"tags": "x"}}
    assert "line 2: tokens = None: must be a word" in run.stderr


def test_class_weights_of_tags_and_types(tiny_vocab):
    rows = [{"tokens": ["the", "class", "value"], "tags": tags} for tags in (["B-X", "I-X", "O"], ["B-Y", "O", "O"])]
    others = [row | {"tokens": ["a", "b", "c"]} for row in rows]
    tables = {"train": MemoryTable.of("train", rows), "dev": MemoryTable.of("dev", others)}
    (data,) = read_tasks("tagging", files=tables)
    assert data.task.labels == ("O", "B-X", "I-X", "B-Y", "I-Y")
    for text, expected in (
        ("none", [1, 1, 1, 1, 1, 1]),
        ("X=3,I-X=4,O=0", [3, 4, 0, 1, 0, 0]),
        ("balanced", [3 / 2, 3 / 2, 1 / 2, 3 / 2, 1 / 2, 1 / 2]),
    ):
        config = FinetuneSection(sequence_length=8, class_weights=text)
        chunks = Tagging().training_set(ef.Tokenizer(tiny_vocab), data.task, data.train, config)
        assert chunks.weights[chunks.targets >= 0].tolist() == pytest.approx(expected)
        assert not chunks.weights[chunks.targets < 0].any()


def test_tagger_from_transformers(encoder_folder, tmp_path):
    """Labels without prefixes result in a span for each word."""
    labels = {0: "NOUN", 1: "VERB", 2: "X"}
    model = ElectraForTokenClassification.from_pretrained(encoder_folder, id2label=labels, num_labels=3)
    model.save_pretrained(tmp_path)
    for name in ("vocab.txt", "tokenizer_config.json"):
        (tmp_path / name).write_text((encoder_folder / name).read_text())
    (answer,) = ef.load(tmp_path).predict(["The class returns"])
    with torch.no_grad():
        inputs = AutoTokenizer.from_pretrained(tmp_path)("The class returns", return_tensors="pt")
        places = [inputs.word_ids().index(word) for word in range(3)]
        best = model.eval()(**inputs).logits[0, places].softmax(1).max(1)
    expected = [labels[i] for i in best.indices.tolist()]
    assert answer["scores"] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert answer["tags"] == expected == [span["label"] for span in answer["spans"]]
    assert [span["text"] for span in answer["spans"]] == ["The", "class", "returns"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.conll", "# id 1\nAnn B-PER\nmet O\n\nBob B-PER\n"),
        ("a.tsv", "#\tsource\n1\tAnn\tB-PER\tO\n2\tmet\tO\tO\n\n#\tother\n1\tBob\tB-PER\tO\n"),
        ("a.txt", "Ann met\nBob\n"),
    ],
)
def test_pipe_is_predicted_like_a_file(tmp_path, name, content):
    def examples(path):
        with open_examples(TASK_TYPES["tagging"], Source(path=path)) as source:
            return [example for example, _ in source.rows]

    (tmp_path / name).write_text(content)
    reading, writing = os.pipe()
    os.write(writing, content.encode())
    os.close(writing)
    try:
        texts = examples(Path(f"/dev/fd/{reading}"))
    finally:
        os.close(reading)
    assert texts == examples(tmp_path / name)
    assert [" ".join(text) if isinstance(text, list) else text for text in texts] == ["Ann met", "Bob"]


def test_bad_rows_of_a_copied_stream_are_reported(tmp_path):
    row = json.dumps({"text": "Ann", "tokens": [{"text": "Ann"}]})
    (tmp_path / "a.dat").write_text(f"{row}\n{{broken\n{row}\n")
    source = Source(path=tmp_path / "a.dat", format="jsonl")
    with open_examples(TASK_TYPES["tagging"], source) as opened, pytest.raises(InputError, match="line 2: not a JSON"):
        list(opened.rows)
    with open_examples(TASK_TYPES["tagging"], replace(source, skip_bad_rows=1)) as opened:
        assert [example for example, _ in opened.rows] == [["Ann"], ["Ann"]]
        assert any("1 bad row is left out" in note and "line 2" in note for note in opened.notes)
