"""What a run will take, before it starts: size, epochs, memory, disk, time, rates, and what is unwise about it.

Time and memory are those of the first steps, taken in a process of its own (`measure`).
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

# Steps with which a preset learns something. Shorter runs may end on the plateau, of which the scaling law knows
# nothing: mini leaves it between 391 and 586 steps (bench/LOG.md). For small and base, the number is an assumption.
FEWEST_STEPS = {"tiny": 2_000, "mini": 1_000, "small": 5_000, "base": 5_000}
# Of the free memory, the part that a step may take; of the given hours, the part that steps are planned for.
_SHARE = 0.9
# A proposed run evaluates and saves this often.
_TENTH = 10
_SHOWN_ROWS = 2
_GIB = 1 << 30
# Larger steps are measured with fewer rows at two sizes, and time and memory continued on a line: some two seconds
# per step on two cores.
_MAX_FLOPS = 5e11
_WARMUP_STEPS = 2
_MIN_STEPS = 2
_SECONDS = 4.0
# Batches of the evaluation that is timed.
_EVALUATED = 5


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Result):
    """The result of `plan`: counts, bytes, seconds and FLOPs; values that nobody knows are None."""

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
    """Bytes by part, and their `total`; of one GPU if `gpu_memory` was given."""
    micro_batch_rows: int
    checkpoint_bytes: int
    checkpoints_bytes: int
    """Of all checkpoints that a run keeps at a time."""
    device: str | None
    processes: int | None
    """Those that share a step on a CPU."""
    precision: str
    tokens_per_second: float | None
    is_measured: bool
    is_extrapolated: bool
    """Whether steps with fewer rows were measured."""
    seconds: float | None
    warnings: Sequence[str]
    config: str
    """The resolved configuration as TOML."""
    gpus: int = 1
    proposal: Mapping[str, Any] | None = None
    """With `hours`: preset, recipe, keys, the command, and what of it is measured and what an assumption."""

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
            f"{name} {_bytes(each)}" for name, each in memory.items() if each is not None and name != "total"
        )
        if memory["total"] is None:
            total = f"not measured{', which needs Linux' if self.is_measured else ''}; of it"
        else:
            total = f"{_bytes(memory['total'])}:"
        yield f"memory          {total} {sizes}"
        num_rows = self.micro_batch_rows
        num_gpus = self.gpus
        where = f", on each of {num_gpus} GPUs; memory is that of one" if num_gpus > 1 else ""
        yield f"micro-batch     {num_rows} {'row' if num_rows == 1 else 'rows'}{where}"
        checkpoint, all_of_them = (_bytes(self[name]) for name in ("checkpoint_bytes", "checkpoints_bytes"))
        yield f"disk            {checkpoint} per checkpoint, at most {all_of_them}"
        if self.seconds is None:
            yield "time            unknown: give a corpus to measure it, or --tokens-per-second"
        else:
            machine = "this cpu" if self.device == "cpu" else "one GPU"
            where = f"measured on {machine} in {self.precision}" if self.is_measured else "as given"
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
    """Returns what a run will take, and warnings; trains nothing that is kept.

    With a corpus, and without `tokens_per_second` and `gpu_memory`, the first steps are taken in another process, in
    half a minute or so, which gives time and memory.

    Args:
        corpus: Corpus folder, or several, as for `pretrain`; `data.corpus` by default, which may be empty.
        config: The run's configuration, or its TOML file; `Config()` by default.
        device: The device to measure on, as for `pretrain`.
        tokens_per_second: The speed to assume, such as that of a GPU elsewhere, instead of measuring.
        hours: Instead of `config`: proposes a preset, its steps and intervals for this time on this machine and corpus.
        recipe: The recipe of the proposal, with `hours`.
        gpu_memory: Plans for GPUs that need not be here, with this much free memory each, in GiB: `memory` is then
            that of one GPU, counted as for `train.accumulate = "auto"`, and `micro_batch_rows` fits it.
        gpus: The number of those GPUs, one rank each.

    Raises:
        ValueError, FileNotFoundError: Configuration and corpus do not fit together.
    """
    for name, value in (("tokens_per_second", tokens_per_second), ("hours", hours), ("gpu_memory", gpu_memory)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{name} = {value:g} must be a number above 0")
    if gpus < 1 or (gpus > 1 and gpu_memory is None):
        raise InputError(f"gpus = {gpus} must be at least 1, and needs gpu_memory")
    if hours is not None:
        if config is not None or tokens_per_second is not None or gpu_memory is not None or not corpus:
            raise InputError("hours proposes a configuration for a corpus, and takes no other option but a recipe")
        return _proposed(corpus, hours, recipe or DEFAULT_RECIPE, device)
    if recipe is not None:
        raise InputError("recipe is that of a proposal, with hours; a configuration has its own")
    config = config_of_run(config, corpus)
    config = config.override({"data.corpus": absolute(corpus if corpus is not None else config.data.corpus)})
    mixture = Mixture(config.data.corpus) if config.data.corpus else None
    if mixture is None:
        config = config.resolved().override({"model.vocab_size": config.model.vocab_size or PUBLISHED_VOCABULARY})
    else:
        config = resolved(config, mixture)
    if device != AUTO and (mixture is None or tokens_per_second is not None or gpu_memory is not None):
        raise InputError(f"device = {device!r}: is for a measurement, which takes a corpus and no speed or gpu_memory")
    if gpu_memory is not None:
        return _on_gpus(config, mixture, tokens_per_second, gpu_memory, gpus)
    trial = measure(config, device) if mixture is not None and tokens_per_second is None else None
    return _report(config if trial is None else trial.config, mixture, trial, tokens_per_second)


def _on_gpus(config: Config, mixture: Mixture | None, speed: float | None, gpu_memory: float, num_gpus: int) -> Plan:
    """Returns the plan for GPUs that are not here, which run all kernels and flash attention."""
    if config.train.precision == AUTO:
        config = config.override({"train.precision": "bf16"})
    if config.train.precision == "fp32" or config.model.attention not in (AUTO, "varlen"):
        raise InputError(
            "gpu_memory is counted for 16-bit activations and flash attention; leave out train.precision = fp32 and "
            f"model.attention = {config.model.attention}"
        )
    Division.of(config.train, 0, num_gpus)  # raises for a number of ranks that the step cannot be divided among
    compute = ComputeConfig("varlen", DTYPES[config.train.precision], kernels=(("*", "kernel"),))
    counted = StepMemory(config, compute, torch.device("cpu"), num_gpus)
    free = round(gpu_memory * _GIB)
    accumulate, num_rows, does_fit = counted.fewest_micro_batches(free)
    parts = counted.parts(num_rows)
    report = _report(config.override({"train.accumulate": str(accumulate)}), mixture, None, speed)
    warnings = [*report.warnings, *([] if does_fit else [counted.too_large(num_rows, free)])]
    memory = parts | {"total": sum(parts.values())}
    return replace(report, memory=memory, micro_batch_rows=num_rows, gpus=num_gpus, warnings=warnings)


def _report(config: Config, mixture: Mixture | None, trial: Trial | None, speed: float | None) -> Plan:
    """Returns the plan of a resolved configuration, at a trial's speed or a given one."""
    with torch.device("meta"):
        model = Electra(config)
    found = size(config, mixture, sum(each.numel() for each in model.parameters()))
    optimizer = Optimizer(model.named_parameters(), config.optimizer)
    moments = sum(each.nbytes for each in (*optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values()))
    parameters = {name: 0 for name, _ in model.named_children()}
    for name, parameter in model.named_parameters():
        parameters[name.partition(".")[0]] = parameters.get(name.partition(".")[0], 0) + parameter.numel()
    speed = speed if trial is None else found["tokens_per_step"] / trial.seconds_per_step
    weights = 4 * found["parameters"]
    kept = config.train.keep_checkpoints + 1  # and the best
    imported = checkpoint_folder.is_imported(Path(config.train.out))
    lines = list(warnings(config, mixture, found, imported=imported))
    if mixture is not None:
        lines += corpus_warnings(mixture, imported=imported)
    memory = _memory(trial, weights, moments)
    lines += _memory_warnings(config, trial, memory)
    return Plan(
        **found,
        parameters_by_part={name: count for name, count in parameters.items() if count},
        memory=memory,
        micro_batch_rows=config.train.batch_size // config.train.num_micro_batches,
        checkpoint_bytes=weights + moments,
        checkpoints_bytes=kept * (weights + moments),
        device=None if trial is None else trial.device,
        processes=None if trial is None else trial.num_processes,
        precision=config.train.precision,
        tokens_per_second=speed,
        is_measured=trial is not None,
        is_extrapolated=trial is not None and trial.is_extrapolated,
        seconds=None if speed is None else found["tokens"] / speed + _evaluations(config, mixture, trial, speed),
        warnings=lines,
        config=config.to_toml(),
    )


