"""`load_encoder`: hidden states for every kind of source, compared with `transformers` or with our model."""

import inspect
import itertools
import json
import pickle
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_export import WORDS, Changes, edit_config, make_run
from torch import Tensor

from electra_fast.data.corpus import Tokenizer
from electra_fast.huggingface import weights
from electra_fast.huggingface.config import describe_encoder, read_encoder_shape, read_table
from electra_fast.huggingface.encoder import PretrainedEncoder, load_encoder
from electra_fast.huggingface.export import export
from electra_fast.huggingface.folder import read_model
from electra_fast.huggingface.settings import HEAD_KEYS, SETTINGS, check_settings
from electra_fast.model.attention import AttentionMask
from electra_fast.model.layers import Embeddings
from electra_fast.model.model import Electra, Encoder
from electra_fast.model.networks import PARTS
from electra_fast.ops.operations import Dropout

LENGTH = 40
IDS = torch.randint(5, 200, (2, LENGTH), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [23]])).long()
SIZES = {
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}

DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "position_biased_input": False,
    "share_att_key": True,
    "pos_att_type": "c2p|p2c",
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 16,
}
ROBERTA = {"pad_token_id": 3, "type_vocab_size": 1, "layer_norm_eps": 1e-5}


def write_words(folder: Path) -> None:
    """Writes a tokenizer of `WORDS`; next to a DeBERTaV2, its files must declare BERT's rules."""
    vocab = folder / "vocab.txt"
    vocab.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    config = folder / "config.json"
    if config.is_file() and "deberta" in config.read_text(encoding="utf-8"):
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}', encoding="utf-8")


def hf_folder(folder: Path, name: str, seed: int = 0, **settings: Any) -> transformers.PreTrainedModel:
    """Saves a random model of a class of `transformers`, with a tokenizer in the same folder."""
    model_class = getattr(transformers, name)
    class_settings: dict[str, Any] = {"embedding_size": 32} if name.startswith("Electra") else {}
    if name.startswith("ModernBert"):
        class_settings = dict.fromkeys(("bos_token_id", "cls_token_id"), 2) | dict.fromkeys(
            ("eos_token_id", "sep_token_id"), 3
        )
    if name.startswith("DistilBert"):
        class_settings = {"hidden_dim": 96}  # the other sizes are attributes with these names
    if name.startswith("Deberta"):
        class_settings = DEBERTA
    torch.manual_seed(seed)
    model: transformers.PreTrainedModel = model_class(
        model_class.config_class(**SIZES | class_settings | settings)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(folder)
    write_words(folder)
    return model


@torch.no_grad()
def hf_hidden(
    model: transformers.PreTrainedModel, ids: Tensor = IDS, mask: Tensor | None = MASK, **inputs: Any
) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=ids, attention_mask=mask, **inputs).last_hidden_state
    return hidden


class Bare(torch.nn.Module):
    """The modules to which `PretrainedEncoder.state` belongs."""

    def __init__(self, encoder: PretrainedEncoder) -> None:
        super().__init__()
        self.embeddings = Embeddings(encoder.shape)
        self.encoder = Encoder(encoder.shape)
        self.load_state_dict(encoder.state, strict=True)
        self.eval()
        assert {x.dtype for x in encoder.state.values()} == {torch.float32}

    @torch.no_grad()
    def forward(self, ids: Tensor, positions_T: Tensor, mask: AttentionMask, types: Tensor | None = None) -> Tensor:
        ids_T = ids.flatten()
        dropout = Dropout(0.0)
        types_T = torch.zeros_like(ids_T) if types is None else types.flatten()
        x_TE = self.embeddings(ids_T, positions_T, types_T, torch.float32, dropout)
        hidden: Tensor = self.encoder(x_TE, positions_T, mask, dropout).view(*ids.shape, -1)
        return hidden


