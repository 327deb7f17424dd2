"""First of three GPU scripts: correctness, step time, and where the time goes.

    python bench/gpu_check.py [--out gpu_check] [--device cpu --quick]

In under nine minutes: the card and its limits, `electra-fast doctor` for small and base, steps against their
references, whole steps of small at 131k and 16k tokens and of base, and a table of kernel times for each. The limits of
all groups add up to less than that. `bench/README.md` explains how to read the results; `lib/groups.py` runs groups.
"""

from __future__ import annotations

import sys

from lib.groups import Group, main

STEP = ("pretrain_throughput.py", "--only", "electra-fast, graph", "--shapes")
PROFILE = ("profile_step.py", "--shape")

# What users get by default.
MODERN = ("small:128:modern", "small:1024:modern", "base:128:modern")

CHECKS = (
    Group("card", ("card.py",), 20),
    Group("samples", ("step_numerics.py", "--only", "samples"), 40),
    Group("losses", ("step_numerics.py", "--only", "eager", "graph"), 45),
)


def doctor(preset: str, recipe: str, seconds: float) -> Group:
    """Kernels, attention backends and executions, checked and timed."""
    command = ("-m", "electra_fast", "doctor", "--preset", preset, "--recipe", recipe)
    return Group(f"doctor, {preset} {recipe}", command, seconds)


GROUPS = (
    CHECKS[0],
    doctor("small", "google", 70),
    doctor("base", "modern", 70),
    *CHECKS[1:],
    Group("small:1024", (*STEP, "small:1024"), 35),
    Group("small:128", (*STEP, "small:128"), 25),
    Group("base:128", (*STEP, "base:128"), 35),
    Group("kernel times, small:1024", (*PROFILE, "small:1024"), 25),
    Group("kernel times, small:128", (*PROFILE, "small:128", "--top", "12"), 25),
    Group("kernel times, base:128", (*PROFILE, "base:128", "--top", "20"), 25),
    *(Group(shape, (*STEP, shape), 25) for shape in MODERN),
    Group("kernel times, small:128:modern", (*PROFILE, "small:128:modern", "--top", "30"), 20),
)

QUICK_GROUPS = (
    *CHECKS,
    doctor("tiny", "google", 60),
    Group("tiny:8", (*STEP, "tiny:8"), 60),
    Group("kernel times, tiny:8", (*PROFILE, "tiny:8"), 60),
)

if __name__ == "__main__":
    sys.exit(main("gpu_check", GROUPS, QUICK_GROUPS))
