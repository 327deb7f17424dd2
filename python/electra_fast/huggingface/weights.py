"""Maps our parameters to the tensors of Electra, ModernBERT and DeBERTaV2 in `transformers`, and back.

`folder` reads and writes the files. Most tensors are only renamed, split or concatenated. However, ModernBERT has no
projection between embedding and hidden size, so the projection is multiplied into its tables on export and factored out
on import.

Shapes: V vocabulary, E embedding, D hidden, K total width of concatenated tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from electra_fast.config.config import ModelConfig
from electra_fast.huggingface.config import has_legacy_head, is_multiplied
from electra_fast.huggingface.model_types import Tensors
from electra_fast.model.networks import PARTS

State = dict[str, Tensor]
Pair = tuple[str, tuple[str, ...]]

PREFIX = {"bert": "electra.", "modernbert": "model.", "deberta": "deberta."}
"""Prefix of the encoder's tensors in classes with heads; `ElectraModel` and others save them without it."""
INPUT_TABLE = {
    "bert": "electra.embeddings.word_embeddings.weight",
    "modernbert": "model.embeddings.tok_embeddings.weight",
    "deberta": "deberta.embeddings.word_embeddings.weight",
}
OUTPUT_TABLE = {
    "bert": "generator_lm_head.weight",
    "modernbert": "decoder.weight",
    "deberta": "lm_predictions.lm_head.weight",
}
POSITIONS = "deberta.embeddings.position_embeddings.weight"
"""The absolute positions of DeBERTa's enhanced mask decoder, which `transformers` does not read."""

