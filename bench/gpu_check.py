"""First of three GPU scripts: correctness, step time, and where the time goes.

    python bench/gpu_check.py [--out gpu_check] [--device cpu --quick]

In under nine minutes: the card and its limits, kernels and steps against their references, whole steps
of small at 131k and 16k tokens and of base, and a table of kernel times for each. `bench/README.md`
explains how to read the results; `lib/groups.py` runs the groups.
"""

from __future__ import annotations

import sys

from lib.groups import Group, main

STEP = ("pretrain_throughput.py", "--only", "electra-fast, graph", "--shapes")
PROFILE = ("profile_step.py", "--shape")

# What users get by default.
MODERN = ("small:128:modern", "small:1024:modern", "base:128:modern")

CHECKS = (
    Group("card", ("card.py",), 60),
    Group("kernel numerics", ("kernel_numerics.py",), 150),
    Group("samples", ("step_numerics.py", "--only", "samples"), 75),
    Group("losses", ("step_numerics.py", "--only", "eager", "graph"), 75),
)

GROUPS = (
    *CHECKS,
    Group("small:1024", (*STEP, "small:1024"), 75),
    Group("small:128", (*STEP, "small:128"), 60),
    Group("base:128", (*STEP, "base:128"), 75),
    Group("kernel times, small:1024", (*PROFILE, "small:1024"), 60),
    Group("kernel times, small:128", (*PROFILE, "small:128", "--top", "12"), 60),
    Group("kernel times, base:128", (*PROFILE, "base:128", "--top", "20"), 60),
    *(Group(shape, (*STEP, shape), 75) for shape in MODERN),
    Group("kernel times, small:128:modern", (*PROFILE, "small:128:modern", "--top", "30"), 60),
    Group("losses, compiled", ("step_numerics.py", "--only", "compile"), 90),
)

QUICK_GROUPS = (
    *CHECKS,
    Group("tiny:8", (*STEP, "tiny:8"), 60),
    Group("kernel times, tiny:8", (*PROFILE, "tiny:8"), 60),
)

if __name__ == "__main__":
    sys.exit(main("gpu_check", GROUPS, QUICK_GROUPS))
