"""`train.window_warmup_steps`: tokens attend to nearby ones before they attend to the whole row."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from test_electra import COMPUTE, KEY, make_batch, make_config, make_model
from tiny_run import STEPS, assert_same_run, tiny_config, truncate

from electra_fast.config.config import Config
from electra_fast.files import checkpoint_folder
from electra_fast.model.compute import choose_compute
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey
from electra_fast.training.pretrain import pretrain

WARMUP = 9
CHANGES = {"train.window_warmup_steps": str(WARMUP), "train.keep_checkpoints": "100", "data.sequence_length": "64"}
MODERN = {"model.architecture": "modern"}


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory, validation_corpus):
    """A run with a checkpoint every third step."""
    out = tmp_path_factory.mktemp("warmup") / "run"
    pretrain(tiny_config("modern", **CHANGES), data=validation_corpus, out=out)
    return out


def loss(model, window=0):
    batch, objective = make_batch(), objective_of(model.config)
    denominators = objective.loss_denominators(batch)
    return objective.forward(model, MicroBatch(batch, COMPUTE, RngKey(KEY), denominators, window)).loss


@pytest.mark.parametrize("window", [2, 4])
def test_a_window_makes_all_layers_local(window):
    whole = make_model(make_config(**MODERN))
    for local_attention in (2, 4):
        local = make_model(make_config(**MODERN, **{"model.local_attention": str(local_attention)}))
        for encoder in (local.generator, local.discriminator):
            encoder.is_local = [True] * len(encoder.layers)
        if local_attention == window:
            assert loss(whole, window) == loss(local) != loss(whole)
        # The narrower of both.
        assert loss(local, window) == loss(whole, min(window, local_attention))


def test_it_ends_at_its_step(warmed_up, validation_corpus, tmp_path):
    always = tiny_config("modern", **CHANGES | {"train.window_warmup_steps": str(STEPS - 1)})
    pretrain(always, data=validation_corpus, out=tmp_path / "run")
    for step in range(3, STEPS, 3):
        ours, other = (
            load_file(checkpoint_folder.path_of(run, step) / "model.safetensors")
            for run in (warmed_up, tmp_path / "run")
        )
        assert all(torch.equal(ours[name], other[name]) for name in ours) == (step <= WARMUP)


@pytest.mark.parametrize("step", [WARMUP - 3, WARMUP, WARMUP + 3])
def test_resumes_exactly_before_at_and_after_the_end(warmed_up, validation_corpus, tmp_path, step):
    run = shutil.copytree(warmed_up, tmp_path / "run")
    truncate(run, step)
    pretrain(tiny_config("modern", **CHANGES), data=validation_corpus, out=run)
    assert_same_run(run, warmed_up)


def test_a_third_of_the_steps_stays_that_of_the_start(validation_corpus, tmp_path):
    third = CHANGES | {"train.window_warmup_steps": "-1"}
    for steps in ("6", "9"):
        pretrain(tiny_config("modern", **third, **{"train.steps": steps}), data=validation_corpus, out=tmp_path)
        assert Config.load(tmp_path / "config.toml").train.window_warmup_steps == 2


def test_what_it_needs():
    narrow = tiny_config("modern", **CHANGES, **{"model.attention": "xformers"})
    with pytest.raises(ValueError, match='"xformers" has no windows and needs train.window_warmup_steps = 0'):
        choose_compute(narrow, torch.device("cpu"))
    with pytest.raises(ValueError, match="window_warmup_steps = 24 leaves none of train.steps = 24"):
        tiny_config(**{"train.window_warmup_steps": "24"})
