"""The training loop: from an open run and its corpus to checkpoints, metrics and curves.

Everything random is a function of (seed, step), and the loader's position is three integers, so a
run that was killed resumes from its newest checkpoint with the same losses to the last bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from electra_fast import checkpoint, checkpoint_folder, electra, metrics
from electra_fast.config import Config
from electra_fast.corpus import Corpus
from electra_fast.data import BatchLoader
from electra_fast.environment import choose_backend, choose_device, environment, record_environment
from electra_fast.errors import TrainingFailed
from electra_fast.evaluate import evaluate_model, held_out_folder
from electra_fast.flops import device_peak, flops_per_token
from electra_fast.interruption import StopRequest
from electra_fast.metrics import JsonLines, Number
from electra_fast.model import Electra
from electra_fast.optim import Optimizer, lr_scale
from electra_fast.prepare_report import google_drops
from electra_fast.progress import TrainingProgress
from electra_fast.run import Run
from electra_fast.step import StepClock, TrainStep, choose_execution

# Below this share of the peak learning rate a run is hardly what was meant.
LOW_PEAK = 0.5
# What makes a loader's stream of rows another one, of its state.
STREAM = ("seed", "corpus", "options")


class Trainer:
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
        self.next_warning, self.num_captures = 0, 0
        self.resumed_at, self.saved_step, self.new_stream = 0.0, -1, False
        if run.checkpoint is not None and run.state is not None:
            self._restore(run.checkpoint, run.state)
        self.flops = flops_per_token(self.config).total
        self.peak = device_peak(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None

    def train(self, stop: StopRequest) -> int:
        """The loop, to the last step or to a stop; returns the step reached, of which there is a checkpoint.

        Reads back from the device only where it logs, evaluates or saves.
        """
        config, train = self.config, self.config.train
        record_environment(self.run.folder, environment(self.device, self.backend, self.execution))
        self.model.train()
        self._resume_clock()
        interval_start = self.seconds
        with (
            JsonLines(self.run.folder / "metrics.jsonl", self.step) as log,
            JsonLines(self.run.folder / "evaluations.jsonl", self.step) as evaluations,
            TrainingProgress(self.step, train.steps) as progress,
        ):
            for line in self._opening():
                progress.say(line)
            while self.step < train.steps and not stop:
                self.train_step(next(self.loader), self.step)
                self._say_captures(progress)
                self.clock.tick()
                self.step += 1
                self.interval_steps += 1
                progress.advance(self.step)
                due_log = self.step % train.log_every == 0 or self.step == train.steps
                due_checkpoint = self.step % train.checkpoint_every == 0 or self.step == train.steps
                if not due_log and not due_checkpoint and not self._due_evaluation():
                    continue
                self._pause_clock()
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
                self._resume_clock()
            if self.saved_step != self.step:
                self._pause_clock()
                self._save()
            if self.step == train.steps:
                progress.say(self._closing())
        return self.step

    def _say_captures(self, progress: TrainingProgress) -> None:
        """Each capture but a run's first costs as long as many steps: batches outgrew the graph's tensors."""
        for capture in self.train_step.captures[self.num_captures :]:
            again = " again: a batch has more segments than any before it" if self.num_captures else ""
            progress.say(f"step {capture.step}: captured the step as a CUDA graph in {capture.seconds:.1f} s{again}")
            self.num_captures += 1

    def _pause_clock(self) -> None:
        """Waits for the device and counts the seconds; raises TrainingFailed where the steps gave no numbers."""
        self.train_step.synchronize()
        self._check_finite()
        self.seconds += time.perf_counter() - self.resumed_at

    def _resume_clock(self) -> None:
        self.resumed_at = time.perf_counter()
        self.clock.start()

    def _due_evaluation(self) -> bool:
        every, corpus = self.config.train.eval_every, Path(self.config.data.corpus)
        is_due = bool(every) and (self.step % every == 0 or self.step == self.config.train.steps)
        return is_due and held_out_folder(corpus) != corpus  # looks on the disk: last, and so not at every step

    def _record(self, seconds: float) -> dict[str, Number]:
        """A line of metrics.jsonl over the interval that ends here; begins the next interval."""
        sums, times = self.interval.cpu().numpy(), self.clock.read()
        tokens = int(sums[electra.SUMS.index("tokens")])
        self.tokens += tokens
        scale = lr_scale(self.config.optimizer, self.step - 1, self.config.train.steps)
        speed = tokens / seconds if seconds > 0 else 0.0
        record: dict[str, Number] = {
            "step": self.step,
            **metrics.summarise(sums[:-1], self.config.objective),
            "learning_rate": scale * self.config.optimizer.learning_rate,
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
        kept = checkpoint_folder.steps(self.run.folder)
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
            **self._history(),
        }
        keep = self.config.train.keep_checkpoints
        checkpoint.save(self.run.folder, self.step, self.model, self.optimizer.state_dict(), state, keep)
        self.saved_step = self.step

    def _history(self) -> dict[str, bool]:
        """What `export` must know of earlier packings and of an import."""
        before = self.run.state or {}
        two_segments = self.step > 0 and self.config.data.packing == "google"
        return {
            "imported": before.get("imported", False),
            "token_type_1_trained": two_segments or before.get("token_type_1_trained", False),
        }

    def _restore(self, directory: Path, state: dict[str, Any]) -> None:
        checkpoint.load_parameters(self.model, directory)
        self.step = self.saved_step = state["step"]
        if "loader" not in state:
            return  # an imported model: its training starts here
        self.optimizer.load_state_dict(checkpoint.read_tensors(directory / "optimizer.safetensors"))
        self._restore_loader(state["loader"])
        self.interval.copy_(torch.tensor(state["interval"], dtype=torch.float64))
        self.interval_steps = state["interval_steps"]
        self.tokens, self.seconds = state["tokens"], state["seconds"]

    def _restore_loader(self, state: dict[str, Any]) -> None:
        """Continues the stream of rows; where a change that was allowed makes it another one, with its next epoch."""
        fresh = self.loader.state()
        self.new_stream = bool(self.run.changes) and any(fresh[name] != state[name] for name in STREAM)
        if self.new_stream:
            same_corpus = fresh["corpus"] == state["corpus"]
            state = fresh | {"epoch": state["epoch"] + 1 if same_corpus else 0}
        self.loader.restore(state)

    def _opening(self) -> Iterator[str]:
        """What a person should know before the first step."""
        steps = self.config.train.steps
        start = f"resumes at step {self.step} of {steps}" if self.step else f"starts; {steps} steps"
        num_parameters = sum(p.numel() for p in self.model.parameters())
        peak = "" if self.peak else "; no known peak for this device, so no MFU"
        yield (
            f"{self.run.folder}: {start}, {num_parameters / 1e6:.2f} M parameters, "
            f"{self.corpus.num_tokens / 1e6:.2f} M tokens in the corpus, {self.flops / 1e6:.3g} MFLOP per token{peak}"
        )
        data = self.config.data
        if data.packing == "google" and not self.step:
            seed = self.config.train.seed
            yield google_drops(data.corpus, self.corpus.num_tokens, data.sequence_length, seed=seed)
        for name, (was, now) in self.run.changes.items():
            yield f"changed at step {self.step}: {name} = {was!r} is now {now!r}"
        if "train.steps" in self.run.changes:
            yield self._rate_change(int(self.run.changes["train.steps"][0]))
        if self.new_stream:
            yield "the change makes other rows of the corpus: their order starts anew, with another epoch"
        yield from self._low_peak()

    def _rate_change(self, num_steps: int) -> str:
        """What stretching the schedule from `num_steps` does to the learning rate."""
        optimizer, steps = self.config.optimizer, self.config.train.steps
        before, after = (
            lr_scale(optimizer, min(self.step, total), total) * optimizer.learning_rate for total in (num_steps, steps)
        )
        return (
            f"the schedule is stretched: the learning rate of step {self.step} is {after:.3g} (it was {before:.3g}) "
            f"and falls to 0 at step {steps}"
        )

    def _low_peak(self) -> Iterator[str]:
        optimizer, steps = self.config.optimizer, self.config.train.steps
        # Both schedules have one peak: at the end of the warmup, or in the middle of a warmup that is too long.
        at = (min(optimizer.warmup_steps, steps - 1), steps // 2)
        peak = max(lr_scale(optimizer, step, steps) for step in at)
        if peak < LOW_PEAK:
            yield (
                f"warning: optimizer.warmup_steps = {optimizer.warmup_steps} with train.steps = {steps}: the learning "
                f"rate never passes {peak:.0%} of optimizer.learning_rate = {optimizer.learning_rate:g}; "
                f"lower optimizer.warmup_steps (-1: a twentieth of the steps)"
            )

    def _closing(self) -> str:
        memory = ""
        if self.device.type == "cuda":
            memory = f"; peak memory {torch.cuda.max_memory_allocated(self.device) / 2**30:.2f} GiB"
        return f"{self.run.folder}: step {self.step} of {self.config.train.steps}: finished{memory}"


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
