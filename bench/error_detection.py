"""Detection of errors that a discriminator was never trained on: in letters, in words, in grammar.

    python bench/error_detection.py --model SOURCE --text FILE... [--sentences 2000] [--seed 0] [--json OUT.JSON]

Takes sentences of the text at random and corrupts one word in twenty, by script and in one way at a time; then judges
every word. Reports for each way the precision and recall at the threshold, average precision and the area under the ROC
curve. Chance is the share of corrupted words for precision and average precision, and an area of 0.5. But corrupted
words have more pieces, and a word's probability is that any of them is replaced: `by pieces` is the area that merely
counting them gives. `unchanged` is the text as it is, where all that is marked is wrong. Words are runs of letters and
digits, with apostrophes inside; a word's probability is the highest of what the detector finds in it. The text must not
be what the model was trained on. Without `--model` it is a dry run of a random one.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score

import electra_fast as ef
from electra_fast.demo import documentation
from electra_fast.finetuning.error_detection import ErrorDetector, load_error_detector
from electra_fast.model.compute import choose_device

SHARE = 0.05  # of the words that are corrupted
LENGTHS = range(5, 61)  # of a sentence, in words
NUM_PREDICTED = 512  # sentences at once
COLUMNS = ("words", "errors", "chance", "marked", "precision", "recall", "average precision", "AUC", "by pieces")
CONFUSED = (
    ("its", "it's"),
    ("your", "you're"),
    ("their", "there", "they're"),
    ("whose", "who's"),
    ("to", "too", "two"),
    ("then", "than"),
    ("of", "off"),
    ("were", "where"),
    ("lose", "loose"),
    ("affect", "effect"),
    ("is", "are"),
    ("was", "were"),
    ("has", "have"),
    ("a", "an"),
)
WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
# Between a mark that ends a sentence and what begins the next.
BOUNDARY = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"“])|\n+")

Corruption = Callable[[str, random.Random, Sequence[str]], str | None]
"""A word, draws and all words of the text → what takes its place; None where the word cannot be corrupted so."""


def swapped_letters(word: str, draws: random.Random, words: Sequence[str]) -> str | None:
    """Two neighboring letters in each other's place, the first letter aside."""
    places = [at for at in range(1, len(word) - 1) if word[at] != word[at + 1] and word[at : at + 2].isalpha()]
    if not places:
        return None
    at = draws.choice(places)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def dropped_letter(word: str, draws: random.Random, words: Sequence[str]) -> str | None:
    """A letter missing, not the first, from words of four letters or more."""
    if len(word) < 4 or not word.isalpha():
        return None
    at = draws.randrange(1, len(word))
    return word[:at] + word[at + 1 :]


def other_word(word: str, draws: random.Random, words: Sequence[str]) -> str | None:
    """Another word of the text, drawn by how often it occurs."""
    found = next(other for other in iter(lambda: draws.choice(words), None) if other.lower() != word.lower())
    return found[:1].upper() + found[1:] if word[:1].isupper() else found[:1].lower() + found[1:]


def doubled_word(word: str, draws: random.Random, words: Sequence[str]) -> str | None:
    """The word twice; the second is the error."""
    return f"{word} {word.lower()}"


def confused_word(word: str, draws: random.Random, words: Sequence[str]) -> str | None:
    """Another of the words that it is confused with, such as its and it's."""
    others = [o for group in CONFUSED if word.lower() in group for o in group if o != word.lower()]
    if not others:
        return None
    found = draws.choice(others)
    return found.capitalize() if word[:1].isupper() else found


CORRUPTIONS: dict[str, Corruption] = {
    "swapped letters": swapped_letters,
    "dropped letter": dropped_letter,
    "other word": other_word,
    "doubled word": doubled_word,
    "confused word": confused_word,
}


@dataclass(frozen=True)
class Corrupted:
    """A sentence, and the first and past-the-last characters of its errors."""

    text: str
    errors: tuple[tuple[int, int], ...]


def corrupt(text: str, corruption: Corruption, draws: random.Random, words: Sequence[str], share: float) -> Corrupted:
    """Corrupts each word with the probability `share`, if the corruption is for such a word."""
    parts, errors, length, end = [], [], 0, 0
    for match in WORD.finditer(text):
        changed = corruption(match[0], draws, words) if draws.random() < share else None
        if changed is None or changed == match[0]:
            continue
        kept = text[end : match.start()]
        parts += [kept, changed]
        length += len(kept) + len(changed)
        # Of a doubled word, the second.
        errors.append((length - len(changed.rpartition(" ")[2]), length))
        end = match.end()
    return Corrupted("".join([*parts, text[end:]]), tuple(errors))


@dataclass(frozen=True)
class Judged:
    """All words of some sentences: probabilities, whether each is an error, and its number of pieces."""

    probabilities: NDArray[np.float64]
    labels: NDArray[np.bool_]
    num_pieces: NDArray[np.int64]


