"""The output of a session: its messages, environment, logs and progress line."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch

from electra_fast import _data
from electra_fast.card import card_of, device_peak
from electra_fast.config.config import Config
from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.data.mixture import Mixture
from electra_fast.data.prepare_report import examples_drop
from electra_fast.files.atomic_files import errors_named
from electra_fast.files.checkpoint_folder import TrainState
from electra_fast.files.json_files import JsonLines, read_records
from electra_fast.hardware.flops import flops_per_token
from electra_fast.hardware.graphs import Preparation
from electra_fast.hardware.kernel_choice import version_or_none
from electra_fast.messages import say
from electra_fast.model.compute import ComputeConfig, is_repeatable
from electra_fast.objectives.objective import Number, Stage
from electra_fast.optimizers.optimizer import lr_scale
from electra_fast.progress import TrainingProgress
from electra_fast.training.forecast import compact, low_peak_warnings
from electra_fast.training.loggers import Callbacks, Loggers, logger_names
from electra_fast.training.plots import draw_curves
from electra_fast.training.run import Run

# Rows whose words are checked, and fractions of their tokens that cause a warning.
WORD_ROWS = 64
FEW_IN_LONGER_WORDS = 0.05
MANY_IN_TOO_LONG = 0.1


def startup(run: Run, mixture: Mixture, state: TrainState, num_parameters: int) -> Iterator[str]:
    """Yields the run's status and size, and warnings about likely mistakes."""
    config = run.config
    steps = run.config.train.steps
    start = f"resumes at step {state.step} of {steps}" if state.step else f"starts; {steps} steps"
    yield (
        f"{run.folder}: {start}, {num_parameters / 1e6:.2f} M parameters, "
        f"{mixture.num_tokens / 1e6:.2f} M tokens in the {'corpus' if mixture.is_single else 'corpora'}, "
        f"{flops_per_token(config).total / 1e6:.3g} MFLOPs per token"
    )
    if not mixture.is_single:
        yield f"rows: {_shares(mixture)}"
    data = config.data
    if data.packing == "examples" and not state.step:
        yield examples_drop(data.corpus, mixture.num_tokens, data.sequence_length, seed=config.train.seed)
    if data.masking in ("whole-word", "span") and not state.step:
        yield from words_to_mask(config, mixture)
    for name, (was, now) in run.changes.items():
        yield f"changed at step {state.step}: {name} = {was!r} is now {now!r}"
    if "model.max_positions" in run.changes and config.model.architecture == "bert":
        yield "the new positions start as copies of the learned positions and their moments"
    if "train.steps" in run.changes:
        yield _schedule_change(run, state.step, int(str(run.changes["train.steps"][0])))
    if not state.step:
        yield from compact(config, mixture, num_parameters, imported=state.imported)
    else:
        yield from (f"warning: {line}" for line in low_peak_warnings(config))


def _shares(mixture: Mixture) -> str:
    members = zip(mixture.shares, mixture.names(), mixture.corpora, strict=True)
    return ", ".join(f"{share:.2%} {name} ({corpus.num_tokens / 1e6:.2f} M tokens)" for share, name, corpus in members)


def words_to_mask(config: Config, mixture: Mixture) -> Iterator[str]:
    """Yields a warning if masking whole words has little effect, because most words are single tokens or too long."""
    data = config.data
    starts = mixture.tokenizer.word_starts()
    if starts is None:
        return  # the loader raises an error
    lengths = _word_lengths(config, mixture, torch.tensor(starts))
    budget = round(data.mask_prob * data.sequence_length)
    single, too_long = (float(lengths[which].sum() / lengths.sum()) for which in (lengths == 1, lengths > budget))
    name = f'data.masking = "{data.masking}"'
    if too_long > MANY_IN_TOO_LONG:
        yield (
            f"warning: {name}: {too_long:.0%} of the tokens are in words of more than {budget} tokens, which are never "
            "masked as a whole; if the text has no spaces between words, mask single tokens (--data.masking tokens)"
        )
    elif data.masking == "whole-word" and 1 - single - too_long < FEW_IN_LONGER_WORDS:
        yield (
            f"warning: {name} has little effect: {single:.1%} of the tokens are whole words (text without spaces, or a "
            "vocabulary that contains most words); to mask up to three words together, pass --data.masking span"
        )


