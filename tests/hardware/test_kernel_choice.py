"""Kernels that are wrong, fail, hang, crash their process or are slow: a run continues without them."""

import json
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faulty_kernels import faulty
from lib.kernel_cases import CASES

import electra_fast as ef
from electra_fast.card import Card
from electra_fast.child_process import describe_end
from electra_fast.config.config import Config
from electra_fast.errors import Interrupted
from electra_fast.hardware import kernel_check, kernel_choice
from electra_fast.hardware.kernel_check import CALLS, REFERENCE, Checker, Record, Request
from electra_fast.hardware.kernel_choice import (
    FILE,
    KernelCheck,
    agree_on_kernels,
    expected_seconds,
    parse_kernels,
    resolve_encoder,
    resolve_kernels,
)
from electra_fast.interruption import stop_requests
from electra_fast.kernels import launchers
from electra_fast.model import attention
from electra_fast.model import compute as compute_module
from electra_fast.model.compute import ComputeConfig
from electra_fast.objectives import objective_of
from electra_fast.ops import operations as ops
from electra_fast.training.timing import SlowSteps, StepTimes

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")
SHORT = ComputeConfig("short", torch.bfloat16)
IDENTITY = {"card": "NVIDIA Test", "torch": "2", "triton": "3"}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run in the interpreter")


def small_config(corpus, **changes):
    tiny = {"model.num_layers": 1, "model.dropout": 0.0, "model.attention_dropout": 0.0}
    keys = {"data.corpus": str(corpus), "model.vocab_size": ef.Corpus(corpus).vocab_size, "data.sequence_length": 16}
    run = {"train.batch_size": 2, "train.precision": "fp32", "model.attention": "sdpa", "train.execution": "eager"}
    # A single network has few operations.
    return Config.preset("tiny", "google", "mlm").override(tiny | keys | run | changes)


def request_of(corpus, kind="operations", device="cpu", compute=None, num_rows=2, **options):
    config = small_config(corpus)
    compute = compute or ComputeConfig("sdpa", torch.float32)
    return Request(kind, config, type(objective_of(config)), device, compute, num_rows, **options)


