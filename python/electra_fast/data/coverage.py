"""How well a vocabulary covers text: the [UNK] rate, tokens per word, and a warning with the likely cause.

`prepare` measures a sample of its inputs before it starts and the corpus when it is done; `inspect` shows both rates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from electra_fast import _data

# Text in the vocabulary's own language has well below 1 % [UNK].
MOST_UNKNOWN = 0.05
# How much of a stream of documents is sampled before the work starts.
SAMPLE_DOCUMENTS, SAMPLE_CHARACTERS = 100, 1 << 18


@dataclass(frozen=True)
class Coverage:
    """Token and [UNK] counts of some text."""

    tokens: int
    unknown: int
    words: int | None
    """Tokens that begin a word; `None` for a tokenizer without a continuation prefix such as `##`."""
    unknown_words: list[tuple[str, int]]
    """The most frequent unknown words of a sample, with counts."""

    @property
    def unknown_share(self) -> float:
        """[UNK] per token."""
        return self.unknown / max(1, self.tokens)

    @property
    def tokens_per_word(self) -> float | None:
        """Also known as fertility; `None` if words cannot be counted."""
        return None if self.words is None else self.tokens / max(1, self.words)


def corpus_coverage(corpus: _data.Corpus, tokenizer: _data.Tokenizer) -> Coverage:
    """Coverage of a corpus, from at most 2^24 of its tokens, evenly spaced."""
    return Coverage(*corpus.coverage(tokenizer))


def sample_coverage(source: dict[str, Any], tokenizer: _data.Tokenizer, out: str, **reading: Any) -> Coverage:
    """Coverage of about 1 MiB of text: the start of each file, or the first documents, put back into `source`."""
    if "documents" in source:
        first, source["documents"] = _peek(source["documents"])
        texts = [text[:SAMPLE_CHARACTERS] for text in first if isinstance(text, str)]
        return Coverage(*_data.sample_coverage(tokenizer, out, documents=texts, **reading))
    return Coverage(*_data.sample_coverage(tokenizer, out, **source, **reading))


def _peek(documents: Iterator[str]) -> tuple[list[str], Iterator[str]]:
    """The first documents, and an iterator over all documents, including these."""
    taken: list[str] = []
    characters = 0
    for text in documents:
        taken.append(text)
        characters += len(text) if isinstance(text, str) else SAMPLE_CHARACTERS  # `prepare` raises the error
        if len(taken) == SAMPLE_DOCUMENTS or characters >= SAMPLE_CHARACTERS:
            break
    return taken, chain(taken, documents)


def coverage_warning(coverage: Coverage, tokenizer: _data.Tokenizer) -> str | None:
    """A one-line warning if too many tokens are [UNK]: the rate, frequent unknown words, the likely cause."""
    if coverage.unknown_share <= MOST_UNKNOWN:
        return None
    words = [word for word, _ in coverage.unknown_words]
    listing = ", ".join(f"{word[:40]} ({count:,})" for word, count in coverage.unknown_words)
    examples = f" (of a sample, most often: {listing})" if listing else ""
    return f"warning: {coverage.unknown_share:.1%} of the tokens are [UNK]{examples}; {_cause(words, tokenizer)}"


def _cause(words: list[str], tokenizer: _data.Tokenizer) -> str:
    unknown_id = tokenizer.special_tokens[1]

    lowered = tokenizer.encode_batch([word.lower() for word in words])
    if words and not any(unknown_id in memoryview(ids).cast("I") for ids in lowered):
        return "the vocabulary knows these words in lower case: prepare with --uncased"
    if words and all(not word.isascii() for word in words):
        return "the vocabulary seems to be of another language or script: train one on this text"
    return (
        "the vocabulary may be of another language, of cased text where this is uncased (or the other way round: "
        "--cased, --uncased), or split words in another way"
    )
