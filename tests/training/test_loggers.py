"""Callbacks and loggers: the lines that they receive, also after a kill and a resume; their failures end no run."""

import json
import signal
import struct
import subprocess
import sys
import warnings

import pytest
from tiny_run import STEPS, TIMES, assert_same_run, command, lines, tiny_config, truncate

import electra_fast as ef
from electra_fast.files import checkpoint_folder


def test_callbacks_receive_log_lines(validation_corpus, tmp_path, capsys):
    seen = {"log": [], "evaluation": [], "checkpoint": []}

    def faulty(record):
        seen["log"].append(record)
        raise ZeroDivisionError("of mine")

    callbacks = {f"on_{name}": records.append for name, records in seen.items()} | {"on_log": faulty}
    ef.pretrain(validation_corpus, config=tiny_config(), out=tmp_path / "run", **callbacks)
    logged = [{name: value for name, value in line.items() if name not in TIMES} for line in seen["log"]]
    assert logged == lines(tmp_path / "run")
    assert seen["evaluation"] == lines(tmp_path / "run", "evaluations.jsonl")
    assert [line["step"] for line in seen["checkpoint"]] == list(range(3, STEPS + 1, 3))
    assert capsys.readouterr().err.count("warning: on_log raised ZeroDivisionError: of mine") == 1


def test_callback_stops_run_after_checkpoint(validation_corpus, whole_run, tmp_path):
    def stop(record):
        if record["step"] == 8:
            raise ef.StopTraining("enough")

    with pytest.raises(ef.StopTraining, match="enough"):
        ef.pretrain(validation_corpus, config=tiny_config(), out=tmp_path / "run", on_evaluation=stop)
    assert checkpoint_folder.steps(tmp_path / "run")[-1] == 9 < STEPS
    assert ef.pretrain(validation_corpus, config=tiny_config(), out=tmp_path / "run").is_finished
    assert_same_run(tmp_path / "run", whole_run)


def test_unknown_or_missing_logger_refused(validation_corpus, tmp_path, monkeypatch):
    with pytest.raises(ef.InputError, match="train.loggers = .*: must be among tensorboard, wandb, mlflow"):
        tiny_config(**{"train.loggers": "tensorboard,comet"})
    monkeypatch.setattr("electra_fast.training.loggers.find_spec", lambda name: None)
    assert tiny_config().override({"train.loggers": []}).train.loggers == []
    config = tiny_config(**{"train.loggers": "wandb"})
    with pytest.raises(ef.InputError, match="train.loggers: wandb is not installed; pip install wandb"):
        ef.pretrain(validation_corpus, config=config, out=tmp_path / "run")
    assert not (tmp_path / "run" / "config.toml").exists()


def read_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def wandb_records(path):
    """Yields the records of a .wandb file: a LevelDB log in blocks of 32 KiB after a header of 7 bytes."""
    content = path.read_bytes()
    position = 7
    record = b""
    while position + 7 <= len(content):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_wandb(run):
    from wandb.proto.wandb_internal_pb2 import Record

    values_of = {}
    ids = set()
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(path):
            record = Record.FromString(data)
            ids |= {record.run.run_id} - {""}
            items = {"".join([item.key, *item.nested_key]): json.loads(item.value_json) for item in record.history.item}
            for name, value in items.items():  # lines written to disk before the kill are sent again
                assert values_of.setdefault(name, {}).setdefault(items["_step"], value) == value or name.startswith("_")
    assert len(ids) == 1
    return {name: [*values.items()] for name, values in values_of.items()}


def read_mlflow(run):
    from mlflow import MlflowClient

    client = MlflowClient()
    (experiment,) = [entry for entry in client.search_experiments() if entry.name == "electra-fast"]
    (only,) = client.search_runs([experiment.experiment_id])
    assert only.data.params["train.steps"] == str(STEPS) and only.info.status == "FINISHED"
    history = {name: client.get_metric_history(only.info.run_id, name) for name in only.data.metrics}
    return {name: [(entry.step, entry.value) for entry in values] for name, values in history.items()}


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


@pytest.mark.slow
def test_loggers_receive_each_line_once_after_kill(validation_corpus, tmp_path, monkeypatch):
    """The run is killed with SIGKILL, and resumed in another process."""
    run = tmp_path / "run"
    environment = {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
    }  # fmt: skip
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    words = command(validation_corpus, run, **{"train.loggers": ",".join(READERS)})
    killed = (
        "import os, signal; from electra_fast.training.trainer import Trainer; log = Trainer._log\n"
        "def logged(self, to):\n log(self, to)\n if self.state.step == 16: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"Trainer._log = logged; from electra_fast.cli import main; main({words[3:]!r})"
    )
    assert subprocess.run([sys.executable, "-c", killed]).returncode == -signal.SIGKILL
    subprocess.run(words, check=True)
    for read in READERS.values():
        with warnings.catch_warnings(action="ignore"):  # of their dependencies
            logged = read(run)
        for kind, file in (("train", "metrics.jsonl"), ("validation", "evaluations.jsonl")):
            for key in ("discriminator_loss", "generator_loss"):
                expected = [(line["step"], pytest.approx(line[key], rel=1e-6)) for line in lines(run, file)]
                assert logged[f"{kind}/{key}"] == expected, read.__name__


@pytest.mark.slow
def test_changed_run_replaces_later_lines(validation_corpus, tmp_path):
    options = {"train.loggers": "tensorboard"}
    run = tmp_path / "run"
    ef.pretrain(validation_corpus, config=tiny_config(**options), out=run)
    truncate(run, 21)
    before = lines(run)
    changed = tiny_config(**options, **{"optimizer.learning_rate": "5e-4"})
    ef.pretrain(validation_corpus, config=changed, out=run, allow_changes=True)
    assert before[:-1] == lines(run)[:-1] and before[-1] != lines(run)[-1]
    expected = [(line["step"], pytest.approx(line["discriminator_loss"], rel=1e-6)) for line in lines(run)]
    assert read_tensorboard(run)["train/discriminator_loss"] == expected
