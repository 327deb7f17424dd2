"""Compares recipes at equal FLOPs: `modern` with tuned baselines, by size, by amount of text and by ingredient.

    python bench/recipes.py TEXTS... --out FOLDER --study NAME --tflop N... [--scale mini] [--only NAME...]
                            [--seeds N] [--glue FOLDER] [--precision fp32]
    python bench/recipes.py TEXTS... --out FOLDER --glue FOLDER --hour

The texts become a corpus with the scale's vocabulary. Each run is a separate process with one thread, and each core
runs one. A run trains on a budget of exact FLOPs (including Muon's orthogonalization) with its schedule, and is
evaluated on validation text corrupted in two fixed ways: by the unigram distribution, and by a masked language model
that is not a contender. `data/ruler-mini.npz` has the vocabulary of the log's runs and this model's tokens in their
text, because another processor would train it differently; for other texts it is trained first. Each finished run is a
line of `data/recipes.jsonl`; later calls reuse the runs with the same evaluation text. An interrupted run resumes from
its checkpoint in FOLDER. With `--glue`, runs with larger budgets are fine-tuned.

A study (`lib/recipe_studies.py`) runs its settings with every seed and budget, one budget after the other, and prints a
table. `modern` uses its defaults: its rule of learning rates was fitted with as many trials as each baseline had
(LOG.md). `--hour` trains on all cores for an hour and compares with `transformers`.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache, cached_property
from io import BytesIO
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.groups import BENCH
from lib.recipe_report import CRITERION, Point, columns, hour_table, merit, report
from lib.recipe_run import CONFIG, EVAL_ROWS, RESULT, RUN, load_corruptor
from lib.recipe_studies import COMMON, HOUR, LEVELS, SCALES, STUDIES, TFLOP, TRIAL_HOURS, Scale, Setting
from lib.results import commit, processor

import electra_fast as ef
from electra_fast.data.mixture import Mixture
from electra_fast.files.atomic_files import replace_file
from electra_fast.hardware.flops import flops_per_token
from electra_fast.model.model import Electra
from electra_fast.optimizers.optimizer import Optimizer
from electra_fast.optimizers.rules import stacks
from electra_fast.training.corruptor import corrupted_rows
from electra_fast.training.evaluate import SEED, _common_config
from electra_fast.training.run import exclusive

BASE = ef.Config.preset("small", "google").override({"data.packing": "best-fit"})
"""Results are filed by their differences from this."""
NUM_SEEDS = 3
FINETUNE_SEEDS = 3
# A new number makes earlier results unusable.
REVISION = 1
# The number of threads decides the order of sums, and so the replacements, as the processor does.
CORRUPTOR_THREADS = 2


@dataclass(frozen=True)
class Job:
    """A run: a setting, a budget in true FLOPs or hours, a seed, and the number of fine-tuning seeds."""

    setting: Setting
    budget: float
    seed: int
    finetune: int = 0
    hours: float = 0.0


@cache
def update_flops(config: ef.Config) -> float:
    """FLOPs per step of Muon's five iterations.

    For a matrix m x n with m <= n, each has products of m x n by n x m, m x m by m x m and m x m by m x n.
    """
    if config.optimizer.name != "muon":
        return 0.0
    optimizer = Optimizer(Electra(config).named_parameters(), config.optimizer)
    total = 0.0
    for stack in stacks({name: p for name, p in optimizer.parameters.items() if name not in optimizer.exp_avg_sq}):
        m, n = sorted(stack.shape)
        total += stack.num_matrices * 5 * 2 * (2 * m * m * n + m**3)
    return total


class Study:
    """The runs at a scale: a corpus in `out`, two corruptors, a file of results and the tasks in `glue`, if any."""

    def __init__(self, scale: Scale, out: Path, results: Path, glue: Path | None) -> None:
        self.scale = scale
        self.out = out
        self.results = results
        self.glue = glue
        self.corpus = out / "shards"
        self._lock = threading.Lock()
        *lines, rest = results.read_text().split("\n") if results.exists() else [""]
        if rest:  # a line that a crash cut short
            replace_file(results, "".join(f"{line}\n" for line in lines))
        self.lines: dict[str, dict[str, Any]] = {_name(record["run"]): record for record in map(json.loads, lines)}

    def prepare(self, texts: Sequence[str]) -> None:
        """Makes vocabulary and corpus and, for texts other than the log's, trains the evaluation's language model."""
        vocab = self.out / "vocab.txt"
        if not vocab.exists() and self._ruler.exists():
            replace_file(vocab, np.load(self._ruler)["vocab"].tobytes())
        elif not vocab.exists():
            ef.vocab(texts, out=vocab, size=self.scale.vocab_size, strip_accents=True)
        ef.prepare(texts, vocab=vocab, out=self.corpus, holdout=0.01)
        if not self._is_of_the_log():
            corruptor = Job(Setting("corruptor", self.scale.corruptor), self.scale.corruptor_budget, 1_000_000)
            torch.set_num_threads(CORRUPTOR_THREADS)
            ef.pretrain(self.corpus, config=self.config(corruptor)[0], out=self.out / "corruptor")

    @property
    def _ruler(self) -> Path:
        return BENCH / f"data/ruler-{self.scale.name}.npz"

    def _is_of_the_log(self) -> bool:
        return self._ruler.exists() and str(np.load(self._ruler)["corpus"]) == self.opened.content_hash

    def config(self, job: Job) -> tuple[ef.Config, int]:
        """A run's configuration, and the number of steps that its budget buys: 0 for an untrained model."""
        setting = job.setting
        is_modern = setting.keys.get("model.architecture") == "modernbert"
        sizes = {**self.scale.keys, **(self.scale.modern_keys if is_modern else {})}
        keys = {**COMMON, **sizes, **setting.keys, "model.vocab_size": str(self.opened.vocab_size)}
        config = ef.Config.preset(self.scale.preset, "google").override({**keys, "train.seed": str(job.seed)})
        config = config.override({"train.batch_size": round(setting.batch_factor * config.train.batch_size)})
        tokens = config.train.batch_size * config.data.sequence_length
        if setting.tokens_per_second:
            steps = round(3600 * job.hours * setting.tokens_per_second / tokens)
        else:
            # As in the budgets of the finished runs, when the last layers computed all tokens.
            per_token = flops_per_token(config, of_all_tokens=True).total
            steps = round(job.budget / (tokens * per_token + update_flops(config)))
        every = {"steps": max(1, steps), "log_every": max(1, steps // 50), "checkpoint_every": max(1, steps // 20)}
        config = config.override(every)
        rates = config.resolved().optimizer
        resolved = {"learning_rate": rates.learning_rate, "muon_learning_rate": rates.muon_learning_rate}
        return config.override(resolved), steps

    def part(self, parts: int) -> Path:
        """The corpus of 1 / parts of the text: every `parts`-th piece of 1,000 tokens."""
        if parts == 1:
            return self.corpus
        out = self.out / f"shards-{parts}"
        tokenizer = ef.Tokenizer.of(self.opened)
        if not (out / "manifest.json").exists():
            pieces = (ids[i : i + 1000] for ids in self.opened for i in range(0, len(ids), 1000))
            ef.prepare(map(tokenizer.decode, islice(pieces, 0, None, parts)), vocab=self.opened.tokenizer_path, out=out)
        return out

    @cached_property
    def opened(self) -> ef.Corpus:
        return ef.Corpus(self.corpus)

    @cached_property
    def corruptors(self) -> dict[str, str]:
        """The corruptors of validation text by name, as `load_corruptor` takes them."""
        path = self._ruler if self._is_of_the_log() else self.out / "ruler.npz"
        if not path.exists():
            network = load_corruptor(self.out / "corruptor", self.corpus)
            content = BytesIO()
            samples = torch.cat([network.sample(batch, row) for row, batch in self._validation()])
            vocab = np.frombuffer(Path(self.opened.tokenizer_path).read_bytes(), np.uint8)
            hashed = np.array(self.opened.content_hash)
            np.savez_compressed(content, corpus=hashed, vocab=vocab, samples=samples.numpy().astype(np.uint16))
            replace_file(path, content.getvalue())
        return {"unigram": "unigram", CRITERION: str(path)}

    @cached_property
    def judged_on(self) -> dict[str, str]:
        return {name: self._corruption(corruptor) for name, corruptor in self.corruptors.items()}

    @property
    def sequence_length(self) -> int:
        return ef.Config.preset(self.scale.preset, "google").data.sequence_length

    def _corruption(self, corruptor: str) -> str:
        digest = hashlib.sha256()
        filler = load_corruptor(corruptor, self.corpus)
        for row, batch in self._validation():
            for ids in corrupted_rows({**batch, "sampled_ids": filler.sample(batch, row)}):
                digest.update(ids.numpy().astype("<i4").tobytes())
        return digest.hexdigest()[:16]

    def _validation(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yields the batches of validation text, each with the number of its first row."""
        config = ef.Config.preset(self.scale.preset, "google").override({"train.batch_size": EVAL_ROWS})
        config = _common_config(config, self.sequence_length)
        corpora = Mixture(self.corpus).holdout
        loader = ef.BatchLoader.from_config(config, corpus=corpora, seed=SEED, epochs=1)
        for number, batch in enumerate(islice(loader, self.scale.eval_batches)):
            yield number * EVAL_ROWS, ef.to_torch(batch)

    @cached_property
    def glue_hash(self) -> str | None:
        if self.glue is None:
            return None
        digest = hashlib.sha256()
        for path in sorted(file for ending in ("tsv", "txt") for file in self.glue.rglob(f"*.{ending}")):
            digest.update(str(path.relative_to(self.glue)).encode() + path.read_bytes())
        return digest.hexdigest()[:16]

    def identity(self, job: Job) -> dict[str, Any]:
        """The key of a result: everything that it depends on, apart from the version."""
        config, _ = self.config(job)
        differences = BASE.differences(config)
        parts = job.setting.parts
        skipped = ("train.log_every", "train.checkpoint_every", "train.keep_checkpoints")
        keys = {key: now for key, (_, now) in differences.items() if key not in skipped}
        identity = {
            "revision": REVISION,
            "scale": self.scale.name,
            "corpus": (self.opened if parts == 1 else ef.Corpus(self.part(parts))).content_hash,
            "judged_on": self.judged_on,
            "budget": job.budget,
            "keys": dict(sorted(keys.items())),
            "patches": [*job.setting.patches],
        }
        if job.setting.trainer:
            identity["trainer"] = job.setting.trainer
        return identity

    def result(self, job: Job) -> dict[str, Any] | None:
        """Returns the measurements of a finished run; None if there are none, or none of the requested tasks."""
        return self._if_whole(self.lines.get(_name(self.identity(job)), {}).get("result"), job)

    def point(self, setting: Setting, budget: float, num_seeds: int) -> Point:
        results = [self.result(Job(setting, budget, seed)) for seed in range(num_seeds)]
        return Point(setting.name, budget, [result for result in results if result is not None])

    def run(self, jobs: Iterable[Job], num_workers: int) -> None:
        """Does all runs that are not finished, `num_workers` at a time. Raises SystemExit if one failed."""
        # Two names may be of one configuration.
        named = {_name(self.identity(job)): job for job in jobs}
        waiting = [job for job in named.values() if self.result(job) is None]
        threads = max(1, (os.cpu_count() or 1) // num_workers)
        with ThreadPoolExecutor(num_workers) as pool:
            outcomes = [*pool.map(lambda job: self._run(job, threads), waiting)]
        if not all(outcomes):
            sys.exit(f"{sum(outcomes)} of {len(waiting)} runs are finished; run again to resume")

    def _run(self, job: Job, threads: int) -> bool:
        """Executes one run in a separate process; returns False if it failed."""
        identity = self.identity(job)
        config, num_steps = self.config(job)
        folder = self.out / "runs" / _digest(identity)
        folder.mkdir(parents=True, exist_ok=True)
        work = {
            "corpus": str(self.part(job.setting.parts)),
            "validation": str(self.corpus),
            "trainer": job.setting.trainer,
            "patches": job.setting.patches,
            "corruptors": self.corruptors,
            "num_steps": num_steps,
            "sequence_length": self.sequence_length,
            "eval_batches": self.scale.eval_batches,
            "glue": (str(self.glue), self.tasks_of(job), job.finetune) if job.finetune else None,
        }
        replace_file(folder / CONFIG, config.to_toml())
        replace_file(folder / RUN, json.dumps(work))
        if not self._work(job, folder, threads):
            return False
        result = json.loads((folder / RESULT).read_text())
        for name, judged in result.get("corrupted_by", {}).items():
            assert judged["corruption"] == self.judged_on[name], f"{folder}: {name} put other tokens into the text"
        with self._lock, self.results.open("a") as file:
            line = {"run": identity, "name": job.setting.name, "result": result, "version": ef.__version__}
            line |= {"torch": torch.__version__, "commit": commit(), "processor": processor()}
            file.write(json.dumps(line) + "\n")
            self.lines[_name(identity)] = line
        print(f"{job.setting.name}, {job.budget:.0e}, seed {job.seed}: {'  '.join(columns([result]))}", flush=True)
        return True

    def _work(self, job: Job, folder: Path, threads: int) -> bool:
        """Starts the process of a run unless its results are there; returns False if it failed."""
        if (folder / RESULT).exists() and self._if_whole(json.loads((folder / RESULT).read_text()), job) is not None:
            return True
        with (folder / "log.txt").open("ab") as log:
            command = [sys.executable, "-m", "lib.recipe_run", str(folder)]
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
            # When this process ends, the run's standard input closes; it writes a checkpoint and ends.
            with subprocess.Popen(
                command, cwd=BENCH, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment
            ) as process:
                code = process.wait()
        if code:
            print(f"{job.setting.name}: exit code {code}, see {folder / 'log.txt'}", flush=True)
        return code == 0

    def _if_whole(self, result: dict[str, Any] | None, job: Job) -> dict[str, Any] | None:
        if result is None or "failed" in result or not job.finetune:
            return result
        return result if result.get("tasks_of", "") == self.tasks_of(job) else None

    def tasks_of(self, job: Job) -> str:
        return f"{self.glue_hash}" + (f"-{job.finetune}-seeds" if job.finetune > 1 else "")


def _name(identity: dict[str, Any]) -> str:
    return json.dumps(identity, sort_keys=True)


def _digest(identity: dict[str, Any]) -> str:
    return hashlib.sha256(_name(identity).encode()).hexdigest()[:16]


def hour(study: Study, num_seeds: int) -> str:
    """Trains for an hour and fine-tunes, also from untrained models; short trials choose learning rates."""
    chosen = []
    for seed in range(num_seeds):
        for settings in HOUR:
            trials = [Job(setting, 0, 0, hours=TRIAL_HOURS) for setting in settings]
            if len(trials) > 1:
                study.run(trials, 1)
            best = trials[0] if len(trials) == 1 else max(trials, key=lambda job: merit(study.result(job)))
            study.run([Job(best.setting, 0, seed, FINETUNE_SEEDS, hours=1)], 1)
            chosen.append(best.setting)
    study.run([Job(setting, 0, 0, FINETUNE_SEEDS) for setting in chosen], 1)
    return hour_table(study.lines.values())


def compare(study: Study, name: str, only: Sequence[str], budgets: Sequence[float], seeds: int, workers: int) -> str:
    """Runs a study's settings, or those that match `only`, with every seed; reports on all known runs."""
    named = [item for item in STUDIES[name] if any(fnmatch(item.name, pattern) for pattern in only)]
    if only and not named:
        sys.exit(f"--only {' '.join(only)}: no setting has such a name; they are in lib/recipe_studies.py")
    settings = named if only else STUDIES[name]
    finetune = {item: int(study.glue is not None and item >= study.scale.finetuned_from) for item in budgets}
    runs = product(budgets, range(seeds), settings)
    study.run([Job(item, budget, seed, finetune[budget]) for budget, seed, item in runs], workers)
    levels = sorted({*budgets, *LEVELS})
    curves = {item.name: [study.point(item, budget, NUM_SEEDS) for budget in levels] for item in settings}
    return report(curves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", choices=SCALES, default="mini")
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--study", choices=STUDIES)
    work.add_argument(
        "--hour", action="store_true", help="train for an hour on all cores, compared with `transformers`"
    )
    parser.add_argument("--only", nargs="*", default=[], help="settings of the study")
    parser.add_argument("--tflop", type=float, nargs="*", default=[], help="of each run of the study")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--glue", type=Path, help="folder of the tasks to fine-tune on")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="fp32 for a CPU without instructions for bf16")
    options = parser.parse_args()
    if options.study and not options.tflop:
        parser.error("--study needs --tflop")
    out = options.out.absolute() / options.scale
    out.mkdir(parents=True, exist_ok=True)
    scale = SCALES[options.scale]
    if options.precision:
        scale = replace(scale, keys={**scale.keys, "train.precision": options.precision})
    with exclusive(out):
        glue = options.glue and options.glue.absolute()
        study = Study(scale, out, BENCH / "data/recipes.jsonl", glue)
        study.prepare(options.texts)
        if options.hour:
            print(hour(study, options.seeds))
        else:
            budgets = [number * TFLOP for number in options.tflop]
            print(compare(study, options.study, options.only, budgets, options.seeds, os.cpu_count() or 1))


if __name__ == "__main__":
    main()
