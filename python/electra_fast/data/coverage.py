"""Coverage of text by a vocabulary: the [UNK] rate, tokens per word, and warnings with the likely cause.

`prepare` measures a sample of its inputs before it starts and the corpus at the end; `inspect` shows both rates. More
warnings are about losses that the [UNK] rate does not show: accents that the tokenizer drops, words so long that each
becomes one [UNK], and letters that the text writes as several characters.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from electra_fast import _data

# Text in the vocabulary's language has well below 1 % [UNK].
MOST_UNKNOWN = 0.01
# Another language: most non-ASCII characters are unknown, and they are over this fraction of the unknown ones.
MOST_FOREIGN = 0.9
# Number of unknown words or characters to list.
LISTED = 10
# Limits of the sample of a stream of documents.
SAMPLE_DOCUMENTS = 100
SAMPLE_CHARACTERS = 1 << 18
# Fractions of letters or words above which to warn, from `FEWEST` occurrences: a rare café in English is no problem.
MOST_DROPPED = 0.005
MOST_LOST = 0.01
MOST_DECOMPOSED = 0.01
FEWEST = 10
# Two spellings merge if the rarer one has at least this fraction of the other's occurrences.
FREQUENT = 0.01
MAX_WORD_CHARS = 100
# Anything but whitespace, punctuation and variation selectors; joiners and combining marks are parts of words.
WORD = re.compile(r"[^\s!-/:-@\[-`{-~¡«»¿।॥\u2010-\u206f\u3000-\u303f\ufe00-\ufe0f\uff00-\uff0f\uff1a-\uff20]+")


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
        return self.unknown / max(1, self.tokens)

    @property
    def tokens_per_word(self) -> float | None:
        """Also known as fertility; `None` if words cannot be counted."""
        return None if self.words is None else self.tokens / max(1, self.words)


def unknown_warning(coverage: Coverage, texts: list[str], tokenizer: _data.Tokenizer) -> str | None:
    """A one-line warning if too many tokens are [UNK], with frequent unknown words and the likely cause in a sample."""
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
            "the vocabulary may be of another language, cased while this text is uncased (or the other way round: "
            "--cased, --uncased), or split words differently"
        )
    foreign = sum(count for letter, count in letters.items() if not letter.isascii())
    unknown_foreign = sum(letters[letter] for letter in missing if not letter.isascii())
    if unknown_foreign > max(foreign / 2, MOST_FOREIGN * occurrences):
        return "the vocabulary seems to be of another language or script: train one on this text"
    most = sorted(((letter, letters[letter]) for letter in missing), key=lambda count: -count[1])
    return (
        f"the vocabulary lacks {len(missing):,} of the text's {len(letters):,} characters, {_listing(most)}; train one "
        "on this text (if this one was, with a --character-coverage closer to 1 and a larger --size)"
    )


def sample_texts(source: dict[str, Any], run: tuple[_data.Tokenizer, str] | None, **reading: Any) -> list[str]:
    """About 1 MiB of text: the start of each file, or the first documents, which are put back into `source`.

    `run` has the tokenizer and the output folder of `prepare`; neither may be among the inputs.
    """
    if "texts" not in source:
        return _data.text_sample(run, **source, **reading)
    sample: list[Any] = []
    characters = 0
    for text in source["texts"]:
        sample.append(text)
        characters += len(text) if isinstance(text, str) else SAMPLE_CHARACTERS  # the run raises the error
        if len(sample) == SAMPLE_DOCUMENTS or characters >= SAMPLE_CHARACTERS:
            break
    source["texts"] = chain(sample, source["texts"])
    return [text[:SAMPLE_CHARACTERS] for text in sample if isinstance(text, str)]


def sample_warnings(texts: Iterable[str], tokenizer: _data.Tokenizer) -> Iterator[str]:
    words = Counter(word for text in texts for word in WORD.findall(text.lower()))
    yield from _dropped_accents(words, tokenizer)
    yield from _decomposed(words, tokenizer)
    yield from _long_words(words, tokenizer)


def encode(tokenizer: _data.Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    return [memoryview(ids).cast("I").tolist() for ids in tokenizer.encode_batch(list(texts))]


def _clusters(word: str) -> Iterator[str]:
    """The letters of a word, each with its accents and marks, in composed form."""
    cluster = ""
    for character in unicodedata.normalize("NFD", word):
        if cluster and unicodedata.category(character) != "Mn":
            yield unicodedata.normalize("NFC", cluster)
            cluster = ""
        cluster += character
    yield unicodedata.normalize("NFC", cluster)


def _bare(cluster: str) -> str:
    decomposed = unicodedata.normalize("NFD", cluster)
    letters = (character for character in decomposed if unicodedata.category(character) != "Mn")
    return unicodedata.normalize("NFC", "".join(letters))


def _dropped_accents(words: Counter[str], tokenizer: _data.Tokenizer) -> Iterator[str]:
    counts: Counter[str] = Counter()
    spelled = {word: list(_clusters(word)) for word in words if not word.isascii()}
    for word, clusters in spelled.items():
        counts.update({cluster: words[word] * times for cluster, times in Counter(clusters).items()})
    marked = {cluster: bare for cluster in counts if (bare := _bare(cluster)) != cluster}
    unknown = tokenizer.special_tokens[1]
    pairs = zip(marked, encode(tokenizer, marked), encode(tokenizer, marked.values()), strict=True)
    dropped = {cluster for cluster, ids, bare in pairs if ids == bare and unknown not in ids}
    letters = counts.total() + sum(len(word) * count for word, count in words.items() if word.isascii())
    occurrences = sum(counts[cluster] for cluster in dropped)
    if occurrences < FEWEST or occurrences <= MOST_DROPPED * letters:
        return
    most = ", ".join(f"{mark} → {marked[mark] or 'nothing'}" for mark, _ in counts.most_common() if mark in dropped)
    yield (
        f"warning: the vocabulary drops accents and marks: {occurrences / letters:.1%} of the letters of a sample lose "
        f"theirs ({_shortened(most)}){_merged(words, spelled, {mark: marked[mark] for mark in dropped})}; "
        "`electra-fast vocab` without --strip-accents trains a vocabulary that keeps them"
    )


def _merged(words: Counter[str], spelled: dict[str, list[str]], dropped: dict[str, str]) -> str:
    """Returns the fraction of words that equal another word without their accents, with examples."""
    spellings: dict[str, Counter[str]] = defaultdict(Counter)
    for word, count in words.items():
        clusters = spelled.get(word, [word])
        spellings["".join(dropped.get(cluster, cluster) for cluster in clusters)]["".join(clusters)] += count
    merged = [frequent for forms in spellings.values() if len(frequent := _frequent(forms)) > 1]
    if not merged:
        return ""
    merged.sort(key=lambda forms: -forms[1][1])
    share = sum(count for forms in merged for _, count in forms) / words.total()
    examples = ", ".join(" = ".join(word for word, _ in forms) for forms in merged[:5])
    return f", and {share:.1%} of the words become equal to another ({examples})"


def _frequent(forms: Counter[str]) -> list[tuple[str, int]]:
    [(_, most), *_] = ordered = forms.most_common()
    return [(word, count) for word, count in ordered if count > 1 and count >= FREQUENT * most]


def _decomposed(words: Counter[str], tokenizer: _data.Tokenizer) -> Iterator[str]:
    composed = {word: unicodedata.normalize("NFC", word) for word in words if not word.isascii()}
    decomposed = [word for word, other in composed.items() if len(other) < len(word)]
    count = sum(words[word] for word in decomposed)
    if count < FEWEST or count <= MOST_DECOMPOSED * words.total():
        return
    asked = sorted(decomposed, key=lambda word: -words[word])[:100]
    if encode(tokenizer, asked) != encode(tokenizer, (composed[word] for word in asked)):
        yield (
            f"warning: {count / words.total():.1%} of the words of a sample are written with separate accents or "
            "parts of letters (Unicode NFD), which the vocabulary does not match with composed letters (NFC); "
            "convert the text first: uconv -x nfc FILE > NEW-FILE"
        )


def _long_words(words: Counter[str], tokenizer: _data.Tokenizer) -> Iterator[str]:
    long = [word for word in words if len(word) > MAX_WORD_CHARS]
    unknown = [tokenizer.special_tokens[1]]
    lost = [word for word, ids in zip(long, encode(tokenizer, long), strict=True) if ids == unknown]
    letters = sum(len(word) * count for word, count in words.items())
    share = sum(len(word) * words[word] for word in lost) / max(1, letters)
    if share > MOST_LOST:
        yield (
            f"warning: {share:.1%} of the letters of a sample are in words of more than {MAX_WORD_CHARS} characters, "
            f"each a single [UNK] ({lost[0][:20]}…); separate words with spaces, or use a tokenizer.json that "
            "needs no spaces (SentencePiece)"
        )


def _shortened(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[:length].rsplit(", ", 1)[0] + ", …"
