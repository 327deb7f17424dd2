"""Runs out to Hugging Face folders and back, as `transformers` sees them, and what bad folders say."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from electra_fast import checkpoint, huggingface_weights
from electra_fast.config import Config
from electra_fast.export import export, import_folder, load
from electra_fast.huggingface_config import CLASSES, preset_of_size
from electra_fast.huggingface_tokenizer import write_tokenizer
from electra_fast.model import Electra

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", *(f"w{i}" for i in range(191))]
IDS = torch.randint(5, 200, (2, 20), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(20) < torch.tensor([[20], [11]])).long()
Changes = dict[str, dict[str, Any]]
ONE_SIZE: Changes = {"generator": {"fraction": 1.0}}


def randomise(model: Electra) -> Electra:
    """Every parameter random, so that nothing can be left out or swapped unnoticed."""
    random = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            scale = 0.2 if parameter.dim() == 1 else 0.8 * parameter.shape[1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=random) * scale + is_norm)
    return model.eval()


def make_run(folder: Path, recipe: str, changes: Changes) -> Electra:
    """A run as `pretrain` leaves it, with one checkpoint."""
    fixed: Changes = {"model": {"vocab_size": 200}, "data": {"corpus": "/secret/shards"}, "train": {"out": "/secret"}}
    config = Config.preset("tiny", recipe).replace(changes).replace(fixed)
    model = randomise(Electra(config))
    vocabulary = folder.parent / "vocab.txt"
    vocabulary.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    write_tokenizer(folder / "tokenizer", vocabulary, True, None, 128)
    (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    checkpoint.save(folder, 3, model, None, {"step": 3}, keep=2)
    return model


@torch.no_grad()
def logits(model: Electra) -> dict[str, torch.Tensor]:
    found = {"generator": model.generator_logits(IDS, MASK)} if model.has_generator else {}
    return found | ({"discriminator": model.discriminator_logits(IDS, MASK)} if model.has_discriminator else {})


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for role, tensor in expected.items():
        assert tensor.std() > 0.01
        assert (found[role] - tensor).abs().max() <= 1e-5, role


SHAPES = [
    ("google", {}),
    ("google", {"model": {"embedding_size": 64}}),
    ("google", {"model": {"tying": "none"}, "generator": {"num_layers": 1}}),
    ("google", {"model": {"tying": "all"}} | ONE_SIZE),
    ("google", {"objective": {"name": "mlm"}}),
    ("modern", {"model": {"embedding_size": 48}}),  # neither encoder as wide as the table
    ("modern", {}),  # the generator as wide as the table
    ("modern", {"model": {"embedding_size": 64}}),  # the discriminator as wide
    ("modern", {"model": {"embedding_size": 64}} | ONE_SIZE),
    ("modern", {"model": {"tying": "none", "embedding_size": 48}}),
    ("modern", {"model": {"tying": "none", "embedding_size": 64}} | ONE_SIZE),
    ("modern", {"model": {"tying": "all", "embedding_size": 48}} | ONE_SIZE),
    ("modern", {"model": {"embedding_size": 48}, "objective": {"name": "mlm"}}),
    ("modern", {"model": {"embedding_size": 96}}),  # a table wider than both
]


@pytest.mark.parametrize(("recipe", "changes"), SHAPES)
def test_transformers_loads_what_export_writes_and_import_brings_it_back(
    tmp_path: Path, recipe: str, changes: Changes
) -> None:
    model = make_run(tmp_path / "run", recipe, changes)
    expected = logits(model)
    assert_same(logits(load(tmp_path / "run")), expected)
    export(tmp_path / "run", tmp_path / "out")
    assert sorted(folder.name for folder in (tmp_path / "out").iterdir()) == sorted(expected)
    for role, tensor in expected.items():
        folder = tmp_path / "out" / role
        assert "secret" not in (folder / "config.json").read_text(encoding="utf-8")
        name = CLASSES[model.config.model.architecture, role]
        theirs, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
        assert {key: value for key, value in info.items() if value} == {}
        with torch.no_grad():
            found = theirs.eval()(input_ids=IDS, attention_mask=MASK).logits.view(tensor.shape)
        assert_same({role: found}, {role: tensor})
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        batch = tokenizer(["The cats sat", "cat"], padding=True, return_tensors="pt")
        assert batch["input_ids"].tolist() == [[2, 5, 6, 7, 8, 3], [2, 6, 3, 0, 0, 0]]
        theirs(**batch)  # the model takes what its tokenizer gives
        assert theirs.config.pad_token_id == tokenizer.pad_token_id == 0
        assert theirs.config.max_position_embeddings == tokenizer.model_max_length == 128

    back = load(tmp_path / "out")
    assert back.config.objective.name == model.config.objective.name
    assert_same(logits(back), expected)
    import_folder(tmp_path / "out", tmp_path / "again")
    again = load(tmp_path / "again")
    assert_same(logits(again), expected)
    forgotten = {"data": {"corpus": ""}, "train": {"out": ""}}
    assert again.config == Config.load(tmp_path / "again" / "config.toml")
    differences = model.config.replace(forgotten).differences(again.config)
    if model.config.objective.name == "mlm":
        differences = {name: pair for name, pair in differences.items() if not name.startswith("generator.")}
        differences.pop("model.tying", None)
    assert differences == {}
    assert checkpoint.read_state(checkpoint.latest(tmp_path / "again")) == {"step": 0}
    assert [p.shape for p in again.parameters()] == [p.shape for p in model.parameters()]
    tokenizer_files = {path.name: path.read_bytes() for path in (tmp_path / "run" / "tokenizer").iterdir()}
    for path in (tmp_path / "again" / "tokenizer").iterdir():
        if path.name != "tokenizer_config.json":
            assert path.read_bytes() == tokenizer_files[path.name]


@pytest.mark.parametrize("recipe", ["google", "modern"])
def test_exported_names_are_all_that_transformers_knows(tmp_path: Path, recipe: str) -> None:
    """And no fewer: a class of transformers made from the config has the same tensors."""
    model = make_run(tmp_path / "run", recipe, {})
    export(tmp_path / "run", tmp_path / "out")
    for role in ("discriminator", "generator"):
        folder = tmp_path / "out" / role
        theirs = getattr(transformers, CLASSES[model.config.model.architecture, role])(
            transformers.AutoConfig.from_pretrained(folder)
        )
        expected = {name: parameter.shape for name, parameter in theirs.named_parameters()}
        assert {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()} == expected


def test_modern_config_speaks_to_older_transformers_too(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "modern", {})
    export(tmp_path / "run", tmp_path / "out")
    table = json.loads((tmp_path / "out" / "discriminator" / "config.json").read_text(encoding="utf-8"))
    older = {"global_attn_every_n_layers": 1, "global_rope_theta": 10_000.0, "local_rope_theta": 10_000.0}
    assert older.items() <= table.items()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out" / "discriminator")
    assert set(config.layer_types) == {"full_attention"}
    assert {rope["rope_theta"] for rope in config.rope_parameters.values()} == {10_000.0}
    assert config.num_labels == 1


def test_a_multiplied_table_comes_back_with_the_sizes_of_a_fresh_one(tmp_path: Path) -> None:
    changes: Changes = {"model": {"embedding_size": 48}}
    make_run(tmp_path / "run", "modern", changes)
    model = load(tmp_path / "run")
    fresh = Electra(model.config)
    with torch.no_grad():
        for own, new in zip(model.parameters(), fresh.parameters(), strict=True):
            own.copy_(new)
    checkpoint.save(tmp_path / "run", 9, model, None, {"step": 9}, keep=1)
    export(tmp_path / "run", tmp_path / "out")
    back = load(tmp_path / "out")
    assert back.embeddings is back.generator_embeddings
    for name in ("embeddings.token", "discriminator.projection.weight", "generator_head.projection.weight"):
        found, expected = back.get_parameter(name), fresh.get_parameter(name)
        assert 0.7 < found.std() / expected.std() < 1.4, name


def test_factoring_tells_a_shared_table_from_two() -> None:
    random = torch.Generator().manual_seed(0)
    config = Config.preset("tiny", "modern").replace({"model": {"embedding_size": 24, "vocab_size": 90}})
    shapes = {"discriminator": config.model, "generator": config.generator_shape()}
    one, two = (torch.randn(90, 24, generator=random) for _ in range(2))
    wide, narrow = torch.randn(24, 64, generator=random), torch.randn(24, 32, generator=random)
    inputs = {role: f"{role}.{huggingface_weights.INPUT_TABLE['modern']}" for role in shapes}
    shared = {inputs["discriminator"]: one @ wide, inputs["generator"]: one @ narrow}
    state = huggingface_weights.factored(shared, shapes)
    assert state is not None
    product = state["embeddings.token"] @ state["discriminator.projection.weight"].T
    assert (product - one @ wide).abs().max() <= 1e-5 * (one @ wide).abs().max()
    assert huggingface_weights.factored(shared | {inputs["generator"]: two @ narrow}, shapes) is None


def released_pair(folder: Path, generator_hidden: int) -> dict[str, torch.nn.Module]:
    """Folders as others publish them, in small: no key of ours, prefixes, half precision, a buffer."""
    models: dict[str, torch.nn.Module] = {}
    for role, hidden in (("discriminator", 64), ("generator", generator_hidden)):
        config = transformers.ElectraConfig(
            vocab_size=200,
            embedding_size=32,
            hidden_size=hidden,
            num_hidden_layers=2,
            num_attention_heads=hidden // 16,
            intermediate_size=4 * hidden,
            max_position_embeddings=64,
        )
        torch.manual_seed(len(models))
        model = getattr(transformers, CLASSES["bert", role])(config).eval()
        models[role] = model
        if role == "generator":
            ours, theirs = (models[x].electra.embeddings for x in ("generator", "discriminator"))
            ours.load_state_dict(theirs.state_dict())
        model.save_pretrained(folder / role)
        path = folder / role / "model.safetensors"
        tensors = load_file(path) | {"electra.embeddings.position_ids": torch.arange(64)[None]}
        save_file(tensors, path, metadata={"format": "pt"})
        (folder / role / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return models


@pytest.mark.parametrize(("generator_hidden", "fraction"), [(16, 0.25), (64, 1.0)])
def test_folders_of_others_load_and_go_on(tmp_path: Path, generator_hidden: int, fraction: float) -> None:
    theirs = released_pair(tmp_path / "released", generator_hidden)
    model = load(tmp_path / "released")
    assert (model.config.generator.fraction, model.config.model.tying) == (fraction, "embeddings")
    assert model.embeddings is model.generator_embeddings
    with torch.no_grad():
        for role, found in logits(model).items():
            expected = theirs[role](input_ids=IDS, attention_mask=MASK).logits
            assert (found - expected.view(found.shape)).abs().max() <= 1e-5
    import_folder(tmp_path / "released", tmp_path / "run")
    again = logits(load(tmp_path / "run"))
    assert all(torch.equal(again[role], tensor) for role, tensor in logits(model).items())
    export(tmp_path / "run", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "generator")
    assert tokenizer("The cats")["input_ids"] == [2, 5, 6, 7, 3]


def test_embeddings_that_differ_in_one_bit_are_not_shared(tmp_path: Path) -> None:
    released_pair(tmp_path, 16)
    path = tmp_path / "generator" / "model.safetensors"
    tensors = load_file(path)
    tensors["electra.embeddings.token_type_embeddings.weight"][1, 5] += 1e-6
    save_file(tensors, path, metadata={"format": "pt"})
    model = load(tmp_path)
    assert model.config.model.tying == "none"
    assert torch.equal(
        model.generator_embeddings.token_type, tensors["electra.embeddings.token_type_embeddings.weight"]
    )
    assert not torch.equal(model.embeddings.token_type, model.generator_embeddings.token_type)


@pytest.mark.parametrize("recipe", ["google", "modern"])
def test_one_folder_alone_answers_for_itself(tmp_path: Path, recipe: str) -> None:
    expected = logits(make_run(tmp_path / "run", recipe, {"model": {"embedding_size": 48}}))
    export(tmp_path / "run", tmp_path / "out")
    discriminator = load(tmp_path / "out" / "discriminator")
    assert_same(
        {"discriminator": discriminator.discriminator_logits(IDS, MASK)}, {"discriminator": expected["discriminator"]}
    )
    with pytest.raises(ValueError, match="read from a discriminator alone and has no generator"):
        discriminator.generator_logits(IDS)
    generator = load(tmp_path / "out" / "generator")
    assert_same(logits(generator), {"generator": expected["generator"]})
    with pytest.raises(ValueError, match="generator only .* and no discriminator"):
        generator.discriminator_logits(IDS)
    with pytest.raises(ValueError, match="no generator; training goes on from discriminator/ and generator/"):
        import_folder(tmp_path / "out" / "discriminator", tmp_path / "again")
    with pytest.raises(ValueError, match="a discriminator alone; export needs a generator"):
        export(tmp_path / "out" / "discriminator", tmp_path / "more")
    assert not (tmp_path / "again").exists() and not (tmp_path / "more").exists()


def test_export_replaces_an_export_and_refuses_anything_else(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "google", {})
    export(tmp_path / "run", tmp_path / "out")
    before = (tmp_path / "out" / "generator" / "model.safetensors").read_bytes()
    model = load(tmp_path / "run")
    with torch.no_grad():
        model.generator_head.bias.add_(1)
    checkpoint.save(tmp_path / "run", 4, model, None, {"step": 4}, keep=2)
    export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "generator" / "model.safetensors").read_bytes() != before
    export(tmp_path / "run" / "checkpoints" / "step-3", tmp_path / "out")
    assert (tmp_path / "out" / "generator" / "model.safetensors").read_bytes() == before

    note = tmp_path / "out" / "notes.txt"
    note.write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="out: not empty and not an earlier export; choose another folder"):
        export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ValueError, match="run: not empty; choose another folder for the run"):
        import_folder(tmp_path / "out", tmp_path / "run")
    with pytest.raises(ValueError, match="a file is in the way"):
        export(tmp_path / "run", note)
    assert note.read_text(encoding="utf-8") == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run", "vocab.txt"]


@pytest.mark.parametrize("earlier", [False, True])
def test_a_failing_export_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    make_run(tmp_path / "run", "google", {})
    if earlier:
        export(tmp_path / "run", tmp_path / "out")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("electra_fast.huggingface.save_file", full)
    with pytest.raises(OSError, match="out: not written: .*No space left on device"):
        export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out").exists() == earlier
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"] * earlier + ["run", "vocab.txt"]
    if earlier:
        load(tmp_path / "out")


def edit(path: Path, **changes: object) -> None:
    table = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(table | changes), encoding="utf-8")


@pytest.mark.parametrize(
    ("recipe", "role", "changes", "message"),
    [
        ("google", "generator", {"model_type": "bert"}, "model_type = 'bert' must be one of electra, modernbert"),
        (
            "google",
            "generator",
            {"vocab_size": 201},
            "tensor electra.embeddings.word_embeddings.weight has shape [200, 32]",
        ),
        ("google", "discriminator", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported; it must be 'gelu'"),
        ("google", "discriminator", {"layer_norm_eps": 1e-5}, "layer_norm_eps = 1e-05 is not supported"),
        ("google", "discriminator", {"type_vocab_size": 1}, "type_vocab_size = 1 is not supported; it must be 2"),
        ("google", "discriminator", {"num_hidden_layers": 3}, "generator.num_layers"),
        ("google", "discriminator", {"num_hidden_layers": "3"}, "model.num_layers = '3' must be an integer"),
        ("google", "discriminator", {"architectures": ["ElectraModel"]}, "a discriminator is ElectraForPreTraining"),
        ("google", "generator", {"intermediate_size": 100}, "intermediate_size = 100, and generator.fraction = 0.5"),
        ("google", "generator", {"max_position_embeddings": 64}, "max_positions = 64, and the discriminator's is 128"),
        ("google", "generator", {"num_attention_heads": 3}, "generator.fraction = 1.5 must be above 0 and at most 1"),
        ("modern", "generator", {"norm_bias": True}, "norm_bias = True is not supported; it must be False"),
        (
            "modern",
            "generator",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "only full_attention is supported",
        ),
        (
            "modern",
            "generator",
            {"layer_types": None, "global_attn_every_n_layers": 2},
            "only full_attention is supported",
        ),
        (
            "modern",
            "generator",
            {"rope_parameters": None, "global_rope_theta": 160000.0},
            "rope_theta = 160000.0 is not",
        ),
        ("modern", "discriminator", {"electra_fast": {"model": {"x": 1}}}, "electra_fast: unknown key model.x"),
    ],
)
def test_a_config_that_does_not_fit_is_named(
    tmp_path: Path, recipe: str, role: str, changes: dict[str, object], message: str
) -> None:
    make_run(tmp_path / "run", recipe, {})
    export(tmp_path / "run", tmp_path / "out")
    edit(tmp_path / "out" / role / "config.json", **changes)
    if message == "generator.num_layers":  # a third layer that the weights lack
        message = "tensor electra.encoder.layer.2.attention.self.query.weight is missing"
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load(tmp_path / "out")
    assert str(caught.value).startswith(str(tmp_path / "out"))
    assert "\n" not in str(caught.value)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "modern", {"model": {"embedding_size": 48}})
    export(tmp_path / "run", tmp_path / "out")
    path = tmp_path / "out" / "discriminator" / "model.safetensors"
    tensors = load_file(path)

    def expect(changed: dict[str, torch.Tensor], message: str) -> None:
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: {re.escape(message)}"):
            load(tmp_path / "out")

    name = "model.layers.1.attn.Wqkv.weight"
    expect({key: x for key, x in tensors.items() if key != name}, f"tensor {name} is missing")
    expect(
        tensors | {name: tensors[name][:100].clone()},
        f"tensor {name} has shape [100, 64], and config.json says [192, 64]",
    )
    table = "model.embeddings.tok_embeddings.weight"
    random = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    expect(tensors | {table: random}, "the embedding table is no longer the product of one of width 48")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors: not a whole safetensors file"):
        load(tmp_path / "out")
    path.rename(path.with_name("pytorch_model.bin"))
    with pytest.raises(
        ValueError, match="weights only as pytorch_model.bin, .* save_pretrained it as model.safetensors"
    ):
        load(tmp_path / "out")
    path.with_name("pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors: no such file"):
        load(tmp_path / "out")


def test_an_output_table_of_its_own_is_refused(tmp_path: Path) -> None:
    released_pair(tmp_path, 16)
    path = tmp_path / "generator" / "model.safetensors"
    tensors = load_file(path)
    table = tensors["electra.embeddings.word_embeddings.weight"]
    save_file(tensors | {"generator_lm_head.weight": table.clone()}, path, metadata={"format": "pt"})
    load(tmp_path)
    save_file(tensors | {"generator_lm_head.weight": table + 1}, path, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match="generator_lm_head.weight differs from electra.embeddings.word_embeddings.weight"
    ):
        load(tmp_path)


def test_places_without_a_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none: no such folder; name a run, a checkpoint or a Hugging Face"):
        load(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no model here .looked for checkpoints/"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="none: no such folder"):
        import_folder(tmp_path / "none", tmp_path / "run")
    (tmp_path / "generator").mkdir()
    with pytest.raises(FileNotFoundError, match="generator/config.json: no such file"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}', encoding="utf-8")
    with pytest.raises(ValueError, match="architectures = .'BertModel'. must name one of ElectraForPreTraining"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[1", encoding="utf-8")
    with pytest.raises(ValueError, match="config.json: not a JSON object"):
        load(tmp_path)
    make_run(tmp_path / "run", "google", {})
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    with pytest.raises(FileNotFoundError, match="tokenizer: missing; a run keeps its tokenizer there"):
        export(tmp_path / "run", tmp_path / "out")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-3")
    with pytest.raises(FileNotFoundError, match="run: no checkpoint here"):
        load(tmp_path / "run")


def test_import_takes_the_preset_of_the_same_size_for_models_of_others(tmp_path: Path) -> None:
    """A base model continues with the learning rate of base, not with that of small."""
    config = Config.preset("base")
    assert preset_of_size(dataclasses.replace(config.model, vocab_size=50)) == config
    assert preset_of_size(Config.preset("large", "modern").model) == Config.preset("large", "modern")
    assert preset_of_size(dataclasses.replace(config.model, hidden_size=480)) == Config()
