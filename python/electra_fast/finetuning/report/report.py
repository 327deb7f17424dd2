"""A report on a model's answers to labeled examples: report.json, report.md for people, and pictures.

It depends on the task, the examples and the answers alone, never on the model: those of a finished seed, of all folds
together, or of a file that was predicted.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from electra_fast.files.atomic_files import replace_file
from electra_fast.finetuning.report.findings import NUM_BINS, Findings
from electra_fast.finetuning.report.train_overlap import MIN_JACCARD, examples, find_duplicates, label_shares
from electra_fast.finetuning.task import Prediction, Split, Task, overlap_warning, select
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.messages import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Answered = tuple[Split, Sequence[Prediction]]
"""Examples with gold labels, and an answer for each."""
# Rows of a table, and characters of a cell, in report.md; report.json has all.
_MAX_ROWS, _MAX_CHARACTERS = 25, 160
# Titles and explanations of sections, in their order; a section without a title continues the one before.
_SECTIONS = {
    "scores": (
        "Scores",
        "majority: always the most frequent answer. untrained: the same network, trained from random weights.",
    ),
    "classes": ("Classes", "The lowest F1 first, of equal ones the most frequent class."),
    "averages": ("", "Averages over the classes that are annotated or predicted, and weighted by support:"),
    "entity_types": (
        "Entity types",
        "Precision, recall and F1 want the exact span and type. Of the annotated entities (support), some overlap a "
        "predicted one of their type (wrong_span), are found with another type (wrong_type), overlap one of another "
        "type (wrong_both), or none (missed). Predicted entities that overlap no annotated one are spurious.",
    ),
    "matching": (
        "Partial matches",
        "As SemEval-2013 task 9 and nervaluate define them: strict wants span and type, exact the span, type an "
        "overlap and the type, partial an overlap, which counts half unless the spans are equal.",
    ),
    "type_confusion": ("", "Entities that were found with another type:"),
    "residuals": ("Residuals", "Predicted minus gold values, in the units of the data."),
    "answer_lengths": (
        "By length of the annotated answer",
        "In words, or in characters where the context is written without spaces.",
    ),
    "first_words": ("By first word of the question", ""),
    "confusion": ("Confusion", "The most frequent first. The picture shows shares of each gold class."),
    "calibration": (
        "Calibration",
        f"The expected calibration error is the mean distance between the predicted probability and the share that is "
        f"right, over {NUM_BINS} bins of equal width, weighted by their counts (Guo et al., 2017).",
    ),
    "label_shares": ("Labels in train and dev", "The largest differences first."),
    "duplicates": (
        "Duplicates of training examples",
        "Exact: equal in lower case without punctuation and spaces. Near: the sets of their words have a Jaccard index "
        f"of at least {MIN_JACCARD}, in pairs both texts. Scores without them tell more about new text.",
    ),
    "errors": ("Worst errors", "The surest, or the largest, first."),
}


def make_report(
    task: Task,
    parts: Sequence[Answered],
    *,
    train: Split | None = None,
    baselines: Mapping[str, Mapping[str, float]] | None = None,
) -> Findings:
    """Returns the report on all parts together; examples without a gold label are left out.

    Args:
        task: The task.
        parts: Examples with their answers, as a task type's `answers` yields them.
        train: The training examples, to compare labels and find duplicates; None to leave this out.
        baselines: Scores of other answers to the same examples by their name, such as `majority`.
    """
    task_type = TASK_TYPES[task.kind]
    split, answers = _labeled(task, parts)
    scores = task_type.scores_of_answers(task, split, answers)
    baselines = {name: own for name, own in (baselines or {}).items() if own}
    content: dict[str, Any] = {
        "task": task.name,
        "kind": task.kind,
        "examples": len(answers),
        "scores": {
            name: {"model": value} | {other: own[name] for other, own in baselines.items() if name in own}
            for name, value in scores.items()
        },
    }
    findings = task_type.findings(task, split, answers)
    content |= {name: each for name, each in findings.content.items() if name != "errors"}
    if train is not None:
        content |= {"warning": warning} if (warning := overlap_warning(train, split)) else {}
        if sizes := task_type.label_counts(task, train):
            content["label_shares"] = label_shares(sizes, task_type.label_counts(task, split))
        content["duplicates"] = _duplicates(task, train, split, answers)
    return Findings(content | {"errors": findings.content["errors"]}, findings.pictures)


def _labeled(task: Task, parts: Sequence[Answered]) -> Answered:
    """Returns the examples of all parts that have a gold label, and their answers."""
    golds = [TASK_TYPES[task.kind].golds(task, split) for split, _ in parts]
    chosen = [[row for row, gold in enumerate(own) if gold is not None] for own in golds]
    splits = [select(split, split.name, rows) for (split, _), rows in zip(parts, chosen, strict=True)]
    answers = [own[row] for (_, own), rows in zip(parts, chosen, strict=True) for row in rows]
    if len(splits) == 1:
        return splits[0], answers
    together: dict[str, Any] = {
        name: [*itertools.chain.from_iterable(getattr(split, name) for split in splits)]
        for name in ("texts", "ids", "words", "columns")
        if getattr(splits[0], name) is not None
    }
    targets = np.concatenate([np.asarray(split.targets) for split in splits])
    return dataclasses.replace(splits[0], targets=targets, **together), answers


def _duplicates(task: Task, train: Split, split: Split, answers: Sequence[Prediction]) -> dict[str, Any]:
    found = find_duplicates(train, split)
    num_exact = sum(each.is_exact for each in found)
    content: dict[str, Any] = {"exact": num_exact, "near": len(found) - num_exact}
    left = sorted({*range(len(answers))} - {each.row for each in found})
    if found and left:
        score = TASK_TYPES[task.kind].scores_of_answers
        own = score(task, select(split, split.name, left), [answers[row] for row in left])
        content["scores"] = {
            name: {"all": value, "without_duplicates": own[name]}
            for name, value in score(task, split, answers).items()
            if name in own
        }
    return content | {"examples": examples(train, split, found)}


def write_report(folder: Path, report: Findings) -> None:
    """Writes report.json, report.md and a picture per section that has one; each file is replaced at once.

    report.md shows also curves.png, if it is there.
    """
    for name, draw in report.pictures.items():
        replace_file(folder / f"{name}.png", _picture(draw))
    curves = ["\n## Training\n\n![Training](curves.png)"] if (folder / "curves.png").exists() else []
    replace_file(folder / "report.md", "\n".join([*_markdown(report), *curves]) + "\n")
    replace_file(folder / "report.json", json.dumps(report.content, ensure_ascii=False, indent=1) + "\n")


def _picture(draw: Callable[[Figure], None]) -> bytes:
    from matplotlib.figure import Figure

    figure, content = Figure(layout="constrained"), BytesIO()
    draw(figure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of characters that the font lacks
        figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def _markdown(report: Findings) -> Iterator[str]:
    content = report.content
    yield f"# {content['task']}: {content['examples']:,} examples"
    if "warning" in content:
        yield f"\nWarning: {printable(content['warning'])}"
    for name, (title, text) in _SECTIONS.items():
        if not content.get(name) and name not in report.pictures:
            continue
        yield from (f"\n{line}" for line in (title and f"## {title}", text) if line)
        yield from _table(content[name] if name != "classes" else _by_f1(content[name]))
        if name in report.pictures:
            yield f"\n![{title}]({name}.png)"


def _by_f1(classes: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(classes.items(), key=lambda row: (row[1]["f1"], -row[1]["support"])))


def _table(value: Any) -> Iterator[str]:
    """Yields a section in Markdown: a table of rows, by name or not, or single values followed by tables."""
    nested = (
        {name: each for name, each in value.items() if isinstance(each, (dict, list))}
        if isinstance(value, dict)
        else {}
    )
    if isinstance(value, dict) and len(nested) < len(value):
        yield ""
        yield from (f"- {name}: {_cell(each)}" for name, each in value.items() if name not in nested)
        for each in nested.values():
            yield from _table(each)
        return
    rows = [{"": name} | each for name, each in value.items()] if isinstance(value, dict) else value
    if not rows:
        return
    names = [name for name in dict.fromkeys(itertools.chain.from_iterable(rows)) if name != "columns"]
    yield f"\n| {' | '.join(names)} |\n|{' --- |' * len(names)}"
    yield from (f"| {' | '.join(_cell(row.get(name)) for name in names)} |" for row in rows[:_MAX_ROWS])
    if len(rows) > _MAX_ROWS:
        yield f"\n{len(rows) - _MAX_ROWS:,} more are in report.json."


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 10 else f"{value:,.2f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list):
        value = "; ".join(f"{each['label']}: {each['text']}" if isinstance(each, dict) else str(each) for each in value)
    text = printable(" ".join(("" if value is None else str(value)).split()))
    text = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