class TestChecker:
    """The check of one operation, in this process."""

    @staticmethod
    def layer_norm_record(tiny_corpus, monkeypatch, launcher, device=None):
        monkeypatch.setattr(launchers, "layer_norm", launcher)
        messages = []
        call = CASES["layer_norm"].call(CPU, torch.float32, 6, 8, True)
        checker = Checker(request_of(tiny_corpus), messages.append)
        checker.device = device or checker.device
        checker._observe("layer_norm", ops.layer_norm.__wrapped__, call.args, {})
        first, reference, attempt, record = messages
        assert (first, attempt) == (("layer_norm:8", REFERENCE), ("layer_norm:8", "kernel"))
        assert (reference.implementation, record.operation) == (REFERENCE, "layer_norm:8")
        assert reference.is_right
        return record

    @pytest.mark.parametrize(
        ("fault", "problem"),
        [
            ("none", ""),
            ("output", "its error is "),
            ("gradient", "its error is "),
            ("element", "its error is "),
            ("nan", "its results have nan, infinity or another shape"),
            ("random", "two calls give different results"),
            ("compile", "AssertionError: CompilationError: at 12:4: cannot be compiled"),
        ],
    )
    def test_wrong_kernels_rejected_and_right_ones_timed(self, tiny_corpus, tmp_path, monkeypatch, fault, problem):
        record = self.layer_norm_record(tiny_corpus, monkeypatch, faulty(launchers.layer_norm, fault))
        assert record.problem.startswith(problem) and record.is_right == (not problem) == (not record.problem)
        assert record.milliseconds is None if problem else record.milliseconds > 0 and record.error < 1
        (tmp_path / FILE).write_text(checked(record).text())
        assert KernelCheck(IDENTITY).read(tmp_path / FILE)

    def test_fatal_device_error_ends_process(self, tiny_corpus, monkeypatch, capsys):
        """For example an illegal access. The parent process gets the attempt and the reason."""

        def dead(*_, **__):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(Checker, "_milliseconds", lambda *_, **__: 1.0)
        monkeypatch.setattr(torch, "zeros", dead)
        monkeypatch.setattr(kernel_check.os, "_exit", sys.exit)
        with pytest.raises(SystemExit):
            self.layer_norm_record(tiny_corpus, monkeypatch, dead, CUDA)
        assert capsys.readouterr().err.endswith("RuntimeError: CUDA error: an illegal memory access was encountered\n")

    def test_failing_reference_affects_one_operation(self, tiny_corpus, monkeypatch):
        def fail(*_):
            raise RuntimeError("no algorithm for these sizes\nmore")

        monkeypatch.setattr(ops, "layer_norm_reference", fail)
        messages = []
        call = CASES["layer_norm"].call(CPU, torch.float32, 6, 8, True)
        record = Record("layer_norm:8", REFERENCE, problem="RuntimeError: no algorithm for these sizes")
        for known in ({}, {("layer_norm:8", REFERENCE): record}):
            Checker(request_of(tiny_corpus, known=known), messages.append)._compare(call.key, call, {"kernel": call})
        assert messages == [("layer_norm:8", REFERENCE), record]
        assert checked(messages[1]).kernels == {"layer_norm:8": REFERENCE}
        assert list(checked(messages[1]).lines(""))[1].endswith(f"{record.problem}; using no kernel instead")

    def test_process_sets_current_gpu(self, tiny_corpus, monkeypatch):
        """Triton launches on the current GPU."""
        done = []
        monkeypatch.setattr(torch.cuda, "set_device", done.append)
        monkeypatch.setattr(Checker, "_pass_rows", lambda checker: done.append("pass"))
        Checker(request_of(tiny_corpus, "attention", "cuda:3", SHORT), print).answer()
        assert done == [torch.device("cuda:3"), "pass"]

    def test_out_of_memory_references_get_fewer_rows(self, tiny_corpus, monkeypatch):
        tried = []
        messages = []

        def pass_rows(checker):
            tried.append(checker.request.num_rows)
            checker.calls["a:8"] = tried[-1]
            if tried[-1] > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(Checker, "_pass_rows", pass_rows)
        Checker(request_of(tiny_corpus, compute=SHORT, num_rows=5), messages.append).answer()
        assert tried == [5, 2, 1] and messages == [Record("a:8", CALLS, calls=1)]


def checked(*records):
    return KernelCheck(IDENTITY, {(record.operation, record.implementation): record for record in records})


