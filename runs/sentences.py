"""Writes sentences from texts, one per line, up to a number of words.

    python sentences.py NUM_WORDS FILE... > OUT

A FILE is .txt (one document, with blank lines between paragraphs), or .jsonl, .jsonl.zst or .parquet with the column
`text`. Sentences of one or two words are left out. The same share of each document is taken, from its middle, so that
the words come from all of them. Words are what spaces separate, as the BabyLM challenge counts them.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

END = re.compile(r"[.!?][\"”’')\]]*(?=\s+[\"“‘(\[]?[A-Z0-9]|$)")
# A full stop after these ends no sentence.
ABBREVIATION = re.compile(
    r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Prof|Rev|Hon|Gen|Col|Capt|Lt|Jr|Sr|vs|etc|No|Vol|cf|e\.g|i\.e)\.$"
)


def documents(path: Path) -> Iterator[str]:
    """Yields the documents of a file."""
    if path.suffix == ".parquet":
        yield from pq.read_table(path, columns=["text"])["text"].to_pylist()
        return
    with pa.input_stream(str(path), compression="detect") as file:
        content = file.read().decode()
    is_json = ".jsonl" in path.name
    yield from (json.loads(line)["text"] for line in content.split("\n") if line.strip()) if is_json else [content]


def sentences(document: str) -> Iterator[str]:
    """Yields the sentences of a document, and what follows the last one of each paragraph."""
    for paragraph in re.split(r"\n\s*\n", document):
        text, start = " ".join(paragraph.split()), 0
        ends = [end.end() for end in END.finditer(text)]
        for end in (*ends, len(text)):
            if not ABBREVIATION.search(text[start:end]):
                if len(text[start:end].split()) > 2:
                    yield text[start:end].strip()
                start = end


def main() -> None:
    """Writes the sentences to standard output."""
    num_words = int(sys.argv[1])
    found = [list(sentences(document)) for name in sys.argv[2:] for document in documents(Path(name))]
    total = sum(len(sentence.split()) for each in found for sentence in each)
    share, taken = min(1, num_words / total), 0
    for each in found:
        first = round(len(each) * (1 - share) / 2)
        for sentence in each[first : first + round(len(each) * share)]:
            if (taken := taken + len(sentence.split())) <= num_words:
                print(sentence)
    print(f"{min(taken, num_words):,} words of {total:,} in sentences", file=sys.stderr)


if __name__ == "__main__":
    main()
