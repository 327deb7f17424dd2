"""The training loop: from a configuration and a corpus to checkpoints, metrics and curves.

Everything random is a function of (seed, step), and the loader's position is three integers, so a
run that was killed goes on from its newest checkpoint with the same losses to the last bit.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from electra_fast import checkpoint, electra, metrics
from electra_fast.config import Config
from electra_fast.corpus import Corpus
from electra_fast.data import BatchLoader
from electra_fast.evaluate import evaluate_model, held_out_folder
from electra_fast.flops import device_peak, flops_per_token
from electra_fast.metrics import JsonLines, Number
from electra_fast.model import Electra
from electra_fast.optim import Optimizer, schedule_factor
from electra_fast.prepare_report import google_drops
from electra_fast.progress import TrainingProgress
from electra_fast.run import Run, choose_backend, choose_device, environment, exclusive, open_run, record_environment
from electra_fast.step import StepClock, TrainStep, choose_execution


class TrainingFailed(Exception):
    """Training cannot go on: the loss or the gradient is not a number."""


@dataclass(frozen=True)
class Result:
    """What a call of `pretrain` ended with."""

    run: Path
    step: int
    finished: bool


def pretrain(config: Config, *, data: str | Path | None = None, out: str | Path | None = None) -> Result:
    """Trains, or goes on where the run in `out` left off.

    Args:
        config: the run's configuration.
        data: corpus folder; `data.corpus` by default.
        out: the run's folder; `train.out` by default.

    Returns:
        the step reached, and whether that is the last one (False: interrupted by SIGTERM or Ctrl-C,
        after a checkpoint).

    Raises:
        ValueError, FileNotFoundError: the configuration, corpus and folder don't fit together.
        TrainingFailed: the loss is not a number; the last good checkpoint is kept.
    """
    config = config.replace(
        {
            "data": {"corpus": str(data if data is not None else config.data.corpus)},
            "train": {"out": str(out if out is not None else config.train.out)},
        }
    )
    if not config.data.corpus or not config.train.out:
        raise ValueError(
            "pretrain needs a corpus (--data DIR, data.corpus) and a folder for the run (--out, train.out)"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"WORLD_SIZE = {os.environ['WORLD_SIZE']}: this version trains on one device; start it plainly"
        )
    corpus = Corpus(config.data.corpus)
    with exclusive(Path(config.train.out)), _stop_requests() as stop:
        return _Trainer(open_run(config, corpus), corpus).train(stop)


class _Trainer:
    """One session of a run: the state that a checkpoint stores, and the loop."""

    def __init__(self, run: Run, corpus: Corpus) -> None:
        self.run, self.config, self.corpus = run, run.config, corpus
        self.device = choose_device()
        self.backend = choose_backend(self.config, self.device)
        self.model = Electra(self.config).to(self.device)
        self.optimizer = Optimizer(self.model.named_parameters(), self.config.optimizer)
        self.loader = _loader(self.config)
        self.execution = choose_execution(self.config.train.execution, self.device)
        self.train_step = TrainStep(self.model, self.optimizer, self.config, self.backend, self.execution)
        # Since the last line of metrics.jsonl: electra.SUMS, then the gradient norms' sum.
        self.interval = self.train_step.sums
        self.clock = StepClock(self.train_step)
        self.interval_steps, self.step, self.tokens, self.seconds = 0, 0, 0, 0.0
        self.next_warning = 0
        if run.checkpoint is not None and run.state is not None:
            self._restore(run.checkpoint, run.state)
        self.flops = flops_per_token(self.config).total
        self.peak = device_peak(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None

    def train(self, stop: _StopRequest) -> Result:
        """The loop. Reads back from the device only where it logs, evaluates or saves."""
        config, train = self.config, self.config.train
        record_environment(self.run.folder, environment(self.device, self.backend, self.execution))
        self.model.train()
        clock = time.perf_counter()
        self.clock.start()
        interval_start = self.seconds
        with (
            JsonLines(self.run.folder / "metrics.jsonl", self.step) as log,
            JsonLines(self.run.folder / "evaluations.jsonl", self.step) as evaluations,
            TrainingProgress(self.step, train.steps) as progress,
        ):
            progress.say(self._opening())
            while self.step < train.steps and not stop.requested:
                self.train_step(next(self.loader), self.step)
                self.clock.tick()
                self.step += 1
                self.interval_steps += 1
                progress.advance(self.step)
                last = self.step == train.steps or stop.requested
                due_log = self.step % train.log_every == 0 or self.step == train.steps
                due_checkpoint = self.step % train.checkpoint_every == 0 or last
                if not due_log and not due_checkpoint and not self._due_evaluation():
                    continue
                self.train_step.synchronize()
                self._check_finite()
                now = time.perf_counter()
                self.seconds += now - clock
                if due_log:
                    record = self._record(self.seconds - interval_start)
                    log.write(record)
                    progress.report(record)
                    self._warn(record, progress)
                    interval_start = self.seconds
                if self._due_evaluation():
                    figures = evaluate_model(
                        self.model, Path(config.data.corpus), config, self.backend, train.eval_batches
                    )
                    evaluations.write({"step": self.step, **figures})
                    progress.say(f"step {self.step}: held out: {_held_out_text(figures)}")
                if due_checkpoint:
                    self._save()
                clock = time.perf_counter()
                self.clock.start()
            progress.say(self._closing())
        return Result(self.run.folder, self.step, self.step == train.steps)

    def _due_evaluation(self) -> bool:
        every = self.config.train.eval_every
        has_held_out = held_out_folder(Path(self.config.data.corpus)) != Path(self.config.data.corpus)
        return bool(every) and has_held_out and (self.step % every == 0 or self.step == self.config.train.steps)

    def _record(self, seconds: float) -> dict[str, Number]:
        """A line of metrics.jsonl over the interval that ends here; begins the next interval."""
        sums, times = self.interval.cpu().numpy(), self.clock.read()
        tokens = int(sums[electra.SUMS.index("tokens")])
        self.tokens += tokens
        factor = schedule_factor(self.config.optimizer, self.step - 1, self.config.train.steps)
        speed = tokens / seconds if seconds > 0 else 0.0
        record: dict[str, Number] = {
            "step": self.step,
            **metrics.summarise(sums[:-1], self.config.objective),
            "learning_rate": factor * self.config.optimizer.learning_rate,
            "grad_norm": float(sums[-1]) / self.interval_steps,
            "tokens_per_second": speed,
            "mfu": speed * self.flops / self.peak if self.peak else None,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "step_seconds": times.median if times else None,
            "step_seconds_longest": times.longest if times else None,
        }
        self.interval.zero_()
        self.interval_steps = 0
        return record

    def _check_finite(self) -> None:
        if torch.isfinite(self.interval).all():
            return
        names = (*electra.SUMS, "grad_norm")
        bad = [name for name, value in zip(names, self.interval.tolist(), strict=True) if not math.isfinite(value)]
        kept = checkpoint.steps(self.run.folder)
        remedy = f"step-{kept[-1]} is the last good checkpoint" if kept else "there is no checkpoint yet"
        raise TrainingFailed(
            f"{self.run.folder}: {' and '.join(bad)} became nan or infinite in steps "
            f"{self.step - self.interval_steps + 1}-{self.step}; {remedy}; start again with a lower "
            "optimizer.learning_rate or a longer optimizer.warmup_steps"
        )

    def _warn(self, record: dict[str, Number], progress: TrainingProgress) -> None:
        message = metrics.warning(record) if self.step > self.config.optimizer.warmup_steps else None
        if message and self.step >= self.next_warning:
            progress.say(f"step {self.step}: warning: {message}")
            self.next_warning = self.step + 20 * self.config.train.log_every

    def _save(self) -> None:
        state = {
            "step": self.step,
            "corpus": self.corpus.content_hash,
            "loader": self.loader.state(),
            "interval": self.interval.tolist(),
            "interval_steps": self.interval_steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "imported": (self.run.state or {}).get("imported"),
        }
        keep = self.config.train.keep_checkpoints
        checkpoint.save(self.run.folder, self.step, self.model, self.optimizer.state_dict(), state, keep)

    def _restore(self, directory: Path, state: dict[str, Any]) -> None:
        checkpoint.load_parameters(self.model, directory)
        if "loader" not in state:
            return  # an imported model: its training starts here
        self.optimizer.load_state_dict(checkpoint.read_tensors(directory / "optimizer.safetensors"))
        self.loader.restore(state["loader"])
        self.interval.copy_(torch.tensor(state["interval"], dtype=torch.float64))
        self.interval_steps, self.step = state["interval_steps"], state["step"]
        self.tokens, self.seconds = state["tokens"], state["seconds"]

    def _opening(self) -> str:
        num_parameters = sum(p.numel() for p in self.model.parameters())
        start = f"goes on at step {self.step}" if self.step else "starts"
        peak = "" if self.peak else "; no known peak for this device, so no MFU"
        opening = (
            f"{self.run.folder}: {start} of {self.config.train.steps}, {num_parameters / 1e6:.2f} M parameters, "
            f"{self.corpus.num_tokens / 1e6:.2f} M tokens in the corpus, {self.flops / 1e6:.3g} MFLOP a token{peak}"
        )
        data = self.config.data
        if self.step or data.packing != "google":
            return opening
        corpus, seed = self.corpus, self.config.train.seed
        return f"{opening}\n{google_drops(data.corpus, corpus.num_tokens, data.sequence_length, seed=seed)}"

    def _closing(self) -> str:
        done = (
            "finished"
            if self.step == self.config.train.steps
            else "interrupted, checkpoint written; run again to go on"
        )
        memory = ""
        if self.device.type == "cuda":
            memory = f"; peak memory {torch.cuda.max_memory_allocated(self.device) / 2**30:.2f} GiB"
        return f"{self.run.folder}: step {self.step} of {self.config.train.steps}: {done}{memory}"


def _loader(config: Config) -> BatchLoader:
    return BatchLoader(
        config.data.corpus,
        sequence_length=config.data.sequence_length,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        masking=config.data.masking,
        mask_prob=config.data.mask_prob,
        packing=config.data.packing,
    )


def _held_out_text(figures: dict[str, Number]) -> str:
    named = {"discriminator_auc": "AUC", "discriminator_loss": "disc", "generator_loss": "gen"}
    return "  ".join(f"{label} {figures[name]:.4f}" for name, label in named.items() if figures[name] is not None)


@dataclass
class _StopRequest:
    requested: bool = False


@contextmanager
def _stop_requests() -> Iterator[_StopRequest]:
    """Turns the first SIGTERM or Ctrl-C into a request to stop after the current step; a second one kills."""
    stop = _StopRequest()

    def request(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        signal.signal(number, before[signal.Signals(number)])
        print("stopping after this step; once more to stop at once", file=sys.stderr)

    before = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, request)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
