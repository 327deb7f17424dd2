"""Which recipe learns most from the same FLOPs: each ingredient alone, and `modern` beside a tuned `google`.

    python bench/recipes.py TEXTS... --out FOLDER --study NAME [--scale tiny|mini] [--only NAME ...] [--tflop N ...]
                            [--seeds N] [--glue FOLDER] [--minutes M] [--workers N] [--results FILE]
    python bench/recipes.py TEXTS... --out FOLDER --tune BASELINE ...

The texts become a corpus with the scale's own vocabulary. Every run is a process of its own with one thread, or more
with fewer `--workers` than cores, trains on a budget of true FLOPs (Muon's orthogonalization included) with a schedule
of its own, and is judged on validation text that two fixed corruptors have filled: the unigram distribution, and a
masked language model that belongs to no contender. The vocabulary of the log's runs and what that model has filled
their text with are in `ruler-mini.npz`, for another processor would train it otherwise; for other texts it is trained
first. Each finished run is a line of `--results` (default: recipes.jsonl beside this script), where later calls find
those that were judged on the same text. A run that was stopped resumes from its checkpoint in FOLDER. With `--glue`,
runs of the larger budgets are fine-tuned.

A study runs its settings (`recipe_studies.py`) with three seeds and each budget: all of one budget before the next.
`curves` has `modern` beside the best setting of each baseline, `sizes` other shapes of it, `epochs` less text, and
`ingredients` changes one thing at a time, with the number of steps and the rates that follow from it. It ends with a
table and a picture. `modern` is run as it is shipped: its rates follow from the number of steps by a rule that as many
trials led to (LOG.md). `--tune` tries the settings of a baseline, and the better half of them with twice the budget.
Nothing is downloaded.
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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, cached_property
from io import BytesIO
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recipe_patches import NUM_ITERATIONS
from recipe_report import CRITERION, HEADER, Point, columns, hour_table, markdown, merit, report
from recipe_run import EVAL_ROWS, RESULT, RUN, load_corruptor
from recipe_studies import BASELINES, COMMON, HOUR, LEVELS, SCALES, STUDIES, TFLOP, TRIAL_HOURS, Scale, Setting
from results import commit, processor

import electra_fast as ef
from electra_fast.data.mixture import Mixture
from electra_fast.files.atomic_files import replace_file
from electra_fast.model.model import Electra
from electra_fast.optimizers.muon import stacks
from electra_fast.optimizers.optimizer import Optimizer
from electra_fast.training.corruptor import corrupted_rows
from electra_fast.training.evaluate import SEED, _common_config
from electra_fast.training.flops import flops_per_token
from electra_fast.training.run import exclusive

HERE = Path(__file__).parent
NUM_SEEDS = 3
FINETUNE_SEEDS = 3
# Of what is computed: another number makes earlier results unusable.
REVISION = 1
# So many processes share its steps; with another number it would sum in another order and corrupt otherwise, as it does
# on another processor. Results are those of one text.
CORRUPTOR_THREADS = 2


@dataclass(frozen=True)
class Job:
    """A run: a setting with a budget of true FLOPs, or hours, and a seed, and with how many seeds it is fine-tuned."""

    setting: Setting
    budget: float
    seed: int
    finetune: int = 0
    hours: float = 0.0


@cache
def update_flops(config: ef.Config, patches: tuple[str, ...] = ()) -> float:
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
        """Makes vocabulary and corpus; trains the corruptor where the text is not the log's."""
        vocab = self.out / "vocab.txt"
        if not vocab.exists() and self._ruler.exists():
            replace_file(vocab, np.load(self._ruler)["vocab"].tobytes())
        elif not vocab.exists():
            ef.train_vocab(texts, out=vocab, size=self.scale.vocab_size, strip_accents=True)
        ef.prepare(texts, vocab=vocab, out=self.corpus, holdout=0.01)
        if not self._is_of_the_log():
            corruptor = Job(Setting("corruptor", self.scale.corruptor), self.scale.corruptor_budget, 1_000_000)
            torch.set_num_threads(CORRUPTOR_THREADS)
            ef.pretrain(self.config(corruptor), data=self.corpus, out=self.out / "corruptor")

    @property
    def _ruler(self) -> Path:
        return HERE / f"ruler-{self.scale.name}.npz"

    def _is_of_the_log(self) -> bool:
        return self._ruler.exists() and str(np.load(self._ruler)["corpus"]) == self.opened.content_hash

    def config(self, job: Job) -> ef.Config:
        """A run's configuration, with the steps that its budget buys; that of its second part, if it has two."""
        return self.parts(job)[-1][0]

    def parts(self, job: Job) -> list[tuple[ef.Config, int]]:
        """The configuration of each part of a run, and the step that ends it."""
        setting = job.setting
        settings = [each for each in (setting.early, setting) if each is not None]
        assert all(each.patches == setting.patches for each in settings)
        sized = [self._sized(each, job.seed) for each in settings]
        if setting.tokens_per_second:
            ((config, _),) = sized
            tokens = config.train.batch_size * config.data.sequence_length
            counts = [round(3600 * job.hours * setting.tokens_per_second / tokens)]
        else:
            counts = [round(job.budget / len(sized) / flops) for _, flops in sized]
        steps = sum(counts)
        every = {"steps": max(1, steps), "log_every": max(1, steps // 50), "checkpoint_every": max(1, steps // 20)}
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

    def part(self, parts: int) -> Path:
        """The corpus of one of so many parts of the text: every so-manieth of its pieces of 1,000 tokens."""
        if parts == 1:
            return self.corpus
        out, tokenizer = self.out / f"shards-{parts}", ef.Tokenizer.of(self.opened)
        if not (out / "manifest.json").exists():
            pieces = (ids[i : i + 1000] for ids in self.opened for i in range(0, len(ids), 1000))
            ef.prepare(map(tokenizer.decode, islice(pieces, 0, None, parts)), vocab=self.opened.tokenizer_path, out=out)
        return out

    @cached_property
    def opened(self) -> ef.Corpus:
        """The corpus."""
        return ef.Corpus(self.corpus)

    @cached_property
    def corruptors(self) -> dict[str, str]:
        """What fills validation text, by name."""
        path = self._ruler if self._is_of_the_log() else self.out / "ruler.npz"
        if not path.exists():
            network, content = load_corruptor(self.out / "corruptor", self.corpus), BytesIO()
            samples = torch.cat([network.sample(batch, row) for row, batch in self._validation()])
            vocab = np.frombuffer(Path(self.opened.tokenizer_path).read_bytes(), np.uint8)
            hashed = np.array(self.opened.content_hash)
            np.savez_compressed(content, corpus=hashed, vocab=vocab, samples=samples.numpy().astype(np.uint16))
            replace_file(path, content.getvalue())
        return {"unigram": "unigram", CRITERION: str(path)}

    @cached_property
    def judged_on(self) -> dict[str, str]:
        """Hashes of validation text as the corruptors fill it."""
        return {name: self._corruption(corruptor) for name, corruptor in self.corruptors.items()}

    @property
    def sequence_length(self) -> int:
        """Of the rows of validation text."""
        return ef.Config.preset(self.scale.preset, "google").data.sequence_length

    def _corruption(self, corruptor: str) -> str:
        found, filler = hashlib.sha256(), load_corruptor(corruptor, self.corpus)
        for row, batch in self._validation():
            for ids in corrupted_rows({**batch, "sampled_ids": filler.sample(batch, row)}):
                found.update(ids.numpy().astype("<i4").tobytes())
        return found.hexdigest()[:16]

    def _validation(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Batches of the text that runs are judged on, and the number of each one's first row."""
        config = ef.Config.preset(self.scale.preset, "google").replace({"train": {"batch_size": EVAL_ROWS}})
        config, corpora = _common_config(config, self.sequence_length), Mixture(self.corpus).holdout
        loader = ef.BatchLoader.from_config(config, corpus=corpora, seed=SEED, epochs=1)
        for number, batch in enumerate(islice(loader, self.scale.eval_batches)):
            yield number * EVAL_ROWS, ef.to_torch(batch)

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
            "patches": list(job.setting.patches),
        }
        if job.setting.trainer:
            identity["trainer"] = job.setting.trainer
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
        threads = max(1, (os.cpu_count() or 1) // num_workers)
        with ThreadPoolExecutor(num_workers) as pool:
            outcomes = [*pool.map(lambda job: self._run(job, threads), waiting)]
        if not all(outcomes):
            sys.exit(f"{sum(outcomes)} of {len(waiting)} runs are finished; call again to continue")

    def _run(self, job: Job, threads: int) -> bool:
        """Does one run in a process of its own; False where it is too late to start or it was stopped."""
        if time.monotonic() > self.deadline:
            return False
        identity, parts = self.identity(job), self.parts(job)
        folder = self.out / "runs" / _digest(identity)
        folder.mkdir(parents=True, exist_ok=True)
        work = {
            "corpus": str(self.part(job.setting.parts)),
            "validation": str(self.corpus),
            "trainer": job.setting.trainer,
            "patches": job.setting.patches,
            "corruptors": self.corruptors,
            "parts": [(f"config-{number}.toml", last_step) for number, (_, last_step) in enumerate(parts)],
            "sequence_length": self.sequence_length,
            "eval_batches": self.scale.eval_batches,
            "glue": (str(self.glue), self.tasks_of(job), job.finetune) if job.finetune else None,
        }
        for (name, _), (config, _) in zip(work["parts"], parts, strict=True):
            replace_file(folder / name, config.to_toml())
        replace_file(folder / RUN, json.dumps(work))
        if not self._work(job, folder, threads):
            return False
        result = json.loads((folder / RESULT).read_text())
        for name, judged in result.get("corrupted_by", {}).items():
            assert judged["corruption"] == self.judged_on[name], f"{folder}: {name} filled the text otherwise"
        with self._lock, self.results.open("a") as file:
            line = {"run": identity, "name": job.setting.name, "result": result, "version": ef.__version__}
            line |= {"torch": torch.__version__, "commit": commit(), "processor": processor()}
            file.write(json.dumps(line) + "\n")
            self.found[_name(identity)] = line
        print(f"{job.setting.name}, {job.budget:.0e}, seed {job.seed}: {'  '.join(columns([result]))}", flush=True)
        return True

    def _work(self, job: Job, folder: Path, threads: int) -> bool:
        """Lets a process leave a run's results in its folder, where an earlier one has not; False if it was stopped."""
        if (folder / RESULT).exists() and self._if_whole(json.loads((folder / RESULT).read_text()), job) is not None:
            return True
        limit = max(1.0, self.deadline - time.monotonic() + 60)
        with (folder / "log.txt").open("ab") as log:
            command = [sys.executable, str(HERE / "recipe_run.py"), str(folder)]
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
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
        return result if result.get("tasks_of", "") == self.tasks_of(job) else None

    def tasks_of(self, job: Job) -> str:
        """What the tasks' scores of a run are found by."""
        return f"{self.glue_hash}" + (f"-{job.finetune}-seeds" if job.finetune > 1 else "")


def _name(identity: dict[str, Any]) -> str:
    return json.dumps(identity, sort_keys=True)


def _digest(identity: dict[str, Any]) -> str:
    return hashlib.sha256(_name(identity).encode()).hexdigest()[:16]


def tune(study: Study, baseline: str, num_workers: int) -> str:
    """Successive halving of a baseline's settings; a table, the best first."""
    alive, rows = list(BASELINES[baseline]), []
    for budget in study.scale.trial_budgets[baseline]:
        study.run([Job(each, budget, 0) for each in alive], num_workers)
        points = sorted((study.point(each, budget, 1) for each in alive), key=lambda point: -point.mean(merit))
        rows = [[point.setting, f"{budget:.3g}", *columns(point.results)] for point in points] + rows
        names = [point.setting for point in points[: -(-len(points) // 2)]]
        alive = [each for each in alive if each.name in names]
    return markdown(["setting", "FLOPs", *HEADER], rows)


def hour(study: Study, num_seeds: int) -> str:
    """What an hour of all cores gives, fine-tuned beside the untrained twin; rates are chosen by short trials."""
    chosen = []
    for seed in range(num_seeds):
        for settings in HOUR:
            trials = [Job(each, 0, 0, hours=TRIAL_HOURS) for each in settings]
            if len(trials) > 1:
                study.run(trials, 1)
            best = trials[0] if len(trials) == 1 else max(trials, key=lambda job: merit(study.result(job)))
            study.run([Job(best.setting, 0, seed, FINETUNE_SEEDS, hours=1)], 1)
            chosen.append(best.setting)
    study.run([Job(each, 0, 0, FINETUNE_SEEDS) for each in chosen], 1)
    return hour_table(study.found.values())


def compare(study: Study, name: str, only: Sequence[str], budgets: Sequence[float], seeds: int, workers: int) -> str:
    """Runs settings with every seed, or those of some names (`*` stands for anything); what is known of them by now."""
    named = [each for each in STUDIES[name] if any(fnmatch(each.name, pattern) for pattern in only)]
    if only and not named:
        sys.exit(f"--only {' '.join(only)}: no setting has such a name; they are in recipe_studies.py")
    settings = named if only else STUDIES[name]
    for budget in budgets:
        finetune = int(study.glue is not None and budget >= study.scale.finetuned_from)
        study.run([Job(each, budget, seed, finetune) for seed in range(seeds) for each in settings], workers)
    path = study.results.parent / f"{name}-{study.scale.name}.png"
    levels = sorted({*budgets, *LEVELS})
    curves = {each.name: [study.point(each, budget, NUM_SEEDS) for budget in levels] for each in settings}
    return report(path, f"{name}, {study.scale.name}", curves)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", choices=SCALES, default="tiny")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--study", choices=STUDIES)
    what.add_argument("--tune", choices=BASELINES)
    what.add_argument("--hour", action="store_true", help="of all cores, beside `transformers`")
    parser.add_argument("--only", nargs="*", default=[], help="settings of the study")
    parser.add_argument("--tflop", type=float, nargs="*", default=[], help="true ones per run of the study")
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
        if options.tune:
            print(tune(study, options.tune, options.workers))
        elif options.hour:
            print(hour(study, options.seeds))
        else:
            budgets = [each * TFLOP for each in options.tflop] or [study.scale.ingredient_budget]
            print(compare(study, options.study, options.only, budgets, options.seeds, options.workers))


if __name__ == "__main__":
    main()
