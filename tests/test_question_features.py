"""Chunks of questions and their training targets: by hand, and on generated texts by the published rules."""

import collections

import pytest
from question_texts import questions, write_vocab
from squad_features import comparisons
from tokenizers import Tokenizer as Crate
from tokenizers import models, pre_tokenizers

import electra_fast as ef
from electra_fast.errors import InputError
from electra_fast.finetuning.question_features import question_features, training_targets
from electra_fast.finetuning.task import Answer


@pytest.fixture
def tokenizer(tmp_path):
    return ef.Tokenizer(write_vocab(tmp_path), lowercase=True)


def features_of(tokenizer, *texts, length=24, stride=8, query=8):
    return question_features(tokenizer, texts, sequence_length=length, doc_stride=stride, max_query_length=query)


def inputs(tokenizer, features):
    encoded = features.encoded
    tokens = [tokenizer.id_to_token(each) for each in encoded.ids]
    return [" ".join(tokens[start:end]) for start, end in zip(encoded.offsets, encoded.offsets[1:], strict=False)]


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("length, stride, query", [(24, 8, 8), (24, 1, 8), (19, 30, 8), (64, 16, 4), (384, 128, 64)])
def test_generated_questions_as_published(tmp_path, lowercase, length, stride, query):
    tokenizer = ef.Tokenizer(write_vocab(tmp_path), lowercase=lowercase)
    counts = collections.Counter()
    sizes = {"sequence_length": length, "doc_stride": stride, "max_query_length": query}
    for kind, number, ours, theirs in comparisons(tokenizer, questions(24, seed=length), **sizes):
        assert ours == theirs, (kind, number)
        counts[kind] += 1
        if kind == "targets":
            counts["several chunks"] += len(ours) > 1
            counts["impossible"] += ours[0][2]
            counts["found"] += any(start for start, _, _ in ours)
    assert counts["answers"] == counts["targets"] == 24 and counts["spelling"] > 200
    assert counts["impossible"] == 6 and counts["found"] > 5
    assert counts["several chunks"] > 12 or length > 64


def test_chunks_written_out(tokenizer):
    texts = ("Who was born?", "The river (1895) in the unbelievable Café of Köln."), ("", "the")
    features = features_of(tokenizer, *texts, length=15, stride=4, query=4)
    assert inputs(tokenizer, features) == [
        "[CLS] who was born ? [SEP] the river ( 18 ##95 ) in the [SEP]",
        "[CLS] who was born ? [SEP] ##95 ) in the un ##bel ##iev ##able [SEP]",
        "[CLS] who was born ? [SEP] un ##bel ##iev ##able cafe of koln . [SEP]",
        "[CLS] [SEP] the [SEP]",
    ]
    assert features.encoded.token_types.tolist() == ([0] * 6 + [1] * 9) * 3 + [0, 0, 1, 1]
    assert features.question.tolist() == [0, 0, 0, 1]
    assert features.first.tolist() == [0, 4, 8, 0]
    assert features.context_start.tolist() == [6, 6, 6, 2]
    assert features.num_pieces.tolist() == [8, 8, 8, 1]
    offsets = features.contexts[0].offsets.tolist()
    pieces = [texts[0][1][start:end] for start, end in offsets]
    assert pieces == "The river ( 18 95 ) in the un bel iev able Café of Köln .".split()


def test_long_questions_are_cut_and_counted(tokenizer):
    features = features_of(
        tokenizer, ("who when where", "the"), ("who when", "the"), ("who", "the"), length=14, query=2
    )
    assert inputs(tokenizer, features)[:2] == ["[CLS] who when [SEP] the [SEP]"] * 2
    assert features.encoded.num_truncated == 1 and features.encoded.empty == ()


def test_a_context_is_tokenized_once(tokenizer):
    features = features_of(tokenizer, ("who", "the river"), ("when", "the bank"), ("where", "the river"))
    assert features.contexts[0] is features.contexts[2] is not features.contexts[1]


def test_no_questions_have_no_chunks(tokenizer):
    features = features_of(tokenizer)
    assert len(features.encoded) == len(features.question) == len(features.contexts) == 0
    assert training_targets(tokenizer, features, []).shape == (0, 3)


