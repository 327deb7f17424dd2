"""Hugging Face folders: models as config.json and model.safetensors, which `transformers` loads.

`bert` encoders become Electra, `modernbert` ModernBERT, `deberta` DeBERTaV2. `transformers` loads the folders without
our code, and we read and write them without `transformers`. `export` combines two such folders and a tokenizer;
`config` translates config.json, `weights` the tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from electra_fast.checkpoint import load_model, write_tensors
from electra_fast.config.config import Config, ModelConfig
from electra_fast.config.presets import OBJECTIVE_SPECS
from electra_fast.errors import InputError
from electra_fast.files.json_files import write_object
from electra_fast.huggingface import weights
from electra_fast.huggingface.config import (
    MODEL_TYPES,
    OWN_KEY,
    SIZE_KEYS,
    TOKEN_TYPE_KEY,
    describe,
    is_headless,
    is_multiplied,
    num_detector_labels,
    own_config,
    preset_of_size,
    read_shape,
    read_table,
    role_shape,
)
from electra_fast.huggingface.model_types import ORIGINAL_KEY, Tensors, electra_tensors
from electra_fast.huggingface.source import checkpoint_of, folders_of
from electra_fast.huggingface.tensor_files import read_tensor_file, weights_file
from electra_fast.huggingface.weights import INPUT_TABLE, OUTPUT_TABLE, POSITIONS, PREFIX, State
from electra_fast.messages import say
from electra_fast.model.model import Electra
from electra_fast.model.networks import PARTS

# Settings that the result and its generator must share.
_AGREEING = (
    *("architecture", "vocab_size", "max_positions", "norm_eps", "heads"),
    *("rope_theta", "local_rope_theta", "local_attention", "global_attention_every"),
    *("position_buckets", "conv_kernel_size", "conv_activation"),
)


def read_model(source: str | Path) -> Electra:
    """Reads the model of a run (its latest checkpoint), a checkpoint or a Hugging Face folder; fp32, in eval mode.

    The use of a network that the folder lacks raises ValueError. Raises FileNotFoundError, or ValueError with the file,
    field, value and remedy.
    """
    source = Path(source)
    stored = checkpoint_of(source)
    return (read_models(folders_of(source)) if stored is None else load_model(stored)).eval()


def write_model(
    directory: Path,
    model: Electra,
    role: str,
    special_ids: Mapping[str, int],
    token_type_1_trained: bool = True,
    *,
    headless: bool = False,
) -> None:
    """Writes config.json and model.safetensors of one role, or of its encoder alone, to an existing folder."""
    shape = role_shape(model.config, role)
    state = model.folded()
    if headless:
        tensors = weights.without_prefix(weights.encoder_to_hf(state, shape, *PARTS[role][:2]), shape.architecture)
    else:
        tensors = weights.to_hf(state, role, shape)
    table = describe(model.config, role, special_ids, headless)
    if shape.architecture == "bert":
        table[TOKEN_TYPE_KEY] = token_type_1_trained
    write_object(directory / "config.json", table)
    write_tensors(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True)
class _Folder:
    """One role's Hugging Face folder: its config.json, shape and tensors."""

    path: Path
    role: str
    table: Mapping[str, Any]
    shape: ModelConfig
    tensors: Tensors

    def pairs(self, shape: ModelConfig) -> list[weights.Pair]:
        if is_headless(self.table):
            return weights.encoder_pairs(shape, *PARTS[self.role][:2])
        pairs = weights.pairs(self.role, shape)
        return [pair for pair in pairs if pair[1] != (POSITIONS,)] if self.lacks_positions else pairs

    @property
    def lacks_positions(self) -> bool:
        """True if DeBERTa's masked-language-model head is there, but without the part that `transformers` lacks."""
        has_head = self.role == "generator" and not is_headless(self.table)
        return has_head and self.shape.architecture == "deberta" and POSITIONS not in self.tensors

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def weights_file(self) -> Path:
        return weights_file(self.path, self.role)


