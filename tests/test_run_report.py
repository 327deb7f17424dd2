"""The page about runs is complete, self-contained and well-formed, and escapes text from files."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from tiny_run import tiny_config

import electra_fast as ef
from electra_fast.cli import main
from electra_fast.config.config import Config
from electra_fast.files.json_files import JsonLines, read_records
from electra_fast.training.loggers import Callbacks
from electra_fast.training.plots import draw_curves
from electra_fast.training.reporting import RunLog

NASTY = "</script><img src=x onerror=alert(1)>&\"'"
VOID = {"meta"}


class Page(HTMLParser):
    """Checks that elements are closed in order; collects their text."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.tags = []
        self.attributes = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def runs(tmp_path):
    """Two pre-training runs with three log lines each, and a fine-tuning with a report by class."""
    for name, rate, scale in (("fast", "2e-3", 1), ("slow", "1e-3", 2)):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        config = tiny_config().override(lr=rate, corpus=str(tmp_path / "gone"), vocab_size=99)
        (run / "config.toml").write_text(config.to_toml())
        with JsonLines(run / "metrics.jsonl", 0) as metrics:
            for step in (4, 8, 12):
                loss = float("nan") if step == 8 else scale / step
                metrics.write({"step": step, "loss": loss, "tokens": step * 100, "seconds": step * 0.5, "mfu": None})
        with JsonLines(run / "evaluations.jsonl", 0) as evaluations:
            evaluations.write({"step": 6, "discriminator_auc": 0.625, "rows": 4, "tokens": 64})
        with JsonLines(run / "warnings.jsonl", 0) as warnings:
            warnings.write({"step": 8, "message": NASTY})
        (run / "environment.jsonl").write_text(json.dumps({"device": "cpu", "torch": NASTY, "process": 1}) + '\n{"cut')
    tuned = tmp_path / "runs" / "tuned"
    seed = tuned / "cola" / "seed-0"
    seed.mkdir(parents=True)
    (tuned / "config.toml").write_text("[finetune]\nepochs = 3\n")
    result = {"metric": "matthews", "median": 0.5, "min": 0.25, "max": 0.75, "runs": [{"seed": 0, "matthews": 0.5}]}
    (tuned / "results.json").write_text(json.dumps({"cola": result}))
    (tuned / "cola" / "task.json").write_text(json.dumps({"finetune": {"epochs": 3, "class_weights": "auto"}}))
    (tuned / "cola" / "report.json").write_text(json.dumps({"classes": {NASTY: {"f1": 0.375, "support": 7}}}))
    (seed / "metrics.jsonl").write_text('{"step": 1, "loss": 0.7, "seconds": 1}\n{"step": 1, "matthews": 0.5}\n')
    return tmp_path / "runs"


