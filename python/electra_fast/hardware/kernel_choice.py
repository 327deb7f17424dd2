"""The choice of kernels, attention backend and execution for a GPU, by checks and times on that GPU.

`Checking` asks a child process, `kernel_check`. A `KernelCheck` takes for each operation the fastest implementation
that is right; its records are kept in RUN/kernels.json and in the user's cache. A kernel that gives wrong numbers, does
not compile, hangs, or takes its process along costs a line of output; the run goes on without it.
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
# Operations are checked on at most so many tokens, in at most half of the free memory.
MAX_TOKENS = 1 << 17
# Longest time without an answer, and for all answers: beyond it, what is not checked is not used.
PATIENCE_SECONDS = 90.0
MAX_SECONDS = 300.0
_POLL_SECONDS = 0.5
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}
# A reference, or branches, which take memory, must be faster by more than the noise of a measurement.
NOISE = 1.03
# Of this moment, perhaps.
_MOMENTARY = ("out of memory", "memory runs out")
# What to say instead of CUDA's words about a failure of the whole check.
_CAUSES = {
    "busy or unavailable": "the GPU admits one process at a time, which is this run, not its check; as root, "
    "`nvidia-smi -c DEFAULT` admits several"
}


@dataclass
class KernelCheck:
    """What is known about the implementations of a run's operations on a card.

    Args:
        identity: The card, versions and shapes that the records are valid for.
        records: Results by operation and implementation.
        answered: The questions that were answered: "attention: short".
        failure: The reason why nothing could be checked.
    """

    identity: Mapping[str, Any]
    records: dict[tuple[str, str], Record] = field(default_factory=dict)
    answered: list[str] = field(default_factory=list)
    failure: str = ""

    def of(self, operation: str) -> dict[str, Record]:
        """Returns the records of an operation by implementation."""
        return {name: each for (key, name), each in self.records.items() if key == operation and name != CALLS}

    @property
    def operations(self) -> list[str]:
        """The operations, without attention backends and whole steps."""
        return [key for key in self._keys if key != STEP and not _is_attention(key)]

    @property
    def _keys(self) -> list[str]:
        return list(dict.fromkeys(key for key, _ in self.records))

    @property
    def kernels(self) -> dict[str, str]:
        """The fastest right implementation of each operation (`use_choices`), or its reference.

        Linear layers take theirs if it is right, since the reference rounds weight gradients to 16 bits. Attention by
        `short` has one kernel, whose time was compared with those of other backends.
        """
        found = {key: _fastest(self.of(key)) or REFERENCE for key in self.operations} or {"*": REFERENCE}
        linear = {key: "kernel" for key, name in self.records if key.startswith("linear:") and name == "kernel"}
        found |= {key: name for key, name in linear.items() if self.records[key, name].is_right}
        for key, each in ((key, each) for (key, name), each in self.records.items() if name == "short"):
            operation = key.removesuffix(":local")
            found[operation] = "kernel" if each.is_right and found.get(operation) != REFERENCE else REFERENCE
        return found

    def attention(self, candidates: Sequence[str]) -> str | None:
        """Returns the backend with the shortest time over all layers, among those that are right in every network."""
        keys = list(filter(_is_attention, self._keys))
        calls = {key: each.calls for (key, name), each in self.records.items() if name == CALLS}
        whole = {}
        for backend in candidates:
            found = {key: self.records[key, backend] for key in keys if (key, backend) in self.records}
            if len(found) == len(keys) and all(each.is_right for each in found.values()):
                times = ((each.milliseconds or 0.0) * calls.get(key, 1) for key, each in found.items())
                whole[backend] = Record("", backend, sum(times))
        return _fastest(whole)

    @property
    def execution(self) -> str | None:
        """The fastest right execution of whole steps."""
        return _fastest({name: each for name, each in self.of(STEP).items() if not name.endswith(BY_KERNELS)})

    def lines(self, when: str) -> Iterator[str]:
        """Yields a summary, and a warning per problem."""
        if self.failure:
            reason = next((remedy for cause, remedy in _CAUSES.items() if cause in self.failure), self.failure)
            if not self.records:
                yield (
                    f"warning: kernels could not be checked ({reason}): references are used; "
                    "--train.kernels triton uses kernels unchecked"
                )
                return
            yield f"warning: the check of kernels ended early ({reason}): what it did not reach runs by references"
        chosen = self.kernels
        where = ", ".join(f"{self.identity[name]}" for name in ("card", "torch", "triton"))
        names = {key: [name for name in self.of(key) if name != REFERENCE] for key in self.operations}
        by_reference = [key for key in names if chosen[key] == REFERENCE]
        slower = [key for key in by_reference if all(self.records[key, name].is_right for name in names[key])]
        yield (
            f"kernels checked {when} on {where}: {len(names) - len(by_reference)} of {len(names)} operations by kernel"
            + (f"; by reference, which is faster: {', '.join(slower)}" if slower else "")
        )
        for (key, name), each in self.records.items():
            # Branches alone may have too little memory, which is no reason for more micro-batches.
            is_no_loss = name == BRANCHES and any(why in each.problem for why in _MOMENTARY)
            if each.problem and not name.endswith(BY_KERNELS) and not is_no_loss:
                instead = "another" if key not in chosen or _is_attention(key) else chosen[key]
                instead = "no kernel" if name == REFERENCE else instead
                yield f"warning: {key} by {name} on {where}: {each.problem}; {instead} is used instead"

    def text(self) -> str:
        """Returns the content of kernels.json: a line per record."""
        head = {"identity": dict(self.identity), "answered": self.answered}
        parts = [json.dumps(each) for each in (head, *map(dataclasses.asdict, self.records.values()))]
        return "[" + ",\n ".join(parts) + "]\n"

    def read(self, path: Path) -> bool:
        """Takes over the records of a kernels.json if they are valid here; returns whether they are."""
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
        """Returns what other runs need not ask again: all but what failed for lack of memory, as it may at the moment.

        Other failures are of these versions on this card, and last until either changes or `doctor` looks again.
        """
        lasting = [each for each in self.records.values() if not any(why in each.problem for why in _MOMENTARY)]
        records = {(each.operation, each.implementation): each for each in lasting}
        again = {_question(key) for key, _ in self.records.keys() - records.keys()}
        return KernelCheck(self.identity, records, [x for x in self.answered if x.partition(":")[0] not in again])

    def merge(self, other: KernelCheck) -> None:
        """Keeps what is right on another card too, at the longer time."""
        for key, each in self.records.items():
            theirs = other.records.get(key)
            if key[1] == CALLS or each.problem:
                continue
            if theirs is None or theirs.milliseconds is None or each.milliseconds is None:
                problem = theirs.problem if theirs is not None else "not checked there"
                self.records[key] = dataclasses.replace(each, problem=f"on {other.identity['card']}: {problem}")
            else:
                longer = max(each.milliseconds, theirs.milliseconds)
                self.records[key] = dataclasses.replace(each, milliseconds=longer)


def _is_attention(key: str) -> bool:
    return key.startswith(ATTENTION)


def _question(key: str) -> str:
    return "steps" if key == STEP else "attention" if _is_attention(key) else "operations"


def _fastest(records: Mapping[str, Record]) -> str | None:
    times = {
        name: (each.milliseconds or 0.0) * (NOISE if name in (REFERENCE, BRANCHES) else 1.0)
        for name, each in records.items()
        if each.is_right
    }
    return min(times, key=lambda name: times[name]) if times else None


def _read(path: Path) -> tuple[dict[str, Any], list[Record]]:
    head, *tables = parse_json(path.read_text(encoding="utf-8"))
    return head, [record_of(Record, table, str(path)) for table in tables]


def read_records(path: Path) -> list[Record]:
    """Returns the records of a kernels.json; none if nothing could be checked."""
    return _read(path)[1] if path.exists() else []


def cache_folder() -> Path:
    """The folder of all checks of this user: `electra-fast/kernels` in $XDG_CACHE_HOME or ~/.cache."""
    return Path(default_cache_dir()).parent / "kernels"


class Checking:
    """Asks a child process what a `KernelCheck` lacks. Close it to end the process.

    Args:
        check: Takes the records.
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
        self, what: str, candidates: Sequence[str], compute: ComputeConfig, time_steps: TimeSteps | None = None
    ) -> None:
        """Takes the records of candidates that have none yet; arguments as in `Request`."""
        left = tuple(name for name in candidates if f"{what}: {name}" not in self.check.answered)
        while left and not self.check.failure and time.monotonic() < self._end:
            subject = (what, self.config, type(objective_of(self.config)), self._device, compute, self._num_rows(what))
            if self._answer(Request(*subject, left, dict(self.check.records), time_steps)):
                self.check.answered += [f"{what}: {name}" for name in left]
                break

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _answer(self, request: Request) -> bool:
        """Asks, and takes over the answer; returns False if the process was lost on the way and must be asked again."""
        if self._process is None:
            self._process = _Process()
        process = self._process
        attempt = None
        process.send(request)
        while True:
            left = max(0.0, self._end - time.monotonic())
            answer = process.receive(min(PATIENCE_SECONDS, left) if process.has_answered else left)
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

    def _num_rows(self, what: str) -> int:
        config = self.config
        num_rows = int(self.check.identity["rows"])
        if what == "steps":
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
        with contextlib.suppress(OSError):  # `receive` tells
            self._connection.send(request)

    def receive(self, seconds: float) -> Record | tuple[str, str] | str | None:
        """Returns a record, an attempt, how the process was lost, or None at the end of an answer.

        Raises Interrupted if a stop is requested meanwhile.
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
            return f"its process ended ({describe_end(code, self._errors.read().decode(errors='replace'))})"
        self.has_answered = True
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()
        self._connection.close()


def parse_kernels(text: str) -> tuple[str, dict[str, str]]:
    """Splits `train.kernels`, such as "auto,generator_head=reference", into the mode and choices by operation."""
    mode, *parts = text.split(",")
    given = dict(part.split("=", 1) for part in parts)
    for key, value in given.items():
        name = key.partition(":")[0]
        if name not in OPERATIONS:
            raise InputError(f"train.kernels: {name} is none of the operations {', '.join(sorted(OPERATIONS))}")
        allowed = (REFERENCE, "kernel", *(FEED_FORWARD_KERNELS if name.endswith("feed_forward") else ()))
        if value not in allowed:
            raise InputError(f"train.kernels: {key}={value} is none of {', '.join(allowed)}")
    return mode, given


def _with(given: Mapping[str, str], chosen: Mapping[str, str]) -> dict[str, str]:
    """Choices with those that were given, by an operation's name for all of its widths."""
    return {key: name for key, name in chosen.items() if key.partition(":")[0] not in given} | dict(given)


