"""The training loop: from an open run and its corpus to checkpoints, metrics and curves.

Everything random is a function of (seed, step), and the loader's position is three integers, so a
run that was killed resumes from its newest checkpoint with the same losses to the last bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from electra_fast import checkpoint, checkpoint_folder
from electra_fast.checkpoint_folder import LogWindow, TrainState
from electra_fast.compute import choose_compute, choose_device
from electra_fast.data.corpus import Corpus
from electra_fast.data.loader import BatchLoader
from electra_fast.data.prepare_report import google_drops
from electra_fast.errors import Diverged
from electra_fast.interruption import StopRequest
from electra_fast.json_files import JsonLines
from electra_fast.model import Electra
from electra_fast.objectives.objective import Number
from electra_fast.progress import TrainingProgress
from electra_fast.training import metrics
from electra_fast.training.environment import environment, record_environment
from electra_fast.training.evaluate import evaluate_model
from electra_fast.training.flops import device_peak, flops_per_token
from electra_fast.training.hardware import settle_hardware
from electra_fast.training.optim import Optimizer, lr_scale
from electra_fast.training.run import Run
from electra_fast.training.step import GRAD_NORM, StepTimer, TrainStep

# A run whose learning rate never reaches this fraction of its peak is hardly what was meant.
LOW_PEAK = 0.5
# Fields of a loader's state that decide the stream of rows.
STREAM = ("seed", "corpus", "options")


class Trainer:
    """One session of a run: the state that a checkpoint stores, and the loop."""

    def __init__(self, run: Run, corpus: Corpus) -> None:
        self.device = choose_device()
        run, self.notes = settle_hardware(run, self.device)
        self.run, self.config, self.corpus = run, run.config, corpus
        self.compute = choose_compute(self.config, self.device)
        self.model = Electra(self.config).to(self.device)
        if run.checkpoint is not None:
            checkpoint.load_parameters(self.model, run.checkpoint)
        if self.config.generator.kind == "unigram":
            self._count_tokens()
        self.optimizer = Optimizer(self.model.named_parameters(), self.config.optimizer)
        self.loader = BatchLoader.from_config(self.config)
        execution = self.config.train.execution
        self.train_step = TrainStep(self.model, self.optimizer, self.config, self.compute, execution)
        self.timer = StepTimer(self.train_step)
        self.state = TrainState()
        self.next_warning, self.num_captures, self.num_compilations = 0, 0, 0
        self.saved_step, self.new_stream = -1, False
        if run.checkpoint is not None and run.state is not None:
            self._restore(run.checkpoint, run.state)
        self.stage = self.train_step.stage
        self.peak = device_peak(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        train = self.config.train
        self.every = {"log": train.log_every, "checkpoint": train.checkpoint_every}
        if train.eval_every and corpus.holdout is not None:
            self.every["evaluation"] = train.eval_every

    def _count_tokens(self) -> None:
        """Gives the proposal the token counts of the corpus; seconds where that has billions."""
        assert self.model.proposal is not None
        start = time.perf_counter()
        self.model.proposal.set_counts(torch.from_numpy(self.corpus.token_counts()))
        seconds = time.perf_counter() - start
        self.notes.append(
            f"generator.kind = unigram: counted {self.corpus.num_tokens / 1e6:.2f} M tokens in {seconds:.1f} s"
        )

    def train(self, stop: StopRequest) -> int:
        """The loop, to the last step or to a stop; returns the step reached, of which there is a checkpoint.

        Reads back from the device only where it logs, evaluates or saves.
        """
        state, num_steps = self.state, self.config.train.steps
        record_environment(self.run.folder, environment(self.device, self.compute, self.config.train.execution))
        with (
            closing(self.train_step),
            JsonLines(self.run.folder / "metrics.jsonl", state.step) as log,
            JsonLines(self.run.folder / "evaluations.jsonl", state.step) as evaluations,
            TrainingProgress(state.step, num_steps) as progress,
        ):
            for line in self._opening():
                progress.say(line)
            self.timer.start()
            while state.step < num_steps and not stop:
                self.train_step(next(self.loader), state.step)
                self._say_changes(progress)
                self.timer.tick()
                state.step += 1
                state.log_window.steps += 1
                progress.advance(state.step)
                # A log window does not span two stages.
                is_last = state.step == self.stage.first_step + self.stage.num_steps
                due = {what for what, every in self.every.items() if state.step % every == 0 or is_last}
                if due:
                    self._stop_timer()
                    if "log" in due:
                        self._log(log, progress)
                    if "evaluation" in due:
                        self._evaluate(evaluations, progress)
                    if "checkpoint" in due:
                        self._save()
                    self.timer.start()
            if self.saved_step != state.step:
                self._stop_timer()
                self._save()
            if state.step == num_steps:
                progress.say(self._closing())
        return state.step

    def _stop_timer(self) -> None:
        """Waits for the device and counts the seconds; raises Diverged where the steps gave no numbers."""
        self.state.log_window.totals = self.train_step.read_totals()
        self._check_finite()
        seconds = self.timer.stop()
        self.state.seconds += seconds
        self.state.log_window.seconds += seconds

    def _check_finite(self) -> None:
        window, step = self.state.log_window, self.state.step
        bad = [name for name, value in window.totals.items() if not math.isfinite(value)]
        if not bad:
            return
        kept = checkpoint_folder.steps(self.run.folder)
        remedy = f"step-{kept[-1]} is the last good checkpoint" if kept else "there is no checkpoint yet"
        raise Diverged(
            f"{self.run.folder}: {' and '.join(bad)} became nan or infinite in steps {step - window.steps + 1}-{step}; "
            f"{remedy}; start again with a lower optimizer.learning_rate or a longer optimizer.warmup_steps"
        )

    def _log(self, log: JsonLines, progress: TrainingProgress) -> None:
        record = self._record()
        log.write(record)
        progress.report(record)
        self._warn(record, progress)
        self.state.log_window = LogWindow()
        self.train_step.set_totals({})

    def _record(self) -> dict[str, Number]:
        """A line of metrics.jsonl: metrics over the log window, and where the run stands."""
        state, window, times = self.state, self.state.log_window, self.timer.take_step_times()
        tokens = int(window.totals["tokens"])
        state.tokens += tokens
        speed = tokens / window.seconds if window.seconds > 0 else 0.0
        return {
            "step": state.step,
            **self.stage.objective.metrics(window.totals),
            "learning_rate": self.train_step.lr_scale(state.step - 1) * self.config.optimizer.learning_rate,
            "grad_norm": window.totals[GRAD_NORM] / window.steps,
            "tokens_per_second": speed,
            "mfu": speed * flops_per_token(self.config, [self.stage]).total / self.peak if self.peak else None,
            "seconds": state.seconds,
            "tokens": state.tokens,
            "step_seconds": times.median if times else None,
            "step_seconds_longest": times.longest if times else None,
        }

    def _evaluate(self, evaluations: JsonLines, progress: TrainingProgress) -> None:
        assert self.corpus.holdout is not None
        num_batches = self.config.train.eval_batches
        found = evaluate_model(
            self.model, self.corpus.holdout, self.config, self.compute, num_batches, self.stage.objective
        )
        evaluations.write({"step": self.state.step, **found})
        progress.say(f"step {self.state.step}: validation: {_validation_text(found)}")

    def _say_changes(self, progress: TrainingProgress) -> None:
        """Reports a new stage, and each capture of the graph, which takes as long as many steps."""
        if self.train_step.stage != self.stage:
            self.stage = self.train_step.stage
            progress.say(
                f"step {self.state.step}: {self.stage.name} begins: the optimizer's moments are reset, the learning "
                f"rate's schedule restarts"
            )
        for compilation in self.train_step.compilations[self.num_compilations :]:
            progress.say(f"step {compilation.step}: compiled the step in {compilation.seconds:.0f} s")
            self.num_compilations += 1
        for capture in self.train_step.captures[self.num_captures :]:
            again = f" again: {capture.reason}" if capture.reason else ""
            progress.say(f"step {capture.step}: captured the step as a CUDA graph in {capture.seconds:.1f} s{again}")
            self.num_captures += 1

    def _warn(self, record: dict[str, Number], progress: TrainingProgress) -> None:
        step = self.state.step
        is_warm = step - self.stage.first_step > self.config.optimizer.warmup_steps
        message = metrics.warning(record) if is_warm else None
        if message and step >= self.next_warning:
            progress.say(f"step {step}: warning: {message}")
            self.next_warning = step + 20 * self.config.train.log_every

    def _save(self) -> None:
        state = self.state
        state.corpus, state.loader = self.corpus.content_hash, self.loader.state()
        state.token_type_1_trained |= state.step > 0 and self.config.data.packing == "google"
        keep = self.config.train.keep_checkpoints
        checkpoint.save(self.run.folder, self.model, self.optimizer.state_dict(), state, keep)
        self.saved_step = state.step

    def _restore(self, directory: Path, state: TrainState) -> None:
        self.state, self.saved_step = state, state.step
        if state.loader is None:
            return  # an imported model: its training starts here
        self.train_step.resume(state.step)
        self.optimizer.load_state_dict(checkpoint.read_tensors(directory / "optimizer.safetensors"))
        self.train_step.set_totals(state.log_window.totals)
        self._restore_loader(state.loader)

    def _restore_loader(self, state: dict[str, Any]) -> None:
        """Restores the stream of rows; if an allowed change makes it a different one, starts that at the next epoch."""
        fresh = self.loader.state()
        self.new_stream = bool(self.run.changes) and any(fresh[name] != state[name] for name in STREAM)
        if self.new_stream:
            same_corpus = fresh["corpus"] == state["corpus"]
            state = fresh | {"epoch": state["epoch"] + 1 if same_corpus else 0}
        self.loader.restore(state)

    def _opening(self) -> Iterator[str]:
        """What the user should know before the first step."""
        steps = self.config.train.steps
        start = f"resumes at step {self.state.step} of {steps}" if self.state.step else f"starts; {steps} steps"
        num_parameters = sum(p.numel() for p in self.model.parameters())
        peak = "" if self.peak else "; no known peak for this device, so no MFU"
        yield (
            f"{self.run.folder}: {start}, {num_parameters / 1e6:.2f} M parameters, "
            f"{self.corpus.num_tokens / 1e6:.2f} M tokens in the corpus, "
            f"{flops_per_token(self.config).total / 1e6:.3g} MFLOP per token{peak}"
        )
        yield from self.notes
        data = self.config.data
        if data.packing == "google" and not self.state.step:
            seed = self.config.train.seed
            yield google_drops(data.corpus, self.corpus.num_tokens, data.sequence_length, seed=seed)
        for name, (was, now) in self.run.changes.items():
            yield f"changed at step {self.state.step}: {name} = {was!r} is now {now!r}"
        if "train.steps" in self.run.changes:
            yield self._rate_change(int(self.run.changes["train.steps"][0]))
        if self.new_stream:
            yield "the change makes other rows of the corpus: their order starts anew, with another epoch"
        if self.config.train.execution == "compile":
            gain = "; on a CPU, eager is about as fast" if self.device.type == "cpu" else ""
            yield f"train.execution = compile: the first step takes a minute or more, since it compiles{gain}"
        yield from self._low_peak()

    def _rate_change(self, num_steps: int) -> str:
        """What stretching the schedule from `num_steps` does to the learning rate."""
        optimizer, steps = self.config.optimizer, self.config.train.steps
        before, after = (
            lr_scale(optimizer, min(self.state.step, total), total) * optimizer.learning_rate
            for total in (num_steps, steps)
        )
        return (
            f"the schedule is stretched: the learning rate of step {self.state.step} is {after:.3g} "
            f"(it was {before:.3g}) and falls to 0 at step {steps}"
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
        return f"{self.run.folder}: step {self.state.step} of {self.config.train.steps}: finished{memory}"


def _validation_text(found: dict[str, Number]) -> str:
    named = {
        "discriminator_auc": "AUC",
        "discriminator_loss": "disc",
        "encoder_loss": "enc",
        "generator_loss": "gen",
    }
    return "  ".join(f"{label} {found[name]:.4f}" for name, label in named.items() if found.get(name) is not None)
