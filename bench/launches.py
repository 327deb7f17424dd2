"""Counts the kernels that a training step launches on a GPU, without a GPU.

    python bench/launches.py [--shape small:8] [--recipe google] [--attention short] [--section.key value ...]

Takes one step on the CPU with every Triton kernel replaced by a counter, and counts torch's operators: views and
allocations launch nothing, a `foreach` as many kernels as torch's `multi_tensor_apply` makes of it, everything else
one. That is exact for Triton kernels and close for the rest: some of torch's operators launch two or three. A few rows
suffice, because sizes matter for `foreach` alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from typing import Any

import torch
import triton
from lib.results import Results, parse_arguments
from lib.workload import loader, make_corpus, new_step, shape
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from electra_fast.model import sublayers
from electra_fast.model.compute import ComputeConfig
from electra_fast.ops import operations as ops

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
NO_KERNEL = {"_unsafe_view", "detach", "alias", "lift_fresh", "_local_scalar_dense", "is_pinned", "_pin_memory"}
# Of torch's `multi_tensor_apply`: elements per block, blocks and, by the number of lists, tensors per launch.
CHUNK, MAX_BLOCKS, MAX_TENSORS = 65_536, 320, {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}


class Launches(TorchDispatchMode):
    """Counts launches by operator, those within our own operators included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts an operator and runs it."""
        kwargs = kwargs or {}
        name = function._schema.name
        if name in OPDEFS:
            with self:
                return OPDEFS[name]._init_fn(*args, **kwargs)
        out, short = function(*args, **kwargs), name.split("::")[1]
        if short in ALLOCATIONS:
            out.zero_()  # indices that no kernel has written must be valid
        elif not function.is_view and short not in NO_KERNEL:
            self.counts[short] += _foreach_launches(args) if short.startswith(("_foreach", "_fused")) else 1
        return out


def _foreach_launches(args: tuple[Any, ...]) -> int:
    lists = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], torch.Tensor)]
    most, launches, tensors, blocks = MAX_TENSORS[min(5, len(lists))], 1, 0, 0
    for x in lists[0]:
        if tensors == most:
            launches, tensors, blocks = launches + 1, 0, 0
        tensors, blocks = tensors + 1, blocks + -(-x.numel() // CHUNK)
        if blocks >= MAX_BLOCKS:
            launches, tensors, blocks = launches + blocks // MAX_BLOCKS, 0, 0
    return launches


def main() -> int:
    """Launches of one step by operator, most frequent first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="small:8", help="preset, or preset:rows")
    parser.add_argument("--recipe", default="google")
    parser.add_argument("--attention", default="sdpa", help="attention backend")
    options = parse_arguments(parser, with_overrides=True)
    device = torch.device("cpu")
    results, corpus = Results(options.results, device), make_corpus(options.cache, 300)
    config = shape(options.shape, options.overrides, options.recipe)
    launches = Launches()
    triton.JITFunction.run = lambda self, *_, **__: launches.counts.update([self.__name__])
    ops.kernels()

    def weight_gradient(dy_TO: Tensor, x_TI: Tensor) -> Tensor:
        """On CUDA a single product."""
        launches.counts.update(["mm"])
        return torch.empty(dy_TO.shape[1], x_TI.shape[1])

    ops.weight_gradient = sublayers.weight_gradient = weight_gradient
    os.environ["TRITON_INTERPRET"] = "1"  # after the kernels' import: lets `use_impl` choose them, interprets nothing
    compute = ComputeConfig(options.attention, torch.bfloat16)
    with ops.use_impl("kernel"):
        step, batches = new_step(config, device, "eager", compute, num_processes=1), loader(corpus, config)
        with launches:
            step(next(batches), 0)
    results.add(f"{options.shape}: {launches.counts.total()} launches per step", launches=launches.counts.total())
    for name, count in launches.counts.most_common():
        results.add(f"{count:6d}  {name}", operator=name, launches=count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
