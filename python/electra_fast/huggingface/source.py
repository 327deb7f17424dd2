"""Sources of models: a run, one of its checkpoints, or Hugging Face folders; their tokenizer and origin.

A Hugging Face source is a single model, or a folder with one per network: `discriminator/` or `encoder/`, and
`generator/`. The folder of a DeBERTaV3 may contain both networks. An encoder/ without a head next to them, as `export`
writes it, is a copy for other tools and is not read. `export` reads whole models, `encoder` only an encoder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from electra_fast.config.config import Config
from electra_fast.config.presets import OBJECTIVE_SPECS
from electra_fast.data.corpus import Tokenizer
from electra_fast.data.tokenizer_folder import FILES
from electra_fast.errors import InputError
from electra_fast.files import checkpoint_folder
from electra_fast.files.json_files import parse_json
from electra_fast.huggingface.config import (
    CLASSES,
    HEADLESS,
    is_headless,
    named_classes,
    own_config,
    read_table,
    token_type_1_trained,
)
from electra_fast.huggingface.model_types import original
from electra_fast.huggingface.tensor_files import GENERATOR_FILE, weights_file
from electra_fast.huggingface.tokenizer import run_tokenizer
from electra_fast.model.networks import PARTS

if TYPE_CHECKING:
    from electra_fast.huggingface.card import Origin

_OLDER_TOKENIZERS = ("vocab.json", "sentencepiece.bpe.model", "spiece.model")


def checkpoint_of(source: Path) -> Path | None:
    if not source.is_dir():
        raise FileNotFoundError(f"{source}: no such folder; pass a run, a checkpoint or a Hugging Face folder")
    if (source / "checkpoints").is_dir():
        return checkpoint_folder.latest(source)
    return source if (source / "state.json").is_file() else None


def folders_of(source: Path) -> dict[str, Path]:
    if not source.is_dir():
        raise FileNotFoundError(f"{source}: no such folder; pass one with discriminator/ and generator/")
    if is_folder(source):
        if (source / GENERATOR_FILE).is_file():
            roles = ("discriminator", "generator") if weights_file(source).is_file() else ("generator",)
            return dict.fromkeys(roles, source)
        return {_role(source / "config.json"): source}
    folders = {role: source / role for role in PARTS if (source / role).is_dir()}
    if not folders:
        looked_for = ", ".join(("checkpoints/", "state.json", "config.json", *(f"{role}/" for role in PARTS)))
        raise FileNotFoundError(f"{source}: no model here (looked for {looked_for})")
    if len(folders) > 1 and "encoder" in folders and _is_copy(folders["encoder"], folders):
        del folders["encoder"]
    if len(folders) == len(PARTS):
        raise InputError(f"{source}: has discriminator/ and a different encoder/, but no model has both; remove one")
    return folders


def _is_copy(encoder: Path, folders: Collection[str]) -> bool:
    """Returns whether an encoder/ has no head and is a copy of another folder's encoder.

    If there is only generator/, as also for `replace-mlm`, the objective in our key of its config.json decides.
    """
    path = encoder / "config.json"
    if not path.is_file():
        return False  # reading it reports the missing file
    table = read_table(encoder)
    config = own_config(path, table)
    return is_headless(table) and (
        "discriminator" in folders
        or (config is not None and OBJECTIVE_SPECS[config.objective.name].roles == ("generator",))
    )


def is_folder(source: Path) -> bool:
    return (source / "config.json").is_file()


def _role(path: Path) -> str:
    """Returns the role of a single model from the class in its config.json: generator, if it has no head."""
    table = read_table(path.parent)
    classes = named_classes(path, table)
    roles = {name: role for (_, role), name in reversed(CLASSES.items())} | dict.fromkeys(
        HEADLESS.values(), "generator"
    )
    if known := [name for name in classes if name in roles]:
        return roles[known[0]]
    names = ", ".join(dict.fromkeys((*CLASSES.values(), *HEADLESS.values())))
    raise InputError(
        f"{path}: architectures = {original(table).get('architectures')!r}: must include one of {names}; fine-tune "
        "this model, or import it with --generator"
    )


def tokenizer_folder(source: Path, vocab_size: int) -> Path:
    return open_tokenizer(source, vocab_size)[0]


def open_tokenizer(source: Path, vocab_size: int) -> tuple[Path, Tokenizer]:
    stored = checkpoint_of(source)
    if stored is not None:
        places = [run_tokenizer(stored.parent.parent)]
    else:
        folders = _folders(source)
        places = [place for place in folders if _has_tokenizer(place)] or [source]
        if not _has_tokenizer(places[0]):
            older = [name for name in _OLDER_TOKENIZERS if (folders[0] / name).is_file()]
            remedy = (
                f"; create one from {older[0]} with save_pretrained of AutoTokenizer in transformers"
                if older
                else "; put its tokenizer.json or vocab.txt there"
            )
            raise FileNotFoundError(f"{folders[0]}: has no tokenizer.json, vocab.txt or spm.model{remedy}")
    first, *others = map(Tokenizer, places)
    for other in others:
        if other.content_hash != first.content_hash:
            raise InputError(f"{other.path}: must have the same vocabulary as {first.path}")
    if first.vocab_size > vocab_size:
        raise InputError(
            f"{first.path}: has {first.vocab_size:,} entries, but the model has {vocab_size:,}; "
            "put the model's tokenizer there"
        )
    return places[0], first


def _folders(source: Path) -> list[Path]:
    return [source] if is_folder(source) else [*folders_of(source).values()]


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FILES)


def origin(source: Path) -> Origin:
    from electra_fast.huggingface.card import Origin  # imports torch, which other functions here do not need

    stored = checkpoint_of(source)
    if stored is None:
        return Origin(token_type_1_trained=any(map(token_type_1_trained, _folders(source))))
    state = checkpoint_folder.read_state(stored)
    config = Config.load(stored / "config.toml")
    tokens = state.tokens + int(state.log_window.totals.get("tokens", 0))
    return Origin(
        # Only packing `examples` makes rows of two segments; the state records earlier packings.
        token_type_1_trained=(state.step > 0 and config.data.packing == "examples") or state.token_type_1_trained,
        steps=state.step,
        num_steps=min(config.train.steps, _steps_of_run(stored, config.train.steps)),
        imported=state.imported,
        tokens=None if state.loader is None else tokens,
        corpus=state.corpus,
        comparable_auc=_comparable_auc(stored.parent.parent / "evaluations.jsonl", state.step),
    )


def _steps_of_run(stored: Path, default: int) -> int:
    """Returns the number of steps of a checkpoint's run, which may have been lowered since."""
    with contextlib.suppress(OSError, InputError):  # the checkpoint may be outside a run
        return Config.load(stored.parent.parent / "config.toml").train.steps
    return default


def _comparable_auc(path: Path, step: int) -> tuple[int, float] | None:
    """Returns the step and `unigram_auc` of the last evaluation up to a step, or None."""
    evaluation = None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a killed process may have left half a line
            record = parse_json(line)
            if record["step"] <= step and record["unigram_auc"] is not None:
                evaluation = record["step"], float(record["unigram_auc"])
    return evaluation