def settle_kernels(
    config: Config,
    device: torch.device,
    folder: Path | None,
    world_size: int = 1,
    time_steps: TimeSteps | None = None,
    *,
    is_fresh: bool = False,
) -> tuple[Config, dict[str, str], list[str]]:
    """Chooses the kernels of a run on a GPU, and its attention backend and execution where they are `auto`.

    Args:
        config: The run's configuration; its precision and `train.accumulate` are resolved.
        device: The GPU; a CPU is for tests, where Triton's interpreter runs the kernels.
        folder: The run's folder, whose kernels.json is read and written; None for the user's cache alone.
        world_size: Ranks that divide the step's rows.
        time_steps: Times whole steps; needed if the execution is `auto`.
        is_fresh: Check again what is in the user's cache.

    Returns the configuration, the kernels (`ops.use_choices`), and messages. Raises ValueError if a requested kernel or
    attention backend cannot run or is wrong.
    """
    mode, given = parse_kernels(config.train.kernels)
    missing = missing_for_triton(card_of(device)) if device.type == "cuda" else None
    if missing and mode == "triton":
        raise InputError(f'train.kernels = "triton": {missing}; or set train.kernels = "auto"')
    if mode == "triton":
        return config, {"*": "kernel"} | given if given else {}, []
    if mode == "reference":
        if config.model.attention == AUTO:
            config = config.override({"model.attention": _without_kernels(available_attention(config, device))[0]})
        return config, {"*": REFERENCE} | given, []
    check = KernelCheck(identity_of(config, device, world_size))
    cache = cache_folder() / f"{_digest(dict(check.identity))}.json"
    if not (folder and check.read(folder / FILE)) and not is_fresh:
        check.read(cache)
    known = list(check.answered)
    start = time.perf_counter()
    with contextlib.closing(Checking(check, config, device)) as checking:
        config = _settle_attention(checking, device, has_kernels=not missing)
        compute = choose_compute(config, device)
        if not missing:
            checking.ask("operations", [compute.attention], compute)
        kernels = _with(given, check.kernels)
        if config.train.execution == AUTO and config.train.sharding == "none":
            compute = dataclasses.replace(compute, kernels=tuple(kernels.items()))
            checking.ask("steps", ["eager", GRAPH, BRANCHES], compute, time_steps)
            config = config.override({"train.execution": check.execution or "eager"})
            problems = [each.problem for key in check.operations for each in check.of(key).values()]
            if problems and not any(problems):
                checking.ask("steps", [config.train.execution + BY_KERNELS], compute, time_steps)
    if not check.records:
        return config, kernels, list(check.lines(""))
    with contextlib.suppress(OSError):  # costs the next run a minute; `doctor` tells why
        _write(cache, check.lasting().text())
    if folder:
        _write(folder / FILE, check.text())
    when = f"in {time.perf_counter() - start:.0f} s" if check.answered != known else "before"
    return config, kernels, [f"no kernels of Triton: {missing}"] if missing else list(check.lines(when))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)