@dataclass(frozen=True)
class _Candidate:
    """A preset that could be proposed: the steps that it takes, what limits them, and the error to expect."""

    preset: str
    config: Config
    trial: Trial
    steps: int
    limit: str
    error: float


def _proposed(corpus: Corpora, hours: float, recipe: str, device: str) -> Plan:
    """Returns the plan of the preset that the scaling law expects most of in the time."""
    mixture = Mixture(absolute(corpus))

    def tried(preset: str) -> _Candidate:
        config = Config.preset(preset, recipe).override({"data.corpus": absolute(corpus)})
        trial = measure(resolved(config, mixture), device)
        as_often = config.override({"train.steps": str(_TENTH), "train.eval_every": "1"})
        training = _SHARE * 3600 * hours - _evaluations(as_often, mixture, trial, 1.0)
        affordable = int(training / trial.seconds_per_step)
        tokens_per_step = config.train.batch_size * config.data.sequence_length
        most = MAX_EPOCHS * mixture.num_tokens // tokens_per_step
        steps = max(1, min(affordable, most))
        error = LAW.error(layer_weights(trial.config.model), steps * tokens_per_step, mixture.num_tokens)
        return _Candidate(preset, config, trial, steps, "text" if most < affordable else "time", error)

    chosen = tried("tiny")
    for preset in ("mini", "small", "base"):
        if _fewest_tokens(preset) > MAX_EPOCHS * mixture.num_tokens:
            break
        found = tried(preset)
        if found.error >= chosen.error or found.steps < FEWEST_STEPS[preset]:
            break
        chosen = found
    preset = chosen.preset
    first = chosen.config
    trial = chosen.trial
    steps = chosen.steps
    steps -= steps % 10 ** (len(str(steps)) - 2) if steps >= 100 else 0  # two digits are enough
    every = max(1, steps // _TENTH)
    changes = {"train.steps": steps, "train.eval_every": every, "train.checkpoint_every": every}
    given = {name: trial.config.value(name) for name in ("train.precision", "train.matmul")}
    config = resolved(first.override(changes).override(given), mixture)
    report = _report(config, mixture, trial, None)
    warnings = [*report.warnings]
    if steps < FEWEST_STEPS[preset]:
        warnings.append(
            f"{steps:,} steps are fewer than the {FEWEST_STEPS[preset]:,} in which {preset} learns something; "
            f"give it more {chosen.limit}"
        )
    folders = [corpus] if isinstance(corpus, (str, os.PathLike)) else list(corpus)
    if isinstance(corpus, Mapping):
        folders = [f"{folder}:{weight}" for folder, weight in corpus.items()]
    words = ["electra-fast", "pretrain", *map(str, folders), "--preset", preset, "--recipe", recipe]
    words += [] if device == AUTO else ["--device", device]
    short = {key: name for name, key in Config.SHORT_NAMES.items()}
    words += [word for key, value in changes.items() for word in (f"--{short.get(key, key)}", str(value))]
    also = "" if recipe == DEFAULT_RECIPE else f", and in recipe {recipe} as in {DEFAULT_RECIPE}"
    proposal = {
        "preset": preset,
        "recipe": recipe,
        "batch_size": config.train.batch_size,
        "overrides": changes,
        "command": shlex.join([*words, "--out", "RUN"]),
        "measured": f"the speed; what {DEFAULT_RECIPE} learns by size, tokens and epochs, up to 4 layers of 256 "
        "and 58 M tokens of English",
        "assumed": f"that it goes on like that, also in longer rows{also}; that small and base need "
        f"{FEWEST_STEPS['base']:,} steps; that text repays {MAX_EPOCHS} epochs at most",
    }
    return replace(report, warnings=warnings, proposal=proposal)


def _fewest_tokens(preset: str) -> int:
    config = Config.preset(preset)
    return FEWEST_STEPS[preset] * config.train.batch_size * config.data.sequence_length


def dry_run(config: Config, corpus: Corpora | None, device: str) -> Iterator[str]:
    """Yields the resolved configuration, the plan, and rows of the first batch as text."""
    if not (corpus or config.data.corpus):
        raise InputError("pretrain --dry-run needs a corpus (electra-fast pretrain CORPUS)")
    found = plan(corpus, config=config, device=device)
    yield from (*found.config.rstrip().split("\n"), "")
    yield from found.lines()
    config = config.override({"data.corpus": absolute(corpus or config.data.corpus)})
    yield from ("", "first rows of the first batch; masked tokens in brackets:")
    yield from rows_as_text(config, _SHOWN_ROWS)


def _evaluations(config: Config, mixture: Mixture | None, trial: Trial | None, speed: float) -> float:
    """Returns the seconds of a run's evaluations, by the trial or, as two forward passes of a third of a step each."""
    train = config.train
    if mixture is None or mixture.holdout is None or not train.eval_every:
        return 0.0
    per_row = None if trial is None else trial.seconds_per_row
    if per_row is None:
        per_row = 2 / 3 * config.data.sequence_length / speed
    return train.steps // train.eval_every * rows_of_evaluation(config, mixture.holdout, train.eval_batches) * per_row


def _memory(trial: Trial | None, weights: int, moments: int) -> dict[str, int | None]:
    """Returns bytes by part. Processes that share a step have gradients of their own and publish them."""
    num_processes = 1 if trial is None else trial.num_processes
    gradients = weights * (2 * num_processes if num_processes > 1 else 1)
    known = weights + gradients + moments
    parts: dict[str, int | None] = {"parameters": weights, "gradients": gradients, "moments": moments}
    on_cpu = trial is not None and trial.device == "cpu"
    # Copied while a checkpoint is written, which the first steps have not done.
    parts["checkpoint"] = copied = weights + moments if on_cpu else 0
    if trial is None or trial.memory is None:
        return parts | {"program": None, "activations": None, "total": None}
    rest = trial.memory - known - (trial.program or 0)
    return parts | {"program": trial.program, "activations": max(0, rest), "total": trial.memory + copied}


def _memory_warnings(config: Config, trial: Trial | None, memory: Mapping[str, int | None]) -> Iterator[str]:
    """Warns if a CPU's free memory is too small; a GPU's micro-batches are chosen so that they fit."""
    total = memory["total"]
    activations = memory["activations"]
    if trial is None or trial.device != "cpu" or total is None or activations is None:
        return
    free = _SHARE * 1024 * _kib("/proc/meminfo")["MemAvailable"]
    if total <= free:
        return
    choices = smaller_micro_batches(config.train)
    most = max(choices.values())
    fits = [n for n, rows in choices.items() if total - activations * (1 - rows / most) <= free]
    remedy = f"--train.accumulate {fits[0]} fits" if fits else "choose a smaller model"
    yield f"the step needs {total / _GIB:.3g} GiB, and {free / _GIB:.3g} GiB can be used; {remedy}"


def duration(seconds: float) -> str:
    for unit, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} seconds"


