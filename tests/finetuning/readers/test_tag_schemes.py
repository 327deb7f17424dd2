"""Schemes and notations of tags: detection, conversion to entities and back, and ill-formed tags as in seqeval."""

import itertools
import random
from collections import Counter

import pytest
from seqeval.metrics.sequence_labeling import get_entities

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.tag_schemes import (
    ALIASES,
    SCHEMES,
    Notation,
    detect_notation,
    detect_scheme,
    entities_of,
    from_entities,
    is_bare,
    scheme_named,
    split_tag,
    to_entities,
)


def written(entities, num_words, scheme):
    """Returns tags of a scheme, made independently of the module."""
    tags = ["O"] * num_words
    before = (0, 0, "")
    for start, end, type_ in entities:
        follows = before[1] == start and before[2] == type_
        for word in range(start, end):
            is_first = word == start
            is_last = word == end - 1
            prefix = "B" if is_first and (scheme == "IOB2" or (scheme == "IOB1" and follows)) else "I"
            if scheme == "IOBES":
                prefix = {(True, True): "S", (True, False): "B", (False, True): "E"}.get((is_first, is_last), "I")
            tags[word] = f"{prefix}-{type_}"
        before = (start, end, type_)
    return tags


def test_entities_of_random_tags_equal_seqeval():
    rng = random.Random(0)
    tags = ["O", "B", "I", "E", "S", "B-x-y", *(f"{prefix}-{type_}" for prefix in "BIES" for type_ in "XYZ")]
    for _ in range(4000):
        sentence = rng.choices(tags[: rng.choice((5, 6, 18))], k=rng.randint(0, 12))
        expected = [(start, last + 1, type_) for type_, start, last in get_entities(sentence)]
        assert entities_of(sentence) == entities_of(from_entities(expected, len(sentence))) == expected, sentence


@pytest.mark.parametrize("scheme", ["IO", "IOB1", "IOB2", "IOBES"])
def test_tags_are_well_formed_if_equal_to_rewritten_ones(scheme):
    rng = random.Random(scheme)
    tags = ["O", *(f"{prefix}-{type_}" for prefix in "BIES" for type_ in "XY")]
    num_well_formed = 0
    for _ in range(4000):
        sentence = rng.choices(tags, k=rng.randint(1, 5))
        entities, ill_formed = to_entities(sentence, scheme)
        assert (ill_formed == []) == (written(entities, len(sentence), scheme) == sentence), sentence
        num_well_formed += not ill_formed
    assert num_well_formed > 200


@pytest.mark.parametrize(
    ("scheme", "tags", "words", "entities"),
    [
        ("IO", "I-X B-X I-X", [1], [(0, 1, "X"), (1, 3, "X")]),
        ("IOB1", "B-X I-X O B-X B-Y", [0, 3, 4], [(0, 2, "X"), (3, 4, "X"), (4, 5, "Y")]),
        ("IOB2", "I-X I-X B-Y I-X E-X", [0, 3, 4], [(0, 2, "X"), (2, 3, "Y"), (3, 5, "X")]),
        ("IOBES", "B-X O", [0], [(0, 1, "X")]),
        ("IOBES", "O B-X I-X", [2], [(1, 3, "X")]),
        ("IOBES", "B-X E-Y S-Y I-Y", [0, 1, 3], [(0, 1, "X"), (1, 2, "Y"), (2, 3, "Y"), (3, 4, "Y")]),
    ],
)
def test_ill_formed_tags(scheme, tags, words, entities):
    assert to_entities(tags.split(), scheme) == (entities, words)


@pytest.mark.parametrize(
    ("sentences", "scheme"),
    [
        (["NOUN VERB", "DET"], "none"),
        (["S-BAR NP"], "none"),  # no O, and not every tag has a prefix
        (["N V S I"], "none"),
        (["O PER PER", "LOC O"], "IO"),
        (["O O"], "IO"),
        (["I-PER O", "I-LOC B-LOC"], "IOB1"),
        (["PER PER B-PER O"], "IOB1"),
        (["B-NP I-NP B-VP"], "IOB2"),
        (["O B-PER", "I-PER O O B-LOC"], "IOB2"),  # most begin with B
        (["O B-PER", "O I-LOC"], "IOB2"),  # half do
        (["I-PER O I-PER O B-LOC B-LOC"], "IOB1"),  # most begin with I
        (["O S-PER"], "IOBES"),
        (["B M E S", "S S"], "IOBES"),
        (["B I I B"], "IOB2"),
    ],
)
def test_scheme_detection(sentences, scheme):
    assert detect_scheme(iter([sentence.split() for sentence in sentences])) == scheme


