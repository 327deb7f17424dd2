"""The scripts of runs/, which make the rows of docs/background/leaderboard.md, run to the end on small texts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_task import pairs, write_cola, write_mrpc, write_splits, write_sst2, write_stsb

from electra_fast.config.config import Config

RUNS = Path(__file__).resolve().parent.parent / "runs"
TEXT = 'Then Mr. Fox saw it. "Who goes there?" asked the\nold man! Yes. THE END OF IT\n\n'


def run(*command):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([*map(str, command)], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_sentences_are_whole_and_within_word_limit(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT * 20, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"text": "That is all there is. " * 100 + "\u2028"}) + "\n", encoding="utf-8"
    )
    printed = run(sys.executable, RUNS / "sentences.py", 100, *sorted(tmp_path.iterdir())).splitlines()
    sentences = [
        "Then Mr. Fox saw it.",
        '"Who goes there?" asked the old man!',
        "THE END OF IT",
        "That is all there is.",
    ]
    assert {*printed} == {*sentences}
    assert 80 < sum(len(sentence.split()) for sentence in printed) <= 100 and printed.count(sentences[3]) > 10


@pytest.mark.slow
@pytest.mark.process
def test_ten_million_words(tmp_path, tiny_text):
    (tmp_path / "a.txt").write_text(TEXT * 40 + "\n\n".join(tiny_text), encoding="utf-8")
    (tmp_path / "blimp").mkdir()
    for name in ("one", "two"):
        pair = {"sentence_good": "The cat saw him.", "sentence_bad": "The cat him saw.", "UID": name}
        (tmp_path / "blimp" / f"{name}.jsonl").write_text(json.dumps(pair) + "\n")
    command = (
        RUNS / "ten-million-words.sh",
        tmp_path / "out",
        tmp_path / "blimp",
        tmp_path / "a.txt",
        "--",
        "--preset",
        "tiny",
    )
    first = run(*command)
    assert "2 pairs in 2 groups" in first and "discriminator" in first
    evaluation = json.loads((tmp_path / "out/pairs/evaluation.json").read_text())
    assert evaluation["groups"].keys() == {"one", "two"}
    assert run(*command).splitlines()[-8:] == first.splitlines()[-8:]  # the second call resumes and changes nothing


@pytest.mark.slow
@pytest.mark.process
def test_five_tasks(tmp_path, tiny_text):
    """With an existing plan instead of a one-hour measurement, and one epoch of fine-tuning."""
    glue = tmp_path / "glue"
    out = tmp_path / "out"
    command = tmp_path / "bin/electra-fast"
    command.parent.mkdir()
    command.write_text(
        '#!/bin/sh\n[ "$1" != finetune ] || set -- "$@" --finetune.epochs 1\nexec python3 -m electra_fast "$@"\n'
    )
    command.chmod(0o755)
    for write, name in ((write_cola, "CoLA"), (write_sst2, "SST-2"), (write_mrpc, "MRPC"), (write_stsb, "STS-B")):
        write(glue / name)
    header = "index\tsentence1\tsentence2\tlabel\n"
    labels = ("entailment", "not_entailment")
    write_splits(glue / "RTE", header, lambda n, a, b, y: f"{n}\t{a}\t{b}\t{labels[y]}\n", pairs, train=27, dev=10)
    (tmp_path / "a.txt").write_text("\n\n".join(tiny_text), encoding="utf-8")
    out.mkdir()
    changes = {"train.steps": "4", "train.batch_size": "4", "data.sequence_length": "16"}
    (out / "run.toml").write_text(Config.preset("tiny").override(changes).to_toml(), encoding="utf-8")
    printed = run(
        "env",
        f"PATH={command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        RUNS / "five-tasks.sh",
        out,
        glue,
        tmp_path / "a.txt",
    ).splitlines()[-1]
    results = json.loads((out / "tasks/results.json").read_text())
    medians = {name: 100 * task["median"] for name, task in results.items()}
    assert list(medians) == ["cola", "sst2", "mrpc", "stsb", "rte"]
    assert printed.startswith(f"cola {medians['cola']:.1f}  sst2 ") and printed.endswith(
        f"mean {sum(medians.values()) / 5:.1f}"
    )
