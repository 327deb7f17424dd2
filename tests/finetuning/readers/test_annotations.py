"""Exports of annotation tools: rows that were rejected or skipped, and tasks with their annotations."""

import pytest

from electra_fast.errors import InputError
from electra_fast.finetuning.readers import own_data
from electra_fast.finetuning.readers.tag_files import iterate_tagging, read_tagging

TEXT = "Ann met Bob"
TOKENS = [{"text": word, "start": 0, "end": 1, "id": number} for number, word in enumerate(TEXT.split())]
SPAN = {"start": 0, "end": 3, "label": "PER"}
VALUE = {"start": 0, "end": 3, "text": "Ann", "labels": ["PER"]}


def prodigy(answer, *spans):
    return {"text": TEXT, "tokens": TOKENS, "answer": answer} | ({"spans": [*spans]} if spans else {})


def task(*annotations):
    return {"id": 1, "data": {"text": TEXT, "source": "a"}, "annotations": [*annotations], "predictions": []}


def annotation(*values, **fields):
    items = [{"type": "labels", "from_name": "label", "value": value} for value in values]
    return {"result": [*items, {"type": "relation", "from_id": "a"}], "was_cancelled": False} | fields


def tags(data):
    return [[data.task.labels[tag] for tag in target] for target in data.train.targets]


def rejected(path, number, total):
    return f"{path}: {number} of {total} rows are left out, which an annotator rejected or skipped"


@pytest.mark.parametrize(
    "rows",
    [
        [prodigy("reject", SPAN), prodigy("accept", SPAN), prodigy("ignore"), prodigy("accept")],
        [task(annotation(was_cancelled=True)), task(annotation(VALUE)), task(), task(annotation())],
        [
            task(),
            task(annotation(VALUE), annotation(VALUE), annotation(was_cancelled=True)),
            task(),
            task(annotation(ground_truth=True), annotation(VALUE)),
        ],
        [{"text": TEXT, "label": [VALUE], "was_cancelled": cancelled} for cancelled in (True, False)]
        + [{"text": TEXT, "label": [], "was_cancelled": cancelled} for cancelled in (True, False)],
    ],
)
def test_rejected_rows_are_left_out(write, rows):
    path = write(rows)
    data = read_tagging(path, path, path)
    assert tags(data) == [["B-PER", "O", "O"], ["O", "O", "O"]]
    assert data.train.ids == ["1", "3"]
    assert rejected(path, 2, 4) in data.notes
    assert data.test[0].ids == ["1", "3"]
    assert [*iterate_tagging(path)] == [(TEXT, None)] * 4


def test_annotations_that_differ(write):
    path = write([task(annotation(VALUE)), task(annotation(VALUE), annotation())])
    with pytest.raises(InputError, match="line 2: 2 annotations differ; keep one, or mark one as ground truth"):
        read_tagging(path, path, None)
    path = write([task(), task()])
    with pytest.raises(InputError, match="an annotator rejected or skipped every row"):
        read_tagging(path, path, None)
    train = write([task(annotation(VALUE))], "other.jsonl")
    assert len(read_tagging(train, train, path).test[0].texts) == 2  # of which none is annotated yet


def test_answers_that_are_data_are_no_verdict(write):
    path = write([prodigy(answer, SPAN) for answer in ("reject", "42")])
    assert len(read_tagging(path, path, None).train.texts) == 2


def test_rejected_rows_of_classification_are_left_out(write):
    rows = [{"text": f"text {number}", "label": "AB"[number % 2], "answer": "accept"} for number in range(4)]
    path = write([*rows, {"text": "c", "label": "C", "answer": "reject"}, {"text": "d", "answer": "ignore"}])
    data = own_data.read("classification", path, path, path)
    assert data.task.labels == ("A", "B") and len(data.train.texts) == 4
    assert rejected(path, 2, 6) in data.notes
    path = write([{"text": f"a {answer}", "label": answer, "answer": answer} for answer in ("reject", "accept")])
    assert own_data.read("classification", path, path, None, label=("answer",)).task.labels == ("accept", "reject")
