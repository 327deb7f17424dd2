"""A model whose parameters are divided over processes trains, evaluates, updates and is saved as a whole one.

Tests start a process that imports torch and forks as many as are wanted; these run the checks below, which compare with
the whole model in every process.
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import subprocess
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from test_electra import COMPUTE, LOCAL, make_batch, make_config, make_model
from torch.distributed.device_mesh import init_device_mesh
from variants import VARIANTS

from electra_fast.data.loader import padding_row
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey
from electra_fast.optimizers.optimizer import Optimizer, global_norm
from electra_fast.optimizers.shards import Shards, local_rows
from electra_fast.training.sharding import shard_model

ROWS, STEPS = 8, 3
# How many of a step's rows each of two processes has.
DIVISIONS = ([5, 3], [8, 0])
MODERN, ALL = {"model.architecture": "modern"}, {"model.tying": "all", "generator.fraction": "1.0"}
CASES = {
    "bert": {},
    "bert, tying none": {"model.tying": "none"},
    "bert, tying all": ALL,
    "modern": MODERN,
    "modern, tying all": MODERN | ALL,
    "local attention": LOCAL,
    "mlm": VARIANTS["mlm"],
    "mlm, modern": MODERN | VARIANTS["mlm"],
    "all-tokens-mlm": VARIANTS["all-tokens-mlm"],
    "adversarial": VARIANTS["adversarial"],
    "unigram": VARIANTS["unigram"],
}
SECONDS = 600


def settings(changes, **more):
    fast = {"optimizer.learning_rate": "1e-3", "optimizer.bias_correction": "true", "train.steps": "6"}
    return make_config(**fast | changes | more)


def run_processes(num_processes, *checks):
    """Runs checks of this module, names and arguments, in several processes, and ends all when one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_processes),
    }
    command = [sys.executable, __file__, json.dumps(checks)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout.decode()


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def part(batch, rows):
    return {name: each[rows] for name, each in batch.items() if name != "cu_seqlens"} | {"cu_seqlens": None}


def set_stage(model, stage):
    model.train().requires_grad_(True)
    for name in stage.frozen:
        model.get_submodule(name).eval().requires_grad_(False)


def key(step, first_row=0):
    return RngKey(torch.tensor([7, step]), first_row)


class Whole:
    """Training of one process."""

    def __init__(self, config):
        self.model = make_model(config)
        self.optimizer = Optimizer(self.model.named_parameters(), config.optimizer)

    def follow(self):
        pass

    def evaluate(self, objective, batch, step):
        return objective.forward(self.model, MicroBatch(batch, COMPUTE, key(step), objective.loss_denominators(batch)))

    def gradients(self, objective, batch, step):
        self.optimizer.zero_grad()
        loss = objective.forward(
            self.model, MicroBatch(batch, COMPUTE, key(step), objective.loss_denominators(batch))
        ).loss
        loss.backward()
        return loss.item(), global_norm(self.optimizer.gradients().values())

    def parameters(self):
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


class Sharded:
    """The same by several processes, of which each has some rows of a batch."""

    def __init__(self, config, division, accumulate):
        self.model = make_model(config)
        self.root = shard_model(self.model, mesh())
        self.shards = Shards(self.model)
        self.optimizer = Optimizer(self.shards.parameters.items(), config.optimizer)
        first, own = sum(division[: dist.get_rank()]), division[dist.get_rank()]
        most = -(-max(division) // accumulate)
        edges = [first + min(i * most, own) for i in range(accumulate + 1)]
        self.micro_batches = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]

    def follow(self):
        self.shards.follow()

    def evaluate(self, objective, batch, step):
        run = self.root.run(objective.forward)
        return run(self.model, MicroBatch(batch, COMPUTE, key(step), objective.loss_denominators(batch)))

    def gradients(self, objective, batch, step):
        self.shards.zero_grad()
        loss = torch.zeros(())
        for rows in self.micro_batches:
            rows_or_padding = part(batch, rows) if rows.stop > rows.start else padding_row(part(batch, rows))
            denominators = objective.loss_denominators(batch)
            run = self.root.run(objective.forward)
            output = run(self.model, MicroBatch(rows_or_padding, COMPUTE, key(step, rows.start), denominators))
            output.loss.backward()
            loss += output.loss.detach()
        self.shards.take_gradients()
        dist.all_reduce(loss)
        return loss.item(), self.shards.global_norm(self.optimizer.gradients().values())

    def parameters(self):
        return gathered(self.shards, self.shards.parameters)


def gathered(shards, locals_):
    """Whole tensors, in every process."""
    found = {name: shards.gather(name, local) for name, local in locals_.items()}
    if dist.get_rank():
        assert not any(whole is not None for whole in found.values())
        found = {name: torch.empty(shape) for name, shape in shards.shapes.items()}
    for whole in found.values():
        dist.broadcast(whole, 0)
    return found


def trained(training, config, num_steps):
    """Losses, norms and evaluations of some steps, and the parameters after each; stages change as in a run."""
    objective, stage, found = objective_of(config), None, []
    for step in range(num_steps):
        if objective.stage(step) != stage:
            if stage is not None:
                objective.stage(step).objective.begin_stage(training.model)
            stage = objective.stage(step)
            set_stage(training.model, stage)
            training.follow()
            training.optimizer.reset()
        training.model.eval()
        with torch.no_grad():
            evaluation = training.evaluate(stage.objective, make_batch(ROWS, seed=50 + step), step)
        set_stage(training.model, stage)
        loss, norm = training.gradients(stage.objective, make_batch(ROWS, seed=step), step)
        training.optimizer.set_step_scalars(1.0)
        training.optimizer.step(norm)
        found.append(([loss, norm.item(), evaluation.loss.item()], training.parameters()))
    return found


def assert_same(found, expected):
    for (numbers, parameters), (expected_numbers, expected_parameters) in zip(found, expected, strict=True):
        assert numbers == pytest.approx(expected_numbers, rel=1e-5)
        assert parameters.keys() == expected_parameters.keys()
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, expected_parameters[name], rtol=0, atol=1e-5, msg=name)


