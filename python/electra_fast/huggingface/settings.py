"""Treatment of each config.json key that `transformers` reads, by model type.

We read a key, or it has no effect on outputs, or it must have one of the listed values, because we do not implement the
others. The first listed value is the default, unless `_DEFAULTS` has another. Keys of a head are checked when the head
is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from electra_fast.errors import InputError

READ: Final = "read"
UNUSED: Final = "without effect"
Setting = str | tuple[Any, ...]
"""`READ`, `UNUSED`, or the values that are supported."""

_ACTIVATION = ("gelu", "gelu_python")
_EVERY: dict[str, Setting] = {
    **dict.fromkeys(("model_type", "architectures", "id2label", "num_labels", "problem_type"), READ),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), READ),
    # Names, ids and training settings, which do not affect `forward`.
    **dict.fromkeys(("label2id", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range"), UNUSED),
    **dict.fromkeys(("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"), UNUSED),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "return_dict"), UNUSED),
    **dict.fromkeys(("chunk_size_feed_forward", "classifier_dropout"), UNUSED),
    "tie_word_embeddings": UNUSED,  # the tensors themselves are compared
    "is_encoder_decoder": (False,),
    "quantization_config": (None,),
    "pruned_heads": ({}, None),
}
_BERT: dict[str, Setting] = {
    **_EVERY,
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"), READ),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps"), READ),
    "hidden_act": _ACTIVATION,
    "type_vocab_size": (2, 1),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}
_DEBERTA: dict[str, Setting] = {
    **{name: setting for name, setting in _BERT.items() if name != "position_embedding_type"},
    **dict.fromkeys(("embedding_size", "position_buckets", "conv_kernel_size"), READ),
    **dict.fromkeys(("max_relative_positions", "attention_head_size"), READ),  # compared with other keys
    "type_vocab_size": (0,),
    "relative_attention": (True,),
    "position_biased_input": (False,),
    "share_att_key": (True,),
    "pos_att_type": ("c2p|p2c",),
    "norm_rel_ebd": ("layer_norm",),
    "conv_act": ("tanh", "gelu"),
    "conv_groups": (1,),
    "z_steps": (0,),
    # `legacy` follows from the names of the tensors; the others belong to a head for text classification.
    **dict.fromkeys(("legacy", "pooler_dropout", "pooler_hidden_size", "cls_dropout"), UNUSED),
    "pooler_hidden_act": _ACTIVATION,
}
# Defaults that are not supported.
_DEFAULTS: dict[str, Any] = {
    "relative_attention": False,
    "position_biased_input": True,
    "share_att_key": False,
    "pos_att_type": None,
    "norm_rel_ebd": "none",
}
_ROBERTA = _BERT | {"pad_token_id": READ}  # positions are counted from it
SETTINGS: dict[str, dict[str, Setting]] = {
    "electra": {
        **_BERT,
        "embedding_size": READ,
        "type_vocab_size": (2,),
        # Keys of a multiple-choice head, which no task type uses.
        **dict.fromkeys(("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout"), UNUSED),
    },
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": {
        **_EVERY,
        **dict.fromkeys(("dim", "n_layers", "n_heads", "hidden_dim", "dropout", "attention_dropout"), READ),
        **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), READ),  # aliases of three keys
        "activation": _ACTIVATION,
        # All positions are stored, including sinusoidal ones.
        **dict.fromkeys(("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout"), UNUSED),
    },
    "modernbert": {
        **_EVERY,
        **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"), READ),
        **dict.fromkeys(("mlp_dropout", "attention_dropout", "norm_eps", "local_attention", "layer_types"), READ),
        **dict.fromkeys(("rope_parameters", "rope_scaling", "classifier_pooling"), READ),
        # Keys of transformers 4.
        **dict.fromkeys(("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"), READ),
        **dict.fromkeys(("cls_token_id", "sep_token_id", "initializer_cutoff_factor", "embedding_dropout"), UNUSED),
        **dict.fromkeys(("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"), UNUSED),
        **dict.fromkeys(("sparse_prediction", "sparse_pred_ignore_index"), UNUSED),  # affect only the loss
        "hidden_activation": _ACTIVATION,
        "norm_bias": (False,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "classifier_activation": _ACTIVATION,
        "classifier_bias": (False,),
        "decoder_bias": (True,),
    },
    "deberta-v2": _DEBERTA,
}
HEAD_KEYS = ("classifier_activation", "classifier_bias", "decoder_bias", "pooler_hidden_act")
"""Keys of heads, which an encoder without its head does not need."""


def check_settings(path: Path, table: Mapping[str, Any], names: Sequence[str] | None = None) -> None:
    """Raises InputError with the first key whose value is not supported; by default checks all except `HEAD_KEYS`.

    `table` is the config.json at `path`, with one of the model types in `SETTINGS`.
    """
    settings = SETTINGS[table["model_type"]]
    for name in [name for name in settings if (name not in HEAD_KEYS if names is None else name in names)]:
        accepted = settings[name]
        if not isinstance(accepted, tuple):
            continue
        value = table.get(name, _DEFAULTS.get(name, accepted[0]))
        if (_normalized(value) if name in ("pos_att_type", "norm_rel_ebd") else value) not in accepted:
            values = " or ".join(map(repr, accepted))
            raise InputError(f"{path}: {name} = {value!r}: must be {values}")


def _normalized(value: Any) -> Any:
    """Returns names, from a list or a string separated by bars, in a uniform spelling and order."""
    names = value.lower().split("|") if isinstance(value, str) else value
    return "|".join(sorted({str(name).strip() for name in names})) if isinstance(names, list) else value
