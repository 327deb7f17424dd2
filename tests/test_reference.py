"""The reference pages of docs/ match the package and list every key of a run's logs."""

import inspect
import json
import re
import runpy
from pathlib import Path

import pytest
from tiny_run import tiny_config

import electra_fast as ef

TREE = Path(__file__).resolve().parent.parent
PAGES = runpy.run_path(str(TREE / ".ci/generate_reference.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_reference_page_is_up_to_date(name):
    written = (TREE / "docs/reference" / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), "run python .ci/generate_reference.py"


@pytest.mark.parametrize("name", ef.__all__)
def test_public_names_have_docstrings(name):
    public = getattr(ef, name)
    assert isinstance(public, str) or inspect.getdoc(public)
    members = vars(public) if inspect.isclass(public) else {}
    documented = {key for key, value in members.items() if inspect.isroutine(value) or isinstance(value, property)}
    assert not [key for key in documented if not key.startswith("_") and not inspect.getdoc(members[key])]


@pytest.mark.parametrize("objective", ["electra", "all-tokens-mlm", "adversarial"])
def test_every_key_of_a_log_is_described(objective, validation_corpus, tmp_path):
    config = tiny_config("modern", **{"objective.name": objective, "train.precision": "fp16"})
    ef.pretrain(validation_corpus, config=config, out=tmp_path)
    page = (TREE / "docs/reference/metrics.md").read_text(encoding="utf-8")
    for name in ("metrics", "evaluations"):
        keys = {key for line in (tmp_path / f"{name}.jsonl").read_text().splitlines() for key in json.loads(line)}
        assert keys <= set(re.findall(r"`(\w+)`", page))
