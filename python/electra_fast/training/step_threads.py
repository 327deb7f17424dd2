"""Forward and backward of a step on a CPU by several threads, each with rows of its own.

Each operation then runs in one thread. OpenMP instead divides every single operation, and its threads wait for each
other thousands of times per step: spinning, which is ruinous beside any other process, or sleeping, which costs more
than small operations take (bench/LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from electra_fast.config import Config
from electra_fast.objectives.objective import Output

# More threads hold more copies of the gradients, and small models are bound by Python's lock.
MAX_THREADS = 8

Gradients = list[Tensor | None]


def choose_num_threads(config: Config, device: torch.device) -> int:
    """How many threads to divide each micro-batch among: as torch may use, but a divisor of its rows.

    1 with dropout, whose masks come from one generator that threads would share, and on other devices.
    """
    if device.type != "cpu" or has_dropout(config):
        return 1
    rows = config.train.batch_size // config.train.accumulate
    return max(n for n in range(1, MAX_THREADS + 1) if n <= torch.get_num_threads() and rows % n == 0)


def has_dropout(config: Config) -> bool:
    """Whether the model drops anything in training."""
    return config.model.dropout > 0 or config.model.attention_dropout > 0


class StepThreads:
    """Threads for forward and backward passes; each gets an equal share of the cores for OpenMP."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads, self._num_cores = num_threads, torch.get_num_threads()
        self._pool = ThreadPoolExecutor(num_threads, "step")
        self._is_warm = False

    def backward(
        self, forward: Callable[[int], Output], num_parts: int, parameters: Sequence[Tensor]
    ) -> list[dict[str, Tensor]]:
        """Sets the parameters' gradients to those of the sum of all parts' losses; returns the totals of each part.

        Gradients are added in the order of the threads, whichever ends first, so that a run repeats to the bit.
        """

        def work(thread: int) -> tuple[Gradients, list[dict[str, Tensor]]]:
            torch.set_num_threads(max(1, self._num_cores // self._num_threads))
            gradients: Gradients = [None] * len(parameters)
            totals = []
            for part in range(thread, num_parts, self._num_threads):
                output = forward(part)
                gradients = _sum(gradients, torch.autograd.grad(output.loss, parameters, allow_unused=True))
                totals.append(output.totals)
            return gradients, totals

        # The first time one after another, in the caller's thread: what is compiled, is compiled once, and torch 2.11
        # crashes when it compiles again after a thread that compiled has ended.
        run = self._pool.map if self._is_warm else map
        try:
            results = list(run(work, range(self._num_threads)))
        finally:
            torch.set_num_threads(self._num_cores)  # MKL's number is one for all threads
        self._is_warm = True
        gradients, *others = (found for found, _ in results)
        for found in others:
            gradients = _sum(gradients, found)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return [totals for _, each in results for totals in each]


def _sum(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> Gradients:
    return [x if y is None else y if x is None else x + y for x, y in zip(left, right, strict=True)]
