"""`with_vocabulary`: a model with another vocabulary, for `import --vocab`.

Entries of both vocabularies keep their rows in all tables. A new entry starts as the mean of the rows of the pieces
into which the old tokenizer splits its text.

Shapes: V entries, E embedding size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from electra_fast.data.corpus import Tokenizer
from electra_fast.data.trimming import BYTES, Entries
from electra_fast.messages import say
from electra_fast.model.model import Electra

Key = tuple[bool, bytes]
"""An entry of any kind of tokenizer: whether it begins a word, and its text, possibly a part of a character."""
_SPACE = "\u2581"  # SentencePiece's mark of a space


def with_vocabulary(model: Electra, old: Path, new: Path) -> Electra:
    """Returns a model with the vocabulary of `new` instead of `old`, on a CPU; prints the number of kept entries.

    Special tokens take the rows of the same role. A new entry's bias is the mean of its pieces' biases too, so its
    logit is the mean of their logits. Entries without known pieces start as the mean of all entries. With the same
    entries and rules, the model does not change, including padding rows. `old` and `new` are folders or files of
    tokenizers of any kind.

    Raises FileNotFoundError, or ValueError with the file and the missing part.
    """
    before = Tokenizer(old)
    after = Tokenizer(new)
    if after.content_hash == before.content_hash:
        say(f"vocabulary: {after.path} equals {before.path}, so nothing changes")
        return model
    sources = _sources(before, after)
    changed = Electra(model.config.override({"model.vocab_size": after.vocab_size}), roles=model.networks)
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            is_table = name.partition(".")[2] in ("token", "bias")  # embeddings, and heads that predict tokens
            table = theirs[name][: before.vocab_size]
            parameter.copy_(_rows(table, sources) if is_table else theirs[name])
    num_kept = sum(len(ids) == 1 for ids in sources)
    num_lost = sources.count([])
    origins = {"the mean of several": len(sources) - num_kept - num_lost, "the mean of all": num_lost}
    parts = [
        f"{num_kept:,} keep a row",
        *(f"{number:,} start as {origin}" for origin, number in origins.items() if number),
    ]
    sizes = [sum(weight.numel() for weight in network.parameters()) for network in (model, changed)]
    say(
        f"vocabulary: {before.vocab_size:,} entries become {after.vocab_size:,}: {', '.join(parts)}; "
        f"{sizes[0] / 1e6:,.1f} M parameters become {sizes[1] / 1e6:,.1f} M ({sizes[0] * 4 / 1e6:,.1f} → "
        f"{sizes[1] * 4 / 1e6:,.1f} MB in fp32)"
    )
    return changed


def _rows(table: Tensor, sources: list[list[int]]) -> Tensor:
    """Returns the mean of the listed rows per list, or of all rows if a list is empty; [V, …] → [new V, …].

    A single row is copied bitwise.
    """
    means = table.new_empty(len(sources), *table.shape[1:])
    everything = table.mean(dim=0)
    for number, ids in enumerate(sources):
        means[number] = table[ids[0]] if len(ids) == 1 else table[ids].mean(dim=0) if ids else everything
    return means


def _sources(before: Tokenizer, after: Tokenizer) -> list[list[int]]:
    """Returns the old ids from whose rows each new entry is computed."""
    old = _Vocabulary(before)
    new = _Vocabulary(after)
    has_same_marks = old.marks == new.marks
    has_same_text = old.rules["normalizer"] == new.rules["normalizer"]
    sources: list[list[int]] = [[] for _ in range(after.vocab_size)]
    remaining = []
    for number, key in new.keys.items():
        is_added = number in new.added
        known = old.ids.get(new.names[number]) if has_same_marks or is_added else old.ids_of_keys.get(key)
        if known is not None:
            sources[number] = [known]
        if known is None or not (has_same_text or is_added):
            remaining.append(number)
    pieces = old.pieces([new.keys[number] for number in remaining]) if remaining else []
    for number, ids in zip(remaining, pieces, strict=True):
        # If the old tokenizer normalizes an entry, such as to lower case, that entry's row was never trained.
        is_unchanged = b"".join(old.keys[piece][1] for piece in ids) == new.keys[number][1]
        if not sources[number] or (ids and not is_unchanged):
            sources[number] = ids
    for role, number in after.special_tokens.items():
        sources[number] = [before.special_tokens[role]]
    return sources


class _Vocabulary:
    """The entries of a tokenizer, by name, id and key."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.rules = json.loads(tokenizer.to_json())
        entries = Entries(self.rules)
        added = {token["id"]: token["content"] for token in self.rules["added_tokens"]}
        self.names = entries.names | added
        self.added = added.keys()
        self.ids = {name: number for number, name in self.names.items()}
        parts = [self.rules[part] for part in ("normalizer", "pre_tokenizer", "decoder")]
        self.prefix = entries.prefix
        self.suffix = entries.suffix
        self.is_byte_level = entries.is_byte_level
        self.is_sentence_piece = not self.is_byte_level and f'"{_SPACE}"' in json.dumps(parts, ensure_ascii=False)
        self.marks = (self.is_byte_level, self.is_sentence_piece, self.prefix, self.suffix)
        self.keys = {number: self._key(number) for number in self.names}
        # If two entries have the same key, such as "," and "##,", the shorter one is the usual one.
        numbers = sorted(self.keys.keys() - self.added, key=lambda number: -len(self.names[number]))
        self.ids_of_keys = {self.keys[number]: number for number in numbers}

    def _key(self, number: int) -> Key:
        entry = self.names[number]
        if number in self.added:
            return True, entry.encode()
        if self.is_byte_level:
            text = b"".join(bytes([BYTES[letter]]) if letter in BYTES else letter.encode() for letter in entry)
            return text.startswith(b" "), text.removeprefix(b" ")
        if self.is_sentence_piece:
            return entry.startswith(_SPACE), entry.removeprefix(_SPACE).encode()
        text = entry.removeprefix(self.prefix).removesuffix(self.suffix) or entry
        # Tokenizers with a prefix split words at punctuation, which mostly follows a word without a space.
        begins = not self.prefix or (not entry.startswith(self.prefix) and any(map(str.isalnum, text)))
        return begins, text.encode()

    def pieces(self, keys: list[Key]) -> list[list[int]]:
        """Returns the known ids of each text, at the start of a word or within it."""
        space = " " if self.is_byte_level else ""
        texts = [text.decode(errors="ignore") for _, text in keys]
        at_start = self._known(self.tokenizer.encode_batch([space + text for text in texts]))
        prefix = self.prefix  # WordPiece looks up the first piece of a word with its prefix
        within = self._known(self._within_words().encode_batch([prefix + text for text in texts]))
        pieces = []
        for (starts, raw), text, first, inner in zip(keys, texts, at_start, within, strict=True):
            if text.encode() != raw:  # a part of a character
                ids = [self.ids_of_keys.get((False, bytes([byte]))) for byte in raw]
                pieces.append([number for number in ids if number is not None])
            elif starts or not inner:
                pieces.append(first)
            else:
                pieces.append(inner)
        return pieces

    def _known(self, encoded: Any) -> list[list[int]]:
        unknown = self.tokenizer.special_tokens["unk"]
        known = [[number for number in ids.tolist() if number != unknown and number in self.keys] for ids in encoded]
        return [ids if any(self.keys[number][1] for number in ids) else [] for ids in known]  # more than a space

    def _within_words(self) -> Tokenizer:
        """Returns the tokenizer without the rules that split text into words and mark their starts."""
        splitter = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        rules = self.rules | {
            "normalizer": _without_prepend(self.rules["normalizer"]),
            "pre_tokenizer": splitter if self.is_byte_level else None,
        }
        return self.tokenizer.with_rules(rules, self.tokenizer.special_tokens.values())


def _without_prepend(normalizer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if normalizer is None or normalizer["type"] == "Prepend":
        return None
    if normalizer["type"] == "Sequence":
        steps = map(_without_prepend, normalizer["normalizers"])
        return {"type": "Sequence", "normalizers": [step for step in steps if step is not None]}
    return normalizer
