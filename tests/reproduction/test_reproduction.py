"""`reproduce` as a user runs it: a killed call resumes to the same table; errors are reported."""

import json
import signal
import subprocess
import sys

import pytest
from in_process import run
from ranks import wait_for

import electra_fast as ef
from electra_fast.config.config import Config
from electra_fast.errors import InputError
from electra_fast.files.json_files import read_object
from electra_fast.reproduction import reproduce
from electra_fast.reproduction.experiments import base_config, common_precision, make_experiment
from electra_fast.reproduction.reproduce import EVALUATION, IDENTITY, read_result, run_row

pytestmark = pytest.mark.slow

QUICK = {"--finetune.epochs": 1, "--finetune.batch_size": 8, "--finetune.sequence_length": 24}
QUICK |= {"--finetune.matmul": "default"}
SMALL = {"--data.sequence_length": 16, "--train.batch_size": 4, "--train.matmul": "default", "--device": "cpu"}


def arguments(corpus, glue, out, experiment="tying", budget="9e9", **options):
    flags = {"--preset": "tiny", "--recipe": "modern", "--budget": budget, "--seeds": 1, "--task": "sst2,mrpc"}
    words = [str(word) for pair in (QUICK | SMALL | flags | options).items() if pair[1] is not None for word in pair]
    paths = [str(corpus), "--glue", str(glue), "--out", str(out)]
    return ["reproduce", experiment, *paths, *words]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tiny_text, tiny_vocab):
    """A corpus with little validation text, so that an evaluation takes a second."""
    folder = tmp_path_factory.mktemp("corpus") / "shards"
    ef.prepare(iter(tiny_text), vocab=str(tiny_vocab), out=folder, holdout=0.02, progress=False)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus, glue_folder):
    """An uninterrupted comparison."""
    out = tmp_path_factory.mktemp("reproduce") / "out"
    done = run(*arguments(corpus, glue_folder, out), "--json")
    assert done.returncode == 0, done.stderr
    return out, done


def without_times(value):
    if isinstance(value, dict):
        return {name: without_times(entry) for name, entry in value.items() if name != "seconds"}
    return [without_times(entry) for entry in value] if isinstance(value, list) else value


def test_writes_table_results_and_plot(whole):
    out, done = whole
    results = json.loads(done.stdout)
    assert results == json.loads((out / "results.json").read_text())
    assert (out / "tying.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "table.md").read_text()
    assert "| embeddings tied |" in text and "84.4" in text
    assert "FLOPs; run 3 of 3" in done.stderr and done.stderr.count("; all runs: eta 0:0") == 3
    for row in results["rows"]:
        (row_run,) = row["runs"]
        assert set(row_run["tasks"]) == {"sst2", "mrpc"} and 0 <= row["mean"] <= 100
        assert row_run["score"] == pytest.approx(50 * sum(task["median"] for task in row_run["tasks"].values()))
    corruptions = {row["runs"][0]["evaluation"]["corruption"] for row in results["rows"]}
    assert len(corruptions) == 1  # the same replacements for all rows
    assert not list(out.glob("runs/*/tasks"))  # no fine-tuned models are kept
    precisions = {Config.load(path).train.precision for path in out.glob("runs/*/run/config.toml")}
    assert precisions == {common_precision("cpu")}  # the same for all rows


def test_second_call_trains_nothing_and_prints_same_table(whole, corpus, glue_folder):
    out, done = whole
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/**/*")}
    again = run(*arguments(corpus, glue_folder, out))
    assert again.stdout.strip() == (out / "table.md").read_text().strip()
    assert json.loads((out / "results.json").read_text()) == json.loads(done.stdout)
    assert {path: path.stat().st_mtime_ns for path in out.glob("runs/**/*")} == before  # no run was started
    other = run(*arguments(corpus, glue_folder, out, budget="1.3e10"))
    assert other.returncode == 2 and "asked.budget was 9000000000.0 and is now 13000000000.0" in other.stderr


@pytest.mark.process
def test_stopped_between_rows_gives_same_table(whole, corpus, glue_folder, tmp_path):
    words = arguments(corpus, glue_folder, tmp_path / "out")
    runs = tmp_path / "out" / "runs"
    process = subprocess.Popen([sys.executable, "-m", "electra_fast", *words], stderr=subprocess.DEVNULL)
    wait_for(lambda: list(runs.glob(f"*/{EVALUATION}")) or process.poll() is not None, seconds=300)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert 0 < len(list(runs.glob(f"*/{EVALUATION}"))) < 3
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/table.md").read_text() == (whole[0] / "table.md").read_text()
    ours, theirs = (json.loads((folder / "results.json").read_text()) for folder in (tmp_path / "out", whole[0]))
    assert without_times(ours) == without_times(theirs)


def test_more_seeds_add_runs_and_failures_are_reported(corpus, glue_folder, tmp_path, monkeypatch):
    trained = []

    def run_row(folder, config, *_):
        trained.append((folder.name, config.train.seed))
        if folder.name.startswith("tying-none"):
            raise InputError("no such luck")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "failed.json").write_text('{"failed": "the loss became nan"}')

    monkeypatch.setattr(reproduce, "run_row", run_row)
    for seeds in (1, 2):
        done = run(*arguments(corpus, glue_folder, tmp_path / "out", **{"--seeds": seeds}))
        assert done.returncode == 2
        assert f"{seeds} of {3 if seeds == 1 else 4} runs failed: tying-none seed 0: no such luck" in done.stderr
        assert "tying-all seed 0: failed: the loss became nan" in done.stderr or seeds == 2
    names = ("tying-none", "tying-embeddings", "tying-all")
    first = [(f"{name}-seed-0", 0) for name in names]
    assert trained == [*first, first[0], *((f"{name}-seed-1", 1) for name in names)]
    assert "all weights tied, seed 1: the loss became nan" in (tmp_path / "out/table.md").read_text()


