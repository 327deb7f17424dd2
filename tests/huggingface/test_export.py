"""Export to and import from Hugging Face folders, compared with `transformers`, and errors for bad folders."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from published_deberta import hf_class
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from variants import randomized

from electra_fast import checkpoint
from electra_fast.config.config import Config
from electra_fast.data.corpus import Tokenizer, write_tokenizer
from electra_fast.files import checkpoint_folder
from electra_fast.files.checkpoint_folder import TrainState
from electra_fast.finetuning.error_detection import read_detector
from electra_fast.huggingface.config import CLASSES
from electra_fast.huggingface.encoder import load_encoder
from electra_fast.huggingface.export import export, import_
from electra_fast.huggingface.folder import read_model
from electra_fast.model.model import Electra
from electra_fast.training.pretrain import pretrain

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", *(f"w{i}" for i in range(191))]
IDS = torch.randint(5, 200, (2, 20), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(20) < torch.tensor([[20], [11]])).long()
Changes = dict[str, Any]
ONE_SIZE: Changes = {"generator.fraction": 1.0}
LOCAL: Changes = {"model.local_attention": 2, "model.local_rope_theta": 500.0}
LOCAL |= {"model.norm_eps": 1e-3, "generator.num_layers": 4}


def make_run(folder: Path, recipe: str, changes: Changes) -> Electra:
    """Writes a run like `pretrain`, with one checkpoint."""
    fixed = {"model.vocab_size": 200, "data.corpus": "/secret/shards", "train.out": "/secret", "train.steps": 3}
    config = Config.preset("tiny", recipe).override(changes).override(fixed)
    model = randomized(Electra(config), 11)
    vocabulary = folder.parent / "vocab.txt"
    vocabulary.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    write_tokenizer(folder / "tokenizer", Tokenizer(vocabulary, cased=False), 128)
    (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    checkpoint.save(folder, model, None, TrainState(step=3), keep=2)
    return model


@torch.no_grad()
def logits(model: Electra) -> dict[str, torch.Tensor]:
    logits = {"generator": model.generator_logits, "discriminator": model.discriminator_logits}
    return {role: logits[role](IDS, MASK) for role in model.networks}


def hf_logits(hf_model: Any, types: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the logits of `transformers`; for the two labels of ModernBERT's detector, their difference."""
    inputs = {} if types is None else {"token_type_ids": types}
    with torch.no_grad():
        logits: torch.Tensor = hf_model.eval()(input_ids=IDS, attention_mask=MASK, **inputs).logits
    if "TokenClassification" in type(hf_model).__name__:
        assert logits.shape[-1] == 2 and not logits[..., 0].any()
    return logits[..., 1] - logits[..., 0] if logits.shape[-1] == 2 else logits


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compares all tokens except padding, which may be far from every token in local attention."""
    assert actual.keys() == expected.keys()
    for role, tensor in expected.items():
        assert tensor.std() > 0.01
        assert (actual[role] - tensor)[MASK.bool()].abs().max() <= 1e-5, role


SHAPES = [
    ("google", {"model.norm_eps": 1e-3}),
    ("google", {"model.embedding_size": 64, "model.tying": "none", "generator.num_layers": 1}),
    ("google", {"model.tying": "all"} | ONE_SIZE),
    ("google", {"objective.name": "mlm"}),
    ("modern", {"model.embedding_size": 48}),  # neither encoder has the table's width
    ("modern", {"model.rope_theta": 500.0}),  # the generator has the table's width
    ("modern", {"model.embedding_size": 64}),  # the discriminator has the table's width
    ("modern", {"model.tying": "none", "model.embedding_size": 64} | ONE_SIZE),
    ("modern", {"model.tying": "all", "model.embedding_size": 48} | ONE_SIZE),
    ("modern", {"model.embedding_size": 48, "objective.name": "mlm"}),
    ("modern", {"model.embedding_size": 96}),  # the table is wider than both
    ("modern", LOCAL),
    ("deberta", {}),
    (
        "deberta",
        {"model.embedding_size": 32, "generator.fraction": 0.5, "model.conv_kernel_size": 3, "generator.num_layers": 0},
    ),
    ("deberta", {"model.tying": "embeddings"}),
    ("deberta", {"model.tying": "none"}),
    ("deberta", {"objective.name": "mlm"}),
]


@pytest.mark.parametrize(("recipe", "changes"), SHAPES)
def test_transformers_loads_export_and_import_restores_it(tmp_path: Path, recipe: str, changes: Changes) -> None:
    model = make_run(tmp_path / "run", recipe, changes)
    expected = logits(model)
    assert_same(logits(read_model(tmp_path / "run")), expected)
    export(tmp_path / "run", out=tmp_path / "out")
    assert sorted(folder.name for folder in (tmp_path / "out").iterdir()) == sorted({*expected, "encoder"})
    for role, tensor in expected.items():
        folder = tmp_path / "out" / role
        assert "secret" not in (folder / "config.json").read_text(encoding="utf-8")
        hf_model, info = hf_class(model.config.model.architecture, role).from_pretrained(
            folder, output_loading_info=True
        )
        assert {key: value for key, value in info.items() if value} == {}
        assert_same({role: hf_logits(hf_model)}, {role: tensor})
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        batch = tokenizer(["The cats sat", "cat"], padding=True, return_tensors="pt")
        assert batch["input_ids"].tolist() == [[2, 5, 6, 7, 8, 3], [2, 6, 3, 0, 0, 0]]
        hf_model(**batch)  # the model accepts its tokenizer's output
        assert hf_model.config.pad_token_id == tokenizer.pad_token_id == 0
        assert hf_model.config.max_position_embeddings == tokenizer.model_max_length == 128

    back = read_model(tmp_path / "out")
    assert back.config.objective.name == model.config.objective.name
    assert_same(logits(back), expected)
    import_(tmp_path / "out", out=tmp_path / "again")
    restored = read_model(tmp_path / "again")
    assert_same(logits(restored), expected)
    forgotten = {"data.corpus": "", "train.out": str(tmp_path / "again")}
    assert restored.config == Config.load(tmp_path / "again" / "config.toml")
    differences = model.config.override(forgotten).differences(restored.config)
    if model.config.objective.name == "mlm":
        differences = {name: pair for name, pair in differences.items() if not name.startswith("generator.")}
        differences.pop("model.tying", None)
    assert differences == {}
    imported = {"imported": True, "token_type_1_trained": recipe == "google"}
    assert checkpoint_folder.read_state(checkpoint_folder.latest(tmp_path / "again")) == TrainState(**imported)
    assert [p.shape for p in restored.parameters()] == [p.shape for p in model.parameters()]
    tokenizer_files = {path.name: path.read_bytes() for path in (tmp_path / "run" / "tokenizer").iterdir()}
    for path in (tmp_path / "again" / "tokenizer").iterdir():
        if path.name != "tokenizer_config.json":
            assert path.read_bytes() == tokenizer_files[path.name]


def edit_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def type_tables(export_folder: Path) -> list[torch.Tensor]:
    roles = (load_file(export_folder / role / "model.safetensors") for role in ("discriminator", "generator"))
    return [tensors["electra.embeddings.token_type_embeddings.weight"] for tensors in roles]


def test_untrained_token_type_is_exported_as_type_0(tmp_path: Path) -> None:
    """Only the export has the copy; transformers and a model loaded from the export agree on token type 1."""
    model = make_run(tmp_path / "run", "google", {"data.packing": "best-fit", "model.tying": "none"})
    export(tmp_path / "run", out=tmp_path / "out")
    tables = (model.embeddings.token_type, model.generator_embeddings.token_type)
    for exported, table in zip(type_tables(tmp_path / "out"), tables, strict=True):
        assert (
            torch.equal(exported[0], table[0])
            and torch.equal(exported[1], table[0])
            and not torch.equal(table[0], table[1])
        )
    back = read_model(tmp_path / "out")
    types = torch.ones_like(IDS)
    with torch.no_grad():
        typed = {"discriminator": back.discriminator_logits(IDS, MASK, types)}
        typed["generator"] = back.generator_logits(IDS, MASK, types)
        for role, expected in typed.items():
            hf_model = getattr(transformers, CLASSES["bert", role]).from_pretrained(tmp_path / "out" / role).eval()
            assert_same({role: hf_logits(hf_model, types)}, {role: expected})
    assert_same(typed, logits(model))  # equal to the logits for token type 0
    edit_config(tmp_path / "out" / "generator", {"electra_fast_token_type_1_trained": "yes"})
    with pytest.raises(ValueError, match="config.json: electra_fast_token_type_1_trained = 'yes': must be true"):
        import_(tmp_path / "out", out=tmp_path / "again")


def remove_our_keys(folder: Path) -> None:
    """Removes our keys from the folders' config.json, as in models from other programs."""
    for path in folder.glob("*/config.json"):
        table = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({k: v for k, v in table.items() if "electra_fast" not in k}), encoding="utf-8")


