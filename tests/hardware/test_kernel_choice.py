"""What a run does about kernels that are wrong, fail, hang, kill their process or are slow: it goes on without them."""

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
    # One network, which has few operations.
    return Config.preset("tiny", "google", "mlm").override(tiny | keys | run | changes)


def request_of(corpus, kind="operations", device="cpu", compute=None, num_rows=2, **given):
    config = small_config(corpus)
    compute = compute or ComputeConfig("sdpa", torch.float32)
    return Request(kind, config, type(objective_of(config)), device, compute, num_rows, **given)


class TestJudgment:
    """One operation, in this process."""

    @staticmethod
    def layer_norm_record(tiny_corpus, monkeypatch, launcher, device=None):
        monkeypatch.setattr(launchers, "layer_norm", launcher)
        told = []
        call = CASES["layer_norm"].call(CPU, torch.float32, 6, 8, True)
        checker = Checker(request_of(tiny_corpus), told.append)
        checker.device = device or checker.device
        checker._observe("layer_norm", ops.layer_norm.__wrapped__, call.args, {})
        first, reference, attempt, found = told
        assert (first, attempt) == (("layer_norm:8", REFERENCE), ("layer_norm:8", "kernel"))
        assert (reference.implementation, found.operation) == (REFERENCE, "layer_norm:8")
        assert reference.is_right
        return found

    @pytest.mark.parametrize(
        ("fault", "problem"),
        [
            ("none", ""),
            ("output", "its error is "),
            ("gradient", "its error is "),
            ("element", "its error is "),
            ("nan", "it gives nan, infinity, or results of another shape"),
            ("random", "two calls give different results"),
            ("compile", "AssertionError: CompilationError: at 12:4: cannot be compiled"),
        ],
    )
    def test_a_wrong_kernel_is_recognized_and_a_right_one_timed(
        self, tiny_corpus, tmp_path, monkeypatch, fault, problem
    ):
        found = self.layer_norm_record(tiny_corpus, monkeypatch, faulty(launchers.layer_norm, fault))
        assert found.problem.startswith(problem) and found.is_right == (not problem) == (not found.problem)
        assert found.milliseconds is None if problem else found.milliseconds > 0 and found.error < 1
        (tmp_path / FILE).write_text(checked(found).text())
        assert KernelCheck(IDENTITY).read(tmp_path / FILE)

    def test_an_error_that_the_device_does_not_survive_ends_the_process(self, tiny_corpus, monkeypatch, capsys):
        """Such as an illegal access; the parent finds what was tried, and the reason."""

        def dead(*_, **__):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(Checker, "_milliseconds", lambda *_, **__: 1.0)
        monkeypatch.setattr(torch, "zeros", dead)
        monkeypatch.setattr(kernel_check.os, "_exit", sys.exit)
        with pytest.raises(SystemExit):
            self.layer_norm_record(tiny_corpus, monkeypatch, dead, CUDA)
        assert capsys.readouterr().err.endswith("RuntimeError: CUDA error: an illegal memory access was encountered\n")

    def test_a_reference_that_fails_costs_one_operation(self, tiny_corpus, monkeypatch):
        def fail(*_):
            raise RuntimeError("no algorithm for these sizes\nmore")

        monkeypatch.setattr(ops, "layer_norm_reference", fail)
        told = []
        call = CASES["layer_norm"].call(CPU, torch.float32, 6, 8, True)
        found = Record("layer_norm:8", REFERENCE, problem="RuntimeError: no algorithm for these sizes")
        for known in ({}, {("layer_norm:8", REFERENCE): found}):
            Checker(request_of(tiny_corpus, known=known), told.append)._compare(call.key, call, {"kernel": call})
        assert told == [("layer_norm:8", REFERENCE), found]
        assert checked(told[1]).kernels == {"layer_norm:8": REFERENCE}
        assert list(checked(told[1]).lines(""))[1].endswith(f"{found.problem}; no kernel is used instead")

    def test_the_gpu_is_the_current_one_of_the_process(self, tiny_corpus, monkeypatch):
        """For Triton, which launches there."""
        done = []
        monkeypatch.setattr(torch.cuda, "set_device", done.append)
        monkeypatch.setattr(Checker, "_pass_rows", lambda checker: done.append("pass"))
        Checker(request_of(tiny_corpus, "attention", "cuda:3", SHORT), print).answer()
        assert done == [torch.device("cuda:3"), "pass"]

    def test_references_that_run_out_of_memory_get_fewer_rows(self, tiny_corpus, monkeypatch):
        tried = []
        told = []

        def pass_rows(checker):
            tried.append(checker.request.num_rows)
            checker.calls["a:8"] = tried[-1]
            if tried[-1] > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(Checker, "_pass_rows", pass_rows)
        Checker(request_of(tiny_corpus, compute=SHORT, num_rows=5), told.append).answer()
        assert tried == [5, 2, 1] and told == [Record("a:8", CALLS, calls=1)]


