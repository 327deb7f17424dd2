"""A folder's settings for sentence vectors in sentence-transformers, or the defaults of that library."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from electra_fast.errors import InputError
from electra_fast.files.json_files import parse_json, read_object, read_optional
from electra_fast.huggingface.tokenizer import read_length

Pooling = Literal["mean", "cls"]


@dataclass(frozen=True)
class SentenceSettings:
    """Settings for sentence vectors.

    Args:
        max_length: Largest number of tokens per text; None: the model's number of positions.
        pooling: `mean` over the tokens, or `cls`.
        normalize: Scale vectors to length 1.
        prompt: Text that is put before each text.
        lowercase: Convert texts to lower case.
    """

    max_length: int | None = None
    pooling: Pooling = "mean"
    normalize: bool = False
    prompt: str = ""
    lowercase: bool = False


def read_sentence_settings(folder: Path, max_length: int | None) -> SentenceSettings:
    """Reads modules.json and its files; `max_length` is the tokenizer's.

    Raises ValueError for modules and poolings that only sentence-transformers supports.
    """
    if not (path := folder / "modules.json").is_file():
        return SentenceSettings(max_length)
    kinds, paths = _modules(path)
    if kinds not in (["Transformer"], ["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise InputError(
            f"{path}: has {', '.join(kinds)}, but electra-fast supports only Transformer, Pooling and Normalize; use "
            "sentence-transformers"
        )
    pooling: Pooling = _pooling(folder / paths[1] / "config.json") if len(paths) > 1 else "mean"
    settings = folder / "sentence_bert_config.json"
    whole = read_optional(folder / "config_sentence_transformers.json")
    return SentenceSettings(
        read_length(settings, "max_seq_length") or max_length,
        pooling,
        "Normalize" in kinds,
        str((whole.get("prompts") or {}).get(whole.get("default_prompt_name")) or ""),
        bool(read_optional(settings).get("do_lower_case")),
    )


def _modules(path: Path) -> tuple[list[str], list[str]]:
    """Returns the classes and folders of modules.json."""
    try:
        modules = parse_json(path.read_text(encoding="utf-8"))
        return [module["type"].rpartition(".")[2] for module in modules], [str(module["path"]) for module in modules]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InputError(f"{path}: must be a list of modules of sentence-transformers") from None


def _pooling(path: Path) -> Pooling:
    table = read_object(path)
    modes = [name for name in table if name.startswith("pooling_mode_") and table[name] is True]  # earlier versions
    modes = table.get("pooling_mode", modes or ["mean"])
    if modes in ("mean", ["mean"], ["pooling_mode_mean_tokens"]) and table.get("include_prompt") is not False:
        return "mean"
    if modes in ("cls", ["cls"], ["pooling_mode_cls_token"]):
        return "cls"
    raise InputError(f"{path}: {json.dumps(table)}: pooling must be mean or cls; use sentence-transformers for others")
