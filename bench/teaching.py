"""Gains of a small model from a teacher and unlabeled texts, for several weights and temperatures.

    python bench/teaching.py STUDENT --teacher ENCODER --glue GLUE --out FOLDER [--only sst2] [--study]

Fine-tunes ENCODER on SST-2, MRPC and sections of Debian's packages (`lib/domains.py`), and teaches STUDENT with three
seeds, as `electra-fast finetune --teacher` does. `--study` instead tries weights and temperatures with one seed on a
part of SST-2. A finished row is a line of FOLDER/teaching.jsonl, and the same command resumes. Prints the table.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

from lib import domains
from lib.results import commit, markdown, processor

import electra_fast as ef
from electra_fast.finetuning.config import FinetuneSection

TASKS = ("sst2", "mrpc", "sections")
KEYS = ("teacher_weight", "teacher_temperature")
# Pairs of these, in the order to run.
STUDY = ((0.9, 2.0), (1.0, 2.0), (0.5, 2.0), (0.9, 1.0), (0.9, 4.0), (1.0, 1.0), (1.0, 4.0), (0.5, 1.0), (0.5, 4.0))
# Numbers of labeled and unlabeled texts in the table and in the study, and of other SST-2 texts for evaluation.
SIZES = (2_000, 6_000)
STUDY_SIZES = (1_000, 3_000)
STUDY_DEV = 4_000
STUDY_KEYS = {"finetune.select": "last", "finetune.evals_per_epoch": 0}


def write_data(task: str, glue: Path, folder: Path, sizes: tuple[int, int]) -> dict[str, Any]:
    """Writes a task's files, once; returns arguments of `finetune`, `unlabeled` among them."""
    folder.mkdir(parents=True, exist_ok=True)
    if task == "sections":
        files = {split: folder / f"{split}.jsonl" for split in ("train", "dev", "test", "unlabeled")}
        if not files["unlabeled"].exists():
            labeled, others = sizes
            domains.NUM_DEV = 3_000
            domains.NUM_TRAIN = 10**6
            _, train, dev = domains.packages()
            parts = (train[:labeled], dev[:1_000], dev[1_000:], train[labeled:][:others])
            for split, examples in zip(files, parts, strict=True):
                rows = [{"text": text, "label": label} for label, text in examples]
                files[split].write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"task": "classification", "overrides": {"finetune.sequence_length": 64}, **files}
    source = glue / {"sst2": "SST-2", "mrpc": "MRPC"}[task]
    for name in ("dev.tsv", "test.tsv") if task == "mrpc" else ("dev.tsv",):
        shutil.copy(source / name, folder / name)
    header, *rows = (source / "train.tsv").read_text(encoding="utf-8").splitlines()
    if task == "mrpc":  # pairs of other kinds, for want of news
        shutil.copy(source / "train.tsv", folder / "train.tsv")
        return {"task": task, "glue": folder, "unlabeled": [glue / "STS-B/train.tsv", glue / "RTE/train.tsv"]}
    random.Random(0).shuffle(rows)
    # The unlabeled ones of the study are no texts that the teacher was trained on.
    parts = {"train": rows[: sizes[0]], "unlabeled": rows[SIZES[0] : SIZES[0] + sizes[1]]}
    if sizes == STUDY_SIZES:
        parts["dev"] = rows[-STUDY_DEV:]
    for name, part in parts.items():
        (folder / f"{name}.tsv").write_text("\n".join([header, *part]) + "\n", encoding="utf-8")
    return {"task": task, "glue": folder, "unlabeled": folder / "unlabeled.tsv"}


def teach(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Trains the teacher, unless it is there, and the student; returns the scores."""
    arguments = write_data(row["data"], options.glue, options.out / "data" / row["data"], SIZES)
    unlabeled = arguments.pop("unlabeled")
    name = arguments["task"]
    teacher = options.out / "teachers" / row["data"]
    ef.finetune(options.teacher, out=teacher, **arguments)
    out = options.out / "students" / "-".join(str(row[key]) for key in ("data", *KEYS, "seeds"))
    if options.study:
        arguments = write_data(row["data"], options.glue, options.out / "study" / row["data"], STUDY_SIZES)
        unlabeled = arguments.pop("unlabeled")
        out = options.out / "study" / out.name
        arguments["overrides"] = STUDY_KEYS
        _start_from(options.out / "study" / "first", out, name)
    overrides = arguments.pop("overrides", {}) | {f"finetune.{key}": row[key] for key in KEYS}
    model = teacher / name / "seed-0" / "model"
    result = ef.finetune(
        options.student,
        out=out,
        teacher=model,
        unlabeled=unlabeled,
        seeds=row["seeds"],
        overrides=overrides,
        **arguments,
    )[name]
    if options.study and not (options.out / "study" / "first").exists():
        shutil.copytree(out, options.out / "study" / "first")
    metric = f"{result['metric']}_test" if f"{result['metric']}_test" in result["medians"] else result["metric"]
    scores = {
        key: result[source][metric]
        for key, source in {"alone": "alone", "taught": "medians", "teacher": "teacher"}.items()
    }
    runs = [run[metric] for run in result["runs"]]
    about = {"metric": metric, "runs": runs, "seconds": result["seconds_per_thousand"]}
    return row | scores | about | {"commit": commit(), "processor": processor()}


def _start_from(first: Path, out: Path, name: str) -> None:
    """Copies the common parts of the study's rows: the student alone, and the teacher's outputs."""
    if first.exists() and not out.exists():
        seeds = lambda folder, names: [entry for entry in names if entry[:5] == "seed-" and Path(folder).name == name]  # noqa: E731
        shutil.copytree(first, out, ignore=seeds)


def table(lines: list[dict[str, Any]]) -> str:
    header = ["data", *KEYS, "metric", "alone", "taught", "teacher", "gap closed", "s per 1,000", "teacher's"]
    rows = []
    for line in lines:
        alone, taught, teacher = (line[key] for key in ("alone", "taught", "teacher"))
        closed = f"{(taught - alone) / (teacher - alone):.0%}" if teacher > alone else ""
        scores = [f"{100 * value:.1f}" for value in (alone, taught, teacher)]
        spread = f" ({', '.join(f'{100 * value:.1f}' for value in line['runs'])})" if len(line["runs"]) > 1 else ""
        seconds = [f"{line['seconds'][key]:.2f}" for key in ("student", "teacher")]
        names = [str(line[key]) for key in ("data", *KEYS, "metric")]
        rows.append([*names, scores[0], scores[1] + spread, scores[2], closed, *seconds])
    return markdown(header, rows)


def run(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / ("study.jsonl" if options.study else "teaching.jsonl")
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    default = FinetuneSection()
    rows = [{"data": data, **{key: getattr(default, key) for key in KEYS}, "seeds": 3} for data in options.only]
    if options.study:
        rows = [{"data": "sst2", **dict(zip(KEYS, pair, strict=True)), "seeds": 1} for pair in STUDY]
    for row in rows:
        if not any(row.items() <= line.items() for line in lines):
            lines.append(teach(row, options))
            with results.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(json.dumps(lines[-1]), flush=True)
    print(table(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("student", type=Path, help="a run or an encoder")
    parser.add_argument("--teacher", type=Path, required=True, help="the encoder that is fine-tuned to teach")
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--study", action="store_true", help="weights and temperatures, one seed")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
