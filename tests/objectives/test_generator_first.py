"""`objective.generator_first`: the generator trains alone before its discriminator trains with it."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import STEPS, assert_same_run, lines, tiny_config, truncate

from electra_fast.config.config import Config
from electra_fast.files import checkpoint_folder
from electra_fast.training.pretrain import pretrain

FIRST = 9
# Log lines would fall on both sides of the switch, were there not one at the end of a stage.
CHANGES = {"objective.generator_first": str(FIRST), "train.keep_checkpoints": "100", "train.log_every": "5"}
CHANGES |= {"objective.corrective_weight": "1"}


@pytest.fixture(scope="module")
def generator_first(tmp_path_factory, validation_corpus):
    """A run that shares embeddings, with a checkpoint every third step."""
    out = tmp_path_factory.mktemp("first") / "run"
    pretrain(tiny_config(**CHANGES), data=validation_corpus, out=out)
    return out


def changed(run, before, after):
    """The submodules of which every parameter, or none, changed between two steps."""
    first, second = (load_file(checkpoint_folder.path_of(run, step) / "model.safetensors") for step in (before, after))
    found = {}
    for name in first:
        found.setdefault(name.partition(".")[0], set()).add(not torch.equal(first[name], second[name]))
    return {module for module, each in found.items() if each == {True}}, {
        module for module, each in found.items() if each == {False}
    }


SHARED = {"generator_embeddings"}  # as a checkpoint calls them
OWN, GENERATOR = {"discriminator", "discriminator_head", "corrective_head"}, {"generator", "generator_head"}


def test_the_discriminator_and_what_it_shares_begin_later(generator_first):
    assert changed(generator_first, 3, FIRST) == (GENERATOR, OWN | SHARED)
    assert changed(generator_first, FIRST, FIRST + 3) == (OWN | SHARED | GENERATOR, set())
    old, new = (
        load_file(checkpoint_folder.path_of(generator_first, step) / "optimizer.safetensors")
        for step in (FIRST, FIRST + 3)
    )
    assert (int(old["num_updates"]), int(new["num_updates"])) == (FIRST, 3)


def test_embeddings_of_its_own_train_with_the_generator(validation_corpus, tmp_path):
    changes = CHANGES | {"model.tying": "none", "train.steps": "12"}
    pretrain(tiny_config("modern", **changes), data=validation_corpus, out=tmp_path / "run")
    assert changed(tmp_path / "run", 3, FIRST) == (GENERATOR | {"generator_embeddings"}, OWN | {"embeddings"})


def test_the_log_and_the_schedule(generator_first):
    records = lines(generator_first)
    assert [record["step"] for record in records] == [5, 9, 10, 15, 20, 24]
    assert [record["discriminator_loss"] is None for record in records] == [True] * 2 + [False] * 4
    # A warmup of 4 steps and a decay to 0 by the product schedule, twice.
    expected = [(1 - step / FIRST) * min(1, step / 4) * 1e-3 for step in (4, 8)]
    expected += [(1 - step / (STEPS - FIRST)) * min(1, step / 4) * 1e-3 for step in (0, 5, 10, 14)]
    assert [record["learning_rate"] for record in records] == pytest.approx(expected)


@pytest.mark.parametrize("step", [FIRST - 3, FIRST, FIRST + 3])
def test_resumes_exactly_before_at_and_after_the_switch(generator_first, validation_corpus, tmp_path, step):
    shutil.copytree(generator_first, tmp_path / "run")
    truncate(tmp_path / "run", step)
    pretrain(tiny_config(**CHANGES), data=validation_corpus, out=tmp_path / "run")
    assert_same_run(tmp_path / "run", generator_first)


def test_a_run_can_be_extended_but_its_switch_stays(generator_first, validation_corpus, tmp_path, capsys):
    run = shutil.copytree(generator_first, tmp_path / "run")
    with pytest.raises(ValueError, match="generator_first = 9, now it is 12, which would be another model or"):
        pretrain(
            tiny_config(**CHANGES | {"objective.generator_first": "12"}),
            data=validation_corpus,
            out=run,
            allow_changes=True,
        )
    assert pretrain(tiny_config(**CHANGES | {"train.steps": "26"}), data=validation_corpus, out=run).step == 26
    rate = (1 - (24 - FIRST) / (26 - FIRST)) * 1e-3
    said = f"the learning rate of step 24 is {rate:.3g} (it was 0) and falls to 0 at step 26"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective.name": "mlm"}, 'generator_first = 9 needs objective.name = "electra"'),
        ({"generator.kind": "uniform"}, 'generator_first = 9 needs generator.kind = "model"'),
        ({"model.tying": "all", "generator.fraction": "1"}, 'needs model.tying = "none" or "embeddings"'),
        ({"train.steps": "9"}, "generator_first = 9 leaves none of train.steps = 9 to the discriminator"),
    ],
)
def test_what_it_needs(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**CHANGES | {"objective.corrective_weight": "0"} | changes)


def test_rates_follow_the_longer_stage():
    config = Config.preset("small", "modern").override({"train.steps": "1000", "objective.generator_first": "200"})
    expected = config.override({"train.steps": "800", "objective.generator_first": "0"})
    assert config.resolved().optimizer == expected.resolved().optimizer