def test_prefix_and_type_of_tags():
    for tag, parts in {
        "I-B-cell": ("I", "B-cell"),
        "B-": ("B", "_"),
        "X-PER": ("I", "X-PER"),
        "ORG": ("I", "ORG"),
        "B-ä\n": ("B", "ä\n"),
    }.items():
        assert split_tag(tag) == parts and is_bare(tag) == (parts[1] == tag)


def test_names_of_schemes():
    assert [scheme_named(name) for name in (*SCHEMES, "iob2", "bilou")] == [*SCHEMES, "IOB2", "IOBES"]
    assert set(map(scheme_named, ALIASES)) == {"IOB2", "IOBES", "IOE"}
    with pytest.raises(InputError, match=r"^unknown tagging scheme 'IOB'; did you mean IOB\d\?$"):
        scheme_named("IOB")


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
SENTENCES = [
    [(0, 3, "PER"), (4, 5, "LOC")],
    [(1, 3, "PER"), (4, 8, "first_name"), (9, 10, "PER")],
    [(2, 3, "LOC"), (5, 7, "LOC")],
]


def in_notation(entities, places, join, outside, case):
    single, first, inner, last = places
    tags = [outside] * 11
    for start, end, type_ in entities:
        inside = [single] if end - start == 1 else [first, *inner * (end - start - 2), last]
        tags[start:end] = [join((case(place), type_)) for place in inside]
    return tags


@pytest.mark.parametrize("scheme", PLACES)
def test_all_schemes_in_all_notations(scheme):
    cases = [(str.upper, "O"), (str.lower, "o"), (str.upper, "_"), (str.lower, "O"), (str.upper, "OTHER")]
    for separator, is_first, (case, outside) in itertools.product("-_.– ", (True, False), cases):
        join = separator.join if is_first else lambda parts, mark=separator: mark.join(reversed(parts))
        file = [in_notation(entities, PLACES[scheme], join, outside, case) for entities in SENTENCES]
        notation = detect_notation(Counter(itertools.chain.from_iterable(file)))
        usual = [[notation.usual(tag) for tag in tags] for tags in file]
        detected = detect_scheme(usual)
        assert detected == (scheme if scheme in ("IO", "IOB2", "IOE") else "IOBES"), file
        assert [to_entities(tags, detected) for tags in usual] == [(entities, []) for entities in SENTENCES]


@pytest.mark.parametrize(
    ("tags", "usual"),
    [
        ("O BPER IPER BLOC O", "O B-PER I-PER B-LOC O"),
        ("begin:PER inside:PER o end:PER", "B-PER I-PER O E-PER"),
        ("b i o b", "B I O B"),
        ("b m e s", "B I E S"),
        ("OTHER OTHER PER", "O O PER"),
        ("0 0 B-PER", "O O B-PER"),
        ("B-PER I-PER O PER", "B-PER I-PER O PER"),  # the user must correct the last tag
        ("PER_B PER_I O LOC", "B-PER I-PER O LOC"),
    ],
)
def test_tags_in_the_usual_notation(tags, usual):
    notation = detect_notation(Counter(tags.split()))
    assert " ".join(map(notation.usual, tags.split())) == usual


def test_labels_without_a_scheme_keep_their_notation():
    for tags in (
        "DET NOUN VERB _",
        "PRP$ -LRB- NN-S V_B NN",
        "N_S V_S A_P N_P",
        "0 0 0 1",
        "O O BRAND ITEM",
        "O O e-mail i-pod",
        "O O Event Person",
        "O B_PER PER LOC LOC LOC",
        "M F S",
    ):
        assert detect_notation(Counter(tags.split())) == Notation(), tags


def test_parts_of_speech_are_not_a_scheme():
    tags = "N O ^ S N V L M A N N N ! E N P P".split()
    rng = random.Random(0)
    assert detect_scheme([rng.sample(tags, len(tags)) for _ in range(3)]) == "none"
