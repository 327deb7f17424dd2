"""`load`, `export` and `import_folder`: models from and to runs and Hugging Face folders.

A source is a run, one of its checkpoints, or a Hugging Face folder: a single model, or a folder with
`discriminator/` and `generator/` (only the latter for the objective `mlm`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError

from electra_fast import checkpoint, checkpoint_folder
from electra_fast.atomic_files import replace_folder
from electra_fast.checkpoint_folder import TrainState
from electra_fast.config import AUTO, HARDWARE_KEYS, Config
from electra_fast.data.corpus import Tokenizer
from electra_fast.errors import InputError
from electra_fast.huggingface.card import Origin, model_card
from electra_fast.huggingface.config import CLASSES, OWN_KEY, token_type_1_trained
from electra_fast.huggingface.folder import read_models, write_model
from electra_fast.huggingface.tokenizer import copy_tokenizer, run_tokenizer, special_ids
from electra_fast.huggingface.weights import PARTS
from electra_fast.json_files import read_object
from electra_fast.model import Electra

ROLES = ("discriminator", "generator")
_INPUT_NAMES = {
    "bert": ["input_ids", "token_type_ids", "attention_mask"],
    "modern": ["input_ids", "attention_mask"],
}


def load(path: str | Path) -> Electra:
    """The model of a run (its latest checkpoint), a checkpoint or a Hugging Face folder; fp32, in eval mode.

    A folder with only a discriminator or only a generator gives a model that raises ValueError when the
    other is called. Raises FileNotFoundError, or ValueError naming the file, field, value and remedy.
    """
    source = Path(path)
    stored = _checkpoint(source)
    model = read_models(_folders(source)) if stored is None else checkpoint.load_model(stored)
    return model.eval()


def export(source: str | Path, out: str | Path) -> None:
    """Writes out/discriminator and out/generator, each with its tokenizer and model card, for `transformers`.

    If token type 1 never occurred in training, its embedding becomes a copy of type 0's.

    Replaces an earlier export in `out`, atomically; raises ValueError if `out` has anything else in it.
    """
    source, out = Path(source), Path(out)
    if not _is_empty(out) and not _is_export(out):
        raise InputError(f"{out}: not empty and not an earlier export; choose another folder")
    model, source_origin = load(source), origin(source)
    tokenizer = tokenizer_folder(source, model)
    if "generator" not in model.networks:
        raise InputError(f"{source}: a discriminator alone; export needs a generator beside it")

    if not source_origin.token_type_1_trained:
        _copy_token_type_0(model)

    def write(folder: Path) -> None:
        for role in model.networks:
            copy_tokenizer(tokenizer, folder / role, _INPUT_NAMES[model.config.model.architecture])
            write_model(folder / role, model, role, special_ids(folder / role), source_origin.token_type_1_trained)
            card = model_card(model.config, role, _num_parameters(model, role), source_origin)
            (folder / role / "README.md").write_text(card, encoding="utf-8")

    _write_folder(out, write)


def import_folder(directory: str | Path, out: str | Path) -> None:
    """Creates a run at step 0 from Hugging Face folders, which `pretrain` can continue.

    `directory` has discriminator/ and generator/ (or only generator/: objective `mlm`); `out` must
    not exist or be empty. Sizes and tying come from the folders; the rest of config.toml comes from the
    run that was exported or, for other models, from the preset of that size. The learning-rate schedule
    restarts, with a warmup of a twentieth of the steps unless set; precision, attention backend and execution
    are `auto` again.
    """
    source, out = Path(directory), Path(out)
    if not _is_empty(out):
        raise InputError(f"{out}: not empty; choose another folder for the run")
    folders = _folders(source)
    if "generator" not in folders:
        raise InputError(f"{source}: no generator; training goes on from discriminator/ and generator/ side by side")
    model = read_models(folders)
    tokenizer = tokenizer_folder(source, model)
    # Chosen when the training starts: how long it is and where it runs may differ from the exported run.
    fresh = {"optimizer.warmup_steps": "-1"} | dict.fromkeys(HARDWARE_KEYS, AUTO)
    model.config = model.config.override(fresh)

    def write(folder: Path) -> None:
        copy_tokenizer(tokenizer, folder / "tokenizer", _INPUT_NAMES[model.config.model.architecture])
        (folder / "config.toml").write_text(model.config.to_toml(), encoding="utf-8")
        state = TrainState(imported=True, token_type_1_trained=origin(source).token_type_1_trained)
        checkpoint.save(folder, model, None, state, keep=1)

    _write_folder(out, write)


def origin(source: Path) -> Origin:
    """What a source records about its model's training."""
    stored = _checkpoint(source)
    if stored is None:
        return Origin(token_type_1_trained=any(token_type_1_trained(folder) for folder in _folders(source).values()))
    state, packing = checkpoint_folder.read_state(stored), Config.load(stored / "config.toml").data.packing
    tokens = state.tokens + int(state.log_window.totals.get("tokens", 0))
    return Origin(
        # Only packing `google` makes rows of two segments; the state remembers earlier packings.
        token_type_1_trained=(state.step > 0 and packing == "google") or state.token_type_1_trained,
        steps=state.step,
        imported=state.imported,
        tokens=None if state.loader is None else tokens,
        corpus=state.corpus,
    )


