"""`reproduce` as a user runs it: killed at any moment it ends with the same table; what it refuses and reports."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing

import pytest
import torch
from in_process import run
from ranks import wait_for

import electra_fast as ef
from electra_fast.config.config import Config
from electra_fast.files.json_files import read_object
from electra_fast.interruption import StopRequest
from electra_fast.reproduction import reproduce
from electra_fast.reproduction.experiments import make_experiment
from electra_fast.reproduction.plan import Plan, base_config, common_precision, row_configs
from electra_fast.reproduction.row_run import EVALUATION, FAILED, RunSettings, read_result, run_row, write_run
from electra_fast.reproduction.workers import Ended, Slot, Workers, choose_slots, last_line

QUICK = ("--finetune.epochs", "1", "--finetune.batch_size", "8", "--finetune.sequence_length", "24")
QUICK += ("--finetune.matmul", "default")
SMALL = ("--data.sequence_length", "16", "--train.batch_size", "4", "--train.matmul", "default")


def arguments(corpus, glue, out, experiment="tying", budget="9e9", **options):
    flags = {
        "--preset": "tiny",
        "--recipe": "modern",
        "--budget": budget,
        "--seeds": 1,
        "--task": "sst2,mrpc",
    } | options
    words = [word for name, value in flags.items() if value is not None for word in (name, value)]
    return ["reproduce", experiment, "--data", corpus, "--tasks", glue, "--out", out, *SMALL, *QUICK, *words]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tiny_text, tiny_vocab):
    """A corpus with so little validation text that evaluation takes a second."""
    folder = tmp_path_factory.mktemp("corpus") / "shards"
    ef.prepare(iter(tiny_text), vocab=str(tiny_vocab), out=folder, holdout=0.02, progress=False)
    return folder


# The command, without the time to measure the speed of this machine.
SPEED_GIVEN = """
import sys
from electra_fast.cli import main
from electra_fast.reproduction import reproduce
reproduce.measure_speed = lambda *_: 1e9
sys.exit(main(sys.argv[1:]))
"""


class WorkersHere(Workers):
    """Does the runs in this process, which saves the time to start one for each."""

    def run(self, folders, stop):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for folder in folders:
            run_row(folder)
            yield Ended(folder, 0, 1.0)
        torch.set_num_threads(threads)


def run_here(*words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduce, "Workers", WorkersHere)
        patch.setattr(reproduce, "measure_speed", lambda *_: 1e9)
        return run(*words)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus, glue_folder):
    """A comparison that nobody disturbed."""
    out = tmp_path_factory.mktemp("reproduce") / "out"
    done = run_here(*arguments(corpus, glue_folder, out), "--json")
    assert done.returncode == 0, done.stderr
    return out, done


def without_times(value):
    """Results without what differs from call to call."""
    if isinstance(value, dict):
        times = ("seconds", "flops_per_second")
        return {name: without_times(each) for name, each in value.items() if name not in times}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def test_leaves_table_results_and_picture(whole):
    out, done = whole
    results = json.loads(done.stdout)
    assert results == json.loads((out / "results.json").read_text())
    assert (out / "tying.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "table.md").read_text()
    assert "| embeddings tied |" in text and "84.4" in text
    assert "3 runs take about 0:0" in done.stderr and "3 of 3 runs done" in done.stderr
    for row in results["rows"]:
        (found,) = row["runs"]
        assert set(found["tasks"]) == {"sst2", "mrpc"} and 0 <= row["mean"] <= 100
        assert found["score"] == pytest.approx(50 * sum(task["median"] for task in found["tasks"].values()))
    corruptions = {row["runs"][0]["evaluation"]["corruption"] for row in results["rows"]}
    assert len(corruptions) == 1  # the same fakes for all
    assert not list(out.glob("runs/*/tasks"))  # no fine-tuned models are kept
    work = [json.loads(path.read_text())["finetune"] for path in out.glob("runs/*/work.json")]
    assert {each["finetune.precision"] for each in work} == {common_precision()}  # one for all


def test_run_again_it_has_nothing_to_do_and_says_the_same(whole, corpus, glue_folder):
    out, done = whole
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/**/*")}
    again = run(*arguments(corpus, glue_folder, out))
    assert again.stdout.strip() == (out / "table.md").read_text().strip()
    assert json.loads((out / "results.json").read_text()) == json.loads(done.stdout)
    assert "take about" not in again.stderr
    assert {path: path.stat().st_mtime_ns for path in out.glob("runs/**/*")} == before  # no run has begun


def test_stopped_between_rows_it_ends_with_the_same_table(whole, corpus, glue_folder, tmp_path):
    words = [str(word) for word in arguments(corpus, glue_folder, tmp_path / "out")]
    runs = tmp_path / "out" / "runs"
    command = [sys.executable, "-c", SPEED_GIVEN, *words, "--workers", "1"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    wait_for(lambda: list(runs.glob(f"*/{EVALUATION}")) or process.poll() is not None, seconds=300)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert 0 < len(list(runs.glob(f"*/{EVALUATION}"))) < 3
    done = run_here(*words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/table.md").read_text() == (whole[0] / "table.md").read_text()
    ours, theirs = (json.loads((folder / "results.json").read_text()) for folder in (tmp_path / "out", whole[0]))
    assert without_times(ours) == without_times(theirs)


def test_other_settings_are_refused(whole, corpus, glue_folder):
    out, _ = whole
    done = run(*arguments(corpus, glue_folder, out, budget="1.3e10"))
    assert done.returncode == 2 and "asked.budget was 9000000000.0 and is now 13000000000.0" in done.stderr


def test_more_seeds_are_more_runs(whole, corpus, tmp_path):
    out = shutil.copytree(whole[0], tmp_path / "out")
    base = base_config(Config.preset("tiny", "modern"), ef.Corpus(corpus), {})
    made = make_experiment("tying", base, {})
    work = RunSettings(**read_object(out / "runs/tying-none-seed-0/work.json"))
    plan = Plan(out, made, row_configs(made, 1e13, {}), work, seeds=2)
    folders = plan.prepare()
    assert [folder.name for folder in folders] == [f"{row.name}-seed-1" for row in made.rows]
    assert [Config.load(folder / "config.toml").train.seed for folder in folders] == [1, 1, 1]
    assert all(len(found) == 1 for found in plan.finished().values())


class TestBadInput:
    def fails(self, *words):
        done = run(*words)
        assert done.returncode == 2 and done.stdout == ""
        (line,) = done.stderr.strip().splitlines()
        return line

    def test_one_line_before_anything_is_trained(self, corpus, tiny_corpus, glue_folder, whole_run, tmp_path):
        def refused(corpus=corpus, glue=glue_folder, **options):
            return self.fails(*arguments(corpus, glue, tmp_path / "out", **options))

        assert "give one of --budget FLOPS and --minutes M" in refused(**{"--minutes": 1})
        assert "give one of --budget FLOPS and --minutes M" in refused(budget=None)
        assert "--seeds 0: must be above 0" in refused(**{"--seeds": 0})
        assert "prepare the text with --holdout" in refused(corpus=tiny_corpus)
        assert "holds no folder of a GLUE task" in refused(glue=tmp_path, **{"--task": "glue"})
        assert "RTE" in refused(**{"--task": "rte"})
        assert "a budget of 1e+06 FLOPs is 0 steps of tying-none" in refused(budget="1e6")
        assert "did you mean tying?" in refused(experiment="tieing")
        assert "unknown key finetune.epoch" in refused(**{"--finetune.epoch": 3})
        assert "no such folder" in refused(**{"--corrupted-by": tmp_path / "nowhere"})
        too_long = {
            "--corrupted-by": whole_run,
            "--budget": "3e11",
            "--data.sequence_length": 256,
            "--model.max_positions": 256,
        }
        assert "reads 128 tokens, and the rows have 256" in refused(**too_long)
        assert not (tmp_path / "out" / "runs").exists()

    def test_a_folder_that_holds_something_else(self, corpus, glue_folder, tmp_path):
        (tmp_path / "foreign").write_text("something")
        message = self.fails(*arguments(corpus, glue_folder, tmp_path))
        assert "holds foreign, but no reproduce.json" in message

    def test_a_corruptor_of_another_vocabulary(self, corpus, glue_folder, whole_run, tmp_path):
        copy = shutil.copytree(whole_run, tmp_path / "other")
        vocab = copy / "tokenizer" / "vocab.txt"
        vocab.write_text(vocab.read_text().replace("the\n", "teh\n"))
        (copy / "tokenizer" / "tokenizer.json").unlink(missing_ok=True)
        words = arguments(corpus, glue_folder, tmp_path / "out", **{"--corrupted-by": copy})
        message = self.fails(*words)
        assert str(copy) in message and "vocabulary" in message


def test_a_row_that_diverges_is_reported(corpus, glue_folder, tmp_path):
    changes = {"data.sequence_length": "16", "train.batch_size": "4", "train.steps": "6", "train.log_every": "2"}
    config = Config.preset("tiny", "google").override(changes | {"train.precision": "fp32", "train.eval_every": "0"})
    work = RunSettings(str(corpus), str(glue_folder), ["sst2"], 1, {"finetune.epochs": "1"}, "unigram")
    write_run(tmp_path, config.override({"optimizer.learning_rate": "1e30", "optimizer.clip_norm": "0"}), work)
    run_row(tmp_path)
    assert "became nan or infinite" in read_object(tmp_path / FAILED)["failed"]
    assert read_result(tmp_path) == read_object(tmp_path / FAILED)


def test_runs_end_with_the_process_that_started_them(corpus, glue_folder, tmp_path):
    """Whatever kills it: a run that went on would hold the folder of the resumed one."""
    config = Config.preset("tiny", "google").override({"train.steps": "100000", "train.precision": "fp32"})
    write_run(tmp_path, config, RunSettings(str(corpus), str(glue_folder), ["sst2"], 1, {}, "unigram"))
    workers = Workers([Slot({})])
    steps = workers.run([tmp_path], StopRequest())
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "config.toml").exists() and time.monotonic() < deadline:
        next(steps)
    (running,) = workers._running.values()
    running.process.stdin.close()  # as the system does when this process ends
    assert running.process.wait(60) == 128 + signal.SIGTERM
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_run_that_fails_is_named_with_its_log_and_retried(corpus, glue_folder, tmp_path):
    folder = tmp_path / "run-0"
    write_run(
        folder,
        Config.preset("tiny", "google"),
        RunSettings(str(tmp_path), str(glue_folder), ["sst2"], 1, {}, "unigram"),
    )
    with closing(Workers([Slot({})])) as workers:
        (ended,) = (each for each in workers.run([folder], StopRequest()) if each)
    assert ended.code == 2 and read_result(folder) is None
    assert "manifest.json" in last_line(folder)


def test_slots(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    assert choose_slots(0, 100) == [Slot({"OMP_NUM_THREADS": "1"})] * cores
    assert choose_slots(1, 100) == [Slot({"OMP_NUM_THREADS": str(cores)})]
    assert len(choose_slots(8, 3)) == 3
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [slot.environment for slot in choose_slots(0, 3)] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [slot.environment for slot in choose_slots(3, 3)] == [{"CUDA_VISIBLE_DEVICES": name} for name in "575"]
