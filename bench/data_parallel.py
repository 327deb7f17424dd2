"""The cost of several ranks, compared with one process and with DistributedDataParallel on the same model.

    python bench/data_parallel.py [--shape mini] [--ranks 2] [--rounds 9] [--section.key X] [--results FILE] [--quick]

Every way trains the same model on the same rows: one process with one thread; one process with helpers
(`step_processes`, on a CPU); ranks with `train.reduce` fast and exact and with `train.sharding` full; and, as a user
would write it, our objective and optimizer with torch's DistributedDataParallel (`gradient_as_bucket_view`,
`static_graph`, default buckets). With several GPUs each has a rank, messages are NCCL's, and our steps are graphs,
those of FSDP and DDP eager. Without a GPU each rank has one thread, messages are gloo's, and numbers fp32.

All ways live in the same processes and take turns, in this order and its reverse, so that a busy machine hits all
alike. A turn takes as long as the slowest rank; reported are medians over the rounds, of ratios too. "CPU" is what all
ranks computed in a step. "off CPU" is how long a rank's main thread did not: it waited for another rank, for a message
or, on a busy machine, for a core, as the first line shows. "in World" is the part in our own messages on the host;
those of FSDP and DDP are torch's. "MB sent" is what a rank wrote to sockets and pipes in a step, or with NCCL what
rings send. Loss and gradient norm of the step before the first turn must agree, in which updates show.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from lib.cpu_worker import cpu_seconds, processes
from lib.results import Results, parse_arguments, processor
from lib.workload import label, make_corpus, shape
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import electra_fast as ef
from electra_fast.model.compute import choose_compute, choose_device
from electra_fast.model.model import BertLayer, ModernLayer
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey
from electra_fast.optimizers.optimizer import Optimizer, lr_scale
from electra_fast.optimizers.shards import Shards
from electra_fast.training.division import NUM_EXACT_GROUPS
from electra_fast.training.launch import Launch
from electra_fast.training.parallel_step import create_step
from electra_fast.training.sharding import shard_model
from electra_fast.training.step import GRAD_NORM, choose_execution
from electra_fast.training.step_processes import choose_num_processes
from electra_fast.training.world import World

# Steps before the first turn (ours captures after three), and of a turn.
WARM_UP, PER_TURN = {"cpu": 3, "cuda": 6}, {"cpu": 1, "cuda": 20}
ALONE, DDP = "1 process, 1 thread", "DistributedDataParallel"
HEADER = "way | tokens/s | step ms | x 1 process | x DDP | CPU ms | off CPU ms | in World ms | MB sent | loss | norm"
ROW = "| {} | {:,.0f} | {:,.1f} | {:.2f} | {:.2f} | {:,.0f} | {:,.1f} | {:,.1f} | {:,.1f} | {:.4f} | {:.4f} |"


class Ours:
    """Our step on one of its ranks, as in `Trainer`."""

    def __init__(self, config: ef.Config, corpus: Path, world: World, num_processes: int = 1) -> None:
        device, sharding = choose_device(), config.train.sharding
        model, compute = ef.Electra(config).to(device), choose_compute(config, device)
        shards, wrap = None, None
        if sharding == "full":
            wrap = shard_model(model, world.mesh(device.type)).run
            shards = Shards(model)
        named = model.named_parameters() if shards is None else shards.parameters.items()
        optimizer = Optimizer(named, config.optimizer, shards=shards, matrix_dtype=compute.dtype)
        execution = choose_execution("auto", device, sharding)
        self.train_step = create_step(model, optimizer, config, compute, execution, num_processes, world, shards, wrap)
        self.batches = ef.BatchLoader.from_config(config, corpus=corpus, rank=world.rank, world_size=world.size)
        self.world, self.numbers = world, itertools.count()

    def step(self) -> None:
        """Takes the next step."""
        self.train_step(next(self.batches), next(self.numbers))

    def outcome(self) -> tuple[float, float]:
        """Takes a step; its loss and gradient norm."""
        self.train_step.set_totals({})
        self.step()
        totals = self.train_step.read_totals()
        return float(self.train_step.objective.metrics(totals)["loss"] or 0), totals[GRAD_NORM]


class Loss(nn.Module):
    """The loss as a module's forward pass, which DDP needs."""

    def __init__(self, config: ef.Config, device: torch.device) -> None:
        super().__init__()
        self.model, self.objective = ef.Electra(config).to(device).train(), objective_of(config)
        self.compute = choose_compute(config, device)

    def forward(self, batch: Mapping[str, Tensor], key: RngKey, denominators: Mapping[str, Tensor]) -> Tensor:
        """The loss of a rank's rows, divided by the denominators of all."""
        return self.objective.forward(self.model, MicroBatch(batch, self.compute, key, denominators)).loss


