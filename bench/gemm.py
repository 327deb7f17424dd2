"""The matrix products of a training step at their real shapes: forward, input gradient, weight gradient.

    python bench/gemm.py [--shapes small:1024 base:128 large:64] [--device cpu]

bf16, random numbers, by cuBLAS through PyTorch. Prints each distinct layer's three products in
microseconds (TFLOP/s, GB/s), and for each model their sum over a step, a lower bound of its time with
these products. Weight gradients sum over all tokens into a small fp32 matrix, which leaves most of the GPU
idle unless the sum is split: "split-K S" does that by a batched product and a sum; "rounded to bf16" is the
same product with 16-bit results.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator

import torch
from card import seconds_per_call
from lib.results import Results, parse_arguments, reason
from lib.workload import label, shape
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import electra_fast as ef
from electra_fast.ops.operations import weight_gradient

SHAPES, QUICK_SHAPES = ["small:1024", "small:128", "base:128", "large:64"], ["tiny:8"]
SPLITS = (4, 16, 64)


def layers(config: ef.Config) -> Counter[tuple[int, int, int]]:
    """(rows, inputs, outputs) of every linear layer of a step except tables, and how often it occurs."""
    tokens = config.train.batch_size * config.data.sequence_length
    slots = int(tokens * config.data.mask_prob)
    found: Counter[tuple[int, int, int]] = Counter()
    with FakeTensorMode():  # only shapes are needed; initializing a large model takes many seconds
        model = ef.Electra(config)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            rows = slots if name.startswith("generator_head") else tokens
            found[rows, module.in_features, module.out_features] += 1
    return found


def products(rows: int, inputs: int, outputs: int, device: torch.device) -> Iterator[tuple[str, float]]:
    """Name and seconds of a layer's products, and of the weight gradient with split-K."""
    x, dy = (torch.randn(rows, width, device=device).bfloat16() for width in (inputs, outputs))
    weight = torch.randn(outputs, inputs, device=device).bfloat16()

    def split_k(splits: int) -> Tensor:
        partials = torch.bmm(dy.view(splits, -1, outputs).mT, x.view(splits, -1, inputs))
        return partials.sum(0, dtype=torch.float32)

    calls = 20 if device.type == "cuda" else 1
    yield "forward", seconds_per_call(lambda: x @ weight.T, device, calls)
    yield "input gradient", seconds_per_call(lambda: dy @ weight, device, calls)
    yield "weight gradient", seconds_per_call(lambda: weight_gradient(dy, x), device, calls)
    yield "rounded to bf16", seconds_per_call(lambda: dy.T @ x, device, calls)
    for splits in SPLITS:
        if rows % splits == 0:
            yield f"split-K {splits}", seconds_per_call(lambda s=splits: split_k(s), device, calls)


def main() -> int:
    """Measures the layers, those with the most operations first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", help="preset:rows per step")
    options = parse_arguments(parser)
    device, results = options.device, Results(options.results, options.device)
    for text in options.shapes or (QUICK_SHAPES if options.quick else SHAPES):
        config, total = shape(text), Counter[str]()
        for (rows, inputs, outputs), count in sorted(layers(config).items(), key=lambda x: -x[1] * x[0][1] * x[0][2]):
            where = f"{label(config, text)}: {rows}x{inputs} to {outputs}, {count} times"
            try:
                found = dict(products(rows, inputs, outputs, device))
            except RuntimeError as error:
                results.add(f"{where}: {reason(error)}", ok=False)
                continue
            flops, size = 2 * rows * inputs * outputs, 2 * (rows * inputs + rows * outputs + inputs * outputs)
            total.update({name: seconds * count for name, seconds in found.items()})
            times = ", ".join(
                f"{name} {seconds * 1e6:.0f} us ({flops / seconds / 1e12:.0f}, {size / seconds / 1e9:.0f})"
                for name, seconds in found.items()
            )
            results.add(f"{where}: {times}", shape=text, layer=[rows, inputs, outputs], seconds=found)
        whole = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in total.items())
        title = f"{label(config, text)}: all layers of a step"
        results.add(f"{title}: {whole}", headline=True, shape=text, total=dict(total))
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
