"""Which recipe learns most from the same FLOPs: each ingredient alone, and `modern` beside a tuned `google`.

    python bench/recipes.py TEXTS... --out FOLDER [--scale tiny|mini] [--study compare|ingredients]
                            [--baseline google|google-rotary] [--only NAME ...] [--budget FLOPS] [--seeds N]
                            [--glue FOLDER] [--minutes M] [--workers N] [--results FILE]

The texts become a corpus with the scale's own vocabulary. Every run is a process of its own with one thread, trains on
a budget of true FLOPs (Muon's orthogonalization included) with a schedule of its own, and is judged on validation text
that two fixed corruptors have filled: the unigram distribution, and a masked language model that is trained first and
belongs to no contender. Each finished run is a line of `--results` (default: recipes.jsonl beside this script), where
later calls find those that were judged on the same text: a corruptor that another kind of processor trains fills it
otherwise. A run that was stopped resumes from its checkpoint in FOLDER. `--glue` also fine-tunes models, in `compare`
those chosen for each level, for which runs whose models FOLDER does not have are repeated.

`compare` tries settings of `google`, and the better half of them with twice the budget. Then `google` is run with three
seeds in its best setting for each budget, and `modern` as it is shipped: its rates follow from the number of steps by a
rule that as many trials led to (LOG.md). `google` gets twice the budget, for it needs more. The baseline
`google-rotary` is the same encoder with rotary positions, which tells what the rest of `modern` is worth. `ingredients`
changes one thing at a time, and with it the number of steps and the rates that follow from it. Both end with a table,
`compare` also with a picture. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from recipe_patches import NUM_ITERATIONS
from recipe_report import CRITERION, HEADER, Point, auc, columns, markdown, write_comparison
from recipe_run import EVAL_ROWS, RESULT, RUN
from recipe_studies import BASELINES, COMMON, INGREDIENTS, MODERN, SCALES, Scale, Setting

import electra_fast as ef
from electra_fast.atomic_files import replace_file
from electra_fast.model import Electra
from electra_fast.training.evaluate import evaluate
from electra_fast.training.flops import flops_per_token
from electra_fast.training.muon import stacks
from electra_fast.training.optim import Optimizer
from electra_fast.training.run import exclusive

HERE = Path(__file__).parent
NUM_SEEDS = 3
# Of what is computed: another number makes earlier results unusable.
REVISION = 1
# So many processes share its steps; with another number it would sum in another order and corrupt otherwise, as it does
# on another processor. Results are those of one text.
CORRUPTOR_THREADS = 2


@dataclass(frozen=True)
class Job:
    """A run: a setting with a budget of true FLOPs and a seed, and whether its model is fine-tuned."""

    setting: Setting
    budget: float
    seed: int
    finetune: bool = False


def update_flops(config: ef.Config, patches: Sequence[str] = ()) -> float:
    """FLOPs per step of Muon's iterations.

    Of a matrix m x n with m <= n, each has products of m x n by n x m, m x m by m x m and m x m by m x n.
    """
    if config.optimizer.name != "muon":
        return 0.0
    optimizer = Optimizer(Electra(config).named_parameters(), config.optimizer)
    total, iterations = 0.0, min((NUM_ITERATIONS[each] for each in patches if each in NUM_ITERATIONS), default=5)
    for stack in stacks({name: p for name, p in optimizer.parameters.items() if name not in optimizer.exp_avg_sq}):
        m, n = sorted(stack.shape)
        total += stack.num_matrices * iterations * 2 * (2 * m * m * n + m**3)
    return total


class Study:
    """The runs of a scale: a corpus, two corruptors, and a file of results.

    Args:
        scale: What is compared at which budgets.
        out: Folder for the corpus and for runs in progress.
        results: File of finished runs, a JSON object per line.
        deadline: No run is started after it, by `time.monotonic`.
        glue: Folder of the tasks to fine-tune on, if any.
    """

    def __init__(self, scale: Scale, out: Path, results: Path, deadline: float, glue: Path | None) -> None:
        self.scale, self.out, self.results, self.deadline, self.glue = scale, out, results, deadline, glue
        self.corpus = out / "shards"
        self._lock = threading.Lock()
        *lines, rest = results.read_text().split("\n") if results.exists() else [""]
        if rest:  # a line that a crash cut short
            replace_file(results, "".join(f"{line}\n" for line in lines))
        self.found: dict[str, dict[str, Any]] = {_name(each["run"]): each for each in map(json.loads, lines)}

    def prepare(self, texts: Sequence[str]) -> None:
        """Makes vocabulary and corpus, and trains the corruptor."""
        vocab = self.out / "vocab.txt"
        if not vocab.exists():
            ef.train_vocab(texts, out=vocab, size=self.scale.vocab_size, lowercase=True)
        ef.prepare(texts, vocab=vocab, out=self.corpus, holdout=0.01)
        corruptor = Job(Setting("corruptor", self.scale.corruptor), self.scale.corruptor_budget, 1_000_000)
        torch.set_num_threads(CORRUPTOR_THREADS)
        ef.pretrain(self.config(corruptor), data=self.corpus, out=self.out / "corruptor")

    def config(self, job: Job) -> ef.Config:
        """A run's configuration, with the steps that its budget buys; that of its second part, if it has two."""
        return self.parts(job)[-1][0]

    def parts(self, job: Job) -> list[tuple[ef.Config, int]]:
        """The configuration of each part of a run, and the step that ends it."""
        setting = job.setting
        settings = [each for each in (setting.early, setting) if each is not None]
        assert all(each.patches == setting.patches for each in settings)
        sized = [self._sized(each, job.seed) for each in settings]
        counts = [round(job.budget / len(sized) / flops) for _, flops in sized]
        steps = sum(counts)
        every = {"steps": steps, "log_every": max(1, steps // 50), "checkpoint_every": max(1, steps // 4)}
        configs = [config.replace({"train": every}) for config, _ in sized]
        rates = configs[-1].resolved().optimizer
        scaled = {
            "learning_rate": setting.rest_factor * rates.learning_rate,
            "muon_learning_rate": setting.muon_factor * rates.muon_learning_rate,
        }
        configs = [config.replace({"optimizer": scaled}) for config in configs]
        return list(zip(configs, accumulate(counts), strict=True))

    def _sized(self, setting: Setting, seed: int) -> tuple[ef.Config, float]:
        """A setting's configuration but for the steps, and the FLOPs of each."""
        is_modern = setting.keys.get("model.architecture") == "modern"
        sizes = {**self.scale.keys, **(self.scale.modern_keys if is_modern else {})}
        keys = {**COMMON, **sizes, **setting.keys, "model.vocab_size": str(self.opened.vocab_size)}
        config = ef.Config.preset(self.scale.preset, "google").override({**keys, "train.seed": str(seed)})
        rows, length = config.train.batch_size, config.data.sequence_length
        train, data = {"batch_size": round(setting.batch_factor * rows)}, round(setting.length_factor * length)
        config = config.replace({"train": train, "data": {"sequence_length": data}})
        tokens = config.train.batch_size * config.data.sequence_length
        return config, tokens * flops_per_token(config).total + update_flops(config, setting.patches)

    @cached_property
    def opened(self) -> ef.Corpus:
        """The corpus."""
        return ef.Corpus(self.corpus)

    @property
    def corruptors(self) -> dict[str, str]:
        """What fills validation text, by name."""
        return {"unigram": "unigram", CRITERION: str(self.out / "corruptor")}

    @cached_property
    def judged_on(self) -> dict[str, str]:
        """Hashes of validation text as the corruptors fill it."""
        return {name: self._corruption(corruptor) for name, corruptor in self.corruptors.items()}

    @property
    def sequence_length(self) -> int:
        """Of the rows of validation text."""
        return ef.Config.preset(self.scale.preset, "google").data.sequence_length

    def _corruption(self, corruptor: str) -> str:
        batches = self.scale.eval_batches
        size = {"sequence_length": self.sequence_length, "batch_size": EVAL_ROWS, "max_batches": batches}
        report = evaluate(self.out / "corruptor", self.corpus, corrupted_by=corruptor, mlm_examples=0, **size)
        return str(report["corruption"])

    @cached_property
    def glue_hash(self) -> str | None:
        """Of the tasks' files."""
        if self.glue is None:
            return None
        found = hashlib.sha256()
        for path in sorted(each for ending in ("tsv", "txt") for each in self.glue.rglob(f"*.{ending}")):
            found.update(str(path.relative_to(self.glue)).encode() + path.read_bytes())
        return found.hexdigest()[:16]

    def identity(self, job: Job) -> dict[str, Any]:
        """What a result is found by: all that it depends on besides the version."""
        config = self.config(job)
        differences = ef.Config().differences(config)
        skipped = ("train.log_every", "train.checkpoint_every", "train.keep_checkpoints")
        keys = {key: now for key, (_, now) in differences.items() if key not in skipped}
        identity = {
            "revision": REVISION,
            "scale": self.scale.name,
            "corpus": self.opened.content_hash,
            "judged_on": self.judged_on,
            "budget": job.budget,
            "keys": dict(sorted(keys.items())),
            "patches": list(job.setting.patches),
        }
        if job.setting.early is not None:
            first, last_step = self.parts(job)[0]
            identity["early"] = {key: str(was) for key, (was, _) in first.differences(config).items()}
            identity["early"]["last_step"] = last_step
        return identity

    def result(self, job: Job) -> dict[str, Any] | None:
        """What a finished run has measured, with the tasks if they are asked for."""
        return self._if_whole(self.found.get(_name(self.identity(job)), {}).get("result"), job)

    def point(self, setting: Setting, budget: float, num_seeds: int) -> Point:
        """The finished runs of a setting."""
        found = [self.result(Job(setting, budget, seed)) for seed in range(num_seeds)]
        return Point(setting.name, budget, [each for each in found if each is not None])

    def run(self, jobs: Iterable[Job], num_workers: int) -> None:
        """Does all runs that are not finished, so many at a time; SystemExit at the deadline."""
        # Two names may be of one configuration.
        named = {_name(self.identity(job)): job for job in jobs}
        waiting = [job for job in named.values() if self.result(job) is None]
        with ThreadPoolExecutor(num_workers) as pool:
            outcomes = list(pool.map(self._run, waiting))
        if not all(outcomes):
            sys.exit(f"{sum(outcomes)} of {len(waiting)} runs are finished; call again to continue")

    def _run(self, job: Job) -> bool:
        """Does one run in a process of its own; False where it is too late to start or it was stopped."""
        if time.monotonic() > self.deadline:
            return False
        identity, parts = self.identity(job), self.parts(job)
        folder = self.out / "runs" / _digest(identity)
        folder.mkdir(parents=True, exist_ok=True)
        work = {
            "corpus": str(self.corpus),
            "patches": job.setting.patches,
            "corruptors": self.corruptors,
            "parts": [(f"config-{number}.toml", last_step) for number, (_, last_step) in enumerate(parts)],
            "sequence_length": self.sequence_length,
            "eval_batches": self.scale.eval_batches,
            "glue": (str(self.glue), self.glue_hash) if job.finetune else None,
        }
        for (name, _), (config, _) in zip(work["parts"], parts, strict=True):
            replace_file(folder / name, config.to_toml())
        replace_file(folder / RUN, json.dumps(work))
        if not self._work(job, folder):
            return False
        result = json.loads((folder / RESULT).read_text())
        for name, judged in result.get("corrupted_by", {}).items():
            assert judged["corruption"] == self.judged_on[name], f"{folder}: {name} filled the text otherwise"
        with self._lock, self.results.open("a") as file:
            line = {"run": identity, "name": job.setting.name, "result": result, "version": ef.__version__}
            line["torch"] = torch.__version__
            file.write(json.dumps(line) + "\n")
            self.found[_name(identity)] = line
        print(f"{job.setting.name}, {job.budget:.0e}, seed {job.seed}: {'  '.join(columns([result]))}", flush=True)
        return True

    def _work(self, job: Job, folder: Path) -> bool:
        """Lets a process leave a run's results in its folder, where an earlier one has not; False if it was stopped."""
        if (folder / RESULT).exists() and self._if_whole(json.loads((folder / RESULT).read_text()), job) is not None:
            return True
        limit = max(1.0, self.deadline - time.monotonic() + 60)
        with (folder / "log.txt").open("ab") as log:
            command = [sys.executable, str(HERE / "recipe_run.py"), str(folder)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            # Its standard input closes when this process ends, and then it writes a checkpoint and ends too.
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment) as process:
                try:
                    code = process.wait(limit)
                except subprocess.TimeoutExpired:
                    process.terminate()
                    return False
        if code:
            print(f"{job.setting.name}: exit code {code}, see {folder / 'log.txt'}", flush=True)
        return code == 0

    def _if_whole(self, result: dict[str, Any] | None, job: Job) -> dict[str, Any] | None:
        if result is None or "failed" in result or not job.finetune:
            return result
        return result if result.get("tasks_of", "") == self.glue_hash else None


def _name(identity: dict[str, Any]) -> str:
    return json.dumps(identity, sort_keys=True)


def _digest(identity: dict[str, Any]) -> str:
    return hashlib.sha256(_name(identity).encode()).hexdigest()[:16]


def ingredients(study: Study, only: Sequence[str], budget: float, num_seeds: int, num_workers: int) -> str:
    """Runs each ingredient with every seed, or the settings of some names (`*` stands for anything); a table."""
    settings = [*INGREDIENTS, *(each for trials in BASELINES.values() for each in trials)]
    named = [each for each in settings if any(fnmatch(each.name, name) for name in only)]
    if only and not named:
        sys.exit(f"--only {' '.join(only)}: no setting has such a name; they are in recipe_studies.py")
    chosen = named if only else INGREDIENTS
    finetune = study.glue is not None
    study.run([Job(each, budget, seed, finetune) for seed in range(num_seeds) for each in chosen], num_workers)
    points = [study.point(each, budget, num_seeds) for each in chosen]
    rows = [[each.name, *columns(point.results), each.expected] for each, point in zip(chosen, points, strict=True)]
    return markdown(["changed", *HEADER, "expected of the AUC"], rows)


def compare(study: Study, baseline: str, num_seeds: int, num_workers: int) -> dict[str, list[Point]]:
    """Successive halving on both sides; the chosen setting for each budget, in rising order, with every seed."""
    budgets, lower = study.scale.budgets, study.scale.lower_budgets
    alive = {baseline: BASELINES[baseline], "modern": (MODERN,)}
    chosen: dict[str, list[tuple[Setting, float]]] = {side: [] for side in alive}
    for level in range(len(budgets["modern"])):
        study.run([Job(each, budgets[side][level], 0) for side in alive for each in alive[side]], num_workers)
        for side, trials in alive.items():
            budget = budgets[side][level]
            ranked = sorted(trials, key=lambda each: auc(study.point(each, budget, 1).results[0]), reverse=True)
            alive[side] = tuple(ranked[: -(-len(ranked) // 2)])
            chosen[side] += [(ranked[0], each) for each in (*(() if level else lower[side]), budget)]
        jobs = [
            # What is below the levels is for the curve alone: fine-tuning costs more than such a model.
            Job(setting, budget, seed, study.glue is not None and budget in budgets[side])
            for seed in range(num_seeds)
            for side, pairs in chosen.items()
            for setting, budget in pairs
        ]
        study.run(jobs, num_workers)
    return {side: [study.point(*pair, num_seeds) for pair in pairs] for side, pairs in chosen.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", choices=SCALES, default="tiny")
    parser.add_argument("--study", choices=("compare", "ingredients"), default="compare")
    parser.add_argument("--baseline", choices=BASELINES, default="google", help="of `compare`")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--budget", type=float, default=0.0, help="true FLOPs per run of `ingredients`")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--glue", type=Path)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--results", type=Path, default=HERE / "recipes.jsonl")
    options = parser.parse_args()
    out = options.out.absolute() / options.scale
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    with exclusive(out):
        study = Study(SCALES[options.scale], out, options.results.absolute(), deadline, options.glue)
        study.prepare(options.texts)
        if options.study == "ingredients":
            budget = options.budget or study.scale.ingredient_budget
            print(ingredients(study, options.only, budget, options.seeds, options.workers))
        else:
            curves = compare(study, options.baseline, options.seeds, options.workers)
            print(write_comparison(options.results.absolute().parent, options.scale, curves))


if __name__ == "__main__":
    main()
