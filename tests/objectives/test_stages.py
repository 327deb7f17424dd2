"""Runs in two stages: `two-stage`, and `objective.generator_first`, whose generator trains alone at first."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import STEPS, assert_same_run, lines, resumed, tiny_config, weights
from variants import VARIANTS

from electra_fast.config.config import Config
from electra_fast.files import checkpoint_folder
from electra_fast.training import diagnostics
from electra_fast.training.pretrain import pretrain

SWITCH = STEPS // 2
FIRST = 9
# A log window would span the switch if there were no log line at the end of a stage.
OFTEN = {"train.keep_checkpoints": "100", "train.log_every": "5"}
TWO_STAGES = VARIANTS["two-stage"] | OFTEN
GENERATOR_FIRST = OFTEN | {"objective.generator_first": str(FIRST), "objective.corrective_weight": "1"}
GENERATOR = {"generator", "generator_head"}
DISCRIMINATOR = {"discriminator", "discriminator_head"}
OWN = DISCRIMINATOR | {"corrective_head"}
SHARED = {"generator_embeddings"}  # the checkpoint's name of the shared ones


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, validation_corpus):
    """Returns a function that makes a whole run; every third step has a checkpoint: before, at and after the switch."""
    runs = {}

    def run(name):
        if name not in runs:
            runs[name] = tmp_path_factory.mktemp("stages") / "run"
            pretrain(validation_corpus, config=tiny_config(**CHANGES[name]), out=runs[name])
        return runs[name]

    return run


CHANGES = {"two-stage": TWO_STAGES, "generator first": GENERATOR_FIRST}


def read(run, step, name="model"):
    return load_file(checkpoint_folder.path_of(run, step) / f"{name}.safetensors")


def changed(run, before, after):
    """Returns the submodules in which every parameter, or none, changed between two steps."""
    first = read(run, before)
    second = read(run, after)
    outcomes = {}
    for name in first:
        outcomes.setdefault(name.partition(".")[0], set()).add(not torch.equal(first[name], second[name]))
    return tuple({module for module, values in outcomes.items() if values == {value}} for value in (True, False))


def num_updates(run, *steps):
    return [int(read(run, step, "optimizer")["num_updates"]) for step in steps]


def test_switch_copies_freezes_and_resets_the_optimizer(run_of):
    run = run_of("two-stage")
    generator = GENERATOR | {"generator_embeddings"}
    discriminator = DISCRIMINATOR | {"embeddings"}
    assert changed(run, 3, SWITCH) == (generator, discriminator)
    assert changed(run, SWITCH, SWITCH + 3) == (discriminator, generator)
    assert num_updates(run, SWITCH, SWITCH + 3) == [SWITCH, 3]
    old, new = (read(run, step, "optimizer") for step in (SWITCH, SWITCH + 3))
    assert any("generator_head" in name for name in old) and not any("generator_head" in name for name in new)
    # After three small steps, the discriminator is near its source and far from its initial weights.
    switch = read(run, SWITCH)
    token = read(run, SWITCH + 3)["embeddings.token"]
    copied = switch["generator_embeddings.token"]
    assert (token - copied).norm() < 0.2 * (token - switch["embeddings.token"]).norm()


def test_discriminator_and_shared_parameters_train_later(run_of):
    run = run_of("generator first")
    assert changed(run, 3, FIRST) == (GENERATOR, OWN | SHARED)
    assert changed(run, FIRST, FIRST + 3) == (OWN | SHARED | GENERATOR, set())
    assert num_updates(run, FIRST, FIRST + 3) == [FIRST, 3]


def test_separate_generator_embeddings_train_in_the_first_stage(validation_corpus, tmp_path):
    """The end of a stage also has a checkpoint, even if nothing else is due."""
    changes = GENERATOR_FIRST | {"model.tying": "none", "train.steps": "10", "objective.generator_first": "7"}
    pretrain(validation_corpus, config=tiny_config("modern", **changes), out=tmp_path / "run")
    assert changed(tmp_path / "run", 3, 7) == (GENERATOR | {"generator_embeddings"}, OWN | {"embeddings"})


@pytest.mark.parametrize(("name", "switch"), [("two-stage", SWITCH), ("generator first", FIRST)])
def test_log_and_schedule(run_of, name, switch):
    records = lines(run_of(name))
    steps = sorted({5, 10, 15, 20, 24, switch})
    assert [record["step"] for record in records] == steps
    assert [record["discriminator_loss"] is None for record in records] == [step <= switch for step in steps]
    for record in records if name == "two-stage" else ():  # 50 is the weight of the discriminator's loss
        is_first = record["step"] <= switch
        expected = record["generator_loss"] if is_first else 50 * record["discriminator_loss"]
        assert record["loss"] == pytest.approx(expected) and record["generator_loss"] > 0
    # A warmup of 4 steps and a decay to 0 by the product schedule, twice.
    expected = [(1 - (step - 1) / switch) * min(1, (step - 1) / 4) * 1e-3 for step in steps if step <= switch]
    later = [step - 1 - switch for step in steps if step > switch]
    length = STEPS - switch
    expected += [(1 - step / length) * min(1, step / 4) * 1e-3 for step in later]
    assert [record["learning_rate"] for record in records] == pytest.approx(expected)


RESUMED = [("two-stage", SWITCH), ("generator first", FIRST)]
OTHERS = [("two-stage", SWITCH + 3), ("generator first", FIRST - 3), ("generator first", FIRST + 3)]


@pytest.mark.parametrize(
    ("name", "step"), [*RESUMED, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_resumes_exactly_before_at_and_after_the_switch(run_of, validation_corpus, tmp_path, capsys, name, step):
    whole = run_of(name)
    capsys.readouterr()
    assert_same_run(resumed(whole, tmp_path / "run", step, validation_corpus, tiny_config(**CHANGES[name])), whole)
    if name == "two-stage":
        stderr = f"step {SWITCH}: replaced-token detection against the frozen generator begins: the optimizer's moments"
        assert (stderr in capsys.readouterr().err) == (step <= SWITCH)


def test_diagnostics_wait_for_the_warmup_of_a_stage(run_of, validation_corpus, tmp_path, monkeypatch):
    """The discriminator is untrained at the start of its stage."""
    first_steps = []
    original = run_of("two-stage")
    monkeypatch.setattr(diagnostics.LastingWarning, "take", lambda _, *arguments: first_steps.append(arguments[-1]))
    resumed(original, tmp_path / "run", 3, validation_corpus, tiny_config(**TWO_STAGES))
    assert first_steps == [100, 100, 100, 112, 112, 112]  # at the lines of steps 5, 10, 12, 15, 20 and 24


def test_first_stage_equals_mlm(run_of, validation_corpus, tmp_path):
    """The generator's half equals a run of `mlm` with half the steps bitwise: same rows, learning rates and dropout."""
    changes = {"objective.name": "mlm", "data.masking": "tokens", "train.steps": str(SWITCH), "train.log_every": "5"}
    pretrain(validation_corpus, config=tiny_config(**changes), out=tmp_path / "run")
    alone = weights(tmp_path / "run")
    whole = read(run_of("two-stage"), SWITCH)
    assert all(torch.equal(alone[name], whole[name]) for name in alone)


