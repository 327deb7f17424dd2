"""A GPU tested and timed, in five commands of under ten minutes.

    python bench/gpu.py A1|A2|A3|B1|B2|peers [--out FOLDER] [--minutes 9.5] [--device cpu --quick]
    python bench/gpu.py A2 --texts FILE... --glue FOLDER --pairs FILE [--run FOLDER]

A1: the default path. A2, then A3 with the same arguments: a typical user's run, and its scores. B1: `small`, and single
kernels. B2: `base` and `large`. peers: `small` compared with `transformers`, and all tests. `bench/README.md` describes
the use of the results. Shapes are `preset:rows[:recipe[:dropout]]`, by default as in `pretrain`.
"""

import argparse
import sys
from pathlib import Path

from lib.groups import BENCH, CACHE, Group, detect_device, run, stop_with_summary

TREE = BENCH.parent
# A step with all kernels, unchecked, and a step as in `pretrain`, after its check of up to a minute.
STEP = ("pretrain_throughput.py", "--only", "electra-fast, graph", "--shapes")
BOTH = ("pretrain_throughput.py", "--only", "electra-fast, as pretrain", "electra-fast, graph", "--shapes")
PROFILE = ("profile_step.py", "--top", "30", "--train.kernels", "triton", "--shape")
# Operations of `lib/kernel_cases.py`, selected by words in their names, the most expensive in a step first.
KERNELS = ("attention", "feed_forward", "norm", "generator_head", "gelu geglu")
KERNELS += (
    "logits discriminator_loss",
    "linear rotary_qkv",
    "corrupt slot_states dropout sample_alias",
)
# Ahead-of-time compilation is tested without a GPU; warnings of other Python versions are not failures here.
PYTEST = ("-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "-c", str(TREE / "pyproject.toml"))
TESTS = ("model/test_attention.py", "training/test_step.py", "training/test_checkpoint_writer.py")
TESTS += ("finetuning/test_finetuning.py", "training/test_resume.py", "kernels")
# The run of A2 and A3: 0.82 B tokens.
STEPS = 50_000
VOCABULARY = 30_522


def doctor(preset: str, recipe: str, seconds: float = 80) -> Group:
    command = ("-m", "electra_fast", "doctor", "--preset", preset, "--recipe", recipe)
    return Group(f"doctor, {preset} {recipe}", command, seconds)


def tests(files: tuple[str, ...], words: str, workers: int, seconds: float) -> Group:
    """Tests on the available device; needs pytest-xdist."""
    paths = (str(TREE / "tests" / name) for name in files)
    return Group("tests", (*PYTEST, "-k", words, "-n", str(workers), *paths), seconds)


def step(shape: str, seconds: float, *keys: str, command: tuple[str, ...] = STEP, expected: str = "") -> Group:
    title = " ".join([shape, *keys[1::2]])
    return Group(f"kernel times, {title}" if command == PROFILE else title, (*command, shape, *keys), seconds, expected)


def attention(shape: str, expected: dict[str, str], seconds: float = 45) -> list[Group]:
    """Steps with each attention backend."""
    return [step(shape, seconds, "--model.attention", name, expected=outcome) for name, outcome in expected.items()]


def contender(shape: str, name: str, seconds: float, title: str = "") -> Group:
    return Group(title or f"{shape}, {name}", ("pretrain_throughput.py", "--shapes", shape, "--only", name), seconds)


def kernels(names: tuple[str, ...], seconds: float) -> list[Group]:
    return [Group(f"kernels: {words}", ("kernels.py", "--only", *words.split()), seconds) for words in names]


def user_run(options: argparse.Namespace, seconds: float, until: str = "") -> Group:
    """`runs/five-tasks.sh`, which resumes."""
    keys = ("--preset", "tiny", "--steps", "20") if options.quick else ("--preset", "small", "--steps", str(STEPS))
    texts = [str(path.resolve()) for path in options.texts]
    script = (str(TREE / "runs/five-tasks.sh"), str(options.run), str(options.glue), *texts, "--", *keys)
    settings = {"UNTIL": until, "VOCAB": 2048 if options.quick else VOCABULARY, "SEEDS": 1 if options.quick else 3}
    return Group("a user's run", ("env", *(f"{name}={value}" for name, value in settings.items()), *script), seconds)


def pairs(options: argparse.Namespace, seconds: float) -> Group:
    # Without the line of each paradigm.
    program = 'electra-fast evaluate "$0/run" --pairs "$1" --out "$0/pairs" 2>&1 | grep -v "^[A-Za-z0-9_]* *[0-9]"'
    return Group("minimal pairs", ("bash", "-c", program, str(options.run), str(options.pairs)), seconds)


CARD = Group("card", ("card.py",), 20)
NUMERICS = (
    Group("samples", ("step_numerics.py", "--only", "samples"), 30),
    Group("losses", ("step_numerics.py", "--only", "eager", "graph"), 60),
)


def stages(options: argparse.Namespace) -> dict[str, list[Group]]:
    """The groups of each command, the most important first."""
    if options.quick:
        return {
            "A1": [CARD, Group("default run", ("default_run.py",), 150), doctor("tiny", "google")],
            "A2": [user_run(options, 300, "run")],
            "A3": [user_run(options, 400), pairs(options, 100)],
            "B1": [
                *NUMERICS,
                step("tiny:8", 60, command=BOTH),
                step("tiny:8", 60, command=PROFILE),
                *kernels(KERNELS[:4], 90),
            ],
            "B2": [*attention("tiny:8:google:0", {"sdpa": ""}), *kernels(KERNELS[4:], 90)],
            "peers": [
                contender("tiny:8:google:0", "electra-fast, graph", 60),
                contender("tiny:8:google:0", "transformers, eager, block mask", 60),
                contender("tiny:8:google:0", "transformers, compiled, no mask", 120),
                tests(TESTS[:2], "not ahead_of_time", 2, 240),  # kernel tests take minutes in the interpreter
            ],
        }
    google = "small:1024:google:0"
    dropout = "small:1024:google"
    # Expected of an H200 (LOG.md, 2026-11-30).
    return {
        "A1": [
            CARD,
            Group("default run", ("default_run.py",), 240, "6.4 ms; losses equal; 1.00"),
            doctor("small", "modern"),
            tests(("kernels", "hardware"), "not ahead_of_time and (norm or feed_forward or attention or gather or "
                  "choice or graph or branches)", 8, 90),
            doctor("base", "modern"),
            doctor("small", "google", 60),
        ],
        "A2": [user_run(options, 565, "run")],
        "A3": [user_run(options, 480), pairs(options, 90)],
        "B1": [
            *NUMERICS,
            step("small:128", 60, command=BOTH, expected="6.4 ms"),
            step("small:1024", 100, command=BOTH, expected="40 ms"),
            step("small:128", 20, command=PROFILE),
            step(google, 30, expected="31.5 ms"),
            step(dropout, 30, expected="35 ms"),
            step("small:128:google:0", 30, expected="5.9 ms"),
            step(google, 20, command=PROFILE),
            *kernels(KERNELS[:4], 47),
        ],
        "B2": [
            *attention("base:128:google:0", {"short": "99 ms", "varlen": "119 ms", "flex": "", "flash4": "100 ms"}),
            *attention("base:128", {"short": "120 ms", "varlen": "140 ms"}),
            step("base:128:google:0", 30, command=PROFILE),
            step("base:128", 30, command=PROFILE),
            *attention("large:64:google:0", {"short": "150 ms", "varlen": "173 ms"}),
            *kernels(KERNELS[4:], 35),
        ],
        "peers": [
            contender(google, "electra-fast, graph", 45),
            contender(google, "transformers, eager, no mask", 45),
            contender(google, "transformers, compiled, no mask", 120),
            contender("small:128:google:0", "transformers, eager, no mask", 45),
            contender(google, "transformers, compiled, block mask", 120),
            tests(TESTS, "not ahead_of_time", 8, 150),
            contender(google, "electra-fast, graph", 45, f"{google}, electra-fast, graph, again"),
        ],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["A1", "A2", "A3", "B1", "B2", "peers"])
    parser.add_argument("--out", type=Path, help="folder for the three result files; default: gpu-COMMAND")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for corpora and compiled kernels")
    parser.add_argument("--minutes", type=float, default=9.5, help="limit for all groups together")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if available")
    parser.add_argument("--quick", action="store_true", help="tiny shapes; always on for a CPU")
    parser.add_argument("--texts", type=Path, nargs="+", default=[], help="of A2 and A3: texts to train on")
    parser.add_argument("--glue", type=Path, help="of A2 and A3: folder of CoLA, SST-2, MRPC, STS-B and RTE")
    parser.add_argument("--pairs", type=Path, help="of A3: BLiMP, as a folder or in one file")
    parser.add_argument("--run", type=Path, default=Path("gpu-run"), help="of A2 and A3: folder of the run")
    options = parser.parse_args()
    if options.command in ("A2", "A3") and not (options.texts and options.glue and options.pairs):
        parser.error(f"{options.command} needs --texts, --glue and --pairs")
    device = options.device or detect_device()
    options.quick |= device == "cpu"
    shared = ["--device", device, "--cache", str(options.cache), *(["--quick"] if options.quick else [])]
    out = options.out or Path(f"gpu-{options.command}")
    stop_with_summary()
    groups = stages(options)[options.command]
    return run(f"gpu {options.command}", groups, out, options.cache, 60 * options.minutes, shared)


if __name__ == "__main__":
    sys.exit(main())
