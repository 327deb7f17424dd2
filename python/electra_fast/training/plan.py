"""The plan of a run before it starts: size, epochs, memory, disk, time, learning rates, and warnings.

Time and memory are measured in the first steps, in a separate process (`measure`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from electra_fast.child_process import describe_end, lacked_memory, python_command
from electra_fast.config.config import AUTO, Config
from electra_fast.config.presets import DEFAULT_RECIPE
from electra_fast.data.inspect import rows_as_text
from electra_fast.data.mixture import Corpora, Mixture, absolute
from electra_fast.distributed.division import Division, smaller_micro_batches
from electra_fast.distributed.step_processes import choose_num_processes
from electra_fast.distributed.world import World
from electra_fast.errors import ElectraFastError, InputError, TrainingFailed
from electra_fast.files import checkpoint_folder
from electra_fast.hardware.flops import PUBLISHED_VOCABULARY, flops_per_token
from electra_fast.hardware.memory import StepMemory
from electra_fast.model.compute import DTYPES, ComputeConfig, choose_device, use_compute
from electra_fast.model.model import Electra
from electra_fast.objectives import objective_of
from electra_fast.optimizers.optimizer import Optimizer
from electra_fast.results import Result
from electra_fast.training.forecast import (
    LAW,
    MAX_EPOCHS,
    corpus_warnings,
    layer_weights,
    rows_of_evaluation,
    size,
    warnings,
)
from electra_fast.training.loggers import Callbacks
from electra_fast.training.parallel_step import CpuProcessesStep
from electra_fast.training.run import Run, config_of_run, resolved
from electra_fast.training.trainer import Trainer

# Minimum steps for a preset to learn something. Shorter runs may end on the initial plateau, which the scaling law does
# not model: mini leaves it between 391 and 586 steps (bench/LOG.md). The numbers of small and base are assumptions.
MIN_STEPS = {"tiny": 2_000, "mini": 1_000, "small": 5_000, "base": 5_000}
# Fraction of the free memory that a step may use, and of the given hours that the steps may fill.
_USABLE = 0.9
# Number of evaluations, and of checkpoints, in a proposed run.
_TENTH = 10
_SHOWN_ROWS = 2
_GIB = 1 << 30
# Larger steps are measured with fewer rows, at two sizes, and time and memory are extrapolated linearly. A step of this
# size takes about two seconds on two cores.
_MAX_FLOPS = 5e11
_WARMUP_STEPS = 2
_TIMED_STEPS = 2
_SECONDS = 4.0
# Batches of the timed evaluation.
_EVALUATED = 5


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Result):
    """The result of `plan`: counts, bytes, seconds and FLOPs. Unknown values are None."""

    parameters: int
    steps: int
    tokens_per_step: int
    tokens: int
    corpus_tokens: int | None
    epochs: float | None
    flops_per_token: float
    flops: float
    learning_rates: Mapping[str, float]
    warmup_steps: int
    parameters_by_part: Mapping[str, int]
    memory: Mapping[str, int | None]
    """Bytes by part, and their `total`. With `gpu_memory`, the bytes of one GPU."""
    micro_batch_rows: int
    checkpoint_bytes: int
    checkpoints_bytes: int
    """Size of all checkpoints that a run keeps at the same time."""
    device: str | None
    processes: int | None
    """Processes that share a step on a CPU."""
    precision: str
    tokens_per_second: float | None
    is_measured: bool
    is_extrapolated: bool
    """Steps with fewer rows were measured."""
    seconds: float | None
    warnings: Sequence[str]
    config: str
    """The resolved configuration as TOML."""
    gpus: int = 1
    proposal: Mapping[str, Any] | None = None
    """With `hours`: preset, recipe, keys, the command, and the measurements and assumptions behind it."""

    def lines(self) -> Iterator[str]:
        parts = ", ".join(f"{name} {count / 1e6:.2f} M" for name, count in self.parameters_by_part.items())
        yield f"parameters      {self.parameters / 1e6:.2f} M ({parts})"
        yield (
            f"tokens          {self.tokens / 1e6:,.2f} M: {self.steps:,} steps of {self.tokens_per_step:,}"
            + ("" if self.epochs is None else f"; {self.epochs:.3g} epochs of {self.corpus_tokens:,} tokens")
        )
        yield f"FLOPs           {self.flops:.3g}, {self.flops_per_token / 1e6:.3g} M per token"
        rates = ", ".join(f"{name} {rate:g}" for name, rate in self.learning_rates.items())
        yield f"learning rates  {rates}, after {self.warmup_steps:,} steps of warmup"
        memory = self.memory
        sizes = ", ".join(
            f"{name} {_bytes(num_bytes)}"
            for name, num_bytes in memory.items()
            if num_bytes is not None and name != "total"
        )
        if memory["total"] is None:
            total = f"not measured{' (only on Linux)' if self.is_measured else ''}; known parts:"
        else:
            total = f"{_bytes(memory['total'])}:"
        yield f"memory          {total} {sizes}"
        num_rows = self.micro_batch_rows
        num_gpus = self.gpus
        where = f", on each of {num_gpus} GPUs; memory is per GPU" if num_gpus > 1 else ""
        yield f"micro-batch     {num_rows} {'row' if num_rows == 1 else 'rows'}{where}"
        checkpoint, all_of_them = (_bytes(self[name]) for name in ("checkpoint_bytes", "checkpoints_bytes"))
        yield f"disk            {checkpoint} per checkpoint, at most {all_of_them}"
        if self.seconds is None:
            yield "time            unknown: pass a corpus to measure it, or --tokens-per-second"
        else:
            machine = "this cpu" if self.device == "cpu" else "one GPU"
            where = f"measured on {machine} in {self.precision}" if self.is_measured else "assumed"
            if self.is_extrapolated:
                where += ", with fewer rows per step"
            yield f"time            {duration(self.seconds)} at {self.tokens_per_second:,.0f} tokens/s, {where}"
        yield from (f"warning: {line}" for line in self.warnings)
        if proposal := self.proposal:
            steps = f"{self.steps:,} steps of {proposal['batch_size']} rows"
            yield f"proposal        {proposal['preset']}, recipe {proposal['recipe']}, {steps}:"
            yield f"  {proposal['command']}"
            yield f"  measured: {proposal['measured']}"
            yield f"  assumed: {proposal['assumed']}"


def plan(
    corpus: Corpora | None = None,
    *,
    config: Config | str | os.PathLike[str] | None = None,
    device: str = AUTO,
    tokens_per_second: float | None = None,
    hours: float | None = None,
    recipe: str | None = None,
    gpu_memory: float | None = None,
    gpus: int = 1,
) -> Plan:
    """Returns a run's size, memory, time and warnings. Keeps no trained model.

    With a corpus, and without `tokens_per_second` and `gpu_memory`, it measures time and memory in the run's first
    steps, which takes about half a minute in a separate process.

    Args:
        corpus: Corpus folder, or several, like `pretrain`; `data.corpus` by default, which may be empty.
        config: The run's configuration, or its TOML file; `Config()` by default.
        device: The device to measure on, with the values of `pretrain`.
        tokens_per_second: A speed to assume instead of measuring, such as the speed of a GPU in another machine.
        hours: Instead of `config`: proposes a preset, its steps and intervals for this time on this machine and corpus.
        recipe: With `hours`, the recipe of the proposal.
        gpu_memory: Plans for GPUs of other machines, each with this much free memory in GiB. `memory` is then the
            memory of one GPU, estimated in the same way as by `train.accumulate = "auto"`, and `micro_batch_rows` fits
            in it.
        gpus: The number of those GPUs, one rank each.

    Raises:
        ValueError, FileNotFoundError: The configuration or the corpus is wrong, or they do not match.
    """
    for name, value in (("tokens_per_second", tokens_per_second), ("hours", hours), ("gpu_memory", gpu_memory)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{name} = {value:g}: must be a number above 0")
    if gpus < 1 or (gpus > 1 and gpu_memory is None):
        raise InputError(f"gpus = {gpus}: must be at least 1, and needs gpu_memory (--gpu-memory)")
    if hours is not None:
        if config is not None or tokens_per_second is not None or gpu_memory is not None or not corpus:
            raise InputError("hours proposes a configuration for a corpus; pass only a corpus and a recipe with it")
        return _propose(corpus, hours, recipe or DEFAULT_RECIPE, device)
    if recipe is not None:
        raise InputError(f'recipe = "{recipe}": needs hours; set the recipe in the configuration instead')
    config = config_of_run(config, corpus)
    config = config.override({"data.corpus": absolute(corpus if corpus is not None else config.data.corpus)})
    mixture = Mixture(config.data.corpus) if config.data.corpus else None
    if mixture is None:
        config = config.resolved().override({"model.vocab_size": config.model.vocab_size or PUBLISHED_VOCABULARY})
    else:
        config = resolved(config, mixture)
    if device != AUTO and (mixture is None or tokens_per_second is not None or gpu_memory is not None):
        raise InputError(
            f"device = {device!r}: only used for a measurement; pass a corpus, without tokens_per_second and gpu_memory"
        )
    if gpu_memory is not None:
        return _on_gpus(config, mixture, tokens_per_second, gpu_memory, gpus)
    trial = measure(config, device) if mixture is not None and tokens_per_second is None else None
    return _report(config if trial is None else trial.config, mixture, trial, tokens_per_second)


def _on_gpus(config: Config, mixture: Mixture | None, speed: float | None, gpu_memory: float, num_gpus: int) -> Plan:
    """Returns the plan for GPUs of other machines, assuming that they run all kernels and flash attention."""
    if config.train.precision == AUTO:
        config = config.override({"train.precision": "bf16"})
    if config.train.precision == "fp32" or config.model.attention not in (AUTO, "varlen"):
        raise InputError(
            "gpu_memory is estimated for 16-bit activations and flash attention; remove train.precision = fp32 and "
            f"model.attention = {config.model.attention}"
        )
    Division.of(config.train, 0, num_gpus)  # raises if the step cannot be divided among these ranks
    compute = ComputeConfig("varlen", DTYPES[config.train.precision], kernels=(("*", "kernel"),))
    counted = StepMemory(config, compute, torch.device("cpu"), num_gpus)
    free = round(gpu_memory * _GIB)
    accumulate, num_rows, does_fit = counted.min_micro_batches(free)
    parts = counted.parts(num_rows)
    report = _report(config.override({"train.accumulate": str(accumulate)}), mixture, None, speed)
    warnings = [*report.warnings, *([] if does_fit else [counted.too_large(num_rows, free)])]
    memory = parts | {"total": sum(parts.values())}
    return replace(report, memory=memory, micro_batch_rows=num_rows, gpus=num_gpus, warnings=warnings)


def _report(config: Config, mixture: Mixture | None, trial: Trial | None, speed: float | None) -> Plan:
    """Returns the plan of a resolved configuration, with the speed of a trial or `speed`."""
    with torch.device("meta"):
        model = Electra(config)
    counts = size(config, mixture, sum(tensor.numel() for tensor in model.parameters()))
    optimizer = Optimizer(model.named_parameters(), config.optimizer)
    moments = sum(tensor.nbytes for tensor in (*optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values()))
    parameters = {name: 0 for name, _ in model.named_children()}
    for name, parameter in model.named_parameters():
        parameters[name.partition(".")[0]] = parameters.get(name.partition(".")[0], 0) + parameter.numel()
    speed = speed if trial is None else counts["tokens_per_step"] / trial.seconds_per_step
    weights = 4 * counts["parameters"]
    num_checkpoints = config.train.keep_checkpoints + 1  # and the best
    imported = checkpoint_folder.is_imported(Path(config.train.out))
    lines = list(warnings(config, mixture, counts, imported=imported))
    if mixture is not None:
        lines += corpus_warnings(mixture, imported=imported)
    memory = _memory(trial, weights, moments)
    lines += _memory_warnings(config, trial, memory)
    return Plan(
        **counts,
        parameters_by_part={name: count for name, count in parameters.items() if count},
        memory=memory,
        micro_batch_rows=config.train.batch_size // config.train.num_micro_batches,
        checkpoint_bytes=weights + moments,
        checkpoints_bytes=num_checkpoints * (weights + moments),
        device=None if trial is None else trial.device,
        processes=None if trial is None else trial.num_processes,
        precision=config.train.precision,
        tokens_per_second=speed,
        is_measured=trial is not None,
        is_extrapolated=trial is not None and trial.is_extrapolated,
        seconds=None if speed is None else counts["tokens"] / speed + _evaluations(config, mixture, trial, speed),
        warnings=lines,
        config=config.to_toml(),
    )


@dataclass(frozen=True)
class _Candidate:
    """A preset that could be proposed: its steps, their limit (time or text), and the expected error."""

    preset: str
    config: Config
    trial: Trial
    steps: int
    limit: str
    error: float


def _propose(corpus: Corpora, hours: float, recipe: str, device: str) -> Plan:
    """Returns the plan of the preset with the lowest error that the scaling law predicts for the time."""
    mixture = Mixture(absolute(corpus))

    def try_preset(preset: str) -> _Candidate:
        config = Config.preset(preset, recipe).override({"data.corpus": absolute(corpus)})
        trial = measure(resolved(config, mixture), device)
        evaluating = config.override({"train.steps": str(_TENTH), "train.eval_every": "1"})
        training = _USABLE * 3600 * hours - _evaluations(evaluating, mixture, trial, 1.0)
        affordable = int(training / trial.seconds_per_step)
        tokens_per_step = config.train.batch_size * config.data.sequence_length
        max_steps = MAX_EPOCHS * mixture.num_tokens // tokens_per_step
        steps = max(1, min(affordable, max_steps))
        error = LAW.error(layer_weights(trial.config.model), steps * tokens_per_step, mixture.num_tokens)
        return _Candidate(preset, config, trial, steps, "text" if max_steps < affordable else "time", error)

    chosen = try_preset("tiny")
    for preset in ("mini", "small", "base"):
        if _min_tokens(preset) > MAX_EPOCHS * mixture.num_tokens:
            break
        candidate = try_preset(preset)
        if candidate.error >= chosen.error or candidate.steps < MIN_STEPS[preset]:
            break
        chosen = candidate
    preset = chosen.preset
    first = chosen.config
    trial = chosen.trial
    steps = chosen.steps
    steps -= steps % 10 ** (len(str(steps)) - 2) if steps >= 100 else 0  # two digits are enough
    every = max(1, steps // _TENTH)
    changes = {"train.steps": steps, "train.eval_every": every, "train.checkpoint_every": every}
    measured = {name: trial.config.value(name) for name in ("train.precision", "train.matmul")}
    config = resolved(first.override(changes).override(measured), mixture)
    report = _report(config, mixture, trial, None)
    warnings = [*report.warnings]
    if steps < MIN_STEPS[preset]:
        warnings.append(
            f"{steps:,} steps are fewer than the {MIN_STEPS[preset]:,} that {preset} needs to learn something; "
            f"{'add text' if chosen.limit == 'text' else 'raise --hours'}"
        )
    folders = [corpus] if isinstance(corpus, (str, os.PathLike)) else list(corpus)
    if isinstance(corpus, Mapping):
        folders = [f"{folder}:{weight}" for folder, weight in corpus.items()]
    words = ["electra-fast", "pretrain", *map(str, folders), "--preset", preset, "--recipe", recipe]
    words += [] if device == AUTO else ["--device", device]
    short = {key: name for name, key in Config.SHORT_NAMES.items()}
    words += [word for key, value in changes.items() for word in (f"--{short.get(key, key)}", str(value))]
    other_recipe = "" if recipe == DEFAULT_RECIPE else f", also in recipe {recipe}"
    proposal = {
        "preset": preset,
        "recipe": recipe,
        "batch_size": config.train.batch_size,
        "overrides": changes,
        "command": shlex.join([*words, "--out", "RUN"]),
        "measured": f"the speed; the AUC of {DEFAULT_RECIPE} by size, number of tokens and epochs, up to 4 layers of "
        "width 256 and 58 M tokens of English",
        "assumed": f"the same trend for larger models, more text and longer rows{other_recipe}; {MIN_STEPS['base']:,} "
        f"steps or more for small and base; no gain from more than {MAX_EPOCHS} epochs",
    }
    return replace(report, warnings=warnings, proposal=proposal)


def _min_tokens(preset: str) -> int:
    config = Config.preset(preset)
    return MIN_STEPS[preset] * config.train.batch_size * config.data.sequence_length


def dry_run(config: Config, corpus: Corpora | None, device: str) -> Iterator[str]:
    """Yields the resolved configuration, the plan, and rows of the first batch as text."""
    if not (corpus or config.data.corpus):
        raise InputError("the corpus is missing; pass it: electra-fast pretrain CORPUS --dry-run")
    result = plan(corpus, config=config, device=device)
    yield from (*result.config.rstrip().split("\n"), "")
    yield from result.lines()
    config = config.override({"data.corpus": absolute(corpus or config.data.corpus)})
    yield from ("", "first rows of the first batch; masked tokens in brackets:")
    yield from rows_as_text(config, _SHOWN_ROWS)


def _evaluations(config: Config, mixture: Mixture | None, trial: Trial | None, speed: float) -> float:
    """Returns the seconds of a run's evaluations, from the trial or as two forward passes of a third of a step each."""
    train = config.train
    if mixture is None or mixture.holdout is None or not train.eval_every:
        return 0.0
    per_row = None if trial is None else trial.seconds_per_row
    if per_row is None:
        per_row = 2 / 3 * config.data.sequence_length / speed
    return train.steps // train.eval_every * rows_of_evaluation(config, mixture.holdout, train.eval_batches) * per_row


