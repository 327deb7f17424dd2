"""Reports: numbers compared with scikit-learn, seqeval and definitions; pictures and files."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from nervaluate import Evaluator
from scipy.stats import pearsonr, spearmanr
from seqeval.metrics import classification_report as seqeval_report
from sklearn import metrics

from electra_fast.finetuning.readers.tag_schemes import from_entities
from electra_fast.finetuning.report.report import make_report, write_report
from electra_fast.finetuning.report.sections import draw_confusion
from electra_fast.finetuning.report.train_overlap import find_duplicates, label_shares
from electra_fast.finetuning.task import Answer, Split, Task
from electra_fast.finetuning.tasks.tagging import tag_answer

LABELS = ("a", "b|c", "d$e$", "never")
CLASSES = Task(name="classification", kind="classification", labels=LABELS, metric="accuracy")


def split_of(targets, texts=None, **rest):
    texts = texts or [(f"text {row}",) for row in range(len(targets))]
    ids = [f"id-{row}" for row in range(len(texts))]
    return Split(**{"name": "dev", "path": Path("dev.csv"), "texts": texts, "targets": targets, "ids": ids} | rest)


def answered(count=300, seed=0):
    """Returns gold classes, predicted classes, their probabilities, and the answers, from a noisy model."""
    rng = np.random.default_rng(seed)
    gold = rng.integers(3, size=count)
    logits = rng.normal(size=(count, len(LABELS))) + 1.5 * np.eye(len(LABELS))[gold]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    answers = [
        {"label": LABELS[row.argmax()], "scores": dict(zip(LABELS, row.tolist(), strict=True))} for row in probabilities
    ]
    return gold, probabilities.argmax(1), probabilities.max(1), answers


@pytest.mark.parametrize(("seed", "count"), [(0, 300), (2, 3)])
def test_classes_and_confusions_equal_scikit_learn(seed, count):
    """With few examples, some classes do not occur; averages over classes equal the scores."""
    gold, predicted, _, answers = answered(count, seed)
    content = make_report(CLASSES, [(split_of(gold), answers)]).content
    options = {"output_dict": True, "zero_division": 0.0}
    expected = metrics.classification_report(gold, predicted, labels=range(4), target_names=LABELS, **options)
    for label, row in content["classes"].items():
        values = [row["precision"], row["recall"], row["f1"], row["support"]]
        assert values == pytest.approx(list(expected[label].values()))
    expected = metrics.classification_report(gold, predicted, **options)
    for name, row in content["averages"].items():
        assert list(row.values()) == pytest.approx(list(expected[f"{name} avg"].values())[:3])
    scores = {name: row["model"] for name, row in content["scores"].items()}
    assert scores["f1_macro"] == pytest.approx(content["averages"]["macro"]["f1"])
    assert scores["matthews"] == pytest.approx(metrics.matthews_corrcoef(gold, predicted))
    matrix = np.diag([row["correct"] for row in content["classes"].values()])
    for pair in content["confusion"]:
        matrix[LABELS.index(pair["gold"]), LABELS.index(pair["predicted"])] = pair["count"]
    np.testing.assert_array_equal(matrix, metrics.confusion_matrix(gold, predicted, labels=range(4)))
    counts = [pair["count"] for pair in content["confusion"]]
    assert counts == sorted(counts, reverse=True)
    assert scores["accuracy"] == pytest.approx((gold == predicted).mean())


def test_calibration_error_equals_its_definition():
    gold, predicted, confidence, answers = answered()
    calibration = make_report(CLASSES, [(split_of(gold), answers)]).content["calibration"]
    expected = 0.0
    for number in range(15):
        is_in_bin = (confidence > number / 15) & (confidence <= (number + 1) / 15)
        if is_in_bin.any():
            accuracy = (gold == predicted)[is_in_bin].mean()
            expected += is_in_bin.mean() * abs(accuracy - confidence[is_in_bin].mean())
    assert calibration["expected_calibration_error"] == pytest.approx(expected)
    assert sum(row["count"] for row in calibration["bins"]) == len(gold)


def test_most_confident_errors_come_first():
    gold, predicted, confidence, answers = answered()
    split = split_of(gold, columns=[{"ticket": row} for row in range(len(gold))])
    errors = make_report(CLASSES, [(split, answers)]).content["errors"]
    wrong = np.flatnonzero(gold != predicted)
    worst = wrong[np.argsort(-confidence[wrong], kind="stable")][:50]
    assert [error["columns"]["ticket"] for error in errors] == worst.tolist() and len(worst) == 50
    first = worst[0]
    assert errors[0] == {
        "id": f"id-{first}",
        "text": f"text {first}",
        "columns": {"ticket": first},
        "gold": LABELS[gold[first]],
        "label": LABELS[predicted[first]],
        "score": confidence[first],
        "gold_score": answers[first]["scores"][LABELS[gold[first]]],
    }


def test_multi_label_counts_equal_scikit_learn():
    rng = np.random.default_rng(1)
    task = Task(name="classification", kind="multi-label", labels=LABELS, metric="f1_micro")
    gold = rng.integers(2, size=(80, 4))
    scores = rng.uniform(size=(80, 4))
    gold[:, 1] = 0
    scores[:, 1] = scores[:, 1] / 2  # a label that never occurs
    chosen = scores > 0.6  # the model's threshold
    answers = [
        {"labels": [LABELS[c] for c in np.flatnonzero(has)], "scores": dict(zip(LABELS, row.tolist(), strict=True))}
        for has, row in zip(chosen, scores, strict=True)
    ]
    content = make_report(task, [(split_of(gold.astype(np.float32)), answers)]).content
    for row, true, predicted in zip(content["classes"].values(), gold.T, chosen.T, strict=True):
        counts = row["correct"], row["predicted"], row["support"]
        assert counts == ((true & predicted).sum(), predicted.sum(), true.sum())
    assert content["scores"]["accuracy"]["model"] == pytest.approx((gold == chosen).all(1).mean())
    shown = content["scores"]
    occurs = (gold | chosen).any(0)
    assert not occurs.all() and shown["f1_macro"]["model"] == pytest.approx(content["averages"]["macro"]["f1"])
    expected = metrics.f1_score(gold, chosen, average="macro", labels=np.flatnonzero(occurs), zero_division=0.0)
    assert shown["f1_macro"]["model"] == pytest.approx(expected)
    pairs = {(row["gold"], row["predicted"]): row["count"] for row in content["confusion"]}
    assert pairs["a", "never"] == ((gold[:, 0] > chosen[:, 0]) & (gold[:, 3] < chosen[:, 3])).sum()
    fractions = {(row["gold"], row["predicted"]): row["share_of_gold"] for row in content["confusion"]}
    assert fractions["a", "never"] == pairs["a", "never"] / gold[:, 0].sum()
    error = content["errors"][0]
    row = int(error["id"].removeprefix("id-"))
    c = LABELS.index(error["label"])
    assert error["is_gold"] == bool(gold[row, c]) != chosen[row, c]
    assert np.where(chosen, scores, 1 - scores)[gold != chosen].max() == max(error["score"], 1 - error["score"])


@pytest.mark.parametrize("kind", ["varied", "constant gold", "constant values"])
def test_residuals_equal_scikit_learn(kind):
    rng = np.random.default_rng(2)
    gold = rng.normal(50, 20, size=120) * (kind != "constant gold")
    values = (gold + rng.normal(size=120) * 5) if kind != "constant values" else np.full(120, 3.0)
    task = Task(name="regression", kind="regression", metric="spearman")
    report = make_report(task, [(split_of(gold), [{"value": value} for value in values.tolist()])])
    residuals = report.content["residuals"]
    scores = report.content["scores"]
    assert residuals["mean_absolute_error"] == pytest.approx(metrics.mean_absolute_error(gold, values))
    assert residuals["root_mean_square_error"] == pytest.approx(metrics.root_mean_squared_error(gold, values))
    assert residuals["r2"] == (None if kind == "constant gold" else pytest.approx(metrics.r2_score(gold, values)))
    for name, function in (("spearman", spearmanr), ("pearson", pearsonr)):
        expected = function(gold, values).statistic if kind == "varied" else 0
        assert scores[name]["model"] == pytest.approx(expected)
    assert residuals["quantile_50"] == pytest.approx(np.median(values - gold))
    worst = np.argsort(-np.abs(values - gold))[:50]
    assert [error["id"] for error in report.content["errors"]] == [f"id-{row}" for row in worst]


TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
GOLD = "B-PER I-PER O B-LOC O B-PER O O B-LOC I-LOC"
PREDICTED = "B-PER I-PER O B-PER O O B-LOC O O B-LOC"


def tagged(pairs, labels=TAGS, scheme="IOB2"):
    """Returns the report on sentences w0 w1 ... with gold and predicted tags separated by spaces."""
    task = Task(name="tagging", kind="tagging", labels=labels, metric="f1", scheme=scheme)
    targets = []
    texts = []
    places = []
    answers = []
    for pair in pairs:
        ids = [[labels.index(tag) for tag in tags.split()] for tags in pair]
        starts = np.arange(len(ids[0])) * 3
        texts.append((" ".join(f"w{n}" for n in range(len(starts))),))
        places.append(np.stack((starts, starts + 2), 1))
        targets.append(np.array(ids[0]))
        answers.append(tag_answer(texts[-1][0], places[-1], 5 * np.eye(len(labels))[ids[1]], labels, scheme))
    nested = np.fromiter(targets, dtype=object, count=len(targets))
    return make_report(task, [(split_of(nested, texts, words=places), answers)]).content


def test_entity_errors_and_partial_matches():
    """The entities: correct, with another type, missed, spurious, and predicted without the first word."""
    content = tagged([(GOLD, PREDICTED), ("O O", "O O")])
    kinds = ("correct", "wrong_span", "wrong_type", "wrong_both", "missed", "spurious")
    outcomes = {type_: [row[kind] for kind in kinds] for type_, row in content["entity_types"].items()}
    assert outcomes == {"PER": [1, 0, 0, 0, 1, 0], "LOC": [0, 1, 1, 0, 0, 1]}
    f1 = {"strict": 1 / 4, "exact": 2 / 4, "partial": 2.5 / 4, "type": 2 / 4}
    assert {scheme: row["f1"] for scheme, row in content["matching"].items()} == pytest.approx(f1)
    assert content["type_confusion"] == [{"gold": "LOC", "predicted": "PER", "count": 1}]
    (error,) = content["errors"]
    missed = [("LOC", "w3"), ("PER", "w5"), ("LOC", "w8 w9")]
    assert [(span["label"], span["text"]) for span in error["missed"]] == missed
    assert [span["text"] for span in error["wrong"]] == ["w3", "w6", "w9"]


def entity_tags(rng, length):
    """Returns IOB2 tags of random entities."""
    entities = []
    place = 0
    while (start := place + int(rng.integers(3))) < length:
        place = min(length, start + int(rng.integers(1, 7)))
        entities.append((start, place, ("PER", "LOC")[rng.integers(2)]))
    return " ".join(from_entities(entities, length))


@pytest.mark.parametrize("kind", ["random", "shattered", "merged"])
def test_entity_matches_equal_nervaluate_and_seqeval(kind):
    """An annotated entity that is predicted in pieces counts once."""
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(150):
        gold, predicted = (entity_tags(rng, 12) for _ in range(2))
        if kind != "random":
            pieces = [tag.replace("I-", "B-") if rng.random() < 0.4 else tag for tag in gold.split()]
            gold, predicted = (gold, " ".join(pieces)) if kind == "shattered" else (" ".join(pieces), gold)
        pairs.append((gold, predicted))
    content = tagged(pairs)
    golds, predictions = ([tags.split() for tags in sentences] for sentences in zip(*pairs, strict=True))
    overall = Evaluator(golds, predictions, tags=["PER", "LOC"], loader="list").evaluate()["overall"]
    for scheme, row in content["matching"].items():
        expected = overall["ent_type" if scheme == "type" else scheme]
        assert row == pytest.approx({name: getattr(expected, name) for name in row})
    assert content["matching"]["strict"]["f1"] == pytest.approx(content["scores"]["f1"]["model"])
    by_type = seqeval_report(golds, predictions, output_dict=True, zero_division=0)
    for type_, row in content["entity_types"].items():
        names = ("precision", "recall", "f1", "support")
        assert [row[name] for name in names] == pytest.approx([*by_type[type_].values()])
        outcomes = ("correct", "wrong_span", "wrong_type", "wrong_both", "missed")
        assert row["support"] == sum(row[outcome] for outcome in outcomes)
    spurious = sum(row["spurious"] for row in content["entity_types"].values())
    assert spurious == content["matching"]["strict"]["spurious"]


def test_plain_tags_are_reported_as_classes():
    content = tagged([("N V", "N V"), ("N N V", "N V N")], ("N", "V"), "none")
    expected = metrics.classification_report([*"NVNNV"], [*"NVNVN"], output_dict=True)
    assert content["classes"]["V"]["f1"] == expected["V"]["f1-score"] and content["scores"]["accuracy"]["model"] == 0.6
    assert content["errors"][0]["missed"] == [{"label": "N", "text": "w1"}, {"label": "V", "text": "w2"}]


def test_questions_are_scored_by_length_and_first_word():
    context = "The old name of the file is a long list of words in it."
    questions = [("What file?", "old name"), ("What list?", "long list of words")]
    questions += [("Where?", ""), ("What is it?", "list")]
    predicted = ["name", "long list of words", "old", "words"]
    targets = np.empty(4, object)
    targets[:] = [(Answer(text, context.index(text)),) if text else () for _, text in questions]
    task = Task(name="question-answering", kind="question-answering", metric="f1", has_unanswerable=True)
    split = split_of(targets, [(question, context) for question, _ in questions])
    answers = [{"answer": text, "start": context.index(text), "score": 0.5} for text in predicted]
    train = split_of(targets[:2], [("x", context), ("y", context)])
    content = make_report(task, [(split, answers)], train=train).content
    assert content["answer_lengths"] == {
        "1": {"exact_match": 0, "f1": 0, "questions": 1},
        "2": {"exact_match": 0, "f1": pytest.approx(2 / 3), "questions": 1},
        "3-4": {"exact_match": 1, "f1": 1, "questions": 1},
        "no answer": {"exact_match": 0, "f1": 0, "questions": 1},
    }
    assert content["first_words"]["what"]["questions"] == 3 and content["first_words"]["other"]["questions"] == 1
    scores = {name: row["model"] for name, row in content["scores"].items()}
    assert scores["f1"] == pytest.approx(5 / 12) and scores["no_answer_accuracy"] == 0
    assert [error["id"] for error in content["errors"]] == ["id-2", "id-3", "id-0"]
    assert content["errors"][0]["gold"] == [] and "old name" in content["errors"][2]["context"]
    assert content["label_shares"]["no answer"] == {"train": 0.0, "dev": 0.25, "difference": 0.25}


def test_report_joins_parts_without_unlabeled_examples():
    gold, _, _, answers = answered(20)
    whole = make_report(CLASSES, [(split_of(gold), answers)])
    texts = [(f"text {row}",) for row in range(7, 21)]
    ids = [f"id-{row}" for row in range(7, 21)]
    first = split_of(gold[:7])
    second = split_of(np.append(gold[7:], -1), texts)
    second = dataclasses.replace(second, ids=ids)
    parts = make_report(CLASSES, [(first, answers[:7]), (second, [*answers[7:], answers[0]])])
    assert parts.content == whole.content


def test_duplicates_and_scores_without_them():
    words = "one two three four five six seven eight nine ten".split()
    near = " ".join([*words[:9], "other"])  # 9 of 11 words
    train = split_of(np.zeros(4, int), [("A  text, here!",), (" ".join(words),), ("你好 世界",), ("!?",)])
    texts = [("a text here",), (near,), (" ".join([*words[:8], "x", "y"]),), ("你好世界",), ("!?",), ("a text",)]
    repeats = find_duplicates(train, split_of(np.zeros(6, int), texts))
    rows = [(duplicate.row, duplicate.train_row, duplicate.is_exact) for duplicate in repeats]
    assert rows == [(0, 0, True), (1, 1, False), (3, 2, True)] and repeats[1].jaccard == 9 / 11
    pair = split_of(np.zeros(1, int), [("Which one?", " ".join(words))])
    others = split_of(np.zeros(3, int), [("Which other", " ".join(words)), ("one, which", near), ("", near)])
    assert [(duplicate.row, duplicate.jaccard) for duplicate in find_duplicates(pair, others)] == [(1, 9 / 11)]
    answers = [{"label": "a", "scores": {"a": 0.9, "b|c": 0.1}}] * 6
    split = split_of(np.array([0, 0, 1, 0, 0, 1]), texts)
    content = make_report(CLASSES, [(split, answers)], train=train, baselines={"majority": {"accuracy": 0.5}}).content
    duplicates = content["duplicates"]
    assert (duplicates["exact"], duplicates["near"]) == (2, 1)
    assert duplicates["scores"]["accuracy"] == {"all": pytest.approx(4 / 6), "without_duplicates": pytest.approx(1 / 3)}
    assert duplicates["examples"][1]["train_text"] == " ".join(words)
    assert content["scores"]["accuracy"]["majority"] == 0.5 and "warning" not in content
    content = make_report(CLASSES, [(split, answers)], train=split).content
    assert "the texts of all 6 validation examples are in the training split" in content["warning"]


def test_near_duplicates_equal_a_comparison_of_all_pairs():
    rng = np.random.default_rng(3)
    texts = [(" ".join(f"w{n}" for n in rng.zipf(1.2, rng.integers(1, 12)) % 15),) for _ in range(400)]
    train = split_of(np.zeros(300), texts[:300])
    dev = split_of(np.zeros(100), texts[300:])
    near = {duplicate.row: duplicate.jaccard for duplicate in find_duplicates(train, dev) if not duplicate.is_exact}
    best = {}
    for row, (text,) in enumerate(dev.texts):
        words = {*text.split()}
        jaccard = max(len(words & {*other.split()}) / len(words | {*other.split()}) for (other,) in train.texts)
        if jaccard >= 0.8 and (text,) not in train.texts:
            best[row] = jaccard
    assert near == best and len(best) > 10


def test_label_frequencies_are_sorted_by_difference():
    shares = label_shares({"a": 80, "b": 20}, {"a": 1, "c": 1})
    assert list(shares) == ["c", "a", "b"] and shares["b"] == {"train": 0.2, "dev": 0.0, "difference": -0.2}


def test_report_files_are_deterministic(tmp_path):
    task = dataclasses.replace(CLASSES, labels=("类 0", *LABELS[1:3]))  # the font lacks the character
    answers = [{"label": task.labels[n % 3], "scores": {task.labels[n % 3]: 0.9}} for n in range(30)]
    texts = [(f"a | line\nand <b>another {n}</b>" + " long" * 100,) for n in range(30)]
    split = split_of(answered(30)[0], texts)
    folders = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_report(tmp_path / name, make_report(task, [(split, answers)], train=split_of(split.targets)))
        folders.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    names = {"report.json", "report.md", "confusion.png", "calibration.png"}
    assert folders[0] == folders[1] and folders[0].keys() == names
    text = folders[0]["report.md"].decode()
    assert "![Confusion](confusion.png)" in text and "a \\| line and &lt;b>another" in text
    assert max(map(len, text.split("\n"))) < 600
    assert json.loads(folders[0]["report.json"])["errors"][0]["text"].endswith(" long" * 100)


def test_large_confusion_matrix_names_classes_with_most_errors():
    from matplotlib.figure import Figure

    counts = np.diag(np.full(60, 5))
    counts[50, 51] = 7
    figure = Figure()
    draw_confusion(figure, [f"class {n}" for n in range(60)], counts, counts.sum(1))
    whole, named = figure.axes
    assert whole.images[0].get_array().shape == (60, 60) and named.images[0].get_array().shape == (40, 40)
    assert {"class 50", "class 51"} < {text.get_text() for text in named.get_yticklabels()}
    assert "7" in {text.get_text() for text in named.texts}