def settle_encoder(
    shape: ModelConfig, compute: ComputeConfig, device: torch.device, length: int, num_rows: int
) -> tuple[ComputeConfig, list[str]]:
    """Chooses the kernels of an encoder outside of pre-training, and checks its attention backend, on a GPU.

    Checks with `num_rows` rows of `length` tokens. Returns `compute`, its dtype and attention backend, with the
    kernels, and messages, on a CPU none. Raises ValueError if the attention backend is wrong.
    """
    if device.type != "cuda":
        return compute, []
    _, kernels, lines = settle_kernels(_of_encoder(shape, compute, length, num_rows), device, None)
    new = [line for line in lines if not line.startswith("kernels checked before")]
    return dataclasses.replace(compute, kernels=tuple(kernels.items())), new


def expected_seconds(config: Config, device: torch.device, folder: Path) -> float | None:
    """Returns the seconds of a step by the run's kernels.json: what was chosen, or all kernels if those were faster.

    None if it was not timed: with several ranks, exact sums, shards, or kernels that were not checked.
    """
    check = KernelCheck(identity_of(config, device))
    train = config.train
    if not train.kernels.startswith(AUTO) or train.reduce == "exact" or not check.read(folder / FILE):
        return None
    steps = check.of(STEP)
    names = (train.execution, train.execution + BY_KERNELS)
    times = [steps[name].milliseconds for name in names if name in steps and steps[name].is_right]
    return min(filter(None, times), default=0.0) * train.num_micro_batches / 1e3 or None


