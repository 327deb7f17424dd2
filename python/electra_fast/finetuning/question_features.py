"""Questions as the model reads them: each with the chunks of its context, and where the answer is in a chunk.

As in the published code (`finetune/qa/qa_tasks.py`). `answer_search` turns the model's scores back into text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from electra_fast.data.corpus import Pieces, Tokenizer
from electra_fast.errors import InputError
from electra_fast.finetuning.batches import EncodedExamples
from electra_fast.finetuning.chunks import Ints, chunk_spans, word_at, words_of
from electra_fast.finetuning.task import Answer

# A chunk has room for so many pieces of the context, however long the question.
_LEAST_ROOM = 8
# Contexts that are tokenized together.
_BATCH = 1024


@dataclass(frozen=True)
class Context:
    """A tokenized context. Its words are what whitespace separates.

    Args:
        ids: Of its pieces, int32 [pieces].
        offsets: First and past-the-last character of each piece, int32 [pieces, 2].
        words: Word of each piece, int64 [pieces].
        word_offsets: First and past-the-last character of each word, int64 [words, 2].
        is_unknown: Whether a piece is [UNK], bool [pieces].
        growth: By how many characters normalization makes a word longer, int64 [words].
    """

    ids: Ints
    offsets: Ints
    words: Ints
    word_offsets: Ints
    is_unknown: Ints
    growth: Ints


@dataclass(frozen=True)
class QuestionFeatures:
    """The chunks of all questions, one after another.

    Args:
        encoded: Each chunk as `[CLS] question [SEP] chunk [SEP]`; `num_truncated` counts questions.
        question: Index of each chunk's question, ascending, int64 [chunks].
        first: Piece of the context at which each chunk begins, int64 [chunks].
        context_start: Position of that piece in the chunk's input, int64 [chunks].
        contexts: The context of each question; questions about the same text share one.
    """

    encoded: EncodedExamples
    question: Ints
    first: Ints
    context_start: Ints
    contexts: list[Context]

    @cached_property
    def num_pieces(self) -> Ints:
        """Pieces of the context in each chunk, int64 [chunks]."""
        return self.encoded.lengths - self.context_start - 1


def question_features(
    tokenizer: Tokenizer,
    texts: Sequence[tuple[str, str]],
    *,
    sequence_length: int,
    doc_stride: int,
    max_query_length: int,
    names: Sequence[str] = (),
) -> QuestionFeatures:
    """Tokenizes pairs of a question and its context; see `QuestionFeatures`. Messages call questions by `names`.

    Of a question the first `max_query_length` pieces are read. The context's chunks fill `sequence_length`, and each
    begins `doc_stride` pieces after the one before it.

    Raises:
        InputError: A context has no tokens, or the configuration leaves no room for it.
    """
    _check_room(sequence_length, max_query_length)
    contexts = _contexts(tokenizer, texts, names or [str(number) for number in range(len(texts))])
    questions = tokenizer.encode_batch([question for question, _ in texts])
    special = tokenizer.special_tokens
    cls, sep = np.array([special["cls"]], np.int32), np.array([special["sep"]], np.int32)
    ids, chunks = [np.zeros(0, np.int32)], []
    for number, (question, context) in enumerate(zip(questions, contexts, strict=True)):
        head = np.concatenate((cls, question[:max_query_length], sep))
        for first, length in chunk_spans(len(context.ids), sequence_length - len(head) - 1, doc_stride):
            ids += [head, context.ids[first : first + length], sep]
            chunks.append((number, first, len(head), length + 1))
    chunks_n4 = np.array(chunks, np.int64).reshape(-1, 4)
    num_truncated = sum(len(question) > max_query_length for question in questions)
    encoded = _encoded(np.concatenate(ids), chunks_n4[:, 2:], num_truncated)
    return QuestionFeatures(encoded, chunks_n4[:, 0], chunks_n4[:, 1], chunks_n4[:, 2], contexts)


def _check_room(sequence_length: int, max_query_length: int) -> None:
    room = sequence_length - max_query_length - 3
    if room < _LEAST_ROOM:
        raise InputError(
            f"finetune.sequence_length = {sequence_length} leaves room for {max(room, 0)} tokens of the context after "
            f"a question of finetune.max_query_length = {max_query_length}; make it at least "
            f"{max_query_length + 3 + _LEAST_ROOM}, or questions shorter"
        )


def _encoded(ids: Ints, lengths_n2: Ints, num_truncated: int) -> EncodedExamples:
    """Examples of two segments with these lengths, in which special tokens count."""
    types = np.repeat(np.tile(np.array([0, 1], np.int32), len(lengths_n2)), lengths_n2.flatten())
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths_n2.sum(axis=1))))
    return EncodedExamples(ids, types, offsets, num_truncated, ())


def _contexts(tokenizer: Tokenizer, texts: Sequence[tuple[str, str]], names: Sequence[str]) -> list[Context]:
    """The context of each question. Each distinct text is tokenized once."""
    distinct = list(dict.fromkeys(context for _, context in texts))
    pieces: list[Pieces] = []
    for start in range(0, len(distinct), _BATCH):
        pieces += tokenizer.encode_with_offsets(distinct[start : start + _BATCH])
    by_text = dict(zip(distinct, pieces, strict=True))
    for name, (_, context) in zip(names, texts, strict=True):
        if not (context.strip() and len(by_text[context].ids)):
            raise InputError(f"question {name}: its context has no tokens")
    unknown, letters = tokenizer.special_tokens["unk"], _letters(tokenizer, distinct)
    found = {text: _context(text, each, unknown, letters) for text, each in by_text.items()}
    return [found[context] for _, context in texts]


def _letters(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[str, int]:
    """How many letters normalization makes of each character; an unknown character counts as one.

    Empty unless the tokenizer follows BERT's rules: the entries of others are not made of letters.
    """
    if not tokenizer.fast:
        return {}
    characters = sorted(set().union(*texts))
    unknown = tokenizer.special_tokens["unk"]

    def length(entry: int) -> int:
        return 1 if entry == unknown else len(tokenizer.id_to_token(entry).removeprefix("##"))

    encoded = tokenizer.encode_batch(characters)
    return {each: sum(map(length, ids)) for each, ids in zip(characters, encoded, strict=True)}


def _context(text: str, pieces: Pieces, unknown: int, letters: dict[str, int]) -> Context:
    """Finds the words of pieces, and how normalization changes the words' lengths."""
    word_offsets = words_of(text)
    offsets = pieces.offsets.copy()
    # A piece of byte-level BPE may begin with the whitespace before its word, so its last character tells the word.
    words = word_at(word_offsets, offsets[:, 1] - 1)
    offsets[:, 0] = np.maximum(offsets[:, 0], word_offsets[words, 0])
    added = np.cumsum([0, *(letters.get(character, 1) - 1 for character in text)])
    growth = added[word_offsets[:, 1]] - added[word_offsets[:, 0]]
    return Context(pieces.ids, offsets, words, word_offsets, pieces.ids == unknown, growth)


