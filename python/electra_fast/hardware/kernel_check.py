"""Checks and times each operation of a run by each of its implementations: the work of a child process.

The run's first rows pass through its networks by references. Before an operation runs for the first time at its
width, its outputs and gradients are compared: those of each kernel and of the reference, both with the reference in
fp32. So a kernel sees the run's own shapes and values, and its error is judged by the reference's own. `kernel_choice`
starts the process, asks, and chooses; whatever a kernel does to its process, the run goes on.

Requests and answers are pickled on a connection. An answer is what is about to be tried and a `Record`, many times,
and then None.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from electra_fast.config.config import Config
from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.errors import is_out_of_memory
from electra_fast.hardware.graphs import captured
from electra_fast.interruption import SIGNALS, stop_with_parent
from electra_fast.model.attention import AttentionMask
from electra_fast.model.compute import ComputeConfig, is_repeatable
from electra_fast.model.model import Electra
from electra_fast.objectives import OBJECTIVES, objective_of
from electra_fast.objectives.objective import MicroBatch, Objective, RngKey
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout, choice_key, feed_forward_kernels, observe, use_choices, use_impl

# A kernel's largest error may be this many times the reference's, plus roundings relative to the largest value: half
# of the last place of its dtype, and those of fp32 sums over many tokens. On an H200 no kernel's error was above 1.0.
ALLOWED = 2.0
FP32_ROUNDING = 2e-5
# Samples and comparisons may differ from fp32's where two candidates are nearly equal: as many times as often as the
# reference's, plus this fraction.
ALLOWED_DIFFERENT = 2e-3
REFERENCE = "reference"
CALLS = "calls"
STEP = "step"
GRAPH = "graph"
BRANCHES = "branches"
# Operations by attention backends; their fourth argument is the mask, their sixth the dropout.
ATTENTION = ("self_attention", "disentangled_attention")
# Follows the execution of a step that takes every operation's kernel, not what was chosen.
BY_KERNELS = " by kernels"
# Micro-batches of a whole step, by execution: enough to warm up and capture, then those that are timed.
WARM_UP_STEPS = 5
TIMED_STEPS = 3
# Executions of a step may differ by rounding, since flash attention sums in no fixed order.
ALLOWED_LOSS_DIFFERENCE = 0.01

TimeSteps = Callable[[Config, ComputeConfig, str, torch.device, int], tuple[list[float], dict[str, float]]]
"""`training.parallel_step.time_steps`, which is pickled by its name."""


@dataclass(frozen=True)
class Request:
    """A question to the process.

    Args:
        what: "attention", "operations" or "steps".
        config: The run's, with its corpus; without one, rows are random.
        objective: The class that the configuration names, which may come from outside this package.
        device: Device, such as "cuda:0".
        compute: Dtype, and attention backend: that of the references, of operations, or of whole steps with `kernels`.
        num_rows: Rows to read.
        candidates: Attention backends or executions (also with `BY_KERNELS`); for operations, the attention backend.
        known: What is recorded already, by operation and implementation.
        time_steps: Times whole steps, for "steps".
    """

    what: str
    config: Config
    objective: type[Objective]
    device: str
    compute: ComputeConfig
    num_rows: int
    candidates: tuple[str, ...] = ()
    known: Mapping[tuple[str, str], Record] = field(default_factory=dict)
    time_steps: TimeSteps | None = None


@dataclass(frozen=True)
class Record:
    """A result: an operation by an implementation.

    Args:
        operation: `choice_key`, or "step".
        implementation: "reference", a kernel, an attention backend or an execution; "calls" for their number alone.
        milliseconds: Forward and backward pass, or a whole step; None if it did not run.
        error: Its largest error over that which is allowed.
        problem: The reason not to use it; empty if there is none.
        calls: Calls of the operation in a pass over the networks.
        peak_bytes: Most memory allocated on the device by a whole step.
    """

    operation: str
    implementation: str
    milliseconds: float | None = None
    error: float = 0.0
    problem: str = ""
    calls: int = 1
    peak_bytes: int = 0

    @property
    def is_right(self) -> bool:
        """True if it ran and nothing is wrong."""
        return self.milliseconds is not None and not self.problem


Tell = Callable[[Record | tuple[str, str]], None]


class Checker:
    """Answers a request; `tell` receives each attempt before it is made, and each record."""

    def __init__(self, request: Request, tell: Tell) -> None:
        self.request = request
        self.known = dict(request.known)
        self._send = tell
        self.device = torch.device(request.device)
        self.calls: dict[str, int] = {}
        self.batch: Mapping[str, Tensor] = {}

    def tell(self, what: Record | tuple[str, str]) -> None:
        """Sends an attempt or a record, which is then known."""
        if isinstance(what, Record):
            self.known[what.operation, what.implementation] = what
        self._send(what)

    def answer(self) -> None:
        """Tells all records."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # on which Triton launches, whatever the device of the tensors
        OBJECTIVES[self.request.config.objective.name] = self.request.objective
        if self.request.what == "steps":
            self._compare_steps()
            return
        while True:
            try:
                self._pass_rows()
                break
            except (RuntimeError, MemoryError) as error:
                if self.request.num_rows == 1 or not is_out_of_memory(error):
                    raise
                # References need more than kernels.
                self.request = replace(self.request, num_rows=self.request.num_rows // 2)
                self.calls = {}
            _free_memory()
        for operation, calls in self.calls.items():
            self.tell(Record(operation, CALLS, calls=calls))

    def _pass_rows(self) -> None:
        request = self.request
        if request.config.data.corpus:
            loader = BatchLoader.from_config(request.config, batch_size=request.num_rows, num_threads=1, prefetch=1)
            self.batch = to_torch(next(loader), device=self.device)
        else:
            batch = random_batch(request.config, request.num_rows)
            self.batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
        model = Electra(request.config).train()
        _spread(model)
        self.observe(model.to(self.device), torch.tensor([request.config.train.seed, 0], device=self.device))

    def observe(self, model: Electra, seed_and_step: Tensor) -> None:
        """Passes the batch through the networks of all stages, by references, and checks what they call."""
        request = self.request
        key = RngKey(seed_and_step)
        with observe(self._observe_attention if request.what == "attention" else self._observe), use_impl("reference"):
            for stage in objective_of(request.config).stages():
                denominators = stage.objective.loss_denominators(self.batch)
                stage.objective.forward(model, MicroBatch(self.batch, request.compute, key, denominators))
            if not request.config.data.corpus:
                # An encoder outside of pre-training: the one operation that only the heads of its tasks may call.
                x_TD = torch.ones(self.batch["input_ids"].numel(), request.config.model.hidden_size, device=self.device)
                ops.dropout(x_TD.requires_grad_(), Dropout(0.1, key.dropout_key(request.config.data.sequence_length)))

    def _observe(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Checks an operation at its first call with this width, and runs its reference."""
        call = Call(name, function, args, kwargs, self.request.compute.dtype)
        if name not in ATTENTION and (kernels := call.kernels) and self._is_first(call.key):
            self._compare(call.key, call, dict.fromkeys(kernels, call))
        return self._reference(call)

    def _observe_attention(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = Call(name, function, args, kwargs, self.request.compute.dtype)
        if name in ATTENTION:
            mask: AttentionMask = args[3]
            key = call.key + (":local" if mask.window is not None else "")
            if self._is_first(key):
                # Without dropout, whose masks are drawn by each backend in its own way.
                args = (*args[:5], Dropout(), *args[6:])
                masks = {backend: self._mask(backend, mask) for backend in self.request.candidates}
                calls = {name: replace(call, args=(*args[:3], each, *args[4:])) for name, each in masks.items()}
                self._compare(key, replace(call, args=args), calls)
        return self._reference(call)

    def _mask(self, backend: str, like: AttentionMask) -> AttentionMask:
        local_attention = self.request.config.model.local_attention
        whole = AttentionMask.packed(self.batch["segment_ids"], self.batch["cu_seqlens"], backend, local_attention)
        mask = whole.local if like.window is not None else whole
        assert mask is not None
        return mask

    def _is_first(self, key: str) -> bool:
        self.calls[key] = self.calls.get(key, 0) + 1
        return self.calls[key] == 1

    def _reference(self, call: Call) -> Any:
        """A call's result, without what its backward pass would need, but requiring a gradient where it would."""
        has_gradient = any(x.requires_grad for x in matrices((call.args, call.kwargs)))
        with torch.no_grad():
            found = call.function(*call.args, **call.kwargs)
        return _map(found, lambda x: x.detach().requires_grad_() if has_gradient and x.is_floating_point() else x)

    def _compare(self, key: str, reference: Call, calls: Mapping[str, Call]) -> None:
        """Tells the records of an operation's implementations."""
        left = {name: call for name, call in calls.items() if (key, name) not in self.known}
        known = self.known.get((key, REFERENCE))
        if known and (known.problem or not left):  # without what a kernel is judged by, nothing can be said of it
            return
        with observe(None):
            if not known:
                self.tell((key, REFERENCE))
            try:
                with use_impl("reference"):
                    truth = [x.float() if x.is_floating_point() else x for x in reference.outcome(torch.float32)]
                    eager = reference.outcome()
                    if not known:
                        self.tell(Record(key, REFERENCE, self._milliseconds(reference, must_capture=False)))
            except Exception as error:  # this operation keeps to its reference
                self.tell(Record(key, REFERENCE, problem=self._problem(error)))
                return
            for name, call in left.items():
                self.tell((key, name))
                with use_impl(None), use_choices({"*": "kernel", key: name}):
                    self.tell(self._judge(Record(key, name), call, truth, eager))

    def _judge(self, record: Record, call: Call, truth: list[Tensor], eager: list[Tensor]) -> Record:
        is_repeatable = not record.operation.startswith(ATTENTION)
        try:
            found = call.outcome()
            again = call.outcome() if is_repeatable else None
            error = excess(found, eager, truth)
            if not math.isfinite(error):
                return replace(record, problem="it gives nan, infinity, or results of another shape")
            record = replace(record, error=round(error, 4))
            if record.error > 1:
                return replace(record, problem=f"its error is {record.error:.3g} times the allowed one")
            if again is not None and not all(map(torch.equal, found, again)):
                return replace(record, problem="two calls give different results")
            return replace(record, milliseconds=self._milliseconds(call, must_capture=True))
        except Exception as error:  # of any kind: a kernel that fails must only not be used
            return replace(record, problem=self._problem(error))

    def _problem(self, error: Exception) -> str:
        """Returns what went wrong; raises the error again if fewer rows may help."""
        if is_out_of_memory(error):
            raise error
        self._require_a_sound_device(error)
        return _reason(error)

    def _require_a_sound_device(self, error: Exception) -> None:
        """Ends the process after an error that the CUDA context does not survive, such as an illegal access."""
        if self.device.type == "cuda":
            try:
                torch.zeros(1, device=self.device).cpu()
            except RuntimeError:
                print(_reason(error), file=sys.stderr, flush=True)
                os._exit(3)

    def _milliseconds(self, call: Call, *, must_capture: bool) -> float:
        """Time of a forward and backward pass: on a GPU the device's, in a CUDA graph, since Python's is longer."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            call.run()
            return 1e3 * (time.perf_counter() - start)
        run = call.run
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
            try:
                with captured(stream) as graph:
                    call.run()
                run = graph.replay
                run()
            except RuntimeError:
                if must_capture and self.request.config.train.execution != "eager":
                    raise
                torch.cuda.synchronize(self.device)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            times: list[float] = []
            for _ in range(7):
                begin.record(stream)
                run()
                end.record(stream)
                end.synchronize()
                times.append(begin.elapsed_time(end))
        return sorted(times)[len(times) // 2]

    def _compare_steps(self) -> None:
        """Tells time and memory of whole steps of one micro-batch, by execution."""
        found: dict[str, dict[str, float]] = {}
        for execution in self.request.candidates:
            has_branches = execution == BRANCHES
            graph = self.known.get((STEP, GRAPH))
            if (STEP, execution) in self.known or (has_branches and graph is not None and not graph.is_right):
                continue
            self.tell((STEP, execution))
            try:
                if has_branches and GRAPH not in found:
                    found[GRAPH] = self._step(GRAPH)[1]
                record, totals = self._step(execution)
            except Exception as error:
                self._require_a_sound_device(error)
                record = Record(STEP, execution, problem=_reason(error))
                totals = {}
            # A branch that does not wait for what it reads would show in some bit.
            is_exact = has_branches and is_repeatable(self.request.compute.attention, self.request.config.model)
            expected = found[GRAPH] if is_exact and totals else next(iter(found.values()), {})
            differ = [name for name in totals and expected if not _close(expected[name], totals[name], is_exact)]
            if differ:
                other = "without branches" if is_exact else "eagerly"
                record = replace(record, problem=f"{differ[0]} is {totals[differ[0]]:.9g}, not as {other}")
            if totals:
                found[execution] = totals
            self.tell(record)

    def _step(self, execution: str) -> tuple[Record, dict[str, float]]:
        request = self.request
        device = self.device
        one_batch = {"batch_size": request.num_rows, "accumulate": 1, "reduce": "fast", "sharding": "none"}
        config = request.config.override(one_batch).resolved()
        _free_memory()
        with use_choices({} if execution.endswith(BY_KERNELS) else dict(request.compute.kernels)):
            assert request.time_steps is not None
            mode = execution.removesuffix(BY_KERNELS)
            times, totals = request.time_steps(config, request.compute, mode, device, WARM_UP_STEPS + TIMED_STEPS)
        if not all(torch.tensor(list(totals.values())).isfinite()):
            return Record(STEP, execution, problem="a loss or gradient is not finite"), totals
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        return Record(STEP, execution, 1e3 * min(times[WARM_UP_STEPS:]), peak_bytes=peak), totals


@dataclass
class Call:
    """A call of an operation, forward and backward, on copies of its arguments.

    `dtype` is that of the activations, which `outcome` may replace.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    _upstream: list[Tensor] = field(default_factory=list, init=False)

    @property
    def key(self) -> str:
        """The `choice_key`."""
        return choice_key(self.name, next(matrices((self.args, self.kwargs)), None))

    @property
    def kernels(self) -> list[str]:
        """The kernels that the operation has for these arguments; none where it would run as its reference anyway."""
        name = self.name
        args = self.args
        if any(isinstance(each, Dropout) and not each.has_kernel for each in args):
            return []
        if name in ("attention", *ATTENTION):
            return ["kernel"] if args[3].backend == "short" else []
        if name == "dropout":
            return ["kernel"] if args[1].probability else []
        if name == "gated_feed_forward":
            return feed_forward_kernels(args[0], args[2].shape[1], is_gated=True)
        return feed_forward_kernels(args[0], args[1].in_weight.shape[0]) if name == "feed_forward" else ["kernel"]

    def outcome(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Outputs and gradients; of floating-point tensors in `dtype`, if given."""
        outputs, gradients = self._run(dtype)
        return [x.detach() for x in outputs] + [x for x in gradients if x is not None]

    def run(self) -> None:
        """Computes outputs and gradients."""
        self._run(None)

    def outputs(self, dtype: torch.dtype | None) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the outputs, and the inputs that require a gradient."""
        leaves: list[Tensor] = []

        def leaf(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            copy = x.detach().to(dtype or x.dtype)
            if x.requires_grad:
                leaves.append(copy.requires_grad_() if copy is not x else copy.clone().requires_grad_())
                return leaves[-1]
            return copy

        args, kwargs = _map((self.args, self.kwargs), leaf, {self.dtype: dtype or self.dtype})
        with torch.enable_grad():
            return list(tensors(self.function(*args, **kwargs))), leaves

    def _run(self, dtype: torch.dtype | None) -> tuple[list[Tensor], list[Tensor | None]]:
        outputs, leaves = self.outputs(dtype)
        sources = [x for x in outputs if x.requires_grad]
        if not sources or not leaves:
            return outputs, []
        if not self._upstream:
            self._upstream = [_ramp(x) for x in sources]
        upstream = [dy.to(x.dtype) for dy, x in zip(self._upstream, sources, strict=True)]
        return outputs, list(torch.autograd.grad(sources, leaves, upstream, allow_unused=True))


@torch.no_grad()
def _spread(model: Electra) -> None:
    """Gives the parameters values as after training: products of unit scale, and biases that are not 0."""
    generator = torch.Generator().manual_seed(0)
    if model.proposal is not None:
        model.proposal.set_counts(torch.arange(1, model.num_entries + 1))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(1.5 / (parameter.std() * parameter.shape[-1] ** 0.5).clamp(min=1e-6))
        else:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def random_batch(config: Config, num_rows: int) -> dict[str, Tensor]:
    """Returns rows of random tokens in two segments each, as `data.loader.to_torch`."""
    generator = torch.Generator().manual_seed(0)
    length = config.data.sequence_length
    num_slots = max(1, int(config.data.mask_prob * length))
    boundary = length // 3
    position_BL = torch.arange(length).expand(num_rows, -1)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    ends = torch.arange(num_rows)[:, None] * length + torch.tensor([boundary, length])
    return {
        "input_ids": integers(config.model.vocab_size, num_rows, length),
        "token_type_ids": torch.zeros(num_rows, length, dtype=torch.int32),
        "position_ids": torch.where(position_BL < boundary, position_BL, position_BL - boundary).int(),
        "segment_ids": (position_BL >= boundary).int() + 1,
        "cu_seqlens": torch.cat((torch.zeros(1), ends.flatten())).int(),
        "masked_positions": integers(length, num_rows, num_slots).sort(1)[0],
        "masked_ids": integers(config.model.vocab_size, num_rows, num_slots),
        "masked_weights": torch.ones(num_rows, num_slots),
    }


def excess(
    found: list[Tensor],
    eager: list[Tensor],
    truth: list[Tensor],
    allowed: float = ALLOWED,
    fp32_rounding: float = FP32_ROUNDING,
) -> float:
    """Returns the largest error of `found` over that which is allowed, given the reference's results; inf for nan."""
    if len(found) != len(truth):
        return float("inf")
    ratios = [0.0]
    for ours, theirs, exact in zip(found, eager, truth, strict=True):
        if ours.shape != exact.shape or ours.dtype != theirs.dtype:
            return float("inf")
        if not exact.is_floating_point():
            different, reference = ((x != exact).double().mean().item() for x in (ours, theirs))
            ratios.append(different / (allowed * reference + ALLOWED_DIFFERENT))
        elif exact.numel():
            errors = [(x.to(exact.dtype) - exact).abs().max().item() for x in (ours, theirs)]
            rounding = max(fp32_rounding, torch.finfo(ours.dtype).eps / 2) * exact.abs().max().item()
            is_finite = bool(ours.isfinite().all())
            ratios.append(errors[0] / max(allowed * errors[1] + rounding, 1e-30) if is_finite else float("inf"))
    return max(ratios)


def _ramp(x: Tensor) -> Tensor:
    """A gradient whose sum is not 0, or a bias' gradient would be nothing but rounding."""
    return torch.linspace(-0.5, 1, x.numel(), device=x.device).view(x.shape) if x.dim() else torch.ones_like(x)


def _map(value: Any, change: Callable[[Tensor], Tensor], dtypes: Mapping[torch.dtype, torch.dtype] = {}) -> Any:  # noqa: B006  # not changed
    """Changes the tensors and dtypes in tuples and dictionaries."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, torch.dtype):
        return dtypes.get(value, value)
    if isinstance(value, dict):
        return {name: _map(each, change, dtypes) for name, each in value.items()}
    if isinstance(value, tuple):
        found = [_map(each, change, dtypes) for each in value]
        return type(value)(*found) if hasattr(value, "_fields") else tuple(found)
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples and dictionaries."""
    found: list[Tensor] = []
    _map(value, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    yield from found


def matrices(value: Any) -> Iterator[Tensor]:
    """The floating-point matrices among them, the first of which gives an operation's width."""
    return (x for x in tensors(value) if x.is_floating_point() and x.dim() > 1)


def _free_memory() -> None:
    """Returns to a GPU what earlier work has left behind, which a graph's pool could not take."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _close(a: float, b: float, is_exact: bool) -> bool:
    return a == b if is_exact else abs(a - b) <= ALLOWED_LOSS_DIFFERENCE * abs(a)


def _reason(error: Exception) -> str:
    """An error's type and first line, which says if memory ran out."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = "out of memory, " if is_out_of_memory(error) else ""
    return f"{what}{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def main(descriptor: int) -> None:
    """Answers the requests of a connection until it ends."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # they are the run's, which ends this process
    stop_with_parent(signal.SIGKILL)
    os.set_inheritable(descriptor, False)  # a compiler's worker would keep it open
    connection = Connection(descriptor)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        Checker(request, connection.send).answer()
        connection.send(None)
