"""One seed of a task: trains, resumes after a kill, and writes model, predictions and scores.

A finished seed is scored again if test data have changed, or validation data that did not select its model.

While a seed trains, its folder has checkpoints/ and metrics.jsonl, like a pre-training run. result.json is written last
and marks the seed as finished.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from electra_fast.checkpoint import read_tensors, write_tensors
from electra_fast.errors import Diverged, Interrupted, OutOfMemory, is_out_of_memory
from electra_fast.files import checkpoint_folder
from electra_fast.files.atomic_files import remove, replace_folder
from electra_fast.files.json_files import JsonLines, read_object, read_records, record_of, write_object
from electra_fast.finetuning import batches
from electra_fast.finetuning.model import TaskModel
from electra_fast.finetuning.model_folder import SETTINGS_KEY, Finetuned, read_finetuned, write_finetuned
from electra_fast.finetuning.task import Split, overlap_warning
from electra_fast.finetuning.training.job import Job, named_scores
from electra_fast.finetuning.training.results import CHOSEN, result_of, scores_of, write_card, write_result
from electra_fast.finetuning.training.step import FinetuneStep
from electra_fast.huggingface.tokenizer import INPUT_NAMES, copy_tokenizer, special_ids
from electra_fast.interruption import StopRequest
from electra_fast.optimizers.optimizer import lr_scale
from electra_fast.progress import FinetuningProgress
from electra_fast.training.loggers import Callbacks, Loggers, logger_names

# Number of training lines in metrics.jsonl.
_NUM_LOGS = 100


@dataclass
class SeedState:
    """Progress of a seed, without its tensors."""

    step: int = 0
    seconds: float = 0.0
    window_steps: int = 0
    window_loss: float = 0.0
    window_norm: float = 0.0
    evaluated_step: int = 0
    """Step of the last evaluation."""
    best_step: int = 0
    """Step of the best evaluation (among equal scores, of the lowest loss); 0 before the first evaluation."""
    best_score: float = 0.0
    best_loss: float = 0.0
    """Loss of the best evaluation on the first validation split."""
    num_worse: int = 0
    """Number of evaluations since the best score."""
    varied_step: int = 0
    """Step of the last evaluation whose predictions varied; 0 for none."""


def predict_splits(
    job: Job,
    model: TaskModel,
    folder: Path,
    splits: Sequence[Split],
    scored: dict[str, dict[str, Any]],
    check_stop: Callable[[], None],
    known: Mapping[str, Any] | None = None,
) -> str | None:
    """Writes predictions, and adds each split's identity and scores to `scored`.

    `known` has the model's outputs for some splits. Returns a warning if the model's predictions for the first
    validation split show that it has learned nothing, or if that split repeats the training split.
    """
    dev = job.data.dev[0]
    warning = None
    for split in splits:
        features = job.splits[split.name]
        scores = dict[str, float]()
        if (outputs := (known or {}).get(split.name)) is None:
            outputs = job.predict(model, split, check_stop)
        if split.targets is not None:
            earlier = scored.get(dev.name, {}).get("scores", {})
            scores = job.task_type.scores(job.task, split, features, outputs, earlier)
        scored[split.name] = {"content": job.predicted[split.name], "scores": scores}
        settings = job.task_type.settings(job.config, job.task, scored[dev.name]["scores"])
        answers = list(job.task_type.answers(job.task, split, features, outputs, settings))
        job.task_type.write_predictions(folder / f"predictions.{split.name}", job.task, split, outputs, answers)
        if split.name == dev.name:
            warning = job.task_type.warning(job.task, outputs) or overlap_warning(job.data.train, dev)
    return warning


class SeedRun:
    """Training with one seed, which determines the head's initialization, the order of the examples, and dropout.

    Resets the model and the optimizer of `step`.
    """

    def __init__(self, job: Job, step: FinetuneStep, seed: int) -> None:
        self.job = job
        self.seed = seed
        self.step = step
        self.model = step.model
        self.folder = job.folder / f"seed-{seed}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.order = batches.training_order(job.config, len(job.examples), seed)
        self.model.load_encoder(job.encoder.state)
        self.model.initialize_head(seed)
        step.reset()
        self.state = SeedState()
        self._totals = torch.zeros(2, dtype=torch.float64, device=job.device)
        self._best: Mapping[str, Tensor] = {}  # parameters of the best step, on the CPU; empty if the last step is kept
        self._outputs: dict[str, Any] = {}  # validation outputs of the kept step; empty after a resume
        self.warnings: list[str] = []
        """Warnings about damaged checkpoints of an earlier session."""
        checkpoint_folder.remove_unfinished(self.folder)
        if checkpoint_folder.steps(self.folder):
            self._restore()

    @property
    def is_trained(self) -> bool:
        """True if the last step is evaluated, or if patience is exhausted."""
        state = self.state
        patience = self.job.config.patience
        return state.evaluated_step == self.job.num_steps or 0 < patience <= state.num_worse

    @property
    def _is_evaluation_due(self) -> bool:
        return self.state.step in self.job.evaluation_steps and self.state.evaluated_step < self.state.step

    def train(self, stop: StopRequest, progress: FinetuningProgress, callbacks: Callbacks) -> bool:
        """Trains until the last step or a stop; returns whether training is finished.

        If a callback raised StopTraining, raises it again after a checkpoint.
        """
        num_steps = self.job.num_steps
        state = self.state
        first_step = self.state.step
        about = {"task": self.job.task.name, "seed": self.seed}
        log_every = max(1, num_steps // _NUM_LOGS)
        self.model.train()
        began = time.monotonic() - state.seconds
        saved = state.seconds
        # The lines of a step are written after its evaluation.
        path = self.folder / "metrics.jsonl"
        with JsonLines(path, state.step - self._is_evaluation_due) as log, self._loggers(path) as loggers:
            while not self.is_trained and not stop and callbacks.stop is None:
                if not self._is_evaluation_due:  # due if a stop interrupted the evaluation
                    progress.advance(self._take_step())
                evaluation = record = None
                if self._is_evaluation_due:
                    try:
                        evaluation = {"step": state.step} | self._evaluate(stop)
                    except Interrupted:
                        break
                state.seconds = time.monotonic() - began
                if state.step % log_every == 0 or self.is_trained:
                    record = self._record()
                    log.write(record)
                if evaluation:
                    log.write(evaluation)
                    progress.advance(self.job.evaluation_tokens)
                if record:
                    best = f"  best {self.job.selection_metric} {state.best_score:.4f} at {state.best_step}"
                    progress.report(record, num_steps, best if state.best_step else "")
                    loggers.log("train", record)
                    callbacks("on_log", about | record)
                if evaluation:
                    loggers.log("validation", evaluation)
                    callbacks("on_evaluation", about | evaluation)
                if state.seconds - saved >= self.job.config.checkpoint_seconds and not self.is_trained:
                    callbacks("on_checkpoint", about | self._save())
                    saved = time.monotonic() - began
        if state.step > first_step or not state.step:
            # also after the last step, since predictions may take long
            callbacks("on_checkpoint", about | self._save())
        if callbacks.stop is not None:
            raise callbacks.stop
        return self.is_trained

    def _loggers(self, path: Path) -> Loggers:
        earlier: dict[str, list[dict[str, Any]]] = {"train": [], "validation": []}
        for record in read_records(path):
            earlier["train" if "loss" in record else "validation"].append(record)
        names = logger_names(self.job.config.loggers)
        settings = {"finetune": dataclasses.asdict(self.job.config)}
        return Loggers(names, self.folder, settings, earlier)

    def _evaluate(self, stop: StopRequest) -> dict[str, float]:
        """Returns the scores on the validation splits by name; keeps a copy of the best step's weights.

        Raises Interrupted if a stop is requested during the evaluation, and Diverged.
        """
        self._collect_totals()
        job = self.job
        state = self.state
        outputs = dict[str, Any]()
        scores = dict[str, float]()
        first = dict[str, float]()
        dev = job.data.dev[0]
        for split in job.data.dev:
            outputs[split.name] = split_outputs = job.predict(self.model, split, partial(self._check_stop, stop))
            split_scores = job.task_type.scores(job.task, split, job.splits[split.name], split_outputs, first)
            first = first or split_scores
            scores = scores | named_scores(split.name, split_scores)
        state.evaluated_step = state.step
        score = scores[job.selection_metric]
        by_class = job.training_set.class_weights
        loss = job.task_type.validation_loss(job.task, dev, outputs[dev.name], by_class)
        is_better = not state.best_step or (score, -loss) > (state.best_score, -state.best_loss)
        state.num_worse = 0 if not state.best_step or score > state.best_score else state.num_worse + 1
        if job.task_type.warning(job.task, outputs[dev.name]) is None:
            state.varied_step = state.step
        if is_better:
            state.best_step = state.step
            state.best_score = score
            state.best_loss = loss
        if is_better or job.config.select == "last":
            self._outputs = outputs
        if is_better and job.config.select == "best":
            self._best = {name: p.detach().to("cpu", copy=True) for name, p in self.model.named_parameters()}
        return scores_of(scores)

    def _check_stop(self, stop: StopRequest) -> None:
        if stop:
            raise self.interruption(stop)

    def _take_step(self) -> int:
        job = self.job
        state = self.state
        chosen = self.order[state.step]
        chosen = chosen[chosen >= 0]
        parts = job.pack(chosen)
        batch = job.training_set.batch(parts, chosen, job.config.loss_reduction, self.seed)
        try:
            loss, norm = self.step(batch, state.step, lr_scale(job.config, state.step, job.num_steps))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            smaller = "a lower finetune.sequence_length"
            batch_size = job.config.batch_size
            if batch_size > 1:
                smaller = f"--finetune.batch_size {batch_size // 2}"
            remedy = f"run again with {smaller}, and with another --out if this folder has results"
            raise OutOfMemory.at(f"{self.folder}: step {state.step}", error, remedy) from error
        self._totals += torch.stack((loss, norm))
        state.step += 1
        state.window_steps += 1
        return sum(part.num_tokens for part in parts)

    def _collect_totals(self) -> None:
        """Reads the sums of losses and norms from the device; raises Diverged if they are not finite."""
        state = self.state
        loss, norm = self._totals.tolist()
        self._totals.zero_()
        state.window_loss = state.window_loss + loss
        state.window_norm = state.window_norm + norm
        if not math.isfinite(loss + norm) or (self.step.scaler is not None and self.step.scaler.has_failed()):
            raise Diverged(
                f"{self.folder}: the loss or its gradient became NaN or infinite in steps "
                f"{state.step - state.window_steps + 1}-{state.step}; train again with another --out and a lower "
                "finetune.learning_rate"
            )

    def _record(self) -> dict[str, Any]:
        self._collect_totals()
        state = self.state
        config = self.job.config
        record = {
            "step": state.step,
            "loss": state.window_loss / state.window_steps,
            "grad_norm": state.window_norm / state.window_steps,
            "learning_rate": lr_scale(config, state.step - 1, self.job.num_steps) * config.learning_rate,
            "seconds": state.seconds,
        }
        state.window_steps = 0
        state.window_loss = 0.0
        state.window_norm = 0.0
        return record

    def _save(self) -> dict[str, Any]:
        self._collect_totals()

        def write(folder: Path) -> None:
            write_tensors(dict(self.model.named_parameters()), folder / "model.safetensors")
            write_tensors(self.step.state_dict(), folder / "optimizer.safetensors")
            if self._best and self.state.best_step < self.state.step:
                write_tensors(self._best, folder / "best.safetensors")
            checkpoint_folder.seal(folder, self.state)

        path = checkpoint_folder.path_of(self.folder, self.state.step)
        self._replace(path, write)
        # Keep two checkpoints until the seed is finished, in case one is damaged.
        for step in checkpoint_folder.steps(self.folder)[:-2]:
            remove(checkpoint_folder.path_of(self.folder, step))
        return {"step": self.state.step, "path": str(path)}

    def _restore(self) -> None:
        remedy = f"remove {self.folder} to train this seed again"
        directory, self.warnings = checkpoint_folder.recover_run(self.folder, remedy)
        content = checkpoint_folder.read_sealed(directory / checkpoint_folder.STATE, remedy)
        self.state = record_of(SeedState, content, str(directory / checkpoint_folder.STATE))
        stored = read_tensors(directory / "model.safetensors")
        self._load(stored)
        if self.job.config.select == "best" and self.state.best_step:
            is_current = self.state.best_step == self.state.step
            self._best = stored if is_current else read_tensors(directory / "best.safetensors")
        self.step.load_state_dict(read_tensors(directory / "optimizer.safetensors"))

    def _load(self, parameters: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(parameters[name])

    def finish(self, stop: StopRequest) -> dict[str, Any]:
        """Predicts and scores with the selected model, writes all files, and returns the content of result.json.

        Raises Interrupted if a stop is requested before the end.
        """
        started = time.monotonic()
        job = self.job
        state = self.state
        chosen: dict[str, Any] = {"best_step": state.best_step} if self._best else {}
        if self._best and job.selection_metric != job.task.metric:
            chosen["selected_by"] = job.selection_metric
        if state.step < job.num_steps:
            chosen["stopped_step"] = state.step
        if self._best and state.best_step < state.step:
            self._load(self._best)
        check_stop = partial(self._check_stop, stop)
        if job.config.calibrate:
            chosen["temperature"] = self._calibrate(check_stop)
            self._outputs = {}
        scored: dict[str, dict[str, Any]] = {}
        warning = predict_splits(job, self.model, self.folder, job.scored_splits, scored, check_stop, self._outputs)
        if warning and self._best and state.varied_step:
            warning += (
                f"; or set finetune.select = last: the predictions of step {state.varied_step} varied, but its "
                f"{job.selection_metric} was not better"
            )
        seconds = round(state.seconds + time.monotonic() - started, 3)
        result = result_of(self.seed, scored, warning, seconds, chosen)
        self._replace(self.folder / "model", lambda folder: self._write_model(folder, result))
        write_result(self.folder, result)
        remove(self.folder / "checkpoints")
        return result

    def _calibrate(self, check_stop: Callable[[], None]) -> float:
        """Divides the logits by the temperature that fits the first validation split; returns the temperature."""
        job = self.job
        (dev, *_) = self.job.data.dev
        if (outputs := self._outputs.get(dev.name)) is None:
            outputs = job.predict(self.model, dev, check_stop)
        temperature = job.task_type.temperature(dev, outputs)
        with torch.no_grad():
            for parameter in cast(torch.nn.Module, self.model.head.classifier).parameters():
                parameter.div_(temperature)
        return temperature

    def interruption(self, stop: StopRequest) -> Interrupted:
        return Interrupted(
            stop.signal, f"interrupted; {self.folder}: checkpoint at step {self.state.step}; run again to resume"
        )

    def _write_model(self, folder: Path, result: dict[str, Any]) -> None:
        job = self.job
        shape = self.job.work.shape
        state = {name: parameter.detach().cpu() for name, parameter in self.model.named_parameters()}
        settings = {"model_max_length": job.config.sequence_length, "split_special_tokens": True}
        copy_tokenizer(job.encoder.tokenizer, folder, INPUT_NAMES[shape.architecture], settings)
        in_units, unit_settings = job.task_type.to_units(job.task, state)
        finetuned = Finetuned(
            shape=shape,
            head=job.config.head,
            kind=job.task.kind,
            labels=job.task_type.output_names or job.task.labels,
            sequence_length=job.config.sequence_length,
            num_texts=len(job.data.train.texts[0]),
            text_columns=job.data.text_columns,
            label_columns=job.data.label_columns,
            state=in_units,
            settings=job.task_type.settings(job.config, job.task, result) | unit_settings,
        )
        name = write_finetuned(folder, finetuned, special_ids(folder), job.config.head_dropout)
        write_card(folder, job, name, result)

    def _replace(self, folder: Path, write: Callable[[Path], None]) -> None:
        try:
            replace_folder(folder, write)
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"{folder}: cannot be written: {error}; earlier results are kept; run again to resume"
            ) from error


def outdated_splits(job: Job, result: dict[str, Any]) -> list[Split]:
    """Returns the splits whose examples or labels have changed since a result was scored."""
    known = {name: split["content"] for name, split in result.get("splits", {}).items()}
    folder = job.folder / f"seed-{result['seed']}"
    outdated = [
        split
        for split in job.scored_splits
        if known.get(split.name) != job.predicted[split.name]
        or not (folder / f"predictions.{split.name}.jsonl").exists()  # older versions did not write it
    ]
    # The first validation split determines the thresholds (null odds or labels), and so all other scores.
    is_decisive = "thresholds" in result or job.task.has_unanswerable
    return list(job.scored_splits) if is_decisive and any(split is job.data.dev[0] for split in outdated) else outdated


def rescore(
    job: Job, folder: Path, result: dict[str, Any], outdated: Sequence[Split], stop: StopRequest
) -> dict[str, Any]:
    """Predicts and scores the `outdated` splits with a finished model; returns the new result.

    Until it is finished, the result on disk lacks these splits.
    """
    started = time.monotonic()
    known = dict(result.get("splits", {}))
    names = {split.name for split in outdated}
    scored = {name: known[name] for name in job.predicted if name in known and name not in names}
    write_result(folder, result | {"splits": scored}, unfinished=names)

    def check_stop() -> None:
        if stop:
            raise Interrupted(stop.signal, f"interrupted; {folder}: run again to finish scoring")

    warning = result.get("warning")
    if outdated:
        finetuned = read_finetuned(folder / "model")
        config = dataclasses.replace(job.config, head=cast(Any, finetuned.head), head_dropout=0.0)
        model = job.task_type.model(finetuned.shape, config, len(finetuned.labels)).to(job.device)
        model.load_state_dict(job.task_type.from_units(job.task, finetuned.state, finetuned.settings))
        changed = predict_splits(job, model, folder, outdated, scored, check_stop)
        warning = changed if job.data.dev[0].name in names else warning
    ordered = {name: scored[name] for name in job.predicted}
    seconds = round(result["seconds"] + time.monotonic() - started, 3)
    new = result_of(
        result["seed"], ordered, warning, seconds, {name: result[name] for name in CHOSEN if name in result}
    )
    replace_folder(folder / "model", lambda target: _copy_model(job, folder / "model", target, new))
    write_result(folder, new)
    return new


def _copy_model(job: Job, source: Path, target: Path, result: dict[str, Any]) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)
    table = read_object(target / "config.json")
    if SETTINGS_KEY in table:
        table[SETTINGS_KEY] |= job.task_type.settings(job.config, job.task, result)
        write_object(target / "config.json", table)
    write_card(target, job, table["architectures"][0], result)
