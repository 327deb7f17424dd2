"""Resuming a run: allowed changes and their effects, refused changes, and damaged checkpoints."""

import json
import re
import shutil
import subprocess
import sys

import in_process
import pytest
from tiny_run import STEPS, TINY, assert_same_run, lines, tiny_config

from electra_fast.config.config import Config
from electra_fast.files import checkpoint_folder
from electra_fast.optimizers.optimizer import lr_scale
from electra_fast.training.forecast import low_peak_warnings
from electra_fast.training.pretrain import pretrain
from electra_fast.training.run import config_of_run, exclusive


@pytest.fixture
def run(whole_run, tmp_path):
    return shutil.copytree(whole_run, tmp_path / "run")


def stderr(capsys):
    return capsys.readouterr().err


def records_of_changes(run):
    records = map(json.loads, (run / "changes.jsonl").read_text().splitlines())
    return [(record["step"], record["changes"]) for record in records]


def test_finished_run_extended_and_resumed_by_folder(run, validation_corpus, capsys):
    """The change is recorded before the first checkpoint that includes it."""
    before = shutil.copytree(run, run.with_name("before"))
    longer = tiny_config(**{"train.steps": str(2 * STEPS)})
    with pytest.raises(ValueError, match=rf"train.steps = 20: must be at least {STEPS}, the step of this run; raise"):
        pretrain(validation_corpus, config=tiny_config(**{"train.steps": "20"}), out=run)
    assert pretrain(validation_corpus, config=longer, out=run).step == 2 * STEPS
    messages = stderr(capsys)
    optimizer = Config.load(run / "config.toml").optimizer
    first, last = (lr_scale(optimizer, step, 2 * STEPS) * optimizer.learning_rate for step in (STEPS, 2 * STEPS - 1))
    assert f"learning rate at step {STEPS} is {first:.3g} (before: 0) and falls to 0 at step {2 * STEPS}" in messages
    assert [line["step"] for line in lines(run)] == list(range(4, 2 * STEPS + 1, 4))
    assert lines(run)[-1]["learning_rate"] == pytest.approx(last)
    assert records_of_changes(run) == [(STEPS, {"train.steps": [STEPS, 2 * STEPS]})]
    unkilled = shutil.copytree(run, run.with_name("unkilled"))
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(before / "checkpoints", run / "checkpoints")
    assert pretrain(config=Config.load(run / "config.toml")).step == 2 * STEPS
    assert_same_run(run, unkilled)


def test_recorded_configuration_is_the_default(run, tmp_path, monkeypatch):
    """In Python as on the command line. Hardware choices that cannot run on this machine are made again."""
    saved = run / "config.toml"
    saved.write_text(saved.read_text().replace('execution = "eager"', 'execution = "graph"'))
    result = pretrain(out=run, overrides={"steps": STEPS + 2})
    assert dict(result) == {"run": run, "step": STEPS + 2, "is_finished": True}
    assert str(result) == f"{run}: step {STEPS + 2}, finished"
    assert Config.load(saved).train.execution == "eager"
    assert config_of_run(None, out=run, from_step=STEPS).train.steps == STEPS + 2
    assert config_of_run(None, out=tmp_path / "new") == Config()
    assert config_of_run(None, overrides={"objective.name": "two-stage"}) == Config().with_objective("two-stage")


