"""Coverage of text by a vocabulary: the [UNK] rate, tokens per word, and warnings with the likely cause.

`prepare` measures a sample of its inputs before it starts and the corpus at the end; `inspect` shows both rates.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from electra_fast import _data
from electra_fast.data.text_sample import MAX_WORD_CHARS, encode

# Text in the vocabulary's own language has well below 1 % [UNK].
MOST_UNKNOWN = 0.01
# If more than this share of the unknown characters, and half of all that are not ASCII, are not: another language.
MOST_FOREIGN = 0.9
# Number of unknown words or characters to name.
LISTED = 10


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


def unknown_warning(coverage: Coverage, texts: list[str], tokenizer: _data.Tokenizer) -> str | None:
    """A one-line warning if too many tokens are [UNK]: the rate, frequent unknown words, the cause in a sample."""
    if coverage.unknown_share <= MOST_UNKNOWN:
        return None
    listing = _listing(coverage.unknown_words)
    examples = f" (of a sample, most often: {listing})" if listing else ""
    cause = _cause(Counter(dict(coverage.unknown_words)), Counter("".join("".join(texts).split())), tokenizer)
    return f"warning: {coverage.unknown_share:.1%} of the tokens are [UNK]{examples}; {cause}"


def _listing(counts: list[tuple[str, int]]) -> str:
    return ", ".join(f"{word[:40]} ({count:,})" for word, count in counts[:LISTED])


def _cause(words: Counter[str], letters: Counter[str], tokenizer: _data.Tokenizer) -> str:
    unknown = tokenizer.special_tokens[1]
    lowered = zip(words, encode(tokenizer, (word.lower() for word in words)), strict=True)
    if sum(words[word] for word, ids in lowered if unknown not in ids) > words.total() / 2:
        is_settled = tokenizer.settings == (None, None)
        remedy = "lowercase the text" if is_settled else "prepare with --uncased"
        return f"the vocabulary knows these words in lower case: {remedy}"
    if sum(count for word, count in words.items() if len(word) > MAX_WORD_CHARS) > words.total() / 2:
        return f"these are words of more than {MAX_WORD_CHARS} characters, which WordPiece never splits"
    missing = [letter for letter, ids in zip(letters, encode(tokenizer, letters), strict=True) if unknown in ids]
    occurrences = sum(letters[letter] for letter in missing)
    if sum(words[word] for word in words if not set(missing).isdisjoint(word)) <= words.total() / 2:
        return (
            "the vocabulary may be of another language, of cased text where this is uncased (or the other way round: "
            "--cased, --uncased), or split words in another way"
        )
    foreign = sum(count for letter, count in letters.items() if not letter.isascii())
    unknown_foreign = sum(letters[letter] for letter in missing if not letter.isascii())
    if unknown_foreign > max(foreign / 2, MOST_FOREIGN * occurrences):
        return "the vocabulary seems to be of another language or script: train one on this text"
    most = sorted(((letter, letters[letter]) for letter in missing), key=lambda each: -each[1])
    return (
        f"the vocabulary lacks {len(missing):,} of the text's {len(letters):,} characters, {_listing(most)}; train one "
        "on this text (with a --character-coverage nearer to 1 and a larger --size, if this one was)"
    )