def check_training(name):
    config = settings(CASES[name])
    expected = trained(Whole(config), config, STEPS)
    for accumulate, division in enumerate(DIVISIONS, 1):
        assert_same(trained(Sharded(config, division, accumulate), config, STEPS), expected)


def check_stages():
    """Parts are frozen and thawed, and one part is copied to another."""
    config = settings(VARIANTS["two-stage"])
    division = DIVISIONS[0]
    assert_same(trained(Sharded(config, division, 1), config, 6), trained(Whole(config), config, 6))


def check_repeats():
    config, division = settings(MODERN), DIVISIONS[0]
    (first, ours), (second, theirs) = (trained(Sharded(config, division, 2), config, 2)[-1] for _ in range(2))
    assert first == second and all(torch.equal(ours[name], theirs[name]) for name in ours)


def check_transfers(changes):
    """Rows are where `local_rows` says, also of tensors with fewer rows than processes, and go there and back."""
    config = settings(changes, **{"model.vocab_size": "51"})
    whole = {name: parameter.detach() for name, parameter in make_model(config).named_parameters()}
    model, rank, num_processes = make_model(config), dist.get_rank(), dist.get_world_size()
    root = shard_model(model, mesh())
    shards = Shards(model)
    assert list(shards.shapes) == list(whole) and any(len(x) < 4 for x in whole.values())
    for name, x in whole.items():
        assert shards.rows(name) == local_rows(len(x), rank, num_processes)
        assert torch.equal(shards.parameters[name], x[shards.rows(name)])
    objective, batch = objective_of(config), make_batch()
    micro_batch = MicroBatch(batch, COMPUTE, key(0), objective.loss_denominators(batch))
    run = root.run(objective.forward)
    with torch.no_grad():
        before = run(model, micro_batch).loss
    tripled = gathered(shards, {name: 3 * parameter for name, parameter in shards.parameters.items()})
    moments = {name: torch.full_like(parameter, torch.nan) for name, parameter in shards.parameters.items()}
    for name, x in whole.items():
        assert torch.equal(tripled[name], 3 * x)
        shards.scatter(name, 3 * x if rank == 0 else None, moments[name])
        shards.scatter(name, 2 * x if rank == 0 else None, shards.parameters[name])
        assert torch.equal(moments[name], 3 * x[shards.rows(name)])
    # What is written to the shards is what the model computes with.
    expected = make_model(config)
    with torch.no_grad():
        assert before == objective.forward(expected, micro_batch).loss
        for parameter in expected.parameters():
            parameter.mul_(2)
        assert run(model, micro_batch).loss == objective.forward(expected, micro_batch).loss != before
    if rank == 0:
        with pytest.raises(ValueError, match=r"embeddings.token is \[51, 32\], but its new value is \[2, 2\]"):
            name = next(name for name in whole if name.endswith("embeddings.token"))
            shards.scatter(name, torch.zeros(2, 2), moments[name])