class Peer:
    """The same step with DistributedDataParallel."""

    def __init__(self, config: ef.Config, corpus: Path, world: World) -> None:
        self.config, self.device = config, choose_device()
        self.loss = Loss(config, self.device)
        self.ddp = DistributedDataParallel(self.loss, gradient_as_bucket_view=True, static_graph=True)
        named, dtype = self.loss.model.named_parameters(), self.loss.compute.dtype
        self.optimizer = Optimizer(named, config.optimizer, matrix_dtype=dtype)
        self.batches = ef.BatchLoader.from_config(config, corpus=corpus, rank=world.rank, world_size=world.size)
        self.world, self.numbers = world, itertools.count()

    def step(self) -> tuple[Tensor, Tensor]:
        """Takes the next step; the loss of this rank's rows and the gradient norm."""
        train, number, size = self.config.train, next(self.numbers), self.world.size
        batch = ef.to_torch(next(self.batches), device=self.device)
        denominators = self.loss.objective.loss_denominators(batch)
        sums = torch.stack(list(denominators.values()))
        dist.all_reduce(sums)
        key = RngKey(torch.tensor([train.seed, number], device=self.device), train.batch_size * self.world.rank // size)
        self.optimizer.zero_grad()
        loss = self.ddp(batch, key, dict(zip(denominators, sums.unbind(), strict=True)))
        (loss * size).backward()  # DDP averages
        self.optimizer.set_step_scalars(lr_scale(self.config.optimizer, number, train.steps))
        return loss.detach(), self.optimizer.step()

    def outcome(self) -> tuple[float, float]:
        """Takes a step; its loss and gradient norm."""
        loss, norm = self.step()
        dist.all_reduce(loss)
        return loss.item(), norm.item()


def contenders(config: ef.Config, corpus: Path, world: World) -> dict[str, Ours | Peer | None]:
    """All ways on this rank by name; None where only the first rank has one."""
    num_processes, ranks = choose_num_processes(config, choose_device()), f"{world.size} ranks"
    torch.set_num_threads(1)
    alone = {ALONE: 1} | ({f"1 process, helpers: {num_processes - 1}": num_processes} if num_processes > 1 else {})
    found: dict[str, Ours | Peer | None] = {
        name: Ours(config, corpus, World(), number) if world.is_first else None for name, number in alone.items()
    }
    changes = {"fast": {}, "sharded": {"train.sharding": "full"}}
    if NUM_EXACT_GROUPS % world.size == 0:
        changes["exact"] = {"train.reduce": "exact"}
    found |= {f"{ranks}, {name}": Ours(config.override(each), corpus, world) for name, each in changes.items()}
    return found | {f"{ranks}, {DDP}": Peer(config, corpus, world)}


def usage(world: World) -> Tensor:
    """Seconds: of the clock, of this thread, of this process and its helpers, of waits; bytes written; fp64 [5]."""
    own = set(processes()) - {str(rank.pid) for rank in multiprocessing.active_children()}
    written = int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])
    seconds = [time.perf_counter(), time.thread_time(), sum(map(cpu_seconds, own)), world.wait_seconds]
    return torch.tensor([*seconds, written], dtype=torch.float64)


def turn(contender: Ours | Peer | None, world: World, num_steps: int) -> Tensor:
    """Usage of each rank per step of a turn, from when all had arrived; [ranks, 5]."""
    world.all_gather(torch.zeros(1, dtype=torch.float64))
    before = usage(world)
    if contender is not None:
        for _ in range(num_steps):
            contender.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return world.all_gather((usage(world) - before) / num_steps)


def ring_bytes(name: str, config: ef.Config, num_ranks: int) -> float:
    """Bytes that a rank sends in a step by rings: all gradients, and each layer's parameters if sharded."""
    modules = (m for m in ef.Electra(config).modules() if isinstance(m, ef.Electra | BertLayer | ModernLayer))
    size, *layers = (sum(p.numel() for p in module.parameters()) for module in modules)
    return 4 * (2 * size + (sum(layers) if "sharded" in name else 0)) * (num_ranks - 1) / num_ranks


