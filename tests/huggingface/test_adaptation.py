"""`import --generator` and `import --mlm`: runs that continue from one encoder, compared with `transformers`."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from in_process import run
from test_encoder import IDS, MASK, SIZES, hf_folder, hf_hidden
from test_export import WORDS, make_run
from test_pair_templates import save_tokenizer
from torch import Tensor

from electra_fast.config.config import Config
from electra_fast.files import checkpoint_folder
from electra_fast.files.checkpoint_folder import TrainState
from electra_fast.huggingface.adaptation import settings_of
from electra_fast.huggingface.export import export, import_
from electra_fast.huggingface.folder import read_model
from electra_fast.model.model import Electra


@torch.no_grad()
def hidden(model: Electra, role: str) -> Tensor:
    states: Tensor = model.hidden(role, *model._flat_inputs(IDS, MASK, None))
    return states.view(*IDS.shape, -1)


@torch.no_grad()
def hf_logits(model: transformers.PreTrainedModel) -> Tensor:
    logits_BL: Tensor = model(input_ids=IDS, attention_mask=MASK).logits
    return logits_BL


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape and expected.std() > 0.01
    assert (actual - expected)[MASK.bool()].abs().max() <= 1e-5


CLASSES: dict[str, dict[str, Any]] = {
    "ElectraForPreTraining": {"hidden_dropout_prob": 0.2},
    "ElectraModel": {"embedding_size": 64},
    "ElectraForMaskedLM": {},
    "BertModel": {},
    "ElectraForSequenceClassification": {"num_labels": 3},
    "ModernBertModel": {"local_attention": 8},
    "ModernBertForMaskedLM": {},
    "ModernBertForTokenClassification": {"num_labels": 1},  # its head has the shape of a discriminator's
}


@pytest.mark.parametrize("name", CLASSES)
def test_encoder_of_any_class_becomes_discriminator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    theirs = hf_folder(tmp_path / "model", name, **CLASSES[name])
    import_(tmp_path / "model", out=tmp_path / "run", generator="small")
    stderr = capsys.readouterr().err
    ours = read_model(tmp_path / "run")
    assert_close(hidden(ours, "discriminator"), hf_hidden(theirs))
    config = ours.config
    assert ("note: discriminator_head: not in" in stderr) == (name != "ElectraForPreTraining")
    if name == "ElectraForPreTraining":
        assert_close(ours.discriminator_logits(IDS, MASK).detach(), hf_logits(theirs))
        assert config.model.dropout == 0.2
    assert (config.objective.name, config.generator.fraction, config.model.tying) == ("electra", 0.25, "embeddings")
    assert ours.generator_embeddings is ours.embeddings and "note: generator: new, so it starts untrained" in stderr
    settings = settings_of(config.model)
    assert all(f"{key} = " in stderr for key in settings)
    assert (settings["data.sequence_length"], settings["optimizer.learning_rate"]) == (
        SIZES["max_position_embeddings"],
        2.5e-4,
    )
    assert {key: config.value(key) for key in settings} == settings
    state = TrainState(imported=True, token_type_1_trained=True)
    assert checkpoint_folder.read_state(checkpoint_folder.latest(tmp_path / "run")) == state


@pytest.mark.parametrize(("num_heads", "fraction"), [(12, 0.25), (16, 0.25), (2, 0.5), (6, 1 / 3)])
def test_small_generator_has_whole_number_of_heads(tmp_path: Path, num_heads: int, fraction: float) -> None:
    hf_folder(tmp_path / "model", "ElectraModel", hidden_size=96, num_attention_heads=num_heads)
    import_(tmp_path / "model", out=tmp_path / "run", generator="small")
    assert Config.load(tmp_path / "run" / "config.toml").generator.fraction == pytest.approx(fraction)


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [("ElectraForMaskedLM", 4), ("ModernBertForMaskedLM", 2), ("RobertaForMaskedLM", 1), ("ElectraForPreTraining", 2)],
)
def test_first_layers_become_generator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, num_layers: int
) -> None:
    """With all layers, the generator is a copy that shares no weights."""
    theirs = hf_folder(tmp_path / "model", name)
    import_(tmp_path / "model", out=tmp_path / "run", generator=f"same-layers:{num_layers}")
    ours = read_model(tmp_path / "run")
    stderr = capsys.readouterr().err
    assert ours.config.model.tying == "embeddings" and ours.config.generator_shape().num_layers == num_layers
    assert_close(hidden(ours, "discriminator"), hf_hidden(theirs))
    layers = theirs.base_model.layers if name.startswith("Modern") else theirs.base_model.encoder.layer
    del layers[num_layers:]
    has_head = name.endswith("MaskedLM")
    assert ("note: generator_head: not in" in stderr) != has_head
    if has_head:
        assert_close(ours.generator_logits(IDS, MASK).detach(), hf_logits(theirs))
    else:
        assert_close(hidden(ours, "generator"), hf_hidden(theirs))


# A generator with half of the heads; smaller models of a family have narrower embeddings.
HALF = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
GENERATORS: list[tuple[str, str, dict[str, Any], int]] = [
    ("ElectraModel", "ElectraForMaskedLM", {"embedding_size": 24, "num_hidden_layers": 2}, 24),
    ("ElectraModel", "ElectraForMaskedLM", {}, 0),
    ("ModernBertForMaskedLM", "ModernBertForMaskedLM", {"num_hidden_layers": 2}, 32),
]


@pytest.mark.parametrize(("name", "small_name", "settings", "embedding_size"), GENERATORS)
def test_other_model_becomes_generator(
    tmp_path: Path, name: str, small_name: str, settings: dict[str, Any], embedding_size: int
) -> None:
    theirs = hf_folder(tmp_path / "model", name)
    small = hf_folder(tmp_path / "small", small_name, seed=1, **HALF | settings)
    import_(tmp_path / "model", out=tmp_path / "run", generator=tmp_path / "small")
    ours = read_model(tmp_path / "run")
    assert (ours.config.model.tying, ours.config.generator.embedding_size) == ("none", embedding_size)
    assert_close(hidden(ours, "discriminator"), hf_hidden(theirs))
    assert_close(ours.generator_logits(IDS, MASK).detach(), hf_logits(small))
    export(tmp_path / "run", out=tmp_path / "out")
    reloaded = getattr(transformers, small_name).from_pretrained(tmp_path / "out" / "generator").eval()
    assert_close(hf_logits(reloaded), hf_logits(small))
    import_(tmp_path / "out", out=tmp_path / "again")
    assert read_model(tmp_path / "again").config.generator == ours.config.generator
    assert_close(read_model(tmp_path / "again").generator_logits(IDS, MASK).detach(), hf_logits(small))


def test_equal_embeddings_are_shared(tmp_path: Path) -> None:
    model = hf_folder(tmp_path / "model", "ElectraModel")
    small = transformers.ElectraForMaskedLM(transformers.ElectraConfig(**SIZES | HALF | {"embedding_size": 32}))
    small.electra.embeddings.load_state_dict(model.embeddings.state_dict())
    small.save_pretrained(tmp_path / "small")
    (tmp_path / "small" / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    import_(tmp_path / "model", out=tmp_path / "run", generator=tmp_path / "small")
    ours = read_model(tmp_path / "run")
    assert ours.config.model.tying == "embeddings" and ours.embeddings is ours.generator_embeddings


@pytest.mark.parametrize(
    ("recipe", "source"),
    [("google", "run/checkpoints/step-3"), ("google", "out"), ("modern", "run"), ("modern", "out/discriminator")],
)
def test_run_and_export_are_adapted(tmp_path: Path, recipe: str, source: str) -> None:
    """Their projection may be separate or multiplied into the table."""
    whole = make_run(tmp_path / "run", recipe, {"model.embedding_size": 48})
    export(tmp_path / "run", out=tmp_path / "out")
    for number, generator in enumerate(("small", "same-layers:1", str(tmp_path / "run"), str(tmp_path / "out"))):
        import_(tmp_path / source, out=tmp_path / str(number), generator=generator)
        ours = read_model(tmp_path / str(number))
        assert_close(ours.discriminator_logits(IDS, MASK).detach(), whole.discriminator_logits(IDS, MASK).detach())
    assert_close(ours.generator_logits(IDS, MASK).detach(), whole.generator_logits(IDS, MASK).detach())


def test_run_continues_with_its_settings_and_new_schedule(tmp_path: Path) -> None:
    """It keeps all heads but no paths, so that the new run cannot overwrite the old run's mirror."""
    settings = {"objective.disc_weight": 7.0, "data.mask_prob": 0.3, "optimizer.warmup_steps": 1}
    whole = make_run(tmp_path / "run", "modern", settings | {"train.mirror": "s3://bucket/run"})
    import_(tmp_path / "run", out=tmp_path / "again")
    ours = read_model(tmp_path / "again")
    assert all(torch.equal(parameter, whole.state_dict()[name]) for name, parameter in ours.state_dict().items())
    assert ours.state_dict().keys() == whole.state_dict().keys() and "corrective_head.bias" in whole.state_dict()
    fresh = {"optimizer.warmup_steps": -1, "train.mirror": "", "data.corpus": "", "train.out": str(tmp_path / "again")}
    assert ours.config == whole.config.override(fresh)
    state = TrainState(imported=True, token_type_1_trained=False)
    assert checkpoint_folder.read_state(checkpoint_folder.latest(tmp_path / "again")) == state


