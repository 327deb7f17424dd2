"""The seam of objectives: what each in the table must give, and one that trains in two stages."""

import shutil

import pytest
import torch
from test_electra import COMPUTE, KEY, make_batch, make_config, make_model
from tiny_run import STEPS, assert_same_run, lines, tiny_config, weights

from electra_fast import checkpoint_folder, ops
from electra_fast.compute import RngKey
from electra_fast.model import HEADS
from electra_fast.objectives import OBJECTIVES, losses, objective_of
from electra_fast.objectives.electra import ElectraObjective
from electra_fast.objectives.objective import Output, Stage
from electra_fast.training.pretrain import pretrain

GENERATOR = ("generator_embeddings", "generator", "generator_head")
DISCRIMINATOR = ("embeddings", "discriminator", "discriminator_head")
SWITCH = 9


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_keeps_its_contract(name):
    model, batch = make_model(make_config(**{"objective.name": name})), make_batch()
    objective = objective_of(model.config)
    denominators = objective.loss_denominators(batch)
    output = objective.forward(model, batch, COMPUTE, RngKey(KEY), denominators)
    assert output.loss.dtype == torch.float32 and output.loss.shape == ()
    assert set(output.totals) == set(objective.metric_totals) and "tokens" in output.totals
    assert all(total.shape == () and not total.requires_grad for total in output.totals.values())
    found = objective.metrics({total: float(value) for total, value in output.totals.items()})
    assert (
        objective_of(make_config()).metrics(dict.fromkeys(ElectraObjective.metric_totals, 1.0)).keys() <= found.keys()
    )
    assert found["loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    assert tuple(objective.networks()) == objective.roles == tuple(model.networks)
    for role, network in objective.networks().items():
        assert all(head.kind in HEADS and hasattr(model, at) for at, head in network.heads.items())
        assert all(objective.describe(role))
    assert objective.stage(0) == objective.stage(model.config.train.steps - 1)


class GeneratorStage(ElectraObjective):
    """Masked language modelling; the discriminator waits."""

    def forward(self, model, batch, compute, rng_key, denominators):
        inputs = losses.read_inputs(model, batch, compute, rng_key)
        loss, totals = losses.mlm_loss(losses.generate(model, inputs, None), inputs.slots)
        loss = losses.divide(loss, denominators, "masked_weight")
        return Output(loss, totals | {"tokens": inputs.valid_T.sum()})


class DiscriminatorStage(ElectraObjective):
    """Replaced-token detection against a generator that learns no more."""

    def begin_stage(self, model):
        with torch.no_grad():
            model.embeddings.token.copy_(model.generator_embeddings.token)


class TwoStages(ElectraObjective):
    def stage(self, step):
        if step < SWITCH:
            return Stage("generator", GeneratorStage(self.config), 0, SWITCH, frozen=DISCRIMINATOR)
        steps = self.config.train.steps - SWITCH
        return Stage("discriminator", DiscriminatorStage(self.config), SWITCH, steps, frozen=GENERATOR)


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory, validation_corpus):
    """A run in two stages, with a checkpoint every third step: before, at and after the switch."""
    out = tmp_path_factory.mktemp("stages") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OBJECTIVES, "electra", TwoStages)
        pretrain(config(), data=validation_corpus, out=out)
    return out


def config():
    return tiny_config(**{"model.tying": "none", "train.keep_checkpoints": "100", "train.log_every": "1"})


def test_a_switch_freezes_and_starts_afresh(two_stages, validation_corpus):
    def at(step):
        from safetensors.torch import load_file

        folder = checkpoint_folder.path_of(two_stages, step)
        return load_file(folder / "model.safetensors"), load_file(folder / "optimizer.safetensors")

    def changed(before, after, prefixes):
        names = [name for name in before if name.startswith(tuple(f"{prefix}." for prefix in prefixes))]
        assert names
        return {not torch.equal(before[name], after[name]) for name in names}

    (first, _), (switch, old), (next_one, new), (last, _) = (at(step) for step in (3, SWITCH, SWITCH + 3, STEPS))
    assert changed(first, switch, GENERATOR) == {True} and changed(first, switch, DISCRIMINATOR) == {False}
    assert changed(switch, last, GENERATOR) == {False} and changed(switch, next_one, DISCRIMINATOR) == {True}
    assert (int(old["num_updates"]), int(new["num_updates"])) == (SWITCH, 3)
    assert any("generator_head" in name for name in old) and not any("generator_head" in name for name in new)
    rates = [line["learning_rate"] for line in lines(two_stages)]
    # The product schedule of each stage: 0 at its first step, and a warmup of 4 steps.
    assert rates[0] == rates[SWITCH] == 0 and rates[SWITCH + 1] > 0 and rates[SWITCH - 1] < rates[4]
    assert all(line["discriminator_loss"] == 0 for line in lines(two_stages)[:SWITCH])
    assert all(line["discriminator_loss"] > 0 for line in lines(two_stages)[SWITCH:])


@pytest.mark.parametrize("step", [SWITCH - 3, SWITCH, SWITCH + 3])
def test_resumes_exactly_in_either_stage(two_stages, validation_corpus, tmp_path, monkeypatch, capsys, step):
    shutil.copytree(two_stages, tmp_path / "run")
    for later in checkpoint_folder.steps(tmp_path / "run"):
        if later > step:
            shutil.rmtree(checkpoint_folder.path_of(tmp_path / "run", later))
    monkeypatch.setitem(OBJECTIVES, "electra", TwoStages)
    pretrain(config(), data=validation_corpus, out=tmp_path / "run")
    assert_same_run(tmp_path / "run", two_stages)
    said = f"step {SWITCH}: discriminator begins, with a new optimizer state and schedule"
    assert (said in capsys.readouterr().err) == (step <= SWITCH)


def test_a_new_total_does_not_break_a_resume(whole_run, validation_corpus, tmp_path, monkeypatch):
    """Checkpoints store totals by name: one that an older version did not know begins at 0."""

    class WithOneMore(ElectraObjective):
        metric_totals = (*ElectraObjective.metric_totals, "padding")

        def forward(self, model, batch, *others):
            output = super().forward(model, batch, *others)
            return Output(output.loss, output.totals | {"padding": (batch["segment_ids"] == 0).sum()})

    shutil.copytree(whole_run, tmp_path / "run")
    latest = checkpoint_folder.steps(tmp_path / "run")[-1]
    shutil.rmtree(checkpoint_folder.path_of(tmp_path / "run", latest))  # the one before it lies within a log window
    monkeypatch.setitem(OBJECTIVES, "electra", WithOneMore)
    pretrain(tiny_config(), data=validation_corpus, out=tmp_path / "run")
    assert lines(tmp_path / "run") == lines(whole_run)
    ours, theirs = weights(tmp_path / "run"), weights(whole_run)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_shared_pieces_name_the_totals_of_the_kernels():
    assert set(ops.DISCRIMINATOR_TOTALS) < set(ElectraObjective.metric_totals)
