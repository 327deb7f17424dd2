"""Checks and times every implementation of each operation of a run, in a child process.

The run's first rows pass through its networks with the reference operations. Before an operation runs for the first
time at its width, the outputs and gradients of each kernel and of the reference are compared with the reference in
fp32. So a kernel is checked on the run's shapes and values, and its error is compared with the reference's error.
`kernel_choice` starts the process, sends requests, and chooses. If a kernel crashes the process, the run continues.

Requests and answers are pickled on a connection. An answer is a sequence of attempts, each followed by a `Record`, and
ends with None.
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

# A kernel's largest error may be this many times the reference's, plus rounding errors relative to the largest value:
# half of the last place of its dtype, and of fp32 sums over many tokens. On an H200, no kernel's error exceeded 1.0.
ALLOWED = 2.0
FP32_ROUNDING = 2e-5
# Samples and comparisons may differ from fp32 if two candidates are nearly equal: ALLOWED times as often as the
# reference's do, plus this fraction.
ALLOWED_DIFFERENT = 2e-3
REFERENCE = "reference"
CALLS = "calls"
STEP = "step"
GRAPH = "graph"
BRANCHES = "branches"
# Operations of attention backends. Their fourth argument is the mask, the sixth the dropout.
ATTENTION = ("self_attention", "disentangled_attention")
# Suffix of the execution of a step that uses every operation's kernel instead of the chosen implementations.
BY_KERNELS = " by kernels"
# Micro-batches of a whole step per execution: first for warm-up and capture, then timed.
WARM_UP_STEPS = 5
TIMED_STEPS = 3
# Executions of a step may differ by rounding, since flash attention sums in no fixed order.
ALLOWED_LOSS_DIFFERENCE = 0.01

TimeSteps = Callable[[Config, ComputeConfig, str, torch.device, int], tuple[list[float], dict[str, float]]]
"""`training.parallel_step.time_steps`, which is pickled by its name."""


@dataclass(frozen=True)
class Request:
    """A request to the process.

    Args:
        kind: "attention", "operations" or "steps".
        config: The configuration of the run. Without a corpus, rows are random.
        objective: The class of `objective.name`, which may be defined outside this package.
        device: Device, such as "cuda:0".
        compute: Dtype and attention backend of the references, of operations, or of whole steps with `kernels`.
        num_rows: Rows to read.
        candidates: Attention backends or executions (also with `BY_KERNELS`); for operations, the attention backend.
        known: Existing records, by operation and implementation.
        time_steps: Times whole steps, for "steps".
    """

    kind: str
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
    """A result for one implementation of an operation.

    Args:
        operation: `choice_key`, or "step".
        implementation: "reference", a kernel, an attention backend or an execution; "calls" for the number of calls.
        milliseconds: Time of forward and backward pass, or of a whole step; None if it did not run.
        error: Its largest error, divided by the allowed error.
        problem: The reason not to use it; empty if there is none.
        calls: Calls of the operation in a pass over the networks.
        peak_bytes: Peak of the memory that a whole step allocates on the device.
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
        """True if it ran without a problem."""
        return self.milliseconds is not None and not self.problem


Report = Callable[[Record | tuple[str, str]], None]


