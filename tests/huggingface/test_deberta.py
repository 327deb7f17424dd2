"""DeBERTaV3 in its published form: two networks in one folder, distinguished by the names of their tensors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from published_deberta import MaskedLanguageModel, ReplacedTokenDetectionModel
from safetensors.torch import load_file, save_file
from test_encoder import DEBERTA, SIZES, assert_close, hf_folder, hf_hidden, padded_hidden, write_words
from test_export import IDS, MASK, assert_same, logits, make_run

from electra_fast.huggingface.adaptation import kind_of
from electra_fast.huggingface.encoder import load_encoder
from electra_fast.huggingface.export import export, import_
from electra_fast.huggingface.folder import read_model

TABLE = "deberta.embeddings.word_embeddings.weight"
MODELS = {"discriminator": ReplacedTokenDetectionModel, "generator": MaskedLanguageModel}
FILES = {"discriminator": "pytorch_model.bin", "generator": "pytorch_model.generator.bin"}


def released(folder: Path, prefix: str = "deberta.", num_layers: int = 2, **settings: Any) -> dict[str, Any]:
    """Writes a random pair in the published form, with superfluous tensors and without some keys of config.json."""
    models: dict[str, Any] = {}
    folder.mkdir()
    sizes = SIZES | DEBERTA | {"legacy": False} | settings
    for role, model_class in MODELS.items():
        torch.manual_seed(len(models))
        layers = {"num_hidden_layers": num_layers} if role == "generator" else {}
        model = model_class(transformers.DebertaV2Config(**sizes | layers)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        tensors = {name.replace("deberta.", prefix, 1): tensor for name, tensor in model.state_dict().items()}
        if role == "discriminator":
            table = prefix + "embeddings.word_embeddings"
            tensors |= {f"{table}._weight": torch.zeros(200, 64), "lm_predictions.lm_head.bias": torch.zeros(200)}
        torch.save(tensors, folder / FILES[role])
        models[role] = model
    table = {"model_type": "deberta-v2", **{key: sizes[key] for key in sizes if key != "legacy"}}
    (folder / "config.json").write_text(json.dumps(table), encoding="utf-8")
    write_words(folder)
    return models


@torch.no_grad()
def published_logits(models: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {role: model(input_ids=IDS, attention_mask=MASK).logits for role, model in models.items()}


@pytest.mark.parametrize(("prefix", "settings"), [("deberta.", {}), ("bert.", {"conv_kernel_size": 3})])
def test_published_pair_is_imported_and_exported(tmp_path: Path, prefix: str, settings: dict[str, Any]) -> None:
    models = released(tmp_path / "v3", prefix, **settings)
    expected = published_logits(models)
    assert kind_of(tmp_path / "v3") == "pair"
    import_(tmp_path / "v3", out=tmp_path / "run")
    export(tmp_path / "run", out=tmp_path / "out")
    for source in ("v3", "run", "out"):
        imported = read_model(tmp_path / source)
        assert_same(logits(imported), expected)
        model = imported.config.model
        generator = imported.config.generator
        optimizer = imported.config.optimizer
        assert (model.tying, generator.fraction, generator.num_layers) == ("disentangled", 1.0, 2)
        assert (optimizer.name, optimizer.learning_rate) == ("adamw", 5e-5)
        assert torch.equal(imported.generator_embeddings.token, models["generator"].state_dict()[TABLE])
    for role, model in models.items():
        exported = load_file(tmp_path / "out" / role / "model.safetensors")
        assert exported.keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, exported[name]) for name, tensor in model.state_dict().items() if name != TABLE)
        torch.testing.assert_close(exported[TABLE], model.state_dict()[TABLE], rtol=0, atol=1e-7)
        for source in ("v3", "run", "out"):
            assert load_encoder(tmp_path / source, role).shape.num_layers == model.config.num_hidden_layers
    hidden = hf_hidden(models["discriminator"], IDS, MASK)
    for source in ("v3", "run", "out", "out/encoder"):
        imported = load_encoder(tmp_path / source).state["embeddings.token"]
        torch.testing.assert_close(imported, models["discriminator"].state_dict()[TABLE], rtol=0, atol=1e-7)
    encoder = transformers.AutoModel.from_pretrained(tmp_path / "out" / "encoder").eval()
    assert_same({"": hf_hidden(encoder, IDS, MASK)}, {"": hidden})


@pytest.mark.parametrize("role", MODELS)
def test_single_file_has_the_role_of_its_tensors(tmp_path: Path, role: str) -> None:
    """V2's largest sizes were published as a masked language model."""
    models = released(tmp_path / "v3", num_layers=4)
    for name in FILES.values():
        if name != FILES[role]:
            (tmp_path / "v3" / name).unlink()
    assert_same(logits(read_model(tmp_path / "v3")), {role: published_logits(models)[role]})
    (tmp_path / "v3" / FILES[role]).rename(tmp_path / "v3" / "pytorch_model.bin")
    imported = read_model(tmp_path / "v3")
    assert_same(logits(imported), {role: published_logits(models)[role]})
    assert kind_of(tmp_path / "v3") == {"discriminator": "encoder", "generator": "masked_lm"}[role]
    other = next(name for name in MODELS if name != role)
    with pytest.raises(ValueError, match=f": must be .* for a {other}"):
        load_encoder(tmp_path / "v3", other)


