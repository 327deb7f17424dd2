"""Tokenizer folders that `transformers.AutoTokenizer` loads, written without it or `tokenizers`.

A run keeps such a folder as RUN/tokenizer/, and `export` copies it beside each model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROLES: dict[str, tuple[str, ...]] = {
    "unk": ("[UNK]", "<unk>"),
    "sep": ("[SEP]", "</s>", "<sep>"),
    "pad": ("[PAD]", "<pad>"),
    "cls": ("[CLS]", "<s>", "<cls>"),
    "mask": ("[MASK]", "<mask>"),
}
"""The five special tokens and the names they may go by."""

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "added_tokens.json")

# Unicode's White_Space, which the `tokenizers` crate strips from the end of a vocabulary's lines.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"


def write_tokenizer(
    directory: Path, source: Path, lowercase: bool, strip_accents: bool | None, max_length: int
) -> None:
    """Writes a tokenizer folder from a BERT `vocab.txt` or a `tokenizer.json` (by its suffix).

    `lowercase` and `strip_accents` (None: as `lowercase`) are for vocabularies; a tokenizer.json
    keeps its own rules, and gets the template [CLS] text [SEP] if it has none. `max_length` is
    the longest input of the model, in tokens. Raises ValueError naming the file and what it lacks.
    """
    if source.suffix == ".json":
        tokenizer = _read_json(source)
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    else:
        tokenizer = _bert_tokenizer(_read_vocabulary(source), lowercase, strip_accents)
        config = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": lowercase,
            "strip_accents": strip_accents,
            "tokenize_chinese_chars": True,
        }
    vocabulary = _vocabulary(source, tokenizer)
    names = _special_names(source, vocabulary)
    _complete(tokenizer, names, vocabulary)
    special = {f"{role}_token": name for role, name in names.items()}
    config |= special | {"model_max_length": max_length, "clean_up_tokenization_spaces": False}

    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "tokenizer.json", tokenizer)
    _write_json(directory / "tokenizer_config.json", config)
    _write_json(directory / "special_tokens_map.json", special)
    if source.suffix != ".json":
        shutil.copyfile(source, directory / "vocab.txt")


def copy_tokenizer(source: Path, directory: Path, input_names: list[str]) -> None:
    """Copies a tokenizer folder's files beside a model that reads `input_names`.

    A folder with a vocab.txt only, as the released ones have it, gets the other files too.
    Raises FileNotFoundError where there is no tokenizer.
    """
    if not (source / "tokenizer.json").is_file():
        if not (source / "vocab.txt").is_file():
            raise FileNotFoundError(f"{source}: holds no tokenizer; put a tokenizer.json or vocab.txt there")
        config = _read_json(source / "tokenizer_config.json") if (source / "tokenizer_config.json").is_file() else {}
        lowercase = bool(config.get("do_lower_case", True))
        length = int(min(config.get("model_max_length", 512), 1 << 30))
        write_tokenizer(directory, source / "vocab.txt", lowercase, config.get("strip_accents"), length)
    else:
        directory.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
    path = directory / "tokenizer_config.json"
    config = _read_json(path) if path.is_file() else {"tokenizer_class": "PreTrainedTokenizerFast"}
    _write_json(path, config | {"model_input_names": input_names})


def special_ids(directory: Path) -> dict[str, int]:
    """The ids of `pad`, `unk`, `cls`, `sep`, `mask` in a tokenizer folder."""
    source = directory / "tokenizer.json"
    vocabulary = _vocabulary(source, _read_json(source))
    return {role: vocabulary[name] for role, name in _special_names(source, vocabulary).items()}


def _read_vocabulary(path: Path) -> dict[str, int]:
    """Token → line number; of equal lines the last counts, as in BERT's own code."""
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such vocabulary") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None
    if lines[-1] == "":
        lines.pop()
    return {line.rstrip(_WHITE_SPACE): i for i, line in enumerate(lines)}


def _bert_tokenizer(vocabulary: Mapping[str, int], lowercase: bool, strip_accents: bool | None) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": strip_accents,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocabulary,
        },
    }


def _complete(tokenizer: dict[str, Any], names: Mapping[str, str], vocabulary: Mapping[str, int]) -> None:
    """Marks the special tokens as such, adds a missing template, drops padding and truncation.

    The last two belong to the caller of a tokenizer and would cut or fill every text silently.
    """
    tokenizer |= {"truncation": None, "padding": None}
    known = {token["content"]: token for token in tokenizer.get("added_tokens") or []}
    for name in names.values():
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        known.setdefault(name, {"id": vocabulary[name], "content": name} | flags)["special"] = True
    tokenizer["added_tokens"] = sorted(known.values(), key=lambda token: int(token["id"]))
    if tokenizer.get("post_processor") is None:
        tokenizer["post_processor"] = _template(names["cls"], names["sep"], vocabulary)


def _template(cls: str, sep: str, vocabulary: Mapping[str, int]) -> dict[str, Any]:
    def special(name: str, type_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": type_id}}

    single = [special(cls, 0), {"Sequence": {"id": "A", "type_id": 0}}, special(sep, 0)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}, special(sep, 1)],
        "special_tokens": {name: {"id": name, "ids": [vocabulary[name]], "tokens": [name]} for name in (cls, sep)},
    }


def _vocabulary(source: Path, tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token → id of the model and the added tokens."""
    try:
        entries = tokenizer["model"]["vocab"]
        if isinstance(entries, list):  # Unigram: [token, log-probability] in order of id
            entries = {token: i for i, (token, _) in enumerate(entries)}
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{source}: not a tokenizer.json: it has no model.vocab") from None
    return {**entries, **added}


def _special_names(source: Path, vocabulary: Mapping[str, int]) -> dict[str, str]:
    names: dict[str, str] = {}
    for role, choices in ROLES.items():
        found = [name for name in choices if name in vocabulary]
        if not found:
            raise ValueError(f"{source}: has no {choices[0]} token ({' or '.join(choices)}); add it to the vocabulary")
        names[role] = found[0]
    return names


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
