"""Extractive question answering by the rules of the published code, in plain Python: what the fast code has to equal.

The rules are those of google-research/electra's `finetune/qa` and `model/tokenization.py`, one character, piece and
candidate at a time, without numpy and without the package. `squad_features.py` compares on real questions, the tests on
generated ones. Two rules are the package's: where the published target has other characters than the annotation, the
pieces that overlap it are the target; and where the published code takes whole words for an answer because it cannot
align its letters, the answer is that of the pieces.
"""

import unicodedata
from dataclasses import dataclass
from math import exp

WHITESPACE = " \t\r\n\u202f"
# The published tokenizer's limit is 200 letters, that of the `tokenizers` crate 100.
LONGEST_WORD = 100
CJK = [
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
]  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary, and the characters of the text that it stands for."""

    entry: str
    start: int
    end: int


@dataclass(frozen=True)
class WordPiece:
    """BERT's tokenizer, with the position of each character in the text carried along."""

    entries: frozenset[str]
    lowercase: bool

    def basic(self, text):
        """Words and punctuation after normalization, each a list of (character, position)."""
        tokens, is_open = [], False
        for position, character in enumerate(text):
            if character not in "\t\n\r" and (character == "\ufffd" or unicodedata.category(character)[0] == "C"):
                continue
            if character.isspace():
                is_open = False
            elif any(first <= ord(character) <= last for first, last in CJK):
                tokens.append([(each, position) for each in self.normalized(character)])
                is_open = False
            else:
                for letter in self.normalized(character):
                    if is_punctuation(letter) or not is_open:
                        tokens.append([])
                    tokens[-1].append((letter, position))
                    is_open = not is_punctuation(letter)
        return tokens

    def normalized(self, character):
        """A character in lower case and without accents, if the vocabulary is uncased."""
        if not self.lowercase:
            return character
        parts = unicodedata.normalize("NFD", character.lower())
        return [part for part in parts if unicodedata.category(part) != "Mn"]

    def pieces(self, text):
        """The longest entries that make up each word, from the left; [UNK] for a word that they do not make up."""
        return [piece for token in self.basic(text) for piece in self.split(token)]

    def split(self, token):
        """The pieces of one word."""
        found, start = [], 0
        while start < len(token) <= LONGEST_WORD:
            for end in range(len(token), start, -1):
                entry = ("##" if start else "") + "".join(letter for letter, _ in token[start:end])
                if entry in self.entries:
                    found.append(Piece(entry, token[start][1], token[end - 1][1] + 1))
                    start = end
                    break
            else:
                break
        if start == len(token):
            return found
        return [Piece("[UNK]", token[0][1], token[-1][1] + 1)]


def is_punctuation(character):
    """Whether a character is a word by itself: punctuation, and the signs of ASCII."""
    is_sign = character.isascii() and character.isprintable() and not character.isalnum() and character != " "
    return is_sign or unicodedata.category(character)[0] == "P"


def words_of(text):
    """The words, and the index of each character's word; whitespace belongs to the word before it."""
    words, of_character, is_open = [], [], False
    for character in text:
        if character in WHITESPACE:
            is_open = False
        elif is_open:
            words[-1] += character
        else:
            words.append(character)
            is_open = True
        of_character.append(len(words) - 1)
    return words, of_character


def chunk_spans(num_tokens, room, stride):
    """Start and length of each chunk."""
    spans, start = [], 0
    while start < num_tokens:
        length = min(num_tokens - start, room)
        spans.append((start, length))
        if start + length == num_tokens:
            break
        start += min(length, stride)
    return spans


def chunk_of_most_context(spans, position):
    """The chunk in which a piece has the most context on its poorer side."""
    best, most = None, None
    for index, (start, length) in enumerate(spans):
        end = start + length - 1
        if start <= position <= end:
            context = min(position - start, end - position) + 0.01 * length
            if most is None or context > most:
                best, most = index, context
    return best


@dataclass(frozen=True)
class Chunk:
    """What the model reads. Dictionaries are by position in the input, of pieces of the context only."""

    tokens: list[str]
    types: list[int]
    first: int
    context_start: int
    words: dict[int, int]
    spans: dict[int, tuple[int, int]]
    has_most_context: dict[int, bool]


def chunks_of(tokenizer, question, context, sequence_length, doc_stride, max_query_length):
    """All chunks of a question's context. Each word is tokenized by itself."""
    asked = [piece.entry for piece in tokenizer.pieces(question)][:max_query_length]
    pieces, words = context_pieces(tokenizer, context)
    spans = chunk_spans(len(pieces), sequence_length - len(asked) - 3, doc_stride)
    owners = [chunk_of_most_context(spans, position) for position in range(len(pieces))]
    found = []
    for index, (first, length) in enumerate(spans):
        tokens = ["[CLS]", *asked, "[SEP]"]
        place = len(tokens)
        inside = range(first, first + length)
        tokens += [pieces[i].entry for i in inside] + ["[SEP]"]
        found.append(
            Chunk(
                tokens,
                [0] * place + [1] * (length + 1),
                first,
                place,
                {place + i - first: words[i] for i in inside},
                {place + i - first: (pieces[i].start, pieces[i].end) for i in inside},
                {place + i - first: owners[i] == index for i in inside},
            )
        )
    return found


