"""Times of work on the device."""

import time
from collections.abc import Callable

import torch


def milliseconds(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Times of calls; on a GPU, of replays of a captured graph, each with an empty L2 cache."""
    if device.type != "cuda":
        work()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - start))
        return times
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    cache = torch.empty(2**28, dtype=torch.int8, device=device)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        cache.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def peak_gib(work: Callable[[], object]) -> float:
    """Peak memory of the last of three calls on a side stream, as graph capture requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30