def test_derived_learning_rates_stay_derived_after_import(tmp_path: Path, tiny_corpus: Path) -> None:
    config = Config.preset("tiny", "modern").override(sequence_length=16, steps=2, batch_size=4, lr=1e-3)
    pretrain(tiny_corpus, config=config, out=tmp_path / "run")
    export(tmp_path / "run", out=tmp_path / "out")
    import_(tmp_path / "out", out=tmp_path / "again")
    optimizer = Config.load(tmp_path / "again" / "config.toml").optimizer
    assert (optimizer.warmup_steps, optimizer.learning_rate, optimizer.muon_learning_rate) == (-1, 1e-3, 0)


@pytest.mark.parametrize("origin", ["best-fit", "google", "others"])
def test_import_records_whether_token_type_1_was_trained(tmp_path: Path, tiny_corpus: Path, origin: str) -> None:
    """The record survives import, training without pairs, a resume, and two more exports."""
    size = {"sequence_length": 16, "steps": 2, "batch_size": 4, "checkpoint_every": 1, "warmup_steps": 0}
    packing = "examples" if origin == "google" else "best-fit"
    config = Config.preset("tiny", "google").override(packing=packing, **size)
    pretrain(tiny_corpus, config=config, out=tmp_path / "run")
    export(tmp_path / "run", out=tmp_path / "out")
    was_copied = origin != "google"
    assert [torch.equal(*table) for table in type_tables(tmp_path / "out")] == [was_copied] * 2
    if origin == "others":
        remove_our_keys(tmp_path / "out")
        for role in ("discriminator", "generator"):
            path = tmp_path / "out" / role / "model.safetensors"
            tensors = load_file(path)
            tensors["electra.embeddings.token_type_embeddings.weight"][1] += 1
            save_file(tensors, path, metadata={"format": "pt"})
    import_(tmp_path / "out", out=tmp_path / "again")
    config = config.override({"data.packing": "best-fit"})
    pretrain(tiny_corpus, config=config, out=tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-2")
    pretrain(tiny_corpus, config=config, out=tmp_path / "again")
    export(tmp_path / "again", out=tmp_path / "more")
    was_copied = origin == "best-fit"
    assert [torch.equal(*table) for table in type_tables(tmp_path / "more")] == [was_copied] * 2
    for role in ("discriminator", "generator"):
        table = json.loads((tmp_path / "more" / role / "config.json").read_text(encoding="utf-8"))
        assert table["electra_fast_token_type_1_trained"] is not was_copied
    trained = type_tables(tmp_path / "more")
    export(tmp_path / "more", out=tmp_path / "last")  # folders to folders
    assert all(map(torch.equal, type_tables(tmp_path / "last"), trained))


@pytest.mark.parametrize("changes", [{}, {"model.local_attention": 8, "model.global_attention_every": 1}])
def test_modernbert_config_is_readable_by_older_transformers(tmp_path: Path, changes: Changes) -> None:
    make_run(tmp_path / "run", "modern", {"model.local_rope_theta": 500.0} | changes)
    export(tmp_path / "run", out=tmp_path / "out")
    table = json.loads((tmp_path / "out" / "discriminator" / "config.json").read_text(encoding="utf-8"))
    older = {"global_attn_every_n_layers": 3, "global_rope_theta": 10_000.0, "local_rope_theta": 10_000.0}
    assert older.items() <= table.items()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out" / "discriminator")
    assert config.rope_parameters.keys() == set(config.layer_types)  # otherwise 5.4 to 5.16 raise an error
    assert config.local_attention > 1_000_000  # no layer is local
    assert {rope["rope_theta"] for rope in config.rope_parameters.values()} == {10_000.0}
    assert config.id2label == {0: "original", 1: "replaced"}


def test_factored_table_has_the_scale_of_a_new_one(tmp_path: Path) -> None:
    changes: Changes = {"model.embedding_size": 48}
    make_run(tmp_path / "run", "modern", changes)
    model = read_model(tmp_path / "run")
    fresh = Electra(model.config)
    with torch.no_grad():
        for parameter, new in zip(model.parameters(), fresh.parameters(), strict=True):
            parameter.copy_(new)
    checkpoint.save(tmp_path / "run", model, None, TrainState(step=9), keep=1)
    export(tmp_path / "run", out=tmp_path / "out")
    back = read_model(tmp_path / "out")
    assert back.embeddings is back.generator_embeddings
    for name in ("embeddings.token", "discriminator.projection.weight", "generator_head.projection.weight"):
        restored = back.get_parameter(name)
        expected = fresh.get_parameter(name)
        assert 0.7 < restored.std() / expected.std() < 1.4, name


def test_single_folder_supports_its_own_role(tmp_path: Path) -> None:
    expected = logits(make_run(tmp_path / "run", "modern", {"model.embedding_size": 48}))
    export(tmp_path / "run", out=tmp_path / "out")
    discriminator = read_model(tmp_path / "out" / "discriminator")
    assert_same(logits(discriminator), {"discriminator": expected["discriminator"]})
    with pytest.raises(ValueError, match="no generator, because only its discriminator was loaded"):
        discriminator.generator_logits(IDS)
    generator = read_model(tmp_path / "out" / "generator")
    assert_same(logits(generator), {"generator": expected["generator"]})
    with pytest.raises(ValueError, match="no discriminator, only the generator"):
        generator.discriminator_logits(IDS)
    with pytest.raises(ValueError, match="only the discriminator; training needs the generator too"):
        import_(tmp_path / "out" / "discriminator", out=tmp_path / "again")
    with pytest.raises(ValueError, match="only the discriminator; export needs the generator too"):
        export(tmp_path / "out" / "discriminator", out=tmp_path / "more")
    assert not (tmp_path / "again").exists() and not (tmp_path / "more").exists()


@pytest.mark.parametrize("recipe", ["google", "modern"])
def test_export_contains_headless_encoder(tmp_path: Path, recipe: str) -> None:
    """`transformers` reads it without a missing tensor; we ignore it when we read the export."""
    run = tmp_path / "run"
    out = tmp_path / "out"
    make_run(run, recipe, {"model.embedding_size": 48, "data.packing": "best-fit"})
    export(run, out=out)
    name = "ElectraModel" if recipe == "google" else "ModernBertModel"
    encoder, info = transformers.AutoModel.from_pretrained(out / "encoder", output_loading_info=True)
    assert type(encoder).__name__ == name and {key: value for key, value in info.items() if value} == {}
    whole = transformers.AutoModel.from_pretrained(out / "discriminator")
    assert encoder.state_dict().keys() == whole.state_dict().keys()
    assert all(map(torch.equal, encoder.state_dict().values(), whole.state_dict().values()))
    tables = encoder.state_dict().get("embeddings.token_type_embeddings.weight")
    assert tables is None or torch.equal(*tables)  # a copy, as in the other tables
    alone = load_encoder(out / "encoder")
    assert alone.content_hash == load_encoder(out).content_hash == load_encoder(out / "discriminator").content_hash
    with pytest.raises(ValueError, match="out: has no encoder; available: discriminator, generator"):
        load_encoder(out, "encoder")
    with torch.no_grad():
        next(encoder.parameters()).add_(1e-3)
    encoder.save_pretrained(out / "encoder")
    with pytest.raises(ValueError, match="out/encoder: differs from the encoder of .*out/discriminator, so one of"):
        load_encoder(out)
    shutil.rmtree(out / "discriminator")
    with pytest.raises(ValueError, match="encoder: an encoder without a head"):
        read_model(out)  # not as the generator alone, which has another encoder


def test_folder_with_two_results_is_rejected(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "google", {"objective.name": "replace-mlm", "data.masking": "tokens"})
    export(tmp_path / "run", out=tmp_path / "out")
    hf_model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out" / "encoder")
    assert_same({"encoder": hf_logits(hf_model)}, {"encoder": read_model(tmp_path / "out").encoder_logits(IDS, MASK)})
    shutil.copytree(tmp_path / "out" / "generator", tmp_path / "out" / "discriminator")
    with pytest.raises(ValueError, match="has discriminator/ and a different encoder/, but no model has both"):
        read_model(tmp_path / "out")


def test_earlier_detector_with_one_label_is_read(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "modern", {})
    export(tmp_path / "run", out=tmp_path / "out")
    expected = logits(read_model(tmp_path / "out"))
    path = tmp_path / "out" / "discriminator" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name][1:] for name in ("classifier.weight", "classifier.bias")}, path)
    with pytest.raises(
        ValueError, match=r"classifier.weight: expected shape \[2, 64\] as in config.json, got \[1, 64\]"
    ):
        read_model(tmp_path / "out")
    edit_config(tmp_path / "out" / "discriminator", {"id2label": {"0": "replaced"}})
    actual = logits(read_model(tmp_path / "out"))
    assert all(torch.equal(actual[role], tensor) for role, tensor in expected.items())