class TestChoice:
    def test_fastest_correct_implementation_chosen(self):
        check = checked(
            *(Record("a:8", REFERENCE, 2.0), Record("a:8", "kernel", 2.05)),
            *(Record("b:8", REFERENCE, 2.0), Record("b:8", "kernel", 2.1)),
            *(Record("c:8", REFERENCE, 9.0), Record("c:8", "narrow", problem="wrong"), Record("c:8", "fused", 3.0)),
            *(Record("d:8", REFERENCE, 9.0), Record("d:8", "kernel", problem="wrong")),
            *(Record("linear:8", REFERENCE, 1.0), Record("linear:8", "kernel", 9.0)),
            *(Record("linear:16", REFERENCE, 1.0), Record("linear:16", "kernel", problem="wrong")),
            *(Record("step", "eager", 3.0), Record("step", "graph", 2.0)),
        )
        expected = {"a:8": "kernel", "b:8": REFERENCE, "c:8": "fused", "d:8": REFERENCE}
        expected |= {"linear:8": "kernel", "linear:16": REFERENCE}
        assert check.kernels == expected
        assert check.execution == "graph"
        summary, narrow, kernel, _ = check.lines("in 9 s")
        assert summary == (
            "kernels checked in 9 s on NVIDIA Test, 2, 3: 3 of 6 operations use them; the reference is faster for b:8"
        )
        assert narrow == "warning: c:8 with narrow on NVIDIA Test, 2, 3: wrong; using fused instead"
        assert kernel.endswith("wrong; using reference instead")

    def test_attention_correct_everywhere_and_fastest_in_total(self):
        keys = ("self_attention:64", "self_attention:256", "self_attention:256:128")
        calls = [Record(key, CALLS, calls=number) for key, number in zip(keys, (12, 4, 8), strict=True)]
        times = {"short": (1.0, None, 1.0), "varlen": (1.0, 9.0, 1.0), "sdpa": (2.0, 2.0, 2.0)}
        check = checked(*calls, *(Record(keys[i], name, times[name][i]) for name in times for i in range(3)))
        assert check.attention(["short", "varlen", "sdpa"]) == "sdpa"  # 48 ms, and 56
        assert check.attention(["short"]) is None
        others = checked(Record("self_attention:64:local", "short", 1.0), Record("self_attention:128", "varlen", 1.0))
        check.records |= others.records
        expected = {"self_attention:64": "kernel", "self_attention:256": REFERENCE, "self_attention:256:128": "kernel"}
        assert check.kernels == {"*": REFERENCE} | expected

    @pytest.mark.parametrize("problem", ["out of memory", f"the process ended ({describe_end(-9)})"])
    def test_failures_not_retried_unless_out_of_memory(self, problem):
        others = Record("a:8", "kernel", problem="wrong"), Record("self_attention:8", "flex", problem="wrong")
        full = Record("step", "graph", problem=f"{problem}, RuntimeError: "), Record("step", "eager", 1.0)
        check = checked(*others, *full)
        check.answered = ["attention: flex", "operations: sdpa", "steps: graph", "steps: eager"]
        lasting = check.lasting()
        assert list(lasting.records.values()) == [*others, full[1]]
        assert lasting.answered == ["attention: flex", "operations: sdpa"]

    def test_merge_keeps_kernels_correct_on_all_cards(self):
        first = checked(Record("a:8", REFERENCE, 2.0), Record("a:8", "kernel", 1.0), Record("b:8", "kernel", 1.0))
        other = checked(
            Record("a:8", REFERENCE, 2.0), Record("a:8", "kernel", 9.0), Record("b:8", "kernel", problem="no")
        )
        first.merge(other)
        assert first.kernels == {"a:8": REFERENCE, "b:8": REFERENCE}
        assert first.records["b:8", "kernel"].problem == "on NVIDIA Test: no"

    def test_kernels_set_per_operation(self):
        mode, overrides = parse_kernels("auto,generator_head=reference,corrupt=kernel")
        assert (mode, overrides) == ("auto", {"generator_head": REFERENCE, "corrupt": "kernel"})
        others = {"linear:8": "kernel"}
        chosen = others | {"generator_head:8": "kernel", "generator_head:16": "kernel"}
        assert kernel_choice._with_overrides(overrides, chosen) == others | overrides
        for text, message in (
            ("triton,generator_heat=reference", "generator_heat: must be one of add_norm, attention, "),
            ("auto,layer_norm:256=narrow", "layer_norm:256=narrow: must be one of reference, kernel"),
        ):
            with pytest.raises(ValueError, match=message):
                parse_kernels(text)
        with pytest.raises(ValueError, match='train.kernels = "fast": must be auto, triton or reference'):
            Config().override({"train.kernels": "fast"})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/electra-fast/kernels"


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """Returns a function that makes kernels of child processes faulty."""
    shutil.copy(Path(__file__).parents[1] / "support/faulty_kernels.py", tmp_path / "sitecustomize.py")
    package = Path(ef.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{package}")
    return lambda **by_launcher: monkeypatch.setenv("FAULTS", json.dumps(by_launcher))


@pytest.mark.slow
@pytest.mark.usefixtures("hostile_folder")
def test_run_continues_without_faulty_kernels(tiny_corpus, tmp_path, cache, faults, monkeypatch):
    """Kernels are checked in separate processes. Their records are stored, also for other runs."""
    faults(embedding_norm="kill", layer_norm="hang", narrow_feed_forward="compile", generator_head="output")
    monkeypatch.setattr(kernel_choice, "PATIENCE_SECONDS", 12.0)
    config = small_config(tiny_corpus)
    run = tmp_path / "run"
    settled, kernels, lines = resolve_kernels(config, CPU, run)
    assert settled == config
    problems = {
        "embedding_norm:32 with kernel": "the process ended (killed by SIGSEGV)",
        "layer_norm:32 with kernel": "no result after 12 s",
        "feed_forward:64 with narrow": "AssertionError: CompilationError",
        "generator_head:32 with kernel": "its error is",
    }
    for name, problem in problems.items():
        (line,) = (line for line in lines if line.startswith(f"warning: {name} on cpu, "))
        assert f": {problem}" in line and line.endswith("; using reference instead")
        assert kernels[name.partition(" ")[0]] == REFERENCE
    assert len(lines) == 1 + len(problems)
    assert {"bias_gelu:64", "linear:64"} <= kernels.keys()
    assert [path.read_text() for path in cache.glob("*")] == [(run / FILE).read_text()]
    monkeypatch.setattr(kernel_choice, "_Process", lambda: pytest.fail("asked again"))
    for folder in (run, tmp_path / "other"):
        assert resolve_kernels(config, CPU, folder)[1] == kernels


@pytest.mark.process
def test_check_cached_for_same_card_and_shapes(tiny_corpus, tmp_path, cache, monkeypatch):
    config = small_config(tiny_corpus, **{"model.attention": "auto"})
    settled, kernels, lines = resolve_kernels(config, CPU, tmp_path / "run")
    assert settled.model.attention == "sdpa"
    assert lines[0].startswith("kernels checked in ") and len(lines) == 1
    monkeypatch.setattr(kernel_choice, "_Process", lambda: pytest.fail("asked again"))
    again = resolve_kernels(config, CPU, tmp_path / "other")
    assert again[:2] == (settled, kernels) and again[2][0].startswith("kernels checked earlier on ")
    assert (tmp_path / "other" / FILE).read_text() == (tmp_path / "run" / FILE).read_text()
    for other, is_fresh in ((config.override({"data.sequence_length": 32}), False), (config, True)):
        with pytest.raises(BaseException, match="asked again"):
            resolve_kernels(other, CPU, tmp_path / "third", is_fresh=is_fresh)


def test_wrong_requested_attention_refused(tiny_corpus, tmp_path, cache):
    config = small_config(tiny_corpus)
    check = KernelCheck(kernel_choice.identity_of(config, CPU), answered=["attention: sdpa"])
    check.records["self_attention:64", "sdpa"] = Record("self_attention:64", "sdpa", problem="gives nan")
    (tmp_path / FILE).write_text(check.text())
    with pytest.raises(ValueError, match='model.attention = "sdpa": cannot be used on this GPU: gives nan; set "auto"'):
        resolve_kernels(config, CPU, tmp_path)


BUSY = "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "the process ended (exit code 1: no output)"),
        (
            "x: 1\nImportError: no library\nCompile with `TORCH_USE_CUDA_DSA`\n\n",
            "the process ended (exit code 1: ImportError: no l",
        ),
        (f"{BUSY}\nSearch for `cudaErrorDevicesUnavailable`\n", "the GPU allows only one process, so the check"),
    ],
)
def test_references_used_if_check_fails(words, reason, tiny_corpus, tmp_path, cache, monkeypatch):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{words}END\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    config = small_config(tiny_corpus)
    settled, kernels, (line,) = resolve_kernels(config, CPU, tmp_path / "run")
    assert settled == config and kernels == {"*": REFERENCE} and not (tmp_path / "run").exists() and not cache.exists()
    assert line.startswith(f"warning: kernels could not be checked ({reason}") and "), so the run uses ref" in line


