"""Writes the HTML page about runs. Every text from a file is escaped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from electra_fast.errors import InputError
from electra_fast.files.atomic_files import replace_file
from electra_fast.results import Result
from electra_fast.run_report.runs import (
    FinetuningRun,
    PretrainingRun,
    find_runs,
    is_pretraining,
    names_of,
    read_finetuning,
    read_pretraining,
)

_MISSING = object()


@dataclass(frozen=True, eq=False, repr=False)
class Report(Result):
    """The result of `report`: the page, and the names of the runs on it."""

    out: Path
    pretraining: list[str]
    finetuning: list[str]

    def lines(self) -> Iterator[str]:
        yield str(self.out)


def report(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, out: str | os.PathLike[str] = "report.html"
) -> Report:
    """Writes one self-contained HTML page about runs.

    Args:
        runs: Folders of pre-training runs or fine-tunings, or folders that contain some; one or several.
        out: The page to write.

    Raises:
        InputError: A folder contains no run, a file of a run is damaged, or `out` is a folder.
        FileNotFoundError: A folder does not exist.
    """
    sources = [Path(path) for path in ([runs] if isinstance(runs, (str, os.PathLike)) else runs)]
    if Path(out).is_dir():
        raise InputError(f"{out}: is a folder; --out must be a file")
    if not sources:
        raise InputError("report: no run; pass at least one folder")
    folders: dict[Path, Path] = {}
    for folder in sources:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
        runs_inside = list(find_runs(folder))
        if not runs_inside:
            raise InputError(
                f"{folder}: contains no run: expected metrics.jsonl and config.toml of a pre-training run, "
                "or TASK/seed-K/metrics.jsonl and config.toml of a fine-tuning"
            )
        folders |= {run.resolve(): run for run in runs_inside}
    names = names_of(list(folders))
    pretrainings = [read_pretraining(run, names[run]) for run in folders if is_pretraining(run)]
    finetunings = [read_finetuning(run, names[run]) for run in folders if not is_pretraining(run)]
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    replace_file(Path(out), _page(pretrainings, finetunings))
    return Report(Path(out), [run.name for run in pretrainings], [run.name for run in finetunings])


def _page(pretrainings: Sequence[PretrainingRun], finetunings: Sequence[FinetuningRun]) -> str:
    style, script = (files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    curves = [run.curves for run in pretrainings] + [curve for run in finetunings for curve in run.curves]
    # Escape `<`, so that no text can close the element.
    data = json.dumps(curves, allow_nan=False).replace("<", "\\u003c")
    num_runs = len(pretrainings) + len(finetunings)
    body = "\n".join([*_pretraining(pretrainings), *_finetuning(finetunings)])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>electra-fast: {num_runs} run{'s' * (num_runs != 1)}</title>\n<style>\n{style}</style></head>\n"
        f"<body>\n<h1>electra-fast: {num_runs} run{'s' * (num_runs != 1)}</h1>\n{body}\n"
        f'<script type="application/json" id="data">{data}</script>\n<script>\n{script}</script>\n</body></html>\n'
    )


def _pretraining(runs: Sequence[PretrainingRun]) -> Iterator[str]:
    if not runs:
        return
    yield '<section data-kind="pretraining"><h2>Pre-training</h2>'
    yield (
        '<p class="soft">Solid: training. Dashed: validation. Triangles: warnings. Drag over a chart to zoom all '
        "charts, double-click to reset. FLOPs are tokens times the FLOPs per token of the configuration.</p>"
        "</section>"
    )
    yield "<h2>Evaluations</h2>"
    yield _columns_table({run.name: run.evaluations[-1] if run.evaluations else {} for run in runs}, "last of each run")
    yield from _configurations(runs)
    yield "<h2>Environment</h2>"
    yield _columns_table({run.name: _sessions(run.environment) for run in runs})
    yield "<h2>Warnings</h2>"
    rows = [
        {"run": run.name, "step": warning["step"], "warning": warning["message"]}
        for run in runs
        for warning in run.warnings
    ]
    yield _table(rows) if rows else "<p>None.</p>"
    yield "<h2>Samples</h2>"
    yield (
        '<p class="soft">Validation text as the generator corrupted it, with the predictions of the newest checkpoint: '
        '<span class="original">original</span>, <span class="doubtful">doubtful</span>, '
        '<span class="replaced">replaced</span>. Underlined words were really replaced; the original word follows.</p>'
    )
    for run in runs:
        yield f"<h3>{escape(run.name)}</h3>"
        if isinstance(run.samples, str):
            yield f"<p>No samples: {escape(run.samples)}</p>"
        else:
            yield from (f'<p class="sample">{" ".join(map(_word, words))}</p>' for words in run.samples)


def _word(word: Any) -> str:
    text = escape(word.text)
    inner = f"<u>{text}</u><i> [{escape(word.original)}]</i>" if word.is_replaced else text
    return f'<span class="{word.verdict}" title="{word.probability:.2f}">{inner}</span>'


def _finetuning(runs: Sequence[FinetuningRun]) -> Iterator[str]:
    if not runs:
        return
    yield '<section data-kind="finetuning"><h2>Fine-tuning</h2></section>'
    yield "<h2>Fine-tuning results</h2>"
    rows = [
        {
            "run": run.name,
            "task": task,
            **{name: result.get(name) for name in ("metric", "median", "min", "max")},
            "seeds": len(result["runs"]),
            "majority": (result.get("majority") or {}).get(result.get("metric")),
        }
        for run in runs
        for task, result in run.results.items()
    ]
    yield _table(rows)
    for run in runs:
        for task, result in run.results.items():
            yield _folded(f"{run.name}: {task}, by seed", _table(result["runs"]))
        for folder, finetuning_report in run.reports.items():
            if classes := finetuning_report.get("classes"):
                rows = [{"class": name, **scores} for name, scores in classes.items()]
                yield _folded(f"{run.name}: {folder}, by class", _table(rows))
    yield from _configurations(runs)


def _configurations(runs: Sequence[PretrainingRun | FinetuningRun]) -> Iterator[str]:
    yield "<h2>Configuration</h2>"
    keys = dict.fromkeys(key for run in runs for key in run.config if key != "train.out")
    differing = [
        key for key in keys if any(run.config.get(key, _MISSING) != runs[0].config.get(key, _MISSING) for run in runs)
    ]
    if differing:
        yield _columns_table({run.name: {key: run.config.get(key) for key in differing} for run in runs}, "differences")
    elif len(runs) > 1:
        yield "<p>Equal in all runs.</p>"
    for run in runs:
        text = "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in run.config.items())
        yield _folded(f"{run.name}, all keys", f"<pre>{escape(text)}</pre>")


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _sessions(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    names = dict.fromkeys(name for record in records for name in record if name != "process")
    values = {
        name: " → ".join(dict.fromkeys(str(record[name]) for record in records if name in record)) for name in names
    }
    return values | {"sessions": str(len(records))}


def _columns_table(columns: Mapping[str, Mapping[str, Any]], corner: str = "") -> str:
    names = dict.fromkeys(name for column in columns.values() for name in column)
    return _table([{corner: name} | {run: column.get(name) for run, column in columns.items()} for name in names])


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        return "<p>None.</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(_cell(row.get(name)) for name in names)}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f'<td class="number">{value:.4g}</td>' if abs(value) < 1000 else f'<td class="number">{value:,.0f}</td>'
    if isinstance(value, int) and not isinstance(value, bool):
        return f'<td class="number">{value:,}</td>'
    if isinstance(value, (dict, list)):
        value = json.dumps(value, ensure_ascii=False)
    return f"<td>{'' if value is None else escape(str(value))}</td>"