def judge(detector: ErrorDetector, sentences: Sequence[Corrupted]) -> Judged:
    """Asks the detector about every word."""
    words: list[tuple[float, bool, int]] = []
    for start in range(0, len(sentences), NUM_PREDICTED):
        chunk = sentences[start : start + NUM_PREDICTED]
        texts = [sentence.text for sentence in chunk]
        pieces = detector.tokenizer.encode_with_offsets(texts)
        for sentence, answer, own in zip(chunk, detector.predict(texts), pieces, strict=True):
            starts, ends = own.offsets.T
            for match in WORD.finditer(sentence.text):
                first, end = match.span()
                inside = [w["probability"] for w in answer["words"] if w["start"] < end and w["end"] > first]
                num_pieces = int(((starts < end) & (ends > first)).sum())
                words.append((max(inside, default=0.0), match.span() in sentence.errors, num_pieces))
    probabilities, labels, counts = zip(*words, strict=True)
    return Judged(np.array(probabilities), np.array(labels), np.array(counts))


def scores(judged: Judged, threshold: float) -> dict[str, float | None]:
    """Precision and recall at a threshold, average precision, areas under ROC curves; None without any error."""
    labels, marked = judged.labels, judged.probabilities >= threshold
    hits, has_both = int((marked & labels).sum()), labels.any() and not labels.all()
    return {
        "words": len(labels),
        "errors": int(labels.sum()),
        "chance": float(labels.mean()),
        "marked": float(marked.mean()),
        "precision": hits / int(marked.sum()) if marked.any() else None,
        "recall": hits / int(labels.sum()) if labels.any() else None,
        "average precision": float(average_precision_score(labels, judged.probabilities)) if has_both else None,
        "AUC": float(roc_auc_score(labels, judged.probabilities)) if has_both else None,
        "by pieces": float(roc_auc_score(labels, judged.num_pieces)) if has_both else None,
    }


def documents_of(paths: Sequence[Path]) -> Iterator[str]:
    """The field "text" of .jsonl files, or lines of any others; compressed by their extension."""
    for path in paths:
        with pyarrow.input_stream(str(path), compression="detect") as stream:
            for line in io.TextIOWrapper(stream, encoding="utf-8"):
                yield (json.loads(line)["text"] or "") if ".jsonl" in path.suffixes else line


def sample_sentences(documents: Iterator[str], count: int, draws: random.Random) -> list[str]:
    """Some sentences of 5 to 60 words, each equally likely."""
    sentences = (sentence.strip() for document in documents for sentence in BOUNDARY.split(document))
    sample: list[str] = []
    for number, sentence in enumerate(each for each in sentences if len(WORD.findall(each)) in LENGTHS):
        place = draws.randrange(number + 1)
        if number < count:
            sample.append(sentence)
        elif place < count:
            sample[place] = sentence
    return sample


def random_detector(folder: Path, documents: Sequence[str]) -> ErrorDetector:
    """An untrained model of the size `tiny` with a vocabulary of these documents."""
    ef.train_vocab(iter(documents), out=folder / "vocab.txt", size=1_000, progress=False)
    tokenizer = ef.Tokenizer(folder / "vocab.txt")
    config = ef.Config.preset("tiny", "google").override({"model.vocab_size": str(tokenizer.vocab_size)})
    model = ef.Electra(config)
    return ErrorDetector(model, tokenizer, choose_device(), sequence_length=config.data.sequence_length)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a run, a checkpoint, an export or a discriminator's folder")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help=".jsonl or lines (Python documentation)")
    parser.add_argument("--sentences", type=int, default=2_000)
    parser.add_argument("--share", type=float, default=SHARE, help="of the words that are corrupted")
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    return parser.parse_args()


def measure(
    detector: ErrorDetector, sentences: Sequence[str], share: float, draws: random.Random
) -> Iterator[tuple[str, dict[str, float | None]]]:
    """The scores for the text as it is, then for each way of corrupting it."""
    words = [word for sentence in sentences for word in WORD.findall(sentence)]
    yield "unchanged", scores(judge(detector, [Corrupted(each, ()) for each in sentences]), detector.threshold)
    for name, corruption in CORRUPTIONS.items():
        corrupted = [corrupt(sentence, corruption, draws, words, share) for sentence in sentences]
        yield name, scores(judge(detector, corrupted), detector.threshold)


def row(name: str, cells: Sequence[str]) -> str:
    """A line of the table."""
    widths = (max(8, len(column)) for column in COLUMNS)
    return f"{name:<16}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def cell(value: float | None) -> str:
    """A count, or a rate with four decimals."""
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def main() -> None:
    """A line per way of corrupting."""
    options = arguments()
    draws, own_text = random.Random(options.seed), list(itertools.islice(documentation(), 60))
    if options.model is None:
        print("dry run: no --model, so a random one, which knows nothing")
        options.sentences = min(options.sentences, 100)
        with tempfile.TemporaryDirectory() as folder:
            detector = random_detector(Path(folder), own_text)
    else:
        detector = load_error_detector(options.model, options.threshold)
    documents = documents_of(options.text) if options.text else iter(own_text)
    sentences = sample_sentences(documents, options.sentences, draws)
    print(f"{len(sentences):,} sentences, seed {options.seed}, threshold {detector.threshold}, share {options.share}")
    print(row("corruption", COLUMNS))
    results = {}
    for name, found in measure(detector, sentences, options.share, draws):
        results[name] = found
        print(row(name, [cell(found[column]) for column in COLUMNS]), flush=True)
    if options.json:
        record = vars(options) | {"results": results}
        options.json.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
