"""`bench/experiments.py`: the queue pauses, survives kills and runs each experiment once; its listed commands exist."""

import contextlib
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time

import adaptation
import experiments
import pytest
import recipes
from lib.groups import BENCH

from electra_fast.cli.parser import build_parser

SCRIPT = """
import sys, time
from pathlib import Path
name, texts, glue, out = sys.argv[1:]
log = Path(out) / f"{name}.txt"
log.open("a").write("start\\n")
if name == "waits":
    while not (Path(out) / "let-go").exists():
        time.sleep(0.02)
        log.open("a").write(".")
sys.exit(name == "fails")
"""


@pytest.fixture
def queue(tmp_path):
    """Starts the queue in a new folder: one experiment is finished, three are left."""
    bench = tmp_path / "bench"
    (bench / "data").mkdir(parents=True)
    shutil.copy(BENCH / "experiments.py", bench)
    shutil.copytree(BENCH / "lib", bench / "lib", ignore=shutil.ignore_patterns("recipe*"))
    (bench / "script.py").write_text(SCRIPT)
    entry = (
        '[[experiment]]\nname = "{0}"\ncommand = "script.py {0} {{texts}} {{glue}} {{out}}"\ntflop = 1\nminutes = 90\n'
    )
    (bench / "experiments.toml").write_text("".join(map(entry.format, ("done", "fails", "waits", "last"))))
    done = {"name": "done", "command": "script.py done {texts} {glue} {out}"}
    (bench / "data/experiments.jsonl").write_text(json.dumps(done | {"processor": "an older one"}) + "\n")
    started = []

    def start():
        """The process, and the file of its output."""
        command = [sys.executable, "experiments.py", "a text", "--glue", "g", "--out", tmp_path / "out"]
        output = tmp_path / f"output-{len(started)}.txt"
        with output.open("w") as file:
            started.append(subprocess.Popen(command, cwd=bench, stdout=file))
        return started[-1], output

    yield start, tmp_path
    for process in started:
        process.kill()
        process.wait()


def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def text(path):
    return path.read_text() if path.exists() else ""


@pytest.mark.slow
def test_queue_pauses_stops_and_resumes(queue):
    start, folder = queue
    waits, last, pause = (folder / "out" / name for name in ("waits.txt", "last.txt", "pause"))

    def is_at_work():
        before = text(waits)
        time.sleep(0.1)
        return text(waits) != before

    first, said = start()
    until(is_at_work)
    pause.touch()
    until(lambda: text(said).count("paused") == 1)
    until(lambda: not is_at_work())
    pause.unlink()
    until(is_at_work)
    pause.touch()
    until(lambda: text(said).count("paused") == 2)
    first.terminate()  # while it is paused
    assert first.wait(timeout=120) == 128 + signal.SIGTERM and not last.exists()
    lines = text(said).splitlines()
    assert lines[0] == "fails, about 90 minutes; 1 done, 1 running, 2 left, together 4.5 h"
    assert lines[1].startswith("fails: exit code 1; its output is in ")
    assert lines[2] == "waits, about 90 minutes; 1 done, 1 running, 1 left, together 3.0 h"
    assert lines[3:] == [f"paused: {pause} exists", "resumed", lines[3], "waits: stopped; run again to resume"]
    pause.unlink()
    second, _ = start()
    until(lambda: text(waits).count("start") == 2)
    second.kill()
    until(lambda: not is_at_work())  # the experiment has ended with it
    (folder / "out" / "let-go").touch()
    third, said = start()
    assert third.wait(timeout=120) == 2 and text(said).splitlines()[-1] == "3 done, 1 failed: fails"
    done = [json.loads(line) for line in (folder / "bench/data/experiments.jsonl").read_text().splitlines()]
    assert [record["name"] for record in done] == ["done", "waits", "last"] and all(
        record["processor"] for record in done
    )
    assert text(last).count("start") == 1 and not (folder / "out" / "done.txt").exists()


def test_listed_commands_exist(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    done, left = experiments.read_list()
    assert len({experiment.name for experiment in (*done, *left)}) == len(
        {experiment.command for experiment in (*done, *left)}
    )
    monkeypatch.setattr(recipes, "exclusive", lambda out: contextlib.nullcontext())
    asked = []
    monkeypatch.setattr(recipes.Study, "prepare", lambda self, texts: asked.append((self.scale.name, texts)))
    for name in ("hour", "compare"):
        monkeypatch.setattr(recipes, name, lambda *arguments: asked.append(arguments[1:]))
    monkeypatch.setattr(adaptation, "run", lambda options: asked.extend(((None, options.texts), options.out)))
    for experiment in left:
        words = {"texts": "'a b' c", "glue": "g", "out": "o", "blimp": "p", "books": "b"}
        script, *arguments = shlex.split(experiment.command.format(**words))
        if script.endswith(".sh"):
            assert (BENCH / script).is_file() and arguments[1:4] == ["p", "b", "--"]
            options = build_parser().parse(["pretrain", "shards", "--out", "o", "--steps", "1", *arguments[4:]])
            assert options.overrides.keys() <= {"train.steps", "train.seed", "objective.name"} and options.preset
            continue
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        {"recipes.py": recipes, "adaptation.py": adaptation}[script].main()
        (_, texts), subject = asked[-2:]
        assert texts == ["a b", "c"] and subject
