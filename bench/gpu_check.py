"""First of three GPU scripts: correctness, step time, and where the time goes.

    python bench/gpu_check.py [--out gpu_check] [--device cpu --quick]

In under nine minutes, to which the limits of all groups add up. `bench/README.md` explains how to read the results.
Shapes are `preset:rows[:recipe[:dropout]]`, by default as in `pretrain`.
"""

import sys

from lib.groups import Group, main

# A step by all kernels, unchecked; and beside it as `pretrain` takes it, after its check of up to a minute.
STEP = ("pretrain_throughput.py", "--only", "electra-fast, graph", "--shapes")
BOTH = ("pretrain_throughput.py", "--only", "electra-fast, as pretrain", "electra-fast, graph", "--shapes")
PROFILE = ("profile_step.py", "--shape")

CHECKS = (
    Group("card", ("card.py",), 20),
    Group("samples", ("step_numerics.py", "--only", "samples"), 40),
    Group("losses", ("step_numerics.py", "--only", "eager", "graph"), 45),
)

GROUPS = (
    CHECKS[0],
    Group("default run", ("default_run.py",), 125),
    Group("small:128", (*BOTH, "small:128"), 30),
    Group("kernel times, small:128", (*PROFILE, "small:128", "--top", "30"), 20),
    *CHECKS[1:],
    Group("small:1024", (*BOTH, "small:1024"), 100),
    Group("small:1024:google:0", (*STEP, "small:1024:google:0"), 30),
    Group("small:1024:google", (*STEP, "small:1024:google"), 30),
    Group("kernel times, small:1024:google:0", (*PROFILE, "small:1024:google:0", "--train.kernels", "triton"), 20),
    Group("base:128", (*STEP, "base:128"), 25),
    Group("base:128:google:0", (*STEP, "base:128:google:0"), 25),
)

QUICK_GROUPS = (
    *CHECKS,
    Group("default run", ("default_run.py",), 90),
    Group("tiny:8", (*BOTH, "tiny:8"), 60),
    Group("kernel times, tiny:8", (*PROFILE, "tiny:8"), 60),
)

if __name__ == "__main__":
    sys.exit(main("gpu_check", GROUPS, QUICK_GROUPS))
