"""`bench/night.py`: the table of encoders."""

import json

import night
from lib.groups import BENCH
from lib.recipe_report import TASKS


def test_the_table_has_medians_and_the_range_of_the_seeds_means():
    def line(encoder, task, *scores):
        return {"encoder": encoder, "task": task, "scores": scores}

    lines = [line("ours", task, 0.5, 0.6 + 0.05 * place, 0.4) for place, task in enumerate(TASKS)]
    lines += [line("unfinished", "cola", 0.1)]
    *_, row = night.table(lines).splitlines()
    assert row == "| ours | 50.0 | 50.0 | 50.0 | 50.0 | 50.0 | 50.0 (40.0 to 70.0) |"


def test_the_page_has_the_measured_table():
    page = (BENCH.parent / "docs/measurements.md").read_text(encoding="utf-8")
    table = night.table(map(json.loads, night.RESULTS.read_text().splitlines()))
    assert "| MiniLM |" in table and table.strip() in page
