"""`load_encoder`: loads an encoder without its heads, for fine-tuning.

It accepts the sources of the module `source`, and Hugging Face folders of any class of a supported model type.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from electra_fast import checkpoint
from electra_fast.config.config import AUTO, Config, ModelConfig
from electra_fast.errors import InputError
from electra_fast.huggingface import weights
from electra_fast.huggingface.config import check_role, read_encoder_shape, read_table, role_shape
from electra_fast.huggingface.folder import read_weights
from electra_fast.huggingface.source import checkpoint_of, folders_of, is_folder, origin, tokenizer_folder
from electra_fast.model.layers import Embeddings
from electra_fast.model.model import Encoder, initialize
from electra_fast.model.networks import PARTS

Sizes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class PretrainedEncoder:
    """An encoder without its heads, from any source."""

    shape: ModelConfig  # with the attention backend `auto`
    state: dict[str, Tensor]  # fp32: `Embeddings(shape)` under `embeddings.`, `Encoder(shape)` under `encoder.`
    tokenizer: Path
    content_hash: str  # SHA-256 of the parameters' names and bytes
    trained_length: int | None = None  # row length in training, in tokens, if the source records it


def load_encoder(source: str | Path, role: str | None = None) -> PretrainedEncoder:
    """Loads the encoder of a run (its latest checkpoint), a checkpoint or any Hugging Face folder.

    `role` is "discriminator", "encoder" or "generator", by default the first that exists. If token type 1 never
    occurred in a run's training, its embedding becomes a copy of type 0's, as in an export.

    Raises FileNotFoundError, or ValueError with the file, field, value and remedy.
    """
    source = Path(source)
    trained_length = None
    stored = checkpoint_of(source)
    if stored is None and is_folder(source):
        shape, state = _read_folder(source, role)
    elif stored is None:
        folders = folders_of(source)
        folder = folders[_choose(source, folders, role)]
        shape, state = _read_folder(folder, role)
        copy = source / "encoder"
        is_copy = role is None and "encoder" not in folders and copy.is_dir()
        theirs = _read_folder(copy, None)[1] if is_copy else state
        if theirs.keys() != state.keys() or not all(state[name].equal(theirs[name]) for name in state):
            raise InputError(
                f"{copy}: differs from the encoder of {folder}, so one of the two was trained after the export; pass "
                "the path of one of them"
            )
    else:
        shape, state = _read_checkpoint(stored, role)
        about = origin(source)
        if shape.architecture == "bert" and not about.token_type_1_trained:
            state["embeddings.token_type"] = state["embeddings.token_type"][:1].repeat(2, 1)
        if about.steps and not about.imported:
            trained_length = Config.load(stored / "config.toml").data.sequence_length
    tokenizer = tokenizer_folder(source, shape.vocab_size)
    return PretrainedEncoder(shape, state, tokenizer, _content_hash(state), trained_length)


def untrained(encoder: PretrainedEncoder) -> PretrainedEncoder:
    """Returns a randomly initialized encoder of the same shape and tokenizer."""
    shape = encoder.shape
    modules = nn.ModuleDict({"embeddings": Embeddings(shape), "encoder": Encoder(shape)})
    initialize(modules, shape.architecture, 0)
    state = _parameters(modules)
    return dataclasses.replace(encoder, state=state, content_hash=_content_hash(state), trained_length=None)


def _choose(source: Path, roles: Collection[str], role: str | None) -> str:
    role = role or next(name for name in PARTS if name in roles)
    if role not in roles:
        raise InputError(f"{source}: has no {role}; available: {', '.join(roles)}")
    return role


def _read_checkpoint(folder: Path, role: str | None) -> tuple[ModelConfig, dict[str, Tensor]]:
    model = checkpoint.load_model(folder)
    role = _choose(folder, model.networks, role)
    embeddings, encoder, _ = PARTS[role]
    shape = dataclasses.replace(role_shape(model.config, role), attention=AUTO)
    return shape, model.folded({"embeddings": embeddings, "encoder": encoder})


def _read_folder(folder: Path, role: str | None) -> tuple[ModelConfig, dict[str, Tensor]]:
    table = read_table(folder, role)
    if role is not None:
        check_role(folder / "config.json", role, table)
    shape = read_encoder_shape(folder, table)
    return shape, read_state(folder, shape, role=role)


def read_state(
    folder: Path,
    shape: ModelConfig,
    head_names: Mapping[str, str] | None = None,
    head_sizes: Sizes | None = None,
    *,
    role: str | None = None,
) -> weights.State:
    """Reads the fp32 parameters of a Hugging Face folder's encoder, named as in `PretrainedEncoder`, and of its head.

    `head_names` maps our names of the head's parameters to the folder's names, `head_sizes` to their sizes. Raises
    FileNotFoundError, or ValueError for a tensor that is missing or has another size.
    """
    tensors = read_weights(folder, role)
    with torch.device("meta"):
        modules = {"embeddings": Embeddings(shape), "encoder": Encoder(shape)}
    sizes = {name: parameter.shape for name, parameter in _parameters(modules).items()} | dict(head_sizes or {})
    heads = [(head, (theirs,)) for head, theirs in (head_names or {}).items()]
    known = {theirs for _, (theirs,) in heads}
    parts = {name.split(".")[0] for name in known}
    try:
        if unread := [name for name in tensors if name.split(".")[0] in parts and name not in known]:
            raise InputError(f"tensor {unread[0]} does not belong to the head that config.json describes")
        return weights.from_hf(tensors, [*weights.encoder_pairs(shape), *heads], sizes)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None


def _parameters(modules: Mapping[str, nn.Module] | nn.ModuleDict) -> dict[str, Tensor]:
    return {
        f"{part}.{name}": parameter.detach()
        for part, module in modules.items()
        for name, parameter in module.named_parameters()
    }


def _content_hash(state: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].contiguous().numpy().data)
    return digest.hexdigest()