_BERT_LAYER = {
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward_in": "intermediate.dense",
    "feed_forward_out": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
_BERT_HEAD = {
    "discriminator": {
        "dense": "discriminator_predictions.dense",
        "classifier": "discriminator_predictions.dense_prediction",
    },
    "masked_lm": {"dense": "generator_predictions.dense", "norm": "generator_predictions.LayerNorm"},
}
# Names of the published code. `transformers` has the second head and ignores the first.
_DEBERTA_HEAD = {
    "discriminator": {
        "dense": "mask_predictions.dense",
        "norm": "mask_predictions.LayerNorm",
        "classifier": "mask_predictions.classifier",
    },
    "masked_lm": {"dense": "lm_predictions.lm_head.dense", "norm": "lm_predictions.lm_head.LayerNorm"},
}
_MODERN_HEAD = {
    "discriminator": {"dense": "head.dense", "norm": "head.norm", "classifier": "classifier"},
    "masked_lm": {"dense": "head.dense", "norm": "head.norm"},
}
# Parts of names in DebertaV2ForMaskedLM with and without `legacy`; replaced in this order in both directions.
_LEGACY_HEAD = {
    "cls.predictions.bias": "lm_predictions.lm_head.bias",
    "cls.predictions.transform": "lm_predictions.lm_head",
    "cls.predictions.decoder": "lm_predictions.lm_head",
}
_DETECTOR_ROWS = ("classifier.weight", "classifier.bias")
_MODERN_LAYER = {
    "attention_norm": "attn_norm",
    "qkv": "attn.Wqkv",
    "attention_out": "attn.Wo",
    "feed_forward_norm": "mlp_norm",
    "geglu_in": "mlp.Wi",
    "feed_forward_out": "mlp.Wo",
}


def pairs(role: str, shape: ModelConfig) -> list[Pair]:
    """Returns (our name, Hugging Face names) of one folder's tensors; several names are chunks along the first axis.

    Excludes tables that include a projection: see `is_multiplied` and `factored`.
    """
    embeddings, encoder, head = PARTS[role]
    return [*encoder_pairs(shape, embeddings, encoder), *_head_pairs(role, shape, head)]


def encoder_pairs(shape: ModelConfig, embeddings: str = "embeddings", encoder: str = "encoder") -> list[Pair]:
    """Returns the `pairs` of an encoder without heads, whose modules are named `embeddings` and `encoder`."""
    make = {"bert": _bert_encoder_pairs, "modernbert": _modern_encoder_pairs, "deberta": _deberta_encoder_pairs}
    return list(make[shape.architecture](shape, embeddings, encoder))


def _bert_encoder_pairs(shape: ModelConfig, embeddings: str, encoder: str) -> Iterator[Pair]:
    yield f"{embeddings}.token", (INPUT_TABLE["bert"],)
    yield f"{embeddings}.position", ("electra.embeddings.position_embeddings.weight",)
    yield f"{embeddings}.token_type", ("electra.embeddings.token_type_embeddings.weight",)
    for kind in ("weight", "bias"):
        yield f"{embeddings}.norm.{kind}", (f"electra.embeddings.LayerNorm.{kind}",)
        if shape.embedding_size != shape.hidden_size:
            yield f"{encoder}.projection.{kind}", (f"electra.embeddings_project.{kind}",)
    yield from _post_norm_layers(shape, encoder, "electra.", ("query", "key", "value"))


def _deberta_encoder_pairs(shape: ModelConfig, embeddings: str, encoder: str) -> Iterator[Pair]:
    yield f"{embeddings}.token", (INPUT_TABLE["deberta"],)
    if shape.embedding_size != shape.hidden_size:
        yield f"{encoder}.projection.weight", ("deberta.embeddings.embed_proj.weight",)
    yield f"{encoder}.relative", ("deberta.encoder.rel_embeddings.weight",)
    parts = {"input_norm": "embeddings.LayerNorm", "relative_norm": "encoder.LayerNorm"}
    if shape.conv_kernel_size:
        parts |= {"convolution": "encoder.conv.conv", "convolution.norm": "encoder.conv.LayerNorm"}
    for part, hf_part in parts.items():
        for kind in ("weight", "bias"):
            yield f"{encoder}.{part}.{kind}", (f"deberta.{hf_part}.{kind}",)
    yield from _post_norm_layers(shape, encoder, "deberta.", ("query_proj", "key_proj", "value_proj"))


def _post_norm_layers(shape: ModelConfig, encoder: str, prefix: str, projections: tuple[str, ...]) -> Iterator[Pair]:
    for i in range(shape.num_layers):
        layer = f"{encoder}.layers.{i}"
        hf_layer = f"{prefix}encoder.layer.{i}"
        for kind in ("weight", "bias"):
            yield f"{layer}.qkv.{kind}", tuple(f"{hf_layer}.attention.self.{name}.{kind}" for name in projections)
            for part, hf_part in _BERT_LAYER.items():
                yield f"{layer}.{part}.{kind}", (f"{hf_layer}.{hf_part}.{kind}",)


def _modern_encoder_pairs(shape: ModelConfig, embeddings: str, encoder: str) -> Iterator[Pair]:
    if not is_multiplied(shape):
        yield f"{embeddings}.token", (INPUT_TABLE["modernbert"],)
    yield f"{encoder}.input_norm.weight", ("model.embeddings.norm.weight",)
    for i in range(shape.num_layers):
        for part, hf_part in _MODERN_LAYER.items():
            if i or part != "attention_norm":
                yield f"{encoder}.layers.{i}.{part}.weight", (f"model.layers.{i}.{hf_part}.weight",)
    yield f"{encoder}.output_norm.weight", ("model.final_norm.weight",)


def _head_pairs(role: str, shape: ModelConfig, head: str) -> Iterator[Pair]:
    modern = shape.architecture == "modernbert"
    kind = role if role == "discriminator" else "masked_lm"
    if kind == "masked_lm":
        yield f"{head}.bias", (OUTPUT_TABLE[shape.architecture].removesuffix("weight") + "bias",)
    if shape.architecture == "deberta" and role == "generator":
        yield f"{head}.position", (POSITIONS,)
    names = {"bert": _BERT_HEAD, "modernbert": _MODERN_HEAD, "deberta": _DEBERTA_HEAD}[shape.architecture][kind]
    for part, hf_part in names.items():
        for kind in ("weight",) if modern and part != "classifier" else ("weight", "bias"):
            yield f"{head}.{part}.{kind}", (f"{hf_part}.{kind}",)


def to_hf(state: Mapping[str, Tensor], role: str, shape: ModelConfig) -> State:
    """Returns one folder's tensors, fp32 and contiguous, without a tied output table."""
    embeddings, encoder, head = PARTS[role]
    tensors = encoder_to_hf(state, shape, embeddings, encoder) | _renamed(state, _head_pairs(role, shape, head))
    if shape.architecture == "modernbert" and role == "discriminator":
        for name in _DETECTOR_ROWS:  # with 0 as the logit of "original", the softmax equals the sigmoid
            tensors[name] = torch.cat([torch.zeros_like(tensors[name]), tensors[name]])
    if is_multiplied(shape) and role != "discriminator":
        tensors[OUTPUT_TABLE["modernbert"]] = _product(state[f"{embeddings}.token"], state[f"{head}.projection.weight"])
    if has_legacy_head(shape):
        for theirs, ours in _LEGACY_HEAD.items():
            tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    return tensors


def deberta_tensors(tensors: Mapping[str, Tensor]) -> Tensors:
    """Returns a DeBERTaV2's tensors by the names of the published code; some files have other prefixes."""
    prefixes = ("deberta.", "bert.")
    prefix = next(
        (candidate for candidate in prefixes if any(name.startswith(candidate) for name in tensors)), prefixes[0]
    )
    is_legacy = any(name.startswith("cls.") for name in tensors)
    return Tensors(tensors, {prefix: PREFIX["deberta"]} | (_LEGACY_HEAD if is_legacy else {}))


def encoder_to_hf(
    state: Mapping[str, Tensor], shape: ModelConfig, embeddings: str = "embeddings", encoder: str = "encoder"
) -> State:
    """Returns an encoder's tensors, contiguous and fp32, with prefixed names.

    `embeddings` and `encoder` are the names of its modules in `state`. With `modernbert`, a projection from embedding
    to hidden size is multiplied into the table.
    """
    tensors = _renamed(state, encoder_pairs(shape, embeddings, encoder))
    if is_multiplied(shape):
        projection_DE = state[f"{encoder}.projection.weight"]
        tensors[INPUT_TABLE["modernbert"]] = _product(state[f"{embeddings}.token"], projection_DE.T)
    return tensors


def _renamed(state: Mapping[str, Tensor], names_of: Iterable[Pair]) -> State:
    return {
        name: part.detach().float().contiguous()
        for name_in_model, names in names_of
        for name, part in zip(names, state[name_in_model].chunk(len(names)), strict=True)
    }


def _product(table_VE: Tensor, projection_ED: Tensor) -> Tensor:
    return (table_VE.detach().double() @ projection_ED.detach().double()).float()


def from_hf(tensors: Tensors, names_of: Iterable[Pair], expected: Mapping[str, torch.Size]) -> State:
    """Returns our fp32 parameters from Hugging Face tensors, as assigned in `names_of` (`pairs` or `encoder_pairs`).

    `expected` has the shapes of our parameters. Raises ValueError with the first tensor that is missing or has another
    shape.
    """
    parameters: State = {}
    for name_in_model, names in names_of:
        rows, *rest = expected[name_in_model]
        for name in names:
            tensors.check_shape(name, (rows // len(names), *rest))
        parameters[name_in_model] = torch.cat([tensors[name] for name in names]).float()
    return parameters


def one_logit(tensors: Tensors) -> None:
    """Replaces the two rows of a ModernBERT's detector by their difference, the logit of "replaced".

    Raises ValueError if there are not two rows.
    """
    for name in _DETECTOR_ROWS:
        tensors.check_shape(name, (2, *tensors[name].shape[1:]) if name in tensors else ())
        tensors[name] = tensors[name][1:] - tensors[name][:1]


def factored(tables: Mapping[str, Tensor], shapes: Mapping[str, ModelConfig]) -> State | None:
    """Factors tables that include a projection into one shared table [V, E] and each role's projections.

    `tables` has the tensors under `role.name` for one or both roles, `shapes` each role's shape. The factorization is
    unique only up to an invertible map. If a role has no projection, its table is the shared one; otherwise the
    projections are scaled as at initialization. Returns None if no table of width E reproduces all tensors to a
    relative error of 1e-5.
    """
    width = next(iter(shapes.values())).embedding_size
    targets = {name: table.double() for name, table in tables.items()}
    exact = [name for name in targets if not is_multiplied(shapes[name.partition(".")[0]])]
    product_VK = torch.cat(list(targets.values()), dim=1)
    if exact:
        table_VE = targets[exact[0]]
        factor_EK = torch.linalg.pinv(table_VE.T @ table_VE, hermitian=True) @ (table_VE.T @ product_VK)
    else:
        table_VE, factor_EK = _low_rank(product_VK, width)
    if any(not torch.equal(targets[name], table_VE) for name in exact):
        return None
    if (product_VK - table_VE @ factor_EK).norm() > 1e-5 * product_VK.norm():
        return None

    state: State = {f"{PARTS[role][0]}.token": table_VE.float() for role in shapes}
    for name, factor_ED in zip(targets, factor_EK.split([t.shape[1] for t in targets.values()], dim=1), strict=True):
        role, _, hf_name = name.partition(".")
        if name in exact:
            continue
        _, encoder, head = PARTS[role]
        if hf_name == INPUT_TABLE["modernbert"]:
            state[f"{encoder}.projection.weight"] = factor_ED.T.float().contiguous()
        else:
            state[f"{head}.projection.weight"] = factor_ED.float().contiguous()
    return state


def _low_rank(product_VK: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns [V, E] and [E, K] whose product is the best approximation of rank E, in fp64.

    The right singular vectors come from the small Gram matrix. It has squared singular values, so fp64 loses only
    directions a million times weaker than the strongest.
    """
    num_columns = product_VK.shape[1]
    _, vectors_KK = torch.linalg.eigh(product_VK.T @ product_VK)
    factor_EK = vectors_KK.flip(1)[:, :width].T
    # Projections are initialized with variance 1 / (3 E); entries of singular vectors have variance 1 / K.
    scale = (num_columns / (3 * width)) ** 0.5
    table_VE = product_VK @ factor_EK.T / scale
    factor_EK = factor_EK * scale
    missing = width - factor_EK.shape[0]
    if missing > 0:  # E > K: table columns that contribute nothing yet
        random = torch.Generator().manual_seed(0)
        rest = torch.randn(missing, num_columns, generator=random, dtype=torch.float64) * (3 * width) ** -0.5
        table_VE = torch.nn.functional.pad(table_VE, (0, missing))
        factor_EK = torch.cat([factor_EK, rest])
    return table_VE, factor_EK


def num_parameters(path: Path) -> tuple[int, int]:
    """Counts the parameters in a model.safetensors: in the encoder, which `AutoModel` reads, and in total."""
    with safe_open(path, "pt") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no dict
    total = sum(sizes.values())
    prefixes = tuple(PREFIX.values())
    encoder = sum(size for name, size in sizes.items() if name.startswith(prefixes) and name != POSITIONS)
    return encoder or total, total


def without_prefix(tensors: Mapping[str, Tensor], architecture: str) -> State:
    return {name.removeprefix(PREFIX[architecture]): tensor for name, tensor in tensors.items()}