@torch.no_grad()
def _copy_token_type_0(model: Electra) -> None:
    for name, table in model.named_parameters():
        if name.endswith(".token_type"):
            table[1] = table[0]


def _num_parameters(model: Electra, role: str) -> int:
    parts = {parameter for part in PARTS[role] for parameter in model.get_submodule(part).parameters()}
    return sum(parameter.numel() for parameter in parts)


def _checkpoint(source: Path) -> Path | None:
    """The checkpoint of a run or checkpoint folder; None for Hugging Face folders."""
    if not source.is_dir():
        raise FileNotFoundError(f"{source}: no such folder; name a run, a checkpoint or a Hugging Face folder")
    if (source / "checkpoints").is_dir():
        return checkpoint_folder.latest(source)
    return source if (source / "state.json").is_file() else None


def _folders(source: Path) -> dict[str, Path]:
    """Role → Hugging Face folder."""
    if not source.is_dir():
        raise FileNotFoundError(f"{source}: no such folder; name one with discriminator/ and generator/")
    if (source / "config.json").is_file():
        return {_role(source / "config.json"): source}
    folders = {role: source / role for role in ROLES if (source / role).is_dir()}
    if not folders:
        raise FileNotFoundError(
            f"{source}: no model here (looked for checkpoints/, state.json, config.json, discriminator/, generator/)"
        )
    if "generator" not in folders:
        return {"discriminator": folders["discriminator"]}
    return folders


def _role(path: Path) -> str:
    """The role of a single model, from the class in its config.json."""
    classes = read_object(path).get("architectures") or []
    for (_, role), name in CLASSES.items():
        if name in classes:
            return role
    raise InputError(f"{path}: architectures = {classes!r} must name one of {', '.join(CLASSES.values())}")


def tokenizer_folder(source: Path, model: Electra) -> Path:
    """The folder of a source's tokenizer; raises ValueError if it cannot be the tokenizer of `model`."""
    stored = _checkpoint(source)
    if stored is not None:
        places = [run_tokenizer(stored.parent.parent)]
    else:
        folders = [*_folders(source).values()]
        places = [place for place in folders if _has_tokenizer(place)] or [source]
        if not _has_tokenizer(places[0]):
            raise FileNotFoundError(f"{folders[0]}: holds no tokenizer; put its tokenizer.json or vocab.txt there")
    first, *others = map(Tokenizer, places)
    for other in others:
        if other.content_hash != first.content_hash:
            raise InputError(f"{other.path}: another vocabulary than that of {first.path}; both models need the same")
    if first.vocab_size > model.config.model.vocab_size:
        raise InputError(
            f"{first.path}: has {first.vocab_size:,} entries, but the model has {model.config.model.vocab_size:,}; "
            "put the model's own tokenizer there"
        )
    return places[0]


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file() or (folder / "vocab.txt").is_file()


def _is_empty(folder: Path) -> bool:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: a file is in the way; choose another folder")
    return not folder.exists() or not any(folder.iterdir())


def _is_export(folder: Path) -> bool:
    """Whether a folder contains what `export` writes and nothing else."""
    entries = list(folder.iterdir())
    configs = [entry / "config.json" for entry in entries if entry.name in ROLES]
    return len(configs) == len(entries) and all(
        path.is_file() and f'"{OWN_KEY}"' in path.read_text(encoding="utf-8", errors="replace") for path in configs
    )


def _write_folder(out: Path, write: Callable[[Path], None]) -> None:
    try:
        replace_folder(out, write)
    except FileNotFoundError:
        raise  # about the source; the message names it
    except (OSError, SafetensorError) as error:
        raise OSError(f"{out}: not written: {error}") from error
