"""Tags that delimit entities: their notation and scheme, and conversion between tags and entities.

`tag_files` reads any scheme and trains on IOB2; scores and predictions decode the model's tags. A file has one
notation (`B-PER`, `PER_B`, `b:per`, `begin/PER`), detected in the training file's tags; `Notation.usual` converts tags
to the usual one.

A tag is `O`, or a prefix and a type as in `B-PER`. A tag such as `B` has the type `_`; a tag such as `PER` means the
same as `I-PER`.

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
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from electra_fast.config.section import did_you_mean
from electra_fast.errors import InputError

Entity = tuple[int, int, str]
"""The first word, the end (exclusive), and the type."""

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
# Prefixes and their equivalents in IOBES, including BILOU, BMES and BMEWO. The 1 of `1-PER` also means S.
PREFIXES = {"B": "B", "I": "I", "E": "E", "S": "S", "M": "I", "L": "E", "U": "S", "W": "S"}
_PREFIXED = re.compile(f"([{''.join(PREFIXES)}]|1(?=-))(?:-(.*))?", re.DOTALL)
# Below this fraction of words outside entities, types without prefixes are considered labels of single words.
MIN_OUTSIDE = 0.1
# Prefixes that are invalid in a scheme.
_FOREIGN = {"IO": "BES", "IOB1": "ES", "IOB2": "ES", "IOE": "BS"}
_OUTSIDE = ("O", "")
# Letters and words for the place of a word in its entity.
_PLACES = PREFIXES | {"BEGIN": "B", "BEGINNING": "B", "START": "B", "INSIDE": "I", "MIDDLE": "I", "END": "E"}
_PLACES |= {"LAST": "E", "SINGLE": "S", "UNIT": "S", "1": "S"}
_PLACE = "|".join(_PLACES)
_SEPARATOR = r"[^\w\s]|_|\s"
# Tags of words outside entities in files without `O`.
_OUTSIDE_WORDS = {"o", "0", "_", "-", "*", "out", "outside", "other", "none", "null", "nil"}


def scheme_named(name: str) -> str:
    scheme = ALIASES.get(name.upper(), name if name == "none" else name.upper())
    if scheme not in SCHEMES:
        raise InputError(f"unknown tagging scheme {name!r}{did_you_mean(name, (*SCHEMES, *ALIASES, 'auto'))}")
    return scheme


@lru_cache(4096)
def split_tag(tag: str) -> tuple[str, str]:
    """Returns the prefix (B, I, E or S) and the type of a tag; for `O`, `O` and an empty type."""
    if tag == "O":
        return _OUTSIDE
    match = _PREFIXED.fullmatch(tag)
    return (PREFIXES.get(match[1], "S"), match[2] or "_") if match else ("I", tag)


def is_bare(tag: str) -> bool:
    return tag != "O" and not _PREFIXED.fullmatch(tag)


def detect_scheme(sentences: Iterable[Sequence[str]]) -> str:
    """Returns the scheme of a file's tags, one of `SCHEMES`, by the first rule that applies.

    1. There is no `O`, and some tag has no prefix or all tags are single letters other than `B`: none.
    2. Some tag has no prefix, no tag has a prefix with a type, and `O` is rarer than `MIN_OUTSIDE`: none. Among parts
       of speech, `O` may be an ordinary label.
    3. There is a prefix S, L or U, or both B and E: IOBES. There is E without B: IOE.
    4. There is no B: IO. IOB1 without adjacent entities of a type has the same tags and meaning.
    5. Entities that do not follow an entity of the same type begin with B in IOB2 and with I in IOB1: the majority
       decides, IOB2 at a tie.
    """
    tags: Counter[str] = Counter()
    num_b = 0
    num_i = 0
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
    has_bare = any(map(is_bare, tags))
    if "O" not in tags:
        return not has_bare and any(tag[:1] == "B" or "-" in tag for tag in tags)
    has_types = any(tag[1:2] == "-" and not is_bare(tag) for tag in tags)
    return not has_bare or has_types or tags["O"] >= MIN_OUTSIDE * tags.total()


def to_entities(tags: Sequence[str], scheme: str) -> tuple[list[Entity], list[int]]:
    """Returns a sentence's entities, and the words whose tags are ill-formed in `scheme`, which must not be none."""
    return entities_of(tags), sorted(_ill_formed(tags, scheme))


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """Returns the entities of a sentence, read as leniently as by conlleval and by seqeval's default mode.

    B and S begin an entity; so do I and E unless they continue an entity of their type. An entity ends with E or S, and
    before O, another type or the beginning of the next entity.
    """
    entities: list[Entity] = []
    start: int | None = None
    type_ = ""
    for word, (prefix, next_type) in enumerate([*map(split_tag, tags), _OUTSIDE]):
        if start is not None and (prefix in "OBS" or next_type != type_):
            entities.append((start, word, type_))
            start = None
        if start is None and prefix != "O":
            start = word
            type_ = next_type
        if start is not None and prefix in "ES":
            entities.append((start, word + 1, type_))
            start = None
    return entities


def from_entities(entities: Iterable[Entity], num_words: int) -> list[str]:
    """Returns the IOB2 tags of a sentence with these entities, which must not overlap."""
    tags = ["O"] * num_words
    for start, end, type_ in entities:
        tags[start:end] = [f"B-{type_}"] + [f"I-{type_}"] * (end - start - 1)
    return tags