@pytest.mark.parametrize("lost", ["before a try", "out of time"])
def test_partial_check_keeps_records(lost, tiny_corpus, tmp_path, cache, monkeypatch):
    config = small_config(tiny_corpus)
    known = Record("layer_norm:32", "kernel", 1.0)

    class Process:
        has_answered = True
        kill = send = lambda *_: None

        def __init__(self):
            attempts = [("corrupt", "kernel")] if lost == "out of time" else []
            self.answers = [Record("self_attention:64", "sdpa", 1.0), None, known, *attempts, "lost"]

        def receive(self, _):
            if self.answers == ["lost"] and lost == "out of time":
                time.sleep(0.3)
            return self.answers.pop(0)

    monkeypatch.setattr(kernel_choice, "_Process", Process)
    monkeypatch.setattr(kernel_choice, "MAX_SECONDS", 0.2)
    _, kernels, lines = resolve_kernels(config, CPU, tmp_path / "run")
    assert kernels == {"layer_norm:32": "kernel"}
    assert lines[0].startswith("warning: the check of kernels ended early (lost); unchecked operations use their ref")
    assert lines[1].startswith("kernels checked in 0 s on cpu") and len(lines) == 2
    check = KernelCheck(kernel_choice.identity_of(config, CPU))
    assert check.read(next(cache.glob("*"))) and check.answered == ["attention: sdpa"]


