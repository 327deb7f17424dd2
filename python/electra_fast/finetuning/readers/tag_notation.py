"""How files write the tags of entities: `B-PER`, `PER_B`, `b:per`, `begin/PER`; and as `tag_schemes` reads them.

A file has one notation. It is found in the training file's tags and holds for all files of the task.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from electra_fast.finetuning.readers.tag_schemes import PREFIXES

# Letters and words for the place of a word in its entity.
_PLACES = PREFIXES | {"BEGIN": "B", "BEGINNING": "B", "START": "B", "INSIDE": "I", "MIDDLE": "I", "END": "E"}
_PLACES |= {"LAST": "E", "SINGLE": "S", "UNIT": "S", "1": "S"}
_PLACE = "|".join(_PLACES)
_SEPARATOR = r"[^\w\s]|_|\s"
# Tags of words outside entities in files that have no `O`.
_OUTSIDE = {"o", "0", "_", "-", "*", "out", "outside", "other", "none", "null", "nil"}


@dataclass(frozen=True)
class Notation:
    """How a place such as B and a type are written as one tag; by default `B-PER`, and `O` outside entities."""

    separator: str = "-"
    """Between both; empty as in `BPER`."""
    is_suffix: bool = False
    """Whether the place follows the type."""
    ignores_case: bool = False
    outside: str = "O"

    def usual(self, tag: str) -> str:
        """The tag as `tag_schemes` has it; a tag that is not written like this is a type, and stays as it is."""
        if tag == self.outside:
            return "O"
        if self == Notation():
            return tag
        place, type_ = self.parts(tag) or ("", tag)
        return f"{place}-{type_}" if place and type_ else place or type_

    def parts(self, tag: str) -> tuple[str, str] | None:
        """The place (B, I, E or S) and the type, which may be empty; None of a tag that is not written like this."""
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
    """The notation of a file's tags, given how often each occurs.

    That of most words with a type, the usual one first. Another one has to look like a scheme: it has a B, or only I,
    or I and E; and words outside entities, or a type with several places. Where there is no `O`, another tag takes its
    place: one such as `_` beside tags with places, or `other` if it is the most frequent tag.
    """
    others = (tag for tag in tags if tag.lower() in _OUTSIDE)
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


def _candidates(tags: Iterable[str]) -> Iterator[Notation]:
    """Notations that some tag may follow, the likeliest first."""
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
