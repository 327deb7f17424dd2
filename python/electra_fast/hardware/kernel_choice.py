"""The choice of kernels, attention backend and execution for a GPU, from checks and times on that GPU.

`Checking` sends requests to a child process, `kernel_check`. A `KernelCheck` chooses the fastest correct implementation
of each operation; its records are in RUN/kernels.json and in the user's cache. If a kernel gives wrong numbers, does
not compile, hangs or crashes its process, the run prints a warning and continues without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import IO, Any

import torch

from electra_fast import _data
from electra_fast.card import card_of, missing_for_triton
from electra_fast.child_process import describe_end, python_command
from electra_fast.config.config import AUTO, Config, ModelConfig
from electra_fast.config.presets import DEFAULT_PRESET
from electra_fast.data.loader import default_cache_dir
from electra_fast.distributed.division import rows_per_micro_batch
from electra_fast.distributed.world import World
from electra_fast.errors import InputError, Interrupted
from electra_fast.files.atomic_files import replace_file
from electra_fast.files.json_files import parse_json, record_of
from electra_fast.hardware.kernel_check import (
    ATTENTION,
    BRANCHES,
    BY_KERNELS,
    CALLS,
    GRAPH,
    REFERENCE,
    STEP,
    Record,
    Request,
    TimeSteps,
)
from electra_fast.interruption import requested_stop
from electra_fast.model.attention import BACKENDS
from electra_fast.model.compute import DTYPES, ComputeConfig, available_attention, choose_compute
from electra_fast.objectives import objective_of
from electra_fast.ops.operations import FEED_FORWARD_KERNELS, OPERATIONS

FILE = "kernels.json"
# Operations are checked on at most this many tokens.
MAX_TOKENS = 1 << 17
# Longest time without an answer, and for all answers. Implementations that are not checked in time are not used.
PATIENCE_SECONDS = 90.0
MAX_SECONDS = 300.0
_POLL_SECONDS = 0.5
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}
# A reference, or branches, which need memory, must be faster by more than the noise of a measurement.
NOISE = 1.03
# Problems that may be temporary.
_MOMENTARY = ("out of memory", "memory runs out")
# Explanations that replace CUDA's text about a failure of the whole check.
_CAUSES = {
    "busy or unavailable": "the GPU allows only one process, so the check cannot use it; as root, "
    "`nvidia-smi -c DEFAULT` allows several"
}


@dataclass
class KernelCheck:
    """Records about the implementations of a run's operations on a card.

    Args:
        identity: The card, versions and shapes for which the records are valid.
        records: Results by operation and implementation.
        answered: The requests that were answered, such as "attention: short".
        failure: The reason why the check failed as a whole.
    """

    identity: Mapping[str, Any]
    records: dict[tuple[str, str], Record] = field(default_factory=dict)
    answered: list[str] = field(default_factory=list)
    failure: str = ""

    def of(self, operation: str) -> dict[str, Record]:
        """Returns the records of an operation by implementation."""
        return {name: record for (key, name), record in self.records.items() if key == operation and name != CALLS}

    @property
    def operations(self) -> list[str]:
        """The operations, without attention backends and whole steps."""
        return [key for key in self._keys if key != STEP and not _is_attention(key)]

    @property
    def _keys(self) -> list[str]:
        return list(dict.fromkeys(key for key, _ in self.records))

    @property
    def kernels(self) -> dict[str, str]:
        """The fastest correct implementation of each operation (`use_choices`), or its reference.

        Linear layers use their kernel if it is correct, since the reference rounds weight gradients to 16 bits. The
        attention backend `short` has one kernel, whose time was compared with the times of other backends.
        """
        choices = {key: _fastest(self.of(key)) or REFERENCE for key in self.operations} or {"*": REFERENCE}
        linear = {key: "kernel" for key, name in self.records if key.startswith("linear:") and name == "kernel"}
        choices |= {key: name for key, name in linear.items() if self.records[key, name].is_right}
        for key, record in ((key, record) for (key, name), record in self.records.items() if name == "short"):
            operation = key.removesuffix(":local")
            choices[operation] = "kernel" if record.is_right and choices.get(operation) != REFERENCE else REFERENCE
        return choices

    def attention(self, candidates: Sequence[str]) -> str | None:
        """Returns the backend with the shortest time over all layers, of the backends that are correct everywhere."""
        keys = list(filter(_is_attention, self._keys))
        calls = {key: record.calls for (key, name), record in self.records.items() if name == CALLS}
        whole = {}
        for backend in candidates:
            records = {key: self.records[key, backend] for key in keys if (key, backend) in self.records}
            if len(records) == len(keys) and all(record.is_right for record in records.values()):
                times = ((record.milliseconds or 0.0) * calls.get(key, 1) for key, record in records.items())
                whole[backend] = Record("", backend, sum(times))
        return _fastest(whole)

    @property
    def execution(self) -> str | None:
        """The fastest correct execution of whole steps."""
        return _fastest({name: record for name, record in self.of(STEP).items() if not name.endswith(BY_KERNELS)})

    def lines(self, when: str) -> Iterator[str]:
        """Yields a summary, and a warning per problem."""
        if self.failure:
            reason = next((remedy for cause, remedy in _CAUSES.items() if cause in self.failure), self.failure)
            if not self.records:
                yield (
                    f"warning: kernels could not be checked ({reason}), so the run uses reference operations; "
                    "to use kernels without a check, pass --train.kernels triton"
                )
                return
            yield f"warning: the check of kernels ended early ({reason}); unchecked operations use their references"
        chosen = self.kernels
        where = ", ".join(f"{self.identity[name]}" for name in ("card", "torch", "triton"))
        names = {key: [name for name in self.of(key) if name != REFERENCE] for key in self.operations}
        by_reference = [key for key in names if chosen[key] == REFERENCE]
        slower = [key for key in by_reference if all(self.records[key, name].is_right for name in names[key])]
        yield (
            f"kernels checked {when} on {where}: {len(names) - len(by_reference)} of {len(names)} operations use them"
            + (f"; the reference is faster for {', '.join(slower)}" if slower else "")
        )
        for (key, name), record in self.records.items():
            # If only branches run out of memory, the run needs no more micro-batches.
            is_no_loss = name == BRANCHES and any(why in record.problem for why in _MOMENTARY)
            if record.problem and not name.endswith(BY_KERNELS) and not is_no_loss:
                instead = "another" if key not in chosen or _is_attention(key) else chosen[key]
                instead = "no kernel" if name == REFERENCE else instead
                yield f"warning: {key} with {name} on {where}: {record.problem}; using {instead} instead"

    def text(self) -> str:
        """Returns the content of kernels.json: a line per record."""
        head = {"identity": dict(self.identity), "answered": self.answered}
        parts = [json.dumps(entry) for entry in (head, *map(dataclasses.asdict, self.records.values()))]
        return "[" + ",\n ".join(parts) + "]\n"

    def read(self, path: Path) -> bool:
        """Reads the records of a kernels.json if they are valid for this check; returns whether they are."""
        try:
            head, records = _read(path)
            if head["identity"] != dict(self.identity):
                return False
        except (OSError, ValueError, LookupError, TypeError):  # none, or of another version
            return False
        self.records = {(x.operation, x.implementation): x for x in records}
        self.answered = list(head["answered"])
        return True

    def lasting(self) -> KernelCheck:
        """Returns the records that other runs can reuse: all but failures for lack of memory, which may be temporary.

        Other failures are valid until the card or a version changes, or `doctor` checks again.
        """
        lasting = [record for record in self.records.values() if not any(why in record.problem for why in _MOMENTARY)]
        records = {(record.operation, record.implementation): record for record in lasting}
        again = {_kind_of(key) for key, _ in self.records.keys() - records.keys()}
        return KernelCheck(self.identity, records, [x for x in self.answered if x.partition(":")[0] not in again])

    def merge(self, other: KernelCheck) -> None:
        """Rejects implementations that are not correct on another card too. Keeps the longer of the two times."""
        for key, record in self.records.items():
            theirs = other.records.get(key)
            if key[1] == CALLS or record.problem:
                continue
            if theirs is None or theirs.milliseconds is None or record.milliseconds is None:
                problem = theirs.problem if theirs is not None else "not checked"
                self.records[key] = dataclasses.replace(record, problem=f"on {other.identity['card']}: {problem}")
            else:
                longer = max(record.milliseconds, theirs.milliseconds)
                self.records[key] = dataclasses.replace(record, milliseconds=longer)


def _is_attention(key: str) -> bool:
    return key.startswith(ATTENTION)


def _kind_of(key: str) -> str:
    return "steps" if key == STEP else "attention" if _is_attention(key) else "operations"


def _fastest(records: Mapping[str, Record]) -> str | None:
    times = {
        name: (record.milliseconds or 0.0) * (NOISE if name in (REFERENCE, BRANCHES) else 1.0)
        for name, record in records.items()
        if record.is_right
    }
    return min(times, key=lambda name: times[name]) if times else None


def _read(path: Path) -> tuple[dict[str, Any], list[Record]]:
    head, *tables = parse_json(path.read_text(encoding="utf-8"))
    return head, [record_of(Record, table, str(path)) for table in tables]


def read_records(path: Path) -> list[Record]:
    """Returns the records of a kernels.json; none if nothing could be checked."""
    return _read(path)[1] if path.exists() else []


def cache_folder() -> Path:
    """Returns the folder of this user's checks: `electra-fast/kernels` in $XDG_CACHE_HOME or ~/.cache."""
    return Path(default_cache_dir()).parent / "kernels"