def training_targets(tokenizer: Tokenizer, features: QuestionFeatures, answers: Sequence[tuple[Answer, ...]]) -> Ints:
    """Start and end of the first answer in each chunk's input, and whether it is impossible; int64 [chunks, 3].

    Both are 0, the position of [CLS], in a chunk that does not have all of the answer; a question without an answer is
    impossible, a chunk without one is not.
    """
    first_answers = [each[0] for each in answers if each]
    tokenized = iter(tokenizer.encode_batch([answer.text for answer in first_answers]))
    spans = np.full((len(answers), 2), -1)
    for number, (context, each) in enumerate(zip(features.contexts, answers, strict=True)):
        if each:
            spans[number] = _answer_pieces(context, each[0], next(tokenized))
    is_impossible = spans[features.question, 0] < 0
    start, end = (spans[features.question] - features.first[:, None]).T
    is_inside = (start >= 0) & (start <= end) & (end < features.num_pieces)
    positions = [np.where(is_inside, features.context_start + piece, 0) for piece in (start, end)]
    return np.stack([*positions, is_impossible], axis=1)


def _answer_pieces(context: Context, answer: Answer, tokenized: Ints) -> tuple[int, int]:
    """First and last piece of an answer's words, or of the first pieces among them that are those of its text."""
    first_word, last_word = word_at(context.word_offsets, [answer.start, answer.start + len(answer.text) - 1])
    start = int(np.searchsorted(context.words, first_word))
    end = int(np.searchsorted(context.words, last_word, side="right"))
    pieces, wanted = context.ids[start:end].tolist(), tokenized.tolist()
    for place in range(len(pieces) - len(wanted) + 1):
        if wanted and pieces[place : place + len(wanted)] == wanted:
            return start + place, start + place + len(wanted) - 1
    return start, end - 1