def context_pieces(tokenizer, context):
    """The pieces of a context, at their places in it, and the word of each."""
    texts, of_character = words_of(context)
    pieces, words = [], []
    for index, text in enumerate(texts):
        start = of_character.index(index)
        for piece in tokenizer.pieces(text):
            pieces.append(Piece(piece.entry, start + piece.start, start + piece.end))
            words.append(index)
    return [with_marks(context, piece, pieces) for piece in pieces], words


def with_marks(context, piece, pieces):
    """A piece with the marks and letters after it that are in none."""
    end = piece.end
    while unicodedata.category(context[end : end + 1] or " ")[0] in "ML" and not any(
        each.start <= end < each.end for each in pieces
    ):
        end += 1
    return Piece(piece.entry, piece.start, end)


def targets_of(tokenizer, chunks, context, answer):
    """Start, end and impossibility of an answer (text, start) or None, in each chunk."""
    if answer is None:
        return [(0, 0, 1)] * len(chunks)
    text, at = answer
    pieces, words = context_pieces(tokenizer, context)
    _, of_character = words_of(context)
    first_word, last_word = max(0, of_character[at]), max(0, of_character[at + len(text) - 1])
    start = sum(word < first_word for word in words)
    end = sum(word <= last_word for word in words) - 1
    start, end = tightened(pieces, start, end, tokenizer.pieces(text))
    first, last = at + len(text) - len(text.lstrip()), at + len(text.rstrip())
    if start > end or (pieces[start].start, pieces[end].end) != (first, last):
        inside = [i for i, piece in enumerate(pieces) if piece.start < last and piece.end > first]
        start, end = (inside[0], inside[-1]) if inside else (0, -1)
    found = []
    for chunk in chunks:
        last = chunk.first + len(chunk.words) - 1
        shift = chunk.context_start - chunk.first
        is_inside = chunk.first <= start <= end <= last
        found.append((start + shift, end + shift, 0) if is_inside else (0, 0, 0))
    return found


def tightened(pieces, start, end, wanted):
    """The first part of a span that reads as the annotated text does; the whole if there is none."""
    wanted = " ".join(piece.entry for piece in wanted)
    for new_start in range(start, end + 1):
        for new_end in range(end, new_start - 1, -1):
            if " ".join(piece.entry for piece in pieces[new_start : new_end + 1]) == wanted:
                return new_start, new_end
    return start, end


@dataclass(frozen=True)
class Candidate:
    """A start and an end that the model proposes, as positions in a chunk's input, with the sum of their scores."""

    chunk: Chunk
    start: int
    end: int
    score: float


def is_answer(candidate, max_answer_length):
    """Whether a candidate is a part of the context that this chunk may propose."""
    chunk, start, end = candidate.chunk, candidate.start, candidate.end
    if start == 0 or start not in chunk.words or end not in chunk.words:
        return False
    return chunk.has_most_context[start] and start <= end < start + max_answer_length


def n_best(tokenizer, context, candidates, count, max_answer_length):
    """Distinct texts with their scores and probabilities, the best first. Candidates come by chunk, start and end."""
    valid = [candidate for candidate in candidates if is_answer(candidate, max_answer_length)]
    found = {}
    for candidate in sorted(valid, key=lambda candidate: candidate.score, reverse=True):
        if len(found) < count:
            found.setdefault(text_of(tokenizer, context, candidate), candidate.score)
    if not found:
        found = {"": 0.0}
    weights = [exp(score - max(found.values())) for score in found.values()]
    return [(*each, weight / sum(weights)) for each, weight in zip(found.items(), weights, strict=True)]


def text_of(tokenizer, context, candidate):
    """The part of the context's words that a candidate stands for."""
    chunk = candidate.chunk
    whole = " ".join(words_of(context)[0][chunk.words[candidate.start] : chunk.words[candidate.end] + 1])
    proposed = " ".join(chunk.tokens[candidate.start : candidate.end + 1]).replace(" ##", "").replace("##", "")
    normalized = " ".join("".join(letter for letter, _ in token) for token in tokenizer.basic(whole))
    at = normalized.find(proposed)
    letters = [place for place, character in enumerate(whole) if character != " "]
    if at < 0 or len(letters) != len(normalized.replace(" ", "")):
        return " ".join(words_of(context[chunk.spans[candidate.start][0] : chunk.spans[candidate.end][1]])[0])
    start = len(normalized[:at].replace(" ", ""))
    end = start + len(proposed.replace(" ", ""))
    return whole[letters[start] : letters[end - 1] + 1]