class Checking:
    """Requests the missing records of a `KernelCheck` from a child process. Close it to end the process.

    Args:
        check: Receives the records.
        config: The run's configuration; its `train.accumulate` is a number.
        device: The run's device.
    """

    def __init__(self, check: KernelCheck, config: Config, device: torch.device) -> None:
        self.check = check
        self.config = config
        self._device = f"cuda:{torch.cuda.current_device()}" if device.type == "cuda" else "cpu"
        self._process: _Process | None = None
        self._end = time.monotonic() + MAX_SECONDS

    def ask(
        self, kind: str, candidates: Sequence[str], compute: ComputeConfig, time_steps: TimeSteps | None = None
    ) -> None:
        """Requests the records of candidates that have none yet; arguments as in `Request`."""
        missing = tuple(name for name in candidates if f"{kind}: {name}" not in self.check.answered)
        while missing and not self.check.failure and time.monotonic() < self._end:
            subject = (kind, self.config, type(objective_of(self.config)), self._device, compute, self._num_rows(kind))
            if self._request(Request(*subject, missing, dict(self.check.records), time_steps)):
                self.check.answered += [f"{kind}: {name}" for name in missing]
                break

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _request(self, request: Request) -> bool:
        """Sends a request and stores the answer. Returns False if the process was lost and must be asked again."""
        if self._process is None:
            self._process = _Process()
        process = self._process
        attempt = None
        process.send(request)
        while True:
            seconds = max(0.0, self._end - time.monotonic())
            answer = process.receive(min(PATIENCE_SECONDS, seconds) if process.has_answered else seconds)
            if answer is None:
                return True
            if isinstance(answer, Record):
                self.check.records[answer.operation, answer.implementation] = answer
                attempt = None
            elif isinstance(answer, tuple):
                attempt = answer
            else:
                self.close()
                if attempt is not None and time.monotonic() < self._end:
                    self.check.records[attempt] = Record(*attempt, problem=answer)
                else:
                    self.check.failure = answer
                return False

    def _num_rows(self, kind: str) -> int:
        config = self.config
        num_rows = int(self.check.identity["rows"])
        if kind == "steps":
            return num_rows
        return max(1, min(num_rows, MAX_TOKENS // config.data.sequence_length))


class _Process:
    """A process of `kernel_check`."""

    def __init__(self) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._connection, theirs = Pipe()
        program = "from electra_fast.hardware.kernel_check import main; main(int(sys.argv[1]))"
        with theirs:
            self._process = subprocess.Popen(
                python_command(program, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
            )
        self.has_answered = False

    def send(self, request: Request) -> None:
        with contextlib.suppress(OSError):  # `receive` reports it
            self._connection.send(request)

    def receive(self, seconds: float) -> Record | tuple[str, str] | str | None:
        """Returns a record, an attempt, a description of the process's end, or None at the end of an answer.

        Raises Interrupted if a stop is requested in the meantime.
        """
        end = time.monotonic() + seconds
        try:
            while True:
                if number := requested_stop():
                    raise Interrupted(number, "interrupted while kernels were checked, before the first step")
                if self._connection.poll(max(0.0, min(_POLL_SECONDS, end - time.monotonic()))):
                    break
                if time.monotonic() >= end:
                    return f"no result after {seconds:.0f} s"
            answer: Record | tuple[str, str] | None = self._connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            self._errors.seek(0)
            return f"the process ended ({describe_end(code, self._errors.read().decode(errors='replace'))})"
        self.has_answered = True
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()
        self._connection.close()


def parse_kernels(text: str) -> tuple[str, dict[str, str]]:
    """Splits `train.kernels`, such as "auto,generator_head=reference", into the mode and the choice per operation."""
    mode, *parts = text.split(",")
    overrides = dict(part.split("=", 1) for part in parts)
    for key, value in overrides.items():
        name = key.partition(":")[0]
        if name not in OPERATIONS:
            raise InputError(f"train.kernels: {name}: must be one of {', '.join(sorted(OPERATIONS))}")
        allowed = (REFERENCE, "kernel", *(FEED_FORWARD_KERNELS if name.endswith("feed_forward") else ()))
        if value not in allowed:
            raise InputError(f"train.kernels: {key}={value}: must be one of {', '.join(allowed)}")
    return mode, overrides


def _with_overrides(overrides: Mapping[str, str], chosen: Mapping[str, str]) -> dict[str, str]:
    """Returns the choices with overrides applied. An operation's name overrides the choices for all of its widths."""
    return {key: name for key, name in chosen.items() if key.partition(":")[0] not in overrides} | dict(overrides)


def resolve_kernels(
    config: Config,
    device: torch.device,
    folder: Path | None,
    world_size: int = 1,
    time_steps: TimeSteps | None = None,
    *,
    is_fresh: bool = False,
) -> tuple[Config, dict[str, str], list[str]]:
    """Chooses the kernels of a run on a GPU, and its attention backend and execution if they are `auto`.

    Args:
        config: The run's configuration; its precision and `train.accumulate` are resolved.
        device: The GPU. In tests it may be a CPU, with kernels in Triton's interpreter.
        folder: The run's folder, with its kernels.json; None to use only the user's cache.
        world_size: Ranks that divide the step's rows.
        time_steps: Times whole steps; needed if the execution is `auto`.
        is_fresh: Ignore the user's cache and check again.

    Returns the configuration, the kernels (`ops.use_choices`), and messages. Raises ValueError if a requested kernel or
    attention backend cannot run or is wrong.
    """
    mode, overrides = parse_kernels(config.train.kernels)
    missing = missing_for_triton(card_of(device)) if device.type == "cuda" else None
    if missing and mode == "triton":
        raise InputError(f'train.kernels = "triton": {missing}, or set train.kernels = "auto"')
    if mode == "triton":
        return config, {"*": "kernel"} | overrides if overrides else {}, []
    if mode == "reference":
        if config.model.attention == AUTO:
            config = config.override({"model.attention": _without_kernels(available_attention(config, device))[0]})
        return config, {"*": REFERENCE} | overrides, []
    check = KernelCheck(identity_of(config, device, world_size))
    cache = cache_folder() / f"{_digest(dict(check.identity))}.json"
    if not (folder and check.read(folder / FILE)) and not is_fresh:
        check.read(cache)
    known = list(check.answered)
    start = time.perf_counter()
    with contextlib.closing(Checking(check, config, device)) as checking:
        config = _resolve_attention(checking, device, has_kernels=not missing)
        compute = choose_compute(config, device)
        if not missing:
            checking.ask("operations", [compute.attention], compute)
        kernels = _with_overrides(overrides, check.kernels)
        if config.train.execution == AUTO and config.train.sharding == "none":
            compute = dataclasses.replace(compute, kernels=tuple(kernels.items()))
            checking.ask("steps", ["eager", GRAPH, BRANCHES], compute, time_steps)
            config = config.override({"train.execution": check.execution or "eager"})
            problems = [record.problem for key in check.operations for record in check.of(key).values()]
            if problems and not any(problems):
                checking.ask("steps", [config.train.execution + BY_KERNELS], compute, time_steps)
    if not check.records:
        return config, kernels, list(check.lines(""))
    with contextlib.suppress(OSError):  # the next run checks again, which takes a minute; `doctor` reports the reason
        _write(cache, check.lasting().text())
    if folder:
        _write(folder / FILE, check.text())
    when = f"in {time.perf_counter() - start:.0f} s" if check.answered != known else "earlier"
    return config, kernels, [f"no kernels of Triton: {missing}"] if missing else list(check.lines(when))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)


def resolve_encoder(
    shape: ModelConfig, compute: ComputeConfig, device: torch.device, length: int, num_rows: int
) -> tuple[ComputeConfig, list[str]]:
    """Chooses the kernels of an encoder outside of pre-training, and checks its attention backend, on a GPU.

    Checks with `num_rows` rows of `length` tokens. Returns `compute` with the kernels, and messages; on a CPU,
    `compute` unchanged. Raises ValueError if the attention backend is wrong.
    """
    if device.type != "cuda":
        return compute, []
    _, kernels, lines = resolve_kernels(_encoder_config(shape, compute, length, num_rows), device, None)
    new = [line for line in lines if not line.startswith("kernels checked earlier")]
    return dataclasses.replace(compute, kernels=tuple(kernels.items())), new


def expected_seconds(config: Config, device: torch.device, folder: Path) -> float | None:
    """Returns a step's seconds from the run's kernels.json: with the chosen kernels, or with all if that was faster.

    None if no step was timed: with several ranks, exact sums, shards, or unchecked kernels.
    """
    check = KernelCheck(identity_of(config, device))
    train = config.train
    if not train.kernels.startswith(AUTO) or train.reduce == "exact" or not check.read(folder / FILE):
        return None
    steps = check.of(STEP)
    names = (train.execution, train.execution + BY_KERNELS)
    times = [steps[name].milliseconds for name in names if name in steps and steps[name].is_right]
    return min(filter(None, times), default=0.0) * train.num_micro_batches / 1e3 or None


def _encoder_config(shape: ModelConfig, compute: ComputeConfig, length: int, num_rows: int) -> Config:
    """Returns a configuration without a corpus, for the check of an encoder outside of pre-training."""
    keys = dataclasses.asdict(shape) | {"vocab_size": 1024, "attention": compute.attention}
    return Config.preset(DEFAULT_PRESET, "paper", "mlm").override(
        {f"model.{name}": value for name, value in keys.items()},
        sequence_length=min(length, shape.max_positions),
        batch_size=num_rows,
        accumulate=1,
        execution="eager",
        precision=PRECISIONS[compute.dtype],
    )


def _resolve_attention(checking: Checking, device: torch.device, *, has_kernels: bool) -> Config:
    """Returns the configuration with the attention backend to use."""
    config = checking.config
    requested = checking.config.model.attention
    backends = available_attention(config, device) if requested == AUTO else [requested]
    backends = backends if has_kernels else _without_kernels(backends)
    # The reference for every backend.
    compute = dataclasses.replace(choose_compute(config, device), attention="sdpa")
    checking.ask("attention", backends, compute)
    chosen = checking.check.attention(backends)
    if chosen is None and requested != AUTO:
        asked = f'model.attention = "{requested}"'
        for (_, name), record in checking.check.records.items():
            if name == requested and record.problem:
                raise InputError(f'{asked}: cannot be used on this GPU: {record.problem}; set "auto"')
        chosen = requested  # although it could not be checked
    return config.override({"model.attention": chosen or "sdpa"})


def _without_kernels(backends: Sequence[str]) -> list[str]:
    return [name for name in backends if not BACKENDS[name].is_ours]


def version_or_none(package: str) -> str:
    """Returns an installed package's version, or "none"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def identity_of(config: Config, device: torch.device, world_size: int = 1) -> dict[str, Any]:
    """Returns everything that a check depends on: card, versions, shapes and dtype."""
    model = dataclasses.replace(config.model, attention=AUTO)
    shapes = [str(part) for part in (model, config.generator, config.objective)]
    shapes += [str(config.data.sequence_length), str(config.data.mask_prob)]
    return {
        "card": card_of(device).name if device.type == "cuda" else "cpu",
        "electra-fast": _data.VERSION,
        "torch": torch.__version__,
        "triton": version_or_none("triton"),
        "precision": config.train.precision,
        "rows": rows_per_micro_batch(config.train, world_size),
        "shapes": _digest(shapes),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def agree_on_kernels(
    config: Config, device: torch.device, kernels: Mapping[str, str], folder: Path, world: World
) -> dict[str, str]:
    """Returns the first rank's kernels, without kernels that are wrong on the card of another rank.

    `config` has the first rank's attention backend and execution, `folder`/kernels.json its check. Raises ValueError
    if the attention backend is wrong on a card.
    """
    check = KernelCheck(identity_of(config, device, world.size))
    cards = world.all_gather_object(check.identity)

    def check_card() -> KernelCheck | None:
        if world.is_first:
            return check if check.read(folder / FILE) else None
        if cards.index(check.identity) < world.rank:
            return None  # another rank checks this type of card
        compute = choose_compute(config, device)
        with contextlib.closing(Checking(check, config, device)) as checking:
            _resolve_attention(checking, device, has_kernels=True)
            checking.ask("operations", [compute.attention], compute)
        return check

    if all(card == cards[0] for card in cards):
        return dict(kernels)
    first, *others = world.all_gather_object(world.agree(check_card))
    if first is None:  # all operations use references
        return dict(kernels)
    for other in filter(None, others):
        first.merge(other)
    return _with_overrides(parse_kernels(config.train.kernels)[1], first.kernels)