@pytest.mark.process
def test_stop_ends_check_without_records(tiny_corpus, tmp_path, cache, faults):
    faults(layer_norm="hang")
    with stop_requests() as stop, pytest.raises(Interrupted, match="interrupted while kernels were checked"):
        timer = threading.Timer(0.1, setattr, (stop, "signal", signal.SIGUSR1))
        timer.start()
        resolve_kernels(small_config(tiny_corpus), CPU, tmp_path / "run")
    assert not (tmp_path / "run").exists() and not cache.exists()


def test_ranks_agree_on_kernels(tiny_corpus, tmp_path, cache, monkeypatch):
    """The second rank has another card, and a kernel is wrong on it."""
    config = small_config(tiny_corpus)
    check = KernelCheck(kernel_choice.identity_of(config, CPU, 2))
    check.records = checked(Record("a:8", REFERENCE, 2.0), Record("a:8", "kernel", 1.0)).records
    (tmp_path / FILE).write_text(check.text())
    other = KernelCheck(check.identity | {"card": "another"})
    other.records = {("a:8", "kernel"): Record("a:8", "kernel", problem="wrong")}

    class World:
        is_first = True
        rank = 0
        size = 2

        def all_gather_object(self, local):
            return [local, other if isinstance(local, KernelCheck) else other.identity]

        def agree(self, work):
            return work()

    assert agree_on_kernels(config, CPU, {"a:8": "kernel"}, tmp_path, World())["a:8"] == REFERENCE
    other.identity = check.identity
    assert agree_on_kernels(config, CPU, {"a:8": "kernel"}, tmp_path, World()) == {"a:8": "kernel"}