def checked(*records):
    return KernelCheck(IDENTITY, {(each.operation, each.implementation): each for each in records})


class TestChoice:
    def test_the_fastest_right_implementation_is_taken(self):
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
            "kernels checked in 9 s on NVIDIA Test, 2, 3: 3 of 6 operations by kernel; "
            "by reference, which is faster: b:8"
        )
        assert narrow == "warning: c:8 by narrow on NVIDIA Test, 2, 3: wrong; fused is used instead"
        assert kernel.endswith("wrong; reference is used instead")

    def test_attention_is_right_in_all_networks_and_fastest_over_all_layers(self):
        keys = ("self_attention:64", "self_attention:256", "self_attention:256:128")
        calls = [Record(key, CALLS, calls=number) for key, number in zip(keys, (12, 4, 8), strict=True)]
        times = {"short": (1.0, None, 1.0), "varlen": (1.0, 9.0, 1.0), "sdpa": (2.0, 2.0, 2.0)}
        check = checked(*calls, *(Record(keys[i], name, each[i]) for name, each in times.items() for i in range(3)))
        assert check.attention(["short", "varlen", "sdpa"]) == "sdpa"  # 48 ms, and 56
        assert check.attention(["short"]) is None
        others = checked(Record("self_attention:64:local", "short", 1.0), Record("self_attention:128", "varlen", 1.0))
        check.records |= others.records
        expected = {"self_attention:64": "kernel", "self_attention:256": REFERENCE, "self_attention:256:128": "kernel"}
        assert check.kernels == {"*": REFERENCE} | expected

    @pytest.mark.parametrize("problem", ["out of memory", f"its process ended ({describe_end(-9)})"])
    def test_what_failed_is_not_tried_again_unless_memory_ran_out(self, problem):
        others = Record("a:8", "kernel", problem="wrong"), Record("self_attention:8", "flex", problem="wrong")
        full = Record("step", "graph", problem=f"{problem}, RuntimeError: "), Record("step", "eager", 1.0)
        check = checked(*others, *full)
        check.answered = ["attention: flex", "operations: sdpa", "steps: graph", "steps: eager"]
        lasting = check.lasting()
        assert list(lasting.records.values()) == [*others, full[1]]
        assert lasting.answered == ["attention: flex", "operations: sdpa"]

    def test_on_other_cards_what_is_right_on_all_is_taken(self):
        first = checked(Record("a:8", REFERENCE, 2.0), Record("a:8", "kernel", 1.0), Record("b:8", "kernel", 1.0))
        other = checked(
            Record("a:8", REFERENCE, 2.0), Record("a:8", "kernel", 9.0), Record("b:8", "kernel", problem="no")
        )
        first.merge(other)
        assert first.kernels == {"a:8": REFERENCE, "b:8": REFERENCE}
        assert first.records["b:8", "kernel"].problem == "on NVIDIA Test: no"

    def test_kernels_can_be_given_by_operation(self):
        mode, given = parse_kernels("auto,generator_head=reference,corrupt=kernel")
        assert (mode, given) == ("auto", {"generator_head": REFERENCE, "corrupt": "kernel"})
        others = {"linear:8": "kernel"}
        found = kernel_choice._with(given, others | {"generator_head:8": "kernel", "generator_head:16": "kernel"})
        assert found == others | given
        for text, message in (
            ("triton,generator_heat=reference", "generator_heat is none of the operations add_norm, attention, "),
            ("auto,layer_norm:256=narrow", "layer_norm:256=narrow is none of reference, kernel"),
        ):
            with pytest.raises(ValueError, match=message):
                parse_kernels(text)
        with pytest.raises(ValueError, match='train.kernels = "fast" is not auto, triton or reference'):
            Config().override({"train.kernels": "fast"})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/electra-fast/kernels"


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """A function that makes kernels of child processes faulty."""
    shutil.copy(Path(__file__).parents[1] / "support/faulty_kernels.py", tmp_path / "sitecustomize.py")
    package = Path(ef.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{package}")
    return lambda **by_launcher: monkeypatch.setenv("FAULTS", json.dumps(by_launcher))


@pytest.mark.slow
@pytest.mark.usefixtures("hostile_folder")
def test_a_run_goes_on_without_kernels_that_end_hang_or_fail(tiny_corpus, tmp_path, cache, faults, monkeypatch):
    """In processes of their own; what they found is kept, for other runs too."""
    faults(embedding_norm="kill", layer_norm="hang", narrow_feed_forward="compile", generator_head="output")
    monkeypatch.setattr(kernel_choice, "PATIENCE_SECONDS", 12.0)
    config = small_config(tiny_corpus)
    run = tmp_path / "run"
    settled, kernels, lines = resolve_kernels(config, CPU, run)
    assert settled == config
    problems = {
        "embedding_norm:32 by kernel": "its process ended (killed by SIGSEGV)",
        "layer_norm:32 by kernel": "no result after 12 s",
        "feed_forward:64 by narrow": "AssertionError: CompilationError",
        "generator_head:32 by kernel": "its error is",
    }
    for what, problem in problems.items():
        (line,) = (each for each in lines if each.startswith(f"warning: {what} on cpu, "))
        assert f": {problem}" in line and line.endswith("; reference is used instead")
        assert kernels[what.partition(" ")[0]] == REFERENCE
    assert len(lines) == 1 + len(problems)
    assert {"bias_gelu:64", "linear:64"} <= kernels.keys()
    assert [each.read_text() for each in cache.glob("*")] == [(run / FILE).read_text()]
    monkeypatch.setattr(kernel_choice, "_Process", lambda: pytest.fail("asked again"))
    for folder in (run, tmp_path / "other"):
        assert resolve_kernels(config, CPU, folder)[1] == kernels


@pytest.mark.process
def test_a_check_is_kept_for_other_runs_of_the_same_card_and_shapes(tiny_corpus, tmp_path, cache, monkeypatch):
    config = small_config(tiny_corpus, **{"model.attention": "auto"})
    settled, kernels, lines = resolve_kernels(config, CPU, tmp_path / "run")
    assert settled.model.attention == "sdpa"
    assert lines[0].startswith("kernels checked in ") and len(lines) == 1
    monkeypatch.setattr(kernel_choice, "_Process", lambda: pytest.fail("asked again"))
    again = resolve_kernels(config, CPU, tmp_path / "other")
    assert again[:2] == (settled, kernels) and again[2][0].startswith("kernels checked before on ")
    assert (tmp_path / "other" / FILE).read_text() == (tmp_path / "run" / FILE).read_text()
    for other, is_fresh in ((config.override({"data.sequence_length": 32}), False), (config, True)):
        with pytest.raises(BaseException, match="asked again"):
            resolve_kernels(other, CPU, tmp_path / "third", is_fresh=is_fresh)


def test_an_attention_backend_that_was_asked_for_and_is_wrong_is_refused(tiny_corpus, tmp_path, cache):
    config = small_config(tiny_corpus)
    check = KernelCheck(kernel_choice.identity_of(config, CPU), answered=["attention: sdpa"])
    check.records["self_attention:64", "sdpa"] = Record("self_attention:64", "sdpa", problem="gives nan")
    (tmp_path / FILE).write_text(check.text())
    with pytest.raises(ValueError, match='model.attention = "sdpa" cannot be used on this GPU: gives nan; set "auto"'):
        resolve_kernels(config, CPU, tmp_path)


BUSY = "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "its process ended (exit code 1: no output)"),
        (
            "x: 1\nImportError: no library\nCompile with `TORCH_USE_CUDA_DSA`\n\n",
            "its process ended (exit code 1: ImportError: no l",
        ),
        (f"{BUSY}\nSearch for `cudaErrorDevicesUnavailable`\n", "the GPU admits one process at a time, which is this"),
    ],
)
def test_without_any_check_references_are_used(words, reason, tiny_corpus, tmp_path, cache, monkeypatch):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{words}END\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    config = small_config(tiny_corpus)
    settled, kernels, (line,) = resolve_kernels(config, CPU, tmp_path / "run")
    assert settled == config and kernels == {"*": REFERENCE} and not (tmp_path / "run").exists() and not cache.exists()
    assert line.startswith(f"warning: kernels could not be checked ({reason}") and "): references are used" in line


