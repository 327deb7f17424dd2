"""Tokenizer throughput on one core, compared with other tokenizers in the same run.

    python bench/tokenize_throughput.py [TEXT] [--vocab VOCAB.TXT] [--runs 5] [--megabytes 4] [--json OUT.JSON]

Ids are first compared with Hugging Face `tokenizers`, using tokenizers that are not timed. Then each run
uses text that no timed tokenizer has seen; all tokenizers take turns on it, ours last in one run and
first in the next. *cold*: a tokenizer just opened, like all of the peers; *fresh*: one that has seen other
text; *warm*: the same text again. Ours returns numpy arrays, Hugging Face's `Encoding` objects
(`encode_batch_fast`), whose ids would cost extra to extract. Reports median and range of million tokens
per second of wall-clock time and of CPU time, which is fairer on a busy machine. Without TEXT the text is
synthetic; without --vocab a vocabulary is trained on other text.
"""

import argparse
import gc
import importlib.util
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Set before any library starts threads.
os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")

from electra_fast.data.corpus import Tokenizer  # noqa: E402
from electra_fast.data.prepare import train_vocab  # noqa: E402

Encode = Callable[[list[str]], Any]
Open = Callable[[], Encode]
DOCUMENT = 4096


def main() -> None:
    """Compares ids, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", type=Path, help="a file of UTF-8 text")
    parser.add_argument("--vocab", type=Path, help="a vocab.txt")
    parser.add_argument("--cased", action="store_true", help="keep case and accents")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=4, help="text per run")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    arguments = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [core])
    size = int(arguments.megabytes * 1e6)
    with tempfile.TemporaryDirectory() as folder:
        vocab = arguments.vocab or trained_vocab(Path(folder) / "vocab.txt", lowercase=not arguments.cased)
        parts = parts_of(arguments.text, size, arguments.runs)
        results = measure(vocab, parts, lowercase=not arguments.cased)
    print(f"core {core}, {len(parts)} runs of {size / 1e6:g} MB, {vocab.name}, lowercase {not arguments.cased}")
    print_table(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure(vocab: Path, parts: list[list[str]], *, lowercase: bool) -> dict[str, dict[str, list[float]]]:
    """Rates of every tokenizer in every run."""
    open_ours = lambda: Tokenizer(vocab, lowercase=lowercase, strip_accents=lowercase)  # noqa: E731
    warmed_up = open_ours()
    warmed_up.encode_batch([synthetic_text(random.Random(-1), 100_000)])
    others = peers(vocab, lowercase=lowercase)
    counts = [same_ids(open_ours(), others, part) for part in parts]
    results: dict[str, dict[str, list[float]]] = {}
    for number, (part, tokens) in enumerate(zip(parts, counts, strict=True)):
        cold = open_ours()
        contenders: list[tuple[str, Encode]] = [("electra-fast, cold", cold.encode_batch)]
        contenders += [("electra-fast, fresh", warmed_up.encode_batch), ("electra-fast, warm", cold.encode_batch)]
        opened = [(name, open_peer()) for name, open_peer in others.items()]
        # Alternates which side goes first; "warm" comes after "cold" either way.
        for name, encode in contenders + opened if number % 2 else opened + contenders:
            seconds, processor, size = timed(encode, part)
            rates = results.setdefault(name, {"Mtok/s": [], "Mtok/cpu-s": [], "MB/cpu-s": []})
            rates["Mtok/s"].append(tokens / seconds / 1e6)
            rates["Mtok/cpu-s"].append(tokens / processor / 1e6)
            rates["MB/cpu-s"].append(size / processor / 1e6)
    return results


def timed(encode: Encode, part: list[str]) -> tuple[float, float, int]:
    """Wall-clock and CPU seconds, and bytes, of one pass."""
    size = sum(len(text.encode()) for text in part)
    gc.collect()
    processor, start = time.process_time(), time.perf_counter()
    result = encode(part)
    seconds = time.perf_counter() - start, time.process_time() - processor
    del result
    return *seconds, size


def same_ids(tokenizer: Tokenizer, others: dict[str, Open], part: list[str]) -> int:
    """Asserts that all tokenizers return the same ids for these texts; returns their number."""
    ours = [ids.tolist() for ids in tokenizer.encode_batch(part)]
    for name, open_peer in others.items():
        found = [list(getattr(item, "ids", item)) for item in open_peer()(part)]
        for text, our_ids, peer_ids in zip(part, ours, found, strict=True):
            assert our_ids == peer_ids, f"{name} differs on {text[:60]!r}"
    return sum(map(len, ours))


def peers(vocab: Path, *, lowercase: bool) -> dict[str, Open]:
    """The installed peers; each is reopened for every run, like ours."""
    known = {"tokenizers": hugging_face, "nanotoken": nanotoken}
    found = {name: way for name, way in known.items() if importlib.util.find_spec(name)}
    print("not installed:", ", ".join(known.keys() - found) or "nothing")
    return {f"{name} {version(name)}": partial(way, vocab, lowercase) for name, way in found.items()}


def hugging_face(vocab: Path, lowercase: bool) -> Encode:
    """`encode_batch_fast` of Hugging Face `tokenizers`, configured like BertTokenizerFast."""
    import tokenizers

    entries = {entry: number for number, entry in enumerate(vocab.read_text(encoding="utf-8").splitlines())}
    model = tokenizers.models.WordPiece(vocab=entries, unk_token="[UNK]", max_input_chars_per_word=100)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase, strip_accents=lowercase)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return lambda part: tokenizer.encode_batch_fast(part, add_special_tokens=False)


def nanotoken(vocab: Path, lowercase: bool) -> Encode:
    """`encode_batch` of nanotoken with an empty cache."""
    import nanotoken

    tokenizer = nanotoken.Tokenizer.from_vocab(vocab, lowercase=lowercase)
    tokenizer.backend.clear_cache()
    return lambda part: tokenizer.encode_batch(part, add_special_tokens=False, parallel=False)


def parts_of(path: Path | None, size: int, runs: int) -> list[list[str]]:
    """The text of each run, in documents of whole lines, 4 KB or more."""
    if path is None:
        return [documents(synthetic_text(random.Random(run), size)) for run in range(runs)]
    with path.open(encoding="utf-8", newline="\n") as file:
        texts = [file.read(size) for _ in range(runs)]
    if len(texts[-1]) < size // 2:
        raise SystemExit(f"{path} is shorter than {runs} runs of {size} characters: reduce --megabytes")
    return [documents(text) for text in texts]


def documents(text: str) -> list[str]:
    """Splits text at line ends."""
    found, start = [], 0
    while start < len(text):
        end = text.find("\n", start + DOCUMENT)
        end = len(text) if end < 0 else end
        found.append(text[start:end])
        start = end + 1
    return found


def synthetic_text(rng: random.Random, size: int) -> str:
    """Sentences of made-up words, some rare, with capitals, punctuation, numbers and accents."""
    syllables = [a + b + c for a in "bdfgklmnprstvw" for b in "aeiou" for c in ("", "n", "r", "s", "t")]
    common = ["".join(random.Random(n).choices(syllables, k=1 + n % 3)) for n in range(8_000)]
    pieces, length = [], 0
    while length < size:
        words = [common[min(int(rng.paretovariate(0.6)), 8_000) - 1] for _ in range(rng.randint(4, 25))]
        for at in range(len(words)):
            if rng.random() < 0.05:
                words[at] = rng.choice(
                    ["".join(rng.choices(syllables, k=4)), str(rng.randint(0, 2030)), "café", "naïve"]
                )
        sentence = f"{', '.join([' '.join(words[:6]), ' '.join(words[6:])])}".capitalize()
        pieces.append(sentence + rng.choice([". ", ". ", "? ", ".\n", " — "]))
        length += len(pieces[-1])
    return "".join(pieces)


def trained_vocab(path: Path, *, lowercase: bool) -> Path:
    """Trains a vocabulary on text that is not measured."""
    text = (synthetic_text(random.Random(-run), 1_000_000) for run in (2, 3))
    train_vocab(text, out=path, size=4_000, lowercase=lowercase, strip_accents=lowercase, progress=False)
    return path


def print_table(results: dict[str, dict[str, list[float]]]) -> None:
    """Median and range of each tokenizer."""
    columns = list(next(iter(results.values())))
    print("| tokenizer | " + " | ".join(columns) + " |\n" + "| --- " * (1 + len(columns)) + "|")
    for name, rates in results.items():
        print(f"| {name} | " + " | ".join(spread(rates[column]) for column in columns) + " |")


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    main()
