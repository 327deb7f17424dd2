"""Third of three GPU scripts: a step of small without dropout compared with the alternatives, then the tests.

    python bench/gpu_peers.py [--out gpu_peers] [--device cpu --quick]

In under nine minutes. Each contender has its own process, so that memory use and crashes are isolated;
ours runs first and again near the end, because the machine may drift. See `bench/README.md`.
"""

import sys

from lib.groups import BENCH, Group, main

TESTS = (
    "model/test_attention.py",
    "training/test_step.py",
    "training/test_checkpoint_writer.py",
    "finetuning/test_finetuning.py",
    "training/test_resume.py",
    "kernels",
)
# Ahead-of-time compilation is tested without a GPU; warnings of other Python versions are not failures here.
PYTEST = ("-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "-k", "not ahead_of_time")


def contender(shape: str, name: str, seconds: float, title: str = "") -> Group:
    command = ("pretrain_throughput.py", "--shapes", shape, "--only", name)
    return Group(title or f"{shape}, {name}", command, seconds)


def tests(files: tuple[str, ...], workers: int, seconds: float) -> Group:
    """Tests on the available device; needs pytest-xdist."""
    tree = BENCH.parent
    paths = (str(tree / "tests" / name) for name in files)
    return Group("tests", (*PYTEST, "-n", str(workers), "-c", str(tree / "pyproject.toml"), *paths), seconds)


GROUPS = (
    contender("small:1024:google:0", "electra-fast, graph", 60),
    contender("small:1024:google:0", "transformers, eager, no mask", 60),
    contender("small:1024:google:0", "transformers, compiled, no mask", 180),
    contender("small:128:google:0", "electra-fast, graph", 45),
    contender("small:128:google:0", "transformers, eager, no mask", 45),
    contender("small:1024:google:0", "transformers, eager, block mask", 60),
    contender("small:1024:google:0", "electra-fast, compile", 90),
    contender("small:1024:google:0", "transformers, compiled, block mask", 180),
    tests(TESTS, 8, 150),
    contender("small:1024:google:0", "electra-fast, graph", 45, "small:1024:google:0, electra-fast, graph, again"),
    contender("small:128:google:0", "electra-fast, eager", 45),
    contender("small:1024:google:0", "electra-fast, eager", 45),
    contender("small:1024:google:0", "transformers, compiled with graphs, no mask", 180),
)

QUICK_GROUPS = (
    contender("tiny:8:google:0", "electra-fast, graph", 60),
    contender("tiny:8:google:0", "transformers, eager, block mask", 60),
    contender("tiny:8:google:0", "transformers, compiled, no mask", 120),
    tests(TESTS[:2], 2, 240),  # the kernel tests take minutes in the interpreter
)

if __name__ == "__main__":
    sys.exit(main("gpu_peers", GROUPS, QUICK_GROUPS))