@pytest.mark.parametrize("lost", ["before a try", "out of time"])
def test_what_is_known_is_kept_when_the_check_ends_early(lost, tiny_corpus, tmp_path, cache, monkeypatch):
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
    assert lines[0].startswith("warning: the check of kernels ended early (lost): what it did not reach runs by ref")
    assert lines[1].startswith("kernels checked in 0 s on cpu") and len(lines) == 2
    check = KernelCheck(kernel_choice.identity_of(config, CPU))
    assert check.read(next(cache.glob("*"))) and check.answered == ["attention: sdpa"]


@pytest.mark.process
def test_a_stop_ends_the_check_and_records_nothing(tiny_corpus, tmp_path, cache, faults):
    faults(layer_norm="hang")
    with stop_requests() as stop, pytest.raises(Interrupted, match="interrupted while kernels were checked"):
        timer = threading.Timer(0.1, setattr, (stop, "signal", signal.SIGUSR1))
        timer.start()
        resolve_kernels(small_config(tiny_corpus), CPU, tmp_path / "run")
    assert not (tmp_path / "run").exists() and not cache.exists()


def test_ranks_agree(tiny_corpus, tmp_path, cache, monkeypatch):
    """The second rank has another card, on which a kernel is wrong."""
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

        def all_gather_object(self, own):
            return [own, other if isinstance(own, KernelCheck) else other.identity]

        def agree(self, work):
            return work()

    assert agree_on_kernels(config, CPU, {"a:8": "kernel"}, tmp_path, World())["a:8"] == REFERENCE
    other.identity = check.identity
    assert agree_on_kernels(config, CPU, {"a:8": "kernel"}, tmp_path, World()) == {"a:8": "kernel"}