def test_extended_run_keeps_its_switch(run_of, validation_corpus, tmp_path, capsys):
    for name, change, stderr in (
        ("two-stage", {"train.steps": "48"}, "train.steps = 48, but .* with 24, and a change would move the boundary"),
        ("generator first", {"objective.generator_first": "12"}, "generator_first = 12, but .* with 9, and a change"),
    ):
        run = shutil.copytree(run_of(name), tmp_path / name)
        with pytest.raises(ValueError, match=stderr):
            pretrain(validation_corpus, config=tiny_config(**CHANGES[name] | change), out=run, allow_changes=True)
    longer = tiny_config(**GENERATOR_FIRST | {"train.steps": "26"})
    assert pretrain(validation_corpus, config=longer, out=run).step == 26
    rate = (1 - (24 - FIRST) / (26 - FIRST)) * 1e-3
    stderr = f"the learning rate at step 24 is {rate:.3g} (before: 0) and falls to 0 at step 26"
    assert stderr in capsys.readouterr().err


def test_learning_rates_follow_the_longer_stage():
    config = Config.preset("small", "modern").override({"train.steps": "1000", "objective.generator_first": "200"})
    expected = config.override({"train.steps": "800", "objective.generator_first": "0"})
    assert config.resolved().optimizer == expected.resolved().optimizer