def _bytes(count: float) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / (1 << 20):.1f} MiB"


@dataclass(frozen=True)
class Trial:
    """What the first steps took.

    `config` has the run's choices for the hardware. `memory` is the peak in bytes of all processes, memory that they
    share counted once, and `program` the part of it that was there before the first step, without the model; on a GPU,
    its memory, without a `program`; None where the system does not tell. `seconds_per_row` is that of an evaluation;
    None if there is none. `is_extrapolated` is true if the step was too large to be measured whole.
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
    """Takes the first steps of a run on its corpus and a device, in another process; raises what they raise.

    `config` has the corpus and the size of its vocabulary.
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
        found = json.loads(answer.read_text(encoding="utf-8"))
        if "error" in found:
            raise InputError(found["error"])
        return Trial(Config.load(Path(folder) / "settled.toml"), **found)


def take_first_steps(name: str, device: str) -> None:
    folder = Path(name)
    try:
        found = _measured(folder, Config.load(folder / "plan.toml"), choose_device(device))
    except (ElectraFastError, OSError) as error:
        found = {"error": str(error)}
    (folder / "trial.json").write_text(json.dumps(found), encoding="utf-8")


def _measured(folder: Path, config: Config, device: torch.device) -> dict[str, object]:
    mixture = Mixture(config.data.corpus)
    train = config.train
    length = config.data.sequence_length
    whole = flops_per_token(config).total
    stage = max(objective_of(config).stages(), key=lambda each: flops_per_token(config, [each]).total)
    sizes = [train.batch_size]
    if device.type != "cuda" and whole * train.batch_size * length > _MAX_FLOPS:
        num_processes = choose_num_processes(config, device)
        few = max(1, int(_MAX_FLOPS / (2 * whole * length * num_processes))) * num_processes
        sizes = [few, 2 * few] if 2 * few < train.batch_size else sizes
    points = []
    is_extrapolated = len(sizes) > 1
    for num_rows in sizes:
        part = {"train.batch_size": num_rows, "train.accumulate": "1"} if is_extrapolated else {}
        one_lane = {"data.lanes": "1"}  # lanes must divide the batch
        trainer = Trainer(Run(folder, config.override(part | one_lane)), mixture, World(), Callbacks(), device)
        points.append(_steps(trainer, stage.first_step))
        # The next size need not measure them again.
        config = config.override({name: trainer.config.value(name) for name in ("train.precision", "train.matmul")})
    settled = trainer.config.override({"data.lanes": config.value("data.lanes")})
    if is_extrapolated:
        own = {"train.batch_size": train.batch_size, "train.accumulate": train.num_micro_batches}
        settled = settled.override(own)
    (folder / "settled.toml").write_text(settled.to_toml(), encoding="utf-8")
    rows = settled.train.batch_size
    last = points[-1]
    memory = [float(each.memory or 0) for each in points]
    seconds = _on_line(sizes, [each.seconds for each in points], rows)
    rows_at_once = rows // settled.train.num_micro_batches
    return {
        "device": trainer.device.type,
        "num_processes": choose_num_processes(settled, trainer.device),
        "seconds_per_step": seconds * whole / flops_per_token(config, [stage]).total,
        "seconds_per_row": last.seconds_per_row,
        "memory": None if last.memory is None else round(_on_line(sizes, memory, rows_at_once)),
        "program": last.program,
        "is_extrapolated": is_extrapolated,
    }