def test_questions_are_about_the_gpu_at_hand(tiny_corpus, tmp_path, monkeypatch):
    """Attention first, compared with `sdpa` whatever would run; operations and steps with the backend chosen.

    The cache cannot be written.
    """
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    asked = []

    class Process:
        has_answered = True
        kill = send = lambda self, *request: asked.extend(request)

        def receive(self, seconds):
            if asked[-1].what != "attention" or asked[-1] in asked[:-1]:
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
    questions = {each.kind: (each.compute.attention, each.candidates) for each in asked}
    assert questions == {
        "attention": ("sdpa", ("short", "varlen", "sdpa", "flex")),
        "operations": ("varlen", ("varlen",)),
        "steps": ("varlen", ("eager", "graph", "branches")),
    }
    assert {each.device for each in asked} == {"cuda:3"} and {each.compute.dtype for each in asked} == {torch.bfloat16}
    assert (settled.model.attention, settled.train.execution) == ("varlen", "eager")
    assert asked[-1].time_steps is print
    assert asked[-1].compute.kernels == tuple(kernels.items()) == (("*", REFERENCE),)


@pytest.mark.parametrize(
    ("graph", "branches", "backend", "expected"),
    [
        (1.001, 1.001, "sdpa", "branches"),
        (1.001, 1.0010001, "sdpa", "graph"),  # some bit differs: a branch has not waited
        (1.001, 1.002, "varlen", "branches"),  # whose own gradients differ between two runs
        (1.001, 1.1, "varlen", "graph"),
        (2.0, 1.0, "sdpa", "eager"),
    ],
)
def test_branches_are_compared_with_the_graph_without_them(tiny_corpus, graph, branches, backend, expected):
    """To the bit, if the attention is deterministic; by a process that has timed the others, too, or another one."""
    losses = {"eager": 1.0, "graph": graph, "branches": branches}
    times = {"eager": 3.0, "graph": 2.0, "branches": 1.0}

    def time_steps(config, compute, execution, device, num_steps):
        return [times[execution]] * num_steps, {"loss": losses[execution]}

    assert compute_module.BACKENDS["sdpa"].is_deterministic and not compute_module.BACKENDS["varlen"].is_deterministic
    compute = ComputeConfig(backend, torch.float32)
    told = []
    request = request_of(tiny_corpus, "steps", compute=compute, candidates=tuple(losses), time_steps=time_steps)
    Checker(request, told.append).answer()
    found = [each for each in told if isinstance(each, Record)]
    assert checked(*found).execution == expected
    if found[1].is_right:
        known = {(each.operation, each.implementation): each for each in found[:2]}
        again = replace(request, known=known)
        Checker(again, told.append).answer()
        assert told[-1] == found[2]


