"""Every kind of file with a former name of a value keeps its meaning."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from electra_fast.config.config import Config
from electra_fast.config.section import RENAMED_VALUES
from electra_fast.errors import InputError
from electra_fast.finetuning import finetune
from electra_fast.finetuning.config import FinetuningConfig
from electra_fast.huggingface.config import OWN_KEY, own_config
from electra_fast.reproduction import reproduce
from electra_fast.training import run

RENAMED = [(name, old, new) for name, values in RENAMED_VALUES.items() for old, new in values.items()]
PRETRAINING = [case for case in RENAMED if not case[0].startswith("finetune.")]


def table(name: str, value: str) -> dict[str, dict[str, str]]:
    section, _, key = name.partition(".")
    return {section: {key: value}}


@pytest.mark.parametrize(("name", "old", "new"), PRETRAINING)
def test_run_and_export_with_former_values(name: str, old: str, new: str, tmp_path: Path) -> None:
    saved = own_config(tmp_path, {OWN_KEY: table(name, old)})
    assert saved is not None and saved.value(name) == Config.of_table(table(name, old)).value(name) == new
    record = {"step": 3, "time": "", "version": "", "changes": {name: [old, "x"], "train.steps": [1, 2]}}
    (tmp_path / run.CHANGES_FILE).write_text(json.dumps(record) + "\n")
    assert run._recorded(tmp_path, 3) == {name: (new, "x"), "train.steps": (1, 2)}


@pytest.mark.parametrize(("name", "old", "new"), RENAMED)
def test_reproduction_with_former_values_resumes(name: str, old: str, new: str, tmp_path: Path) -> None:
    identity: dict[str, Any] = {"overrides": {name: new}, "asked": {"budget": 1.0}}
    (tmp_path / reproduce.IDENTITY).write_text(json.dumps(identity | {"overrides": {name: old}, "budget": 1.0}))
    assert reproduce._resolve_budget(tmp_path, identity, Config()) == identity | {"budget": 1.0}


@pytest.mark.parametrize(("name", "old", "new"), [case for case in RENAMED if case not in PRETRAINING])
def test_finetuning_with_former_values_resumes(name: str, old: str, new: str, tmp_path: Path) -> None:
    job: Any = SimpleNamespace(folder=tmp_path, hardware={}, identity=lambda: table(name, new) | {"tokens": "x"})
    (tmp_path / "seed-0/checkpoints/step-1").mkdir(parents=True)
    (tmp_path / finetune.IDENTITY).write_text(json.dumps(table(name, old) | {"tokens": "x"}))
    finetune._check_folder(job)
    assert json.loads((tmp_path / finetune.IDENTITY).read_text()) == job.identity() | {"hardware": {}}


@pytest.mark.parametrize(("name", "old", "new"), RENAMED)
def test_former_value_elsewhere_gets_suggestion(name: str, old: str, new: str, tmp_path: Path) -> None:
    configuration = FinetuningConfig if name.startswith("finetune.") else Config
    choices = configuration.choices(name) or ()
    assert new in choices and old not in choices
    (tmp_path / "config.toml").write_text("")
    said = f'^{re.escape(name)} = "{old}": renamed to "{new}"$'
    with pytest.raises(InputError, match=said):
        configuration().override({name: old})
    if configuration is Config:  # from the command line, so it does not have the file's name
        with pytest.raises(InputError, match=said):
            Config.load(tmp_path / "config.toml", {name: old})
