"""The launches, bytes and least time of a training step on a GPU, counted without one.

    python bench/step_counts.py [--shapes small:128 small:1024:google:0] [--attention NAME] [--top 12] [--results FILE]

Passes tensors without data forward and backward through the operators of a step with all kernels, and through the
update. Each operator that computes counts as one launch, some of torch's as several. The least time is the sum over
operators of the longer of two times: bytes read and written at `BANDWIDTH`, and FLOPs of products at `TFLOPS`, both
measured on an H200. A step takes longer: no operator reaches both, small ones do not fill a GPU, and libraries may
launch more. The change of the counts by an edit is the same on any card.
"""

import argparse
import math
import os
import sys
from collections import Counter
from typing import Any
from unittest import mock

import torch
from lib.results import Results, parse_arguments
from lib.workload import label, shape
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

import electra_fast as ef
from electra_fast.hardware.memory import StepMemory
from electra_fast.model.attention import MAX_SHORT_HEAD, MAX_SHORT_ROW
from electra_fast.model.compute import ComputeConfig
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey
from electra_fast.ops import fused
from electra_fast.ops.operations import use_impl
from electra_fast.optimizers.optimizer import Optimizer

SHAPES = ("small:128", "small:1024", "small:128:google:0", "small:1024:google:0", "base:128", "base:128:google:0")
BANDWIDTH = 4.3e12
TFLOPS = 790e12
# A sort and its surroundings; gradients of x and of the weights.
LAUNCHES = {"add_rows": 16, "narrow_feed_forward_backward": 2}
# Operators that read rows by index: the first operand counts with the size of the result.
GATHERS = ("gather_rows", "embedding_norm", "embedding_norm_backward", "index", "index_select")
# Lists of tensors per launch by the number of lists, and blocks of 65,536 elements (torch's multi_tensor_apply).
MOST_TENSORS = (110, 64, 48, 36)
MOST_BLOCKS = 320
BLOCK = 1 << 16
ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "promote_types")


