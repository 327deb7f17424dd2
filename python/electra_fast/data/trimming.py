"""`trim_tokenizer`: a model's tokenizer with only the entries that a text uses; WordPiece, BPE, Unigram or whole words.

Text whose tokens are all kept is tokenized as before: WordPiece and Unigram choose the best of their entries, which is
still there; BPE applies merges in order, and all merges of a kept entry are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_fast import _data
from electra_fast.data.corpus import Corpus, Tokenizer, write_tokenizer
from electra_fast.data.coverage import Coverage, sample_texts, unknown_warning
from electra_fast.data.inputs import StrPath, passed_over_warning, skipped_lines
from electra_fast.data.prepare_report import Vocabulary
from electra_fast.errors import ElectraFastError, InputError
from electra_fast.files.atomic_files import foreign_names, remove, replace_folder
from electra_fast.files.json_files import read_optional
from electra_fast.progress import ReadingProgress

Rules = Mapping[str, Any]
Merge = tuple[str, str]


def trim_tokenizer(
    model: StrPath,
    out: StrPath,
    size: int | None,
    source: dict[str, Any],
    reading: dict[str, Any],
    *,
    threads: int,
    progress: bool,
) -> Vocabulary:
    """Writes the folder of a trimmed tokenizer; `vocab` documents the arguments and errors.

    Counts tokens in a temporary corpus next to `out`, a few bytes per token. Compares the tokens of a sample of the
    text before and after trimming.
    """
    folder = Path(out)
    if folder.suffix in (".txt", ".json") or _data.url_of(str(out)) or folder.is_file():
        raise InputError(f"{out}: must be a folder, because a trimmed tokenizer has several files")
    if foreign_names(folder):
        raise InputError(f"{out}: not empty; choose another folder")
    shards = folder.absolute().with_name(f".{folder.name}.shards.writing")
    remove(shards)  # of a killed run
    tokenizer = Tokenizer(model)
    try:
        with ReadingProgress("vocab", shown=progress) as bar:
            texts = sample_texts(source, None, **reading)
            reading |= {"threads": threads or None, "progress": bar.update}
            report = _data.prepare(tokenizer._inner, str(shards), **source, **reading)
            corpus = Corpus(shards)
            sample = Coverage(*_data.text_coverage(tokenizer._inner, texts))
            coverage = replace(corpus.coverage(), unknown_words=sample.unknown_words)
            bar.warn(passed_over_warning(report), unknown_warning(coverage, texts, tokenizer._inner))
            if report["skipped_rows"]:
                bar.warn(*skipped_lines(report["skipped_rows"], report["first_skipped"], None))
            counts = corpus.token_counts()
    finally:
        remove(shards)
    trimmed, kept_ids = with_entries_of(tokenizer, counts, size)
    _check(tokenizer, trimmed, kept_ids, texts)
    settings = read_optional(tokenizer.path.with_name("tokenizer_config.json"))
    replace_folder(folder, lambda path: write_tokenizer(path, trimmed, settings.get("model_max_length", 512)))
    return Vocabulary(
        *(str(out), trimmed.vocab_size, report["skipped_files"], report["skipped_rows"]),
        trimmed_from=tokenizer.vocab_size,
        unknown_share=coverage.unknown_share,
        split_share=1 - float(counts[kept_ids].sum() / counts.sum()),
    )


def with_entries_of(
    tokenizer: Tokenizer, counts: NDArray[np.int64], size: int | None = None
) -> tuple[Tokenizer, NDArray[np.int64]]:
    """Returns the tokenizer with the entries that occur, and their previous ids: int64 [entries].

    Special and added tokens stay, and so do the entries that a kept entry is merged from, bytes, its characters and
    ASCII characters, so that any word can be spelled. Entries keep their order.

    Args:
        tokenizer: A tokenizer with WordPiece, BPE, Unigram or whole words.
        counts: Occurrences of each id in a text: int64 [previous entries].
        size: Maximum number of entries to keep, the most frequent ones; all that occur by default.
    """
    rules = json.loads(tokenizer.to_json())
    entries = Entries(rules)
    special = list(tokenizer.special_tokens.values())
    kept_ids = {*entries.always(), *special}
    kept_merges = set[Merge]()
    most = tokenizer.vocab_size if size is None else size
    if len(kept_ids) > most:
        needed = f"{len(kept_ids):,}, for special tokens, bytes and ASCII characters"
        raise InputError(f"size = {size:,}: must be at least {needed}")
    for token_id in np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].tolist():
        ids, merges = entries.parts(token_id)
        if len(kept_ids) + len(ids - kept_ids) <= most:
            kept_ids |= ids
            kept_merges |= merges
    new = {old: number for number, old in enumerate(sorted(kept_ids))}
    model = rules["model"]
    vocab = rules["model"]["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {entry: new[number] for entry, number in vocab.items() if number in new}
    else:
        model["vocab"] = [piece for number, piece in enumerate(vocab) if number in new]
    if "merges" in model:
        model["merges"] = [list(merge) for merge in entries.merges if merge in kept_merges]
    if model.get("unk_id") is not None:
        model["unk_id"] = new[model["unk_id"]]
    for token in rules["added_tokens"]:
        token["id"] = new[token["id"]]
    rules["post_processor"] = _renumbered(rules["post_processor"], new.__getitem__)
    return tokenizer.with_rules(rules, (new[number] for number in special)), np.array(list(new), dtype=np.int64)


class Entries:
    """The entries of a parsed tokenizer.json and their parts."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.model = rules["model"]
        vocab = self.model["vocab"]
        pairs = vocab.items() if isinstance(vocab, dict) else ((piece, i) for i, (piece, _) in enumerate(vocab))
        self.ids: dict[str, int] = dict(pairs)
        self.names = {number: entry for entry, number in self.ids.items()}
        self.prefix: str = self.model.get("continuing_subword_prefix") or ""
        self.suffix: str = self.model.get("end_of_word_suffix") or ""
        self.merges: list[Merge] = [tuple(merge) for merge in self.model.get("merges", ())]
        self._ranks = {merge: rank for rank, merge in enumerate(self.merges)}
        self.is_byte_level = '"ByteLevel"' in json.dumps([rules["normalizer"], rules["pre_tokenizer"]])

    def always(self) -> Iterator[int]:
        """Yields the ids that any text may need: added tokens, the unknown token, bytes, ASCII characters."""
        yield from (token["id"] for token in self.rules["added_tokens"])
        ids: list[int] = []
        _renumbered(self.rules["post_processor"], ids.append)
        yield from ids
        unknown = self.model.get("unk_id"), self.ids.get(self.model.get("unk_token") or "")
        yield from (number for number in unknown if number is not None)
        letters = BYTES if self.is_byte_level else ()
        fallback = [f"<0x{byte:02X}>" for byte in range(256)] if self.model.get("byte_fallback") else ()
        ascii_letters = self._letters(map(chr, range(0x21, 0x7F)))
        yield from (self.ids[entry] for entry in (*letters, *fallback, *ascii_letters) if entry in self.ids)
        if self.model["type"] == "Unigram":  # an unknown character scores ten below the rarest entry
            scores = [score for _, score in self.model["vocab"]]
            yield scores.index(min(scores))

    def parts(self, token_id: int) -> tuple[set[int], set[Merge]]:
        """Returns the ids of an entry, its characters and the entries that it is merged from, and these merges."""
        if token_id not in self.names:
            return {token_id}, set()
        entry = self.names[token_id]
        inner = entry.removeprefix(self.prefix).removesuffix(self.suffix)
        merged, merges = self._merged(entry, inner)
        forms = self._letters(inner) | merged
        return {token_id} | {self.ids[form] for form in forms if form in self.ids}, merges

    def _letters(self, letters: Iterable[str]) -> set[str]:
        ends = [(start, end) for start in ("", self.prefix) for end in ("", self.suffix)]
        return {f"{start}{letter}{end}" for letter in letters for start, end in ends}

    def _merged(self, entry: str, inner: str) -> tuple[set[str], set[Merge]]:
        """Returns the intermediate entries and merges of an entry; none if no merges lead to it."""
        pieces = [self.prefix + letter for letter in inner]
        if pieces and not entry.startswith(self.prefix):
            pieces[0] = inner[0]
        if pieces and entry.endswith(self.suffix):
            pieces[-1] += self.suffix
        merged = set[str]()
        merges = set[Merge]()
        never = len(self.merges)
        while len(pieces) > 1:
            rank, at = min((self._ranks.get(pair, never), at) for at, pair in enumerate(pairwise(pieces)))
            if rank == never:
                return set(), set()
            first, second = self.merges[rank]
            pieces[at : at + 2] = [first + second[len(self.prefix) :]]
            merged.add(pieces[at])
            merges.add((first, second))
        return merged, merges


def _byte_alphabet() -> dict[str, int]:
    """Returns the characters that stand for bytes in byte-level BPE: printable ones, and U+0100 and up for others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_alphabet()


def _renumbered(part: Any, number: Callable[[int], Any]) -> Any:
    """Returns a post-processor with `number` applied to its ids."""
    if isinstance(part, list):
        return [_renumbered(item, number) for item in part]
    if not isinstance(part, dict):
        return part
    return {
        key: [number(token_id) for token_id in value]
        if key == "ids"
        else [value[0], number(value[1])]
        if key in ("cls", "sep") and isinstance(value, list)
        else _renumbered(value, number)
        for key, value in part.items()
    }


def _check(tokenizer: Tokenizer, trimmed: Tokenizer, kept_ids: NDArray[np.int64], texts: list[str]) -> None:
    for before, after in zip(tokenizer.encode_batch(texts), trimmed.encode_batch(texts), strict=True):
        if np.isin(before, kept_ids).all() and not np.array_equal(before, kept_ids[after]):
            raise ElectraFastError(
                f"{tokenizer.path}: trimming would change the tokens of a text, which is a bug; please report it with "
                "this tokenizer"
            )