def test_diverged_run_is_recorded(corpus, glue_folder, tmp_path):
    changes = {"data.corpus": str(corpus), "data.sequence_length": "16", "train.batch_size": "4", "train.steps": "6"}
    changes |= {"train.log_every": "2", "train.precision": "fp32", "train.eval_every": "0"}
    changes |= {"optimizer.learning_rate": "1e30", "optimizer.clip_norm": "0"}
    run_row(tmp_path, Config.preset("tiny", "google").override(changes), "cpu", {}, {})
    assert "became nan or infinite" in read_result(tmp_path)["failed"]


@pytest.mark.process
def test_minutes_become_budget_that_resumed_call_keeps(validation_corpus, tmp_path):
    base = base_config(Config.preset("tiny", "modern"), ef.Corpus(validation_corpus), {}, "fp32")
    first = make_experiment("tying", base, {}).rows[0].config
    identity = {"experiment": "tying", "asked": {"budget": None, "minutes": 2.5}}
    facts = reproduce._resolve_budget(tmp_path, identity, first)
    assert facts["flops_per_second"] > 1e8
    assert facts["budget"] == pytest.approx(150 * facts["flops_per_second"], rel=0.05)  # rounded to two digits
    (tmp_path / IDENTITY).write_text(json.dumps(facts))
    assert reproduce._resolve_budget(tmp_path, identity, first) == facts == read_object(tmp_path / IDENTITY)
    with pytest.raises(InputError, match=r"asked.minutes was 2.5 and is now 3"):
        reproduce._resolve_budget(tmp_path, identity | {"asked": {"budget": None, "minutes": 3}}, first)


def test_argument_errors_are_one_line_before_training(corpus, tiny_corpus, glue_folder, whole_run, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes").write_text("something")
    long_rows = {"--data.sequence_length": 256, "--model.max_positions": 256}
    for options, message in (
        ({"--minutes": 1}, "pass either --budget FLOPS or --minutes M"),
        ({"budget": None}, "pass either --budget FLOPS or --minutes M"),
        ({"--seeds": 0}, "--seeds = 0: must be above 0"),
        ({"corpus": tiny_corpus}, "prepare the text with --holdout"),
        ({"glue": tmp_path, "--task": "glue"}, "without --task, --glue DIR uses all"),
        ({"--task": "rte"}, "RTE"),
        ({"budget": "1e6"}, "--budget 1e+06: is 0 steps of tying-none"),
        ({"experiment": "tieing"}, "did you mean tying?"),
        ({"--finetune.epoch": 3}, "did you mean --finetune.epochs?"),
        ({"--corrupted-by": tmp_path / "nowhere"}, "no such folder"),
        ({"--corrupted-by": whole_run, "budget": "3e11", **long_rows}, "reads 128 tokens, but the rows have 256"),
        ({"out": foreign}, "contains notes, but no reproduce.json"),
    ):
        call = {"corpus": corpus, "glue": glue_folder, "out": tmp_path / "out"} | options
        done = run(*arguments(**call))
        assert done.returncode == 2 and done.stdout == "" and message in done.stderr, (message, done.stderr)
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out" / "runs").exists()