def _memory(trial: Trial | None, weights: int, moments: int) -> dict[str, int | None]:
    """Returns bytes by part. Each process that shares a step has gradients, and a second copy for the others."""
    num_processes = 1 if trial is None else trial.num_processes
    gradients = weights * (2 * num_processes if num_processes > 1 else 1)
    known = weights + gradients + moments
    parts: dict[str, int | None] = {"parameters": weights, "gradients": gradients, "moments": moments}
    on_cpu = trial is not None and trial.device == "cpu"
    # A copy while a checkpoint is written. The first steps write none.
    parts["checkpoint"] = copied = weights + moments if on_cpu else 0
    if trial is None or trial.memory is None:
        return parts | {"program": None, "activations": None, "total": None}
    rest = trial.memory - known - (trial.program or 0)
    return parts | {"program": trial.program, "activations": max(0, rest), "total": trial.memory + copied}


def _memory_warnings(config: Config, trial: Trial | None, memory: Mapping[str, int | None]) -> Iterator[str]:
    """Yields a warning if a CPU's free memory is too small. A GPU's micro-batches are chosen to fit."""
    total = memory["total"]
    activations = memory["activations"]
    if trial is None or trial.device != "cpu" or total is None or activations is None:
        return
    free = _USABLE * 1024 * _kib("/proc/meminfo")["MemAvailable"]
    if total <= free:
        return
    choices = smaller_micro_batches(config.train)
    max_rows = max(choices.values())
    fits = [n for n, rows in choices.items() if total - activations * (1 - rows / max_rows) <= free]
    remedy = f"pass --train.accumulate {fits[0]}" if fits else "choose a smaller model"
    yield f"the step needs {total / _GIB:.3g} GiB, but only {free / _GIB:.3g} GiB are available; {remedy}"


