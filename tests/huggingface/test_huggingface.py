"""Reading Hugging Face folders: from other publishers, with tied weights, and with mismatches."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_encoder import ROBERTA, hf_folder
from test_export import IDS, MASK, WORDS, assert_same, edit_config, logits, remove_our_keys
from test_pair_templates import save_tokenizer
from variants import randomized

from electra_fast.config.config import Config
from electra_fast.files import checkpoint_folder
from electra_fast.huggingface import weights as huggingface_weights
from electra_fast.huggingface.config import CLASSES, preset_of_size
from electra_fast.huggingface.encoder import load_encoder
from electra_fast.huggingface.export import export, import_
from electra_fast.huggingface.folder import read_model, write_model
from electra_fast.model.model import Electra


def write_folders(folder: Path, recipe: str, changes: dict[str, Any]) -> None:
    """Writes a random model as discriminator/ and generator/."""
    config = Config.preset("tiny", recipe).override(changes, vocab_size=200)
    model = randomized(Electra(config), 11)
    for role in ("discriminator", "generator"):
        (folder / role).mkdir(parents=True)
        write_model(folder / role, model, role, {"pad": 0, "cls": 2, "sep": 3})


def test_factoring_distinguishes_shared_table_from_two() -> None:
    random = torch.Generator().manual_seed(0)
    config = Config.preset("tiny", "modern").override({"model.embedding_size": 24, "model.vocab_size": 90})
    shapes = {"discriminator": config.model, "generator": config.generator_shape()}
    one, two = (torch.randn(90, 24, generator=random) @ torch.randn(24, 32, generator=random) for _ in range(2))
    inputs = {role: f"{role}.{huggingface_weights.INPUT_TABLE['modernbert']}" for role in shapes}
    tables = {inputs["discriminator"]: one.repeat(1, 2), inputs["generator"]: one}
    assert huggingface_weights.factored(tables, shapes) is not None
    assert huggingface_weights.factored(tables | {inputs["generator"]: two}, shapes) is None


def released_pair(folder: Path, generator_hidden: int) -> dict[str, torch.nn.Module]:
    """Writes small folders in the published form: without our keys, with prefixes, half precision, and a buffer."""
    models: dict[str, torch.nn.Module] = {}
    for role, hidden in (("discriminator", 64), ("generator", generator_hidden)):
        sizes = {"hidden_size": hidden, "num_attention_heads": hidden // 16, "intermediate_size": 4 * hidden}
        sizes |= {"vocab_size": 200, "embedding_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
        config = transformers.ElectraConfig(**sizes)
        torch.manual_seed(len(models))
        model = getattr(transformers, CLASSES["bert", role])(config).eval()
        models[role] = model
        if role == "generator":
            generator, discriminator = (models[x].electra.embeddings for x in ("generator", "discriminator"))
            generator.load_state_dict(discriminator.state_dict())
        model.save_pretrained(folder / role)
        path = folder / role / "model.safetensors"
        tensors = load_file(path) | {"electra.embeddings.position_ids": torch.arange(64)[None]}
        save_file(tensors, path, metadata={"format": "pt"})
        (folder / role / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return models


@pytest.mark.parametrize(("generator_hidden", "fraction"), [(16, 0.25), (64, 1.0)])
def test_folders_of_other_publishers_load_and_train(tmp_path: Path, generator_hidden: int, fraction: float) -> None:
    hf_models = released_pair(tmp_path / "released", generator_hidden)
    model = read_model(tmp_path / "released")
    assert (model.config.generator.fraction, model.config.model.tying) == (fraction, "embeddings")
    assert model.embeddings is model.generator_embeddings
    with torch.no_grad():
        for role, actual in logits(model).items():
            expected = hf_models[role](input_ids=IDS, attention_mask=MASK).logits
            assert (actual - expected.view(actual.shape)).abs().max() <= 1e-5
    import_(tmp_path / "released", out=tmp_path / "run")
    reloaded = logits(read_model(tmp_path / "run"))
    assert all(torch.equal(reloaded[role], tensor) for role, tensor in logits(model).items())
    export(tmp_path / "run", out=tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "generator")
    assert tokenizer("The cats")["input_ids"] == [2, 5, 6, 7, 3]


@pytest.mark.parametrize(
    ("architecture", "source"), [("bert", "with a prefix"), ("modernbert", "bare"), ("bert", "our own export")]
)
def test_headless_encoders_get_new_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], architecture: str, source: str
) -> None:
    same_width: dict[str, dict[str, Any]] = {"model.embedding_size": 64, "generator.fraction": 1.0}
    recipe, changes = ("google", {}) if architecture == "bert" else ("modern", same_width)
    write_folders(tmp_path / "whole", recipe, changes)
    expected = {}
    base = "electra" if architecture == "bert" else "model"
    for role in ("discriminator", "generator"):
        whole = transformers.AutoModel.from_pretrained(tmp_path / "whole" / role).eval()
        whole.save_pretrained(tmp_path / "bare" / role)
        table = json.loads((tmp_path / "bare" / role / "config.json").read_text(encoding="utf-8"))
        assert table["architectures"] == [type(whole).__name__]
        if source == "with a prefix":
            path = tmp_path / "bare" / role / "model.safetensors"
            save_file({f"{base}.{name}": tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
        (tmp_path / "bare" / role / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
        with torch.no_grad():
            expected[role] = whole(input_ids=IDS, attention_mask=MASK).last_hidden_state
    if source != "our own export":
        remove_our_keys(tmp_path / "bare")
    with pytest.raises(ValueError, match="bare/discriminator: an encoder without a head; fine-tune"):
        read_model(tmp_path / "bare")
    capsys.readouterr()
    import_(tmp_path / "bare", out=tmp_path / "run")
    notes = capsys.readouterr().err.splitlines()
    assert notes[:2] == [f"note: {role}_head: not in the folder, so it starts untrained" for role in expected]
    model = read_model(tmp_path / "run")
    export(tmp_path / "run", out=tmp_path / "again")
    for role in expected:
        reloaded = transformers.AutoModel.from_pretrained(tmp_path / "again" / role).eval()
        with torch.no_grad():
            assert (reloaded(input_ids=IDS, attention_mask=MASK).last_hidden_state - expected[role]).abs().max() < 1e-5
    assert model.config.objective.name == "electra" and logits(model)["generator"].isfinite().all()
    import_(tmp_path / "bare" / "discriminator", out=tmp_path / "alone")  # a masked language model with a new head
    assert read_model(tmp_path / "alone").config.objective.name == "mlm"


@pytest.mark.parametrize(
    ("name", "settings", "tokenizer"),
    [
        ("BertForMaskedLM", {"layer_norm_eps": 1e-3}, "BERT"),
        ("BertForPreTraining", {}, "BERT"),
        ("RobertaForMaskedLM", ROBERTA, "RoBERTa"),
        ("XLMRobertaForMaskedLM", ROBERTA, "XLM-R"),
        ("CamembertForMaskedLM", ROBERTA, "CamemBERT"),
        ("DistilBertForMaskedLM", {}, "DistilBERT"),
    ],
)
def test_masked_language_models_of_other_types_are_imported_and_exported(
    tmp_path: Path, name: str, settings: dict[str, Any], tokenizer: str
) -> None:
    model = hf_folder(tmp_path / "model", name, vocab_size=320, **settings)
    (tmp_path / "model" / "vocab.txt").unlink()
    save_tokenizer(tmp_path / "model", tokenizer)
    with torch.no_grad():
        outputs = model(input_ids=IDS, attention_mask=MASK)
    expected = outputs["prediction_logits" if name == "BertForPreTraining" else "logits"]
    assert_same(logits(read_model(tmp_path / "model")), {"generator": expected})
    import_(tmp_path / "model", out=tmp_path / "run")
    trained = checkpoint_folder.read_state(checkpoint_folder.latest(tmp_path / "run")).token_type_1_trained
    assert trained == name.startswith("Bert")
    export(tmp_path / "run", out=tmp_path / "out")
    exported = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out" / "generator").eval()
    with torch.no_grad():
        assert_same({"generator": exported(input_ids=IDS, attention_mask=MASK).logits}, {"generator": expected})
        hidden = model.base_model(input_ids=IDS, attention_mask=MASK).last_hidden_state
        assert_same({"": exported.electra(input_ids=IDS, attention_mask=MASK).last_hidden_state}, {"": hidden})
    pairs = [("the cats sat", "a café in new york"), ("naïve", "")]
    tokenizers = [transformers.AutoTokenizer.from_pretrained(tmp_path / item) for item in ("model", "out/generator")]
    theirs, ours = (tokenizer(pairs).input_ids for tokenizer in tokenizers)
    assert theirs == ours and len(ours[0]) > 10


def test_separate_output_table_is_rejected_with_its_original_name(tmp_path: Path) -> None:
    model = hf_folder(tmp_path, "RobertaForMaskedLM", tie_word_embeddings=False, **ROBERTA)
    with pytest.raises(ValueError, match="lm_head.decoder.weight differs from roberta.embeddings.word_embeddings.weig"):
        read_model(tmp_path)
    tensors = model.state_dict()
    tensors["lm_head.decoder.weight"] = tensors["roberta.embeddings.word_embeddings.weight"].clone()
    tensors["lm_head.decoder.bias"] = tensors["lm_head.bias"] + 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="tensors lm_head.bias and lm_head.decoder.bias differ, but the model has one"):
        read_model(tmp_path)
    load_encoder(tmp_path)


def test_embeddings_that_differ_in_one_bit_are_not_shared(tmp_path: Path) -> None:
    released_pair(tmp_path, 16)
    path = tmp_path / "generator" / "model.safetensors"
    tensors = load_file(path)
    tensors["electra.embeddings.token_type_embeddings.weight"][1, 5] += 1e-6
    save_file(tensors, path, metadata={"format": "pt"})
    model = read_model(tmp_path)
    assert model.config.model.tying == "none"
    assert torch.equal(
        model.generator_embeddings.token_type, tensors["electra.embeddings.token_type_embeddings.weight"]
    )
    assert not torch.equal(model.embeddings.token_type, model.generator_embeddings.token_type)


@pytest.mark.parametrize(
    ("recipe", "role", "changes", "message"),
    [
        ("google", "discriminator", {"layer_norm_eps": 1e-5}, "norm_eps = 0.0: must be 1e-05, as in the discriminator"),
        ("google", "discriminator", {"architectures": ["ElectraModel"]}, "discriminator: an encoder without a head"),
        ("google", "discriminator", {"architectures": ["X"]}, "must be ElectraForPreTraining for a discriminator"),
        ("google", "generator", {"intermediate_size": 100}, "intermediate_size = 100: must be "),
        (
            "google",
            "generator",
            {"max_position_embeddings": 64},
            "max_positions = 64: must be 128, as in the discriminator",
        ),
        ("google", "generator", {"num_attention_heads": 4}, "generator.fraction = 2.0: must be above 0 and at most 1"),
        ("modern", "generator", {"local_attention": 128}, "local_attention = 128: must be 0, as in the disc"),
        ("modern", "generator", {"rope_parameters": None, "global_rope_theta": 7.0}, "rope_theta = 7.0: must be"),
        ("modern", "discriminator", {"classifier_bias": True}, "classifier_bias = True: must be False"),
        ("modern", "discriminator", {"electra_fast": {"model": {"x": 1}}}, "electra_fast: unknown key model.x"),
    ],
)
def test_inconsistent_config_is_reported(
    tmp_path: Path, recipe: str, role: str, changes: dict[str, object], message: str
) -> None:
    write_folders(tmp_path / "out", recipe, {})
    edit_config(tmp_path / "out" / role, changes)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_model(tmp_path / "out")
    assert str(caught.value).startswith(str(tmp_path / "out"))
    assert "\n" not in str(caught.value)


def test_inconsistent_weights_are_reported(tmp_path: Path) -> None:
    write_folders(tmp_path / "out", "modern", {"model.embedding_size": 48})
    path = tmp_path / "out" / "discriminator" / "model.safetensors"
    tensors = load_file(path)

    def expect(changed: dict[str, torch.Tensor], message: str) -> None:
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: {re.escape(message)}"):
            read_model(tmp_path / "out")

    name = "model.layers.1.attn.Wqkv.weight"
    expect(tensors | {name: tensors[name][:100].clone()}, f"tensor {name}: expected shape [1")
    table = "model.embeddings.tok_embeddings.weight"
    random = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    expect(tensors | {table: random}, "the embedding table is no longer the product of a table of width 48")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors: not a complete safetensors file"):
        read_model(tmp_path / "out")


def test_untied_output_table_is_rejected(tmp_path: Path) -> None:
    released_pair(tmp_path, 16)
    path = tmp_path / "generator" / "model.safetensors"
    tensors = load_file(path)
    table = tensors["electra.embeddings.word_embeddings.weight"]
    save_file(tensors | {"generator_lm_head.weight": table.clone()}, path, metadata={"format": "pt"})
    read_model(tmp_path)
    save_file(tensors | {"generator_lm_head.weight": table + 1}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="generator_lm_head.weight differs from electra.embeddings.word_embeddings.we"):
        read_model(tmp_path)


def test_import_uses_preset_of_the_same_size() -> None:
    """A base model continues with the learning rate of base, not of small."""
    config = Config.preset("base", "google")
    assert preset_of_size(dataclasses.replace(config.model, vocab_size=50)) == config
    assert preset_of_size(Config.preset("large", "modern").model) == Config.preset("large", "modern")
    assert preset_of_size(dataclasses.replace(config.model, hidden_size=480)) == Config.preset("small", "google")
