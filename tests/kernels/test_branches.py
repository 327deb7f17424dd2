"""Branches of a captured graph: each access to a tensor follows the accesses on other streams on which it depends.

Stand-ins for CUDA's streams and events have vector clocks. A mode observes each operator and the current stream.
"""

import contextlib
from collections import Counter, defaultdict

import pytest
import torch
from lib.kernel_cases import CASES, FP16
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from electra_fast.config.config import OptimizerConfig
from electra_fast.ops import branches
from electra_fast.ops.branches import Branch, on_branch, use_branches
from electra_fast.ops.operations import use_choices
from electra_fast.optimizers import rules
from electra_fast.optimizers.optimizer import Optimizer


class Stream:
    """A stream; its clock has the last operator of each stream that precedes the stream's next operator."""

    device = None

    def __init__(self, machine):
        self.machine = machine
        self.clock = Counter()

    def record_event(self):
        return Counter(self.clock)

    def wait_event(self, event):
        self.machine.num_waits += 1
        if self.machine.num_waits != self.machine.left_out:
            self.clock |= event


class Machine(TorchDispatchMode):
    """A device that skips the wait number `left_out`; `races` lists the operators."""

    def __init__(self, left_out=None):
        super().__init__()
        self.left_out = left_out
        self.num_waits = 0
        self.races = []
        self.alive = []
        self.current = Stream(self)
        # The last write to each storage, and the reads since then, as pairs of stream and number.
        self.writes = {}
        self.reads = defaultdict(list)
        self.streams = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs_of_call = func(*args, **(kwargs or {}))
        stream = self.current
        stream.clock[stream] += 1
        now = (stream, stream.clock[stream])
        self.streams.add(stream)
        written = [x for x, item in zip(args, func._schema.arguments, strict=False) if is_written(item)]
        storages = {x: storage(x) for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        outputs = [storage(x) for x in tree_iter(outputs_of_call) if isinstance(x, torch.Tensor)]
        changed = {storage(x) for x in tree_iter(written) if isinstance(x, torch.Tensor)}
        changed |= set(outputs) - set(storages.values())
        before = [self.writes[key] for key in storages.values() if key in self.writes]
        before += [item for key in changed for item in self.reads.pop(key, ())]
        if any(stream.clock[other] < number for other, number in before):
            self.races.append(func)
        self.writes |= dict.fromkeys(changed, now)
        for key in set(storages.values()) - changed:
            self.reads[key].append(now)
        self.alive += [args, kwargs, outputs_of_call]  # so that no storage is reused
        return outputs_of_call

    @contextlib.contextmanager
    def on(self, stream):
        previous = self.current
        self.current = stream
        yield
        self.current = previous


def is_written(argument):
    return argument.alias_info is not None and argument.alias_info.is_write


def storage(x):
    return x.untyped_storage()._cdata


def run(work, monkeypatch, left_out=None):
    """Runs work with branches; returns its tensors, which the first stream has read at the end, and the machine."""
    machine = Machine(left_out)
    with monkeypatch.context() as patch, machine, use_branches(True):
        patch.setattr(branches, "_sides", {})
        patch.setattr(torch.cuda, "Stream", lambda _: Stream(machine))
        patch.setattr(torch.cuda, "stream", machine.on)
        patch.setattr(torch.cuda, "current_stream", lambda: machine.current)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        outputs = work()
        for x in outputs:
            x.add(0)
    return outputs, machine


def sublayer(name, sizes, kernel="kernel"):
    call = CASES[name].call(torch.device("cpu"), FP16, *sizes)

    def work():
        with use_choices({"*": "kernel", call.key: kernel}):
            return call.outcome()

    return work


def muon():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*shape) for shape in ((8, 4), (4, 8), (8, 8), (8, 12), (12, 4))))
    config = OptimizerConfig(name="muon", learning_rate=0.1, muon_learning_rate=0.1)
    optimizer = Optimizer(model.named_parameters(), config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.set_step_scalars(1.0)
    assert len(optimizer.rule._stacks) > rules.NUM_LANES

    def work():
        optimizer.step()
        return [p.detach() for p in model.parameters()]

    return work


def network():
    """A network on a branch with parallel work; only a GPU runs its backward pass, by autograd, as a branch."""
    x = torch.ones(3, 3)

    def double(x):
        branch = Branch(torch.mul, x, 2.0)
        return x + 1, branch.result()

    def work():
        y, z = on_branch(double, x * 2)
        outputs = [y + z, x * 3]
        branches.join()
        return outputs

    return work


WORK = {
    "attention": lambda: sublayer("attention", (2, 16, 2, 16, 0.0)),
    "feed_forward": lambda: sublayer("feed_forward", (9, 16, 24, 0.0), "apart"),
    "gated_feed_forward": lambda: sublayer("gated_feed_forward", (9, 16, 24, False, 0.0), "apart"),
    "add_norm": lambda: sublayer("add_norm", (9, 16, 24, False, 0.0)),
    "linear": lambda: sublayer("linear", (9, 16, 24)),
    "muon": muon,
    "network": network,
}
# Waits that a later wait includes: for earlier calls on a stream, and for a network's forward pass.
NEEDLESS = {"attention": 1, "gated_feed_forward": 1, "muon": 2, "network": 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
@pytest.mark.parametrize("name", WORK)
def test_every_wait_of_branches_is_needed_and_sufficient(name, monkeypatch):
    expected = WORK[name]()()
    outputs, machine = run(WORK[name](), monkeypatch)
    assert not machine.races and len(machine.streams) > 1
    assert all(map(torch.equal, outputs, expected))
    needless = sum(not run(WORK[name](), monkeypatch, number)[1].races for number in range(1, machine.num_waits + 1))
    assert needless == NEEDLESS.get(name, 0) and machine.num_waits > 1