class TestAllowedChanges:
    def test_changes_are_recorded_and_take_effect(self, run, validation_corpus, monkeypatch, capsys):
        """One permission is enough, even after a kill before the next checkpoint. Reverting is a change, too."""
        changed = tiny_config(**{"train.steps": "36", "optimizer.learning_rate": "2e-3"})
        with pytest.raises(ValueError, match=r"learning_rate = 0.002, but .* with 0.001; .* pass --allow-changes"):
            pretrain(validation_corpus, config=changed, out=run)
        assert not (run / "changes.jsonl").exists()
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr("electra_fast.training.trainer.Trainer.train", lambda *_: 1 / 0)
            pretrain(validation_corpus, config=changed, out=run, allow_changes=True)
        assert pretrain(config=Config.load(run / "config.toml")).step == 36
        assert "changed at step 24: optimizer.learning_rate = 0.001 is now 0.002" in stderr(capsys)
        changes = {"train.steps": [24, 36], "optimizer.learning_rate": [0.001, 0.002]}
        assert records_of_changes(run) == [(24, changes)]
        saved = Config.load(checkpoint_folder.latest(run) / "config.toml")
        assert saved.optimizer.learning_rate == 2e-3
        assert lines(run)[6]["learning_rate"] == pytest.approx(2e-3 * lr_scale(saved.optimizer, 27, 36))
        back = tiny_config(**{"train.steps": "36"})
        with pytest.raises(ValueError, match=r"learning_rate = 0.001, but this run was started with 0.002"):
            pretrain(validation_corpus, config=back, out=run)
        pretrain(validation_corpus, config=back, out=run, allow_changes=True)
        assert records_of_changes(run)[1] == (36, {"optimizer.learning_rate": [2e-3, 1e-3]})

    @pytest.mark.parametrize(("key", "value"), [("data.sequence_length", "32"), ("train.seed", "5")])
    def test_changed_rows_start_new_epoch(self, run, validation_corpus, capsys, key, value):
        """And the state records that an earlier packing has trained token type 1."""
        changed = tiny_config(**{"train.steps": "28", "data.packing": "best-fit", key: value})
        before = checkpoint_folder.read_state(checkpoint_folder.latest(run)).loader
        assert pretrain(validation_corpus, config=changed, out=run, allow_changes=True).step == 28
        assert "the data order restarts with a new epoch" in stderr(capsys)
        state = checkpoint_folder.read_state(checkpoint_folder.latest(run))
        assert state.token_type_1_trained and state.loader["epoch"] > before["epoch"]
        assert (state.loader["options"], state.loader["seed"]) != (before["options"], before["seed"])

    def test_other_corpus_with_same_vocabulary(self, run, validation_corpus, tiny_corpus):
        with pytest.raises(ValueError, match=r"content hash .*--allow-changes"):
            pretrain(tiny_corpus, config=tiny_config(), out=run)
        longer = tiny_config(**{"train.steps": "28"})
        assert pretrain(tiny_corpus, config=longer, out=run, allow_changes=True).step == 28
        with pytest.raises(ValueError, match="content hash"):
            pretrain(validation_corpus, config=longer, out=run)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("model.hidden_size", "128"),
            ("generator.num_layers", "1"),
            ("objective.name", "mlm"),
            ("optimizer.name", "lamb"),
            ("objective.corrective_weight", "1"),
        ],
    )
    def test_sizes_and_objective_fixed(self, whole_run, validation_corpus, key, value):
        with pytest.raises(ValueError, match=rf"{key} = .*another model or optimizer state"):
            pretrain(validation_corpus, config=tiny_config(**{key: value}), out=whole_run, allow_changes=True)

    def test_threads_and_prefetch_free(self, whole_run, run, validation_corpus):
        shutil.rmtree(checkpoint_folder.latest(run))
        changed = tiny_config(**{"data.num_threads": "3", "data.prefetch": "1"})
        pretrain(validation_corpus, config=changed, out=run)
        assert_same_run(run, whole_run)
        assert not (run / "changes.jsonl").exists()

    def test_former_value_names_accepted(self, whole_run, run, validation_corpus):
        """With the names of masking and packing of older releases, a run keeps its position in the stream of rows."""
        shutil.rmtree(checkpoint_folder.latest(run))
        newest = checkpoint_folder.latest(run)
        state = checkpoint_folder.read_state(newest)
        state.loader["options"] = former = re.sub("with-repeats|examples", "google", state.loader["options"])
        assert "masking=google" in former and "packing=google" in former
        for path in (run / "config.toml", newest / "config.toml"):
            path.write_text(re.sub("with-repeats|examples", "google", path.read_text()))
        (newest / "state.json").unlink()
        checkpoint_folder.seal(newest, state)
        faster = tiny_config(**{"optimizer.learning_rate": "2e-3"})
        pretrain(validation_corpus, config=faster, out=run, allow_changes=True)
        newest = map(checkpoint_folder.latest, (run, whole_run))
        ours, whole = (checkpoint_folder.read_state(folder).loader for folder in newest)
        assert ours == whole and [*records_of_changes(run)[0][1]] == ["optimizer.learning_rate"]