class Checker:
    """Answers a request. `send` receives each attempt before it starts, and each record."""

    def __init__(self, request: Request, send: Report) -> None:
        self.request = request
        self.known = dict(request.known)
        self._send = send
        self.device = torch.device(request.device)
        self.calls: dict[str, int] = {}
        self.batch: Mapping[str, Tensor] = {}

    def report(self, message: Record | tuple[str, str]) -> None:
        """Sends an attempt or a record. A record is also added to `known`."""
        if isinstance(message, Record):
            self.known[message.operation, message.implementation] = message
        self._send(message)

    def answer(self) -> None:
        """Sends all records."""
        if self.device.type == "cuda":
            torch.cuda.set_device(
                self.device
            )  # Triton launches on the current device, whatever the device of the tensors
        OBJECTIVES[self.request.config.objective.name] = self.request.objective
        if self.request.kind == "steps":
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
            self.report(Record(operation, CALLS, calls=calls))

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
        """Passes the batch through the networks of all stages with references, and checks the operations they call."""
        request = self.request
        key = RngKey(seed_and_step)
        with observe(self._observe_attention if request.kind == "attention" else self._observe), use_impl("reference"):
            for stage in objective_of(request.config).stages():
                denominators = stage.objective.loss_denominators(self.batch)
                stage.objective.forward(model, MicroBatch(self.batch, request.compute, key, denominators))
            if not request.config.data.corpus:
                # An encoder outside of pre-training: only the heads of its tasks may call dropout.
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
                # Without dropout, since each backend draws its masks in a different way.
                args = (*args[:5], Dropout(), *args[6:])
                masks = {backend: self._mask(backend, mask) for backend in self.request.candidates}
                calls = {name: replace(call, args=(*args[:3], masks[name], *args[4:])) for name in masks}
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
        """Returns a call's result without the tensors saved for its backward pass. It requires a gradient as usual."""
        has_gradient = any(x.requires_grad for x in matrices((call.args, call.kwargs)))
        with torch.no_grad():
            result = call.function(*call.args, **call.kwargs)
        return _map(result, lambda x: x.detach().requires_grad_() if has_gradient and x.is_floating_point() else x)

    def _compare(self, key: str, reference: Call, calls: Mapping[str, Call]) -> None:
        """Sends the records of an operation's implementations."""
        missing = {name: call for name, call in calls.items() if (key, name) not in self.known}
        known = self.known.get((key, REFERENCE))
        if known and (known.problem or not missing):  # without a reference, kernels cannot be checked
            return
        with observe(None):
            if not known:
                self.report((key, REFERENCE))
            try:
                with use_impl("reference"):
                    truth = [x.float() if x.is_floating_point() else x for x in reference.outcome(torch.float32)]
                    eager = reference.outcome()
                    if not known:
                        self.report(Record(key, REFERENCE, self._milliseconds(reference, must_capture=False)))
            except Exception as error:  # the run uses the reference for this operation
                self.report(Record(key, REFERENCE, problem=self._problem(error)))
                return
            for name, call in missing.items():
                self.report((key, name))
                with use_impl(None), use_choices({"*": "kernel", key: name}):
                    self.report(self._check(Record(key, name), call, truth, eager))

    def _check(self, record: Record, call: Call, truth: list[Tensor], eager: list[Tensor]) -> Record:
        is_repeatable = not record.operation.startswith(ATTENTION)
        try:
            result = call.outcome()
            again = call.outcome() if is_repeatable else None
            error = excess(result, eager, truth)
            if not math.isfinite(error):
                return replace(record, problem="its results have nan, infinity or another shape")
            record = replace(record, error=round(error, 4))
            if record.error > 1:
                return replace(record, problem=f"its error is {record.error:.3g} times the allowed error")
            if again is not None and not all(map(torch.equal, result, again)):
                return replace(record, problem="two calls give different results")
            return replace(record, milliseconds=self._milliseconds(call, must_capture=True))
        except Exception as error:  # of any kind: a kernel that fails is not used
            return replace(record, problem=self._problem(error))

    def _problem(self, error: Exception) -> str:
        """Returns a description of the error. Raises it again if fewer rows may help."""
        if is_out_of_memory(error):
            raise error
        self._require_working_device(error)
        return _reason(error)

    def _require_working_device(self, error: Exception) -> None:
        """Ends the process if an error, such as an illegal access, has made the CUDA context unusable."""
        if self.device.type == "cuda":
            try:
                torch.zeros(1, device=self.device).cpu()
            except RuntimeError:
                print(_reason(error), file=sys.stderr, flush=True)
                os._exit(3)

    def _milliseconds(self, call: Call, *, must_capture: bool) -> float:
        """Times a forward and backward pass. On a GPU, in a CUDA graph, since launching from Python takes longer."""
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
        """Sends time and memory of whole steps of one micro-batch, for each execution."""
        all_totals: dict[str, dict[str, float]] = {}
        for execution in self.request.candidates:
            has_branches = execution == BRANCHES
            graph = self.known.get((STEP, GRAPH))
            if (STEP, execution) in self.known or (has_branches and graph is not None and not graph.is_right):
                continue
            self.report((STEP, execution))
            try:
                if has_branches and GRAPH not in all_totals:
                    all_totals[GRAPH] = self._step(GRAPH)[1]
                record, totals = self._step(execution)
            except Exception as error:
                self._require_working_device(error)
                record = Record(STEP, execution, problem=_reason(error))
                totals = {}
            # If a branch did not wait for its inputs, some bit of the totals would differ.
            is_exact = has_branches and is_repeatable(self.request.compute.attention, self.request.config.model)
            expected = all_totals[GRAPH] if is_exact and totals else next(iter(all_totals.values()), {})
            differ = [name for name in totals and expected if not _close(expected[name], totals[name], is_exact)]
            if differ:
                other = "without branches" if is_exact else "in eager execution"
                problem = f"{differ[0]} is {totals[differ[0]]:.9g}, which is not the value {other}"
                record = replace(record, problem=problem)
            if totals:
                all_totals[execution] = totals
            self.report(record)

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

    `dtype` is the dtype of the activations, which `outcome` may replace.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    _upstream: list[Tensor] = field(default_factory=list, init=False)

    @property
    def key(self) -> str:
        """The operation's `choice_key`."""
        return choice_key(self.name, next(matrices((self.args, self.kwargs)), None))

    @property
    def kernels(self) -> list[str]:
        """The operation's kernels for these arguments; empty if it would run as its reference anyway."""
        name = self.name
        args = self.args
        if any(isinstance(arg, Dropout) and not arg.has_kernel for arg in args):
            return []
        if name in ("attention", *ATTENTION):
            return ["kernel"] if args[3].backend == "short" else []
        if name == "dropout":
            return ["kernel"] if args[1].probability else []
        if name == "gated_feed_forward":
            return feed_forward_kernels(args[0], args[2].shape[1], is_gated=True)
        return feed_forward_kernels(args[0], args[1].in_weight.shape[0]) if name == "feed_forward" else ["kernel"]

    def outcome(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Returns outputs and gradients, computed from floating-point tensors in `dtype` if it is not None."""
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
    """Gives the parameters values as they are after training: products of unit scale, and nonzero biases."""
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
    outputs: list[Tensor],
    eager: list[Tensor],
    truth: list[Tensor],
    allowed: float = ALLOWED,
    fp32_rounding: float = FP32_ROUNDING,
) -> float:
    """Returns the largest error of `outputs` divided by the allowed error, which depends on `eager`; inf for nan."""
    if len(outputs) != len(truth):
        return float("inf")
    ratios = [0.0]
    for ours, theirs, exact in zip(outputs, eager, truth, strict=True):
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
    """Returns a gradient whose sum is not 0. Otherwise, the gradient of a bias would be only rounding errors."""
    return torch.linspace(-0.5, 1, x.numel(), device=x.device).view(x.shape) if x.dim() else torch.ones_like(x)


def _map(value: Any, change: Callable[[Tensor], Tensor], dtypes: Mapping[torch.dtype, torch.dtype] = {}) -> Any:  # noqa: B006  # not changed
    """Returns a value with the tensors and dtypes in its tuples and dictionaries changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, torch.dtype):
        return dtypes.get(value, value)
    if isinstance(value, dict):
        return {name: _map(item, change, dtypes) for name, item in value.items()}
    if isinstance(value, tuple):
        items = [_map(item, change, dtypes) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in tuples and dictionaries."""
    collected: list[Tensor] = []
    _map(value, lambda x: collected.append(x) or x)  # type: ignore[func-returns-value]
    yield from collected


def matrices(value: Any) -> Iterator[Tensor]:
    """Returns the floating-point matrices in tuples and dictionaries. The first one has an operation's width."""
    return (x for x in tensors(value) if x.is_floating_point() and x.dim() > 1)


def _free_memory() -> None:
    """Returns cached memory to the GPU, since a graph's memory pool cannot use it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _close(a: float, b: float, is_exact: bool) -> bool:
    return a == b if is_exact else abs(a - b) <= ALLOWED_LOSS_DIFFERENCE * abs(a)


def _reason(error: Exception) -> str:
    """Returns an error's type and first line, after "out of memory" if memory ran out."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = "out of memory, " if is_out_of_memory(error) else ""
    return f"{cause}{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def main(descriptor: int) -> None:
    """Answers the requests of a connection until it ends."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the run handles them and ends this process
    stop_with_parent(signal.SIGKILL)
    os.set_inheritable(descriptor, False)  # otherwise a compiler's worker would keep it open
    connection = Connection(descriptor)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        Checker(request, connection.send).answer()
        connection.send(None)
