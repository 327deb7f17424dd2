"""Prepared corpora and their tokenizers: `Corpus`, `Tokenizer`, and `verify`, which checks every byte."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from electra_fast import _data
from electra_fast.data.coverage import Coverage
from electra_fast.data.inputs import StrPath
from electra_fast.data.pair_template import PairTemplate, template_of
from electra_fast.data.tokenizer_folder import open_tokenizer
from electra_fast.errors import InputError
from electra_fast.files.json_files import write_object
from electra_fast.results import Result

Ids = NDArray[np.int32]

SPECIAL = ("pad", "unk", "cls", "sep", "mask")


class Pieces(NamedTuple):
    """The tokens of a text in order, with their positions."""

    ids: Ids
    """int32 [tokens], as returned by `Tokenizer.encode_batch`."""

    offsets: NDArray[np.int32]
    """int32 [tokens, 2]: the first character of each piece and the character after its last, as code points of the
    original text, before normalization. `text[start:end]` is the piece as written."""

    words: NDArray[np.int32]
    """int32 [tokens]: the number of each piece's word (pre-token), ascending from 0; a word without pieces leaves a
    gap."""


class Tokenizer:
    """Text to ids with a BERT `vocab.txt`, a `tokenizer.json` or DeBERTa's `spm.model`; adds no special tokens.

    Settings in other files of a Hugging Face folder apply as in `transformers`; an unsupported one is an error that
    names it. Names of pad, unk, cls, sep and mask in text are ordinary text; every other added token stays whole.

    Args:
        path: A file, whose extension determines its kind, or a folder that contains one: a run, an export, a
            Hugging Face model.
        cased: For `vocab.txt`: keep the case of text, do not lowercase it. The default comes from a file in the same
            folder: a `tokenizer.json` with the same entries, a `tokenizer_config.json`, the manifest of the corpus.
            Without one, text is lowercased unless that would change an ordinary entry.
        strip_accents: For `vocab.txt`: drop accents and other marks. The default comes from that file; without one,
            accents are dropped if text is lowercased and no entry would change.

    Raises:
        FileNotFoundError: The file does not exist, or the folder has none.
        ValueError: The file is not a tokenizer, or it lacks a special token (the message names it).
    """

    _inferred = False

    def __init__(self, path: StrPath, *, cased: bool | None = None, strip_accents: bool | None = None) -> None:
        case = (None if cased is None else not cased, strip_accents)
        self._inner, self._inferred = open_tokenizer(os.fspath(path), *case)

    def __getstate__(self) -> tuple[Any, ...]:
        return (os.fspath(self._inner.path), self._inner.file, self._inner.settings, self._inner.special_tokens)

    def __setstate__(self, pickled: tuple[Any, ...]) -> None:
        self._inner = _data.Tokenizer.restored(*pickled)

    def __repr__(self) -> str:
        case = {True: ", keeps case", False: ", lowercases", None: ""}[self.options["cased"]]
        path = "" if self.fast else f", without the fast path: {self.fallback_reason}"
        return f"Tokenizer({str(self.path)!r}): {self.vocab_size:,} entries{case}{path}"

    @classmethod
    def of(cls, corpus: Corpus) -> Tokenizer:
        """The tokenizer that a corpus was prepared with, from the corpus's copy."""
        tokenizer = cls.__new__(cls)
        tokenizer._inner = _data.Tokenizer.of_corpus(corpus._inner)
        return tokenizer

    def with_rules(self, rules: Mapping[str, Any], special_tokens: Iterable[int]) -> Tokenizer:
        """A tokenizer with the rules of a parsed tokenizer.json and these ids of pad, unk, cls, sep and mask."""
        content = json.dumps(rules, ensure_ascii=False).encode()
        tokenizer = Tokenizer.__new__(Tokenizer)
        tokenizer.__setstate__((os.fspath(self.path), ("tokenizer.json", content), (None, None), tuple(special_tokens)))
        return tokenizer

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text: int32 arrays of shape [tokens]. Runs on all cores without the GIL."""
        return [_to_numpy(ids) for ids in self._inner.encode_batch(list(texts))]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Pieces]:
        """Ids of each text with their positions; the `tokenizers` crate computes them on all cores without the GIL."""
        return [
            Pieces(_to_numpy(ids), _to_numpy(offsets).reshape(-1, 2), _to_numpy(words))
            for ids, offsets, words in self._inner.encode_with_offsets(list(texts))
        ]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text of the ids: close to the original text, but not always equal to it."""
        return self._inner.decode([operator.index(token) for token in ids])

    def id_to_token(self, token_id: SupportsIndex) -> str:
        """The vocabulary entry with this id; raises `IndexError` if there is none."""
        token = self._inner.id_to_token(operator.index(token_id))
        if token is None:
            raise IndexError(f"id {token_id} is not in a vocabulary of {self.vocab_size} entries")
        return token

    def word_starts(self) -> list[bool] | None:
        """For each id, True if it begins a word; `None` if the vocabulary does not mark words."""
        return self._inner.word_starts()

    @property
    def fast(self) -> bool:
        """True if ids come from this package's fast path, not from the `tokenizers` crate."""
        return self._inner.fast

    @property
    def fallback_reason(self) -> str | None:
        """The reason for using the crate, such as "its model is not WordPiece"; `None` on the fast path."""
        return self._inner.fallback_reason

    @property
    def vocab_size(self) -> int:
        """Number of entries; every id is smaller."""
        return self._inner.vocab_size

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of `pad`, `unk`, `cls`, `sep` and `mask`."""
        return dict(zip(SPECIAL, self._inner.special_tokens, strict=True))

    @property
    def path(self) -> Path:
        """The tokenizer file that was opened."""
        return self._inner.path

    @property
    def file(self) -> tuple[str, bytes]:
        """Name and content of the copy that a corpus or a run keeps."""
        return self._inner.file

    @property
    def content_hash(self) -> str:
        """Identifies entries, ids and rules, including case, whatever the file format: 32 hexadecimal digits."""
        return self._inner.content_hash()

    def to_json(self) -> str:
        """The text of a complete `tokenizer.json`."""
        return self._inner.to_json()

    @cached_property
    def pair_template(self) -> PairTemplate | None:
        """The template by which the tokenizer's post-processor joins texts; None if no `PairTemplate` matches it."""
        name, content = self.file
        rules = {} if name == "vocab.txt" else json.loads(content)
        special = self.special_tokens
        return template_of(rules.get("post_processor"), special["cls"], special["sep"])

    @property
    def casing_inferred(self) -> bool:
        """True if the settings of a `vocab.txt` were inferred from its entries, because no file has them."""
        return self._inferred

    @property
    def options(self) -> dict[str, bool | None]:
        """The settings in effect, `cased` and `strip_accents`; both `None` if `file` is a `tokenizer.json`.

        A `vocab.txt` becomes one if it has added tokens or does not split Chinese characters.
        """
        return _options(self._inner.settings)