class Operators(TorchDispatchMode):
    """Counts launches, bytes and seconds at least by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = Counter[str]()
        self.bytes = Counter[str]()
        self.seconds = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        outputs = [x for x in tree_iter(result) if isinstance(x, Tensor)]
        inputs = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        storages = {x.untyped_storage()._cdata for x in inputs}
        is_view = not func._schema.is_mutable and all(x.untyped_storage()._cdata in storages for x in outputs)
        if func.namespace != "prim" and not is_view and name not in ALLOCATIONS:
            lists = [
                argument
                for argument in args
                if isinstance(argument, list | tuple) and argument and isinstance(argument[0], Tensor)
            ]
            self.add(name, inputs, outputs, lists, self.flops(func, args, result), func._schema.is_mutable)
        return result

    def add(
        self, name: str, inputs: list[Tensor], outputs: list[Tensor], lists: list[Any], flops: float, mutates: bool
    ) -> None:
        launches = LAUNCHES.get(name, 1)
        if name.startswith("_f") and lists:
            blocks = sum(math.ceil(x.numel() / BLOCK) for x in lists[0])
            launches = max(math.ceil(len(lists[0]) / MOST_TENSORS[len(lists) - 1]), math.ceil(blocks / MOST_BLOCKS))
        written = sum(map(size, outputs)) or (sum(map(size, lists[0])) if lists else size(inputs[0]) * mutates)
        read = written if name in GATHERS else sum(map(size, inputs))
        self.launches[name] += launches
        self.bytes[name] += read + written
        self.seconds[name] += max((read + written) / BANDWIDTH, flops / TFLOPS)

    @staticmethod
    def flops(func: Any, args: Any, result: Any) -> float:
        """FLOPs of products; for our kernels, from the tokens of the first matrix and the weight matrices."""
        name = func._schema.name
        if "attention" in name:
            is_backward = "backward" in name
            is_flash = func.namespace == "aten"
            x_TD = args[0].flatten(1)  # the gradient of the output, the queries, or the product of all three
            length = args[8 if is_backward else 5] if is_flash else next(x for x in args if is_ids(x)).shape[1]
            width = x_TD.shape[1] if is_backward or is_flash else x_TD.shape[1] // 3
            return (10 if is_backward else 4) * len(x_TD) * length * width
        if func.namespace == "electra_fast" and any(word in name for word in ("matmul", "feed_forward", "head")):
            matrices = [x for x in args if isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point()]
            if not matrices:
                return 0
            num_rows, width = matrices[0].shape
            weights = sum(x.numel() for x in matrices[1:] if len(x) != num_rows and width in x.shape)
            gives_both = "backward" in name and "matmul" not in name  # gradients of the input and of the weights
            return 2 * num_rows * weights * (1 + gives_both)
        count = flop_registry.get(func.overloadpacket)
        return count(*args, out_val=result) if count else 0


def is_ids(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point()


def size(x: Tensor) -> int:
    """Bytes; an expanded tensor counts once."""
    return x.element_size() * math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or n < 2)


def count_step(config: ef.Config, attention: str) -> tuple[Operators, Operators]:
    """The operators of both passes, and of the update."""
    passes = Operators()
    update = Operators()
    in_fp32 = mock.patch.object(fused, "weight_gradient", lambda dy, x: torch.mm(dy.T, x, out_dtype=torch.float32))

    def adamw(*lists: Any, **_: Any) -> None:
        update.add("_fused_adamw", [x for tensors in lists for x in tensors], [], [*lists[:4]], 0, True)

    fused.kernels()  # import before TRITON_INTERPRET is set, so that operations use them on a CPU
    with (
        mock.patch.dict(os.environ, TRITON_INTERPRET="1"),
        use_impl("kernel"),
        in_fp32,
        mock.patch.object(torch, "_fused_adamw_", adamw),
    ):
        step = StepMemory(config, ComputeConfig(attention, torch.bfloat16), torch.device("cpu"))
        with step._mode:
            objective = objective_of(config)
            model = step._model.train()
            tensors = step._batch(config.train.batch_size)
            key = RngKey(torch.zeros(2, dtype=torch.int64), torch.zeros((), dtype=torch.int64))
            optimizer = Optimizer(model.named_parameters(), config.optimizer, matrix_dtype=torch.bfloat16)
            with passes:
                denominators = objective.loss_denominators(tensors)
                with step._casts.current():
                    batch = MicroBatch(tensors, step._compute, key, denominators)
                    objective.forward(model, batch).loss.backward()
            with update:
                optimizer.step()
    return passes, update


def attention_for(config: ef.Config) -> str:
    """Ours where it takes the rows."""
    head_dim = config.model.hidden_size // config.model.num_heads
    is_short = config.data.sequence_length <= MAX_SHORT_ROW and head_dim <= MAX_SHORT_HEAD
    return "short" if is_short and config.model.architecture != "deberta" else "varlen"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", help="preset:rows per step[:recipe[:dropout]]")
    parser.add_argument("--attention", help="backend; default: `short` where it takes the rows, else `varlen`")
    parser.add_argument("--top", type=int, default=0, help="list the N operators with the longest least time")
    parser.set_defaults(device="cpu")
    options = parse_arguments(parser, for_cpu=True)
    results = Results(options.results, options.device, card="counted")
    for text in options.shapes or (("tiny:8",) if options.quick else SHAPES):
        config = shape(text, {"data.corpus": "none"})
        attention = options.attention or attention_for(config)
        parts = count_step(config, attention)
        launches, num_bytes, seconds = (
            [sum(counter.values()) for counter in counters]
            for counters in zip(*((part.launches, part.bytes, part.seconds) for part in parts), strict=True)
        )
        results.add(
            f"{label(config, text)}, {attention}: {launches[0]} + {launches[1]} launches, "
            f"{num_bytes[0] / 1e9:.2f} + {num_bytes[1] / 1e9:.2f} GB, "
            f"{1e3 * seconds[0]:.2f} + {1e3 * seconds[1]:.2f} ms at least (passes and update)",
            shape=text, attention=attention, launches=launches, bytes=num_bytes, seconds=seconds,
        )  # fmt: skip
        total = parts[0].seconds + parts[1].seconds
        for name, least in total.most_common(options.top):
            counts = sum(part.launches[name] for part in parts), sum(part.bytes[name] for part in parts)
            results.add(f"{1e3 * least:8.3f} ms {counts[0]:5d}x {counts[1] / 1e9:8.3f} GB  {name}", shape=text)
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
