"""Live progress lines in terminals of several widths, and complete records as plain lines."""

import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from electra_fast.finetuning.finetune import FinetuneResults
from electra_fast.progress import ReadingProgress, TrainingProgress
from electra_fast.results import console_lines

RECORD = {
    "step": 500_000,
    "loss": 12.345,
    "generator_loss": 7.123,
    "discriminator_loss": 0.1234,
    "discriminator_recall": 0.123,
    "tokens_per_second": 123_456.0,
    "mfu": 0.451,
}


def terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> io.StringIO:
    """Captures console output on standard error."""
    shown = io.StringIO()

    def console(**options: object) -> Console:
        return Console(
            file=shown, width=width, force_terminal=True, color_system=None, quiet=bool(options.get("quiet"))
        )

    monkeypatch.setattr("electra_fast.progress.Console", console)
    return shown


def last_line(shown: io.StringIO) -> str:
    return shown.getvalue().replace("\x1b[2K", "").split("\r")[-1].splitlines()[0]


@pytest.mark.parametrize(
    ("width", "figures"),
    [
        (60, "500000/1000000 loss 12.345 AUC 0.912 "),
        (80, "500000/1000000 loss 12.345 AUC 0.912 123k tok/s MFU 45.1% "),
        (130, "500000/1000000 loss 12.345 AUC 0.912 123k tok/s MFU 45.1% gen 7.123 disc 0.1234 recall 12.3% "),
    ],
)
def test_narrow_terminal_keeps_most_important_parts(monkeypatch, width, figures):
    shown = terminal(monkeypatch, width)
    with TrainingProgress(0, 1_000_000) as progress:
        progress.advance(500_000)
        progress.report_evaluation({"step": 400_000, "discriminator_auc": 0.9123, "unigram_auc": 0.8})
        progress.report(RECORD)
    line = last_line(shown)
    assert len(line) <= width and line.count("━") >= 3, line  # the completed half
    assert " ".join(line.split()).endswith((f" {figures}eta -:--:--", f" {figures}eta 0:00:00"))


def test_notebook_updates_one_line(monkeypatch):
    shown: list[str] = []
    display = SimpleNamespace(update=lambda content, raw: shown.append(content["text/plain"]))

    def new_display(content, raw, display_id):
        assert raw and display_id
        shown.append(content["text/plain"])
        return display

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=new_display))
    monkeypatch.setattr("electra_fast.progress.Console", lambda **_: Console(file=io.StringIO(), force_jupyter=True))
    with TrainingProgress(0, 1_000_000) as progress:
        progress.report(RECORD)
        monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace())  # a second line would fail
        progress.report(RECORD | {"step": 600_000})
    assert [line.split()[1] for line in shown] == ["500000/1000000", "600000/1000000"]


def test_reading_shows_bar_bytes_and_eta(monkeypatch):
    shown = terminal(monkeypatch, 60)
    with ReadingProgress("prepare", shown=True) as progress:
        progress.update(22_800_000, 45_600_000, 1_234_567, 98_765_432)
        progress._progress.refresh()
        line = last_line(shown)
    assert len(line) <= 60 and line.count("━") >= 3, line
    assert "22.8/45.6 MB" in line and "1,23" in line and "eta" in line


def test_step_without_reading_is_shown(monkeypatch, capsys):
    monkeypatch.setattr("electra_fast.progress.LINE_SECONDS", 0)
    with ReadingProgress("prepare", shown=True) as progress:
        progress.update(3_000_000, 6_000_000, 0, 0, "adding up counts")
        progress.update(0, 0, 0, 0, "writing the manifest")
    assert capsys.readouterr().err == "prepare: adding up counts, 50% of 6.0 MB\nprepare: writing the manifest\n"


def test_console_lines_are_plain_text_in_a_notebook(monkeypatch):
    """Jupyter's kernels set FORCE_COLOR, and rich displays there instead of writing to the file."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert list(console_lines(lambda console: console.print("[bold]a[/bold] b \nc"), 80)) == ["a b", "c"]
    result = {"metric": "f1", "median": 0.5, "min": 0.5, "max": 0.5, "runs": [{}], "seconds": 1}
    header, row = FinetuneResults({"[red]": result}).lines()
    assert header.split()[:2] == ["task", "metric"] and row.split()[:3] == ["[red]", "f1", "50.00"]
