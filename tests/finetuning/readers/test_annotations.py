"""Exports of annotation tools: rejected or skipped rows, and tasks with annotations."""

import pytest
from task_reading import read, refusal, tagged

from electra_fast.finetuning.readers.tag_files import iterate_tagging

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


def flat(*spans, cancelled):
    return {"text": TEXT, "label": [*spans], "was_cancelled": cancelled}


ACCEPTED = annotation(VALUE)
CANCELLED = annotation(VALUE, was_cancelled=True)


@pytest.mark.parametrize(
    "rows",
    [
        [prodigy("reject", SPAN), prodigy("accept", SPAN), prodigy("ignore"), prodigy("accept")],
        [task(CANCELLED), task(ACCEPTED), task(), task(annotation())],
        [task(), task(ACCEPTED, ACCEPTED, CANCELLED), task(), task(annotation(ground_truth=True), ACCEPTED)],
        [flat(VALUE, cancelled=True), flat(VALUE, cancelled=False), flat(cancelled=True), flat(cancelled=False)],
    ],
)
def test_rejected_rows_are_left_out(write, rows):
    path = write(rows)
    data = read("tagging", path, path, path)
    assert tagged(data, data.train) == ["Ann/B-PER met/O Bob/O", "Ann/O met/O Bob/O"]
    assert data.train.ids == data.test[0].ids == ["1", "3"]
    assert f"{path}: 2 of 4 rows, rejected or skipped by annotators, are left out" in data.notes
    assert [*iterate_tagging(path)] == [(TEXT, None)] * 4


def test_differing_annotations_are_refused(write):
    path = write([task(ACCEPTED), task(ACCEPTED, annotation())])
    assert "line 2: 2 annotations differ" in refusal(read, "tagging", path)
    assert "annotators rejected or skipped every row" in refusal(read, "tagging", write([task(), task()]))
    train = write([task(ACCEPTED)], "other.jsonl")
    assert len(read("tagging", train, train, path).test[0].texts) == 2  # none annotated yet


def test_rejected_rows_of_a_classification_are_left_out(write):
    rows = [{"text": f"text {number}", "label": "AB"[number % 2], "answer": "accept"} for number in range(4)]
    path = write([*rows, {"text": "c", "label": "C", "answer": "reject"}, {"text": "d", "answer": "ignore"}])
    data = read("classification", path, test=path)
    assert data.task.labels == ("A", "B") and len(data.train.texts) == 4
    assert f"{path}: 2 of 6 rows, rejected or skipped by annotators, are left out" in data.notes


def test_answer_column_with_data_is_not_a_verdict(write):
    path = write([prodigy(answer, SPAN) for answer in ("reject", "42")])
    assert len(read("tagging", path).train.texts) == 2
    path = write([{"text": f"a {answer}", "label": answer, "answer": answer} for answer in ("reject", "accept")])
    assert read("classification", path, label=("answer",)).task.labels == ("accept", "reject")
