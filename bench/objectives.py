"""Time per step of every objective beside that of `electra`, and beside what its FLOPs would have it take.

    python bench/objectives.py [--shape small] [--rounds 5] [--execution auto] [--device cpu]

Steps of all objectives take turns, so that a machine that slows down slows all of them. Of two stages the second is
timed: the first is a step of `mlm`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator

from results import Results, parse_arguments
from workload import label, loader, make_corpus, new_step, shape

from electra_fast._data import RecordBatch
from electra_fast.objectives import OBJECTIVES
from electra_fast.training.flops import flops_per_token
from electra_fast.training.graphs import WARM_UP
from electra_fast.training.step import TrainStep, choose_execution

VARIANTS = {
    **{name: {"objective.name": name} for name in OBJECTIVES},
    "corrective": {"objective.corrective_weight": "1"},
    "contrastive": {"objective.contrastive_weight": "1"},
    "uniform": {"generator.kind": "uniform"},
}


def seconds(step: TrainStep, batches: Iterator[RecordBatch], numbers: Iterator[int], count: int) -> float:
    """Of one step, the mean of so many."""
    step.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step(next(batches), next(numbers))
    step.synchronize()
    return (time.perf_counter() - start) / count


def main() -> int:
    """A line per objective: milliseconds, and how many times those and the FLOPs of `electra`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="small", help="preset, or preset:rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--execution", default="auto")
    options = parse_arguments(parser)
    results, corpus = Results(options.results, options.device), make_corpus(options.cache, 300)
    base, count = shape(options.shape, {"data.masking": "paper"}), 1 if options.device.type == "cpu" else 20
    execution = choose_execution(options.execution, options.device)
    configs, steps, times = {}, {}, {}
    for name, changes in VARIANTS.items():
        config = configs[name] = base.with_objective(changes.get("objective.name", "electra")).override(changes)
        numbers = itertools.count(config.train.steps // 2)  # in the last stage
        steps[name] = new_step(config, options.device, execution), loader(corpus, config), numbers
        seconds(*steps[name], WARM_UP + 2)
        times[name] = []
    for _ in range(options.rounds):
        for name, each in steps.items():
            times[name].append(seconds(*each, count))
    results.add(f"{label(base, options.shape)}, {execution}: median of {options.rounds}, beside electra's")
    electra_flops = flops_per_token(base).total
    for name, found in times.items():
        ratio = statistics.median(ours / electra for ours, electra in zip(found, times["electra"], strict=True))
        flops = flops_per_token(configs[name], [steps[name][0].stage]).total / electra_flops
        milliseconds = 1e3 * statistics.median(found)
        results.add(
            f"{name:<16} {milliseconds:8.1f} ms   time x{ratio:.2f}   FLOPs x{flops:.2f}",
            objective=name,
            milliseconds=milliseconds,
            times_electra=ratio,
            flops_times_electra=flops,
        )
    for step, *_ in steps.values():
        step.close()
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
