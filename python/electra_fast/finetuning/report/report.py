"""A report on a model's answers to labeled examples: report.json, report.md and pictures.

It depends only on the task, the examples and the answers, not on the model. The answers may come from a finished seed,
from all folds together, or from predictions for a file.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from electra_fast.files.atomic_files import replace_file
from electra_fast.finetuning.report.sections import Section
from electra_fast.finetuning.report.train_overlap import MIN_JACCARD, examples, find_duplicates, label_shares
from electra_fast.finetuning.task import Prediction, Split, Task, overlap_warning, select
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.messages import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Answered = tuple[Split, Sequence[Prediction]]
"""Examples with gold labels, and an answer to each."""
# Limits of rows per table and characters per cell in report.md; report.json is complete.
_MAX_ROWS = 25
_MAX_CHARACTERS = 160


@dataclass(frozen=True)
class Report:
    """Facts about the examples, and the sections."""

    facts: dict[str, Any]
    sections: list[Section]

    @property
    def content(self) -> dict[str, Any]:
        """The content of report.json."""
        return self.facts | {section.name: section.rows for section in self.sections}


def make_report(
    task: Task,
    parts: Sequence[Answered],
    *,
    train: Split | None = None,
    baselines: Mapping[str, Mapping[str, float]] | None = None,
    teaching: Mapping[str, Any] | None = None,
) -> Report:
    """Returns the report on all parts together; examples without a gold label are left out.

    Args:
        task: The task.
        parts: Examples with their answers, as yielded by a task type's `answers`.
        train: The training examples, to compare labels and find duplicates; None for a report without this.
        baselines: Scores of other answers to the same examples by name, such as `majority`.
        teaching: The teacher's effect on scores, and the duration of its predictions and the student's.
    """
    task_type = TASK_TYPES[task.kind]
    split, answers = _labeled(task, parts)
    facts: dict[str, Any] = {"task": task.name, "kind": task.kind, "examples": len(answers)}
    scores = {
        name: {"model": value} | {other: table[name] for other, table in (baselines or {}).items() if name in table}
        for name, value in task_type.scores_of_answers(task, split, answers).items()
    }
    text = "majority: always the most frequent answer. untrained: the same network, trained from random weights."
    *particular, errors = task_type.sections(task, split, answers)
    sections = [Section("scores", scores, "Scores", text), *particular]
    if teaching:
        text += " alone: the same network, trained on the labels without the teacher."
        durations = teaching["seconds_per_thousand"].items()
        seconds = {f"{name}, seconds per 1,000 texts": duration for name, duration in durations}
        shown = {"fraction of the gap between alone and teacher that is closed": teaching["gap_closed"], **seconds}
        sections[:1] = [Section("scores", scores, "Scores", text), Section("teaching", teaching, shown=shown)]
    if train is not None:
        facts |= {"warning": warning} if (warning := overlap_warning(train, split)) else {}
        if sizes := task_type.label_counts(task, train):
            shares = label_shares(sizes, task_type.label_counts(task, split))
            text = "The largest differences first."
            sections.append(Section("label_shares", shares, "Labels in the training and validation sets", text))
        text = (
            "Exact: equal in lower case without punctuation and spaces. Near: the sets of their words have a Jaccard "
            f"index of at least {MIN_JACCARD}, in pairs both texts. Scores without them predict scores on new text."
        )
        duplicates = _duplicates(task, train, split, answers, scores)
        sections.append(Section("duplicates", duplicates, "Duplicates of training examples", text))
    return Report(facts, [*sections, errors])


def _labeled(task: Task, parts: Sequence[Answered]) -> Answered:
    golds = [TASK_TYPES[task.kind].golds(task, split) for split, _ in parts]
    chosen = [[row for row, gold in enumerate(values) if gold is not None] for values in golds]
    splits = [select(split, split.name, rows) for (split, _), rows in zip(parts, chosen, strict=True)]
    answers = [values[row] for (_, values), rows in zip(parts, chosen, strict=True) for row in rows]
    if len(splits) == 1:
        return splits[0], answers
    together: dict[str, Any] = {
        name: [*itertools.chain.from_iterable(getattr(split, name) for split in splits)]
        for name in ("texts", "ids", "words", "columns")
        if getattr(splits[0], name) is not None
    }
    targets = np.concatenate([np.asarray(split.targets) for split in splits])
    return dataclasses.replace(splits[0], targets=targets, **together), answers


def _duplicates(
    task: Task, train: Split, split: Split, answers: Sequence[Prediction], scores: Mapping[str, Any]
) -> dict[str, Any]:
    duplicates = find_duplicates(train, split)
    num_exact = sum(duplicate.is_exact for duplicate in duplicates)
    content: dict[str, Any] = {"exact": num_exact, "near": len(duplicates) - num_exact}
    left = sorted({*range(len(answers))} - {duplicate.row for duplicate in duplicates})
    if duplicates and left:
        rest = select(split, split.name, left)
        scores_of_rest = TASK_TYPES[task.kind].scores_of_answers(task, rest, [answers[row] for row in left])
        content["scores"] = {
            name: {"all": value["model"], "without_duplicates": scores_of_rest[name]}
            for name, value in scores.items()
            if name in scores_of_rest
        }
    return content | {"examples": examples(train, split, duplicates)}


def write_report(folder: Path, report: Report) -> None:
    """Writes report.json, report.md and the pictures of sections; each file is replaced atomically.

    report.md also shows curves.png, if it exists.
    """
    for section in report.sections:
        if section.draw is not None:
            replace_file(folder / f"{section.name}.png", _picture(section.draw))
    curves = ["\n## Training\n\n![Training](curves.png)"] if (folder / "curves.png").exists() else []
    replace_file(folder / "report.md", "\n".join([*_markdown(report), *curves]) + "\n")
    replace_file(folder / "report.json", json.dumps(report.content, ensure_ascii=False, indent=1) + "\n")


def _picture(draw: Callable[[Figure], None]) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    content = BytesIO()
    with rc_context({"axes.labelsize": 9, "legend.fontsize": 8}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font lacks
        draw(figure)
        figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def _markdown(report: Report) -> Iterator[str]:
    yield f"# {report.facts['task']}: {report.facts['examples']:,} examples"
    if "warning" in report.facts:
        yield f"\nWarning: {printable(report.facts['warning'])}"
    for section in report.sections:
        if not section.rows and section.draw is None:
            continue
        yield from (f"\n{line}" for line in (section.title and f"## {section.title}", section.text) if line)
        yield from _table(section.rows if section.shown is None else section.shown)
        if section.draw is not None:
            yield f"\n![{section.title}]({section.name}.png)"


def _table(value: Any) -> Iterator[str]:
    """Yields a section in Markdown: a table of rows, which may have names, or single values followed by tables."""
    nested = (
        {name: item for name, item in value.items() if isinstance(item, (dict, list))}
        if isinstance(value, dict)
        else {}
    )
    if isinstance(value, dict) and len(nested) < len(value):
        yield ""
        yield from (f"- {name}: {_cell(item)}" for name, item in value.items() if name not in nested)
        for item in nested.values():
            yield from _table(item)
        return
    rows = [{"": name} | item for name, item in value.items()] if isinstance(value, dict) else value
    if not rows:
        return
    names = [name for name in dict.fromkeys(itertools.chain.from_iterable(rows)) if name != "columns"]
    yield f"\n| {' | '.join(names)} |\n|{' --- |' * len(names)}"
    yield from (f"| {' | '.join(_cell(row.get(name)) for name in names)} |" for row in rows[:_MAX_ROWS])
    if len(rows) > _MAX_ROWS:
        yield f"\n{len(rows) - _MAX_ROWS:,} more rows are in report.json."


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 10 else f"{value:,.2f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list):
        value = "; ".join(f"{item['label']}: {item['text']}" if isinstance(item, dict) else str(item) for item in value)
    text = printable(" ".join(("" if value is None else str(value)).split()))
    text = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
