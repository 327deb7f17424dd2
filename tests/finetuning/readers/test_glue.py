"""The nine GLUE tasks from small files in the layouts in which they are published, and submissions."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from electra_fast.errors import InputError, TrainingFailed
from electra_fast.finetuning.readers import glue
from electra_fast.finetuning.tasks.classification import Regression

PARSES = "sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse".split()
MNLI = ["index", "promptID", "pairID", "genre", *PARSES, "sentence1", "sentence2"]
STSB = "index genre filename year old_index source1 source2 sentence1 sentence2".split()
MRPC = ["#1 ID", "#2 ID", "#1 String", "#2 String"]
PAIR = ["index", "sentence1", "sentence2"]

# Official columns of train, dev and test.
OFFICIAL = {
    "cola": (["source", "label", "star", "sentence"], None, ["index", "sentence"]),
    "sst2": (["sentence", "label"], None, ["index", "sentence"]),
    "mrpc": (["Quality", *MRPC], None, ["index", *MRPC]),
    "stsb": ([*STSB, "score"], None, STSB),
    "qqp": (
        ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
        None,
        ["id", "question1", "question2"],
    ),
    "mnli": ([*MNLI, "label1", "gold_label"], [*MNLI, *(f"label{n}" for n in range(1, 6)), "gold_label"], MNLI),
    "qnli": (["index", "question", "sentence", "label"], None, ["index", "question", "sentence"]),
    "rte": ([*PAIR, "label"], None, PAIR),
    "wnli": ([*PAIR, "label"], None, PAIR),
}
# Columns of Hugging Face's exports.
EXPORTED = {
    "cola": ["sentence", "label", "idx"],
    "sst2": ["sentence", "label", "idx"],
    "mrpc": ["sentence1", "sentence2", "label", "idx"],
    "stsb": ["sentence1", "sentence2", "label", "idx"],
    "qqp": ["question1", "question2", "label", "idx"],
    "mnli": ["premise", "hypothesis", "label", "idx"],
    "qnli": ["question", "sentence", "label", "idx"],
    "rte": ["sentence1", "sentence2", "label", "idx"],
    "wnli": ["sentence1", "sentence2", "label", "idx"],
}
LABEL_COLUMNS = ("label", "Quality", "is_duplicate", "score", "gold_label")
ID_COLUMNS = ("index", "id", "idx")
FOLDERS = dict(zip(OFFICIAL, "CoLA SST-2 MRPC STS-B QQP MNLI QNLI RTE WNLI".split(), strict=True))
# The first two labels of a task as its files write them.
WORDS = {
    "stsb": ("0.000", "4.750"),
    "mnli": ("neutral", "contradiction"),
    "qnli": ("entailment", "not_entailment"),
    "rte": ("entailment", "not_entailment"),
}
METRICS = {"cola": "matthews", "stsb": "spearman"}


def lines_of(columns, labels, first=7):
    """Rows whose cells are the column's name and the row's number, except for ids and labels."""
    for number, label in enumerate(labels):
        yield [
            label if name in LABEL_COLUMNS else str(first + number) if name in ID_COLUMNS else f'{name} "{number}'
            for name in columns
        ]


def write(path, columns, labels, header=True, end="\n", mark=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [*([columns] if header else []), *lines_of(columns, labels)]
    path.write_bytes((mark + "".join("\t".join(row) + end for row in rows)).encode())
    return path


def write_task(folder, name, header=True, exported=False, **style):
    """All files of a task, two examples each."""
    train, dev, test = (EXPORTED[name],) * 3 if exported else OFFICIAL[name]
    labels = WORDS.get(name, ("0", "1"))
    write(folder / "train.tsv", train, labels, header, **style)
    for variant in ("_matched", "_mismatched") if name == "mnli" else ("",):
        write(folder / f"dev{variant}.tsv", dev or train, labels, header, **style)
        write(folder / f"test{variant}.tsv", test, ("-1", "-1"), header, **style)
    return folder


def message_of(name, folder, error=InputError):
    with pytest.raises(error) as caught:
        glue.read(name, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", OFFICIAL)
@pytest.mark.parametrize(
    "style",
    [
        {},
        {"header": False},
        {"exported": True},
        {"mark": "\ufeff", "end": "\r\n"},
        {"mark": "\ufeff", "end": "\r\n", "header": False},
    ],
)
def test_every_task_in_every_layout(tmp_path, name, style):
    data = glue.read(name, write_task(tmp_path / FOLDERS[name], name, **style))
    texts = EXPORTED[name][:-2]
    if not style.get("exported"):
        texts = {"mrpc": MRPC[2:], "mnli": MNLI[-2:]}.get(name, texts)
    expected = [tuple(f'{column} "{number}' for column in texts) for number in range(2)]
    targets = {"stsb": [0.0, 4.75], "mnli": [1, 2]}.get(name, [0, 1])
    variants = ["", "-mismatched"] if name == "mnli" else [""]

    assert (data.task.name, data.task.metric, data.notes) == (name, METRICS.get(name, "accuracy"), ())
    assert [split.name for split in (*data.dev, *data.test)] == [
        f"{part}{v}" for part in ("dev", "test") for v in variants
    ]
    for split in (data.train, *data.dev):
        assert (split.texts, split.targets.tolist()) == (expected, targets)
        assert split.targets.dtype == (np.float64 if name == "stsb" else np.int64)
    for split in data.test:
        assert (split.texts, split.targets) == (expected, None)
        assert split.ids == ["7", "8"]


# The names of the labels in the order of their numbers, as the dataset cards of the Hub have them.
HUB = {
    "cola": ["unacceptable", "acceptable"],
    "sst2": ["negative", "positive"],
    "mrpc": ["not_equivalent", "equivalent"],
    "stsb": [],
    "qqp": ["not_duplicate", "duplicate"],
    "mnli": ["entailment", "neutral", "contradiction"],
    "qnli": ["entailment", "not_entailment"],
    "rte": ["entailment", "not_entailment"],
    "wnli": ["not_entailment", "entailment"],
}


def write_shard(path, name, labels, names=(), first=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {text: [f"{text} {first + n}" for n in range(len(labels))] for text in EXPORTED[name][:-2]}
    label = pa.array(labels, pa.float32() if name == "stsb" else pa.int64())
    table = pa.table(columns | {"label": label, "idx": pa.array(range(first, first + len(labels)), pa.int32())})
    features = {"label": {"names": names, "_type": "ClassLabel"}, "idx": {"dtype": "int32", "_type": "Value"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if names else None
    pq.write_table(table.replace_schema_metadata(metadata), path)


@pytest.mark.parametrize("name", HUB)
@pytest.mark.parametrize("noted", ["names", "other order", "none"])
def test_the_hubs_parquet_means_what_the_words_of_a_tsv_file_mean(tmp_path, name, noted):
    layout = {"names": "{}-{:05}-of-00002.parquet", "none": "{}/{:04}.parquet"}.get(noted, "data/{}-{}-of-2.parquet")
    variants = ["_matched", "_mismatched"] if name == "mnli" else [""]
    official = HUB[name] or [0.0, 4.8]
    names = official[::-1] if noted == "other order" else official
    numbers = official if name == "stsb" else [names.index(word) for word in official]
    files = {"train": numbers, **{f"validation{v}": numbers for v in variants}, **{f"test{v}": [-1] for v in variants}}
    for part, labels in files.items():
        for shard in range(2):
            path = tmp_path / "hub" / name / layout.format(part, shard)
            write_shard(path, name, labels, names if noted != "none" and HUB[name] else (), shard * len(labels))
    data = glue.read(name, tmp_path / "hub")
    write_task(tmp_path / "tsv", name)
    write(tmp_path / "tsv/train.tsv", EXPORTED[name], [str(label) for label in official] * 2)
    expected = glue.read(name, tmp_path / "tsv").train.targets.tolist()
    for split in (data.train, *data.dev):
        assert split.targets.tolist() == expected and split.ids == [str(n) for n in range(len(expected))]
        assert split.texts[-1] == tuple(f"{text} {len(expected) - 1}" for text in EXPORTED[name][:-2])
    assert [(split.targets, split.ids) for split in data.test] == [(None, ["0", "1"])] * len(variants)


def test_parts_and_columns_that_a_hub_folder_lacks(tmp_path):
    write_shard(tmp_path / "train-00000-of-00002.parquet", "rte", [0, 1])
    assert "00000-of-00002.parquet: 1 of 2 parts are there" in message_of("rte", tmp_path, FileNotFoundError)
    write_shard(tmp_path / "train-00001-of-00002.parquet", "rte", [0, 2])
    write_shard(tmp_path / "validation.parquet", "rte", [0, 1])
    assert "train-00001-of-00002.parquet: row 2: the label is '2'; it can be" in message_of("rte", tmp_path)
    assert "no columns question and sentence; there are: sentence1, sentence2" in message_of("qnli", tmp_path)


def test_the_task_of_similarities_is_scaled(tmp_path):
    task = glue.read("stsb", write_task(tmp_path, "stsb")).task
    assert (task.kind, task.labels, task.shift, task.scale) == ("regression", (), 0, 5)


@pytest.mark.parametrize(
    ("name", "labels", "ids"),
    [
        ("cola", ["unacceptable", "acceptable", "1"], [0, 1, 1]),
        ("sst2", ["negative", "positive", "0"], [0, 1, 0]),
        ("mrpc", ["not_equivalent", "equivalent", "1"], [0, 1, 1]),
        ("qqp", ["not_duplicate", "duplicate", "0"], [0, 1, 0]),
        ("wnli", ["not_entailment", "entailment", "1"], [0, 1, 1]),
        ("rte", ["entailment", "not_entailment", "0", "1"], [0, 1, 0, 1]),
        ("qnli", ["entailment", "not_entailment", "0", "1"], [0, 1, 0, 1]),
        ("mnli", ["entailment", "neutral", "contradiction", "0", "1", "2"], [0, 1, 2, 0, 1, 2]),
    ],
)
def test_labels_are_words_or_numbers(tmp_path, name, labels, ids):
    folder = write_task(tmp_path, name)
    write(folder / "train.tsv", OFFICIAL[name][0], labels)
    assert glue.read(name, folder).train.targets.tolist() == ids


@pytest.mark.parametrize(("name", "label"), [("cola", "1"), ("rte", "entailment"), ("stsb", "3.8")])
def test_a_training_file_with_one_label_is_refused(tmp_path, name, label):
    folder = write_task(tmp_path, name)
    path = write(folder / "train.tsv", OFFICIAL[name][0], [label] * 3)
    assert message_of(name, folder) == f"{path}: the label '{label}' in every example; there is nothing to learn"


@pytest.mark.parametrize(
    ("name", "label", "allowed"),
    [
        ("cola", "2", "0, 1, unacceptable, acceptable"),
        ("rte", "neutral", "entailment, not_entailment, 0, 1"),
        ("rte", "-", "entailment, not_entailment, 0, 1"),
        ("mnli", "hidden", "entailment, neutral, contradiction, 0, 1, 2"),
        ("stsb", "nan", "a number from 0 to 5"),
        ("stsb", "inf", "a number from 0 to 5"),
        ("stsb", "5.1", "a number from 0 to 5"),
        ("stsb", "-0.5", "a number from 0 to 5"),
        ("stsb", "high", "a number from 0 to 5"),
    ],
)
def test_an_unknown_label_is_named_with_its_line(tmp_path, name, label, allowed):
    folder = write_task(tmp_path, name)
    train = write(folder / "train.tsv", OFFICIAL[name][0], [*WORDS.get(name, ("0", "1")), label])
    assert message_of(name, folder) == f"{train}: line 4: the label is {label!r}; it can be {allowed}"


@pytest.mark.parametrize(("name", "labels", "targets"), [("mrpc", ("1", "0"), [1, 0]), ("stsb", ("5", "0"), [5, 0])])
def test_test_files_may_carry_labels(tmp_path, name, labels, targets):
    folder = write_task(tmp_path, name)
    write(folder / "test.tsv", OFFICIAL[name][0], labels)
    assert glue.read(name, folder).test[0].targets.tolist() == targets


def test_files_without_index_are_numbered(tmp_path):
    data = glue.read("sst2", write_task(tmp_path, "sst2"))
    assert (data.train.ids, data.test[0].ids) == (["0", "1"], ["7", "8"])


def test_test_files_are_optional_but_train_and_dev_are_not(tmp_path):
    folder = write_task(tmp_path / "RTE", "rte")
    (folder / "test.tsv").unlink()
    assert glue.read("rte", folder).test == ()
    (folder / "dev.tsv").rename(folder / "validation.tsv")
    assert glue.read("rte", folder).dev[0].path.name == "validation.tsv"
    (folder / "validation.tsv").unlink()
    message = message_of("rte", folder, FileNotFoundError)
    assert message == f"{folder}: holds neither dev.tsv nor validation.tsv, nor such .parquet files"
    (folder / "train.tsv").unlink()
    message = message_of("rte", tmp_path, FileNotFoundError)
    assert message == f"{tmp_path}: no train.tsv or train*.parquet there, nor in a folder RTE"
    assert "none: no such folder" in message_of("rte", tmp_path / "none", FileNotFoundError)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("sst2", "SST-2"), ("sst2", "sst2"), ("sst2", "SST"), ("stsb", "sts-b"), ("stsb", "STSB"), ("cola", "cola")],
)
def test_a_task_is_found_in_its_folder_or_above(tmp_path, name, folder):
    write_task(tmp_path / folder, name)
    assert glue.locate(name, tmp_path) == glue.locate(name, tmp_path / folder) == tmp_path / folder


def test_held_tasks_in_their_order(tmp_path):
    for folder in ("WNLI", "sst-2", "CoLA", "other"):
        (tmp_path / folder).mkdir()
    assert glue.held_tasks(tmp_path) == ["cola", "sst2", "wnli"]
    with pytest.raises(FileNotFoundError, match="none: no such folder"):
        glue.held_tasks(tmp_path / "none")


def add_lines(path, *lines):
    path.write_text(path.read_text() + "".join(line + "\n" for line in lines))


def test_a_few_malformed_training_lines_are_left_out(tmp_path):
    folder = write_task(tmp_path, "qqp")
    train = write(folder / "train.tsv", OFFICIAL["qqp"][0], ["0", "1"] * 150)
    add_lines(train, "9\t9\t9\tcut off", "9\t9\t9\ta\tb\t", "9\t9\t9\ta\tb\t1")
    data = glue.read("qqp", folder)
    assert data.notes == (f"{train}: 2 of 303 lines lack fields or a label, the first is line 302; they are left out",)
    assert len(data.train.texts) == len(data.train.targets) == 301
    add_lines(train, "", "x", "")
    assert message_of("qqp", folder).startswith(
        f"{train}: 4 of 305 lines lack fields or a label, the first is line 302;"
    )


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("dev.tsv", "9\t9\t9\tcut off", "line 4: found 4 fields, expected 6"),
        ("dev.tsv", "9\t9\t9\ta\tb\t1\tmore", "line 4: found 7 fields, expected 6"),
        ("dev.tsv", "9\t9\t9\ta\tb\t ", "line 4: no label"),
        ("test.tsv", "9\tcut off", "line 4: found 2 fields, expected 3"),
    ],
)
def test_a_malformed_line_in_dev_or_test_is_an_error(tmp_path, file, line, message):
    folder = write_task(tmp_path, "qqp")
    add_lines(folder / file, line)
    assert message_of("qqp", folder) == f"{folder / file}: {message}"


def test_tabs_at_the_end_of_a_line_are_ignored(tmp_path):
    folder = write_task(tmp_path, "rte")
    add_lines(folder / "dev.tsv", "9\ta\tb\tentailment\t\t")
    assert glue.read("rte", folder).dev[0].targets.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        ("index\tsentence1\tsentence2\tlabel\n", "no examples"),
        ("index\tsentence1\tsentence2\n0\ta\tb\n", "no label column; there are: index, sentence1, sentence2"),
    ],
)
def test_files_without_examples_or_labels(tmp_path, content, message):
    folder = write_task(tmp_path, "rte")
    (folder / "dev.tsv").write_text(content)
    assert message_of("rte", folder) == f"{folder / 'dev.tsv'}: {message}"


@pytest.mark.parametrize("file", ["train.tsv", "dev_matched.tsv"])
def test_examples_without_a_gold_label_are_left_out(tmp_path, file):
    folder = write_task(tmp_path, "mnli")
    columns = OFFICIAL["mnli"][0 if file == "train.tsv" else 1]
    path = write(folder / file, columns, ["neutral", "-", "contradiction", "-"])
    data = glue.read("mnli", folder)
    split = data.train if file == "train.tsv" else data.dev[0]
    assert (split.targets.tolist(), split.ids) == ([1, 2], ["7", "9"])
    assert data.notes == (f"{path}: 2 of 4 examples have no gold label: left out",)
    write(path, columns, ["-"])
    assert message_of("mnli", folder) == f"{path}: no example has a gold label"


@pytest.mark.parametrize("file", ["diagnostic/diagnostic.tsv", "AX.tsv", "MNLI/diagnostic.tsv", "MNLI/AX.tsv"])
@pytest.mark.parametrize("header", [True, False])
def test_the_diagnostic_file_is_a_test_split(tmp_path, file, header):
    write_task(tmp_path / "MNLI", "mnli")
    path = write(tmp_path / file, PAIR, ["", ""], header)
    for folder in (tmp_path, tmp_path / "MNLI"):
        *_, diagnostic = glue.read("mnli", folder).test
        assert (diagnostic.name, diagnostic.path, diagnostic.ids) == ("diagnostic", path, ["7", "8"])
        assert diagnostic.targets is None


def write_original_mrpc(folder):
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    folder.mkdir()
    for part, first in (("train", 0), ("test", 10)):
        rows = [f'{n % 2}\t{n}1\t{n}2\tone "{n}\ttwo {n}\r\n' for n in range(first, first + 4)]
        (folder / f"msr_paraphrase_{part}.txt").write_bytes((header + "".join(rows)).encode())
    return folder


def test_original_mrpc_with_the_ids_of_its_dev_part(tmp_path):
    folder = write_original_mrpc(tmp_path / "MRPC")
    (folder / "dev_ids.tsv").write_text("11\t12\n31\t32\n99\t98\n")
    data = glue.read("mrpc", tmp_path)
    assert (data.train.texts, data.train.targets.tolist()) == ([('one "0', "two 0"), ('one "2', "two 2")], [0, 0])
    assert (data.dev[0].name, data.dev[0].targets.tolist(), data.dev[0].ids) == ("dev", [1, 1], ["0", "1"])
    assert (data.test[0].name, data.test[0].targets.tolist()) == ("test", [0, 1, 0, 1])
    assert (data.train.ids, data.notes) == (["0", "1"], ())
    (folder / "dev_ids.tsv").write_text("99\t98\n")
    assert message_of("mrpc", folder).startswith(f"{folder / 'dev_ids.tsv'}: lists none of the pairs in")


def test_original_mrpc_without_those_ids(tmp_path):
    folder = write_original_mrpc(tmp_path / "MRPC")
    data = glue.read("mrpc", folder)
    assert data.notes == (f"{folder}: no dev_ids.tsv, so msr_paraphrase_test.txt is the dev split, too",)
    assert (data.dev[0].name, data.dev[0].texts) == ("dev", data.test[0].texts)
    (folder / "msr_paraphrase_test.txt").unlink()
    assert "msr_paraphrase_test.txt: no such file" in message_of("mrpc", folder, FileNotFoundError)


@pytest.mark.parametrize(
    ("name", "predictions"),
    [
        ("cola", ["1", "0"]),
        ("wnli", ["1", "0"]),
        ("rte", ["not_entailment", "entailment"]),
        ("qnli", ["not_entailment", "entailment"]),
        ("mnli", ["neutral", "entailment"]),
    ],
)
def test_submissions_hold_the_words_of_the_task(tmp_path, name, predictions):
    data = glue.read(name, write_task(tmp_path, name))
    outputs = np.array([[0.0, 1, -1], [2, 1, -1]])[:, : len(data.task.labels)]
    for split in data.test:
        path = tmp_path / glue.submission_name(data.task, split)
        glue.write_submission(path, data.task, split, outputs)
        assert path.read_text() == f"index\tprediction\n7\t{predictions[0]}\n8\t{predictions[1]}\n"


def test_similarities_are_clipped(tmp_path):
    data = glue.read("stsb", write_task(tmp_path, "stsb"))
    path = tmp_path / "STS-B.tsv"
    for outputs, lines in (([-0.3, 5.2], "7\t0.000\n8\t5.000\n"), ([-0.0, 1.23456], "7\t0.000\n8\t1.235\n")):
        glue.write_submission(path, data.task, data.test[0], np.array(outputs))
        assert path.read_text() == f"index\tprediction\n{lines}"
    with pytest.raises(TrainingFailed, match="1 of 2 examples are not finite"):
        Regression().write_predictions(path, data.task, data.test[0], None, np.array([[np.nan], [1]]))


def test_submissions_are_named_as_the_server_expects(tmp_path):
    write(tmp_path / "AX.tsv", PAIR, ["", ""])
    names = []
    for name, folder in FOLDERS.items():
        data = glue.read(name, write_task(tmp_path / folder, name))
        names += [glue.submission_name(data.task, split) for split in data.test]
    stems = "CoLA SST-2 MRPC STS-B QQP MNLI-m MNLI-mm AX QNLI RTE WNLI".split()
    assert names == [f"{stem}.tsv" for stem in stems]
