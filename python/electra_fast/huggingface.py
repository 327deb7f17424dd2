"""Hugging Face folders: an encoder as config.json and model.safetensors that `transformers` loads.

`bert` encoders become Electra, `modern` ones ModernBERT; neither needs code of ours, and this
module needs nothing of `transformers`. `export` puts two such folders and a tokenizer together;
the tensors' names are in `huggingface_weights`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file

from electra_fast import huggingface_weights as weights
from electra_fast.config import Config, ModelConfig, Scalar
from electra_fast.huggingface_weights import INPUT_TABLE, OUTPUT_TABLE, State
from electra_fast.model import BERT_EPSILON, MODERN_EPSILON, ROPE_THETA, Electra
from electra_fast.presets import SIZES

OWN_KEY = "electra_fast"
"""Our key of config.json: the run's whole configuration, for `import`."""

MODEL_TYPES = {"electra": "bert", "modernbert": "modern"}
CLASSES = {
    ("bert", "discriminator"): "ElectraForPreTraining",
    ("bert", "generator"): "ElectraForMaskedLM",
    ("modern", "discriminator"): "ModernBertForTokenClassification",
    ("modern", "generator"): "ModernBertForMaskedLM",
}

# Their key: (our key of [model], the value that transformers takes where the key is absent).
_SIZES: dict[str, dict[str, tuple[str, Scalar]]] = {
    "bert": {
        "vocab_size": ("vocab_size", 30522),
        "embedding_size": ("embedding_size", 128),
        "hidden_size": ("hidden_size", 256),
        "num_hidden_layers": ("num_layers", 12),
        "num_attention_heads": ("num_heads", 4),
        "intermediate_size": ("intermediate_size", 1024),
        "max_position_embeddings": ("max_positions", 512),
        "hidden_dropout_prob": ("dropout", 0.1),
        "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    },
    "modern": {
        "vocab_size": ("vocab_size", 50368),
        "hidden_size": ("hidden_size", 768),
        "num_hidden_layers": ("num_layers", 22),
        "num_attention_heads": ("num_heads", 12),
        "intermediate_size": ("intermediate_size", 1152),
        "max_position_embeddings": ("max_positions", 8192),
        "mlp_dropout": ("dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
    },
}
# What our encoders compute whatever the configuration; the same as transformers' defaults.
_FIXED: dict[str, dict[str, Any]] = {
    "bert": {
        "hidden_act": "gelu",
        "layer_norm_eps": BERT_EPSILON,
        "type_vocab_size": 2,
        "is_decoder": False,
        "position_embedding_type": "absolute",
    },
    "modern": {
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "norm_eps": MODERN_EPSILON,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "classifier_bias": False,
        "decoder_bias": True,
    },
}


def describe(config: Config, role: str, special_ids: Mapping[str, int]) -> dict[str, Any]:
    """The content of config.json for the `role` ("discriminator" or "generator") of a model.

    `special_ids` are the ids of `pad`, `cls`, `sep` as `huggingface_tokenizer.special_ids` gives them.
    """
    shape = role_shape(config, role)
    architecture = shape.architecture
    (model_type,) = (name for name, ours in MODEL_TYPES.items() if ours == architecture)
    table: dict[str, Any] = {"architectures": [CLASSES[architecture, role]], "model_type": model_type}
    table |= {theirs: getattr(shape, ours) for theirs, (ours, _) in _SIZES[architecture].items()}
    table |= _FIXED[architecture] | {"initializer_range": 0.02, "dtype": "float32", "torch_dtype": "float32"}
    table |= {"pad_token_id": special_ids["pad"], "tie_word_embeddings": not weights.is_multiplied(shape)}
    if architecture == "modern":
        table |= _modern_extras(shape, special_ids)
        if role == "discriminator":
            table |= {"id2label": {"0": "replaced"}, "label2id": {"replaced": 0}}
    # A published folder tells nothing of the machine that it was made on.
    own = config.replace({"data": {"corpus": ""}, "train": {"out": ""}})
    return table | {OWN_KEY: dataclasses.asdict(own)}


def _modern_extras(shape: ModelConfig, special_ids: Mapping[str, int]) -> dict[str, Any]:
    """Global attention and one rotary base in every layer, in the keys of transformers 5 and of 4.48+."""
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    return {
        "layer_types": ["full_attention"] * shape.num_layers,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        "global_attn_every_n_layers": 1,
        "global_rope_theta": ROPE_THETA,
        "local_rope_theta": ROPE_THETA,
        "embedding_dropout": 0.0,
        "classifier_dropout": 0.0,
        "cls_token_id": special_ids["cls"],
        "bos_token_id": special_ids["cls"],
        "sep_token_id": special_ids["sep"],
        "eos_token_id": special_ids["sep"],
    }


def role_shape(config: Config, role: str) -> ModelConfig:
    """The sizes of one encoder; under the objective `mlm` the generator is the model itself."""
    is_small = role == "generator" and config.objective.name != "mlm"
    return config.generator_shape() if is_small else config.model


def write_model(directory: Path, model: Electra, role: str, special_ids: Mapping[str, int]) -> None:
    """Writes config.json and model.safetensors of one role into an existing folder."""
    tensors = weights.to_theirs(model.state_dict(), role, role_shape(model.config, role))
    table = describe(model.config, role, special_ids)
    (directory / "config.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def read_models(folders: Mapping[str, Path]) -> Electra:
    """The model of a folder each for "discriminator" and "generator", or for one of them.

    Tying is what the tensors say: embeddings equal to the bit are shared. A discriminator alone
    comes with a generator that refuses to answer; a generator alone is a model of objective `mlm`.
    Raises FileNotFoundError, or ValueError naming the file, field, value and what to do.
    """
    tables = {role: _read_table(folder) for role, folder in folders.items()}
    shapes = {role: _shape(folders[role], role, table) for role, table in tables.items()}
    tensors = {role: _read_tensors(folder) for role, folder in folders.items()}
    for role, shape in shapes.items():
        _check_tables(folders[role], role, shape, tensors[role])
    tying, state = _tying(folders, tables, shapes, tensors)
    config = _joint_config(folders, tables, shapes, tying)

    model = Electra(config)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    expected = {name: parameter.shape for name, parameter in parameters.items()}
    for role, folder in folders.items():
        try:
            # The shared table, if it was factored out of both, replaces what one folder alone says.
            state = weights.to_ours(tensors[role], role, role_shape(config, role), expected) | state
        except ValueError as error:
            raise ValueError(f"{folder / 'model.safetensors'}: {error}") from None
    with torch.no_grad():
        for name, tensor in state.items():
            parameters[name].copy_(tensor)
    model.has_generator = "generator" in folders
    return model


def _read_table(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; a Hugging Face model folder has one") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(table, dict) or table.get("model_type") not in MODEL_TYPES:
        found = table.get("model_type") if isinstance(table, dict) else None
        raise ValueError(f"{path}: model_type = {found!r} must be one of {', '.join(MODEL_TYPES)}")
    return table


def _shape(folder: Path, role: str, table: Mapping[str, Any]) -> ModelConfig:
    """The sizes that config.json states, checked for everything that our encoders can't do."""
    path, architecture = folder / "config.json", MODEL_TYPES[table["model_type"]]
    for name, value in _FIXED[architecture].items():
        if table.get(name, value) != value:
            raise ValueError(f"{path}: {name} = {table[name]!r} is not supported; it must be {value!r}")
    classes = table.get("architectures") or [CLASSES[architecture, role]]
    if CLASSES[architecture, role] not in classes:
        raise ValueError(f"{path}: architectures = {classes!r}; a {role} is {CLASSES[architecture, role]}")
    values = {ours: table.get(theirs, default) for theirs, (ours, default) in _SIZES[architecture].items()}
    for name in ("dropout", "attention_dropout"):
        values[name] = float(values[name])
    if architecture == "modern":
        _check_modern(path, table, values["num_layers"])
        own = _own(path, table)
        values["embedding_size"] = values["hidden_size"] if own is None else own.model.embedding_size
    try:
        return ModelConfig(architecture=architecture, **values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _check_modern(path: Path, table: Mapping[str, Any], num_layers: int) -> None:
    every = table.get("global_attn_every_n_layers", 3)
    default = ["sliding_attention" if i % every else "full_attention" for i in range(num_layers)]
    types = table.get("layer_types") or default
    if set(types) != {"full_attention"}:
        raise ValueError(f"{path}: layer_types has {', '.join(sorted(set(types)))}; only full_attention is supported")
    rope = (table.get("rope_parameters") or {}).get("full_attention") or {}
    theta = rope.get("rope_theta", table.get("global_rope_theta", 160_000.0))
    if theta != ROPE_THETA or rope.get("rope_type", "default") != "default":
        raise ValueError(f"{path}: rope_theta = {theta!r} is not supported; it must be {ROPE_THETA!r} of type default")


def _own(path: Path, table: Mapping[str, Any]) -> Config | None:
    """The run's configuration, where an export of ours left it."""
    if OWN_KEY not in table:
        return None
    try:
        return Config().replace(table[OWN_KEY])
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: {OWN_KEY}: {error}") from None


def _read_tensors(folder: Path) -> State:
    path = folder / "model.safetensors"
    if not path.is_file():
        others = [name for name in ("pytorch_model.bin", "tf_model.h5") if (folder / name).is_file()]
        if others:
            raise ValueError(
                f"{folder}: weights only as {others[0]}, which can run code when read; load it in transformers "
                "and save_pretrained it as model.safetensors"
            )
        raise FileNotFoundError(f"{path}: no such file; a Hugging Face model folder keeps its weights there")
    try:
        return dict(load_file(path))
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file: {error}") from None


def _check_tables(folder: Path, role: str, shape: ModelConfig, tensors: State) -> None:
    """The input table's shape, and that the output table is where our networks have it."""
    path, architecture = folder / "model.safetensors", shape.architecture
    table, output = INPUT_TABLE[architecture], OUTPUT_TABLE[architecture]
    width = shape.hidden_size if architecture == "modern" else shape.embedding_size
    multiplied = role == "generator" and weights.is_multiplied(shape)
    try:
        for name in (table, output) if multiplied else (table,):
            weights.check_shape(tensors, name, (shape.vocab_size, width))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not multiplied and output in tensors and not torch.equal(tensors[output], tensors[table]):
        raise ValueError(f"{path}: {output} differs from {table}; a generator's output table must be its input table")


def _tying(
    folders: Mapping[str, Path],
    tables: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, ModelConfig],
    tensors: Mapping[str, State],
) -> tuple[str, State]:
    """What the two networks share, and the tables and projections that had to be factored."""
    if len(shapes) == 2:
        _check_agreement(folders, shapes)
    products = {
        f"{role}.{name}": tensors[role][name]
        for role, shape in shapes.items()
        for name in (INPUT_TABLE[shape.architecture], OUTPUT_TABLE[shape.architecture])
        if name in tensors[role] and (name in INPUT_TABLE.values() or weights.is_multiplied(shape))
    }
    own = [_own(folders[role] / "config.json", table) for role, table in tables.items()]
    shared = not any(config is not None and config.model.tying == "none" for config in own)
    state: State = {}
    if any(weights.is_multiplied(shape) for shape in shapes.values()):
        together = weights.factored(products, shapes) if shared else None
        shared = together is not None
        state = _factored_apart(folders, products, shapes) if together is None else together
    elif len(shapes) == 2:
        shared = all(torch.equal(a, b) for a, b in _embedding_pairs(shapes, tensors))
    if len(shapes) == 1:
        return "all", state
    return ("all" if _is_one_encoder(shapes, tensors) else "embeddings") if shared else "none", state


def _check_agreement(folders: Mapping[str, Path], shapes: Mapping[str, ModelConfig]) -> None:
    ours, theirs = shapes["discriminator"], shapes["generator"]
    for name in ("architecture", "vocab_size", "embedding_size", "max_positions"):
        if getattr(ours, name) != getattr(theirs, name):
            raise ValueError(
                f"{folders['generator'] / 'config.json'}: {name} = {getattr(theirs, name)!r}, and the "
                f"discriminator's is {getattr(ours, name)!r}; the two must agree"
            )


def _factored_apart(
    folders: Mapping[str, Path], products: Mapping[str, torch.Tensor], shapes: Mapping[str, ModelConfig]
) -> State:
    """A table of its own for each role whose projection was multiplied in."""
    state: State = {}
    for role, shape in shapes.items():
        if weights.is_multiplied(shape):
            mine = {name: table for name, table in products.items() if name.startswith(f"{role}.")}
            factors = weights.factored(mine, {role: shape})
            if factors is None:
                raise ValueError(
                    f"{folders[role] / 'model.safetensors'}: the embedding table is no longer the product of one "
                    f"of width {shape.embedding_size} ({OWN_KEY}.model.embedding_size in config.json) and a "
                    "projection; import an export that was not fine-tuned"
                )
            state |= factors
    return state


def _embedding_pairs(
    shapes: Mapping[str, ModelConfig], tensors: Mapping[str, State]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    ours, theirs = tensors["discriminator"], tensors["generator"]
    prefix = f"{weights.PARTS['discriminator'][0]}."
    names = [
        their for our, (their, *_) in weights.pairs("discriminator", shapes["discriminator"]) if our.startswith(prefix)
    ]
    return [(ours[name], theirs[name]) for name in names if name in ours and name in theirs]


def _is_one_encoder(shapes: Mapping[str, ModelConfig], tensors: Mapping[str, State]) -> bool:
    ours, theirs = tensors["discriminator"], tensors["generator"]
    names = [name for name in ours if name.startswith(("electra.", "model."))]
    sizes = [dataclasses.replace(shape, dropout=0.0, attention_dropout=0.0) for shape in shapes.values()]
    return sizes[0] == sizes[1] and all(name in theirs and torch.equal(ours[name], theirs[name]) for name in names)


def _joint_config(
    folders: Mapping[str, Path],
    tables: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, ModelConfig],
    tying: str,
) -> Config:
    """The run's own configuration where the folder has it, else a preset of that size, with the folders' sizes."""
    main = "discriminator" if "discriminator" in shapes else "generator"
    shape, path = shapes[main], folders[main] / "config.json"
    base = _own(path, tables[main]) or _preset_of_size(shape)
    objective = base.objective.name if base.objective.name != "mlm" else "electra"
    small = shapes.get("generator", shape)
    generator: dict[str, Scalar] = {
        "kind": "model",
        "fraction": small.num_heads / shape.num_heads,
        "num_layers": 0 if small.num_layers == shape.num_layers else small.num_layers,
    }
    try:
        config = base.replace(
            {
                "model": dataclasses.asdict(shape) | {"tying": tying, "attention": base.model.attention},
                "generator": generator,
                "objective": {"name": objective if main == "discriminator" else "mlm"},
                "data": {"sequence_length": min(base.data.sequence_length, shape.max_positions)},
            }
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if len(shapes) == 2:
        _check_generator(folders["generator"] / "config.json", config, small)
    return config


def _preset_of_size(shape: ModelConfig) -> Config:
    recipe = "modern" if shape.architecture == "modern" else "google"
    for config in (Config.preset(name, recipe) for name in SIZES):
        if (config.model.num_layers, config.model.hidden_size) == (shape.num_layers, shape.hidden_size):
            return config
    return Config()


def _check_generator(path: Path, config: Config, small: ModelConfig) -> None:
    """Our generators are a fraction of the discriminator in width, feed-forward and heads."""
    expected = config.generator_shape()
    for theirs, (ours, _) in _SIZES[small.architecture].items():
        if "dropout" not in ours and getattr(small, ours) != getattr(expected, ours):
            raise ValueError(
                f"{path}: {theirs} = {getattr(small, ours)}, and generator.fraction = {config.generator.fraction:g} "
                f"(its share of the discriminator's heads) makes it {getattr(expected, ours)}"
            )
