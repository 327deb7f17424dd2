"""Translation between the config.json of `transformers` and our configuration, for all model types.

Common settings are translated. Settings that are fixed in our encoders are written on export and checked on import, so
that a model which needs other values is rejected.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from electra_fast.config.config import NORM_EPS, Architecture, Config, ModelConfig
from electra_fast.config.presets import DEBERTA_RATE, DEFAULT_PRESET, SIZES
from electra_fast.config.section import Scalar, integers_as_floats
from electra_fast.errors import InputError
from electra_fast.files.json_files import read_object
from electra_fast.huggingface.model_types import TRANSLATED, original, translated
from electra_fast.huggingface.settings import HEAD_KEYS, check_settings
from electra_fast.huggingface.tensor_files import GENERATOR_FILE, tensor_names, weights_file
from electra_fast.model.networks import networks_of

ONNX_FILE = "model.onnx"
OWN_KEY = "electra_fast"
"""Our key in config.json for the run's whole configuration, which `import` reads."""
TOKEN_TYPE_KEY = "electra_fast_token_type_1_trained"
"""Our key in config.json: false if token type 1 never occurred in training, so that `export` copied the row of type 0.
"""

MODEL_TYPES: dict[str, Architecture] = {"electra": "bert", "modernbert": "modernbert", "deberta-v2": "deberta"}
_TYPE_OF: dict[str, str] = {architecture: name for name, architecture in MODEL_TYPES.items()}
CLASSES = {
    ("bert", "discriminator"): "ElectraForPreTraining",
    ("bert", "generator"): "ElectraForMaskedLM",
    ("modernbert", "discriminator"): "ModernBertForTokenClassification",
    ("modernbert", "generator"): "ModernBertForMaskedLM",
    ("deberta", "discriminator"): "ReplacedTokenDetectionModel",  # in the published code; `transformers` has none
    ("deberta", "generator"): "DebertaV2ForMaskedLM",
    # Last, because a single folder with a masked language model is read as a generator.
    ("bert", "encoder"): "ElectraForMaskedLM",
    ("modernbert", "encoder"): "ModernBertForMaskedLM",
    ("deberta", "encoder"): "DebertaV2ForMaskedLM",
}

DETECTOR_LABELS = ("original", "replaced")
"""The labels of ModernBERT's detector, a token classifier; two, because `transformers` applies a softmax to them."""
HEADLESS = {"electra": "ElectraModel", "modernbert": "ModernBertModel", "deberta-v2": "DebertaV2Model"}
"""Classes of encoders without a head, by model type. With a new head, their folders can take any role."""

