"""The whole way in about two minutes on a CPU, with nothing downloaded.

The text is English that every Python carries: the language's own documentation and the docstrings
of its standard library, about two megabytes.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from electra_fast import electra
from electra_fast.config import Config
from electra_fast.corpus import Tokenizer
from electra_fast.curves import draw_curves
from electra_fast.data import BatchLoader, to_torch
from electra_fast.electra import Backend, RngKey
from electra_fast.evaluate import SEED, evaluate, held_out_folder
from electra_fast.export import export, load
from electra_fast.prepare import prepare, train_vocab
from electra_fast.pretrain import pretrain

VOCAB_SIZE = 1024
NUM_SENTENCES = 6
# Folders of the standard library that are no English: tests, and tools that carry their own copies.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "idle_test"}


def demo(out: Path) -> None:
    """Corpus → vocabulary → shards → training → evaluation → export → a look at what it learnt.

    Leaves `corpus.jsonl, vocab.txt, tokenizer.json, shards/, run/, export/, curves.png` in `out`. Run
    again, it goes on where it was stopped.
    """
    console = Console(file=sys.stderr)
    out.mkdir(parents=True, exist_ok=True)
    corpus, vocab, shards, run = out / "corpus.jsonl", out / "vocab.txt", out / "shards", out / "run"
    if not corpus.exists():
        _write_corpus(corpus)
    if not vocab.exists():
        train_vocab([str(corpus)], out=vocab, size=VOCAB_SIZE, lowercase=True)
    # `lowercase` explicitly: a demo that was killed may have left vocab.txt without its tokenizer.json.
    prepare([str(corpus)], vocab=vocab, out=shards, holdout=0.05, lowercase=True)
    pretrain(demo_config(), data=shards, out=run)
    figures = evaluate(run, shards)
    export(run, out / "export")
    draw_curves(run, out / "curves.png")
    show_verdicts(console, run, shards, Tokenizer(vocab))
    replaced = float(figures["replaced_fraction"] or 0)
    console.print(
        f"\nOn {figures['tokens']:,} held-out tokens, of which the generator replaced {replaced:.1%}: "
        f"AUC [bold]{figures['discriminator_auc']:.3f}[/bold] (0.5 is chance), "
        f'accuracy {figures["discriminator_accuracy"]:.1%} (always "original": {1 - replaced:.1%}).\n'
        f"The model: {out / 'export'} (AutoModel.from_pretrained). The curves: {out / 'curves.png'}.",
        highlight=False,
    )


def demo_config() -> Config:
    """The demo's run: `tiny` in the recipe `modern`, sized for two minutes on two cores."""
    return Config.preset("tiny", "modern")


def documentation() -> Iterator[str]:
    """The running Python's English: help topics, then each standard module's docstrings as a document."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(library).parts):
            text = "\n\n".join(_docstrings(path))
            if text:
                yield text


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates and deliberately broken files
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text


def _write_corpus(path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for document in documentation():
            # Docstrings may hold lone surrogates, which no UTF-8 file can.
            file.write(json.dumps({"text": document.encode("utf-8", "replace").decode()}) + "\n")
    temporary.replace(path)


@torch.no_grad()
def show_verdicts(console: Console, run: Path, shards: Path, tokenizer: Tokenizer) -> None:
    """Prints held-out rows as the generator left them, each word coloured by the discriminator's verdict."""
    model = load(run)
    config = model.config
    loader = BatchLoader(
        str(held_out_folder(shards)),
        sequence_length=config.data.sequence_length,
        batch_size=NUM_SENTENCES,
        seed=SEED,
        masking=config.data.masking,
        mask_prob=config.data.mask_prob,
        packing=config.data.packing,
        epochs=1,
    )
    batch = to_torch(next(loader))
    rng_key = RngKey(torch.tensor([SEED, 0]))
    output = electra.forward(model, batch, Backend("sdpa", torch.float32), rng_key, electra.count(batch))
    assert output.corrupted_ids_T is not None and output.replaced_T is not None and output.logits_T is not None
    shape = batch["input_ids"].shape
    original = batch["input_ids"].long().scatter(1, batch["masked_positions"].long(), batch["masked_ids"].long())
    console.print("\nHeld-out text as the generator corrupted it, and what the discriminator thinks of each word:")
    columns = (original, output.corrupted_ids_T, output.replaced_T, output.logits_T.sigmoid(), batch["segment_ids"])
    for row in zip(*(column.view(shape).tolist() for column in columns), strict=True):
        console.print(_verdict_line(tokenizer, *row))
    console.print(
        Text.assemble(
            ("called original", "green"), ", ", ("doubtful", "yellow"), ", ", ("called replaced", "bold red"),
            "; ", ("underlined", "underline"), ": really replaced, with the original word in brackets",
        )
    )  # fmt: skip


def _verdict_line(
    tokenizer: Tokenizer,
    original: list[int],
    corrupted: list[int],
    replaced: list[bool],
    probability: list[float],
    segments: list[int],
) -> Text:
    """One row: its word pieces joined to words, a word as suspect as its most suspect piece."""
    special = set(tokenizer.special_tokens.values())
    words: list[dict[str, str | float | bool]] = []
    for i, token_id in enumerate(corrupted):
        if not segments[i] or original[i] in special:
            continue
        if not words and tokenizer.id_to_token(original[i]).startswith("##"):
            continue  # the row begins inside a word
        piece, was = tokenizer.id_to_token(token_id), tokenizer.id_to_token(original[i])
        if was.startswith("##"):
            word = words[-1]
            word["text"] = str(word["text"]) + piece.removeprefix("##")
            word["was"] = str(word["was"]) + was.removeprefix("##")
            word["replaced"] = bool(word["replaced"]) or replaced[i]
            word["probability"] = max(float(word["probability"]), probability[i])
        else:
            words.append({"text": piece, "was": was, "replaced": replaced[i], "probability": probability[i]})
    line = Text("  ")
    for word in words:
        suspicion = float(word["probability"])
        colour = "bold red" if suspicion > 0.5 else "yellow" if suspicion > 0.25 else "green"
        line.append(str(word["text"]), style=f"{colour} underline" if word["replaced"] else colour)
        line.append(f" [{word['was']}] " if word["replaced"] else " ", style="dim")
    return line