def _word_lengths(config: Config, mixture: Mixture, starts_V: torch.Tensor) -> torch.Tensor:
    """Returns the number of tokens of each word in the first rows."""
    loader = BatchLoader.from_config(config, batch_size=WORD_ROWS, epochs=1)
    rows = {name: tensor.long() for name, tensor in to_torch(next(loader)).items()}
    special_tokens = mixture.tokenizer.special_tokens
    ids_BL = rows["input_ids"].scatter(1, rows["masked_positions"], rows["masked_ids"])
    ids_BL[:, 0] = special_tokens["cls"]  # unused slots have position 0
    special_V = torch.zeros_like(starts_V)
    special_V[[token for name, token in special_tokens.items() if name != "unk"]] = True
    special_T = special_V[ids_BL].flatten()
    begins_T = starts_V[ids_BL].flatten() | special_T | special_T.roll(1)
    return torch.bincount(begins_T.cumsum(0)[~special_T])


def _schedule_change(run: Run, step: int, num_steps: int) -> str:
    """Describes the effect of stretching the schedule from `num_steps` on the learning rate."""
    optimizer = run.config.optimizer
    steps = run.config.train.steps
    first = run.config.objective.generator_first  # steps with a separate schedule
    step = max(step, first)
    before, after = (
        lr_scale(optimizer, min(step, total) - first, total - first) * optimizer.learning_rate
        for total in (num_steps, steps)
    )
    return (
        f"the learning-rate schedule is stretched: the learning rate at step {step} is {after:.3g} "
        f"(before: {before:.3g}) and falls to 0 at step {steps}"
    )


def settings(
    config: Config, device: torch.device, num_ranks: int, num_rows: int, notes: list[str], stream_change: str
) -> Iterator[str]:
    """Yields the settings of this session, after `startup`; `num_rows` is the first rank's rows per step."""
    if num_ranks > 1:
        yield f"{num_ranks} ranks; the first has {num_rows} of {config.train.batch_size} rows per step"
    yield from notes
    precision = config.train.precision
    if peak := device_peak(device, precision):
        yield f"MFU is relative to this device's dense peak in {precision}, {peak / 1e12:g} TFLOP/s"
    else:
        yield f"no MFU: the peak of this device in {precision} is unknown"
    if precision == "fp16":
        yield "train.precision = fp16: losses are scaled; steps that overflow are skipped and counted in skipped_steps"
    if stream_change:
        yield stream_change
    if config.train.execution == "compile":
        gain = "; on a CPU, eager is about as fast" if device.type == "cpu" else ""
        yield f"train.execution = compile: the first step takes a minute or more to compile{gain}"


def stage_begins(step: int, stage: Stage) -> str:
    return f"step {step}: {stage.name} begins: the optimizer's moments are reset, the learning-rate schedule restarts"


def compiled(compilation: Preparation) -> str:
    return f"step {compilation.step}: compiled the step in {compilation.seconds:.0f} s"


def captured(capture: Preparation) -> str:
    again = f" again: {capture.reason}" if capture.reason else ""
    return f"step {capture.step}: captured the step as a CUDA graph in {capture.seconds:.1f} s{again}"


def validation(metrics: Mapping[str, Number]) -> str:
    named = {
        "discriminator_auc": "AUC",
        "unigram_auc": "unigram AUC",
        "discriminator_loss": "disc",
        "encoder_loss": "enc",
        "generator_loss": "gen",
    }
    return "  ".join(f"{label} {metrics[name]:.4f}" for name, label in named.items() if metrics.get(name) is not None)


def out_of_time(run: Path, max_minutes: float, step: int, num_steps: int) -> str:
    return (
        f"{run}: reached train.max_minutes = {max_minutes:g}: checkpoint written at step {step} of {num_steps}; "
        "run again to resume"
    )


def closing(run: Path, num_steps: int, memory: int, num_checkpoints: int, blocked_seconds: float) -> str:
    """Returns the report of a run's end; `memory` is the peak in bytes on CUDA."""
    peak = f"; peak memory {memory / 2**30:.2f} GiB" if memory else ""
    saved = f"{num_checkpoints} checkpoints written in the background; training waited {blocked_seconds:.1f} s for them"
    return f"{run}: step {num_steps} of {num_steps}: finished{peak}; {saved}"


