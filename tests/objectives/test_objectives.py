"""Every objective in a run: its contract, its required settings, resuming, evaluation, export."""

import math
import shutil

import pytest
import torch
import transformers
from test_electra import COMPUTE, KEY, VOCAB, make_batch, make_config, make_model, run
from tiny_run import assert_same_run, lines, resumed, tiny_config, truncate
from variants import DIFFERENT, VARIANTS

import electra_fast as ef
from electra_fast import _data
from electra_fast.config.config import Config
from electra_fast.config.presets import OBJECTIVE_SPECS
from electra_fast.files import checkpoint_folder
from electra_fast.huggingface.encoder import load_encoder
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import METRICS, MicroBatch, RngKey, generate, read_inputs
from electra_fast.ops.sampling import alias_table
from electra_fast.training.pretrain import pretrain


@pytest.mark.parametrize("name", VARIANTS)
def test_objective_follows_the_contract(name):
    model = make_model(make_config(**VARIANTS[name]))
    batch = make_batch()
    objective = objective_of(model.config)
    output = run(model, batch)
    assert output.loss.dtype == torch.float32 and output.loss.shape == ()
    assert set(output.totals) <= set(objective.metric_totals) and output.totals["tokens"] == 40
    assert all(total.shape == () and not total.requires_grad for total in output.totals.values())
    totals = dict.fromkeys(objective.metric_totals, 0.0)
    metrics = objective.metrics(totals | {total: float(value) for total, value in output.totals.items()})
    assert tuple(metrics)[: len(METRICS)] == METRICS
    assert metrics["loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    networks = objective.networks()
    assert tuple(networks) == tuple(model.networks) == OBJECTIVE_SPECS[objective.name].roles[-len(networks) :]
    for role, network in networks.items():
        assert all(hasattr(model, at) for at in network.heads) and f"{role}_head" in network.heads
        assert all(objective.describe(role))
    has_option = objective.name == "electra" and not model.config.objective.corrective_weight
    assert objective.could_have("corrective_head") == has_option
    stages = objective.stages()
    num_steps = model.config.train.steps
    assert stages[0].first_step == 0 and sum(stage.num_steps for stage in stages) == num_steps
    assert objective.stage(0) == stages[0] and objective.stage(num_steps - 1) == stages[-1]


@pytest.mark.parametrize("name", DIFFERENT)
def test_padding_rows_are_neither_sampled_nor_trained(name):
    """Such rows pad tables to a size that suits GPUs."""
    model = make_model(make_config(**DIFFERENT[name]))
    batch = make_batch(vocab=20)
    num_entries = 20
    model.limit_vocabulary(num_entries)
    if model.config.generator.kind == "unigram":
        model.proposal.set_counts(torch.ones(num_entries))
    inputs = read_inputs(model, MicroBatch(batch, COMPUTE, RngKey(KEY)))
    samples = [generate(model, inputs, RngKey(KEY + step)).sample_M for step in range(20)]
    assert all((sample_M < num_entries).all() for sample_M in samples) and len(torch.cat(samples).unique()) > 5
    run(model, batch).loss.backward()
    tables = [table for table in model.parameters() if len(table) == VOCAB and table.grad is not None]
    assert tables and not any(table.grad[num_entries:].any() for table in tables)
    assert any(table.grad[:num_entries].any() for table in tables)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objective.name": "two-stage"},
            'generator.fraction = 1.0, not 0.5, model.tying = "none", not "embeddings"$',
        ),
        (VARIANTS["two-stage"] | {"train.steps": "1"}, "needs train.steps = 2 or more, one per stage"),
        ({"objective.name": "adversarial", "objective.temperature": "2"}, "needs objective.temperature = 1.0"),
        ({"objective.name": "adversarial", "generator.kind": "unigram"}, 'needs generator.kind = "model"'),
        ({"objective.name": "mlm", "objective.contrastive_weight": "1"}, 'needs objective.name = "electra"'),
        ({"objective.contrastive_weight": "1", "data.masking": "with-repeats"}, "needs data.masking = .*twice"),
        ({"objective.disc_positions": "random"}, '= "random": needs objective.name = "electra15"'),
        ({"generator.kind": "uniform", "objective.disallow_correct": "true"}, "needs objective.disallow_correct = f"),
        ({"objective.generator_first": "9", "objective.name": "mlm"}, '_first = 9: needs objective.name = "electra"'),
        ({"objective.generator_first": "9", "generator.kind": "uniform"}, '= 9: needs generator.kind = "model"'),
        (
            {"objective.generator_first": "9", "model.tying": "all", "generator.fraction": "1"},
            'needs model.tying = "none" or "embeddings"',
        ),
        (
            {"objective.generator_first": "9", "train.steps": "9"},
            "generator_first = 9: must be less than train.steps = 9, or the discriminator",
        ),
        ({"objective.name": "replace"}, "objective.name = 'replace': must be one of electra, mlm, electra15, replace"),
    ],
)  # fmt: skip
def test_conflicting_settings_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        Config.preset("tiny", "paper").override(changes)


