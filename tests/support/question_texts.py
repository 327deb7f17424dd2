"""Generated questions with contexts in many scripts, and a vocabulary that covers only some of their characters."""

import random
import string
from pathlib import Path

from electra_fast.finetuning.task import Answer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = "the river north bank was born in of and to berlin cafe café köln koln who when where what which".split()
PARTS = ["un", "##bel", "##iev", "##able", "##s", "##ing", "re", "build", "18", "##95", "19", "##43", "##000", "日本"]
LETTERS = "東京タワーשלוםрека\u1100\u1161\u11a8\u1112\u11ab"
# The published code extracts wrong characters from a word with a letter in two cases or with two accents, and from
# words that together gain as many characters as they lose. No context has such words.
PLAIN = [
    *WORDS, "Berlin", "Köln,", "unbelievable", "rebuilding.", "(1895-1943).", "1,5-2.0", "banks'", "“born”", "re-build",
    "東京タワー", "日本x", "😀", "x😀y", "שלום", "مرحبا,", "река", "qqq☃", "(☃)", "☃-north", "a" * 101, "abcd" * 6,
    "[SEP]", "##able", "$10,000", "'s", "—", "...",
]  # fmt: skip
SHRINKING = [
    "cafe\u0301", "10\u00a0km", "ri\u200bver", "in\u00adter", "\u200b", "☃\u0301-bank", "\u0301\u0301", "\ufffd",
]  # fmt: skip
GROWING = ["각", "학교-in", "(각)", "北각"]


def write_vocab(folder: Path) -> Path:
    """Writes a `vocab.txt` for text in any case."""
    single = dict.fromkeys("".join(sorted(string.ascii_letters + string.digits + string.punctuation)) + LETTERS)
    entries = dict.fromkeys([*SPECIAL, *single, *(f"##{character}" for character in single), *WORDS, *PARTS])
    path = folder / "vocab.txt"
    path.write_text("\n".join(entries) + "\n", encoding="utf-8")
    return path


def questions(count: int, seed: int = 0) -> list[tuple[str, str, tuple[Answer, ...]]]:
    """Returns questions, contexts of up to 60 words, and answers at any position; every fourth has no answer."""
    rng = random.Random(seed)
    examples: list[tuple[str, str, tuple[Answer, ...]]] = []
    while len(examples) < count:
        context = text(rng, rng.randrange(1, 60), rng.choice([SHRINKING, GROWING]))
        for _ in range(rng.randrange(1, 4)):
            start = rng.randrange(len(context))
            answer = Answer(context[start : start + rng.randrange(1, 40)], start)
            examples.append((text(rng, rng.randrange(12), PLAIN), context, (answer,) if len(examples) % 4 else ()))
    return examples[:count]


def text(rng: random.Random, num_words: int, others: list[str]) -> str:
    """Returns words separated by whitespace of all kinds."""
    spaces = [" "] * 12 + ["  ", "\n", "\t", "\r\n", "\u202f", "\u202f "]
    words = [rng.choice(PLAIN if rng.random() < 0.9 else others) for _ in range(num_words)]
    return rng.choice(["", "", " "]) + "".join(word + rng.choice(spaces) for word in words) + "the"