def environment(device: torch.device, compute: ComputeConfig, config: Config, num_ranks: int = 1) -> dict[str, str]:
    gpu = str(card_of(device)) if device.type == "cuda" else None
    is_exact = is_repeatable(compute.attention, config.model)
    repeatable = "bitwise" if is_exact else f"except for the gradient of {compute.attention}"
    return {
        "electra-fast": _data.VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_or_none("triton"),
        "device": gpu or f"cpu, {torch.get_num_threads()} threads",
        "ranks": str(num_ranks),
        "attention": compute.attention,
        "matmul": compute.matmul,
        "activations": str(compute.dtype).removeprefix("torch."),
        "execution": config.train.execution,
        "kernels": _kernels(device, dict(compute.kernels)),
        "repeatable": repeatable,
    }


def _kernels(device: torch.device, choices: dict[str, str]) -> str:
    if device.type != "cuda" or choices == {"*": "reference"}:
        return "references"
    checked = [name for key, name in choices.items() if key != "*"]
    num_kernels = sum(name != "reference" for name in checked)
    return f"triton for {num_kernels} of {len(checked)} operations" if "*" in choices else "triton, unchecked"


def record_environment(folder: Path, facts: dict[str, str]) -> None:
    path = folder / "environment.jsonl"
    with errors_named(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**facts, "process": os.getpid()}) + "\n")
    say(", ".join(f"{name} {value}" for name, value in facts.items()))


class RunLog:
    """A context manager for the log files, loggers, callbacks, curves.png and the progress line.

    Args:
        run: The run's folder.
        config: Its configuration.
        first_step: Step at which the session begins; lines of later steps are dropped.
        callbacks: Called after a line is written.
        is_silent: This rank writes no files, calls no callbacks and prints nothing.
    """

    def __init__(self, run: Path, config: Config, first_step: int, callbacks: Callbacks, *, is_silent: bool) -> None:
        self._run = run
        self._config = config
        self._first_step = first_step
        self._callbacks = callbacks
        self._loggers: Loggers | None = None
        num_steps = config.train.steps
        self._files: tuple[JsonLines, JsonLines, JsonLines] | None = None
        self._is_silent = is_silent
        self._progress = TrainingProgress(first_step, num_steps, shown=not is_silent)
        self._open = ExitStack()
        self._drawn = time.monotonic()

    def __enter__(self) -> Self:
        with ExitStack() as opened:  # closes open files if another cannot be opened
            if not self._is_silent:
                metrics, evaluations, warnings = (
                    opened.enter_context(JsonLines(self._run / name, self._first_step))
                    for name in ("metrics.jsonl", "evaluations.jsonl", "warnings.jsonl")
                )
                self._files = (metrics, evaluations, warnings)
                earlier = {"train": read_records(self._run / "metrics.jsonl"), "validation": self.evaluations}
                names = logger_names(self._config.train.loggers)
                settings = dataclasses.asdict(self._config)
                self._loggers = opened.enter_context(Loggers(names, self._run, settings, earlier))
            opened.enter_context(self._progress)
            self._open = opened.pop_all()
        for record in self.evaluations[-1:]:
            self._progress.report_evaluation(record)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def say(self, message: str) -> None:
        self._progress.say(message)

    def warn(self, step: int, message: str) -> None:
        self.record_warning(step, message)
        self.say(f"step {step}: warning: {message}")

    def record_warning(self, step: int, message: str) -> None:
        """Writes a line of warnings.jsonl. A resumed session does not repeat lines."""
        record = {"step": step, "message": message}
        if self._files is not None and record not in read_records(self._run / "warnings.jsonl"):
            self._files[2].write(record)

    def draw_curves(self, min_seconds: float = 0.0) -> None:
        if not self._is_silent and time.monotonic() - self._drawn >= min_seconds:
            draw_curves(self._run)
            self._drawn = time.monotonic()

    def advance(self, step: int) -> None:
        self._progress.advance(step)

    def write_metrics(self, record: dict[str, Any]) -> None:
        self._progress.report(record)
        if self._files is not None and self._loggers is not None:
            self._files[0].write(record)
            self._loggers.log("train", record)
            self._callbacks("on_log", record)

    def write_evaluation(self, record: dict[str, Number]) -> None:
        self._progress.report_evaluation(record)
        if self._files is not None and self._loggers is not None:
            self._files[1].write(record)
            self._loggers.log("validation", record)
            self._callbacks("on_evaluation", record)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Returns the records of evaluations.jsonl; none on a silent rank."""
        return [] if self._files is None else read_records(self._run / "evaluations.jsonl")