def padded_hidden(encoder: PretrainedEncoder, types: Tensor | None = None) -> Tensor:
    mask = AttentionMask.padded(2, LENGTH, MASK, encoder.shape.local_attention)
    hidden: Tensor = Bare(encoder)(IDS, (torch.arange(LENGTH) * MASK).flatten(), mask, types)
    return hidden


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compares the tokens that are not padding."""
    assert expected.std() > 0.1
    assert (actual - expected)[MASK.bool()].abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ElectraModel", {"embedding_size": 64}),
        ("ElectraForPreTraining", {"layer_norm_eps": 1e-3}),
        ("ElectraForSequenceClassification", {}),
        ("BertModel", {}),
        ("BertForPreTraining", {"layer_norm_eps": 1e-3, "hidden_act": "gelu_python"}),
        ("BertForSequenceClassification", {"type_vocab_size": 1}),
        ("RobertaModel", ROBERTA),
        ("RobertaForMaskedLM", ROBERTA),
        ("XLMRobertaForTokenClassification", ROBERTA),
        ("CamembertForQuestionAnswering", ROBERTA | {"type_vocab_size": 2}),
        ("DistilBertModel", {}),
        ("DistilBertForMaskedLM", {"n_heads": 2}),
    ],
)
def test_classes_with_learned_positions_match_transformers(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    """A token type that the model lacks equals type 0."""
    model = hf_folder(tmp_path, name, **settings)
    types = (torch.arange(LENGTH) > 11).long().expand(2, -1)
    encoder = load_encoder(tmp_path)
    has_types = settings.get("type_vocab_size", 2) == 2 and not name.startswith("DistilBert")
    assert_close(padded_hidden(encoder, types), hf_hidden(model, **({"token_type_ids": types} if has_types else {})))
    assert torch.equal(*encoder.state["embeddings.token_type"]) != has_types
    assert encoder.shape.max_positions == 64 - settings.get("pad_token_id", -1) - 1
    assert Tokenizer(encoder.tokenizer).vocab_size == encoder.shape.vocab_size == 200


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("DebertaV2Model", {"pos_att_type": " P2C | c2p"}),
        ("DebertaV2Model", {"position_buckets": 256, "embedding_size": 32, "layer_norm_eps": 1e-3}),
        ("DebertaV2ForMaskedLM", {"legacy": False, "conv_kernel_size": 3, "conv_act": "gelu"}),
        ("DebertaV2ForMaskedLM", {"max_relative_positions": 64, "conv_kernel_size": 5}),
        ("DebertaV2ForSequenceClassification", {"embedding_size": 96, "num_attention_heads": 1}),
        ("DebertaV2ForTokenClassification", {"pos_att_type": ["p2c", "c2p"], "vocab_size": 300}),
        ("DebertaV2ForQuestionAnswering", {"position_buckets": 4, "attention_head_size": 16}),
    ],
)
def test_deberta_classes_match_transformers(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    model = hf_folder(tmp_path / "model", name, **settings)
    encoder = load_encoder(tmp_path / "model")
    assert_close(padded_hidden(encoder), hf_hidden(model))
    write_encoder(tmp_path / "again", encoder)
    assert load_encoder(tmp_path / "again").shape == encoder.shape
    reloaded, info = transformers.AutoModel.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info.values())
    assert_close(hf_hidden(reloaded.eval()), hf_hidden(model))


@pytest.mark.parametrize("model_type", SETTINGS)
def test_every_transformers_setting_is_known(tmp_path: Path, model_type: str) -> None:
    """Each is read, without effect, or rejected; and the defaults of the installed version are accepted."""
    config = transformers.AutoConfig.for_model(model_type, **(DEBERTA if model_type == "deberta-v2" else {}))
    names = {*config.to_dict(), *config.attribute_map, *inspect.signature(type(config)).parameters}
    assert not names - SETTINGS[model_type].keys()
    check_settings(tmp_path, config.to_dict())
    check_settings(tmp_path, config.to_dict(), HEAD_KEYS)


def test_alias_of_setting_is_read(tmp_path: Path) -> None:
    model = hf_folder(tmp_path, "DistilBertModel", n_heads=2)
    path = tmp_path / "config.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"n_heads"', '"num_attention_heads"'), encoding="utf-8")
    assert_close(padded_hidden(load_encoder(tmp_path)), hf_hidden(model))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_are_rejected(tmp_path: Path, dtype: torch.dtype) -> None:
    hf_folder(tmp_path, "BertModel")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "encoder.layer.0.attention.self.query.weight"
    save_file(tensors | {name: (100 * tensors[name]).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"tensor {name} is quantized \\({dtype}\\)".replace("torch.", "")):
        load_encoder(tmp_path)


@pytest.mark.parametrize("name", ["Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert", "DebertaV2"])
def test_config_without_sizes_has_defaults_of_its_type(tmp_path: Path, name: str) -> None:
    needed = DEBERTA if name == "DebertaV2" else {}
    config = getattr(transformers, f"{name}Config")(**needed)
    table = {"model_type": config.model_type, "architectures": [f"{name}Model"], "pad_token_id": config.pad_token_id}
    table |= needed
    (tmp_path / "config.json").write_text(json.dumps(table), encoding="utf-8")
    shortest = read_encoder_shape(tmp_path, read_table(tmp_path))
    config.save_pretrained(tmp_path)
    assert read_encoder_shape(tmp_path, read_table(tmp_path)) == shortest
    assert (shortest.hidden_size, shortest.num_layers) == (config.hidden_size, config.num_hidden_layers)


@pytest.mark.parametrize("name", ["ModernBertModel", "ModernBertForTokenClassification"])
def test_modernbert_classes_match_transformers(tmp_path: Path, name: str) -> None:
    """Layers and rotary bases are the defaults: the first and the fourth layer are global."""
    model = hf_folder(tmp_path, name, local_attention=8)
    encoder = load_encoder(tmp_path)
    assert (encoder.shape.local_attention, encoder.shape.global_attention_every) == (8, 3)
    assert (encoder.shape.rope_theta, encoder.shape.local_rope_theta) == (160_000.0, 10_000.0)
    assert_close(padded_hidden(encoder), hf_hidden(model))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"local_attention": 7}, (7, 3)),
        ({"global_attn_every_n_layers": 1}, (0, 3)),
        ({"local_attention": 1 << 20}, (1 << 20, 3)),  # as wide as in our exports, but with another rotary base
        ({"layer_types": ["full_attention"] + ["sliding_attention"] * 3, "local_attention": 8}, (8, 4)),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 77.0}}, "local_attention": 8}, (8, 3)),
        ({"norm_eps": 1e-3}, (128, 3)),
    ],
)
def test_modernbert_settings_are_applied(tmp_path: Path, settings: dict[str, Any], expected: tuple[int, int]) -> None:
    model = hf_folder(tmp_path / "model", "ModernBertModel", **settings)
    encoder = load_encoder(tmp_path / "model")
    assert (encoder.shape.local_attention, encoder.shape.global_attention_every) == expected
    assert_close(padded_hidden(encoder), hf_hidden(model))
    write_encoder(tmp_path / "again", encoder)
    assert load_encoder(tmp_path / "again").shape == encoder.shape
    assert_close(hf_hidden(transformers.AutoModel.from_pretrained(tmp_path / "again").eval()), hf_hidden(model))


@pytest.mark.parametrize(("global_theta", "local_theta"), [(160_000.0, 10_000.0), (9_000, 70)])
def test_modernbert_of_older_versions_is_read(tmp_path: Path, global_theta: float, local_theta: float) -> None:
    """transformers 4 did not write layer_types and rope_parameters."""
    rope = {"full_attention": global_theta, "sliding_attention": local_theta}
    parameters = {kind: {"rope_type": "default", "rope_theta": float(theta)} for kind, theta in rope.items()}
    model = hf_folder(tmp_path, "ModernBertForMaskedLM", local_attention=8, rope_parameters=parameters)
    path = tmp_path / "config.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    del table["layer_types"], table["rope_parameters"]
    if (global_theta, local_theta) != (160_000.0, 10_000.0):
        table |= {"global_rope_theta": global_theta, "local_rope_theta": local_theta}
    path.write_text(json.dumps(table | {"global_attn_every_n_layers": 3}), encoding="utf-8")
    assert_close(padded_hidden(load_encoder(tmp_path)), hf_hidden(model))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ElectraModel", {}),
        ("ModernBertModel", {"local_attention": 8}),
        ("DebertaV2Model", {"conv_kernel_size": 3}),
    ],
)
def test_packed_segments_are_separate_sequences(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    model = hf_folder(tmp_path, name, **settings)
    encoder = load_encoder(tmp_path)
    ids_L = IDS.flatten()
    borders = [0, 31, 33, 50, 80]
    lengths = torch.tensor(borders).diff()
    segments_L = torch.arange(1, len(borders)).repeat_interleave(lengths)
    positions_L = torch.cat([torch.arange(length) for length in lengths.tolist()])
    mask = AttentionMask.packed(segments_L[None], None, "sdpa", encoder.shape.local_attention)
    packed = Bare(encoder)(ids_L[None], positions_L, mask)
    for start, end in itertools.pairwise(borders):
        alone = hf_hidden(model, ids_L[None, start:end], None)
        assert (packed[:, start:end] - alone).abs().max() <= 1e-5


@torch.no_grad()
def own_hidden(model: Electra, role: str) -> Tensor:
    embeddings, encoder, _ = (getattr(model, part, None) for part in PARTS[role])
    assert embeddings is not None and encoder is not None
    ids_T, positions_T, types_T, mask, _ = model._flat_inputs(IDS, MASK, None)
    dropout = Dropout(0.0)
    hidden: Tensor = encoder(
        embeddings(ids_T, positions_T, types_T, torch.float32, dropout), positions_T, mask, dropout
    )
    return hidden.view(*IDS.shape, -1)


MLM: Changes = {"objective.name": "mlm"}


@pytest.mark.parametrize(
    ("recipe", "changes"), [("google", {}), ("modern", {"model.embedding_size": 48}), ("google", MLM)]
)
def test_run_checkpoint_and_export_are_the_same_encoder(tmp_path: Path, recipe: str, changes: Changes) -> None:
    model = make_run(tmp_path / "run", recipe, changes)
    export(tmp_path / "run", out=tmp_path / "out")
    hidden = {role: own_hidden(model, role) for role in model.networks}
    assert len(hidden) == 1 + (changes != MLM)
    default = next(role for role in ("discriminator", "generator") if role in hidden)
    hashes = set()
    for role, expected in hidden.items():
        run = load_encoder(tmp_path / "run", role)
        exported = load_encoder(tmp_path / "out", role)
        for encoder in (run, exported):
            assert_close(padded_hidden(encoder), expected)
            assert Tokenizer(encoder.tokenizer).vocab_size == encoder.shape.vocab_size
        write_encoder(tmp_path / role, run)
        assert_close(hf_hidden(transformers.AutoModel.from_pretrained(tmp_path / role).eval()), expected)
        assert (run.shape == exported.shape) == (recipe == "google")  # ModernBERT has no projection
        assert run.content_hash == load_encoder(tmp_path / "run" / "checkpoints" / "step-3", role).content_hash
        assert exported.content_hash == load_encoder(tmp_path / "out" / role, role).content_hash
        hashes |= {run.content_hash}
        if role == default:
            assert load_encoder(tmp_path / "run").content_hash == run.content_hash
            assert load_encoder(tmp_path / "out").content_hash == exported.content_hash
    assert len(hashes) == len(hidden)


def test_untrained_token_type_is_copied_from_type_0(tmp_path: Path) -> None:
    model = make_run(tmp_path / "run", "google", {"data.packing": "best-fit"})
    export(tmp_path / "run", out=tmp_path / "out")
    table = model.embeddings.token_type
    assert not torch.equal(table[0], table[1])
    for source in ("run", "run/checkpoints/step-3", "out", "out/generator"):
        loaded = load_encoder(tmp_path / source).state["embeddings.token_type"]
        assert torch.equal(loaded[0], table[0]) and torch.equal(loaded[1], table[0])


def write_encoder(folder: Path, encoder: PretrainedEncoder) -> None:
    folder.mkdir()
    table = describe_encoder(encoder.shape, {"pad": 0, "cls": 2, "sep": 3})
    (folder / "config.json").write_text(json.dumps(table), encoding="utf-8")
    save_file(weights.encoder_to_hf(encoder.state, encoder.shape), folder / "model.safetensors", {"format": "pt"})
    write_words(folder)


def first_release(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames tensors as in bert-base-uncased, with a buffer and a second copy of the bias."""
    names = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
    renamed = {}
    for name, tensor in tensors.items():
        for ending, older in names.items():
            name = name.replace(ending, older)
        renamed[name] = tensor
    bias = renamed["cls.predictions.bias"]
    return renamed | {"bert.embeddings.position_ids": torch.arange(64)[None], "cls.predictions.decoder.bias": bias}