def measure(options: argparse.Namespace, config: ef.Config, corpus: Path, world: World, results: Results) -> None:
    """Warms all ways up and lets them take their turns; the first rank prints and saves a line for each."""
    ways, kind = contenders(config, corpus, world), options.device.type
    for contender in ways.values():
        turn(contender, world, WARM_UP[kind])
    outcomes = {name: contender.outcome() for name, contender in ways.items() if contender is not None}
    turns: dict[str, list[Tensor]] = {name: [] for name in ways}
    for number in range(options.rounds):
        for name in reversed(ways) if number % 2 else ways:
            turns[name].append(turn(ways[name], world, PER_TURN[kind]))
    if not world.is_first:
        return
    # Relative, of loss and norm; bf16 rounds by the division of the rows (7e-5 and 3e-3 on a CPU).
    tolerances = (1e-4, 1e-4) if config.train.precision == "fp32" else (1e-3, 1e-2)
    used = {name: torch.stack(each) for name, each in turns.items()}
    seconds = {name: each[:, :, 0].amax(1) for name, each in used.items()}
    title = f"{label(config, options.shape)}, {world.size} ranks, {options.rounds} rounds, {results.facts['card']}"
    print(f"{title}\n\n| {HEADER} |\n" + "| --- " * (HEADER.count("|") + 1) + "|", flush=True)
    for name, (loss, norm) in outcomes.items():
        num_ranks, step = (1 if name.startswith("1 process") else world.size), seconds[name].quantile(0.5).item()
        clock, own, computed, waited, written = used[name][:, :num_ranks].unbind(-1)
        found = {
            "tokens_per_second": config.train.batch_size * config.data.sequence_length / step,
            "step_ms": 1e3 * step,
            "times_one_process": (seconds[ALONE] / seconds[name]).quantile(0.5).item(),
            "times_ddp": (seconds[f"{world.size} ranks, {DDP}"] / seconds[name]).quantile(0.5).item(),
            "cpu_ms": 1e3 * computed.sum(1).mean().item(),
            "off_cpu_ms": 1e3 * (clock - own).mean(1).quantile(0.5).item(),
            "in_world_ms": 1e3 * waited.mean(1).quantile(0.5).item(),
            "mb_sent": (written.mean().item() if kind == "cpu" else ring_bytes(name, config, num_ranks)) / 1e6,
            "loss": loss,
            "gradient_norm": norm,
        }
        ok = all(abs(a / b - 1) < c for a, b, c in zip((loss, norm), outcomes[ALONE], tolerances, strict=True))
        facts = {"shape": options.shape, "overrides": options.overrides, "ranks": num_ranks, "way": name}
        results.add(ROW.format(name, *found.values()), ok=ok, **facts, **found, rounds=seconds[name].tolist())


def run_rank(rank: int, port: int, options: argparse.Namespace, config: ef.Config, corpus: Path) -> int:
    """One rank; the exit code."""
    size = options.ranks
    launch = Launch(rank=rank, world_size=size, local_rank=rank, local_world_size=size, address="127.0.0.1", port=port)
    card = f"{processor()}, {len(os.sched_getaffinity(0))} cores" if options.device.type == "cpu" else None
    results = Results(options.results, options.device, card)
    with World.join(launch, options.cache, timeout_seconds=600) as world:
        measure(options, config, corpus, world, results)
    return results.exit_code()


def main() -> int:
    """Starts the ranks, of which this process is the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--shape", help="preset, or preset:rows per step; mini")
    parser.add_argument("--ranks", type=int, default=2, help="without a GPU; otherwise there is one per GPU")
    parser.add_argument("--rounds", type=int, help="in which each way takes a turn; 9")
    options = parse_arguments(parser, with_overrides=True, for_cpu=True)
    options.device, num_gpus = choose_device(), torch.cuda.device_count()
    if num_gpus == 1:
        print("one GPU, and a rank needs one of its own: nothing is measured; CUDA_VISIBLE_DEVICES= measures the CPU")
        return 0
    options.ranks, options.rounds = num_gpus or options.ranks, options.rounds or (3 if options.quick else 9)
    options.shape = options.shape or ("tiny:8" if options.quick else "mini")
    changes = {"optimizer.warmup_steps": "10", "train.precision": "auto" if num_gpus else "fp32"}
    config = shape(options.shape, changes | options.overrides)
    corpus = make_corpus(options.cache, 300 if options.quick else 4000)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        arguments = (listener.getsockname()[1], options, config, corpus)
    process = multiprocessing.get_context("spawn").Process
    others = [process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(1, options.ranks)]
    for other in others:
        other.start()
    code = run_rank(0, *arguments)
    for other in others:
        other.join()
    return code


if __name__ == "__main__":
    sys.exit(main())
