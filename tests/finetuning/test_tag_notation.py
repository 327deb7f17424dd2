"""Ways to write tags of entities: every scheme in every notation gives the entities that it was made of."""

import itertools
import random
from collections import Counter

import pytest

from electra_fast.finetuning.readers.tag_schemes import Notation, detect_notation, detect_scheme, to_entities

# Single, first, inner and last word of an entity.
PLACES = {
    "IO": "IIII",
    "IOB2": "BBII",
    "BIOES": "SBIE",
    "BILOU": "UBIL",
    "BMES": "SBME",
    "BMEWO": "WBME",
    "IOE": "EIIE",
}
FOUND = {"IO": "IO", "IOB2": "IOB2", "IOE": "IOE"}
SENTENCES = [
    [(0, 3, "PER"), (4, 5, "LOC")],
    [(1, 3, "PER"), (4, 8, "first_name"), (9, 10, "PER")],
    [(2, 3, "LOC"), (5, 7, "LOC")],
]


def place_of(word, start, end, places):
    single, first, inner, last = places
    return single if end - start == 1 else first if word == start else last if word == end - 1 else inner


def written(entities, places, join, outside, case):
    tags = [outside] * 11
    for start, end, type_ in entities:
        for word in range(start, end):
            tags[word] = join(case(place_of(word, start, end, places)), type_)
    return tags


@pytest.mark.parametrize("scheme", PLACES)
@pytest.mark.parametrize("separator", ["-", "_", ":", ".", "/", "|", "+", "–", " "])
def test_every_scheme_in_every_notation(scheme, separator):
    joins = [lambda place, type_: place + separator + type_, lambda place, type_: type_ + separator + place]
    cases = [(str.upper, "O"), (str.lower, "o"), (str.upper, "_"), (str.lower, "O"), (str.upper, "OTHER")]
    for join, (case, outside) in itertools.product(joins, cases):
        file = [written(entities, PLACES[scheme], join, outside, case) for entities in SENTENCES]
        notation = detect_notation(Counter(itertools.chain.from_iterable(file)))
        usual = [[notation.usual(tag) for tag in tags] for tags in file]
        found = detect_scheme(usual)
        assert found == FOUND.get(scheme, "IOBES"), file
        assert [to_entities(tags, found) for tags in usual] == [(entities, []) for entities in SENTENCES]


@pytest.mark.parametrize(
    ("tags", "usual"),
    [
        ("O BPER IPER BLOC O", "O B-PER I-PER B-LOC O"),
        ("begin:PER inside:PER o end:PER", "B-PER I-PER O E-PER"),
        ("b i o b", "B I O B"),
        ("b m e s", "B I E S"),
        ("OTHER OTHER PER", "O O PER"),
        ("0 0 B-PER", "O O B-PER"),
        ("B-PER I-PER O PER", "B-PER I-PER O PER"),  # the last is for the user to correct
        ("PER_B PER_I O LOC", "B-PER I-PER O LOC"),
    ],
)
def test_tags_in_the_usual_notation(tags, usual):
    notation = detect_notation(Counter(tags.split()))
    assert " ".join(map(notation.usual, tags.split())) == usual


@pytest.mark.parametrize(
    "tags",
    [
        "DET NOUN VERB _",
        "PRP$ -LRB- NN-S V_B NN",
        "N_S V_S A_P N_P",
        "0 0 0 1",
        "O O BRAND ITEM",
        "O O e-mail i-pod",
        "O O Event Person",
        "lang1 lang2 other lang1",
        "O B_PER PER LOC LOC LOC",
        "M F S",
    ],
)
def test_labels_of_another_kind_stay_as_they_are(tags):
    assert detect_notation(Counter(tags.split())) == Notation()


def test_letters_of_parts_of_speech_are_no_scheme():
    tags = "N O ^ S N V L M A N N N ! E N P P".split()
    rng = random.Random(0)
    assert detect_scheme([rng.sample(tags, len(tags)) for _ in range(3)]) == "none"
