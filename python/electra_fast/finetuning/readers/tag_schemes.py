"""Schemes of tags that delimit entities: which one a file uses, and tags as entities and back.

`tag_files` reads any scheme and trains on IOB2; `tag_scores` and predictions decode the model's tags.

A tag is `O`, or a prefix and a type as in `B-PER`. Without a type, as in `B`, the type is `_`; without a prefix, as in
`PER`, the word is inside an entity, as with `I-`.

| scheme | one word of an entity | first, inner and last word | first word after an entity of the same type |
|--------|-----------------------|----------------------------|---------------------------------------------|
| IO     | I                     | I I I                      | I (the two entities become one)             |
| IOB1   | I                     | I I I                      | B                                           |
| IOB2   | B                     | B I I                      | B                                           |
| IOBES  | S                     | B I E                      | B or S                                      |
| IOE    | E, or I               | I I E, or I I I            | I or E, after an E                          |
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from electra_fast.config.file import did_you_mean
from electra_fast.errors import InputError

Entity = tuple[int, int, str]
"""The first word, the one after the last, and the type."""

SCHEMES = ("IO", "IOB1", "IOB2", "IOBES", "IOE", "none")
ALIASES = {
    "BIO": "IOB2",
    "BIOES": "IOBES",
    "BILOU": "IOBES",
    "BMES": "IOBES",
    "BMEWO": "IOBES",
    "IOE1": "IOE",
    "IOE2": "IOE",
}
# Prefixes, with those of BILOU, BMES and BMEWO as their equivalents in IOBES. The 1 of `1-PER` is one more for S.
PREFIXES = {"B": "B", "I": "I", "E": "E", "S": "S", "M": "I", "L": "E", "U": "S", "W": "S"}
_PREFIXED = re.compile(f"([{''.join(PREFIXES)}]|1(?=-))(?:-(.*))?", re.DOTALL)
# Share of words outside entities below which types without prefixes are taken for labels of every word.
MIN_OUTSIDE = 0.1
# Prefixes that a scheme does not have.
_FOREIGN = {"IO": "BES", "IOB1": "ES", "IOB2": "ES", "IOE": "BS"}
_OUTSIDE = ("O", "")


def scheme_named(name: str) -> str:
    """The scheme of a name or alias; raises InputError if it is unknown."""
    scheme = ALIASES.get(name.upper(), name if name == "none" else name.upper())
    if scheme not in SCHEMES:
        raise InputError(f"unknown tagging scheme {name!r}{did_you_mean(name, (*SCHEMES, *ALIASES, 'auto'))}")
    return scheme


@lru_cache(4096)
def split_tag(tag: str) -> tuple[str, str]:
    """The prefix (B, I, E or S) and the type of a tag; of `O`: `O` and nothing."""
    if tag == "O":
        return _OUTSIDE
    match = _PREFIXED.fullmatch(tag)
    return (PREFIXES.get(match[1], "S"), match[2] or "_") if match else ("I", tag)


def is_bare(tag: str) -> bool:
    """Whether a tag is a type without a prefix, or a label of another kind."""
    return tag != "O" and not _PREFIXED.fullmatch(tag)


def detect_scheme(sentences: Iterable[Sequence[str]]) -> str:
    """The scheme that the tags of a file follow, one of `SCHEMES`.

    The first of these that holds decides:

    1. There is no `O`, and a tag has no prefix, or all are single letters other than `B`: none.
    2. A tag has no prefix, none has a prefix with a type, and `O` is rarer than `MIN_OUTSIDE`: none. In tags of
       parts of speech, `O` may be a label like others.
    3. There is a prefix S, L or U, or both B and E: IOBES; E alone or beside I: IOE.
    4. There is no B: IO. IOB1 without adjacent entities of a type looks the same, and is read the same.
    5. Entities that do not follow one of their own type begin with B in IOB2 and with I in IOB1: what most of them do,
       and IOB2 at a tie.
    """
    tags: Counter[str] = Counter()
    num_b = num_i = 0
    for sentence in sentences:
        tags.update(sentence)
        for (_, type_before), (prefix, type_) in pairwise([_OUTSIDE, *map(split_tag, sentence)]):
            num_b += prefix == "B" and type_ != type_before
            num_i += prefix == "I" and type_ != type_before
    if not _delimit_entities(tags):
        return "none"
    prefixes = {split_tag(tag)[0] for tag in tags}
    if "S" in prefixes or {"B", "E"} <= prefixes:
        return "IOBES"
    if "B" not in prefixes:
        return "IOE" if "E" in prefixes else "IO"
    return "IOB2" if num_b >= num_i else "IOB1"


def _delimit_entities(tags: Counter[str]) -> bool:
    """Whether tags are those of entities, rather than labels that every word has."""
    has_bare = any(map(is_bare, tags))
    if "O" not in tags:
        return not has_bare and any(tag[:1] == "B" or "-" in tag for tag in tags)
    has_types = any(tag[1:2] == "-" and not is_bare(tag) for tag in tags)
    return not has_bare or has_types or tags["O"] >= MIN_OUTSIDE * tags.total()


def to_entities(tags: Sequence[str], scheme: str) -> tuple[list[Entity], list[int]]:
    """The entities of a sentence in a scheme other than none, and the words whose tags are ill-formed in it.

    Those are mended as `entities_of` describes, which reads well-formed tags of every scheme.
    """
    return entities_of(tags), sorted(_ill_formed(tags, scheme))


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence, read leniently, as the script conlleval and seqeval's default mode do.

    B and S begin an entity, and so do I and E unless they continue one of their type. E, S, O, another type, and the
    beginning of the next entity end it.
    """
    entities: list[Entity] = []
    start: int | None = None
    type_ = ""
    for word, (prefix, own) in enumerate([*map(split_tag, tags), _OUTSIDE]):
        if start is not None and (prefix in "OBS" or own != type_):
            entities.append((start, word, type_))
            start = None
        if start is None and prefix != "O":
            start, type_ = word, own
        if start is not None and prefix in "ES":
            entities.append((start, word + 1, type_))
            start = None
    return entities


def from_entities(entities: Iterable[Entity], num_words: int) -> list[str]:
    """IOB2 tags of a sentence with these entities, which must not overlap."""
    tags = ["O"] * num_words
    for start, end, type_ in entities:
        tags[start:end] = [f"B-{type_}"] + [f"I-{type_}"] * (end - start - 1)
    return tags


def _ill_formed(tags: Sequence[str], scheme: str) -> set[int]:
    """Words whose tags cannot stand where they do; in IOBES also those of an entity that is not closed."""
    words: set[int] = set()
    pairs = pairwise([_OUTSIDE, *map(split_tag, tags), _OUTSIDE])
    for word, ((prefix_before, type_before), (prefix, type_)) in enumerate(pairs):
        if scheme == "IOBES":
            is_open, continues = prefix_before in "BI", prefix in "IE"
            if is_open != continues or (is_open and type_ != type_before):
                words |= {word - 1} if is_open else set()
                words |= {word} if continues else set()
        elif prefix in _FOREIGN[scheme]:
            words.add(word)
        elif (scheme, prefix) in (("IOB1", "B"), ("IOB2", "I")) and type_ != type_before:
            words.add(word)
    return words
