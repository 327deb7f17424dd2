"""The first steps of a run, taken in a process of its own to measure their time and memory."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from electra_fast.child_process import describe_end, lacked_memory, python_command
from electra_fast.config.config import Config
from electra_fast.data.mixture import Mixture
from electra_fast.distributed.step_processes import choose_num_processes
from electra_fast.distributed.world import World
from electra_fast.errors import ElectraFastError, InputError, TrainingFailed
from electra_fast.hardware.flops import flops_per_token
from electra_fast.model.compute import use_compute
from electra_fast.objectives import objective_of
from electra_fast.training.callbacks import Callbacks
from electra_fast.training.forecast import rows_of_evaluation
from electra_fast.training.parallel_step import CpuProcessesStep
from electra_fast.training.run import Run
from electra_fast.training.trainer import Trainer

# Larger steps are measured with fewer rows at two sizes, and time and memory continued on a line: some two seconds
# per step on two cores.
_MAX_FLOPS = 5e11
_WARMUP_STEPS, _MIN_STEPS, _SECONDS = 2, 2, 4.0
# Batches of the evaluation that is timed.
_EVALUATED = 5


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


def measure(config: Config) -> Trial:
    """Takes the first steps of a run on its corpus, in another process; raises what they raise.

    Args:
        config: The run's configuration, with the corpus and the size of its vocabulary.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plan.toml").write_text(config.to_toml(), encoding="utf-8")
        command = python_command("from electra_fast.training.trial import main; main(sys.argv[1])", folder)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        answer = Path(folder) / "trial.json"
        if done.returncode or not answer.exists():
            why = describe_end(done.returncode, done.stderr)
            is_memory = lacked_memory(done.returncode, done.stderr)
            remedy = "; lower train.batch_size or the model's size" if is_memory else ""
            raise TrainingFailed(f"the run's first steps failed ({why}){remedy}")
        found = json.loads(answer.read_text(encoding="utf-8"))
        if "error" in found:
            raise InputError(found["error"])
        return Trial(Config.load(Path(folder) / "settled.toml"), **found)


def main(name: str) -> None:
    """Measures the configuration in a folder, and writes the result there."""
    folder, found = Path(name), dict[str, object]()
    try:
        config = Config.load(folder / "plan.toml")
        found = _measured(folder, config)
    except (ElectraFastError, OSError) as error:
        found = {"error": str(error)}
    (folder / "trial.json").write_text(json.dumps(found), encoding="utf-8")


def _measured(folder: Path, config: Config) -> dict[str, object]:
    mixture = Mixture(config.data.corpus)
    stage = max(objective_of(config).stages(), key=lambda each: flops_per_token(config, [each]).total)
    whole = flops_per_token(config).total
    step_flops = whole * config.train.batch_size * config.data.sequence_length
    is_extrapolated = not torch.cuda.is_available() and step_flops > _MAX_FLOPS
    sizes = [config.train.batch_size]
    if is_extrapolated:
        num_processes = choose_num_processes(config, torch.device("cpu"))
        few = max(1, int(_MAX_FLOPS / (2 * whole * config.data.sequence_length * num_processes))) * num_processes
        sizes = [few, 2 * few] if 2 * few < config.train.batch_size else sizes
    is_extrapolated, points = len(sizes) > 1, []
    for num_rows in sizes:
        part = {"train.batch_size": num_rows, "train.accumulate": "1"} if is_extrapolated else {}
        one_lane = {"data.lanes": "1"}  # lanes must divide the batch
        trainer = Trainer(Run(folder, config.override(part | one_lane)), mixture, World(), Callbacks())
        settled = trainer.config.override({"data.lanes": config.value("data.lanes")})
        points.append(_steps(trainer, stage.first_step))
        # The next size need not measure them again.
        config = config.override({name: settled.value(name) for name in ("train.precision", "train.matmul")})
    if is_extrapolated:
        own = {"train.batch_size": config.train.batch_size, "train.accumulate": config.train.num_micro_batches}
        settled = settled.override(own)
    (folder / "settled.toml").write_text(settled.to_toml(), encoding="utf-8")
    rows = settled.train.batch_size
    seconds = _on_line(sizes, [each.seconds for each in points], rows)
    memory = points[-1].memory
    if memory is not None:
        memory = round(
            _on_line(sizes, [float(each.memory or 0) for each in points], rows // settled.train.num_micro_batches)
        )
    share = flops_per_token(config).total / flops_per_token(config, [stage]).total
    return {
        "device": trainer.device.type,
        "num_processes": choose_num_processes(settled, trainer.device),
        "seconds_per_step": seconds * share,
        "seconds_per_row": points[-1].seconds_per_row,
        "memory": memory,
        "program": points[-1].program,
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
    step, pids = trainer.train_step, ["self"]
    if isinstance(step, CpuProcessesStep):
        pids += step.processes.pids
    is_cuda = trainer.device.type == "cuda"
    with use_compute(trainer.compute), contextlib.closing(step):
        before, optimizer = _resident_bytes(pids), trainer.optimizer
        state = [*trainer.model.parameters(), *optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values()]
        num_steps, start = 0, time.perf_counter()
        while num_steps < _WARMUP_STEPS + _MIN_STEPS or time.perf_counter() - start < _SECONDS:
            if num_steps == _WARMUP_STEPS:
                step.synchronize()
                start = time.perf_counter()
            step(next(trainer.loader), first_step)
            num_steps += 1
        step.synchronize()
        seconds = (time.perf_counter() - start) / (num_steps - _WARMUP_STEPS)
        per_row = _evaluation(trainer)
        if is_cuda:
            return _Point(seconds, per_row, torch.cuda.max_memory_reserved(trainer.device), None)
        # Processes keep what they have freed (distributed.step_processes), so that this is the peak.
        memory = _resident_bytes(pids)
        program = None if before is None else max(0, before - sum(each.nbytes for each in state))
        return _Point(seconds, per_row, memory, program)


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
        path = Path(f"/proc/{pid}/smaps_rollup")
        if not path.exists():
            return None
        pairs = (line.split()[:2] for line in path.read_text().splitlines()[1:])
        kib = {name.rstrip(":"): int(value) for name, value in pairs}
        # Pss_File would depend on who else has the same libraries open.
        own += kib["Pss_Anon"] + kib["Pss_Shmem"]
        shared = kib["Rss"] - kib["Anonymous"] - _shared_memory(pid)
        files = max(files, shared)
    return 1024 * (own + files)


def _shared_memory(pid: str) -> int:
    """Returns the KiB of shared memory that a process has mapped and touched."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem:"))