@pytest.mark.parametrize("context", ["", " \n", "\u200b", "\u00a0"])
def test_a_context_without_tokens_is_named(tokenizer, context):
    with pytest.raises(InputError, match=r"^question 2: its context has no tokens$"):
        features_of(tokenizer, ("who", "the"), ("who", "the"), ("who", context))


def test_a_context_needs_room(tokenizer):
    features_of(tokenizer, ("who", "the"), length=64 + 11, query=64)
    message = "^finetune.sequence_length = 74 leaves room for 7 tokens .* finetune.max_query_length = 64; .* 75, "
    with pytest.raises(InputError, match=message):
        features_of(tokenizer, ("who", "the"), length=74, query=64)
    with pytest.raises(InputError, match="leaves room for 0 tokens"):
        features_of(tokenizer, ("who", "the"), length=64, query=64)


@pytest.mark.parametrize(
    "context, start, text, pieces",
    [
        ("He was born (1895-1943).", 13, "1895", "18 ##95"),  # within "(1895-1943)."
        ("He was born (1895-1943).", 13, "1895-1943", "18 ##95 - 19 ##43"),
        ("the unbelievable north", 4, "unbeliev", "un ##bel ##iev"),
        ("the unbelievable north", 6, "believ", "un ##bel ##iev ##able"),  # "believ" alone is of other pieces
        ("the re-re-build of", 7, "re", "re"),  # the first, not the annotated one
        ("the Café, north", 4, "Cafe", "cafe"),
        ("in the north", 2, " the", "the"),
        ("in the north", 2, " ", "in"),  # whitespace belongs to the word before it, and has no pieces
        ("in the \u200b north", 7, "\u200b", ""),  # a word without pieces
        (" in the", 0, " ", "in"),
        ("in the north\n", 7, "north\n", "north"),
    ],
)
def test_targets_of_an_answer(tokenizer, context, start, text, pieces):
    features = features_of(tokenizer, ("who", context))
    [(first, last, impossible)] = training_targets(tokenizer, features, [(Answer(text, start), Answer("no", 0))])
    found = inputs(tokenizer, features)[0].split()[first : last + 1]
    assert (" ".join(found), impossible) == (pieces or "[CLS]", 0)


def test_an_answer_is_in_the_chunks_that_have_all_of_it(tokenizer):
    context = "the river in the river bank of the north river in north berlin"
    texts = [("who", context)] * 2
    features = features_of(tokenizer, *texts, length=12, stride=2, query=1)
    answers = [(Answer("bank of the", context.index("bank")),), ()]
    assert features.first.tolist() == [0, 2, 4, 6] * 2
    found = training_targets(tokenizer, features, answers).tolist()
    assert found[:4] == [[8, 10, 0], [6, 8, 0], [4, 6, 0], [0, 0, 0]]
    assert found[4:] == [[0, 0, 1]] * 4


def test_byte_level_pieces_begin_with_whitespace(tmp_path):
    """The space before a word is in the word's piece, but neither in the answer nor of the word before it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *alphabet, "Ġa", "Ġab"]
    crate = Crate(models.BPE({entry: i for i, entry in enumerate(entries)}, [("Ġ", "a"), ("Ġa", "b")]))
    crate.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    crate.add_special_tokens(entries[:5])
    crate.save(str(tmp_path / "tokenizer.json"))
    tokenizer, context = ef.Tokenizer(tmp_path / "tokenizer.json"), "a ab a(é"
    features = features_of(tokenizer, ("a", context))
    assert inputs(tokenizer, features) == ["[CLS] a [SEP] a Ġab Ġa ( Ã © [SEP]"]
    pieces = [context[start:end] for start, end in features.contexts[0].offsets]
    assert pieces == ["a", "ab", "a", "(", "é", "é"]
    assert training_targets(tokenizer, features, [(Answer("ab", 2),)]).tolist() == [[4, 4, 0]]
    assert features.contexts[0].growth.tolist() == [0, 0, 0]
    with pytest.raises(InputError, match="no tokens"):
        features_of(tokenizer, ("a", " \n"))
