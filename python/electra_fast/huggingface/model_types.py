"""Model types of `transformers` that compute the same as Electra under other names: the BERT family (`TRANSLATED`).

When a folder is read, `translated` gives its config.json Electra's keys and `electra_tensors` gives its tensors
Electra's names, so other modules only handle `config.MODEL_TYPES`. Messages use the folder's names of keys and tensors.
docs/reference/models.md lists all supported models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from electra_fast.errors import InputError
from electra_fast.huggingface.settings import SETTINGS

if TYPE_CHECKING:
    from torch import Tensor

ORIGINAL_KEY = "electra_fast original"
"""Key of a translated table under which it has the original config.json."""

_POSITIONS = "electra.embeddings.position_embeddings.weight"
_TOKEN_TYPES = "electra.embeddings.token_type_embeddings.weight"


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """The differences between a model type and Electra.

    `names` maps parts of its tensors' names to Electra's, replaced in this order in both directions. The first is the
    prefix of the encoder's tensors, which classes without a head omit. `keys` maps Electra's keys to the folder's if
    they differ. `defaults` are the defaults in `transformers`, by Electra's keys. With `has_offset`, positions are
    counted from `pad_token_id` + 1.
    """

    names: Mapping[str, str]
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_offset: bool = False
    has_token_types: bool = True


# The defaults of BertConfig; ElectraConfig's are smaller.
_DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "layer_norm_eps": 1e-12,
}
_BERT = ModelType(
    names={
        "bert.": "electra.",
        "cls.predictions.transform": "generator_predictions",
        "cls.predictions.bias": "generator_lm_head.bias",
        "cls.predictions.decoder": "generator_lm_head",
    }
)
_ROBERTA_NAMES = {
    "roberta.": "electra.",
    "lm_head.dense": "generator_predictions.dense",
    "lm_head.layer_norm": "generator_predictions.LayerNorm",
    "lm_head.bias": "generator_lm_head.bias",
    "lm_head.decoder": "generator_lm_head",
}
_DISTILBERT = ModelType(
    names={
        "distilbert.": "electra.",
        "transformer.layer": "encoder.layer",
        "attention.q_lin": "attention.self.query",
        "attention.k_lin": "attention.self.key",
        "attention.v_lin": "attention.self.value",
        "attention.out_lin": "attention.output.dense",
        "sa_layer_norm": "attention.output.LayerNorm",
        "ffn.lin1": "intermediate.dense",
        "ffn.lin2": "output.dense",
        "output_layer_norm": "output.LayerNorm",
        "vocab_transform": "generator_predictions.dense",
        "vocab_layer_norm": "generator_predictions.LayerNorm",
        "vocab_projector": "generator_lm_head",
    },
    keys={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    },
    defaults={"num_hidden_layers": 6},
    has_token_types=False,
)
TRANSLATED: dict[str, ModelType] = {
    "bert": _BERT,
    "roberta": ModelType(names=_ROBERTA_NAMES, defaults={"vocab_size": 50265}, has_offset=True),
    "xlm-roberta": ModelType(names=_ROBERTA_NAMES, has_offset=True),
    "camembert": ModelType(names=_ROBERTA_NAMES, has_offset=True),
    "distilbert": _DISTILBERT,
}
"""The model types by their `model_type` in config.json."""


def translated(path: Path, table: Mapping[str, Any], token_type_key: str) -> dict[str, Any]:
    """Translates the config.json of one of the `TRANSLATED` types to Electra's.

    Classes with a masked language model become ElectraForMaskedLM, all others ElectraModel; `token_type_key` becomes
    true if token type 1 has a separate row. The settings must have been checked.
    """
    kind = TRANSLATED[table["model_type"]]
    num_types = _num_token_types(table)
    defaults = _DEFAULTS | dict(kind.defaults)
    values = {key: _value(path, table, kind.keys.get(key, key), key, default) for key, default in defaults.items()}
    if kind.has_offset and isinstance(values["max_position_embeddings"], int):
        values["max_position_embeddings"] -= _offset(path, table)
    values |= {"model_type": "electra", "embedding_size": values["hidden_size"], ORIGINAL_KEY: table}
    classes = table.get("architectures")
    if isinstance(classes, list) and classes:
        has_head = any(str(name).endswith(("ForMaskedLM", "BertForPreTraining")) for name in classes)
        classes = ["ElectraForMaskedLM" if has_head else "ElectraModel"]
    return values | {"architectures": classes, token_type_key: num_types == 2}


def _value(path: Path, table: Mapping[str, Any], name: str, alias: str, default: Any) -> Any:
    if alias != name and alias in table and alias in SETTINGS[table["model_type"]]:
        if table.get(name, table[alias]) != table[alias]:
            raise InputError(f"{path}: {name} = {table[name]!r}, but {alias} = {table[alias]!r}; keep one of them")
        return table[alias]
    return table.get(name, default)


def _num_token_types(table: Mapping[str, Any]) -> Any:
    kind = TRANSLATED[table["model_type"]]
    return table.get("type_vocab_size", 2) if kind.has_token_types else 0


def _offset(path: Path, table: Mapping[str, Any]) -> int:
    pad = table.get("pad_token_id", 1)
    if type(pad) is not int or pad < 0:
        raise InputError(f"{path}: pad_token_id = {pad!r}: must be an id, because positions are counted from it")
    return pad + 1


def original(table: Mapping[str, Any]) -> Mapping[str, Any]:
    source: Mapping[str, Any] = table.get(ORIGINAL_KEY, table)
    return source


class Tensors(dict[str, "Tensor"]):
    """Tensors by their names in Electra's and ModernBERT's classes with a head."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        super().__init__()
        self._names = names
        prefix = next(iter(names))
        self._prefix = "" if any(name.startswith(prefix) for name in tensors) else prefix
        self._originals: dict[str, str] = {}
        self._others: dict[str, str] = {}
        for original_name, tensor in tensors.items():
            name = self._prefix + original_name
            for ending, ours in ((".gamma", ".weight"), (".beta", ".bias")):  # in the first releases
                name = name.removesuffix(ending) + ours if name.endswith(ending) else name
            for theirs, ours in names.items():
                name = name.replace(theirs, ours)
            if name in self and not self[name].equal(tensor):  # an error only if this tensor is used
                self._others[name] = self._originals[name]
            self[name] = tensor
            self._originals[name] = original_name

    def original_name(self, name: str) -> str:
        """Returns the folder's name of a tensor, even if the tensor is missing; for messages."""
        if name in self._originals:
            return self._originals[name]
        for theirs, ours in self._names.items():
            name = name.replace(ours, theirs)
        return name.removeprefix(self._prefix)

    def check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """Raises InputError if a tensor is missing, has another shape, or is there twice with different values."""
        shown = self.original_name(name)
        if name in self._others:
            raise InputError(f"tensors {self._others[name]} and {shown} differ, but the model has one tensor for both")
        if name not in self:
            raise InputError(f"tensor {shown} is missing")
        shape = tuple(self[name].shape)
        if shape != expected:
            raise InputError(f"tensor {shown}: expected shape {list(expected)} as in config.json, got {list(shape)}")