def _ill_formed(tags: Sequence[str], scheme: str) -> set[int]:
    """Returns the words whose tags are invalid in their place; in IOBES also the words of unclosed entities."""
    words: set[int] = set()
    pairs = pairwise([_OUTSIDE, *map(split_tag, tags), _OUTSIDE])
    for word, ((prefix_before, type_before), (prefix, type_)) in enumerate(pairs):
        if scheme == "IOBES":
            is_open = prefix_before in "BI"
            continues = prefix in "IE"
            if is_open != continues or (is_open and type_ != type_before):
                words |= {word - 1} if is_open else set()
                words |= {word} if continues else set()
        elif prefix in _FOREIGN[scheme]:
            words.add(word)
        elif (scheme, prefix) in (("IOB1", "B"), ("IOB2", "I")) and type_ != type_before:
            words.add(word)
    return words


@dataclass(frozen=True)
class Notation:
    """Spelling of tags: how a place (such as B) and a type form a tag. By default `B-PER`, and `O` outside entities."""

    separator: str = "-"
    """Text between place and type; empty as in `BPER`."""
    is_suffix: bool = False
    """Whether the place follows the type."""
    ignores_case: bool = False
    outside: str = "O"
    has_places: bool = True
    """If False, every tag is a type, even if it looks like `E-MAIL`."""

    def usual(self, tag: str) -> str:
        if tag == self.outside:
            return "O"
        if not self.has_places:
            return f"I-{tag}"
        if self == Notation():
            return tag
        place, type_ = self.parts(tag) or ("", tag)
        return f"{place}-{type_}" if place and type_ else place or type_

    def parts(self, tag: str) -> tuple[str, str] | None:
        """Returns the place (B, I, E or S) and the type, which may be empty; None for a tag not in this notation."""
        place = _PLACE if self.separator and self != Notation() else "|".join((*PREFIXES, "1"))
        separator = re.escape(self.separator)
        type_ = ".*" if self.separator else r"[^\W_].*"
        pattern = f"(.+){separator}({place})" if self.is_suffix else f"({place}){separator}({type_})"
        match = re.fullmatch(pattern, tag, re.DOTALL | (re.IGNORECASE if self.ignores_case else 0))
        if match:
            place, type_ = match.groups()[:: -1 if self.is_suffix else 1]
            return _PLACES[place.upper()], type_.strip()
        letter = tag.upper() if self.ignores_case else tag
        return (PREFIXES[letter], "") if letter in PREFIXES else None


def detect_notation(tags: Counter[str]) -> Notation:
    """Returns the notation of a file's tags, given the number of occurrences of each tag.

    It is the notation that fits most words inside entities, at a tie the default. Any other notation must look like a
    scheme: it has B, or only I, or I and E; and there are words outside entities, or a type with several places. If no
    tag is `O`, another tag marks words outside entities: a tag such as `_` if others have places, or `other` if it is
    the most frequent tag.
    """
    others = (tag for tag in tags if tag.lower() in _OUTSIDE_WORDS)
    outside = "O" if "O" in tags else max(others, key=lambda tag: tags[tag], default="")
    types = Counter({tag: count for tag, count in tags.items() if tag != outside})
    matched = {notation: sum(types[tag] for tag in types if notation.parts(tag)) for notation in _candidates(types)}
    best = max(matched, key=lambda notation: matched[notation])
    if best != Notation() and not _is_plausible(best, types, bool(outside)):
        best = Notation()
    if 2 * matched[best] <= types.total():
        best = Notation()
        if outside.isdecimal() or outside != tags.most_common(1)[0][0]:
            outside = "O"
    return Notation(best.separator, best.is_suffix, best.ignores_case, outside or "O")


def are_types(tags: Counter[str], outside: str, known: Collection[str] = ()) -> bool:
    """Returns whether all tags other than `outside` are types, although some, such as `E-MAIL`, seem to have a prefix.

    This is the case if the tags with a prefix are no more than those without (fewer if a prefix is `B`, which also
    begins entities of one word), and no other tag shares their prefixes or types; or if they are among the types
    `known`.
    """
    bare = {*filter(is_bare, tags)} - {outside}
    prefixed = [tag for tag in tags if tag != outside and tag not in bare]
    if not bare.isdisjoint(known) and not {*prefixed}.isdisjoint(known):
        return True
    prefixes = {tag[0] for tag in prefixed}
    types = {tag[2:] for tag in prefixed}
    are_single = "I" not in prefixes and len(prefixes) == len(prefixed) == len(types - bare - {""}) > 0
    are_few = len(prefixed) + ("B" in prefixes) <= len(bare)
    return are_single and are_few and tags[outside] >= MIN_OUTSIDE * tags.total()


def _candidates(tags: Iterable[str]) -> Iterator[Notation]:
    separators = dict.fromkeys(["-", "_", *(mark for tag in tags for mark in re.findall(_SEPARATOR, tag))])
    for ignores_case in (False, True):
        for separator in separators:
            yield Notation(separator, False, ignores_case)
            yield Notation(separator, True, ignores_case)
    yield Notation("")


def _is_plausible(notation: Notation, tags: Iterable[str], has_outside: bool) -> bool:
    places: dict[str, set[str]] = {}
    for place, type_ in filter(None, map(notation.parts, tags)):
        places.setdefault(type_, set()).add(place)
    all_places = set().union(*places.values())
    is_varied = any(len(prefixes) > 1 for prefixes in places.values())
    if not notation.separator:
        return has_outside and is_varied and all("B" in prefixes or "S" in prefixes for prefixes in places.values())
    has_scheme = "B" in all_places or all_places == {"I"} or (is_varied and all_places == {"I", "E"})
    return has_scheme and (has_outside or is_varied)