def read_models(paths: Mapping[str, Path], *, with_new_heads: bool = False) -> Electra:
    """Reads the model of a "discriminator" or "encoder" folder and a "generator" folder, or of one of them.

    Tying is inferred from the tensors: bitwise equal embeddings are shared, and `deberta` is `disentangled`. A
    generator alone is a model of the objective `mlm`. Heads that Hugging Face's classes lack are newly initialized.
    Folders without any head are rejected unless `with_new_heads`. Raises FileNotFoundError, or ValueError with the
    file, field, value and remedy.
    """
    folders = {role: _read_folder(paths[role], role) for role in PARTS if role in paths}
    for role, folder in folders.items():
        if folder.lacks_positions:
            say(f"note: {PARTS[role][2]}.position: not in {folder.path}, so it starts untrained")
        if not is_headless(folder.table):
            continue
        if not with_new_heads:
            raise InputError(
                f"{folder.path}: an encoder without a head; fine-tune it, or run `electra-fast import` to continue its "
                "training with a new head"
            )
        say(f"note: {role}_head: not in the folder, so it starts untrained")
    tying, state = _tying(folders)
    config = _joint_config(folders, tying)
    with torch.device("meta"):  # allocates nothing for sizes that the tensors may not have
        expected = {name: parameter.shape for name, parameter in _parameters(Electra(config, roles=folders)).items()}
    for role, folder in folders.items():
        try:
            # A table that was factored out of both folders takes precedence over the table of one.
            state = weights.from_hf(folder.tensors, folder.pairs(role_shape(config, role)), expected) | state
        except InputError as error:
            raise InputError(f"{folder.weights_file}: {error}") from None
    model = Electra(config, roles=folders)
    parameters = _parameters(model)
    with torch.no_grad():
        for name, tensor in state.items():
            parameters[name].copy_(tensor)
    return model