def check_owners():
    whole = {name: parameter.detach() for name, parameter in make_model(settings({})).named_parameters()}
    model = make_model(settings({}))
    shard_model(model, mesh())
    shards = Shards(model)
    owners = shards.assign_owners({name: float(x.numel()) for name, x in whole.items()})
    loads = [
        sum(whole[name].numel() for name in owners if owners[name] == rank) for rank in range(dist.get_world_size())
    ]
    assert max(loads) - min(loads) < max(x.numel() for x in whole.values())
    own = shards.to_owners({name: x[shards.rows(name)] for name, x in whole.items()}, owners)
    assert own.keys() == {name for name in owners if owners[name] == dist.get_rank()}
    assert all(torch.equal(x, whole[name]) for name, x in own.items())
    back = shards.from_owners({name: 2 * x for name, x in own.items()}, owners)
    assert back.keys() == whole.keys()
    assert all(torch.equal(x, 2 * whole[name][shards.rows(name)]) for name, x in back.items())


def check_updates(name):
    """LAMB's norms of fused matrices, and Muon's whole ones, of which processes hold rows cut anywhere."""
    for changes in ({}, MODERN):
        config = settings(changes, **{"optimizer.name": name, "optimizer.clip_norm": "0.5"})
        whole, model = make_model(config), make_model(config)
        shard_model(model, mesh())
        shards = Shards(model)
        ours = Optimizer(shards.parameters.items(), config.optimizer, shards=shards)
        theirs = Optimizer(whole.named_parameters(), config.optimizer)
        random = torch.Generator().manual_seed(3)
        for _ in range(STEPS):
            for at, parameter in whole.named_parameters():
                parameter.grad = torch.randn(parameter.shape, generator=random) / 10
                shards.parameters[at].grad = parameter.grad[shards.rows(at)].clone()
            norm = shards.global_norm(ours.gradients().values())
            for optimizer in (ours, theirs):
                optimizer.set_step_scalars(1.0)
            assert theirs.step().item() == pytest.approx(ours.step(norm).item(), rel=1e-6)
        found = gathered(shards, shards.parameters)
        for at, parameter in whole.named_parameters():
            torch.testing.assert_close(found[at], parameter.detach(), rtol=0, atol=1e-6, msg=at)


def test_trains_as_one_process_does():
    trainings = [("check_training", name) for name in CASES]
    run_processes(2, *trainings, ("check_stages",), ("check_repeats",))


@pytest.mark.parametrize("num_processes", [1, 3])
def test_tensors_and_updates_are_those_of_whole_parameters(num_processes):
    transfers = [("check_transfers", changes) for changes in ({}, ALL)]
    updates = [("check_updates", name) for name in ("adamw", "lamb", "muon")]
    run_processes(num_processes, *transfers, ("check_owners",), *updates)


@pytest.mark.parametrize("name", [*VARIANTS, "local attention", "modern"])
def test_a_row_of_padding_counts_for_nothing_and_has_all_gradients(name):
    config = make_config(**VARIANTS.get(name) or CASES[name])
    model, objective = make_model(config).train(), objective_of(config)
    row = padding_row(part(make_batch(), slice(0, 0)))
    assert all(value == 0 for value in objective.loss_denominators(row).values())
    denominators = objective.loss_denominators(make_batch())
    output = objective.forward(model, MicroBatch(row, COMPUTE, RngKey(torch.tensor([1, 2]), 3), denominators))
    output.loss.backward()
    assert output.loss == 0 and all(value == 0 for value in output.totals.values())
    for at, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), at


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 51])
def test_rows_are_divided_as_torch_divides_chunks(num_rows):
    for num_processes in (1, 2, 3, 4, 8):
        chunks = [chunk.tolist() for chunk in torch.arange(num_rows).chunk(num_processes)]
        found = [list(range(num_rows))[local_rows(num_rows, rank, num_processes)] for rank in range(num_processes)]
        assert found == chunks + [[]] * (num_processes - len(chunks))


def run_checks(rank, checks):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for check, *arguments in checks:
        print(check, *arguments, flush=True)
        globals()[check](*arguments)
    dist.destroy_process_group()


def fork_and_wait(num_processes, checks):
    """The exit codes; where one fails or hangs, all end."""
    fork, end = multiprocessing.get_context("fork"), time.monotonic() + SECONDS
    processes = [fork.Process(target=run_checks, args=(rank, checks)) for rank in range(num_processes)]
    for process in processes:
        process.start()
    running = [process.sentinel for process in processes]
    while running and time.monotonic() < end and not any(process.exitcode for process in processes):
        for ended in multiprocessing.connection.wait(running, timeout=1):
            running.remove(ended)
    for process in processes:
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


if __name__ == "__main__":
    import torch._dynamo  # what every rank would import later, in seconds

    sys.exit(any(fork_and_wait(int(os.environ["WORLD_SIZE"]), json.loads(sys.argv[1]))))