def electra_tensors(path: Path, tensors: Mapping[str, Tensor], table: Mapping[str, Any]) -> Tensors:
    """Returns the tensors of one of the `TRANSLATED` types with Electra's names and shapes.

    `table` is the translated config.json at `path`. Missing token types become copies of type 0, or zeros. Raises
    InputError for a table of another shape.
    """
    import torch  # config.json can be read without it

    config = original(table)
    width = table["hidden_size"]
    kind = TRANSLATED[config["model_type"]]
    renamed = Tensors(tensors, kind.names)
    if kind.has_offset:
        offset = _offset(path, config)
        renamed.check_shape(_POSITIONS, (table["max_position_embeddings"] + offset, width))
        renamed[_POSITIONS] = renamed[_POSITIONS][offset:]
    if (num_types := _num_token_types(config)) == 0:
        renamed[_TOKEN_TYPES] = torch.zeros(2, width)
    elif num_types == 1:
        renamed.check_shape(_TOKEN_TYPES, (1, width))
        renamed[_TOKEN_TYPES] = renamed[_TOKEN_TYPES].repeat(2, 1)
    # Not part of the encoder: a layer of a head, and constants that older releases saved.
    for name in [name for name in renamed if ".pooler." in name or name.endswith(("position_ids", "token_type_ids"))]:
        del renamed[name]
    return renamed