class TestDamage:
    def test_other_checkpoint_format_refused(self, run, validation_corpus, monkeypatch):
        newest = checkpoint_folder.latest(run)
        state = checkpoint_folder.read_state(newest)
        (newest / "state.json").unlink()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_folder, "STATE_VERSION", 1)
            checkpoint_folder.seal(newest, state)
        with pytest.raises(ValueError, match=r"state.json: format 1, expected 2; continue the run with the version"):
            pretrain(validation_corpus, config=tiny_config(), out=run)

    def test_damaged_newest_checkpoint_falls_back(self, whole_run, run, validation_corpus, capsys):
        """A command that is refused also reports the damage."""
        path = run / "checkpoints/step-24/optimizer.safetensors"
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="allow-changes"):
            pretrain(validation_corpus, config=tiny_config(**{"optimizer.learning_rate": "2e-3"}), out=run)
        err = stderr(capsys)
        assert f"warning: {path}: damaged (its checksum does not match); not used; renamed to damaged-step-24" in err
        assert pretrain(validation_corpus, config=tiny_config(), out=run).step == STEPS
        assert "resumes at step 21 of 24" in stderr(capsys)
        assert_same_run(run, whole_run)
        assert checkpoint_folder.steps(run) == [21, 24] and (run / "checkpoints/damaged-step-24").is_dir()

    def test_malformed_change_record_reported(self, run, validation_corpus):
        (run / "changes.jsonl").write_text('{"step": 3, "changes": {}}\n{"step": 24}\n')
        with pytest.raises(ValueError, match=r"changes.jsonl: line 2: not a record of changes"):
            pretrain(validation_corpus, config=tiny_config(), out=run)

    def test_no_intact_checkpoint_refused(self, run, validation_corpus):
        for step in checkpoint_folder.steps(run):
            (checkpoint_folder.path_of(run, step) / "config.toml").write_text("")
        with pytest.raises(ValueError, match=r"no intact checkpoint: .*step-24/config.toml: damaged.*step-21"):
            pretrain(validation_corpus, config=tiny_config(), out=run)


class TestWarmup:
    @pytest.mark.parametrize(
        ("preset", "steps", "warmup"),
        [("small", 1_000_000, 10_000), ("large", 400_000, 10_000), ("tiny", 2_000, 100), ("small", 100, 5)],
    )
    def test_warmup_follows_steps_unless_set(self, preset, steps, warmup):
        config = Config.preset(preset, "google").override({"train.steps": str(steps)})
        assert config.optimizer.num_warmup_steps(config.train.steps) == warmup
        factors = [lr_scale(config.optimizer, step, steps) for step in range(warmup + 1)]
        assert max(factors) == factors[warmup] >= 0.949
        assert config.override({"optimizer.warmup_steps": "0"}).optimizer.num_warmup_steps(steps) == 0

    def test_run_stores_warmup(self, validation_corpus, tmp_path):
        """The stored value stays when the run is extended."""
        for steps in ("40", "44"):
            config = tiny_config(**{"optimizer.warmup_steps": "-1", "train.steps": steps})
            pretrain(validation_corpus, config=config, out=tmp_path / "run")
            assert Config.load(tmp_path / "run/config.toml").optimizer.warmup_steps == 2

    @pytest.mark.parametrize(
        ("schedule", "warmup", "peak_percent"), [("linear", 240, "10%"), ("product", 240, "2%"), ("linear", 12, None)]
    )
    def test_endless_warmup_warns(self, schedule, warmup, peak_percent):
        config = tiny_config(**{"optimizer.schedule": schedule, "optimizer.warmup_steps": str(warmup)})
        messages = list(low_peak_warnings(config))
        assert len(messages) == (peak_percent is not None)
        if peak_percent is not None:
            name = f"warmup_steps = {warmup} with train.steps = {STEPS}"
            assert f"{name}: the learning rate never exceeds {peak_percent}" in messages[0]
            peak = max(lr_scale(config.optimizer, step, STEPS) for step in range(STEPS))
            assert peak == pytest.approx(float(peak_percent[:-1]) / 100, abs=0.0051)