def _on_line(sizes: list[int], values: list[float], size: int) -> float:
    """Returns the value of another size on the line through two; of a single one its value."""
    if len(sizes) == 1:
        return values[0]
    slope = (values[1] - values[0]) / (sizes[1] - sizes[0])
    return values[1] + max(0.0, slope) * (size - sizes[1])


@dataclass(frozen=True)
class _Point:
    """What steps of some size took: seconds of a step, and of an evaluation per row; bytes as in Trial."""

    seconds: float
    seconds_per_row: float | None
    memory: int | None
    program: int | None


def _steps(trainer: Trainer, first_step: int) -> _Point:
    """Takes steps from `first_step` on, and an evaluation if the run has any."""
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
        while num_steps < _WARMUP_STEPS + _MIN_STEPS or time.perf_counter() - start < _SECONDS:
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
        # Processes keep what they have freed (distributed.step_processes), so that this is the peak.
        program = None if before is None else max(0, before - sum(each.nbytes for each in state))
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
    """Returns the resident bytes of processes, shared memory and files once; None if not Linux."""
    own = files = 0
    for pid in pids:
        if not Path(f"/proc/{pid}/smaps_rollup").exists():
            return None
        kib = _kib(f"/proc/{pid}/smaps_rollup")
        # Pss_File would depend on who else has the same libraries open.
        own += kib["Pss_Anon"] + kib["Pss_Shmem"]
        files = max(files, kib["Rss"] - kib["Anonymous"] - _kib(f"/proc/{pid}/status")["RssShmem"])
    return 1024 * (own + files)


def _kib(path: str) -> dict[str, int]:
    """Returns the sizes in a file of /proc by name, in KiB."""
    words = (line.split() for line in Path(path).read_text(encoding="utf-8").splitlines())
    return {each[0].rstrip(":"): int(each[1]) for each in words if each[-1] == "kB"}
