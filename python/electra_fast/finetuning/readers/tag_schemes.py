"""Tags that delimit entities: how a file writes them, which scheme they follow, and tags as entities and back.

`tag_files` reads any scheme and trains on IOB2; scores and predictions decode the model's tags. A file has one
notation (`B-PER`, `PER_B`, `b:per`, `begin/PER`), found in the training file's tags; `Notation.usual` removes it.

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
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from electra_fast.config.section import did_you_mean
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
# Below this fraction of words outside entities, types without prefixes are taken for labels of every word.
MIN_OUTSIDE = 0.1
# Prefixes that a scheme does not have.
_FOREIGN = {"IO": "BES", "IOB1": "ES", "IOB2": "ES", "IOE": "BS"}
_OUTSIDE = ("O", "")
# Letters and words for the place of a word in its entity.
_PLACES = PREFIXES | {"BEGIN": "B", "BEGINNING": "B", "START": "B", "INSIDE": "I", "MIDDLE": "I", "END": "E"}
_PLACES |= {"LAST": "E", "SINGLE": "S", "UNIT": "S", "1": "S"}
_PLACE = "|".join(_PLACES)
_SEPARATOR = r"[^\w\s]|_|\s"
# Tags of words outside entities in files that have no `O`.
_OUTSIDE_WORDS = {"o", "0", "_", "-", "*", "out", "outside", "other", "none", "null", "nil"}


def scheme_named(name: str) -> str:
    scheme = ALIASES.get(name.upper(), name if name == "none" else name.upper())
    if scheme not in SCHEMES:
        raise InputError(f"unknown tagging scheme {name!r}{did_you_mean(name, (*SCHEMES, *ALIASES, 'auto'))}")
    return scheme


@lru_cache(4096)
def split_tag(tag: str) -> tuple[str, str]:
    """Returns the prefix (B, I, E or S) and the type of a tag; for `O`, `O` and nothing."""
    if tag == "O":
        return _OUTSIDE
    match = _PREFIXED.fullmatch(tag)
    return (PREFIXES.get(match[1], "S"), match[2] or "_") if match else ("I", tag)


def is_bare(tag: str) -> bool:
    return tag != "O" and not _PREFIXED.fullmatch(tag)


def detect_scheme(sentences: Iterable[Sequence[str]]) -> str:
    """Returns the scheme that the tags of a file follow, one of `SCHEMES`.

    The first rule that holds decides:

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
    has_bare = any(map(is_bare, tags))
    if "O" not in tags:
        return not has_bare and any(tag[:1] == "B" or "-" in tag for tag in tags)
    has_types = any(tag[1:2] == "-" and not is_bare(tag) for tag in tags)
    return not has_bare or has_types or tags["O"] >= MIN_OUTSIDE * tags.total()


def to_entities(tags: Sequence[str], scheme: str) -> tuple[list[Entity], list[int]]:
    """Returns a sentence's entities in a scheme other than none, and the words whose tags are ill-formed in it."""
    return entities_of(tags), sorted(_ill_formed(tags, scheme))


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """Returns the entities of a sentence, read leniently, as conlleval and seqeval's default mode do.

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
            start = word
            type_ = own
        if start is not None and prefix in "ES":
            entities.append((start, word + 1, type_))
            start = None
    return entities


def from_entities(entities: Iterable[Entity], num_words: int) -> list[str]:
    """Returns IOB2 tags of a sentence with these entities, which must not overlap."""
    tags = ["O"] * num_words
    for start, end, type_ in entities:
        tags[start:end] = [f"B-{type_}"] + [f"I-{type_}"] * (end - start - 1)
    return tags


def _ill_formed(tags: Sequence[str], scheme: str) -> set[int]:
    """Returns the words whose tags are invalid in their place; in IOBES also those of an unclosed entity."""
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
    """The form in which a place such as B and a type make a tag; by default `B-PER`, and `O` outside entities."""

    separator: str = "-"
    """Between both; empty as in `BPER`."""
    is_suffix: bool = False
    """The place follows the type."""
    ignores_case: bool = False
    outside: str = "O"
    has_places: bool = True
    """False: every tag is a type, also one such as `E-MAIL`."""

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
            found, own = match.groups()[:: -1 if self.is_suffix else 1]
            return _PLACES[found.upper()], own.strip()
        letter = tag.upper() if self.ignores_case else tag
        return (PREFIXES[letter], "") if letter in PREFIXES else None


def detect_notation(tags: Counter[str]) -> Notation:
    """Returns the notation of a file's tags, given how often each occurs.

    It is that of most words with a type, the default first. Another one must look like a scheme: it has a B, or only I,
    or I and E; and words outside entities, or a type with several places. If there is no `O`, another tag takes its
    place: one such as `_` beside tags with places, or `other` if it is the most frequent tag.
    """
    others = (tag for tag in tags if tag.lower() in _OUTSIDE_WORDS)
    outside = "O" if "O" in tags else max(others, key=lambda tag: tags[tag], default="")
    types = Counter({tag: count for tag, count in tags.items() if tag != outside})
    matched = {each: sum(types[tag] for tag in types if each.parts(tag)) for each in _candidates(types)}
    best = max(matched, key=lambda each: matched[each])
    if best != Notation() and not _is_plausible(best, types, bool(outside)):
        best = Notation()
    if 2 * matched[best] <= types.total():
        best = Notation()
        if outside.isdecimal() or outside != tags.most_common(1)[0][0]:
            outside = "O"
    return Notation(best.separator, best.is_suffix, best.ignores_case, outside or "O")


def are_types(tags: Counter[str], outside: str, known: Collection[str] = ()) -> bool:
    """Returns whether all tags other than `outside` are types, although some look as if they had a prefix.

    One such as `E-MAIL` does, beside `NAME` and `PHONE`: as many tags have no prefix, more if it is `B-`, which begins
    single words too, and the prefix and the type of the others are in no other tag. Or it is one of the types `known`.
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
    separators = dict.fromkeys(["-", "_", *(found for tag in tags for found in re.findall(_SEPARATOR, tag))])
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
    is_varied = any(len(own) > 1 for own in places.values())
    if not notation.separator:
        return has_outside and is_varied and all("B" in own or "S" in own for own in places.values())
    has_scheme = "B" in all_places or all_places == {"I"} or (is_varied and all_places == {"I", "E"})
    return has_scheme and (has_outside or is_varied)
