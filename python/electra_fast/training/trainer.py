"""The training loop: from an open run and its corpora to checkpoints, metrics and curves.

Everything random is a function of (seed, step), and the loader's position is a few integers, so a killed run resumes
from its newest checkpoint with bitwise identical losses.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from electra_fast.card import device_peak
from electra_fast.config.config import AUTO
from electra_fast.data.loader import BatchLoader, default_cache_dir, merge_states
from electra_fast.data.mixture import Corpora, Mixture, resumed_state, stream_of, with_present_names
from electra_fast.distributed.division import smaller_micro_batches
from electra_fast.distributed.world import World
from electra_fast.errors import Diverged, InputError, OutOfMemory, ReportedElsewhere, TrainingFailed, is_out_of_memory
from electra_fast.files import checkpoint_folder
from electra_fast.files.checkpoint_folder import LogWindow, LossHistory, TrainState
from electra_fast.hardware.flops import flops_per_token
from electra_fast.hardware.kernel_choice import agree_on_kernels, expected_seconds
from electra_fast.hardware.settings import resolve_hardware
from electra_fast.interruption import StopRequest
from electra_fast.model.attention import BACKENDS
from electra_fast.model.compute import choose_compute, is_repeatable, use_compute
from electra_fast.model.model import Electra
from electra_fast.objectives.objective import Number
from electra_fast.optimizers.optimizer import Optimizer
from electra_fast.optimizers.shards import Shards
from electra_fast.training import reporting
from electra_fast.training.checkpoint_writer import CheckpointWriter
from electra_fast.training.diagnostics import (
    MIN_STEPS,
    LastingWarning,
    diverged_ranks,
    fingerprint,
    has_exploded,
    lost_learning,
    recovery_advice,
    slowest,
    stall_warning,
    verdict,
)
from electra_fast.training.evaluate import evaluate_model, unigram_auc, unigram_entropy
from electra_fast.training.forecast import corpus_warnings
from electra_fast.training.loggers import Callbacks
from electra_fast.training.mirror import Mirror
from electra_fast.training.parallel_step import create_step, time_steps
from electra_fast.training.reporting import RunLog
from electra_fast.training.run import CORPUS, Run
from electra_fast.training.run_tensors import RunTensors
from electra_fast.training.step import GRAD_NORM, SKIPPED
from electra_fast.training.timing import SlowSteps, StepTimer, StepTimes, TimeLimit

# Changes of keys with these prefixes make losses incomparable.
_OTHER_LOSSES = ("data.", "objective.", "model.rope_theta", "model.local_rope_theta", CORPUS)
# Batches for the verdict on a run without evaluations.
_VERDICT_BATCHES = 10
# Minimum seconds between redraws of curves.png. A redraw takes about half a second.
_CURVES_SECONDS = 60.0
# Longest wait for the last copy to the mirror: at the end of a run, and at the end of a session that was stopped.
_MIRROR_TIMEOUT = 600.0
_STOP_TIMEOUT = 60.0


class Trainer:
    """One session of a run on one of its ranks: the training loop, and the state that a checkpoint stores.

    All ranks make the same collective calls in the same order. The first rank reads and writes files.
    """

    def __init__(self, run: Run, mixture: Mixture, world: World, callbacks: Callbacks, device: torch.device) -> None:
        self.device = device
        self.world = world
        self.callbacks = callbacks
        run, self.notes = _resolve_for_all(run, self.device, world)
        self.run = run
        self.config = run.config
        self.mixture = mixture
        self.compute = replace(choose_compute(self.config, self.device), kernels=run.kernels)
        self._check_exactness()
        self.model = Electra(self.config).to(self.device)
        self.model.limit_vocabulary(mixture.vocab_size)
        if self.config.generator.kind == "unigram":
            self._count_tokens()
        shards = None
        wrap = None
        if self.config.train.sharding == "full" and world.size > 1:
            from electra_fast.distributed.sharding import shard_model  # takes seconds

            wrap = shard_model(self.model, world.mesh(self.device.type)).run
            shards = Shards(self.model)
        named = self.model.named_parameters() if shards is None else shards.parameters.items()
        self.optimizer = Optimizer(named, self.config.optimizer, shards=shards, matrix_dtype=self.compute.dtype)
        self.loader = BatchLoader.from_config(
            self.config, rank=world.rank, world_size=world.size, lanes=self.config.data.lanes
        )
        execution = self.config.train.execution
        with use_compute(self.compute):
            self.train_step = create_step(
                self.model, self.optimizer, self.config, self.compute, execution, world=world, shards=shards, wrap=wrap
            )
        self.tensors = RunTensors(self.model, self.optimizer, self.train_step.state_dict(), world, shards)
        self.timer = StepTimer(self.train_step)
        is_alone = world.size == 1  # the expected time of a step does not include communication
        self.slow_steps = SlowSteps(expected_seconds(self.config, self.device, run.folder) if is_alone else None)
        self.state = TrainState()
        self.num_captures = self.num_compilations = 0
        self.warnings = LastingWarning(20 * self.config.train.log_every)
        self.has_valid_loss = True
        self.training_loss: float | None = None
        self.validation_loss: float | None = None
        self.saved_step = -1
        self.stream_change = ""
        self.waited_before = 0.0
        if run.checkpoint is not None and run.state is not None:
            self._restore(run.checkpoint, run.state)
        self.stage = self.train_step.stage
        self.peak = device_peak(self.device, self.config.train.precision)
        train = self.config.train
        has_mirror = train.mirror and world.is_first
        self.mirror = Mirror(run.folder, train.mirror, train.keep_checkpoints) if has_mirror else None
        self.writer = CheckpointWriter(run.folder, train.keep_checkpoints, self.mirror)
        self.blocked_seconds = 0.0
        self.rank_seconds = [0.0] * world.size
        self.first_timed = self.state.step
        self.every = {"log": train.log_every, "checkpoint": train.checkpoint_every}
        if train.eval_every and mixture.holdout is not None:
            self.every["evaluation"] = train.eval_every
        self.shown_every = max(1, train.log_every // 10)

    def _check_exactness(self) -> None:
        """Raises ValueError if `train.reduce = "exact"` is combined with a nondeterministic attention backend."""
        backend = BACKENDS[self.compute.attention]
        # With dropout on attention weights, only the dropout masks of `short` do not depend on the division of rows.
        shape = self.config.model
        is_exact = is_repeatable(self.compute.attention, shape) and (backend.is_ours or not shape.attention_dropout)
        if self.config.train.reduce == "exact" and self.device.type == "cuda" and not is_exact:
            raise InputError(
                'train.reduce = "exact": on a GPU it needs model.attention = "short", or "sdpa" or "flex" with '
                "model.attention_dropout = 0"
            )

    def _count_tokens(self) -> None:
        """Sets the proposal's token counts to those in the mixture. Counting takes seconds for billions of tokens."""
        assert self.model.proposal is not None
        start = time.perf_counter()
        data = self.config.data
        cache = data.cache_dir or default_cache_dir(), data.cache_bytes  # training reads the corpus again
        counts = self.world.from_first(lambda: self.mixture.token_counts(cache))
        self.model.proposal.set_counts(torch.from_numpy(counts))
        seconds = time.perf_counter() - start
        self.notes.append(
            f"generator.kind = unigram: counted {self.mixture.num_tokens / 1e6:.2f} M tokens in {seconds:.1f} s"
        )

    def train(self, stop: StopRequest, start: float) -> int:
        """Trains to the last step or until a stop is requested. Returns the last step, which has a checkpoint.

        Synchronizes with the device only to log, evaluate or save. All ranks agree on `stop` and stop after the same
        step. `start` is the `time.monotonic` of the session's start.
        """
        state = self.state
        num_steps = self.config.train.steps
        first_step = self.state.step
        minutes = self.config.train.max_minutes
        step = self.train_step
        limit = TimeLimit(minutes, start, 12 * self._num_parameters()) if minutes else None
        agreed = stop if self.world.size == 1 else StopRequest()
        is_time_up = False
        with (
            use_compute(self.compute),
            contextlib.closing(self.train_step),
            self.mirror or contextlib.nullcontext(),
            self.writer,
            RunLog(self.run.folder, self.config, state.step, self.callbacks, is_silent=not self.world.is_first) as log,
            self._with_memory_remedy(),
        ):
            self._begin(log)
            if self.mirror is not None and self.run.checkpoint is not None:
                self.mirror.add(state.step, state.best_step)
            next_due = self._next_due()
            while state.step < num_steps and not agreed.signal and not is_time_up:
                is_time_up = self.callbacks.stop is not None
                if limit is not None:
                    is_time_up |= limit.is_up(self.writer.last_write_seconds)
                flags = step(next(self.loader), state.step, (stop.signal, is_time_up))
                if agreed is not stop:
                    agreed.signal = int(flags[0])
                    is_time_up = bool(flags[1])
                num_changes = len(step.compilations) + len(step.graphs.captures)
                if step.backward.stage is not self.stage or num_changes > self.num_compilations + self.num_captures:
                    self._report_changes(log)
                state.step += 1
                state.log_window.steps += 1
                if not state.step % self.shown_every:
                    log.advance(state.step)
                if state.step == next_due:
                    due = self._due()
                    next_due = self._next_due()
                    self._stop_timer()
                    self._report_mirror(log)
                    if "log" in due:
                        self._log(log)
                    if "evaluation" in due:
                        self._evaluate(log)
                    if "checkpoint" in due:
                        self._save()
                        log.draw_curves(min_seconds=_CURVES_SECONDS)
                    self._start_timer()
                    if limit is not None:
                        limit.pause()
            if self.saved_step != state.step:
                self._stop_timer()
                self._save()
            self._await_writer()
            log.draw_curves()
            if state.step == num_steps:
                self._finish(log, first_step)
            elif is_time_up and not agreed and self.callbacks.stop is None:
                log.say(reporting.out_of_time(self.run.folder, self.config.train.max_minutes, state.step, num_steps))
            if self.config.train.mirror:
                self._await_mirror(log, lambda: bool(stop) or state.step < num_steps)
        stop.signal = agreed.signal
        return state.step

    @contextlib.contextmanager
    def _with_memory_remedy(self) -> Iterator[None]:
        """Raises OutOfMemory, with the next value of `train.accumulate` to try, if the block runs out of memory."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            _, *smaller = smaller_micro_batches(self.config.train, self.world.size)
            remedy = "choose a smaller model, or lower data.sequence_length"
            if smaller:
                remedy = f"run again with --train.accumulate {smaller[0]}"
            raise OutOfMemory.at(f"{self.run.folder}: step {self.state.step}", error, remedy) from error

    def _begin(self, log: RunLog) -> None:
        if self.world.is_first:
            facts = reporting.environment(self.device, self.compute, self.config, self.world.size)
            reporting.record_environment(self.run.folder, facts)
        if self.world.size > 1:
            self._check_ranks(0.0)
        num_rows = len(self.train_step.backward.division.rows)
        is_new = self.state.step == 0
        unknown = self.world.from_first(
            lambda: list(corpus_warnings(self.mixture, imported=self.state.imported)) if is_new else []
        )
        for line in (
            *reporting.startup(self.run, self.mixture, self.state, self._num_parameters()),
            *(f"warning: {line}" for line in unknown),
            *reporting.settings(self.config, self.device, self.world.size, num_rows, self.notes, self.stream_change),
        ):
            log.say(line)
            if line.startswith("warning: "):
                log.record_warning(self.state.step, line.removeprefix("warning: "))
        self._start_timer()

    def _num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def _due(self) -> set[str]:
        """Returns the events that are due after this step. All are due at a stage's end: a log window has one stage."""
        step = self.state.step
        is_last = self.state.step == self.stage.first_step + self.stage.num_steps
        return {event for event, every in self.every.items() if step % every == 0 or is_last}

    def _next_due(self) -> int:
        """Returns the next step after which an event is due."""
        step = self.state.step
        stage = self.train_step.objective.stage(step)
        regular = [step - step % every + every for every in self.every.values()]
        return min(stage.first_step + stage.num_steps, *regular)

    def _finish(self, log: RunLog, first_step: int) -> None:
        memory = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        num_written = self.writer.num_written
        blocked = self.writer.blocked_seconds
        log.say(reporting.closing(self.run.folder, self.config.train.steps, memory, num_written, blocked))
        for line in self._verdict(log) if self.state.step > first_step else ():
            log.say(line)

    def _stop_timer(self) -> None:
        """Waits for the device and adds the elapsed time. Raises TrainingFailed if training must not continue."""
        self.state.log_window.totals = self.train_step.read_totals()
        self._check_finite()
        self._check_loss()
        seconds = self.timer.stop()
        self.state.seconds += seconds
        self.state.log_window.seconds += seconds
        if self.world.size > 1:
            waited = self.world.wait_seconds - self.waited_before
            self._check_ranks(max(seconds - waited, self.train_step.take_device_seconds()))
        self.world.from_first(self.writer.check)
        self._report_checkpoints()

    def _start_timer(self) -> None:
        self.timer.start()
        self.waited_before = self.world.wait_seconds

    def _check_finite(self) -> None:
        window = self.state.log_window
        bad = [name for name, value in window.totals.items() if not math.isfinite(value)]
        if bad:
            self._end_diverged(f"{' and '.join(bad)} became nan or infinite in {self._window_steps()}")
        if self.train_step.scaler is not None and self.train_step.scaler.has_failed():
            self._end_diverged(
                f"the gradients overflow fp16 even with a loss scale of 1 in {self._window_steps()} "
                "(--precision fp32 avoids this)"
            )

    def _check_loss(self) -> None:
        window = self.state.log_window
        objective = self.stage.objective
        if not self._num_taken():
            return
        metrics = objective.metrics(window.totals)
        self.has_valid_loss = not has_exploded(objective, metrics)
        if not self.has_valid_loss and self._should_stop(self.state.step - window.steps):
            self._end_diverged(f"the loss rose to {metrics['loss']:.4g} in {self._window_steps()}")
        self.training_loss = objective.comparable_loss(metrics) if self.has_valid_loss else None

    def _should_stop(self, since: int) -> bool:
        """Returns whether divergence since a step ends the run. It may pass early on, before any good checkpoint."""
        is_late = since >= self.stage.first_step + MIN_STEPS
        return self.config.train.stop_on_divergence and (is_late or self.state.best_step is not None)

    def _window_steps(self) -> str:
        return f"steps {self.state.step - self.state.log_window.steps + 1}-{self.state.step}"

    def _end_diverged(self, problem: str) -> NoReturn:
        run = self.run.folder
        self._fail(lambda: Diverged(f"{run}: {problem}; {recovery_advice(run, self.state, self.config)}"))

    def _check_ranks(self, own_seconds: float) -> None:
        """Compares the ranks' parameters, and adds up the seconds that each rank worked."""
        is_sharded = self.config.train.sharding == "full"  # no two ranks have the same parameters
        reports = self.world.all_gather_object((0 if is_sharded else fingerprint(self.model), own_seconds))
        self.rank_seconds = [total + seconds for total, (_, seconds) in zip(self.rank_seconds, reports, strict=True)]
        if diverged := diverged_ranks([checksum for checksum, _ in reports]):
            where = f"{self.run.folder}: step {self.state.step}: {diverged}"
            remedy = "start again to resume from there; if it happens again, exclude the machine of that rank"
            self._fail(lambda: TrainingFailed(f"{where}; {self._last_checkpoint_message()}; {remedy}"))

    def _last_checkpoint_message(self) -> str:
        steps = checkpoint_folder.steps(self.run.folder)
        return f"step-{steps[-1]} is the last good checkpoint" if steps else "there is no checkpoint yet"

    def _fail(self, error: Callable[[], TrainingFailed]) -> NoReturn:
        """Ends all ranks, which have all detected the error. The first rank reports it after the write in progress."""
        with contextlib.suppress(OSError):  # `error` is more important than a failed checkpoint
            self._await_writer()
        raise error() if self.world.is_first else ReportedElsewhere

    def _log(self, log: RunLog) -> None:
        times = self.timer.take_step_times()
        num_taken = self._num_taken()
        record = self._record(times)
        log.write_metrics(record)
        if message := self.warnings.take(record, self.state.log_window.steps, self._first_judged_step()):
            log.warn(self.state.step, message)
        if message := self.slow_steps.warning(times):
            log.warn(self.state.step, message)
        lost = lost_learning(self.state.history, self.stage.objective, record, num_taken) if num_taken else None
        if lost and self.config.train.stop_on_divergence:
            self._end_diverged(f"everything learned is lost at step {self.state.step}: {lost}")
        self.state.log_window = LogWindow()
        self.train_step.set_totals({})

    def _first_judged_step(self) -> int:
        """Returns the first step of a stage at which metrics may cause a warning."""
        return self.stage.first_step + max(MIN_STEPS, self.config.optimizer.warmup_steps)

    def _num_taken(self) -> int:
        """Returns the steps of the log window that were not skipped."""
        return self.state.log_window.steps - int(self.state.log_window.totals[SKIPPED])

    def _record(self, times: StepTimes | None) -> dict[str, Any]:
        """Returns a line of metrics.jsonl: metrics over the log window, and the run's progress."""
        state = self.state
        window = self.state.log_window
        tokens = int(window.totals["tokens"])
        num_taken = self._num_taken()
        state.tokens += tokens
        speed = tokens / window.seconds if window.seconds > 0 else 0.0
        blocked = self.writer.blocked_seconds - self.blocked_seconds
        self.blocked_seconds = self.writer.blocked_seconds
        record: dict[str, Any] = {
            "step": state.step,
            **self.stage.objective.metrics(window.totals),
            "learning_rate": self.train_step.lr_scale(state.step - 1) * self.config.optimizer.learning_rate,
            "grad_norm": window.totals[GRAD_NORM] / num_taken if num_taken else None,
            "tokens_per_second": speed,
            "mfu": self._mfu(speed),
            "seconds": state.seconds,
            "tokens": state.tokens,
            "step_seconds": times.median if times else None,
            "step_seconds_longest": times.longest if times else None,
            "checkpoint_seconds": blocked,
        }
        if not self.mixture.is_single:
            passes = (round(epochs, 6) for epochs in self.loader.passes())
            record["epochs"] = dict(zip(self.mixture.names(), passes, strict=True))
        if self.train_step.scaler is not None:
            record["skipped_steps"] = window.steps - num_taken
            record["loss_scale"] = float(self.train_step.scaler.scale)
        if self.world.size > 1:
            rank, seconds = slowest(self.rank_seconds)
            record |= {"slowest_rank": rank, "slowest_rank_seconds": seconds / (state.step - self.first_timed)}
            self.rank_seconds = [0.0] * self.world.size
            self.first_timed = state.step
        return record

    def _mfu(self, tokens_per_second: float) -> float | None:
        if self.peak is None:
            return None
        flops = tokens_per_second * flops_per_token(self.config, [self.stage]).total
        return flops / self.peak / self.world.size

    def measure(self, corpora: Corpora, num_batches: int) -> dict[str, Number]:
        """Returns the metrics of an evaluation."""
        objective = self.stage.objective
        wrapped = self.train_step.backward.forward
        settings = (self.model, corpora, self.config, self.compute, num_batches)
        with self.train_step.waits_for_ranks():
            metrics = evaluate_model(*settings, objective, self.world, wrapped(objective))
            if "discriminator" in objective.networks():
                metrics["unigram_auc"] = unigram_auc(*settings, self.world, wrapped)
        return metrics

    def _evaluate(self, log: RunLog) -> None:
        assert self.mixture.holdout is not None
        objective = self.stage.objective
        metrics = self.measure(self.mixture.holdout, self.config.train.eval_batches)
        log.write_evaluation({"step": self.state.step, **metrics})
        log.say(f"step {self.state.step}: validation: {reporting.validation(metrics)}")
        is_valid = not has_exploded(objective, metrics)
        if not is_valid and self._should_stop(self.state.step):
            self._end_diverged(f"the validation loss rose to {metrics['loss']:.4g} at step {self.state.step}")
        self.validation_loss = objective.comparable_loss(metrics) if is_valid else None
        if self.state.imported:  # a trained discriminator need not improve
            return
        can_correct = objective.could_have("corrective_head")
        if message := stall_warning(log.evaluations, self._first_judged_step(), can_correct=can_correct):
            log.warn(self.state.step, message)

    def _report_changes(self, log: RunLog) -> None:
        """Reports a new stage, and slow compilations and captures."""
        if self.train_step.stage != self.stage:
            self.stage = self.train_step.stage
            self._forget_losses(None)
            log.say(reporting.stage_begins(self.state.step, self.stage))
        for compilation in self.train_step.compilations[self.num_compilations :]:
            log.say(reporting.compiled(compilation))
            self.num_compilations += 1
        for capture in self.train_step.graphs.captures[self.num_captures :]:
            log.say(reporting.captured(capture))
            self.num_captures += 1

    def _save(self) -> None:
        state = self.state
        state.corpus = self.mixture.content_hash
        state.token_type_1_trained |= state.step > 0 and self.config.data.packing == "examples"
        self._compare_losses()
        self._await_writer()
        with self.train_step.waits_for_ranks():
            tensors = self.tensors.collect()
            state.loader = merge_states(self.world.all_gather_object(self.loader.state()))
        if self.world.is_first:
            self.writer.save(self.config, *tensors, state)
        self.saved_step = state.step

    def _compare_losses(self) -> None:
        """Records whether the next checkpoint is the best of this stage so far."""
        state = self.state
        split = "validation" if "evaluation" in self.every else "training"
        # An evaluation counts for the first checkpoint after it.
        loss = self.validation_loss if split == "validation" else self.training_loss
        if loss is not None and (state.best_loss is None or state.best_by != split or loss <= state.best_loss):
            state.best_step = state.step
            state.best_loss = loss
            state.best_by = split
        elif state.best_loss is None and self.has_valid_loss:
            state.best_step = state.step
        self.validation_loss = None

    def _forget_losses(self, best_step: int | None) -> None:
        """Restarts the comparison of losses. Keeps the checkpoint of `best_step` until another is better."""
        self.state.best_step = best_step
        self.state.best_loss = None
        self.state.history = LossHistory()

    def _await_writer(self) -> None:
        """Waits for the write in progress, in waits shorter than the watchdog's timeout."""
        turn = self.config.train.timeout_seconds / 4
        while not self.world.from_first(lambda: self.writer.wait_up_to(turn)):
            pass
        self._report_checkpoints()

    def _await_mirror(self, log: RunLog, is_stopping: Callable[[], bool]) -> None:
        """Copies missing checkpoints to the mirror, and waits up to the timeout, in short waits as `_await_writer`."""
        start = time.monotonic()

        def is_over() -> bool:
            assert self.mirror is not None  # on the first rank
            limit = _STOP_TIMEOUT if is_stopping() else _MIRROR_TIMEOUT
            return self.mirror.wait_up_to(1.0) or time.monotonic() - start > limit

        if self.mirror is not None:
            self.mirror.add(self.state.step, self.state.best_step)
        while not self.world.from_first(is_over):
            pass
        if self.mirror is not None:
            self.mirror.close()
        self._report_mirror(log)

    def _report_mirror(self, log: RunLog) -> None:
        for problem in self.mirror.take_problems() if self.mirror is not None else ():
            log.warn(self.state.step, problem)

    def _report_checkpoints(self) -> None:
        """Calls on_checkpoint, on the first rank, for each checkpoint completed since the last call."""
        for step in self.writer.take_written():
            path = checkpoint_folder.path_of(self.run.folder, step)
            self.callbacks("on_checkpoint", {"step": step, "path": str(path)})

    def _restore(self, directory: Path, state: TrainState) -> None:
        self.state = state
        self.saved_step = state.step
        is_started = state.loader is not None  # an imported model's training starts here
        if is_started:
            self.train_step.resume(state.step)
        self.tensors.restore(directory, has_optimizer=is_started)
        if not is_started or any(name.startswith(_OTHER_LOSSES) for name in self.run.changes):
            self._forget_losses(state.step)
        if state.loader is not None:
            self.train_step.set_totals(state.log_window.totals)
            self._restore_loader(state.loader)

    def _restore_loader(self, state: dict[str, Any]) -> None:
        """Restores the stream of rows. If a change alters the stream, it restarts at the next epoch."""
        fresh = self.loader.state()
        state = with_present_names(state)
        if self.run.changes and stream_of(fresh) != stream_of(state):
            state, self.stream_change = resumed_state(fresh, state)
        self.loader.restore(state)

    def _verdict(self, log: RunLog) -> list[str]:
        """Returns lines about the model's ability after the run, measured by all ranks."""
        mixture = self.mixture
        train = self.config.train
        entropy = None
        corpora = mixture.holdout or mixture.folders
        num_batches = train.eval_batches
        evaluation: dict[str, Any] = {}
        if "evaluation" not in self.every:
            num_batches = _VERDICT_BATCHES
            evaluation = self.measure(corpora, num_batches)
        elif evaluations := log.evaluations:
            evaluation = evaluations[-1]
        if "discriminator" not in self.stage.objective.networks():
            entropy = unigram_entropy(corpora, self.config, num_batches, self.world)
        counts = (self.state.tokens, mixture.num_tokens)
        imported = self.state.imported
        return verdict(self.config, evaluation, entropy, *counts, imported=imported) if evaluation else []


def _resolve_for_all(run: Run, device: torch.device, world: World) -> tuple[Run, list[str]]:
    """Returns the run with the first rank's hardware choices recorded, and kernels that are right on all ranks."""
    index = torch.cuda.current_device() if device.type == "cuda" else None

    def resolve() -> tuple[Run, list[str]]:
        if index is not None:
            torch.cuda.set_device(index)  # new threads start with device 0
        config, kernels, lines = resolve_hardware(
            run.config, device, run.folder, run.recorded_keys, world.size, time_steps
        )
        return replace(run.with_hardware(config), kernels=tuple(kernels.items())), lines

    # A check of kernels takes minutes.
    run, lines = world.from_first(resolve) if index is None else world.from_first_patiently(resolve)
    if world.size > 1 and device.type == "cuda" and run.config.train.kernels.startswith(AUTO):
        kernels = agree_on_kernels(run.config, device, dict(run.kernels), run.folder, world)
        run = replace(run, kernels=tuple(kernels.items()))
    return run, lines
