"""A classifier on a CPU, from raw text to label: ours in torch and onnxruntime, `transformers` and optimum.

    python bench/serving.py [--models NAME=FOLDER...] [--data GLUE] [--optimum-python PYTHON] [--rounds 3]

Each contender is a process (`lib/serving_worker.py`) on one thread, then on two. They take turns, so that only one
computes at a time; results are medians over rounds. Short texts have about 16 tokens, long ones 128 to 200. Start-up
is the time from the start of Python to the first answer, memory the resident memory then, `labels` the number of labels
equal to the first row's. optimum needs a separate environment: `uv venv optimum`, then `uv pip install --python
optimum/bin/python "optimum-onnx[onnxruntime]"`. Prints tables in Markdown. Exports are kept in `--cache`.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from finetune_throughput import add_encoder_options, make_inputs, make_tasks
from lib.results import Results, markdown, parse_arguments, processor

from electra_fast.finetuning.readers import glue
from electra_fast.finetuning.task import TaskData

WORKER = Path(__file__).parent / "lib/serving_worker.py"
# Words per text.
SHORT = (8, 16)
LONG = (105, 165)
BATCHES = {1: 96, 32: 4}  # how many different ones of each size
LEAST = 2  # batches that are timed, however slow
# Names in the table, of the worker, and of the export.
CONTENDERS = {
    "ours, torch fp32": ("fp32", ""),
    "ours, torch bf16": ("bf16", ""),
    "ours, ONNX fp32": ("auto", "onnx"),
    "ours, ONNX int8": ("auto", "int8"),
    "transformers pipeline": ("transformers", ""),
    "optimum int8": ("optimum", "optimum"),
}
BASELINES = {"ours, torch fp32": "transformers pipeline", "ours, ONNX int8": "optimum int8"}
Cell = tuple[str, int]
"""Kind of text, and texts per batch."""


@dataclass
class Worker:
    """A running contender and its measurements; `times` has seconds per batch, keyed by cell, for each round."""

    process: subprocess.Popen[str]
    start_up: float
    mib: float
    times: dict[Cell, list[list[float]]] = field(default_factory=dict)
    labels: dict[Cell, list[str]] = field(default_factory=dict)

    def measure(self, cell: Cell, batches: list[list[str]], seconds: float) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"batches": batches, "seconds": seconds, "least": LEAST}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        self.times.setdefault(cell, []).append(answer["seconds"])
        self.labels[cell] = answer["labels"]

    def rate(self, cell: Cell) -> float:
        """Texts per second."""
        return cell[1] / statistics.median(map(statistics.fmean, self.times[cell]))

    def ms(self, cell: Cell, percent: float) -> float:
        return 1e3 * statistics.median(float(np.percentile(times, percent)) for times in self.times[cell])


def texts_by_length(sentences: list[str]) -> dict[str, list[str]]:
    """Sentences of some words, and paragraphs made of all."""
    rng = random.Random(0)
    short = [text for text in sentences if SHORT[0] <= len(text.split()) <= SHORT[1]]
    words = [word for text in rng.choices(sentences, k=4000) for word in text.split()]
    starts = (rng.randrange(len(words) - LONG[1]) for _ in range(256))
    return {"short": short, "long": [" ".join(words[i : i + rng.randint(*LONG)]) for i in starts]}


def batches_of(texts: list[str], size: int) -> list[list[str]]:
    endless = itertools.cycle(texts)
    return [list(itertools.islice(endless, size)) for _ in range(BATCHES[size])]


def write_labeled(path: Path, data: TaskData) -> None:
    """Validation examples for the export's comparison of int8."""
    split = data.dev[0]
    rows = ({"text": text, "label": data.task.labels[y]} for (text, *_), y in zip(split.texts, split.gold, strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def folder_of(kind: str, folder: Path, cache: Path, python: str) -> Path:
    """The folder that a contender reads, exported unless that was done before."""
    if not kind:
        return folder
    out = cache / kind
    partial = cache / f"{kind}.partial"
    if not out.exists():
        shutil.rmtree(partial, ignore_errors=True)
        command = [python, str(WORKER), "quantize", str(folder), str(partial)]
        if kind != "optimum":
            command = [sys.executable, "-m", "electra_fast", "export", str(folder), "--out", str(partial), "--onnx"]
            labeled = str(cache.parent / "labeled.jsonl")
            command += ["--int8", "--data", labeled, "--accept-loss", "100"] if kind == "int8" else []
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            print(f"{kind}: {(process.stderr.strip().splitlines() or ['failed'])[-1]}", flush=True)
            return partial
        partial.rename(out)
    return out


def start(contender: str, folder: Path, threads: int, python: str) -> Worker | str:
    """A worker that has answered, or the last line of its error."""
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), str(threads))
    command = [python, str(WORKER), contender, str(folder), str(threads)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with tempfile.TemporaryFile("w+") as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(command, text=True, env=environment, stderr=errors, **pipes)
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - begin
        errors.seek(0)
        if not line:
            return (errors.read().strip().splitlines() or ["no answer"])[-1]
    return Worker(process, seconds, json.loads(line)["mib"])


def stop(workers: dict[str, Worker]) -> None:
    for worker in workers.values():
        worker.process.communicate()


def start_all(options: argparse.Namespace, folders: dict[str, Path], threads: int) -> dict[str, Worker]:
    workers = {}
    for contender, folder in folders.items():
        kind = CONTENDERS[contender][0]
        worker = start(kind, folder, threads, options.optimum_python if kind == "optimum" else sys.executable)
        if isinstance(worker, Worker):
            workers[contender] = worker
        else:
            print(f"{contender}: not measured: {worker}", flush=True)
    return workers


def measure_in_turns(
    options: argparse.Namespace, cells: dict[Cell, list[list[str]]], workers: dict[str, Worker]
) -> None:
    names = list(workers)
    for turn, (cell, batches) in itertools.product(range(options.rounds), cells.items()):
        for index in range(len(names)):
            workers[names[(turn + index) % len(names)]].measure(cell, batches, options.seconds)


def add_table(results: Results, model: str, threads: int, cells: Iterable[Cell], workers: dict[str, Worker]) -> None:
    """Adds a row for each contender, and the ratios of our contenders to the others."""
    header = [
        f"{model}, threads: {threads}",
        *(f"{kind} x {size}" for kind, size in cells),
        "start",
        "memory",
        "labels",
    ]
    print(f"\nTexts per second (milliseconds per batch: median, 95th percentile)\n\n{markdown(header, [])}", flush=True)
    reference = next(iter(workers.values()))
    for name, worker in workers.items():
        same = [a == b for cell in cells for a, b in zip(worker.labels[cell], reference.labels[cell], strict=True)]
        speeds = [f"{worker.rate(c):,.0f} ({worker.ms(c, 50):.3g}, {worker.ms(c, 95):.3g})" for c in cells]
        row = [name, *speeds, f"{worker.start_up:.1f} s", f"{worker.mib:,.0f} MiB", f"{statistics.fmean(same):.1%}"]
        metrics = {f"{kind} x {size}": worker.rate((kind, size)) for kind, size in cells}
        facts = {"model": model, "threads": threads, "contender": name, "start_up": worker.start_up, "mib": worker.mib}
        results.add(f"| {' | '.join(row)} |", **facts, **metrics)
    print()
    for name, other in BASELINES.items():
        if {name, other} <= workers.keys():
            ratios = [f"{workers[name].rate(cell) / workers[other].rate(cell):.2f}" for cell in cells]
            print(f"{name}: {', '.join(ratios)} times as fast as {other}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_encoder_options(parser)
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="NAME=FOLDER",
        help="classifiers of SST-2 that read 256 tokens (an untrained one)",
    )
    parser.add_argument("--data", type=Path, help="folder of GLUE with SST-2, for the texts (made-up sentences)")
    parser.add_argument("--optimum-python", default=sys.executable, help="Python of an environment with optimum-onnx")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.7, help="of a contender in a round, per size and length")
    options = parse_arguments(parser, for_cpu=True)
    if options.quick:
        options.preset = "tiny"
        options.rounds = 1
        options.seconds = 0.0
    made = make_inputs(options)
    options.data = options.data or made
    models = dict(model.split("=", 1) for model in options.models or [f"random={make_tasks(options, 'sst2')[1]}"])
    data = glue.read("sst2", options.data)
    write_labeled(options.cache / "serving" / "labeled.jsonl", data)
    texts = texts_by_length([text for (text, *_) in data.dev[0].texts])
    cells = {(kind, size): batches_of(texts[kind], size) for kind in texts for size in BATCHES}
    results = Results(options.results, options.device, processor())
    show = "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in sys.argv[1:]), sep=', ')"
    for python, *packages in (
        (sys.executable, "torch", "onnxruntime", "transformers"),
        (options.optimum_python, "optimum-onnx", "onnxruntime", "transformers"),
    ):
        subprocess.run([python, "-c", f"import sys; {show}", *packages], stderr=subprocess.DEVNULL)
    print(f"{processor()}, load {os.getloadavg()[0]:.1f}", flush=True)
    for name, folder in models.items():
        cache = options.cache / "serving" / f"{name}-{Path(folder, 'config.json').stat().st_mtime_ns:x}"
        folders = {
            contender: folder_of(kind, Path(folder).resolve(), cache, options.optimum_python)
            for contender, (_, kind) in CONTENDERS.items()
        }
        warm = start_all(options, folders, 1)  # files are in memory from then on
        stop(warm)
        folders = {contender: folders[contender] for contender in warm}
        for threads in (1, 2):
            workers = start_all(options, folders, threads)
            measure_in_turns(options, cells, workers)
            add_table(results, name, threads, cells, workers)
            stop(workers)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
