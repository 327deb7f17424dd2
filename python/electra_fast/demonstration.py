"""The whole pipeline in 1 to 3 minutes on a CPU, without downloads.

The text is English that ships with Python: the language documentation and the docstrings of the standard library, about
two megabytes.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from electra_fast.config.config import AUTO, Config
from electra_fast.data.corpus import Corpus
from electra_fast.data.prepare import prepare, vocab
from electra_fast.files.atomic_files import replace_file
from electra_fast.huggingface.export import export
from electra_fast.messages import printable, say
from electra_fast.results import Result, console_lines
from electra_fast.training.diagnostics import auc_text
from electra_fast.training.evaluate import Word, evaluate, verdicts
from electra_fast.training.plots import AMBER, GREEN, GREY, ORANGE, plot_curves
from electra_fast.training.pretrain import pretrain

VOCAB_SIZE = 1024
NUM_DRAWN = 3
COLUMNS = 120  # characters per line in the picture
# Folders of the standard library to skip: tests, and copies of other code.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "idle_test"}


@dataclass(frozen=True, eq=False, repr=False)
class DemoResult(Result):
    """The result of `demo`: the exported model, a picture, metrics, and text with a prediction for each word."""

    export: Path
    picture: Path
    metrics: Mapping[str, Any]
    rows: Sequence[Sequence[Word]]

    def lines(self) -> Iterator[str]:
        """Returns the lines of the command's output, without colors."""
        return console_lines(self.write, COLUMNS)

    def write(self, console: Console) -> None:
        """Prints the result, in colors if the console supports them."""
        show_verdicts(console, self.rows)
        metrics = self.metrics
        replaced = float(self.metrics["replaced_fraction"] or 0)
        console.print(
            f"\nThe generator replaced {replaced:.1%} of {metrics['tokens']:,} validation tokens. Discriminator: "
            f"AUC [bold]{metrics['discriminator_auc']:.3f}[/bold] (0.5 is chance), "
            f'accuracy {metrics["discriminator_accuracy"]:.1%} (always "original": {1 - replaced:.1%}).\n'
            f"{auc_text(float(metrics['unigram_auc'] or 0))}: on the same text for every model, so it is comparable.\n"
            f"Model: {escape(printable(str(self.export)))} (AutoModel.from_pretrained). "
            f"Picture: {escape(printable(str(self.picture)))}.",
            highlight=False,
        )


def demo(*, out: str | Path, device: str = AUTO) -> DemoResult:
    """Runs the whole pipeline from text to a trained, exported model, in 1 to 3 minutes on a CPU, without downloads.

    Writes `corpus.jsonl, vocab.txt, tokenizer.json, shards/, run/, export/, demo.png` to `out`. After an interruption,
    the same call resumes.

    Args:
        out: Output folder.
        device: The device to train and evaluate on; see `pretrain`.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    corpus = out / "corpus.jsonl"
    words = out / "vocab.txt"
    shards = out / "shards"
    run = out / "run"
    if not corpus.exists():
        _write_corpus(corpus)
    if not words.exists():
        for line in vocab([str(corpus)], out=words, size=VOCAB_SIZE).lines():
            say(line)
    # The casing is explicit, because a kill may have left vocab.txt without tokenizer.json.
    report = prepare([str(corpus)], vocab=words, out=shards, holdout=0.05, cased=False, strip_accents=False)
    for line in report.lines():
        say(line)
    pretrain(shards, config=demo_config(), out=run, device=device)
    metrics = evaluate(run, shards, sequence_length=demo_config().data.sequence_length, device=device)
    export(run, out=out / "export")
    result = DemoResult(out / "export", out / "demo.png", metrics, verdicts(run, Corpus(shards)))
    draw(result.picture, result.rows[:NUM_DRAWN], run)
    return result


def demo_config() -> Config:
    """Returns the demo's configuration: a minute of `tiny` on two cores, with rows that fit on a screen."""
    return Config.preset("tiny", "modern").override(sequence_length=32, batch_size=64, steps=1200)


def documentation() -> Iterator[str]:
    """Yields English text of the running Python: help topics, then the docstrings of each standard module."""
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


def show_verdicts(console: Console, rows: Sequence[Sequence[Word]]) -> None:
    console.print("\nValidation text as the generator corrupted it, with the discriminator's prediction for each word:")
    styles = {"original": "green", "doubtful": "yellow", "replaced": "bold red"}
    for words in rows:
        line = Text("  ")
        for word in words:
            style = styles[word.verdict]
            line.append(word.text, style=f"{style} underline" if word.is_replaced else style)
            line.append(f" [{word.original}] " if word.is_replaced else " ", style="dim")
        console.print(line)
    console.print(
        Text.assemble(
            ("called original", "green"), ", ", ("doubtful", "yellow"), ", ", ("called replaced", "bold red"),
            "; ", ("underlined", "underline"), ": really replaced, followed by the original word in brackets",
        )
    )  # fmt: skip


def draw(picture: Path, rows: Sequence[Sequence[Word]], run: Path) -> None:
    """Draws words in the colors of their predictions above the curves of the run, as a PNG file."""
    figure = Figure(figsize=(9.4, 4.6), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=(7, 9))
    top = figure.add_subfigure(grid[0])
    bottom = figure.add_subfigure(grid[1])
    plot_curves(bottom, run)
    legend = [
        Word("called original", "", False, 0.0),
        Word("doubtful", "", False, 0.4),
        Word("called replaced", "", False, 1.0),
        Word("replaced", "the original word", True, 1.0),
    ]
    colors = {"original": GREEN, "doubtful": AMBER, "replaced": ORANGE}
    line = 0.0
    for words in (legend, *rows):
        line = line + 1.3
        column = 0
        for word in words:
            texts = [(word.text, colors[word.verdict])]
            texts += [(f"[{word.original}]", GREY)] if word.is_replaced else []
            for text, color in texts:
                if column + len(text) > COLUMNS:
                    line = line + 1
                    column = 0
                font = FontProperties(family="DejaVu Sans Mono", size=9, weight="bold" if color == ORANGE else "normal")
                x = 0.02 + column * 0.96 / COLUMNS
                y = 1.05 - 0.11 * line
                top.text(x, y, text, color=color, fontproperties=font, parse_math=False)
                column += len(text) + 1
    figure.savefig(picture, dpi=110)