def duration(seconds: float) -> str:
    for unit, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} seconds"


def _bytes(count: float) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / (1 << 20):.1f} MiB"


@dataclass(frozen=True)
class Trial:
    """Measurements of a run's first steps.

    `config` has the hardware choices of the run. On a CPU, `memory` is the peak in bytes of all processes, with shared
    memory counted once, and `program` is the part in use before the first step, without the model. On a GPU, `memory`
    is its peak, and `program` is None. Both are None if the system does not report them. `seconds_per_row` is the time
    of an evaluation, or None if the run has none. `is_extrapolated`: the step was too large to be measured as a whole.
    """

    config: Config
    device: str
    num_processes: int
    seconds_per_step: float
    seconds_per_row: float | None
    memory: int | None
    program: int | None
    is_extrapolated: bool


def measure(config: Config, device: str = AUTO) -> Trial:
    """Runs the first steps of a run on its corpus and a device, in a separate process, and raises their errors.

    `config` must have the corpus and the size of its vocabulary.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plan.toml").write_text(config.to_toml(), encoding="utf-8")
        program = "from electra_fast.training.plan import take_first_steps as t; t(*sys.argv[1:])"
        command = python_command(program, folder, device)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        answer = Path(folder) / "trial.json"
        if done.returncode or not answer.exists():
            why = describe_end(done.returncode, done.stderr)
            is_memory = lacked_memory(done.returncode, done.stderr)
            remedy = "; lower train.batch_size, or choose a smaller model" if is_memory else ""
            raise TrainingFailed(f"the run's first steps failed ({why}){remedy}")
        values = json.loads(answer.read_text(encoding="utf-8"))
        if "error" in values:
            raise InputError(values["error"])
        return Trial(Config.load(Path(folder) / "settled.toml"), **values)


def take_first_steps(name: str, device: str) -> None:
    folder = Path(name)
    try:
        result = _measure(folder, Config.load(folder / "plan.toml"), choose_device(device))
    except (ElectraFastError, OSError) as error:
        result = {"error": str(error)}
    (folder / "trial.json").write_text(json.dumps(result), encoding="utf-8")


def _measure(folder: Path, config: Config, device: torch.device) -> dict[str, object]:
    mixture = Mixture(config.data.corpus)
    train = config.train
    length = config.data.sequence_length
    whole = flops_per_token(config).total
    stage = max(objective_of(config).stages(), key=lambda stage: flops_per_token(config, [stage]).total)
    sizes = [train.batch_size]
    if device.type != "cuda" and whole * train.batch_size * length > _MAX_FLOPS:
        num_processes = choose_num_processes(config, device)
        num_rows = max(1, int(_MAX_FLOPS / (2 * whole * length * num_processes))) * num_processes
        sizes = [num_rows, 2 * num_rows] if 2 * num_rows < train.batch_size else sizes
    points = []
    is_extrapolated = len(sizes) > 1
    for num_rows in sizes:
        part = {"train.batch_size": num_rows, "train.accumulate": "1"} if is_extrapolated else {}
        one_lane = {"data.lanes": "1"}  # lanes must divide the batch
        trainer = Trainer(Run(folder, config.override(part | one_lane)), mixture, World(), Callbacks(), device)
        points.append(_measure_steps(trainer, stage.first_step))
        # The next size uses the same choices without measuring them again.
        config = config.override({name: trainer.config.value(name) for name in ("train.precision", "train.matmul")})
    settled = trainer.config.override({"data.lanes": config.value("data.lanes")})
    if is_extrapolated:
        batch = {"train.batch_size": train.batch_size, "train.accumulate": train.num_micro_batches}
        settled = settled.override(batch)
    (folder / "settled.toml").write_text(settled.to_toml(), encoding="utf-8")
    rows = settled.train.batch_size
    last = points[-1]
    memory = [float(point.memory or 0) for point in points]
    seconds = _extrapolate(sizes, [point.seconds for point in points], rows)
    rows_at_once = rows // settled.train.num_micro_batches
    return {
        "device": trainer.device.type,
        "num_processes": choose_num_processes(settled, trainer.device),
        "seconds_per_step": seconds * whole / flops_per_token(config, [stage]).total,
        "seconds_per_row": last.seconds_per_row,
        "memory": None if last.memory is None else round(_extrapolate(sizes, memory, rows_at_once)),
        "program": last.program,
        "is_extrapolated": is_extrapolated,
    }


def _extrapolate(sizes: list[int], values: list[float], size: int) -> float:
    """Returns the value at `size` on the line through two points. With a single point, returns its value."""
    if len(sizes) == 1:
        return values[0]
    slope = (values[1] - values[0]) / (sizes[1] - sizes[0])
    return values[1] + max(0.0, slope) * (size - sizes[1])


@dataclass(frozen=True)
class _Point:
    """Measurements of steps of one size: seconds per step, seconds per row of an evaluation, bytes as in Trial."""

    seconds: float
    seconds_per_row: float | None
    memory: int | None
    program: int | None


def _measure_steps(trainer: Trainer, first_step: int) -> _Point:
    """Measures steps at `first_step`, and an evaluation if the run has any."""
    step = trainer.train_step
    pids = ["self"]
    if isinstance(step, CpuProcessesStep):
        pids += step.processes.pids
    with use_compute(trainer.compute), contextlib.closing(step):
        before = _resident_bytes(pids)
        optimizer = trainer.optimizer
        state = [*trainer.model.parameters(), *optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values()]
        num_steps = 0
        start = time.perf_counter()
        while num_steps < _WARMUP_STEPS + _TIMED_STEPS or time.perf_counter() - start < _SECONDS:
            if num_steps == _WARMUP_STEPS:
                step.synchronize()
                start = time.perf_counter()
            step(next(trainer.loader), first_step)
            num_steps += 1
        step.synchronize()
        seconds = (time.perf_counter() - start) / (num_steps - _WARMUP_STEPS)
        per_row = _evaluation(trainer)
        if trainer.device.type == "cuda":
            return _Point(seconds, per_row, torch.cuda.max_memory_reserved(trainer.device), None)
        # Processes keep the memory that they free (distributed.step_processes), so this is the peak.
        program = None if before is None else max(0, before - sum(tensor.nbytes for tensor in state))
        return _Point(seconds, per_row, _resident_bytes(pids), program)


def _evaluation(trainer: Trainer) -> float | None:
    """Returns the seconds per row of an evaluation, or None if the run has none."""
    holdout = trainer.mixture.holdout
    if holdout is None or not trainer.config.train.eval_every:
        return None
    trainer.measure(holdout, 1)  # compiles
    start = time.perf_counter()
    trainer.measure(holdout, _EVALUATED)
    return (time.perf_counter() - start) / rows_of_evaluation(trainer.config, holdout, _EVALUATED)


def _resident_bytes(pids: list[str]) -> int | None:
    """Returns the resident bytes of processes, with shared memory and files counted once; None if not on Linux."""
    private = files = 0
    for pid in pids:
        if not Path(f"/proc/{pid}/smaps_rollup").exists():
            return None
        kib = _kib(f"/proc/{pid}/smaps_rollup")
        # Pss_File would depend on other programs that use the same libraries.
        private += kib["Pss_Anon"] + kib["Pss_Shmem"]
        files = max(files, kib["Rss"] - kib["Anonymous"] - _kib(f"/proc/{pid}/status")["RssShmem"])
    return 1024 * (private + files)


def _kib(path: str) -> dict[str, int]:
    """Returns the sizes in a file of /proc, by name, in KiB."""
    words = (line.split() for line in Path(path).read_text(encoding="utf-8").splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) for fields in words if fields[-1] == "kB"}
