"""Reference curves of docs/healthy.md: each recipe at `tiny` and `mini`.

    python bench/healthy.py TEXTS... --out FOLDER

Each run has the defaults of its preset and recipe, a vocabulary of 8,192 trained on the same texts, and 2,000 steps
(`mini` in `google` and `paper`: 500); one more has a learning rate that is far too high. Resumable; finished runs are
lines of healthy.jsonl, from which docs/healthy.png is drawn. About an hour of two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

import electra_fast as ef

TREE = Path(__file__).resolve().parent.parent
RESULTS, PICTURE = TREE / "bench/healthy.jsonl", TREE / "docs/healthy.png"
COLORS = {"modern": "tab:blue", "google": "tab:orange", "paper": "tab:green", "google, rate × 100": "tab:red"}
TOO_HIGH = {"optimizer.learning_rate": "0.05"}
SHORT = {"train.steps": "500"}
RUNS = [
    ("tiny", "modern", {}),
    ("tiny", "google", {}),
    ("tiny", "paper", {}),
    ("tiny", "google, rate × 100", TOO_HIGH),
    ("mini", "modern", {}),
    ("mini", "google", SHORT),
    ("mini", "paper", SHORT),
]
PANELS = {
    "loss": "loss",
    "generator_accuracy": "generator accuracy",
    "unigram_auc": "AUC on replacements by frequency",
    "grad_norm": "gradient norm",
}


def run(preset: str, name: str, own: dict[str, str], shards: Path, folder: Path) -> dict[str, object]:
    """Trains, or resumes; returns the curves, as {key: [(step, value), ...]}."""
    config = ef.Config.preset(preset, name.partition(",")[0])
    evaluations = {"train.steps": "2000", "train.eval_every": "100", "train.eval_batches": "20"}
    try:
        ef.pretrain(config.override({**evaluations, **own}), data=shards, out=folder)
        ended = "finished"
    except ef.TrainingFailed as error:
        ended = str(error).splitlines()[0]
    curves: dict[str, list[tuple[int, float]]] = {key: [] for key in PANELS}
    for file, keys in {"metrics": PANELS, "evaluations": ["unigram_auc"]}.items():
        for line in (folder / f"{file}.jsonl").read_text().splitlines():
            entry = json.loads(line)
            for key in keys:
                if entry.get(key) is not None:
                    curves[key].append((entry["step"], float(f"{entry[key]:.4g}")))
    return {"preset": preset, "recipe": name, "ended": ended, **curves}


def draw(runs: list[dict[str, object]]) -> None:
    """One column per preset, one row per value."""
    presets = list(dict.fromkeys(each["preset"] for each in runs))
    figure, axes = pyplot.subplots(len(PANELS), len(presets), figsize=(9, 11), sharex="col", squeeze=False)
    for each in runs:
        column = axes[:, presets.index(each["preset"])]
        for axis, (key, title) in zip(column, PANELS.items(), strict=True):
            if each[key]:
                axis.plot(
                    *zip(*each[key], strict=True), color=COLORS[each["recipe"]], label=each["recipe"], linewidth=1.2
                )
            axis.set_title(f"{each['preset']}: {title}", fontsize=10)
            axis.grid(alpha=0.3)
            if key == "grad_norm":
                axis.set_yscale("log")
        column[-1].set_xlabel("step")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    """Trains what is missing, and draws all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    runs = [json.loads(line) for line in lines]
    finished = {(each["preset"], each["recipe"]) for each in runs}
    missing = [each for each in RUNS if each[:2] not in finished]
    if missing and options.texts and options.out:
        vocab, shards = options.out / "vocab.txt", options.out / "shards"
        if not vocab.exists():
            options.out.mkdir(parents=True, exist_ok=True)
            ef.train_vocab(options.texts, out=vocab, size=8192)
        ef.prepare(options.texts, vocab=vocab, out=shards, holdout=0.01)
        for preset, name, own in missing:
            runs.append(run(preset, name, own, shards, options.out / f"{preset} {name}"))
            with RESULTS.open("a") as file:
                file.write(json.dumps(runs[-1]) + "\n")
    draw(runs)


if __name__ == "__main__":
    sys.exit(main())
