"""Converts an `spm.model`, SentencePiece's protobuf file of DeBERTa V2 and V3, to the rules of a `tokenizer.json`.

Only Unigram models. They normalize text with a table in the file, keep single spaces in it, and mark words with "▁".
Ids equal SentencePiece's, with two exceptions of the `tokenizers` crate, as in `transformers`: it does not compose
a letter from parts of six bytes or more (decomposed Korean, half-width "ｶﾞ") or with two accents, and it matches the
name of a byte such as <0x41> in text.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from electra_fast.errors import InputError

# Numbers of fields in SentencePiece's sentencepiece_model.proto: of the model, a piece, ...
PIECES = 1
TRAINER = 2
NORMALIZER = 3
PIECE = 1
SCORE = 2
TYPE = 3
# ... the trainer and the normalizer. Each setting has one supported value, the default.
BYTE_FALLBACK = 35
CHARACTER_MAP = 2
SETTINGS = {
    TRAINER: {3: ("model_type", 1), 24: ("treat_whitespace_as_suffix", 0)},
    NORMALIZER: {3: ("add_dummy_prefix", 1), 4: ("remove_extra_whitespaces", 1), 5: ("escape_whitespaces", 1)},
}
MODEL_TYPES = {2: "BPE", 3: "WORD", 4: "CHAR"}
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5


def sentence_piece_rules(path: str, lowercase: bool) -> dict[str, Any]:
    """Returns a parsed tokenizer.json with SentencePiece's ids, without a post-processor.

    Control and user-defined pieces are added tokens, as in `transformers`. If the model was trained with byte fallback,
    an unknown character becomes its bytes; in `transformers`, it is unknown. Raises InputError for other settings.
    """
    try:
        return _rules(path, Path(path).read_bytes(), lowercase)
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a complete SentencePiece model; download the file again") from None


def _rules(path: str, content: bytes, lowercase: bool) -> dict[str, Any]:
    pieces: list[tuple[str, float, int]] = []
    settings: dict[int, dict[int, Any]] = {TRAINER: {}, NORMALIZER: {}}
    for part, value in _fields(content):
        if part == PIECES:
            piece = dict(_fields(value))
            pieces.append((piece[PIECE].decode(), *struct.unpack("<f", piece[SCORE]), piece.get(TYPE, 1)))
        elif part in settings:
            settings[part] = dict(_fields(value))
    _refuse_settings(path, settings)
    types = [kind for _, _, kind in pieces]
    if UNUSED in types:
        raise InputError(f"{path}: has unused pieces, which are not supported; use a tokenizer.json without them")
    falls_back = bool(settings[TRAINER].get(BYTE_FALLBACK))
    word_mark = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "added_tokens": [
            {"id": number, "content": text, "special": kind == CONTROL} | flags
            for number, (text, _, kind) in enumerate(pieces)
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*_normalizers(settings[NORMALIZER].get(CHARACTER_MAP), lowercase)],
        },
        "pre_tokenizer": word_mark,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [*[{"type": "ByteFallback"}] * falls_back, word_mark]},
        "model": {
            "type": "Unigram",
            "unk_id": types.index(UNKNOWN),
            "vocab": [[text, score] for text, score, _ in pieces],
            "byte_fallback": falls_back,
        },
    }


def _refuse_settings(path: str, settings: dict[int, dict[int, Any]]) -> None:
    for part, known in SETTINGS.items():
        for number, (name, supported) in known.items():
            if (value := settings[part].get(number, supported)) != supported:
                shown = MODEL_TYPES.get(value, value) if name == "model_type" else bool(value)
                raise InputError(
                    f"{path}: {name} = {shown} of this SentencePiece model is not supported; use a "
                    "tokenizer.json with its rules"
                )


def _normalizers(character_map: bytes | None, lowercase: bool) -> Iterator[dict[str, Any]]:
    if lowercase:
        yield {"type": "Lowercase"}
    if character_map:
        yield {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(character_map).decode()}
    # The map also turns other characters into spaces, so spaces are removed after it (`transformers` 4: before it).
    yield {"type": "Replace", "pattern": {"Regex": r"\A +| +(?= |\z)"}, "content": ""}


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yields number and value of each field: an integer, or the bytes of any other type."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}[kind]
        if at + size > len(message):
            raise IndexError
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns an integer of seven bits per byte, and its end."""
    value = message[at] & 0x7F
    shift = 7
    while message[at] & 0x80:
        at += 1
        value |= (message[at] & 0x7F) << shift
        shift += 7
    return value, at + 1