def _of_encoder(shape: ModelConfig, compute: ComputeConfig, length: int, num_rows: int) -> Config:
    """Returns a configuration without a corpus, whose check is that of an encoder outside of pre-training."""
    keys = dataclasses.asdict(shape) | {"vocab_size": 1024, "attention": compute.attention}
    return Config.preset(DEFAULT_PRESET, "paper", "mlm").override(
        {f"model.{name}": value for name, value in keys.items()},
        sequence_length=min(length, shape.max_positions),
        batch_size=num_rows,
        accumulate=1,
        execution="eager",
        precision=PRECISIONS[compute.dtype],
    )


def _settle_attention(checking: Checking, device: torch.device, *, has_kernels: bool) -> Config:
    """Returns the configuration with the attention backend to use."""
    config = checking.config
    requested = checking.config.model.attention
    backends = available_attention(config, device) if requested == AUTO else [requested]
    backends = backends if has_kernels else _without_kernels(backends)
    # The reference of every backend.
    compute = dataclasses.replace(choose_compute(config, device), attention="sdpa")
    checking.ask("attention", backends, compute)
    chosen = checking.check.attention(backends)
    if chosen is None and requested != AUTO:
        asked = f'model.attention = "{requested}"'
        for (_, name), each in checking.check.records.items():
            if name == requested and each.problem:
                raise InputError(f'{asked} cannot be used on this GPU: {each.problem}; set "auto"')
        chosen = requested  # though it could not be checked
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
    """Returns all that a check depends on: card, versions, shapes and dtype."""
    model = dataclasses.replace(config.model, attention=AUTO)
    shapes = [str(each) for each in (model, config.generator, config.objective)]
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
    """Returns the first rank's kernels, without those that are wrong on the card of another rank.

    `config` has the attention backend and the execution that the first rank chose, `folder`/kernels.json its check.
    Raises ValueError if the attention backend is wrong on a card.
    """
    check = KernelCheck(identity_of(config, device, world.size))
    cards = world.all_gather_object(check.identity)

    def look() -> KernelCheck | None:
        if world.is_first:
            return check if check.read(folder / FILE) else None
        if cards.index(check.identity) < world.rank:
            return None  # another rank looks at this card
        compute = choose_compute(config, device)
        with contextlib.closing(Checking(check, config, device)) as checking:
            _settle_attention(checking, device, has_kernels=True)
            checking.ask("operations", [compute.attention], compute)
        return check

    if all(card == cards[0] for card in cards):
        return dict(kernels)
    first, *others = world.all_gather_object(world.agree(look))
    if first is None:  # all by references
        return dict(kernels)
    for other in filter(None, others):
        first.merge(other)
    return _with(parse_kernels(config.train.kernels)[1], first.kernels)
