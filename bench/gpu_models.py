"""Second of three GPU scripts: larger models, attention backends, and kernels compared with others.

    python bench/gpu_models.py [--out gpu_models] [--device cpu --quick]

In under nine minutes, most informative results first. See `bench/README.md`.
"""

import sys

from gpu_check import STEP
from lib.groups import Group, main

# Operations of `lib/kernel_cases.py` by words in their names, the most expensive in a step first.
KERNELS = ("attention", "feed_forward", "generator_head", "layer_norm residual_norm", "embedding_norm", "gelu geglu")
KERNELS += ("replaced_logits discriminator_loss", "linear rotary_qkv", "corrupt dropout sample_alias")


def attention(shape: str, backend: str) -> Group:
    return Group(f"{shape}, {backend}", (*STEP, shape, "--model.attention", backend), 75)


def doctor(preset: str, recipe: str) -> Group:
    command = ("-m", "electra_fast", "doctor", "--preset", preset, "--recipe", recipe)
    return Group(f"doctor, {preset} {recipe}", command, 90)


GROUPS = (
    doctor("base", "modern"),
    *(attention("base:128:google:0", backend) for backend in ("varlen", "flex")),
    Group("large:64:google:0", (*STEP, "large:64:google:0"), 75),
    doctor("small", "google"),
    Group("small:128:google:0", (*STEP, "small:128:google:0"), 30),
    *(Group(f"kernels: {words}", ("kernels.py", "--only", *words.split()), 75) for words in KERNELS),
    *(attention("small:1024:google:0", backend) for backend in ("varlen", "sdpa", "flex", "xformers")),
    *(attention("base:128:google:0", backend) for backend in ("sdpa", "xformers")),
)

QUICK_GROUPS = (
    doctor("tiny", "google"),
    attention("tiny:8:google:0", "sdpa"),
    *(Group(f"kernels: {words}", ("kernels.py", "--only", *words.split()), 90) for words in KERNELS),
)

if __name__ == "__main__":
    sys.exit(main("gpu_models", GROUPS, QUICK_GROUPS))
