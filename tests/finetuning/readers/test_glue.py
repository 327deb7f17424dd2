"""The nine GLUE tasks from small files in the layouts in which they are published, and submissions."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from task_reading import refusal

from electra_fast.finetuning.readers import glue

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
    "qqp": (["id", "qid1", "qid2", "question1", "question2", "is_duplicate"], None, ["id", "question1", "question2"]),
    "mnli": ([*MNLI, "label1", "gold_label"], [*MNLI, *(f"label{n}" for n in range(1, 6)), "gold_label"], MNLI),
    "qnli": (["index", "question", "sentence", "label"], None, ["index", "question", "sentence"]),
    "rte": ([*PAIR, "label"], None, PAIR),
    "wnli": ([*PAIR, "label"], None, PAIR),
}
# Text columns in Hugging Face's exports, in addition to `label` and `idx`.
SENTENCES = ["sentence1", "sentence2"]
EXPORTED = dict.fromkeys(OFFICIAL, SENTENCES) | dict.fromkeys(("cola", "sst2"), ["sentence"])
EXPORTED |= {"qqp": ["question1", "question2"], "mnli": ["premise", "hypothesis"], "qnli": ["question", "sentence"]}
LABEL_COLUMNS = ("label", "Quality", "is_duplicate", "score", "gold_label")
ID_COLUMNS = ("index", "id", "idx")
FOLDERS = dict(zip(OFFICIAL, "CoLA SST-2 MRPC STS-B QQP MNLI QNLI RTE WNLI".split(), strict=True))
# Class names in the order of their numbers on the Hub's dataset cards.
NAMES = {
    "cola": ["unacceptable", "acceptable"],
    "sst2": ["negative", "positive"],
    "mrpc": ["not_equivalent", "equivalent"],
    "stsb": [],
    "qqp": ["not_duplicate", "duplicate"],
    "mnli": ["entailment", "neutral", "contradiction"],
    **dict.fromkeys(("qnli", "rte"), ["entailment", "not_entailment"]),
    "wnli": ["not_entailment", "entailment"],
}
# Labels in the official files.
WORDS = {"stsb": ["0.000", "4.750"], **{name: NAMES[name] for name in ("mnli", "qnli", "rte")}}
METRICS = {"cola": "matthews", "stsb": "spearman"}


def write(path, columns, labels, header=True, end="\n", mark=""):
    """Writes rows in which a cell is the column's name and the row's number, except for labels, and ids from 7."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [columns] if header else []
    for number, label in enumerate(labels):
        cells = {name: f'{name} "{number}' for name in columns}
        cells |= dict.fromkeys(LABEL_COLUMNS, label) | dict.fromkeys(ID_COLUMNS, str(7 + number))
        rows.append([cells[name] for name in columns])
    path.write_bytes((mark + "".join("\t".join(row) + end for row in rows)).encode())
    return path


def write_task(folder, name, exported=False, **style):
    """Writes all files of a task."""
    train, dev, test = ([*EXPORTED[name], "label", "idx"],) * 3 if exported else OFFICIAL[name]
    labels = WORDS.get(name, ("0", "1"))
    write(folder / "train.tsv", train, labels, **style)
    for variant in ("_matched", "_mismatched") if name == "mnli" else ("",):
        write(folder / f"dev{variant}.tsv", dev or train, labels, **style)
        write(folder / f"test{variant}.tsv", test, ("-1", "-1"), **style)
    return folder


@pytest.mark.parametrize("name", OFFICIAL)
@pytest.mark.parametrize("style", [{}, {"exported": True}, {"mark": "\ufeff", "end": "\r\n", "header": False}])
def test_all_tasks_in_all_layouts(tmp_path, name, style):
    data = glue.read(name, write_task(tmp_path / FOLDERS[name], name, **style))
    texts = EXPORTED[name]
    if not style.get("exported"):
        texts = {"mrpc": MRPC[2:], "mnli": SENTENCES}.get(name, texts)
    targets = [0.0, 4.75] if name == "stsb" else [*range(max(2, len(NAMES[name])))]
    expected = [tuple(f'{column} "{number}' for column in texts) for number in range(len(targets))]
    variants = ["", "-mismatched"] if name == "mnli" else [""]

    assert (data.task.name, data.task.metric, data.notes) == (name, METRICS.get(name, "accuracy"), ())
    assert (data.task.shift, data.task.scale) == (0, 5 if name == "stsb" else 1)
    names = [f"{part}{variant}" for part in ("dev", "test") for variant in variants]
    assert [split.name for split in (*data.dev, *data.test)] == names
    for split in (data.train, *data.dev):
        assert (split.texts, split.targets.tolist()) == (expected, targets)
        assert split.targets.dtype == (np.float64 if name == "stsb" else np.int64)
    for split in data.test:
        assert (split.texts, split.targets, split.ids) == (expected[:2], None, ["7", "8"])