class TestRates:
    @pytest.mark.parametrize(
        ("steps", "rate", "muon_rate"), [(100, 0.004, 0.02), (2500, 0.004, 0.01), (10**6, 0.0002, 0.0005)]
    )
    def test_modern_rates_follow_steps_unless_set(self, steps, rate, muon_rate):
        config = Config.preset("small", "modern").override({"train.steps": str(steps)})
        optimizer = config.resolved().optimizer
        assert (optimizer.learning_rate, optimizer.muon_learning_rate) == (rate, muon_rate)
        both = {"optimizer.learning_rate": "1e-3", "optimizer.muon_learning_rate": "3e-3"}
        optimizer = config.override(both).resolved().optimizer
        assert (optimizer.learning_rate, optimizer.muon_learning_rate) == (1e-3, 3e-3)

    def test_rates_follow_steps_of_stage(self):
        config = Config.preset("small", "modern").with_objective("two-stage")
        stage, whole = (config.override({"train.steps": steps}).resolved() for steps in (20_000, 10_000))
        electra = Config.preset("small", "modern").override({"train.steps": 10_000}).resolved()
        assert stage.optimizer == electra.optimizer != whole.optimizer
        assert stage.optimizer.warmup_steps == 500
        whole = Config.preset("tiny", "modern").override(steps=100, warmup_steps=120)
        assert not list(low_peak_warnings(whole))
        (messages,) = low_peak_warnings(whole.with_objective("two-stage"))
        assert "the learning rate never exceeds 42%" in messages

    def test_run_stores_and_keeps_rates(self, validation_corpus, tmp_path):
        left = {"optimizer.learning_rate": "0", "optimizer.muon_learning_rate": "0"}
        folder = tmp_path / "run"

        def rates(out, **changes):
            config = tiny_config("modern", **changes)
            pretrain(validation_corpus, config=config, out=out, allow_changes=True)
            stored = Config.load(out / "config.toml").optimizer
            return stored.learning_rate, stored.muon_learning_rate

        assert rates(tmp_path / "other", **left, **{"train.steps": "2"}) == (0.004, 0.02)
        assert rates(folder, **{"train.steps": "2"}) == rates(folder, **left, **{"train.steps": "4"}) == (1e-3, 0.01)
        record = {"step": 4, "changes": {"optimizer.learning_rate": [1e-3, 2e-3]}}
        (folder / "changes.jsonl").write_text(json.dumps(record) + "\n")
        assert rates(folder, **left, **{"train.steps": "6"}) == (2e-3, 0.01)

    def test_only_modern_encoder_has_rule(self):
        with pytest.raises(ValueError, match="optimizer.learning_rate = 0 .derived from train.steps.: needs"):
            tiny_config("google", **{"optimizer.learning_rate": "0"})


WITHOUT_TORCH = """
import json, sys
from electra_fast.cli import main
codes = [main(arguments) for arguments in json.loads(sys.argv[1])]
sys.exit(99 if "torch" in sys.modules else set(codes) != {2})
"""


@pytest.mark.process
def test_mistakes_reported_before_torch_import(run):
    messages = {
        ("--optimizer.learning_rate", "1"): "allow-changes",
        ("--train.stepz", "1"): "did you mean --steps?",
        ("--train.steps", "3"): "must be at least 24, the step of this run",
        ("nowhere",): "nowhere: not found",
    }
    commands = [["pretrain", "--out", str(run), *change] for change in messages]
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stderr = done.stderr.splitlines()
    assert len(stderr) == 4 and all(message in line for message, line in zip(messages.values(), stderr, strict=True))


def test_run_keeps_recipe_despite_default(run, validation_corpus, tmp_path):
    """The run of the fixture has recipe `google`."""
    keys = TINY | {"train.steps": str(STEPS + 2)}
    flags = [validation_corpus, "--out", run, *(f"--{name}={value}" for name, value in keys.items())]
    remedy = r'resume with --out alone, or with --recipe google \(recipe = "google" in the file\)'
    for more in ([], ["--allow-changes"]):
        done = in_process.run("pretrain", "--preset", "tiny", *more, *flags)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert re.search(rf"model.architecture = 'modernbert', but .* with 'bert', .*{remedy}", done.stderr)
    (tmp_path / "own.toml").write_text('preset = "tiny"\nrecipe = "google"\n')
    copies = [shutil.copytree(run, tmp_path / name) for name in "abc"]
    starts = (["--preset", "tiny", "--recipe", "google", *flags], ["--config", tmp_path / "own.toml", *flags])
    for copy, start in zip(copies, (*starts, ["--train.steps", STEPS + 2]), strict=True):
        done = in_process.run("pretrain", *start, "--out", copy)
        assert done.returncode == 0 and f"resumes at step {STEPS} of {STEPS + 2}" in done.stderr
    for copy in copies[1:]:
        assert_same_run(copy, copies[0])
    pretrain(validation_corpus, config=tiny_config("modern", **{"train.steps": "1"}), out=tmp_path / "modern")
    with pytest.raises(ValueError, match="or with --recipe modern "):
        pretrain(validation_corpus, config=tiny_config("google"), out=tmp_path / "modern")


def test_refused_commands(validation_corpus, tmp_path, monkeypatch):
    def refused(match, out=tmp_path / "run", **changes):
        with pytest.raises(ValueError, match=match):
            pretrain(validation_corpus, config=tiny_config(**changes), out=out)

    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.tex").write_text("years of work")
    refused("thesis.tex but no run", tmp_path / "thesis")
    refused("thesis.tex: is a file", tmp_path / "thesis/thesis.tex")
    refused("model.vocab_size = 77", **{"model.vocab_size": "77"})
    with exclusive(tmp_path / "run"):
        refused("another process is training")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused("one device")
