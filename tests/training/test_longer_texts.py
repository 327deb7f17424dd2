"""Runs that continue with longer texts: positions and rotary bases grow; compared with `transformers`."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_run import assert_same_run, tiny_config, truncate

from electra_fast.checkpoint import lengthened
from electra_fast.config.config import Config
from electra_fast.files import checkpoint_folder
from electra_fast.huggingface.config import CLASSES
from electra_fast.huggingface.export import export, import_
from electra_fast.huggingface.folder import read_model
from electra_fast.training.pretrain import pretrain

LOCAL = {"model.local_attention": "32", "model.global_attention_every": "2"}
SMALL = {"model.hidden_size": "32", "model.intermediate_size": "48", "train.batch_size": "1", "train.accumulate": "1"}
SMALL |= {"train.eval_every": "0", "train.checkpoint_every": "1", "train.keep_checkpoints": "9", "train.log_every": "1"}
GROWN = {"train.steps": "4", "data.sequence_length": "1024", "model.max_positions": "1024"}
ROTARY = {"model.rope_theta": "160000", "model.local_rope_theta": "20000"}


@pytest.fixture(autouse=True)
def quick_verdict(monkeypatch):
    """Shortens the evaluation at the end, since rows of 1,024 tokens take long."""
    monkeypatch.setattr("electra_fast.training.trainer._VERDICT_BATCHES", 1)


def grown_run(run, corpus, recipe, short, long):
    pretrain(corpus, config=tiny_config(recipe, **SMALL | short | {"train.steps": "2"}), out=run)
    with pytest.raises(ValueError, match="--allow-changes"):
        pretrain(corpus, config=tiny_config(recipe, **SMALL | short | long), out=run)
    pretrain(corpus, config=tiny_config(recipe, **SMALL | short | long), out=run, allow_changes=True)


@pytest.mark.parametrize(
    ("recipe", "short", "long", "length", "step"),
    [
        ("google", {}, GROWN, 1024, 2),
        pytest.param(
            *("modern", LOCAL, GROWN | ROTARY | {"model.max_positions": "8192"}, 8192, 3), marks=pytest.mark.slow
        ),
    ],
)
def test_run_continues_with_longer_texts(validation_corpus, tmp_path, capsys, recipe, short, long, length, step):
    """The run resumes exactly, its export gives the same logits in `transformers`, and it cannot shrink."""
    grown_run(tmp_path / "run", validation_corpus, recipe, short, long)
    message = "the new positions start as copies of the learned positions and their moments"
    assert (message in capsys.readouterr().err) == (recipe == "google")
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    truncate(tmp_path / "run", step)  # before the first checkpoint of the new length, or after it
    pretrain(config=Config.load(tmp_path / "run" / "config.toml"))
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    record = json.loads((tmp_path / "run" / "changes.jsonl").read_text())
    assert record["step"] == 2 and record["changes"].keys() == long.keys()

    export(tmp_path / "run", out=tmp_path / "out")
    model = read_model(tmp_path / "out")
    ids = torch.randint(5, model.config.model.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    folder = tmp_path / "out" / "discriminator"
    theirs = getattr(transformers, CLASSES[model.config.model.architecture, "discriminator"]).from_pretrained(folder)
    with torch.no_grad():
        logits = theirs.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        expected = logits.view(1, length, -1)[..., -1]  # two labels of ModernBERT, one of ELECTRA
        assert (model.discriminator_logits(ids, torch.ones_like(ids)) - expected).abs().max() <= 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert tokenizer.model_max_length == theirs.config.max_position_embeddings == length
    for name in ROTARY if recipe == "modern" else ["model.max_positions"]:
        smaller = Config.load(tmp_path / "run/config.toml", {"data.sequence_length": "16", name: "128"})
        with pytest.raises(ValueError, match=rf"run: {name} = .*: must be at least .*, the value of this run"):
            pretrain(config=smaller, allow_changes=True)


def test_new_positions_copy_learned_ones(validation_corpus, tmp_path):
    run = tmp_path / "run"
    pretrain(validation_corpus, config=tiny_config(**SMALL | {"train.steps": "2"}), out=run)
    for name in ("model", "optimizer"):
        tensors = load_file(checkpoint_folder.latest(run) / f"{name}.safetensors")
        longer = lengthened(tensors, 300)
        changed = [key for key in tensors if longer[key].shape != tensors[key].shape]
        moments = {"embeddings.position", "exp_avg.embeddings.position", "exp_avg_sq.embeddings.position"}
        assert changed and {key.replace("generator_", "") for key in changed} <= moments
        for key in changed:
            old = tensors[key]
            new = longer[key]
            assert torch.equal(new[:128], old) and torch.equal(new[128:256], old) and torch.equal(new[256:], old[:44])


def test_import_lengthened_at_start_of_training(validation_corpus, tmp_path):
    """It needs no permission, since nothing has been trained with other sizes in this run."""
    pretrain(validation_corpus, config=tiny_config("modern", **SMALL, **{"train.steps": "1"}), out=tmp_path / "first")
    export(tmp_path / "first", out=tmp_path / "out")
    import_(tmp_path / "out", out=tmp_path / "run")
    longer = Config.load(tmp_path / "run/config.toml", GROWN | {"model.rope_theta": "160000", "train.steps": "1"})
    pretrain(validation_corpus, config=longer, out=tmp_path / "run")
    assert read_model(tmp_path / "run").config.model.rope_theta == 160_000
