"""The plan of a comparison: a configuration per row, a folder per run, and an estimate of the time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from electra_fast.config.config import AUTO, Config
from electra_fast.data.corpus import Corpus
from electra_fast.finetuning.config import DEFAULT_RECIPE, recipe_config
from electra_fast.finetuning.task import TaskData
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.model.compute import choose_device, choose_precision
from electra_fast.reproduction.experiments import Experiment, Row, with_steps
from electra_fast.reproduction.row_run import RunSettings, read_result, write_run
from electra_fast.training.flops import flops_per_token

# Of English text, for the estimate of the time.
_CHARACTERS_PER_TOKEN = 4.5


@dataclass(frozen=True)
class Plan:
    """A comparison that is ready to run.

    Args:
        out: Folder of the comparison.
        experiment: Rows to compare.
        configs: Configuration of each row, with the steps that the budget allows, without a seed.
        settings: Settings of every run.
        seeds: Runs per row.
    """

    out: Path
    experiment: Experiment
    configs: Mapping[str, Config]
    settings: RunSettings
    seeds: int

    def runs(self) -> dict[Path, tuple[Row, int]]:
        """Row and seed by folder: all rows with one seed come before those with the next."""
        return {
            self.out / "runs" / f"{row.name}-seed-{seed}": (row, seed)
            for seed in range(self.seeds)
            for row in self.experiment.rows
        }

    def prepare(self) -> list[Path]:
        """Writes the folders of the runs that are not finished, and returns them."""
        folders = []
        for folder, (row, seed) in self.runs().items():
            if read_result(folder) is None:
                write_run(folder, self.configs[row.name].replace({"train": {"seed": seed}}), self.settings)
                folders.append(folder)
        return folders

    def finished(self) -> dict[str, list[dict[str, Any]]]:
        """The results of the finished runs, by row."""
        found: dict[str, list[dict[str, Any]]] = {row.name: [] for row in self.experiment.rows}
        for folder, (row, seed) in self.runs().items():
            if (result := read_result(folder)) is not None:
                found[row.name].append({"seed": seed, **result})
        return found

    def sizes(self) -> dict[str, dict[str, float]]:
        """Steps, tokens and true FLOPs of each row's pre-training."""
        return {name: training_size(config) for name, config in self.configs.items()}

    def describe(self, corpus: Corpus) -> Iterator[str]:
        """A line per row."""
        for row in self.experiment.rows:
            size = training_size(self.configs[row.name])
            yield (
                f"  {row.title:<24} {size['steps']:>9,} steps, {size['tokens'] / 1e6:>9,.2f} M tokens "
                f"({size['tokens'] / corpus.num_tokens:.2g} of the corpus), {size['flops']:.3e} FLOPs"
            )


def base_config(config: Config, corpus: Corpus, overrides: Mapping[str, str]) -> Config:
    """Returns a preset with the corpus and the precision that all rows share."""
    changes: dict[str, Any] = {"data": {"corpus": str(corpus.path)}, "model": {"vocab_size": corpus.vocab_size}}
    if config.train.precision == AUTO and "train.precision" not in overrides:
        changes["train"] = {"precision": common_precision()}
    return config.replace(changes)


def common_precision() -> str:
    """Returns the default precision of all rows; `auto`, measured per run, could differ between them."""
    precision = choose_precision(AUTO, choose_device())
    return "fp32" if precision == AUTO else precision


def row_configs(experiment: Experiment, budget: float, overrides: Mapping[str, str]) -> dict[str, Config]:
    """Returns each row's configuration with its steps. Raises ValueError if the budget is too small."""
    configs = {}
    for row in experiment.rows:
        config = with_steps(row, budget)
        steps = config.train.steps
        often = {
            "log_every": max(1, steps // 100),
            "checkpoint_every": max(1, steps // 20),
            "keep_checkpoints": 1,
            "eval_every": 0,  # rows are evaluated at the end, on the same replacements
        }
        chosen = {name: value for name, value in often.items() if f"train.{name}" not in overrides}
        configs[row.name] = config.replace({"train": chosen})
    return configs


def training_size(config: Config) -> dict[str, float]:
    """Steps, tokens and true FLOPs of a run."""
    tokens = config.train.steps * config.train.batch_size * config.data.sequence_length
    return {"steps": config.train.steps, "tokens": tokens, "flops": tokens * flops_per_token(config).total}


def estimate_seconds(
    plan: Plan, tasks: Sequence[TaskData], num_runs: int, flops_per_second: float, num_slots: int
) -> float:
    """Estimates the seconds of `num_runs` runs, at the speed of the first row's pre-training."""
    first = next(iter(plan.configs.values()))
    rate, budget = flops_per_token(first), training_size(first)["flops"]
    encoder = max(rate.discriminator, rate.encoder, rate.generator)
    overrides, seeds = plan.settings.finetune, plan.settings.finetune_seeds
    finetuning = 0.0
    for each in tasks:
        defaults = TASK_TYPES[each.task.kind].defaults
        sizes = len(each.train.texts), len(each.task.labels)
        config = recipe_config(DEFAULT_RECIPE, each.task.name, first.model, overrides, defaults, *sizes)
        characters = sum(len(text) for texts in each.train.texts for text in texts)
        finetuning += seeds * config.finetune.epochs * encoder * characters / _CHARACTERS_PER_TOKEN
    rounds = -(-num_runs // num_slots)
    return rounds * (budget + finetuning) / flops_per_second