def write_tokenizer(directory: Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Writes a tokenizer folder; `max_length` is the model's maximum input length in tokens.

    A `vocab.txt` becomes a BertTokenizer; a `tokenizer.json` keeps its rules and, if it has no
    post-processor, gets the template [CLS] text [SEP].
    """
    name, content = tokenizer.file
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if name == "vocab.txt":
        config = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": not tokenizer.options["cased"],
            "strip_accents": tokenizer.options["strip_accents"],
            "tokenize_chinese_chars": True,
        }
    rules = tokenizer.to_json()
    if (json.loads(rules)["pre_tokenizer"] or {}).get("add_prefix_space"):
        config["add_prefix_space"] = True  # transformers 4 ignores tokenizer.json and defaults to false
    special = {f"{role}_token": tokenizer.id_to_token(i) for role, i in tokenizer.special_tokens.items()}
    config |= special | {"model_max_length": max_length, "clean_up_tokenization_spaces": False}

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(rules, encoding="utf-8")
    write_object(directory / "tokenizer_config.json", config)
    write_object(directory / "special_tokens_map.json", special)
    if name == "vocab.txt":
        (directory / name).write_bytes(content)


class Corpus(Sequence[Ids]):
    """A corpus written by `prepare`: `len(corpus)` is the number of documents, `corpus[i]` the ids of one.

    Opening reads only the manifest; a block of a file is verified against its checksum when it is first read. The
    folder may be in an object store (`s3://`, `gs://`, `az://`, `http(s)://`); the last gibibyte fetched from it is
    kept in temporary files for the lifetime of this object.

    Raises:
        FileNotFoundError: The folder or its manifest does not exist.
        ValueError: A file is damaged or truncated (the message names file and block), or a store refused a request.
        OSError: Reading failed, or a store did not respond.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = location(path)
        self._inner = _data.Corpus(os.fspath(path))

    def __getstate__(self) -> tuple[str, str]:
        return self._inner.path, self.content_hash

    def __setstate__(self, pickled: tuple[str, str]) -> None:
        path, content_hash = pickled
        self.path = location(path)
        self._inner = _data.Corpus(os.fspath(self.path), content_hash)

    def __repr__(self) -> str:
        validation = "no validation set" if self.holdout is None else "with a validation set"
        return (
            f"Corpus({str(self.path)!r}): {len(self):,} documents, {self.num_tokens:,} tokens, "
            f"{self.vocab_size:,} entries in the vocabulary, {validation}"
        )

    def __len__(self) -> int:
        return self._inner.num_documents

    def __getitem__(self, index: Any) -> Any:
        """Ids of a document: int32, shape [tokens]; a list of such arrays for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"document {number}: out of range; the corpus has {len(self)} documents")
        return _to_numpy(self._inner.document(number % len(self)))

    @property
    def num_tokens(self) -> int:
        """Tokens in all documents; special tokens are not stored on disk and not counted."""
        return self._inner.num_tokens

    @property
    def empty_documents(self) -> int:
        """Documents without tokens, which `prepare` skipped."""
        return self._inner.empty_documents

    def coverage(self) -> Coverage:
        """Coverage by the vocabulary, [UNK] and tokens per word, of at most 2^24 evenly spaced tokens."""
        return Coverage(*self._inner.coverage(Tokenizer.of(self)._inner))

    def token_counts(self, cache: tuple[str, int] | None = None) -> NDArray[np.int64]:
        """Number of occurrences of each id in the documents: int64, shape [vocab_size].

        Special tokens other than [UNK] are not stored, so they count 0. Reads the whole corpus on all cores, without
        the GIL; a damaged block raises ValueError.

        Args:
            cache: Folder and size limit of a cache for data fetched from an object store, like the `cache_dir` and
                `cache_bytes` of a `BatchLoader` that will read the corpus again.
        """
        return np.frombuffer(self._inner.token_counts(cache), dtype="<u8").astype(np.int64)

    @property
    def content_hash(self) -> str:
        """Identifies tokens, order and tokenizer: 32 hexadecimal digits."""
        return self._inner.content_hash

    @property
    def vocab_size(self) -> int:
        """Number of entries; every id is smaller."""
        return self._inner.vocab_size

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of `pad`, `unk`, `cls`, `sep` and `mask`."""
        return dict(zip(SPECIAL, self._inner.special_tokens, strict=True))

    @property
    def shards(self) -> list[tuple[int, int]]:
        """Documents and tokens of each shard."""
        return self._inner.shards

    @property
    def holdout(self) -> Path | str | None:
        """The folder or URL of the validation corpus (`prepare --holdout`), if there is one."""
        return None if self._inner.holdout is None else location(self._inner.holdout)

    @property
    def bytes_per_token(self) -> float:
        """Bytes on disk per token, with tables and checksums, without line lengths."""
        return self._inner.token_bytes / max(1, self.num_tokens)

    @property
    def tokenizer_path(self) -> Path:
        """The corpus's copy of its tokenizer."""
        return self._inner.tokenizer_path

    @property
    def tokenizer_options(self) -> dict[str, bool | None]:
        """Settings for opening `tokenizer_path`: `cased` and `strip_accents`."""
        return _options(self._inner.tokenizer_settings)


def location(path: StrPath) -> Path | str:
    """A path, or a URL as a string, because a `Path` merges its slashes."""
    return _data.url_of(os.fspath(path)) or Path(path)


@dataclass(frozen=True, eq=False, repr=False)
class Verification(Result):
    """The outcome of `verify`: number of `files` and `bytes` checked, and the `content_hash` of the corpus."""

    files: int
    bytes: int
    content_hash: str


def verify(corpus: StrPath) -> Verification:
    """Checks every checksum, length and table of a corpus and its validation set.

    Raises:
        FileNotFoundError: There is no corpus.
        ValueError: The corpus is damaged; the message lists every damaged file and block, separated by "; also ".
    """
    num_files, num_bytes, damaged = _data.verify(os.fspath(corpus))
    if damaged:
        more = "" if len(damaged) == 1 else f" ({len(damaged)} damaged places in total)"
        raise InputError("; also ".join(damaged) + more)
    return Verification(num_files, num_bytes, Corpus(corpus).content_hash)


def _options(settings: tuple[bool | None, bool | None]) -> dict[str, bool | None]:
    lowercase, strip_accents = settings
    return {"cased": None if lowercase is None else not lowercase, "strip_accents": strip_accents}


def _to_numpy(ids: bytes) -> Ids:
    return np.frombuffer(ids, dtype="<u4").astype(np.int32)