def test_requests_use_current_gpu(tiny_corpus, tmp_path, monkeypatch):
    """Attention comes first, compared with `sdpa`; operations and steps use its backend. The cache is not writable."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    asked = []

    class Process:
        has_answered = True
        kill = send = lambda self, *request: asked.extend(request)

        def receive(self, seconds):
            if asked[-1].kind != "attention" or asked[-1] in asked[:-1]:
                return None
            asked.append(asked[-1])
            return Record("self_attention:64", "varlen", 1.0)

    monkeypatch.setattr(kernel_choice, "_Process", Process)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for module in (kernel_choice, compute_module):
        monkeypatch.setattr(module, "card_of", lambda _: Card("NVIDIA A10", (8, 6)))
    for module in (kernel_choice, attention):
        monkeypatch.setattr(module, "missing_for_triton", lambda _: None)
    auto = dict.fromkeys(("model.attention", "train.execution"), "auto")
    config = small_config(tiny_corpus, **auto | {"train.precision": "bf16"})
    settled, kernels, _ = resolve_kernels(config, torch.device("cuda"), tmp_path, time_steps=print)
    kinds = {request.kind: (request.compute.attention, request.candidates) for request in asked}
    assert kinds == {
        "attention": ("sdpa", ("short", "varlen", "sdpa", "flex")),
        "operations": ("varlen", ("varlen",)),
        "steps": ("varlen", ("eager", "graph", "branches")),
    }
    assert {request.device for request in asked} == {"cuda:3"}
    assert {request.compute.dtype for request in asked} == {torch.bfloat16}
    assert (settled.model.attention, settled.train.execution) == ("varlen", "eager")
    assert asked[-1].time_steps is print
    assert asked[-1].compute.kernels == tuple(kernels.items()) == (("*", REFERENCE),)


@pytest.mark.parametrize(
    ("graph", "branches", "backend", "expected"),
    [
        (1.001, 1.001, "sdpa", "branches"),
        (1.001, 1.0010001, "sdpa", "graph"),  # some bit differs, so a branch has not waited
        (1.001, 1.002, "varlen", "branches"),  # its gradients differ between two runs
        (1.001, 1.1, "varlen", "graph"),
        (2.0, 1.0, "sdpa", "eager"),
    ],
)
def test_branches_compared_with_plain_graph(tiny_corpus, graph, branches, backend, expected):
    """Bitwise if attention is deterministic. The process may have timed the other executions or not."""
    losses = {"eager": 1.0, "graph": graph, "branches": branches}
    times = {"eager": 3.0, "graph": 2.0, "branches": 1.0}

    def time_steps(config, compute, execution, device, num_steps):
        return [times[execution]] * num_steps, {"loss": losses[execution]}

    assert compute_module.BACKENDS["sdpa"].is_deterministic and not compute_module.BACKENDS["varlen"].is_deterministic
    compute = ComputeConfig(backend, torch.float32)
    messages = []
    request = request_of(tiny_corpus, "steps", compute=compute, candidates=tuple(losses), time_steps=time_steps)
    Checker(request, messages.append).answer()
    records = [message for message in messages if isinstance(message, Record)]
    assert checked(*records).execution == expected
    if records[1].is_right:
        known = {(record.operation, record.implementation): record for record in records[:2]}
        again = replace(request, known=known)
        Checker(again, messages.append).answer()
        assert messages[-1] == records[2]


def test_no_warning_if_branches_lack_memory():
    problem = "out of memory, OutOfMemoryError: "
    check = checked(Record("step", "graph", 1.0), Record("step", "branches", problem=problem))
    assert check.execution == "graph" and not any("memory" in line for line in check.lines("now"))


def test_much_slower_steps_warn_once(tiny_corpus, tmp_path):
    """The expectation is the time with the chosen kernels or with all, if faster, since a step may have lost some."""
    config = small_config(tiny_corpus, **{"train.accumulate": "2"})
    for times, expected in (({}, None), ({"eager": 30.0}, 0.06), ({"eager": 30.0, "eager by kernels": 10.0}, 0.02)):
        check = KernelCheck(kernel_choice.identity_of(config, CPU))
        check.records = checked(*(Record("step", name, time) for name, time in times.items())).records
        (tmp_path / FILE).write_text(check.text())
        assert expected_seconds(config, CPU, tmp_path) == (expected and pytest.approx(expected))
        assert check.execution == ("eager" if times else None)
    for changes in ({"train.kernels": "triton"}, {"train.reduce": "exact"}, {"data.sequence_length": "32"}):
        assert expected_seconds(config.override(changes), CPU, tmp_path) is None
    slow = SlowSteps(0.02)
    windows = [None, 0.1, 0.02, 0.1, None, 0.03, 0.1]
    warnings = [slow.warning(seconds and StepTimes(seconds, 1.0)) for seconds in windows]
    assert warnings[:5] == [None] * 5 and warnings[6] is None
    assert warnings[5].startswith("a step takes 30 ms, 1.5 times as long as when kernels were checked; ")


def test_encoder_checked_on_random_rows(tmp_path, cache, monkeypatch):
    """For fine-tuning and prediction, whatever the vocabulary."""
    changes = {"model.num_layers": 1, "model.max_positions": 16, "data.sequence_length": 16}
    shape = Config.preset("tiny", "modern").override(changes).model
    asked = []
    monkeypatch.setattr(kernel_choice, "resolve_kernels", lambda *args: asked.append(args) or (args[0], {"*": "x"}, []))
    compute, _ = resolve_encoder(shape, ComputeConfig("varlen", torch.bfloat16), torch.device("cuda"), 512, 3)
    ((config, _, folder),) = asked
    assert compute == ComputeConfig("varlen", torch.bfloat16, kernels=(("*", "x"),)) and folder is None
    assert (config.train.precision, config.model.attention) == ("bf16", "varlen")
    assert config.data.sequence_length == shape.max_positions and config.train.batch_size == 3
    messages = []
    slow = [(key, name) for key in ("gated_feed_forward:64", "geglu:64") for name in (REFERENCE, "kernel")]
    known = {key: Record(*key, 1.0) for key in slow}
    arguments = (type(objective_of(config)), "cpu", ComputeConfig("sdpa", torch.float32), 3, (), known)
    Checker(Request("operations", config, *arguments), messages.append).answer()
    records = [message for message in messages if isinstance(message, Record)]
    assert {"layer_norm:64", "rotary_qkv:64"} <= {record.operation for record in records}
    assert not any(record.problem for record in records)
