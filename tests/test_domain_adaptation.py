"""examples/domain-adaptation.sh: its commands, as bash makes them, run on small data."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from in_process import run
from test_export import make_run

from electra_fast.files import checkpoint_folder
from electra_fast.huggingface.export import export

SCRIPT = Path(__file__).resolve().parent.parent / "examples/domain-adaptation.sh"
# Appends its arguments to a file: processes that import torch would take half a minute.
FAKE = """#!{python}
import json, pathlib, sys
with pathlib.Path(sys.argv[0]).with_suffix(".jsonl").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""
OPTIONS = "--train.steps 2 --train.batch_size 4 --train.eval_batches 1 --data.sequence_length 32".split()


def commands(folder, *arguments):
    """The calls of `electra-fast` that the script makes."""
    path = folder / "electra-fast"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([SCRIPT, *arguments], env=environment, check=True)
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]


def test_an_encoder_is_adapted_and_compared(tmp_path):
    make_run(tmp_path / "first", "google", {})
    export(tmp_path / "first", tmp_path / "hf")
    (tmp_path / "text.txt").write_text("the cats sat w1 w2 w3\n\n" * 60, encoding="utf-8")
    rows = "".join(f"the cat w{number + 3} w{number % 2},w{number % 2}\n" for number in range(16))
    (tmp_path / "labeled.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    places = [tmp_path / name for name in ("hf/discriminator", "text.txt", "labeled.csv", "out")]
    for command in commands(tmp_path, *places, *OPTIONS):
        done = run(*("1" if before == "--seeds" else word for before, word in pairwise(["", *command])))
        assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert checkpoint_folder.steps(out / "run")[-1] == 2
    assert (out / "model/discriminator/model.safetensors").is_file()
    for each in ("before", "after"):
        scores = json.loads((out / each / "results.json").read_text())
        assert "classification" in scores
    again = [command[0] for command in commands(tmp_path, *places)]
    assert again[6:] == ["prepare", "pretrain", "export", "finetune", "finetune"]  # the run goes on
