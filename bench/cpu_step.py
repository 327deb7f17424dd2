"""Tokens per second of a pre-training step on a CPU, compared with `transformers` and with an earlier version.

    python bench/cpu_step.py [--shapes tiny mini small] [--recipes google modern] [--only WORD ...]
                             [--against FOLDER] [--seconds 60] [--section.key value ...]
                             [--results FILE] [--quick]

Prints a line per contender and a table per shape and recipe. The step, the corpus and the peers are the same as in
`pretrain_throughput.py`, in fp32 (`--train.precision bf16` changes all contenders) or bf16, with the preset's own rows
and sequence length; the peers exist for recipe `google` and, without a mask, for `deberta`. Downloads nothing.

The speed of a shared machine changes by half from one minute to the next. Every contender is therefore a separate
process (`lib/cpu_worker.py`); after a warm-up that includes compilation, the contenders take turns for many rounds.
Compare the median of the ratio to our eager step in the same round. "CPU ms" is the CPU time of all threads and
processes of a step; it changes least when other processes use the cores.

`--against FOLDER` adds the eager step of the version whose package is `FOLDER/electra_fast/`; ratios are then relative
to it. Threads: all cores, or OMP_NUM_THREADS. OMP_WAIT_POLICY is PASSIVE for all contenders unless it is set.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from lib.cpu_worker import CONTENDERS, EAGER, Worker
from lib.results import Results, markdown, parse_arguments, processor, reason
from lib.workload import label, make_corpus, shape

import electra_fast as ef
from electra_fast.config.presets import RECIPES

SHAPES = ["tiny", "mini", "small"]
RECIPE_NAMES = ["google", "modern"]
SMALL_VOCABULARY = {"tiny": 1024}  # entries, as in the demo
BEFORE = "electra-fast before, eager"
SECONDS = 60.0
TURN = 0.5  # seconds per turn of a contender, or one step
LEAST_ROUNDS = 3
HEADER = ["step", "tokens/s", "best", "ratio", "step ms", "CPU ms", "steps", "mean loss", "peak GiB", "warm-up s"]


def names_of(config: ef.Config, words: list[str], with_before: bool) -> list[str]:
    """The contenders with one of the words in their names, and the earlier version."""
    # DebertaV2Model does not support block masks.
    kinds = {"bert": ("electra-fast", "transformers"), "deberta": ("electra-fast", "transformers, eager, no mask")}
    names = [name for name in CONTENDERS if name.startswith(kinds.get(config.model.architecture, "electra-fast"))]
    return [BEFORE] * with_before + [name for name in names if any(word in name for word in words)]


class Field:
    """The contenders of a shape; a failing contender is removed, with its reason in `failures`."""

    def __init__(self) -> None:
        self.contenders: dict[str, Worker] = {}
        self.failures: dict[str, str] = {}

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # not installed, out of memory, not compilable: the others continue
            self.failures[name] = reason(error)
            self.contenders.pop(name, None)

    def enter(self, name: str, config: ef.Config, corpus: Path, options: argparse.Namespace, stack: ExitStack) -> None:
        """Starts a contender and waits for its warm-up."""
        with self._failing(name):
            turn = 0.0 if options.quick else TURN
            contender, package = (EAGER, options.against) if name == BEFORE else (name, None)
            worker = Worker(contender, config, corpus, options.cache, turn, package)
            stack.callback(worker.close)
            self.contenders[name] = worker
            if worker.unknown:
                print(f"{name} does not have the keys {', '.join(worker.unknown)}", flush=True)

    def compete(self, seconds: float) -> None:
        """Runs rounds in which each contender has a turn, in this order and in reverse, so that drift favors none."""
        end = time.monotonic() + seconds
        for number in count():
            if number >= LEAST_ROUNDS and time.monotonic() > end:
                break
            names = list(self.contenders)
            for name in reversed(names) if number % 2 else names:
                with self._failing(name):
                    self.contenders[name].take_turn()

    def result(self, name: str, baseline: str) -> dict[str, Any]:
        worker = self.contenders[name]
        speeds = self.contenders[name].speeds
        base = self.contenders[baseline].speeds if baseline in self.contenders else []
        ratios = [mine / its for mine, its in zip(speeds, base, strict=False)]
        return {
            "tokens_per_second": statistics.median(speeds),
            "best": max(speeds),
            "ratio": statistics.median(ratios) if ratios else None,
            "baseline": baseline,
            "step_ms": worker.median_ms("seconds"),
            "cpu_ms": worker.median_ms("cpu_seconds"),
            "steps": worker.steps_per_turn * len(speeds),
            "warm_up_seconds": worker.warm_up_seconds,
            "rounds": speeds,
            **worker.facts(),
        }


def columns(result: Mapping[str, Any]) -> list[str]:
    return [
        f"{result['tokens_per_second']:,.0f}",
        f"{result['best']:,.0f}",
        f"{result['ratio']:.2f}" if result["ratio"] else "–",
        f"{result['step_ms']:,.1f}",
        f"{result['cpu_ms']:,.1f}",
        f"{result['steps']}",
        f"{result['mean_loss']:.1f}",
        f"{result['peak_gib']:.1f}",
        f"{result['warm_up_seconds']:.0f}",
    ]


def measure(text: str, recipe: str, corpus: Path, options: argparse.Namespace, results: Results) -> None:
    config = configuration(text, recipe, options.overrides)
    names = names_of(config, options.only, options.against is not None)
    baseline = BEFORE if options.against else EAGER
    title = ", ".join([label(config, text), recipe, *(f"{key} {value}" for key, value in options.overrides.items())])
    contest = Field()
    rows = []
    with ExitStack() as stack:
        for name in names:
            contest.enter(name, config, corpus, options, stack)
        contest.compete(options.seconds)
        for name in names:
            if name in contest.failures:
                why = contest.failures[name]
                results.add(f"{title}, {name}: {why}", ok=not name.startswith("electra-fast"))
                rows.append([name, why, *[""] * (len(HEADER) - 2)])
                continue
            result = contest.result(name, baseline)
            line = ", ".join(f"{text} {unit}" for text, unit in zip(columns(result), HEADER[1:], strict=True))
            results.add(f"{title}, {name}: {line}", shape=text, recipe=recipe, step=name, **result)
            rows.append([name, *columns(result)])
    print(f"\n{title}; ratio to {baseline}\n\n{markdown(HEADER, rows)}\n", flush=True)


def configuration(text: str, recipe: str, overrides: Mapping[str, str]) -> ef.Config:
    changes = {"train.precision": "fp32", "model.dropout": "0", "model.attention_dropout": "0"}
    if text.partition(":")[0] in SMALL_VOCABULARY:
        changes["model.vocab_size"] = str(SMALL_VOCABULARY[text.partition(":")[0]])
    return shape(text, changes | dict(overrides), recipe)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--shapes", nargs="+", help="preset, or preset:rows per step")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES)
    parser.add_argument("--only", nargs="+", default=[""], help="contenders whose name has one of these words")
    parser.add_argument("--against", type=Path, help="folder that contains another version's `electra_fast`")
    parser.add_argument("--seconds", type=float, help="seconds of counted steps per shape; at least three rounds")
    options = parse_arguments(parser, with_overrides=True, for_cpu=True)
    options.shapes = options.shapes or (SHAPES[:1] if options.quick else SHAPES)
    options.recipes = options.recipes or RECIPE_NAMES[: 1 if options.quick else None]
    options.seconds = options.seconds or (0.0 if options.quick else SECONDS)
    if options.against is not None and not (options.against / "electra_fast").is_dir():
        parser.error(f"--against {options.against}: there is no electra_fast/ in it")
    return options


def main() -> int:
    options = parse()
    cores = len(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    card = f"{processor()}, {cores} cores, {threads} threads"
    print(f"{card}, torch {torch.__version__}", flush=True)
    results = Results(options.results, options.device, card)
    for text in options.shapes:
        for recipe in options.recipes:
            num_entries = configuration(text, recipe, options.overrides).model.vocab_size
            corpus = make_corpus(options.cache, 300 if options.quick else 4000, num_entries)
            measure(text, recipe, corpus, options, results)
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
