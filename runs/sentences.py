"""Writes sentences from texts, one per line, up to a number of words.

    python sentences.py NUM_WORDS FILE... > OUT

A FILE is .txt (one document, with blank lines between paragraphs), or .jsonl, .jsonl.zst or .parquet with the column
`text`. Sentences of one or two words are dropped. The same fraction is taken from the middle of each document, so that
every document contributes. Words are separated by spaces, as in the BabyLM challenge's count.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

END = re.compile(r"[.!?][\"”’')\]]*(?=\s+[\"“‘(\[]?[A-Z0-9]|$)")
# A period after these does not end a sentence.
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
    """Yields the sentences of a document, and the rest of each paragraph after its last sentence."""
    for paragraph in re.split(r"\n\s*\n", document):
        text = " ".join(paragraph.split())
        start = 0
        ends = [end.end() for end in END.finditer(text)]
        for end in (*ends, len(text)):
            if not ABBREVIATION.search(text[start:end]):
                if len(text[start:end].split()) > 2:
                    yield text[start:end].strip()
                start = end


def main() -> None:
    """Writes the sentences to standard output."""
    num_words = int(sys.argv[1])
    texts = [list(sentences(document)) for name in sys.argv[2:] for document in documents(Path(name))]
    total = sum(len(sentence.split()) for text in texts for sentence in text)
    fraction = min(1, num_words / total)
    taken = 0
    for text in texts:
        first = round(len(text) * (1 - fraction) / 2)
        for sentence in text[first : first + round(len(text) * fraction)]:
            if (taken := taken + len(sentence.split())) <= num_words:
                print(sentence)
    print(f"{min(taken, num_words):,} words of {total:,} in sentences", file=sys.stderr)


if __name__ == "__main__":
    main()