def test_every_masking_of_distinct_tokens_is_accepted():
    for masking in {*_data.MASKINGS} - {"with-repeats"}:
        config = Config.preset("tiny", "paper").override({"objective.contrastive_weight": 1.0, "data.masking": masking})
        assert config.data.masking == masking


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["electra15, random positions", "contrastive, corrective", "all-tokens-mlm", "adversarial, plain heads"]
)
def test_trains_resumes_evaluates_and_exports(name, validation_corpus, tmp_path):
    """The losses fall, a resume repeats the run bitwise, and `evaluate` and the export agree with it."""
    changes = {"train.keep_checkpoints": "100", "train.log_every": "8", "model.dropout": "0.1"}
    settings = tiny_config(**changes | (VARIANTS | DIFFERENT)[name])
    pretrain(validation_corpus, config=settings, out=tmp_path / "run")
    first, *_, last = lines(tmp_path / "run")
    assert all(value is None or math.isfinite(value) for value in last.values())
    if "adversarial" not in name and "random" not in name:
        assert last["loss"] < first["loss"]
    assert_same_run(resumed(tmp_path / "run", tmp_path / "again", 15, validation_corpus, settings), tmp_path / "run")

    metrics = ef.evaluate(tmp_path / "run", validation_corpus)
    validation = lines(tmp_path / "run", "evaluations.jsonl")[-1]
    assert metrics.keys() - {"unigram_sequence_length"} == validation.keys() - {"step"} | {"unigram_auc"}
    has_detector = "discriminator" in name or metrics["discriminator_accuracy"] is not None
    assert (metrics["discriminator_auc"] is not None) == has_detector
    if "plain" in name:
        with pytest.raises(ValueError, match='no class of transformers has model.heads = "plain"'):
            ef.export(tmp_path / "run", out=tmp_path / "hf")
        return
    ef.export(tmp_path / "run", out=tmp_path / "hf")
    ours = ef.load(tmp_path / "run").model
    theirs = ef.load(tmp_path / "hf").model
    names = {f"{role}_logits" for role in ours.networks}
    ids = torch.randint(5, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    folders = {folder.name for folder in (tmp_path / "hf").iterdir()}
    assert folders == {*ours.networks, "encoder"} and ours.networks.keys() == theirs.networks.keys()
    for logits in names:
        assert torch.equal(getattr(theirs, logits)(ids), getattr(ours, logits)(ids))
    if "corrective" in name:
        exported = ef.evaluate(tmp_path / "hf", validation_corpus, sequence_length=16)
        assert exported["discriminator_auc"] == pytest.approx(metrics["discriminator_auc"], abs=1e-6)
        assert "corrective_loss" in metrics and "corrective_loss" not in exported  # the folder has no such head
    # Fine-tuning starts from the result, not from its generator, for the run and for the export.
    encoder = load_encoder(tmp_path / "run")
    again = load_encoder(tmp_path / "hf")
    assert encoder.content_hash == again.content_hash
    assert torch.equal(encoder.state["embeddings.token"], ours.embeddings.token)
    ef.import_(tmp_path / "hf", out=tmp_path / "imported")
    assert ef.load(tmp_path / "imported").model.config.objective == ours.config.objective
    few = settings.override({"train.steps": "2", "optimizer.warmup_steps": "1", "train.eval_every": "0"})
    assert pretrain(validation_corpus, config=few, out=tmp_path / "imported").step == 2


@pytest.mark.slow
def test_heads_that_transformers_lacks_are_listed(validation_corpus, tmp_path, capsys):
    settings = tiny_config(**VARIANTS["all-tokens-mlm"] | {"train.steps": "2", "train.eval_every": "0"})
    pretrain(validation_corpus, config=settings, out=tmp_path / "run")
    capsys.readouterr()
    ef.export(tmp_path / "run", out=tmp_path / "hf")
    assert "note: copy_head: not exported, since no class of transformers has this head" in capsys.readouterr().err
    card = (tmp_path / "hf/encoder/README.md").read_text()
    assert "the head that decides whether to copy a token is not exported" in card
    ids = torch.randint(5, 20, (2, 9))
    for role in ("encoder", "generator"):
        folder = tmp_path / "hf" / role
        theirs, info = transformers.ElectraForMaskedLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        with torch.no_grad():
            expected = getattr(ef.load(tmp_path / "run").model, f"{role}_logits")(ids)
            assert (theirs.eval()(ids).logits - expected).abs().max() < 1e-5
    ef.import_(tmp_path / "hf", out=tmp_path / "again")
    assert "note: copy_head: not in the folder, so it starts untrained" in capsys.readouterr().err


def test_exported_unigram_model_reads_corpus_counts(validation_corpus, tmp_path, capsys):
    """An export has no counts, so evaluation and training after an import read the corpus."""
    changes = {"generator.kind": "unigram", "train.steps": "2", "train.eval_every": "0"}
    pretrain(validation_corpus, config=tiny_config(**changes), out=tmp_path / "run")
    ef.export(tmp_path / "run", out=tmp_path / "hf")
    expected = ef.evaluate(tmp_path / "run", validation_corpus)
    assert "note" not in capsys.readouterr().err
    metrics = ef.evaluate(tmp_path / "hf", validation_corpus)
    assert [value is None for value in metrics.values()] == [value is None for value in expected.values()]
    expected = {name: value for name, value in expected.items() if value is not None}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert "token counts are not exported; using the counts of this corpus" in capsys.readouterr().err

    ef.import_(tmp_path / "hf", out=tmp_path / "imported")
    pretrain(validation_corpus, config=tiny_config(**changes), out=tmp_path / "imported")
    table = alias_table(torch.from_numpy(ef.Corpus(validation_corpus).token_counts()))
    for name in ("run", "imported"):
        assert torch.equal(ef.load(tmp_path / name).model.proposal.table_V2, table)


def test_resume_accepts_new_totals(whole_run, validation_corpus, tmp_path):
    """Checkpoints store totals by name, so a total that an older version did not have starts at 0."""
    shutil.copytree(whole_run, tmp_path / "run")
    truncate(tmp_path / "run", 21)  # within a log window
    latest = checkpoint_folder.latest(tmp_path / "run")
    state = checkpoint_folder.read_state(latest)
    (latest / "state.json").unlink()
    assert state.log_window.totals.pop("contrastive_loss") == 0
    checkpoint_folder.seal(latest, state)
    pretrain(validation_corpus, config=tiny_config(), out=tmp_path / "run")
    assert_same_run(tmp_path / "run", whole_run)
