"""A pre-training run that takes a second: its configuration, its command, and the comparison of two runs."""

import json
import shutil
import sys

import torch
from safetensors.torch import load_file

from electra_fast.config.config import Config
from electra_fast.files import checkpoint_folder

STEPS = 24
# Checkpoints fall between log lines, so that a resume has to restore a half-filled log window.
TINY = {
    "model.dropout": "0.1",
    "data.sequence_length": "16",
    "optimizer.learning_rate": "1e-3",
    "optimizer.muon_learning_rate": "0.01",
    "optimizer.warmup_steps": "4",
    "train.steps": str(STEPS),
    "train.batch_size": "8",
    "train.accumulate": "2",
    # `auto` may choose different values for each run
    "train.precision": "fp32",
    "train.matmul": "default",
    "train.log_every": "4",
    "train.checkpoint_every": "3",
    "train.eval_every": "8",
    "train.eval_batches": "2",
}
# Bitwise equal for any number of ranks, so that runs can be compared.
EXACT = {"train.reduce": "exact"}
TIMES = {
    *("tokens_per_second", "mfu", "seconds", "step_seconds", "step_seconds_longest", "checkpoint_seconds"),
    *("slowest_rank", "slowest_rank_seconds"),
}


def tiny_config(recipe="google", **changes):
    return Config.preset("tiny", recipe).override(TINY | changes)


def command(corpora, out, recipe="google", **changes):
    """Returns the command of a run on a corpus, or on a list of corpora."""
    data = [str(corpus) for corpus in (corpora if isinstance(corpora, list) else [corpora])]
    flags = [word for name, value in (TINY | changes).items() for word in (f"--{name}", value)]
    start = [sys.executable, "-m", "electra_fast", "pretrain", "--preset", "tiny", "--recipe", recipe]
    return [*start, *data, "--out", str(out), *flags]


def lines(run, name="metrics.jsonl"):
    records = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]


def weights(run):
    return load_file(checkpoint_folder.latest(run) / "model.safetensors")


def truncate(run, step):
    """Removes the checkpoints after a step, as if the run had been killed then."""
    for later in checkpoint_folder.steps(run):
        if later > step:
            shutil.rmtree(checkpoint_folder.path_of(run, later))
    assert checkpoint_folder.steps(run)[-1] == step  # otherwise the run would start again


def resumed(original, to, step, data, config):
    """Copies a run, and continues the copy from its checkpoint of a step."""
    from electra_fast.training.pretrain import pretrain

    shutil.copytree(original, to)
    truncate(to, step)
    pretrain(data, config=config, out=to)
    return to


def assert_same_run(run, other):
    assert lines(run) == lines(other)
    assert lines(run, "evaluations.jsonl") == lines(other, "evaluations.jsonl")
    ours = weights(run)
    theirs = weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
