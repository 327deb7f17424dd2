"""The card and its limits: copy bandwidth and bf16 matmul throughput.

    python bench/card.py [--device cpu]

All other results are read against these two numbers: an H100 copies 3.0 TB/s, an H200 4.3, with equal matmul
throughput. Reads the card's clocks and changes no settings.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from statistics import median

import torch
from lib.results import Results, installed, parse_arguments
from lib.timing import milliseconds

FIELDS = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
PACKAGES = ("torch", "triton", "transformers", "numpy", "pyarrow", "xformers", "flash-attn-4")


def seconds(work: Callable[[], object], device: torch.device) -> float:
    for _ in range(3):
        work()
    return median(milliseconds(work, device, 20)) / 1e3


def copy_rate(num_bytes: int, device: torch.device) -> float:
    """Bandwidth of a copy on the device, in bytes read and written."""
    source, target = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    source.random_()
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device)


def main() -> int:
    options = parse_arguments(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    device = options.device
    results = Results(options.results, options.device)
    results.add(f"python {sys.version.split()[0]}, " + ", ".join(map(installed, PACKAGES)))
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        results.add(
            f"{properties.name}: {properties.total_memory / 2**30:.0f} GiB, "
            f"{properties.multi_processor_count} multiprocessors, "
            f"L2 {properties.L2_cache_size / 2**20:.0f} MiB, CUDA {torch.version.cuda}"
        )
    size, width = (2**32, 8192) if device.type == "cuda" else (2**22, 256)
    rate = copy_rate(size, device)
    results.add(f"copy: {rate / 1e12:.2f} TB/s, bytes read and written", copy_bytes_per_second=rate)
    a, b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    rate = 2 * width**3 / seconds(lambda: a @ b, device)
    results.add(f"bf16 matmul {width}^3: {rate / 1e12:.1f} TFLOP/s", gemm_flops_per_second=rate)
    if shutil.which("nvidia-smi"):  # after the matmuls: clocks under load
        command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader"]
        process = subprocess.run(command, capture_output=True, text=True, timeout=30)
        results.add(f"{FIELDS}: {process.stdout.strip() or process.stderr.strip()}")
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