@torch.no_grad()
@pytest.mark.parametrize("source", ["run", "run/checkpoints/step-3", "out", "out/discriminator"])
def test_discriminator_becomes_masked_language_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    """Its head is the corrective head, which an export does not contain."""
    whole = make_run(tmp_path / "run", "modern", {"model.embedding_size": 48})
    export(tmp_path / "run", out=tmp_path / "out")
    import_(tmp_path / source, out=tmp_path / "mlm", mlm=True)
    ours = read_model(tmp_path / "mlm")
    stderr = capsys.readouterr().err
    assert (ours.config.objective.name, list(ours.networks)) == ("mlm", ["generator"])
    assert_close(hidden(ours, "generator"), hidden(whole, "discriminator"))
    states = hidden(whole, "discriminator")
    expected = whole.corrective_head(states, whole.embeddings.token)
    has_head = source.startswith("run")
    assert ("note: generator_head: not in" in stderr) != has_head and "objective.disc_weight" not in stderr
    if has_head:
        assert_close(ours.generator_logits(IDS, MASK), expected)


def test_masked_language_model_of_other_class_keeps_head(tmp_path: Path) -> None:
    theirs = hf_folder(tmp_path / "model", "BertForMaskedLM")
    import_(tmp_path / "model", out=tmp_path / "mlm", mlm=True)
    assert_close(read_model(tmp_path / "mlm").generator_logits(IDS, MASK).detach(), hf_logits(theirs))


