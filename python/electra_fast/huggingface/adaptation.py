"""Models for `import_` with `generator` or `mlm`: one encoder, prepared for more pre-training on text of a domain.

With a generator, the encoder becomes the discriminator of replaced-token detection.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from electra_fast.config.config import AUTO, HARDWARE_KEYS, Config, GeneratorConfig, ModelConfig
from electra_fast.config.presets import DEFAULT_PRESET, adaptation_settings
from electra_fast.config.section import Scalar, format_value
from electra_fast.data.corpus import Tokenizer
from electra_fast.errors import InputError
from electra_fast.files import checkpoint_folder
from electra_fast.files.json_files import read_optional
from electra_fast.huggingface.config import CLASSES, named_classes, own_config, read_table, role_shape
from electra_fast.huggingface.encoder import load_encoder
from electra_fast.huggingface.folder import check_agreement, check_generator, read_model
from electra_fast.huggingface.model_types import original
from electra_fast.huggingface.source import checkpoint_of, folders_of, is_folder, tokenizer_folder
from electra_fast.messages import say
from electra_fast.model.model import Electra
from electra_fast.model.networks import PARTS, networks_of

Settings = Sequence[tuple[Mapping[str, Scalar], str]]
"""Pairs of configuration keys with their values, and the reason for these values."""

SMALL = "small"
# Either file marks a folder that sentence-transformers wrote.
_SENTENCE_MODEL_FILES = ("modules.json", "config_sentence_transformers.json")
_BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?[\"']?([\w./-]+)", re.MULTILINE)
_SAME_LAYERS = re.compile(r"same-layers:(\d+)")
_MASKED_LM_HEADS = (PARTS["encoder"][2], PARTS["generator"][2], "corrective_head")


@dataclass(frozen=True)
class _Network:
    """An encoder, and those heads of its source that Electra has.

    `state` has the fp32 parameters under `embeddings.`, `encoder.` and the names in `heads`, the attributes of
    `Electra` that hold them. `config` is the configuration of its run; None if it does not come from a run.
    """

    source: Path
    shape: ModelConfig
    state: Mapping[str, Tensor]
    heads: Collection[str] = ()
    config: Config | None = None

    def head(self, names: Iterable[str]) -> str | None:
        return next((name for name in names if name in self.heads), None)


def kind_of(source: Path) -> str:
    """Returns the kind of a source, as in `config.presets.Adaptation`: "pair", "masked_lm" or "encoder".

    Prints a warning for a folder that was fine-tuned for a task. Raises FileNotFoundError, or ValueError with the
    remedy for a sentence-embedding model and for an unfinished run.
    """
    if name := next((name for name in _SENTENCE_MODEL_FILES if (source / name).is_file()), None):
        raise InputError(
            f"{source}: a sentence-embedding model ({name}), which adapting would undo; adapt its base "
            f"encoder{_base_model(source)} and train the result on sentences again (electra-fast import and pretrain "
            "accept this folder nevertheless)"
        )
    if is_folder(source) and not _has_known_head(source):
        classes = original(read_table(source)).get("architectures") or ()
        if name := next((name for name in classes if "For" in name), None):
            say(
                f"warning: {source}: fine-tuned for a task ({name}), whose head is dropped; adapt the base "
                f"encoder{_base_model(source)} instead, and fine-tune the result"
            )
        return "encoder"
    if (stored := checkpoint_of(source)) is None:
        roles: Collection[str] = folders_of(source)
    else:
        state = checkpoint_folder.read_state(stored)
        config = Config.load(stored / "config.toml")
        if state.step < config.train.steps and source != stored:
            raise InputError(
                f"{source}: at step {state.step:,} of {config.train.steps:,}; finish it with `electra-fast pretrain`, "
                f"or adapt its checkpoint as it is: {stored}"
            )
        roles = networks_of(config)
    if len(roles) > 1:
        return "pair"
    return "encoder" if "discriminator" in roles else "masked_lm"


def _base_model(source: Path) -> str:
    """Returns the name of a folder's base model in parentheses, or "" if the folder does not record it."""
    card = source / "README.md"
    match = _BASE_MODEL.search(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    name = match[1] if match else read_optional(source / "config.json").get("_name_or_path")
    return f" ({name})" if name else ""


def read_with_generator(source: Path, generator: str) -> Electra:
    """Returns a model whose discriminator is the encoder of `source`.

    `generator` is "small", "same-layers:N", or the path of a masked language model. Raises FileNotFoundError, or
    ValueError with the file, value and remedy.
    """
    main = _read(source, PARTS)
    small, tying = _generator(main, generator)
    config = _config(main, small, f"the generator {generator}", "electra", tying)
    if small is not None:
        check_generator(small.source, small.shape, config)
    model = Electra(config)
    _fill(model, "discriminator", main, (PARTS["discriminator"][2],))
    if small is None:
        say(f"note: generator: new, so it starts untrained: {_size(config.generator_shape())}")
    else:
        _fill(model, "generator", small, _MASKED_LM_HEADS)
    if tying == "disentangled":
        base, summand = (parts.token.data for parts in (model.generator_embeddings, model.embeddings))
        if small is None:
            base.copy_(summand)
        summand.sub_(base)
    return model


def read_masked_lm(source: Path) -> Electra:
    """Returns a model of the objective `mlm` with the encoder of `source`, from its discriminator if it has a pair.

    Its head is the source's masked-language-model head, or the corrective head of a discriminator, or new. Raises
    FileNotFoundError, or ValueError with the file, value and remedy.
    """
    main = _read(source, PARTS)
    model = Electra(_config(main, None, "masked language modeling", "mlm", "none"))
    _fill(model, "generator", main, _MASKED_LM_HEADS)
    return model


def _read(source: Path, roles: Iterable[str]) -> _Network:
    """Reads the network of the first of `roles` that a source has, without a head if its class has an unknown one."""
    if is_folder(source) and not _has_known_head(source):
        encoder = load_encoder(source)
        return _Network(source, encoder.shape, encoder.state, config=config_of(source))
    model = read_model(source)
    role = next((candidate for candidate in roles if candidate in model.networks), None)
    if role is None:
        raise InputError(
            f"{source}: has only the {' and the '.join(model.networks)}, but a generator must predict masked tokens; "
            "pass a masked language model"
        )
    # A folder has only the head of its class; `read_model` initializes the others.
    heads = [PARTS[role][2]] if checkpoint_of(source) is None else list(model.networks[role].heads)
    modules = dict(zip(("embeddings", "encoder"), PARTS[role], strict=False)) | {name: name for name in heads}
    return _Network(source, role_shape(model.config, role), model.folded(modules), heads, config_of(source))


def _has_known_head(folder: Path) -> bool:
    table = read_table(folder)
    names = set(named_classes(folder / "config.json", table)) & {*CLASSES.values()}
    if names == {CLASSES["modernbert", "discriminator"]}:  # may also be a tagger
        labels = table.get("id2label")
        return isinstance(labels, dict) and "replaced" in labels.values()
    return bool(names)


def _generator(main: _Network, generator: str) -> tuple[_Network | None, str]:
    """Returns the generator (None for a new one) and the tying of the two networks."""
    is_deberta = main.shape.architecture == "deberta"
    shared = "disentangled" if is_deberta else "embeddings"
    if generator == SMALL:
        return None, shared
    if match := _SAME_LAYERS.fullmatch(generator):
        num_layers = int(match[1])
        if not 1 <= num_layers <= main.shape.num_layers:
            raise InputError(
                f"generator = {generator!r}: must be same-layers:N with N from 1 to {main.shape.num_layers}, the "
                f"layers of {main.source}"
            )
        return replace(main, shape=replace(main.shape, num_layers=num_layers)), shared
    path = Path(generator)
    if not path.is_dir():
        raise InputError(f"generator = {generator!r}: must be small, same-layers:N or the folder of a model")
    small = _read(path, ("generator", "encoder"))
    if not small.heads:
        raise InputError(f"{path}: an encoder without a masked-language-model head; pass a folder that has one")
    check_agreement(path, small.shape, "discriminator", main.shape)
    places = [tokenizer_folder(network.source, network.shape.vocab_size) for network in (small, main)]
    ours, theirs = map(Tokenizer, places)
    if ours.content_hash != theirs.content_hash:
        raise InputError(f"{ours.path}: must have the same vocabulary as {theirs.path}")
    if is_deberta and small.shape.embedding_size == main.shape.embedding_size:
        return small, shared
    names = [name for name in main.state if name.startswith("embeddings.")]
    return small, shared if all(torch.equal(main.state[name], small.state[name]) for name in names) else "none"


def _config(main: _Network, small: _Network | None, companion: str, objective: str, tying: str) -> Config:
    shape = main.shape
    num_heads = max(1, round(shape.num_heads * GeneratorConfig.fraction)) if small is None else small.shape.num_heads
    changes: dict[str, Scalar] = {"generator.fraction": num_heads / shape.num_heads}
    if small is not None:
        for key in ("num_layers", "embedding_size"):
            size = getattr(small.shape, key)
            other = getattr(shape, key)
            changes[f"generator.{key}"] = 0 if size == other else size
    model = asdict(shape) | {"tying": tying, "attention": AUTO}
    changes |= {f"model.{key}": value for key, value in model.items()}
    if main.config is None:
        base = Config.preset(DEFAULT_PRESET, "paper", objective)
        changes |= settings_of(shape)
    else:
        base = restarted(main.config)
        base = base if base.objective.name == objective else base.with_objective(objective)
    try:
        return base.override(changes)
    except InputError as error:
        raise InputError(f"{main.source} with {companion}: {error}") from None


def config_of(source: Path) -> Config | None:
    """Returns the configuration of a run, or of the run from which a folder was exported; None for other folders."""
    if (stored := checkpoint_of(source)) is not None:
        return Config.load(stored / "config.toml")
    folder = source if is_folder(source) else next(iter(folders_of(source).values()))
    return own_config(folder / "config.json", read_table(folder))


def restarted(config: Config) -> Config:
    """Returns the configuration of a new run that continues another with its settings and a new schedule."""
    # Resolved when training starts, since the new run's length, folder and hardware may differ.
    rates = ("optimizer.learning_rate", "optimizer.muon_learning_rate")
    fresh = {"optimizer.warmup_steps": "-1"} | dict.fromkeys(HARDWARE_KEYS, AUTO)
    fresh |= dict.fromkeys(("data.corpus", "train.out", "train.mirror"), "") | {"train.max_minutes": "0"}
    if config.model.architecture == "modernbert":
        derived = config.override(dict.fromkeys(rates, "0")).resolved()
        fresh |= {name: "0" for name in rates if config.value(name) == derived.value(name)}
    return config.override(fresh)


def settings_of(shape: ModelConfig) -> dict[str, Scalar]:
    """Returns `adaptation_settings` for a shape, with rows no longer than its positions."""
    settings = adaptation_settings(shape.architecture, shape.hidden_size)
    keys = {key: value for values, _ in settings for key, value in values.items()}
    return keys | {"data.sequence_length": min(int(keys["data.sequence_length"]), shape.max_positions)}


def settings_lines(config: Config, settings: Settings) -> Iterator[str]:
    """Yields a line per reason: its keys with their values in `config`, and the reason."""
    for keys, reason in settings:
        values = {key: config.value(key) for key in keys if config.objective.name != "mlm" or "disc_" not in key}
        yield f"{', '.join(f'{key} = {format_value(value)}' for key, value in values.items())}: {reason}"


@torch.no_grad()
def _fill(model: Electra, role: str, network: _Network, heads: Iterable[str]) -> None:
    """Copies a network's parameters into a role of the model, with the first of `heads` that the network has."""
    for part, module in zip(("embeddings", "encoder", network.head(heads)), PARTS[role], strict=True):
        if part is None:
            say(f"note: {module}: not in {network.source}, so it starts untrained")
            continue
        for name, parameter in model.get_submodule(module).named_parameters():
            if name == "position" and f"{part}.{name}" not in network.state:  # a head of `transformers`
                say(f"note: {module}.position: not in {network.source}, so it starts untrained")
                continue
            parameter.copy_(network.state[f"{part}.{name}"])


def _size(shape: ModelConfig) -> str:
    return f"{shape.num_layers} layers of width {shape.hidden_size} and {shape.num_heads} heads"
