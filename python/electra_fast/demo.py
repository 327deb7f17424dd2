"""The whole pipeline in a minute or two on a CPU, without downloads.

The text is the English that ships with Python: the language documentation and the docstrings of the
standard library, about two megabytes.
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
from rich.markup import escape
from rich.text import Text

from electra_fast.config.config import Config
from electra_fast.data.corpus import Corpus, Tokenizer
from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.data.prepare import prepare, train_vocab
from electra_fast.files.atomic_files import replace_file
from electra_fast.huggingface.export import export, load
from electra_fast.messages import printable
from electra_fast.model.compute import ComputeConfig, RngKey
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch
from electra_fast.training.diagnostics import auc_text
from electra_fast.training.evaluate import SEED, evaluate
from electra_fast.training.plots import plot_metrics
from electra_fast.training.pretrain import pretrain

VOCAB_SIZE = 1024
NUM_SENTENCES = 6
# Folders of the standard library to skip: tests, and tools with copies of other code.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "idle_test"}


def demo(out: Path) -> None:
    """Corpus → vocabulary → shards → training → evaluation → export → sample predictions.

    Writes `corpus.jsonl, vocab.txt, tokenizer.json, shards/, run/, export/, curves.png` to `out`, and
    resumes when run again after an interruption.
    """
    console = Console(file=sys.stderr)
    out.mkdir(parents=True, exist_ok=True)
    corpus, vocab, shards, run = out / "corpus.jsonl", out / "vocab.txt", out / "shards", out / "run"
    if not corpus.exists():
        _write_corpus(corpus)
    if not vocab.exists():
        train_vocab([str(corpus)], out=vocab, size=VOCAB_SIZE, lowercase=True)
    # The case is explicit: a kill may have left vocab.txt without its tokenizer.json.
    prepare([str(corpus)], vocab=vocab, out=shards, holdout=0.05, lowercase=True, strip_accents=False)
    pretrain(demo_config(), data=shards, out=run)
    metrics = evaluate(run, shards, sequence_length=demo_config().data.sequence_length)
    export(run, out / "export")
    plot_metrics(run, out / "curves.png")
    show_verdicts(console, run, shards, Tokenizer(vocab))
    replaced = float(metrics["replaced_fraction"] or 0)
    console.print(
        f"\nOn {metrics['tokens']:,} held-out tokens, of which the generator replaced {replaced:.1%}: "
        f"AUC [bold]{metrics['discriminator_auc']:.3f}[/bold] (0.5 is chance), "
        f'accuracy {metrics["discriminator_accuracy"]:.1%} (always "original": {1 - replaced:.1%}).\n'
        f"{auc_text(float(metrics['unigram_auc'] or 0))}: the same text for every model, so this one compares.\n"
        f"The model: {escape(printable(str(out / 'export')))} (AutoModel.from_pretrained). "
        f"The curves: {escape(printable(str(out / 'curves.png')))}.",
        highlight=False,
    )


def demo_config() -> Config:
    """The demo's run: `tiny` in the recipe `modern`, sized for a minute on two cores."""
    return Config.preset("tiny", "modern").replace({"train": {"steps": 1200}})


def documentation() -> Iterator[str]:
    """English text from the running Python: help topics, then the docstrings of each standard module as a document."""
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
    except (SyntaxError, ValueError):  # templates and intentionally invalid files
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text


def _write_corpus(path: Path) -> None:
    # Docstrings may contain lone surrogates, which UTF-8 cannot encode.
    documents = (document.encode("utf-8", "replace").decode() for document in documentation())
    replace_file(path, "".join(json.dumps({"text": document}) + "\n" for document in documents))


@torch.no_grad()
def show_verdicts(console: Console, run: Path, shards: Path, tokenizer: Tokenizer) -> None:
    """Prints validation rows as the generator corrupted them, words colored by the discriminator's prediction."""
    model = load(run)
    config = model.config
    validation = Corpus(shards).holdout
    loader = BatchLoader.from_config(config, corpus=validation, batch_size=NUM_SENTENCES, seed=SEED, epochs=1)
    batch, objective = to_torch(next(loader)), objective_of(config)
    key, denominators = RngKey(torch.tensor([SEED, 0])), objective.loss_denominators(batch)
    output = objective.forward(model, MicroBatch(batch, ComputeConfig("sdpa", torch.float32), key, denominators))
    predictions = output.predictions
    assert predictions is not None
    shape = batch["input_ids"].shape
    original = batch["input_ids"].long().scatter(1, batch["masked_positions"].long(), batch["masked_ids"].long())
    console.print("\nHeld-out text as the generator corrupted it, and what the discriminator thinks of each word:")
    replaced_prob_T = predictions.logits_T.sigmoid()
    columns = (original, predictions.corrupted_ids_T, predictions.replaced_T, replaced_prob_T, batch["segment_ids"])
    for row in zip(*(column.view(shape).tolist() for column in columns), strict=True):
        console.print(_colored_row(tokenizer, *row))
    console.print(
        Text.assemble(
            ("called original", "green"), ", ", ("doubtful", "yellow"), ", ", ("called replaced", "bold red"),
            "; ", ("underlined", "underline"), ": really replaced, with the original word in brackets",
        )
    )  # fmt: skip


def _colored_row(
    tokenizer: Tokenizer,
    original: list[int],
    corrupted: list[int],
    replaced: list[bool],
    probability: list[float],
    segments: list[int],
) -> Text:
    """One row with its pieces joined into words; a word's probability is the maximum over its pieces."""
    special = set(tokenizer.special_tokens.values())
    words: list[dict[str, str | float | bool]] = []
    for i, token_id in enumerate(corrupted):
        if not segments[i] or original[i] in special:
            continue
        if not words and tokenizer.id_to_token(original[i]).startswith("##"):
            continue  # the row starts inside a word
        piece, original_piece = tokenizer.id_to_token(token_id), tokenizer.id_to_token(original[i])
        if original_piece.startswith("##"):
            word = words[-1]
            word["text"] = str(word["text"]) + piece.removeprefix("##")
            word["original"] = str(word["original"]) + original_piece.removeprefix("##")
            word["replaced"] = bool(word["replaced"]) or replaced[i]
            word["probability"] = max(float(word["probability"]), probability[i])
        else:
            words.append(
                {"text": piece, "original": original_piece, "replaced": replaced[i], "probability": probability[i]}
            )
    line = Text("  ")
    for word in words:
        probability_replaced = float(word["probability"])
        color = "bold red" if probability_replaced > 0.5 else "yellow" if probability_replaced > 0.25 else "green"
        line.append(str(word["text"]), style=f"{color} underline" if word["replaced"] else color)
        line.append(f" [{word['original']}] " if word["replaced"] else " ", style="dim")
    return line