@pytest.mark.parametrize("legacy", [False, True])
def test_transformers_masked_language_model_gets_new_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], legacy: bool
) -> None:
    theirs = hf_folder(tmp_path / "model", "DebertaV2ForMaskedLM", legacy=legacy)
    ours = read_model(tmp_path / "model")
    note = "note: generator_head.position: not in .*model, so it starts untrained"
    assert re.search(note, capsys.readouterr().err)
    table = ours.generator_embeddings.token
    with torch.no_grad():
        hidden = hf_hidden(theirs, IDS, MASK)
        expected = theirs(input_ids=IDS, attention_mask=MASK).logits
        assert_same({"": ours.generator_head(hidden, table)}, {"": expected})


@pytest.mark.parametrize("generator", ["small", "same-layers:2", "v3", "mlm"])
@pytest.mark.parametrize("source", ["alone", "run"])
def test_discriminator_gets_generator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], generator: str, source: str
) -> None:
    """A generator from a folder provides the base of the discriminator's table; otherwise the base is a copy."""
    models = released(tmp_path / "v3")
    hf_folder(tmp_path / "mlm", "DebertaV2ForMaskedLM", seed=3, num_hidden_layers=2)
    import_(tmp_path / "v3", out=tmp_path / "run")
    (tmp_path / "alone").mkdir()
    for name in ("config.json", "vocab.txt", "tokenizer_config.json", "pytorch_model.bin"):
        (tmp_path / "alone" / name).write_bytes((tmp_path / "v3" / name).read_bytes())
    path = generator if generator in ("small", "same-layers:2") else str(tmp_path / generator)
    capsys.readouterr()
    import_(tmp_path / source, out=tmp_path / "again", generator=path)
    stderr = capsys.readouterr().err
    ours = read_model(tmp_path / "again")
    assert ours.config.model.tying == "disentangled" and ours.config.optimizer.learning_rate == 5e-5
    assert ("from the published script that continues DeBERTaV3" in stderr) == (source == "alone")
    expected = published_logits(models)
    assert_same({"": logits(ours)["discriminator"]}, {"": expected["discriminator"]})
    table = ours.generator_embeddings.token
    assert ours.embeddings.token.any() == (path == str(tmp_path / generator))
    if generator == "v3":
        assert_same({"": logits(ours)["generator"]}, {"": expected["generator"]})
    elif generator == "same-layers:2":
        del models["discriminator"].deberta.encoder.layer[2:]
        assert "note: generator_head: not in" in stderr
        states = padded_hidden(load_encoder(tmp_path / "again", "generator"))
        assert_close(states, hf_hidden(models["discriminator"]))
    elif generator == "mlm":
        assert "note: generator_head.position: not in" in stderr
        assert torch.equal(table, load_file(tmp_path / "mlm" / "model.safetensors")[TABLE])


def test_tying_follows_our_key_and_the_tables(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "deberta", {"model.tying": "embeddings"})
    export(tmp_path / "run", out=tmp_path / "out")
    path = tmp_path / "out" / "discriminator" / "model.safetensors"
    tensors = load_file(path)
    assert read_model(tmp_path / "out").config.model.tying == "embeddings"
    save_file(tensors | {TABLE: tensors[TABLE] + 1}, path, {"format": "pt"})
    assert read_model(tmp_path / "out").config.model.tying == "disentangled"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.generator.bin"])
def test_damaged_file_is_reported(tmp_path: Path, name: str) -> None:
    released(tmp_path / "v3")
    path = tmp_path / "v3" / name
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=f"{name}: not a complete file of tensors"):
        read_model(tmp_path / "v3")