@pytest.mark.parametrize("labels", [{"0": "O", "1": "NAME"}, {"0": "replaced", "1": "original"}, None])
def test_tagger_is_not_a_detector(tmp_path: Path, labels: dict[str, str] | None) -> None:
    """Taggers have the class of ModernBERT's detector; only the labels differ."""
    make_run(tmp_path / "run", "modern", {})
    export(tmp_path / "run", out=tmp_path / "out")
    edit_config(tmp_path / "out" / "discriminator", {"id2label": labels})
    for read in (read_model, lambda folder: load_encoder(folder, "discriminator"), read_detector):
        with pytest.raises(
            ValueError, match="config.json: id2label = .*: must be original and replaced for a detector"
        ):
            read(tmp_path / "out" / "discriminator")
    load_encoder(tmp_path / "out" / "discriminator")  # every model has an encoder


def test_export_replaces_only_an_earlier_export(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "google", {})
    export(tmp_path / "run", out=tmp_path / "out")
    before = (tmp_path / "out" / "generator" / "model.safetensors").read_bytes()
    model = read_model(tmp_path / "run")
    with torch.no_grad():
        model.generator_head.bias.add_(1)
    checkpoint.save(tmp_path / "run", model, None, TrainState(step=4), keep=2)
    export(tmp_path / "run", out=tmp_path / "out")
    assert (tmp_path / "out" / "generator" / "model.safetensors").read_bytes() != before
    export(tmp_path / "run" / "checkpoints" / "step-3", out=tmp_path / "out")
    assert (tmp_path / "out" / "generator" / "model.safetensors").read_bytes() == before

    note = tmp_path / "out" / "notes.txt"
    note.write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="out: not empty and not an earlier export; choose another folder"):
        export(tmp_path / "run", out=tmp_path / "out")
    with pytest.raises(ValueError, match="run: not empty; choose another folder for the run"):
        import_(tmp_path / "out", out=tmp_path / "run")
    with pytest.raises(ValueError, match="is a file; choose another folder"):
        export(tmp_path / "run", out=note)
    assert note.read_text(encoding="utf-8") == "mine"
    note = note.rename(tmp_path / "out" / "encoder" / "notes.txt")
    with pytest.raises(
        ValueError, match=r"encoder/notes\.txt does not belong to the earlier export and would be lost; move it"
    ):
        export(tmp_path / "run", out=tmp_path / "out")
    assert note.read_text(encoding="utf-8") == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run", "vocab.txt"]


