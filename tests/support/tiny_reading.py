"""Small files of questions and tagged sentences, in the formats of SQuAD and CoNLL."""

import json
import random
from pathlib import Path

from tiny_task import QUICK, WORDS

# Contexts become several chunks.
SETTINGS = QUICK | {"finetune.sequence_length": "48", "finetune.max_query_length": "16", "finetune.doc_stride": "12"}
# First and second word of a name.
NAMES = {"PER": ["object", "class"], "LOC": ["module", "file"]}


def contexts(count, seed=0, words=(10, 60)):
    """Yields sentences of words with some commas."""
    rng = random.Random(seed)
    for _ in range(count):
        chosen = [word + "," * (rng.random() < 0.1) for word in rng.choices(WORDS, k=rng.randint(*words))]
        yield " ".join(chosen).capitalize() + "."


def articles(count, seed=0, unanswerable=0.0):
    """Yields articles in SQuAD's format, with two questions per paragraph. Answers are one to three words."""
    rng = random.Random(seed)
    for number, context in enumerate(contexts(count, seed)):
        questions = []
        for part in range(2):
            words = context.split()
            first = rng.randrange(len(words) - 3)
            text = " ".join(words[first : first + rng.randint(1, 3)]).strip(",.")
            start = len(" ".join(words[:first])) + (first > 0)
            question = {"id": f"{seed}-{number}-{part}", "question": f"Which {words[first - 1]} of {words[-1]}"}
            is_impossible = rng.random() < unanswerable
            question["answers"] = [] if is_impossible else [{"text": text, "answer_start": start}]
            if unanswerable:
                question["is_impossible"] = is_impossible
            questions.append(question)
        yield {"title": f"article {number}", "paragraphs": [{"context": context, "qas": questions}]}


def write_squad(folder: Path, version=1, train=12, dev=6) -> Path:
    """Writes train-vX.json and dev-vX.json."""
    folder.mkdir(parents=True, exist_ok=True)
    name = {1: "1.1", 2: "v2.0"}[version]
    for seed, (split, count) in enumerate({"train": train, "dev": dev}.items()):
        table = {"version": name, "data": list(articles(count, seed, 0.4 if version == 2 else 0.0))}
        (folder / f"{split}-v{name.removeprefix('v')}.json").write_text(json.dumps(table))
    return folder


def tagged_sentences(count, seed=0, words=(3, 20)):
    """Yields words with IOB2 tags: some are names of one or two words, and each name is followed by another word."""
    rng = random.Random(seed)
    for _ in range(count):
        tokens = []
        tags = []
        for _ in range(rng.randint(*words)):
            if (not tags or tags[-1] == "O") and rng.random() < 0.3:
                kind = rng.choice(list(NAMES))
                size = rng.randint(1, 2)
                tokens += NAMES[kind][:size]
                tags += [f"B-{kind}"] + [f"I-{kind}"] * (size - 1)
            else:
                tokens.append(rng.choice(["the", "of", "value,", "string's", "returns", "line"]))
                tags.append("O")
        yield tokens, tags


def write_conll(folder: Path, train=24, dev=10, words=(3, 20)) -> Path:
    """Writes train.conll and dev.conll with two columns."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate({"train": train, "dev": dev}.items()):
        blocks = (
            "".join(f"{token}\t{tag}\n" for token, tag in zip(tokens, tags, strict=True))
            for tokens, tags in tagged_sentences(count, seed, words)
        )
        (folder / f"{split}.conll").write_text("\n".join(blocks))
    return folder


def flags(settings):
    """Returns configuration keys as command-line arguments."""
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def questions_of(path):
    """Returns (id, question, context) for each question of a SQuAD file."""
    return [
        (question["id"], question["question"], paragraph["context"])
        for article in json.loads(path.read_text())["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]