def test_page(runs, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert main(["report", str(runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert "img" not in page.tags and page.text.count(NASTY) >= 4  # as text: warnings, environment, class
    assert not re.search(
        r"(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)",
        text.replace(NASTY, "").replace("img src=x", ""),
    )
    for shown in (
        "optimizer.learning_rate",
        "0.625",
        "0.375",
        "No samples",
        "matthews",
        "0.75",
        'cola: finetune.class_weights = "auto"',
    ):
        assert shown in page.text
    fast, slow, tuned = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    assert "cola: finetune.epochs" not in page.text  # equal to config.toml
    assert (fast["name"], slow["name"], tuned["name"]) == ("fast", "slow", "tuned: cola/seed-0")
    assert fast["train"]["y"]["loss"] == [0.25, None, round(1 / 12, 7)]
    assert fast["train"]["x"]["flops"][2] == 3 * fast["train"]["x"]["flops"][0] > 0
    at = fast["validation"]["x"]  # halfway between two lines
    assert (at["step"], at["tokens"], at["seconds"]) == ([6], [600], [3])
    assert fast["warnings"][0]["message"] == NASTY and fast["warnings"][0]["x"]["tokens"] == 800
    assert tuned["validation"] == {"x": {"step": [1]}, "y": {"matthews": [0.5]}}


def test_unfinished_finetuning(runs, tmp_path):
    (runs / "tuned/results.json").unlink()
    fold = runs / "tuned/cola/fold-0/seed-0"
    fold.mkdir(parents=True)
    shutil.copy(runs / "tuned/cola/seed-0/metrics.jsonl", fold)
    ef.report(runs / "tuned", out=tmp_path / "report.html")
    assert '"name": "tuned: cola/fold-0/seed-0"' in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_equal_configurations(runs, tmp_path):
    shutil.copy(runs / "fast/config.toml", runs / "slow/config.toml")
    ef.report([runs / "fast", runs / "slow"], out=tmp_path / "report.html")
    assert "Equal in all runs." in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_unusable_folders_are_refused(tmp_path):
    with pytest.raises(ef.InputError, match="contains no run"):
        ef.report(tmp_path, out=tmp_path / "report.html")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        ef.report(tmp_path / "none", out=tmp_path / "report.html")
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "results.json").write_text('{"cola": 1}')
    with pytest.raises(ef.InputError, match="cola has no list of runs"):
        ef.report(tmp_path, out=tmp_path / "report.html")
    with pytest.raises(ef.InputError, match="is a folder"):
        ef.report(tmp_path, out=tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "file, content",
    [
        ("fast/metrics.jsonl", '{"step": 4, "loss": 1, "seconds": 1}'),
        ("fast/metrics.jsonl", '{"step": 4, "tokens": NaN, "seconds": 1}'),
        ("fast/evaluations.jsonl", "[1]"),
        ("fast/config.toml", "[train\n"),
        ("tuned/results.json", '{"cola": {"runs": [1]}}'),
        ("tuned/cola/report.json", '{"classes": [1]}'),
        ("tuned/cola/task.json", "{"),
    ],
)
def test_damaged_file_is_reported(runs, tmp_path, file, content, capsys):
    (runs / file).write_text(content + "\n")
    assert main(["report", str(runs), "--out", str(tmp_path / "report.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{runs / file}: " in line


def test_samples(whole_run, tmp_path):
    ef.report(whole_run, out=tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('<p class="sample">') > 1 and re.search(r"<u>[^<]+</u><i> \[", page)
    assert (whole_run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_without_discriminator(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 9, "loss": 2, "encoder_loss": 2}\n')
    draw_curves(tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_warnings_after_resume(tmp_path):
    for first_step, steps in ((0, (0, 4, 8)), (4, (4, 8))):
        with RunLog(tmp_path, Config(), first_step, Callbacks(), is_silent=False) as log:
            for step in steps:
                log.warn(step, f"slow {first_step if step == 8 else ''}")
    warnings = [(record["step"], record["message"]) for record in read_records(tmp_path / "warnings.jsonl")]
    assert warnings == [(0, "slow "), (4, "slow "), (8, "slow 4")]


# Hovers, hides a run, zooms, and changes the axis, like a user with a mouse; writes the results to the title.
USE = """
const section = document.querySelector("section"), svg = section.querySelector("svg"), seen = [];
const [box, button, select, tip] = ["input", "button", "select", ".tip"].map((name) => section.querySelector(name));
svg.setPointerCapture = () => {};
const mouse = (type, share) => {
  const area = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent(type, { clientX: area.left + share * area.width, clientY: area.top + 30 }));
  return tip.textContent;
};
const points = () => [...svg.querySelectorAll("path")].map((path) => path.getAttribute("d").split("L").length);
seen.push(document.body.scrollWidth, mouse("pointermove", 0.99));
box.click(); seen.push(mouse("pointermove", 0.99)); box.click();
mouse("pointerdown", 0.5); mouse("pointermove", 0.6); mouse("pointerup", 1); seen.push(points(), button.disabled);
button.click(); seen.push(points(), button.disabled);
select.value = "tokens"; select.onchange(); seen.push(mouse("pointermove", 0.99));
document.title = JSON.stringify(seen);
"""

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [400, 1400])
def test_page_in_browser(runs, tmp_path, width):
    """Draws every chart, reports no error on the console, and fits the window."""
    out = tmp_path / "report.html"
    ef.report(runs, out=out)
    # A headless window is at least 500 pixels wide, so narrow the page instead.
    probe = f"document.documentElement.style.width = '{width}px'; {USE}"
    text = out.read_text(encoding="utf-8")
    out.write_text(text.replace("</body>", f"<script>{probe} console.log('probe');</script></body>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    flags += [f"--window-size={width},900", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", out.as_uri()]
    done = subprocess.run([BROWSER, *flags], capture_output=True, text=True, check=True, timeout=60)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert len(console) == 1 and "probe" in console[0]
    assert json.loads(re.search(r"<title>(.*?)</title>", done.stdout)[1]) == [
        width,
        "fast: 0.08333 at step 12slow: 0.1667 at step 12",
        "slow: 0.1667 at step 12",
        *([1, 1], False),
        *([2, 2], True),
        "fast: 0.08333 at tokens 1.2kslow: 0.1667 at tokens 1.2k",
    ]
    charts = re.findall(r"<svg.*?</svg>", done.stdout, re.DOTALL)
    assert len(charts) == 4 and all('<path d="M' in chart for chart in charts)  # loss, AUC; loss, matthews