def write_shards(folder: Path, name: str, tensors: dict[str, Tensor]) -> Path:
    """Writes two files and their index."""
    parts = [dict(list(tensors.items())[half::2]) for half in range(2)]
    places = {}
    for number, part in enumerate(parts):
        stem, _, ending = name.partition(".")
        file = f"{stem}-{number + 1:05}-of-00002.{ending}"
        save_file(part, folder / file) if ending == "safetensors" else torch.save(part, folder / file)
        places |= dict.fromkeys(part, file)
    index = folder / f"{name}.index.json"
    index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    return index


def test_weights_are_read_from_every_file_format(tmp_path: Path) -> None:
    hf_folder(tmp_path, "BertForMaskedLM")
    whole = load_encoder(tmp_path)
    stored = tmp_path / "model.safetensors"
    logits = read_model(tmp_path).generator_logits(IDS, MASK)
    tensors = load_file(stored)
    stored.unlink()
    for name in ("pytorch_model.bin", "model.safetensors"):  # the second has precedence
        index = write_shards(tmp_path, name, tensors)
        assert load_encoder(tmp_path).content_hash == whole.content_hash
        index.unlink()
    binary = tmp_path / "pytorch_model.bin"
    for state, is_zip in ((tensors, True), (first_release(tensors), False)):
        torch.save(
            {name: torch.nn.Parameter(x, x.is_floating_point()) for name, x in state.items()},
            binary,
            _use_new_zipfile_serialization=is_zip,
        )
        assert load_encoder(tmp_path).content_hash == whole.content_hash
        assert torch.equal(read_model(tmp_path).generator_logits(IDS, MASK), logits)