def test_unsuitable_sources_are_rejected(tmp_path: Path) -> None:
    hf_folder(tmp_path / "model", "ElectraForPreTraining")

    def refused(generator: str | Path | None, message: str, *, mlm: bool = False) -> None:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            import_(tmp_path / "model", out=tmp_path / "run", generator=generator, mlm=mlm)
        assert not (tmp_path / "run").exists()

    refused("small", "--mlm trains without a generator; remove --mlm or --generator small", mlm=True)

    refused(
        None, "model: has only the discriminator; training needs the generator too; create one with --generator small"
    )
    for number in (0, 5):
        refused(
            f"same-layers:{number}",
            f"'same-layers:{number}': must be same-layers:N with N from 1 to 4, the layers of",
        )
    refused("smal", "generator = 'smal': must be small, same-layers:N or the folder of a model")
    refused(tmp_path / "model", "model: has only the discriminator, but a generator must predict masked tokens; pass a")
    changes: dict[str, tuple[str, dict[str, Any], str]] = {
        "headless": ("ElectraModel", {}, "headless: an encoder without a masked-language-model head"),
        "others": ("ModernBertForMaskedLM", {}, "others: architecture = 'modernbert': must be 'bert'"),
        "more": ("ElectraForMaskedLM", {"vocab_size": 240}, "more: vocab_size = 240: must be 200, as in the"),
        "odd": ("ElectraForMaskedLM", {"intermediate_size": 60}, "odd: intermediate_size = 60: must be "),
        "wide": ("ElectraForMaskedLM", {"num_attention_heads": 8}, "the generator .*wide: generator.fraction = 2"),
        "words": ("ElectraForMaskedLM", {}, "words/vocab.txt: must have the same vocabulary as .*model/vocab.txt"),
        "none": ("ElectraForMaskedLM", {}, "none: has no tokenizer"),
    }
    for folder, (name, settings, message) in changes.items():
        hf_folder(tmp_path / folder, name, **settings)
        vocab = tmp_path / folder / "vocab.txt"
        if folder == "words":
            vocab.write_text("\n".join([*WORDS[:5], *reversed(WORDS[5:])]) + "\n", encoding="utf-8")
        if folder == "none":
            vocab.unlink()
        refused(tmp_path / folder, message)


@pytest.mark.parametrize(
    ("kind", "name"), [("BERT", "ElectraModel"), ("RoBERTa", "ModernBertModel"), ("XLM-R", "ElectraModel")]
)
def test_command_line_adapts_encoder(tmp_path: Path, tiny_text: list[str], kind: str, name: str) -> None:
    """The run has the encoder's tokenizer, the text is prepared with it, and the export has it too."""
    model = tmp_path / "model"
    hf_folder(model, name, vocab_size=320, num_hidden_layers=2)
    (model / "vocab.txt").unlink()
    save_tokenizer(model, kind)
    (tmp_path / "text.txt").write_text("\n\n".join(tiny_text), encoding="utf-8")
    fast = "--train.steps 2 --train.batch_size 4 --train.eval_batches 1 --data.sequence_length 32".split()
    for command in (
        ("import", model, "--generator", "small", "--out", tmp_path / "run"),
        ("prepare", tmp_path / "text.txt", "--vocab", tmp_path / "run", "--out", tmp_path / "shards"),
        ("pretrain", tmp_path / "shards", "--out", tmp_path / "run", *fast),
        ("export", tmp_path / "run", "--out", tmp_path / "out"),
    ):
        done = run(*command)
        assert done.returncode == 0, done.stderr
    text = "The cats sat in a naïve café."
    exported = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out" / "discriminator"))
    original = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    assert exported.encode(text, add_special_tokens=False) == original.encode(text, add_special_tokens=False).ids
    adapted = read_model(tmp_path / "out")
    assert not torch.equal(adapted.embeddings.token, read_model(tmp_path / "run/checkpoints/step-0").embeddings.token)