def _parameters(model: Electra) -> dict[str, torch.nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _read_folder(path: Path, role: str) -> _Folder:
    table = read_table(path, role)
    shape = read_shape(path, role, table)
    folder = _Folder(path, role, table, shape, read_weights(path, role))
    is_classifier = role == "discriminator" and table["model_type"] == "modernbert" and not is_headless(table)
    if is_classifier and num_detector_labels(folder.config_file, table) == 2:
        try:
            weights.one_logit(folder.tensors)
        except InputError as error:
            raise InputError(f"{folder.weights_file}: {error}") from None
    _check_tables(folder)
    return folder


def read_weights(folder: Path, role: str | None = None) -> Tensors:
    """Reads the tensors of a folder, or of a role there, by the names in the classes of our architectures.

    They are in model.safetensors or pytorch_model.bin, or in the files that an index of either lists. Raises
    FileNotFoundError, or ValueError with the file.
    """
    table = read_table(folder, role)
    file = weights_file(folder, role)
    tensors = read_tensor_file(file)
    try:
        if ORIGINAL_KEY in table:
            return electra_tensors(folder / "config.json", tensors, table)
        prefix = PREFIX[MODEL_TYPES[table["model_type"]]]
        is_deberta = table["model_type"] == "deberta-v2"
        return weights.deberta_tensors(tensors) if is_deberta else Tensors(tensors, {prefix: prefix})
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def _check_tables(folder: _Folder) -> None:
    """Checks the shape of the input table, and that a tied output table equals it."""
    shape = folder.shape
    tensors = folder.tensors
    architecture = folder.shape.architecture
    table = INPUT_TABLE[architecture]
    output = OUTPUT_TABLE[architecture]
    width = shape.hidden_size if architecture == "modernbert" else shape.embedding_size
    multiplied = folder.role != "discriminator" and is_multiplied(shape)
    try:
        for name in (table, output) if multiplied else (table,):
            tensors.check_shape(name, (shape.vocab_size, width))
    except InputError as error:
        raise InputError(f"{folder.weights_file}: {error}") from None
    if not multiplied and output in tensors and not torch.equal(tensors[output], tensors[table]):
        raise InputError(
            f"{folder.weights_file}: {tensors.original_name(output)} differs from {tensors.original_name(table)}; "
            "a generator's output table must equal its input table"
        )


def _tying(folders: Mapping[str, _Folder]) -> tuple[str | None, State]:
    """Returns the tying of two networks (None for one), and the factors of tables that include a projection."""
    if len(folders) == 2:
        main, generator = folders.values()
        check_agreement(generator.config_file, generator.shape, main.role, main.shape)
        if (summand := _summand(main, generator)) is not None:
            return "disentangled", {f"{PARTS[main.role][0]}.token": summand}
    multiplied = any(is_multiplied(folder.shape) for folder in folders.values())
    state: State = {}
    if multiplied:
        configs = [own_config(folder.config_file, folder.table) for folder in folders.values()]
        joint = None
        if all(config is not None and config.model.tying != "none" for config in configs):
            joint = weights.factored(
                _products(*folders.values()), {role: source.shape for role, source in folders.items()}
            )
        shared = joint is not None
        state = _factored_separately(folders) if joint is None else joint
    if len(folders) == 1:
        return None, state
    main, generator = folders.values()
    if not multiplied:
        shared = _tensors_equal(main, generator, _embedding_names(main))
    if not shared:
        return "none", state
    names = [name for name in main.tensors if name.startswith(tuple(PREFIX.values()))]
    same_size = _shape_without_dropout(main) == _shape_without_dropout(generator)
    return "all" if same_size and _tensors_equal(main, generator, names) else "embeddings", state


def _summand(main: _Folder, generator: _Folder) -> Tensor | None:
    """Returns the table that a DeBERTa discriminator adds to its generator's; None for tables tied in another way.

    Our own exports record the tying; it counts only if the tables still have it.
    """
    if main.shape.architecture != "deberta" or main.shape.embedding_size != generator.shape.embedding_size:
        return None
    table, base = (folder.tensors[INPUT_TABLE["deberta"]].float() for folder in (main, generator))
    config = own_config(main.config_file, main.table)
    tying = "disentangled" if config is None else config.model.tying
    if tying == "none" or (tying in ("embeddings", "all") and torch.equal(table, base)):
        return None
    return table - base


def check_agreement(path: Path, generator: ModelConfig, role: str, shape: ModelConfig) -> None:
    """Raises ValueError with the generator's `path` if a setting that must agree differs from the other `role`'s."""
    for name in _AGREEING:
        value = getattr(generator, name)
        expected = getattr(shape, name)
        if value != expected:
            raise InputError(f"{path}: {name} = {value!r}: must be {expected!r}, as in the {role}")


def _products(*folders: _Folder) -> State:
    tables = {}
    for folder in folders:
        names = (INPUT_TABLE["modernbert"], OUTPUT_TABLE["modernbert"])
        for name in names if is_multiplied(folder.shape) else names[:1]:
            if name in folder.tensors:
                tables[f"{folder.role}.{name}"] = folder.tensors[name]
    return tables


def _factored_separately(folders: Mapping[str, _Folder]) -> State:
    state: State = {}
    for role, folder in folders.items():
        if not is_multiplied(folder.shape):
            continue
        factors = weights.factored(_products(folder), {role: folder.shape})
        if factors is None:
            raise InputError(
                f"{folder.weights_file}: the embedding table is no longer the product of a table of width "
                f"{folder.shape.embedding_size} ({OWN_KEY}.model.embedding_size in config.json) and a projection; "
                "import an export that was not fine-tuned"
            )
        state |= factors
    return state


def _embedding_names(folder: _Folder) -> list[str]:
    prefix = f"{PARTS[folder.role][0]}."
    return [hf_names[0] for name, hf_names in weights.pairs(folder.role, folder.shape) if name.startswith(prefix)]


def _tensors_equal(one: _Folder, other: _Folder, names: list[str]) -> bool:
    """Returns whether both folders have these tensors, bitwise equal; missing tensors are reported elsewhere."""
    return all(
        name in one.tensors and name in other.tensors and torch.equal(one.tensors[name], other.tensors[name])
        for name in names
    )


def _shape_without_dropout(folder: _Folder) -> ModelConfig:
    return dataclasses.replace(folder.shape, dropout=0.0, attention_dropout=0.0)


def _joint_config(folders: Mapping[str, _Folder], tying: str | None) -> Config:
    """Returns the exported configuration, or else the preset of that size, with the folders' shapes."""
    main = next(iter(folders.values()))
    shape = main.shape
    small = folders.get("generator", main).shape
    exported = own_config(main.config_file, main.table)
    base = exported or preset_of_size(shape)
    # The configuration's objective, unless it trains networks that the folders lack.
    names = (base.objective.name, *OBJECTIVE_SPECS)
    objective = next(name for name in names if OBJECTIVE_SPECS[name].roles[-1] == main.role)
    base = base if objective == base.objective.name else base.with_objective(objective)
    changes = {f"model.{name}": value for name, value in dataclasses.asdict(shape).items()} | {
        "model.tying": tying or base.model.tying,
        "model.attention": base.model.attention,
        "data.sequence_length": min(base.data.sequence_length, shape.max_positions),
    }
    if "generator" in folders or exported is None:
        changes |= {
            "generator.kind": "model",
            "generator.fraction": small.num_heads / shape.num_heads,
            "generator.num_layers": 0 if small.num_layers == shape.num_layers else small.num_layers,
            "generator.embedding_size": 0 if small.embedding_size == shape.embedding_size else small.embedding_size,
        }
    try:
        config = base.override(changes)
    except InputError as error:
        raise InputError(f"{main.config_file}: {error}") from None
    if len(folders) == 2:
        check_generator(folders["generator"].config_file, small, config)
    return config


def check_generator(path: Path, small: ModelConfig, config: Config) -> None:
    """Raises ValueError with the generator's `path` unless its widths and heads are one fraction of the model's."""
    expected = config.generator_shape()
    for key, _ in SIZE_KEYS[small.architecture].values():
        if "dropout" not in key and getattr(small, key) != getattr(expected, key):
            raise InputError(
                f"{path}: {key} = {getattr(small, key)}: must be {getattr(expected, key)}, since the generator has "
                f"{config.generator.fraction:g} of the discriminator's heads (generator.fraction)"
            )