def write_shard(path, name, labels, names=(), first=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {text: [f"{text} {first + n}" for n in range(len(labels))] for text in EXPORTED[name]}
    label = pa.array(labels, pa.float32() if name == "stsb" else pa.int64())
    table = pa.table(columns | {"label": label, "idx": pa.array(range(first, first + len(labels)), pa.int32())})
    features = {"label": {"names": names, "_type": "ClassLabel"}, "idx": {"dtype": "int32", "_type": "Value"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if names else None
    pq.write_table(table.replace_schema_metadata(metadata), path)


@pytest.mark.parametrize("name", NAMES)
def test_integers_in_parquet_equal_words_in_tsv(tmp_path, name):
    """Integers follow the order of names in the file, or else the official order."""
    names = NAMES[name][::-1]
    official = [0.0, 4.8] if name == "stsb" else [*range(len(names))]
    variants = ["_matched", "_mismatched"] if name == "mnli" else [""]
    for shard in range(2):
        first = shard * len(official)
        write_shard(tmp_path / f"{name}/train-{shard}-of-2.parquet", name, official, (), first)
        for variant in variants:
            numbers = official[::-1] if names else official
            write_shard(tmp_path / f"{name}/data/validation{variant}/{shard}.parquet", name, numbers, names, first)
            write_shard(tmp_path / f"{name}/test{variant}-{shard}-of-2.parquet", name, [-1], (), shard)
    data = glue.read(name, tmp_path)
    for split in (data.train, *data.dev):
        assert split.targets.tolist() == official * 2 and split.ids == [str(n) for n in range(2 * len(official))]
        assert split.texts[-1] == tuple(f"{text} {2 * len(official) - 1}" for text in EXPORTED[name])
    assert [(split.targets, split.ids) for split in data.test] == [(None, ["0", "1"])] * len(variants)

    folder = write_task(tmp_path / "words", name)
    write(folder / "train.tsv", OFFICIAL[name][0], NAMES[name] or map(str, official))
    assert glue.read(name, folder).train.targets.tolist() == official


def test_missing_parts_and_columns_of_a_hub_folder(tmp_path):
    write_shard(tmp_path / "train-00000-of-00002.parquet", "rte", [0, 1])
    assert "00000-of-00002.parquet: only 1 of 2 parts" in refusal(glue.read, "rte", tmp_path, error=FileNotFoundError)
    write_shard(tmp_path / "train-00001-of-00002.parquet", "rte", [0, 2])
    write_shard(tmp_path / "validation.parquet", "rte", [0, 1])
    assert "train-00001-of-00002.parquet: row 2: label = '2': must be one of" in refusal(glue.read, "rte", tmp_path)
    message = "no columns question and sentence; available columns: sentence1, sentence2"
    assert message in refusal(glue.read, "qnli", tmp_path)


def test_labels_and_ids_of_a_test_file(tmp_path):
    folder = write_task(tmp_path, "sst2")
    (test,) = glue.read("sst2", folder).test
    assert (test.targets, test.ids) == (None, ["7", "8"])
    write(folder / "test.tsv", OFFICIAL["sst2"][0], ("1", "0"))  # it has labels and no index
    (test,) = glue.read("sst2", folder).test
    assert (test.targets.tolist(), test.ids) == ([1, 0], ["0", "1"])


def test_only_test_files_are_optional(tmp_path):
    folder = write_task(tmp_path / "RTE", "rte")
    (folder / "test.tsv").unlink()
    assert glue.read("rte", folder).test == ()
    (folder / "dev.tsv").rename(folder / "validation.tsv")
    assert glue.read("rte", folder).dev[0].path.name == "validation.tsv"
    (folder / "validation.tsv").unlink()
    message = refusal(glue.read, "rte", folder, error=FileNotFoundError)
    assert message.startswith(f"{folder}: contains no dev.tsv or validation.tsv")
    (folder / "train.tsv").unlink()
    message = refusal(glue.read, "rte", tmp_path, error=FileNotFoundError)
    assert message == f"{tmp_path}: no train.tsv or train*.parquet in this folder or in RTE/"
    assert "none: no such folder" in refusal(glue.read, "rte", tmp_path / "none", error=FileNotFoundError)


def test_folders_of_tasks_are_found_by_name(tmp_path):
    for name, folder in (("sst2", "SST"), ("stsb", "sts-b"), ("cola", "CoLA"), ("wnli", "WNLI")):
        write_task(tmp_path / folder, name)
        assert glue.locate(name, tmp_path) == glue.locate(name, tmp_path / folder) == tmp_path / folder
    (tmp_path / "other").mkdir()
    assert glue.held_tasks(tmp_path) == ["cola", "sst2", "stsb", "wnli"]


def add_lines(path, *lines):
    path.write_text(path.read_text() + "".join(line + "\n" for line in lines))


def test_few_malformed_training_lines_are_skipped(tmp_path):
    folder = write_task(tmp_path, "qqp")
    train = write(folder / "train.tsv", OFFICIAL["qqp"][0], ["0", "1"] * 150)
    add_lines(train, "9\t9\t9\tcut off", "9\t9\t9\ta\tb\t", "9\t9\t9\ta\tb\t1\t\t")  # tabs at the end are ignored
    data = glue.read("qqp", folder)
    assert data.notes == (f"{train}: 2 of 303 lines lack fields or a label (first: line 302); they are left out",)
    assert len(data.train.texts) == len(data.train.targets) == 301
    add_lines(train, "", "x", "")
    assert refusal(glue.read, "qqp", folder).startswith(
        f"{train}: 4 of 305 lines lack fields or a label (first: line 302)"
    )


RTE = "index\tsentence1\tsentence2\tlabel\n"
SIMILARITY = "label = {!r}: must be a number from 0 to 5"


def test_numbered_ids_include_malformed_lines(tmp_path):
    folder = write_task(tmp_path, "cola")
    (folder / "train.tsv").write_text("short\n" + "".join(f"gj04\t{row % 2}\t\tword {row}\n" for row in range(150)))
    assert glue.read("cola", folder).train.ids == [str(row) for row in range(1, 151)]


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("rte", "train.tsv", RTE + "1\ta\tb\t0\n" * 2, "every example has the label '0'"),
        ("rte", "train.tsv", RTE + "1\ta\tb\t-\n", "line 2: label = '-': must be one of entailment, not_entailment, 0"),
        ("cola", "train.tsv", "gj04\t2\t\ta\n", "line 1: label = '2': must be one of 0, 1, unacceptable, acceptable"),
        *(
            (
                "stsb",
                "train.tsv",
                f"{chr(9).join(STSB)}\tscore\n{chr(9).join('abcdefghi')}\t{label}\n",
                f"line 2: {SIMILARITY.format(label)}",
            )
            for label in ("nan", "5.1", "-0.5", "high")
        ),
        ("rte", "dev.tsv", "1\tcut off\n", "line 1: found 2 fields, expected 4"),
        ("rte", "dev.tsv", "1\ta\tb\tentailment\tmore\n", "line 1: found 5 fields, expected 4"),
        ("rte", "dev.tsv", "1\ta\tb\t \n", "line 1: no label"),
        ("rte", "test.tsv", "1\tcut off\n", "line 1: found 2 fields, expected 3"),
        ("rte", "dev.tsv", "", "empty"),
        ("rte", "dev.tsv", RTE, "no examples"),
        ("rte", "dev.tsv", "sentence1\tsentence2\na\tb\n", "no label column; available columns: sentence1, sentence2"),
    ],
)
def test_unusable_files_are_refused(tmp_path, name, file, content, message):
    folder = write_task(tmp_path, name)
    (folder / file).write_text(content)
    assert refusal(glue.read, name, folder).startswith(f"{folder / file}: {message}")


@pytest.mark.parametrize("file", ["train.tsv", "dev_matched.tsv"])
def test_examples_without_a_gold_label_are_left_out(tmp_path, file):
    folder = write_task(tmp_path, "mnli")
    columns = OFFICIAL["mnli"][0 if file == "train.tsv" else 1]
    path = write(folder / file, columns, ["neutral", "-", "contradiction", "-"])
    data = glue.read("mnli", folder)
    split = data.train if file == "train.tsv" else data.dev[0]
    assert (split.targets.tolist(), split.ids) == ([1, 2], ["7", "9"])
    assert data.notes == (f"{path}: 2 of 4 examples have no gold label and are left out",)
    write(path, columns, ["-"])
    assert refusal(glue.read, "mnli", folder) == f"{path}: no example has a gold label"


@pytest.mark.parametrize("file", ["diagnostic/diagnostic.tsv", "AX.tsv", "MNLI/diagnostic.tsv", "ax/test.parquet"])
def test_diagnostic_file_is_a_test_split(tmp_path, file):
    write_task(tmp_path / "MNLI", "mnli")
    path = tmp_path / file
    if path.suffix == ".parquet":
        write_shard(path, "mnli", [-1, -1], first=7)
    else:
        write(path, PAIR, ["", ""], header=file != "AX.tsv")
    for folder in (tmp_path, tmp_path / "MNLI"):
        *_, diagnostic = glue.read("mnli", folder).test
        assert (diagnostic.name, diagnostic.path, diagnostic.ids) == ("diagnostic", path, ["7", "8"])
        assert diagnostic.targets is None


def test_mrpc_in_microsofts_layout(tmp_path):
    folder = tmp_path / "MRPC"
    folder.mkdir()
    for part, first in (("train", 0), ("test", 10)):
        rows = [f'{n % 2}\t{n}1\t{n}2\tone "{n}\ttwo {n}\r\n' for n in range(first, first + 4)]
        header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
        (folder / f"msr_paraphrase_{part}.txt").write_bytes((header + "".join(rows)).encode())
    (folder / "dev_ids.tsv").write_text("11\t12\n31\t32\n99\t98\n")
    data = glue.read("mrpc", tmp_path)
    assert (data.train.texts, data.train.targets.tolist()) == ([('one "0', "two 0"), ('one "2', "two 2")], [0, 0])
    assert (data.dev[0].name, data.dev[0].targets.tolist(), data.dev[0].ids) == ("dev", [1, 1], ["0", "1"])
    assert (data.test[0].name, data.test[0].targets.tolist()) == ("test", [0, 1, 0, 1])
    assert (data.train.ids, data.notes) == (["0", "1"], ())
    (folder / "dev_ids.tsv").write_text("99\t98\n")
    assert refusal(glue.read, "mrpc", folder).startswith(f"{folder / 'dev_ids.tsv'}: lists none of the pairs of")
    (folder / "dev_ids.tsv").unlink()
    data = glue.read("mrpc", folder)
    assert data.notes == (f"{folder}: no dev_ids.tsv, so msr_paraphrase_test.txt is also the validation set",)
    assert (data.dev[0].name, data.dev[0].texts) == ("dev", data.test[0].texts)
    (folder / "msr_paraphrase_test.txt").unlink()
    assert "msr_paraphrase_test.txt: no such file" in refusal(glue.read, "mrpc", folder, error=FileNotFoundError)


@pytest.mark.parametrize(
    ("name", "outputs", "predictions"),
    [
        ("wnli", [[0.0, 1], [2, 1]], ["1", "0"]),
        ("mnli", [[0.0, 1, -1], [2, 1, -1]], ["neutral", "entailment"]),
        ("stsb", [-0.3, 5.2], ["0.000", "5.000"]),
        ("stsb", [-0.0, 1.23456], ["0.000", "1.235"]),
    ],
)
def test_submission_has_label_words_or_similarities(tmp_path, name, outputs, predictions):
    data = glue.read(name, write_task(tmp_path, name))
    glue.write_submission(tmp_path / "out.tsv", data.task, data.test[0], np.array(outputs))
    first, second = predictions
    assert (tmp_path / "out.tsv").read_text() == f"index\tprediction\n7\t{first}\n8\t{second}\n"


def test_submission_names_for_the_server(tmp_path):
    write(tmp_path / "AX.tsv", PAIR, ["", ""])
    names = []
    for name, folder in FOLDERS.items():
        data = glue.read(name, write_task(tmp_path / folder, name))
        names += [glue.submission_name(data.task, split) for split in data.test]
    stems = "CoLA SST-2 MRPC STS-B QQP MNLI-m MNLI-mm AX QNLI RTE WNLI".split()
    assert names == [f"{stem}.tsv" for stem in stems]