def test_failed_export_leaves_no_partial_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run", "google", {})
    errors = (OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device"))
    for error, names in zip(errors, (["run", "vocab.txt"], ["out", "run", "vocab.txt"]), strict=True):
        with monkeypatch.context() as patch:
            patch.setattr("electra_fast.huggingface.folder.write_tensors", Mock(side_effect=error))
            with pytest.raises(OSError, match="out: not written: .*No space left on device"):
                export(tmp_path / "run", out=tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        export(tmp_path / "run", out=tmp_path / "out")
    read_model(tmp_path / "out")


def test_folders_without_model_are_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none: no such folder; pass a run, a checkpoint or a Hugging Face"):
        read_model(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no model here .looked for checkpoints/"):
        read_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="none: no such folder"):
        import_(tmp_path / "none", out=tmp_path / "run")
    (tmp_path / "generator").mkdir()
    with pytest.raises(FileNotFoundError, match="generator/config.json: no such file"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "electra", "architectures": ["X"]}', encoding="utf-8")
    with pytest.raises(ValueError, match="architectures = .'X'.: must include one of ElectraForPreTraining"):
        read_model(tmp_path)
    make_run(tmp_path / "run", "google", {})
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    with pytest.raises(FileNotFoundError, match="tokenizer: no such folder; copy the run's tokenizer back"):
        export(tmp_path / "run", out=tmp_path / "out")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-3")
    with pytest.raises(FileNotFoundError, match="run: no checkpoint"):
        read_model(tmp_path / "run")