def test_branches_that_lack_memory_cost_no_warning():
    problem = "out of memory, OutOfMemoryError: "
    check = checked(Record("step", "graph", 1.0), Record("step", "branches", problem=problem))
    assert check.execution == "graph" and not any("memory" in line for line in check.lines("now"))


def test_steps_that_are_much_slower_than_in_the_check_are_one_warning(tiny_corpus, tmp_path):
    """Slower than what was chosen, or than all kernels if those are faster: a step may have lost one."""
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
    found = [slow.warning(seconds and StepTimes(seconds, 1.0)) for seconds in windows]
    assert found[:5] == [None] * 5 and found[6] is None
    assert found[5].startswith("a step takes 30 ms, 1.5 times what it took when kernels were checked; ")


def test_an_encoder_is_checked_on_rows_of_its_own(tmp_path, cache, monkeypatch):
    """For fine-tuning and prediction; whatever its vocabulary."""
    changes = {"model.num_layers": 1, "model.max_positions": 16, "data.sequence_length": 16}
    shape = Config.preset("tiny", "modern").override(changes).model
    asked = []
    monkeypatch.setattr(kernel_choice, "resolve_kernels", lambda *args: asked.append(args) or (args[0], {"*": "x"}, []))
    compute, _ = resolve_encoder(shape, ComputeConfig("varlen", torch.bfloat16), torch.device("cuda"), 512, 3)
    ((config, _, folder),) = asked
    assert compute == ComputeConfig("varlen", torch.bfloat16, kernels=(("*", "x"),)) and folder is None
    assert (config.train.precision, config.model.attention) == ("bf16", "varlen")
    assert config.data.sequence_length == shape.max_positions and config.train.batch_size == 3
    told = []
    slow = [(each, name) for each in ("gated_feed_forward:64", "geglu:64") for name in (REFERENCE, "kernel")]
    known = {key: Record(*key, 1.0) for key in slow}
    arguments = (type(objective_of(config)), "cpu", ComputeConfig("sdpa", torch.float32), 3, (), known)
    Checker(Request("operations", config, *arguments), told.append).answer()
    assert {"layer_norm:64", "rotary_qkv:64"} <= {each.operation for each in told if isinstance(each, Record)}
    assert not any(isinstance(each, Record) and each.problem for each in told)