def test_inconsistent_shards_are_reported(tmp_path: Path) -> None:
    hf_folder(tmp_path, "BertModel")
    stored = tmp_path / "model.safetensors"
    index = write_shards(tmp_path, "pytorch_model.bin", load_file(stored))
    stored.unlink()
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    first, second = (tmp_path / f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2))
    expect = partial(expect_line, tmp_path)
    index.write_text(json.dumps({"weight_map": places | {"more.weight": first.name}}), encoding="utf-8")
    expect(f"{index}: more.weight is in none of the listed files")
    index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    second.unlink()
    expect(f"{second}: no such file; 1 of the 2 files in {index.name} are missing")
    index.write_text('{"weight_map": {"x": "../x.safetensors"}}', encoding="utf-8")
    expect(f"{index}: weight_map must map tensors to the names of files in this folder")


def expect_line(folder: Path, start: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_encoder(folder)
    assert str(caught.value).startswith(start) and "\n" not in str(caught.value)


class Other:
    """An arbitrary object in a pickle."""


def test_file_without_tensors_is_reported(tmp_path: Path) -> None:
    hf_folder(tmp_path, "BertModel")
    stored = tmp_path / "model.safetensors"
    binary = tmp_path / "pytorch_model.bin"
    tensors = load_file(stored)
    stored.unlink()
    broken = f"{binary}: not a complete file of tensors (torch.load(weights_only=True) raises "
    torch.save(tensors, binary)
    whole = binary.read_bytes()
    for content in (b"", b"version https://git-lfs.github.com/spec/v1\n", pickle.dumps(Other()), whole[:-1000]):
        binary.write_bytes(content)
        expect_line(tmp_path, broken)
    for content in (list(tensors), {"model": tensors}, tensors | {"epoch": 3}):
        torch.save(content, binary)
        expect_line(tmp_path, f"{binary}: expected a state dict")
    name = "encoder.layer.1.output.dense.bias"
    torch.save(tensors | {name: torch.full((64,), torch.nan)}, binary)
    expect_line(tmp_path, f"{binary}: {name} has NaN or infinite values")


def test_missing_role_is_reported(tmp_path: Path) -> None:
    make_run(tmp_path / "mlm", "google", MLM)
    make_run(tmp_path / "run", "google", {})
    export(tmp_path / "run", out=tmp_path / "out")
    hf_folder(tmp_path / "base", "ElectraModel")
    with pytest.raises(ValueError, match="step-3: has no discriminator; available: generator"):
        load_encoder(tmp_path / "mlm", "discriminator")
    with pytest.raises(ValueError, match="ElectraForPreTraining'.: must be ElectraForMaskedLM for a generator"):
        load_encoder(tmp_path / "out" / "discriminator", "generator")
    assert load_encoder(tmp_path / "base", "discriminator").shape == load_encoder(tmp_path / "base").shape
    shutil.rmtree(tmp_path / "out" / "generator")
    with pytest.raises(ValueError, match="out: has no generator; available: discriminator"):
        load_encoder(tmp_path / "out", "generator")


# Values by model type that change a model's outputs in a way that our models do not support.
REFUSED: dict[str, dict[str, object]] = {
    "bert": {"hidden_act": "gelu_new", "position_embedding_type": "relative_key", "type_vocab_size": 3}
    | dict.fromkeys(("is_decoder", "add_cross_attention", "is_encoder_decoder"), True)
    | {"pruned_heads": {"0": [1]}},
    "roberta": {"hidden_act": "relu", "quantization_config": {}},
    "distilbert": {"activation": "relu", "quantization_config": {}},
    "electra": {"hidden_act": "relu", "position_embedding_type": "relative_key", "type_vocab_size": 1},
    "modernbert": dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias"), True)
    | {"hidden_activation": "silu", "quantization_config": {}},
    "deberta-v2": dict.fromkeys(("relative_attention", "share_att_key"), False)
    | {"position_biased_input": True, "pos_att_type": "c2p", "norm_rel_ebd": "none", "type_vocab_size": 2}
    | {"hidden_act": "relu", "conv_act": "relu", "conv_groups": 2, "z_steps": 2, "quantization_config": {}},
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_setting_that_changes_outputs_is_rejected(tmp_path: Path, model_type: str) -> None:
    for key, value in REFUSED[model_type].items():
        others = DEBERTA if model_type == "deberta-v2" else {}
        with pytest.raises(ValueError, match=f"{key} = {re.escape(repr(value))}: must be "):
            check_settings(tmp_path, {"model_type": model_type} | others | {key: value})


@pytest.mark.parametrize("key", sorted(DEBERTA.keys() - {"position_buckets"}))
def test_setting_with_unsupported_default_is_rejected(tmp_path: Path, key: str) -> None:
    table = {name: value for name, value in DEBERTA.items() if name != key}
    default = {"position_biased_input": "True", "pos_att_type": "None", "norm_rel_ebd": "'none'"}.get(key, "False")
    with pytest.raises(ValueError, match=f"{key} = {default}: must be "):
        check_settings(tmp_path, {"model_type": "deberta-v2"} | table)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "BertModel",
            {"model_type": "xlnet"},
            "model_type = 'xlnet': must be one of electra, modernbert, deberta-v2, be",
        ),
        ("BertModel", {"model_type": "deberta"}, "model_type = 'deberta' (DeBERTa V1): must be deberta-v2 (DeBERTa"),
        ("DebertaV2Model", {"position_buckets": 1}, "model.position_buckets = 1: must be at least 2"),
        (
            "DebertaV2Model",
            {"position_buckets": 32},
            "rel_embeddings.weight: expected shape [64, 64] as in config.json",
        ),
        (
            "DebertaV2Model",
            {"max_relative_positions": 32},
            "max_relative_positions = 32: must be 64",
        ),
        ("DebertaV2Model", {"attention_head_size": 8}, "attention_head_size = 8: must be 16 (hidd"),
        ("DebertaV2Model", {"conv_kernel_size": 4}, "model.conv_kernel_size = 4: must be odd"),
        (
            "DebertaV2Model",
            {"embedding_size": 32},
            "word_embeddings.weight: expected shape [200, 32] as in config.json",
        ),
        ("BertModel", {"hidden_act": "gelu_new"}, "hidden_act = 'gelu_new': must be 'gelu' or 'ge"),
        ("BertModel", {"hidden_size": "64"}, "model.hidden_size = '64': must be an integer"),
        ("BertModel", {"num_hidden_layers": 5}, ": tensor encoder.layer.4.attention.self.query.weight is missing"),
        ("BertForMaskedLM", {"num_hidden_layers": 5}, ": tensor bert.encoder.layer.4.attention.self.query.weight is"),
        ("RobertaModel", {"max_position_embeddings": 60}, "tensor embeddings.position_embeddings.weight: expected"),
        ("RobertaModel", {"type_vocab_size": 1}, "tensor embeddings.token_type_embeddings.weight: expected"),
        ("RobertaModel", {"pad_token_id": None}, "pad_token_id = None: must be an id"),
        ("DistilBertForMaskedLM", {"hidden_dim": 9}, "tensor distilbert.transformer.layer.0.ffn.lin1.weight: exp"),
        ("ElectraModel", {"num_attention_heads": 5}, "model.num_heads = 5: must divide model.hidden_size = 64"),
        ("ElectraModel", {"vocab_size": 201}, "word_embeddings.weight: expected shape [201, 32] as in config"),
        ("BertModel", {"layer_norm_eps": 0.0}, "layer_norm_eps = 0: must be above 0"),
        ("BertModel", {"layer_norm_eps": float("inf")}, "norm_eps = inf: must be"),
        ("BertModel", {"hidden_dropout_prob": 1.5}, "model.dropout = 1.5: must be at least 0 and at most 0.99"),
        ("DistilBertModel", {"num_hidden_layers": 2}, "n_layers = 4, but num_hidden_layers = 2; keep one of them"),
        ("ModernBertModel", {"norm_eps": float("nan")}, "norm_eps = nan: must be"),
        ("ModernBertModel", {"rope_parameters": {"rope_theta": 9.0}}, "rope_parameters: rope_theta is not supported"),
        ("ModernBertModel", {"rope_parameters": {"full_attention": {"factor": 2.0}}}, "rope_parameters: factor is not"),
        ("ModernBertModel", {"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "rope_type = 'linear' o"),
        ("ModernBertModel", {"layer_types": ["sliding_attention"] * 4}, "layer_types = ['sliding_attention', "),
        ("ModernBertModel", {"layer_types": ["full_attention"] * 3}, "]: the first and every n-th layer"),
        ("ModernBertModel", {"local_attention": 0}, "the others sliding_attention with a local_attention above 0"),
        ("ModernBertModel", {"rope_scaling": {"type": "yarn"}}, "rope_scaling = {'type': 'yarn'}: must be null"),
    ],
)
def test_inconsistent_config_is_reported(tmp_path: Path, name: str, changes: dict[str, object], message: str) -> None:
    hf_folder(tmp_path, name)
    edit_config(tmp_path, changes)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_encoder(tmp_path)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


def test_missing_files_are_reported(tmp_path: Path) -> None:
    hf_folder(tmp_path / "model", "ElectraForPreTraining")
    config, stored, vocab = (tmp_path / "model" / x for x in ("config.json", "model.safetensors", "vocab.txt"))
    with pytest.raises(FileNotFoundError, match="none: no such folder; pass a run, a checkpoint or a Hugging Face"):
        load_encoder(tmp_path / "none")
    tensors = load_file(stored)
    name = "electra.embeddings.LayerNorm.bias"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, stored, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"model: tensor {name} is missing"):
        load_encoder(tmp_path / "model")
    save_file(tensors, stored, metadata={"format": "pt"})
    vocab.write_text("\n".join([*WORDS, "more"]) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has 201 entries, but the model has 200; put the model's tokenizer"):
        load_encoder(tmp_path / "model")
    vocab.unlink()
    missing = "model: has no tokenizer.json, vocab.txt or spm.model; "
    with pytest.raises(FileNotFoundError, match=f"{missing}put its tokenizer.json or vocab.txt there"):
        load_encoder(tmp_path / "model")
    for name in ("sentencepiece.bpe.model", "vocab.json"):
        (tmp_path / "model" / name).touch()
        with pytest.raises(FileNotFoundError, match=f"{missing}create one from {name} with save_pretrained"):
            load_encoder(tmp_path / "model")
    stored.unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors: no such file"):
        load_encoder(tmp_path / "model")
    config.unlink()
    with pytest.raises(FileNotFoundError, match="model: no model here .looked for checkpoints/"):
        load_encoder(tmp_path / "model")