# Hugging Face key: (our key in [model], the default in transformers).
SIZE_KEYS: dict[str, dict[str, tuple[str, Scalar]]] = {
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
    "modernbert": {
        "vocab_size": ("vocab_size", 50368),
        "hidden_size": ("hidden_size", 768),
        "num_hidden_layers": ("num_layers", 22),
        "num_attention_heads": ("num_heads", 12),
        "intermediate_size": ("intermediate_size", 1152),
        "max_position_embeddings": ("max_positions", 8192),
        "mlp_dropout": ("dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    "deberta": {
        "vocab_size": ("vocab_size", 128100),
        "hidden_size": ("hidden_size", 1536),
        "num_hidden_layers": ("num_layers", 24),
        "num_attention_heads": ("num_heads", 24),
        "intermediate_size": ("intermediate_size", 6144),
        "max_position_embeddings": ("max_positions", 512),
        "embedding_size": ("embedding_size", 0),  # hidden_size
        "position_buckets": ("position_buckets", -1),
        "conv_kernel_size": ("conv_kernel_size", 0),
        "conv_act": ("conv_activation", "tanh"),
        "hidden_dropout_prob": ("dropout", 0.1),
        "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    },
}
_EPS_KEY = {"bert": "layer_norm_eps", "modernbert": "norm_eps", "deberta": "layer_norm_eps"}
_GLOBAL = "full_attention"
_LOCAL = "sliding_attention"
_UNBOUNDED = 1 << 20  # window in tokens of a global layer that config.json calls local
# Fixed settings of our encoders; `settings` lists the accepted values.
_FIXED: dict[str, dict[str, Any]] = {
    "bert": {
        "hidden_act": "gelu",
        "type_vocab_size": 2,
        "is_decoder": False,
        "position_embedding_type": "absolute",
    },
    "modernbert": {
        "hidden_activation": "gelu",
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "deberta": {
        "hidden_act": "gelu",
        "type_vocab_size": 0,
        "relative_attention": True,
        "max_relative_positions": -1,
        "position_biased_input": False,
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "norm_rel_ebd": "layer_norm",
    },
}
# Fixed settings of the pre-training heads.
_FIXED_HEAD: dict[str, dict[str, Any]] = {
    "bert": {},
    "modernbert": {"classifier_activation": "gelu", "classifier_bias": False, "decoder_bias": True},
    "deberta": {},
}


def class_of(architecture: str, role: str, headless: bool = False) -> str:
    """Returns the class of `transformers` for a role, or for its encoder alone.

    A DeBERTa discriminator has none, so the class is its encoder's, which ignores the head.
    """
    headless = headless or (architecture, role) == ("deberta", "discriminator")
    return HEADLESS[_TYPE_OF[architecture]] if headless else CLASSES[architecture, role]


def describe(config: Config, role: str, special_ids: Mapping[str, int], headless: bool = False) -> dict[str, Any]:
    """Returns config.json for one role ("discriminator", "encoder" or "generator") of a model, or for its encoder.

    `special_ids` come from `huggingface.tokenizer.special_ids`.
    """
    shape = role_shape(config, role)
    table: dict[str, Any] = {"architectures": [class_of(shape.architecture, role, headless)]}
    table |= describe_encoder(shape, special_ids)
    if not headless:
        table |= _FIXED_HEAD[shape.architecture]
    if shape.architecture == "modernbert" and role == "discriminator" and not headless:
        table["id2label"] = {str(i): label for i, label in enumerate(DETECTOR_LABELS)}
        table["label2id"] = {label: i for i, label in enumerate(DETECTOR_LABELS)}
    # A published folder must not reveal local paths.
    anonymous = config.override({"data.corpus": "", "train.out": ""})
    return table | {OWN_KEY: dataclasses.asdict(anonymous)}


def describe_encoder(shape: ModelConfig, special_ids: Mapping[str, int]) -> dict[str, Any]:
    architecture = shape.architecture
    table: dict[str, Any] = {"model_type": _TYPE_OF[architecture]}
    table |= {hf_key: getattr(shape, key) for hf_key, (key, _) in SIZE_KEYS[architecture].items()}
    table |= _FIXED[architecture] | {"initializer_range": 0.02, "dtype": "float32", "torch_dtype": "float32"}
    table |= {_EPS_KEY[architecture]: shape.eps, "pad_token_id": special_ids["pad"]}
    table |= {"tie_word_embeddings": not is_multiplied(shape)}
    if architecture == "deberta":
        # Without `legacy`, the head receives the table as an argument, and transformers 4 would tie another layer.
        table |= dict.fromkeys(("legacy", "tie_word_embeddings"), has_legacy_head(shape))
    return table | _modern_extras(shape, special_ids) if architecture == "modernbert" else table


def is_multiplied(shape: ModelConfig) -> bool:
    """Returns whether a projection is multiplied into the tables: ModernBERT has no separate one."""
    return shape.architecture == "modernbert" and shape.embedding_size != shape.hidden_size


def has_legacy_head(shape: ModelConfig) -> bool:
    """Returns whether DebertaV2ForMaskedLM needs `legacy`: its other head has no narrower embeddings."""
    return shape.architecture == "deberta" and shape.embedding_size != shape.hidden_size


def _modern_extras(shape: ModelConfig, special_ids: Mapping[str, int]) -> dict[str, Any]:
    """Returns layer types and rotary bases for transformers 4.48 and later; 5.4 to 5.16 need a local layer."""
    if not shape.is_local(1):
        local: dict[str, Any] = {"local_attention": _UNBOUNDED, "local_rope_theta": shape.rope_theta}
        shape = dataclasses.replace(shape, global_attention_every=ModelConfig.global_attention_every, **local)
    return {
        "layer_types": _layer_types(shape),
        "rope_parameters": {
            _GLOBAL: {"rope_type": "default", "rope_theta": shape.rope_theta},
            _LOCAL: {"rope_type": "default", "rope_theta": shape.local_rope_theta},
        },
        "global_attn_every_n_layers": shape.global_attention_every,
        "global_rope_theta": shape.rope_theta,
        "local_rope_theta": shape.local_rope_theta,
        "local_attention": shape.local_attention,
        **dict.fromkeys(("embedding_dropout", "classifier_dropout"), 0.0),
        **dict.fromkeys(("cls_token_id", "bos_token_id"), special_ids["cls"]),
        **dict.fromkeys(("sep_token_id", "eos_token_id"), special_ids["sep"]),
    }


def role_shape(config: Config, role: str) -> ModelConfig:
    return networks_of(config)[role].shape


def read_table(folder: Path, role: str | None = None) -> dict[str, Any]:
    """Reads a folder's config.json, with Electra's keys for the `TRANSLATED` model types.

    For a DeBERTaV2, the class and a generator's number of layers are derived from the tensors. Raises ValueError
    unless the model type and, if it is translated, its settings are supported.
    """
    path = folder / "config.json"
    try:
        table = read_object(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; a Hugging Face model folder must have one") from None
    model_type = table.get("model_type")
    if model_type == "deberta":
        raise InputError(f"{path}: model_type = 'deberta' (DeBERTa V1): must be deberta-v2 (DeBERTa V2 or V3)")
    if not isinstance(model_type, str) or model_type not in {*MODEL_TYPES, *TRANSLATED}:
        supported = ", ".join((*MODEL_TYPES, *TRANSLATED))
        raise InputError(f"{path}: model_type = {model_type!r}: must be one of {supported}")
    named_classes(path, table)
    check_settings(path, table)
    if model_type == "deberta-v2":
        return table | _entries_from_tensors(
            table, tensor_names(file := weights_file(folder, role)), file.name == GENERATOR_FILE
        )
    return table if model_type in MODEL_TYPES else translated(path, table, TOKEN_TYPE_KEY)


def _entries_from_tensors(table: Mapping[str, Any], names: Collection[str], is_generator: bool) -> dict[str, Any]:
    """Returns entries that published DeBERTaV2 folders lack in config.json, derived from the names of the tensors."""
    entries: dict[str, Any] = {}
    classes = table.get("architectures") or []
    if names and not any("For" in str(name) and not str(name).endswith("ForMaskedLM") for name in classes):
        is_discriminator = not is_generator and any(name.startswith("mask_predictions.") for name in names)
        has_head = any(name.startswith(("lm_predictions.", "cls.predictions.")) for name in names)
        role = "discriminator" if is_discriminator else "generator"
        headless = HEADLESS["deberta-v2"]
        entries["architectures"] = [CLASSES["deberta", role] if is_discriminator or has_head else headless]
    if names and is_generator:
        layers = [int(match[1]) for name in names if (match := re.search(r"\bencoder\.layer\.(\d+)\.", name))]
        entries["num_hidden_layers"] = 1 + max(layers, default=-1)
    return entries


def named_classes(path: Path, table: Mapping[str, Any]) -> list[str]:
    """Returns the classes in a config.json. Raises ValueError unless they are a list of names."""
    classes = table.get("architectures") or []
    if not _are_strings(classes):
        raise InputError(f"{path}: architectures = {classes!r}: must be a list of names")
    return classes


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def read_shape(folder: Path, role: str, table: Mapping[str, Any]) -> ModelConfig:
    """Returns the shape in one role's config.json. Raises ValueError for settings that our models do not support."""
    path = folder / "config.json"
    shape = read_encoder_shape(folder, table)
    check_role(path, role, table)
    check_settings(path, table, HEAD_KEYS)
    run_config = own_config(path, table)
    if shape.architecture == "bert" or run_config is None or is_headless(table):
        return shape
    network = networks_of(run_config).get(role)
    return dataclasses.replace(shape, embedding_size=(network.shape if network else run_config.model).embedding_size)


def read_encoder_shape(folder: Path, table: Mapping[str, Any]) -> ModelConfig:
    """Returns the shape of an encoder of any class. Raises ValueError for settings that our encoders do not support.

    The embeddings of `modernbert` are as wide as its layers, even if a projection was multiplied into them.
    """
    path = folder / "config.json"
    architecture = MODEL_TYPES[table["model_type"]]
    values = {key: table.get(hf_key, default) for hf_key, (key, default) in SIZE_KEYS[architecture].items()}
    eps = table.get(_EPS_KEY[architecture], NORM_EPS[architecture])
    if eps == 0:  # in our configuration, 0 stands for the default
        raise InputError(f"{path}: {_EPS_KEY[architecture]} = 0: must be above 0")
    values["norm_eps"] = 0.0 if eps == NORM_EPS[architecture] else eps
    if architecture == "modernbert":
        values["embedding_size"] = values["hidden_size"]
    if architecture == "deberta":
        values["embedding_size"] = values["embedding_size"] or values["hidden_size"]
        if values["conv_kernel_size"] == 0:
            values["conv_activation"] = ModelConfig.conv_activation
    try:
        shape = ModelConfig(architecture=architecture, **integers_as_floats(ModelConfig, values))
        if architecture == "deberta":
            _check_derived(shape, table)
        return _with_layers(shape, table) if architecture == "modernbert" else shape
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _check_derived(shape: ModelConfig, table: Mapping[str, Any]) -> None:
    """Raises ValueError for settings of a DeBERTaV2 that differ from the values derived in our encoders."""
    derived = {
        "max_relative_positions": (shape.max_positions, "max_position_embeddings, or -1"),
        "attention_head_size": (shape.hidden_size // shape.num_heads, "hidden_size / num_attention_heads"),
    }
    for key, (expected, reason) in derived.items():
        value = table.get(key, expected)
        is_unset = key == "max_relative_positions" and type(value) is int and value < 1
        if value != expected and not is_unset:
            raise InputError(f"{key} = {value!r}: must be {expected} ({reason})")


def check_role(path: Path, role: str, table: Mapping[str, Any]) -> None:
    """Raises ValueError unless a config.json has the class of this role and, for ModernBERT's detector, its labels."""
    architecture = MODEL_TYPES[table["model_type"]]
    name = CLASSES[architecture, role]
    classes = table.get("architectures") or [name]
    if is_headless(table):
        return
    if name not in classes:
        raise InputError(f"{path}: architectures = {original(table)['architectures']!r}: must be {name} for a {role}")
    if (architecture, role) == ("modernbert", "discriminator"):
        num_detector_labels(path, table)


def num_detector_labels(path: Path, table: Mapping[str, Any]) -> int:
    """Returns the number of labels of a ModernBERT's detector: two, or one in earlier exports.

    Raises ValueError for other labels, since models fine-tuned for token classification have the same class.
    """
    names = table.get("id2label")
    if names == {str(i): label for i, label in enumerate(DETECTOR_LABELS)}:
        return 2
    if isinstance(names, dict) and len(names) == 1:
        return 1
    expected = " and ".join(DETECTOR_LABELS)
    raise InputError(f"{path}: id2label = {names!r}: must be {expected} for a detector of replaced tokens")


def is_headless(table: Mapping[str, Any]) -> bool:
    return HEADLESS.get(table["model_type"]) in (table.get("architectures") or [])


def _with_layers(shape: ModelConfig, table: Mapping[str, Any]) -> ModelConfig:
    """Adds the rotary bases of a ModernBERT, and the window and positions of its local layers, to a shape."""
    if table.get("rope_scaling"):
        raise InputError(f"rope_scaling = {table['rope_scaling']!r}: must be null")
    types = table.get("layer_types")
    if types is not None and not _are_strings(types):
        raise InputError(f"layer_types = {types!r}: must be a list of names")
    shape = dataclasses.replace(
        shape,
        rope_theta=_rope_theta(table, _GLOBAL, "global_rope_theta", 160_000.0),
        local_attention=table.get("local_attention", 128),
        global_attention_every=table.get("global_attn_every_n_layers", 3),
    )
    types = types or _layer_types(shape)
    if types != _layer_types(shape):  # layer_types takes precedence
        every = [*types[1:], _GLOBAL].index(_GLOBAL) + 1
        shape = dataclasses.replace(shape, global_attention_every=every)
    if types != _layer_types(shape):
        raise InputError(
            f"layer_types = {types!r}: the first and every n-th layer after it must be {_GLOBAL}, the others {_LOCAL} "
            "with a local_attention above 0"
        )
    if _LOCAL in types:
        local_theta = _rope_theta(table, _LOCAL, "local_rope_theta", 10_000.0)
        if (shape.local_attention, local_theta) != (_UNBOUNDED, shape.rope_theta):
            return dataclasses.replace(shape, local_rope_theta=local_theta)
    return dataclasses.replace(shape, local_attention=0, global_attention_every=ModelConfig.global_attention_every)


def _layer_types(shape: ModelConfig) -> list[str]:
    return [_LOCAL if shape.is_local(i) else _GLOBAL for i in range(shape.num_layers)]


def _rope_theta(table: Mapping[str, Any], layer_type: str, older_key: str, default: float) -> Any:
    """Returns the rotary base of a layer type, as written by transformers 5 or by 4.48 and later."""
    parameters = table.get("rope_parameters") or {}
    rope = parameters.get(layer_type) or {} if isinstance(parameters, dict) else None
    if not isinstance(rope, dict):
        raise InputError(f"rope_parameters = {parameters!r}: must have an object for each layer type")
    unknown = (parameters.keys() - {_GLOBAL, _LOCAL}) | (rope.keys() - {"rope_type", "rope_theta"})
    if unknown := [name for name in sorted(unknown) if parameters.get(name, rope.get(name)) is not None]:
        raise InputError(f"rope_parameters: {unknown[0]} is not supported; remove it")
    if rope.get("rope_type", "default") != "default":
        raise InputError(f"rope_type = {rope['rope_type']!r} of {layer_type}: must be 'default'")
    theta = rope.get("rope_theta", table.get(older_key, default))
    return integers_as_floats(ModelConfig, {"rope_theta": theta})["rope_theta"]


def own_config(path: Path, table: Mapping[str, Any]) -> Config | None:
    if OWN_KEY not in table:
        return None
    try:
        return Config.of_table(table[OWN_KEY])
    except (InputError, AttributeError) as error:
        raise InputError(f"{path}: {OWN_KEY}: {error}") from None


def token_type_1_trained(folder: Path) -> bool:
    """Returns whether token type 1 occurred in training, as `export` records it; True for other folders."""
    table = read_table(folder)
    trained = table.get(TOKEN_TYPE_KEY, OWN_KEY not in table)
    if not isinstance(trained, bool):
        raise InputError(f"{folder / 'config.json'}: {TOKEN_TYPE_KEY} = {trained!r}: must be true or false")
    return trained


def preset_of_size(shape: ModelConfig) -> Config:
    """Returns the defaults for a model that `export` did not write: the preset of its size, or else `small`."""
    recipe = {"bert": "google", "modernbert": "modern", "deberta": "deberta"}[shape.architecture]
    for config in (Config.preset(name, recipe) for name in SIZES):
        if (config.model.num_layers, config.model.hidden_size) == (shape.num_layers, shape.hidden_size):
            break
    else:
        config = Config.preset(DEFAULT_PRESET, recipe)
    is_deberta = shape.architecture == "deberta"  # its published continuation uses another learning rate
    return config.override({"optimizer.learning_rate": DEBERTA_RATE}) if is_deberta else config
