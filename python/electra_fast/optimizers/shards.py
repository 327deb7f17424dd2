"""The rows of a sharded model's parameters that a process holds, as ordinary tensors.

The optimizer and checkpoints use these rows and the transfers here, so they do not depend on FSDP. All processes must
make the same calls in the same order.

Shapes: L row length, K blocks of a fused parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_FIRST = 0  # the process that reads and writes files


def local_rows(num_rows: int, rank: int, num_processes: int) -> slice:
    """Returns the rows (dimension 0) of a parameter that a process holds, possibly none, as in `torch.chunk`."""
    size = -(-num_rows // num_processes)
    return slice(min(rank * size, num_rows), min((rank + 1) * size, num_rows))


def assign_owners(costs: Mapping[str, float], num_processes: int) -> dict[str, int]:
    """Assigns each name to a process so that costs are about equal, with the same result on all processes."""
    owners = {}
    loads = [0.0] * num_processes
    for name in sorted(costs, key=lambda name: costs[name], reverse=True):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += costs[name]
    return owners


class Shards:
    """The rows of a sharded model's parameters that this process holds, and sums and transfers over all processes.

    `parameters` has them by name, shared ones once, as leaves in the model's memory, so in-place updates change the
    model. `take_gradients` copies the model's gradients to them, `follow` its `requires_grad`. `shapes` has the shapes
    of the whole parameters. Below, "local" means a process's rows of a parameter, its gradient or a moment.

    Args:
        model: A model sharded by FSDP2 (`distributed.sharding.shard_model`), before its first forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        # DTensors, stored here because `model.named_parameters` returns others while they are gathered.
        self._sharded: dict[str, Any] = dict(model.named_parameters())
        mesh = next(iter(self._sharded.values())).device_mesh
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.num_processes = mesh.size()
        self.shapes = {name: parameter.shape for name, parameter in self._sharded.items()}
        self.parameters = {
            name: nn.Parameter(parameter.to_local().detach()) for name, parameter in self._sharded.items()
        }
        self.follow()

    def follow(self) -> None:
        """Copies `requires_grad` from the model; call it after freezing or unfreezing parameters."""
        for name, sharded in self._sharded.items():
            self.parameters[name].requires_grad_(sharded.requires_grad)

    def zero_grad(self) -> None:
        for name, sharded in self._sharded.items():
            sharded.grad = self.parameters[name].grad = None

    def take_gradients(self) -> None:
        """Sets each parameter's gradient to its local rows, summed over all processes, without a copy."""
        for name, sharded in self._sharded.items():
            self.parameters[name].grad = None if sharded.grad is None else sharded.grad.to_local()

    def rows(self, name: str, rank: int | None = None) -> slice:
        """Returns the rows of a parameter that a process (by default this one) holds."""
        return local_rows(self.shapes[name][0], self.rank if rank is None else rank, self.num_processes)

    # Norms.

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns Euclidean norms of tensors with a (possibly empty) piece on each process; fp32 [len(tensors)]."""
        squares = torch.stack(torch._foreach_norm(list(tensors))).square()
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt()

    def global_norm(self, tensors: Iterable[Tensor]) -> Tensor:
        """Returns the Euclidean norm of all processes' local tensors together; fp32 scalar."""
        square = torch.stack(torch._foreach_norm(list(tensors))).square().sum()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def blocks(self, name: str, local: Tensor, num_blocks: int) -> list[Tensor]:
        """Returns this process's pieces of K equal blocks of the whole parameter's rows, as K views of `local`.

        A piece may be empty, since shards of a fused parameter may start anywhere.
        """
        size = self.shapes[name][0] // num_blocks
        rows = self.rows(name)
        edges = [min(max(k * size, rows.start), rows.stop) - rows.start for k in range(num_blocks + 1)]
        return [local[edges[k] : edges[k + 1]] for k in range(num_blocks)]

    # Whole tensors, on one process.

    def gather(self, name: str, local: Tensor) -> Tensor | None:
        """Returns the whole tensor on the first process, in CPU memory, and None on the others."""
        chunk = self._chunk(name, local)
        chunks = [torch.empty_like(chunk) for _ in range(self.num_processes)] if self.rank == _FIRST else None
        dist.gather(chunk, chunks, group=self.group, group_dst=_FIRST)
        if chunks is None:
            return None
        return torch.cat([piece.cpu() for piece in chunks])[: self.shapes[name][0]]

    @torch.no_grad()
    def scatter(self, name: str, whole: Tensor | None, local: Tensor) -> None:
        """Fills `local` on each process with its rows of the first process's whole tensor; the others pass None.

        The first process alone raises ValueError for a wrong shape; the others keep waiting.
        """
        chunk = self._chunk(name, local)
        chunks = None
        if self.rank == _FIRST:
            if whole is None or whole.shape != self.shapes[name]:
                shape = None if whole is None else list(whole.shape)
                raise ValueError(f"parameter {name}: expected shape {list(self.shapes[name])}, got {shape}")
            chunks = [self._chunk(name, whole[self.rows(name, rank)].to(chunk)) for rank in range(self.num_processes)]
        dist.scatter(chunk, chunks, group=self.group, group_src=_FIRST)
        local.copy_(chunk[: local.shape[0]])

    def _chunk(self, name: str, local: Tensor) -> Tensor:
        """Pads the rows with zeros so that all processes have the same number."""
        num_rows = self.rows(name, _FIRST).stop
        return torch.cat((local.detach(), local.new_zeros((num_rows - local.shape[0], *local.shape[1:]))))

    # Whole tensors, each on one process.

    def to_owners(self, locals_: Mapping[str, Tensor], owners: Mapping[str, int]) -> dict[str, Tensor]:
        """Returns the whole tensors that this process owns by name, with one `all_to_all`."""
        names = [[name for name in locals_ if owners[name] == rank] for rank in range(self.num_processes)]
        sizes = [[self._size(name, rank) for name in names[self.rank]] for rank in range(self.num_processes)]
        received = self._exchange([[locals_[name] for name in group] for group in names], sizes)
        return {
            name: torch.cat([pieces[i] for pieces in received]).view(self.shapes[name])
            for i, name in enumerate(names[self.rank])
        }

    def from_owners(self, wholes: Mapping[str, Tensor], owners: Mapping[str, int]) -> dict[str, Tensor]:
        """Inverts `to_owners`: returns this process's rows of all tensors in `owners` by name."""
        names = [[name for name in owners if owners[name] == rank] for rank in range(self.num_processes)]
        ranks = range(self.num_processes)
        pieces = [[wholes[name][self.rows(name, rank)] for name in names[self.rank]] for rank in ranks]
        received = self._exchange(pieces, [[self._size(name, self.rank) for name in group] for group in names])
        return {
            name: piece.view(-1, *self.shapes[name][1:])
            for group, parts in zip(names, received, strict=True)
            for name, piece in zip(group, parts, strict=True)
        }

    def _size(self, name: str, rank: int) -> int:
        rows = self.rows(name, rank)
        num_rows: int = rows.stop - rows.start
        return num_rows * int(math.prod(self.shapes[name][1:]))

    def _exchange(self, pieces: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]) -> list[list[Tensor]]:
        """Sends pieces to each process and receives flat pieces of known sizes from each."""
        like = next(iter(self.parameters.values()))
        sent = [torch.cat([like.new_empty(0), *(piece.flatten() for piece in part)]) for part in pieces]
        received = like.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            received, torch.cat(sent), [sum(part) for part in sizes], [len(part) for part in sent], group=self.group
        )
        parts = torch.split(received, [size for part in sizes for size in part])
        firsts = [sum(len(part) for part in sizes[:i]) for i in range(len(sizes))]
        return [list(parts[first : first + len(part)]) for first, part in zip(firsts, sizes, strict=True)]
