"""Second of three GPU scripts: larger models, attention backends, and kernels compared with others.

    python bench/gpu_models.py [--out gpu_models] [--device cpu --quick]

In under nine minutes, most informative results first. See `bench/README.md`.
"""

from __future__ import annotations

import sys

from gpu_check import STEP
from lib.groups import Group, main

# Cases of `lib/kernel_cases.py` by a word in their names, the most expensive in a step first.
KERNELS = ("attention", "+ gelu", "feed-forward", "generator head", "residual", "embedding", "discriminator", "corrupt")


def attention(shape: str, backend: str) -> Group:
    """A whole step with this attention backend."""
    return Group(f"{shape}, {backend}", (*STEP, shape, "--model.attention", backend), 75)


GROUPS = (
    Group("large:64", (*STEP, "large:64"), 75),
    Group("base:128", (*STEP, "base:128"), 60),
    *(attention("small:1024", backend) for backend in ("varlen", "sdpa", "flex", "xformers")),
    *(Group(f"kernels: {word}", ("kernels.py", "--only", word), 75) for word in KERNELS),
    *(attention("base:128", backend) for backend in ("sdpa", "flex", "xformers")),
)

QUICK_GROUPS = (
    Group("tiny:8", (*STEP, "tiny:8"), 60),
    Group("tiny:8, sdpa", (*STEP, "tiny:8", "--model.attention", "sdpa"), 60),
    *(Group(f"kernels: {word}", ("kernels.py", "--only", word), 90) for word in KERNELS),
)

if __name__ == "__main__":
    sys.exit(main("gpu_models", GROUPS, QUICK_GROUPS))
