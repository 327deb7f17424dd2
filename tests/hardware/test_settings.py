"""The choices of `auto` for this machine: from a measurement or a rule, recorded in the run, and kept on resume."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_run import STEPS, assert_same_run, lines, tiny_config, truncate

from electra_fast.config.config import AUTO, HARDWARE_KEYS, Config
from electra_fast.files import checkpoint_folder
from electra_fast.hardware import settings as hardware
from electra_fast.hardware.settings import Measurement, measure, measure_products, shortest_times
from electra_fast.huggingface.export import export, import_
from electra_fast.model.compute import ComputeConfig, choose_compute, choose_precision
from electra_fast.model.heads import DiscriminatorHead
from electra_fast.model.matmul import DEFAULT, KINDS, ONEDNN, MatmulMeasurement
from electra_fast.training import trainer
from electra_fast.training.pretrain import pretrain
from electra_fast.training.run import Run

CPU = torch.device("cpu")
CHOSEN = {"train.matmul": "default", "train.precision": "fp32", "model.attention": "sdpa", "train.execution": "eager"}
CHOSEN["train.accumulate"] = 2  # as configured

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device makes other choices")


def auto_config(**changes):
    return tiny_config(**{"train.precision": AUTO, "train.matmul": AUTO} | changes)


def hardware_values(folder):
    config = Config.load(folder / "config.toml")
    return {name: config.value(name) for name in HARDWARE_KEYS}


def stderr(capsys):
    return capsys.readouterr().err


@pytest.fixture
def bf16_cpu(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})


@pytest.fixture
def timed(monkeypatch, bf16_cpu):
    """Returns a function that sets the result of a measurement. Before it is called, a measurement fails the test."""

    def set_times(fp32, bf16):
        monkeypatch.setattr(hardware, "measure", lambda _: Measurement(4, 16, {"fp32": fp32, "bf16": bf16}))

    monkeypatch.setattr(hardware, "measure", lambda _: pytest.fail("a measurement"))
    return set_times


@pytest.fixture
def products(monkeypatch, timed):
    """Returns a function that sets the measured speedup of oneDNN. Before it is called, measuring fails the test."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bw": True, "avx512_bf16": True})

    def set_speedup(speedup):
        seconds = {DEFAULT: dict.fromkeys(KINDS, speedup), ONEDNN: dict.fromkeys(KINDS, 1.0)}
        monkeypatch.setattr(hardware, "measure_products", lambda _: MatmulMeasurement(seconds, 1e-7))

    monkeypatch.setattr(hardware, "measure_products", lambda _: pytest.fail("a measurement"))
    return set_speedup


@pytest.fixture
def run(whole_run, tmp_path):
    """A finished run, in fp32."""
    return shutil.copytree(whole_run, tmp_path / "run")


def recorded_as(run, step=21, **values):
    """Makes a checkpoint the newest, with other values in its config.toml, as if the run were from another machine."""
    truncate(run, step)
    newest = checkpoint_folder.path_of(run, step)
    state = checkpoint_folder.read_state(newest)
    (newest / "state.json").unlink()
    config = Config.load(newest / "config.toml").override(values)
    for folder in (newest, run):
        (folder / "config.toml").write_text(config.to_toml())
    checkpoint_folder.seal(newest, state)


class TestMeasurement:
    def test_faster_precision_and_library_chosen_and_kept(
        self, validation_corpus, tmp_path, timed, products, capsys, products_by
    ):
        used = products_by(DiscriminatorHead)
        timed(0.4, 0.25)
        products(2.5)
        out = tmp_path / "run"
        other = tmp_path / "other"
        pretrain(validation_corpus, config=auto_config(), out=out)
        err = stderr(capsys)
        line = "forward and backward passes of 4 rows of 16 tokens take 0.4 s in fp32, 0.25 s in bf16"
        assert f"train.precision = auto: bf16 ({line})" in err
        line = "time of fp32 products with torch's default, relative to oneDNN: " + ", ".join(
            f"{k} 2.50" for k in KINDS
        )
        assert f"train.matmul = auto: onednn ({line})" in err and used == {"onednn"}
        expected = CHOSEN | {"train.precision": "bf16", "train.matmul": "onednn"}
        assert hardware_values(out) == hardware_values(checkpoint_folder.latest(out)) == expected
        facts = json.loads((out / "environment.jsonl").read_text())
        assert (facts["activations"], facts["matmul"]) == ("bfloat16", "onednn")
        shutil.copytree(out, other)
        shutil.rmtree(checkpoint_folder.latest(other))
        timed(0.1, 0.2)  # a new measurement would choose otherwise
        products(0.4)
        pretrain(validation_corpus, config=auto_config(), out=other)
        assert_same_run(other, out)
        assert hardware_values(other) == expected and not (other / "changes.jsonl").exists()
        assert "auto" not in stderr(capsys)

    def test_measured_run_equals_run_with_set_values(self, validation_corpus, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bw": True, "avx512_bf16": True})
        few = {"train.steps": "8"}
        calls = []
        for name, result in (("measure_products", measure_products), ("measure", measure)):
            noted = lambda config, name=name, result=result: calls.append((name, config)) or result(config)  # noqa: E731
            monkeypatch.setattr(hardware, name, noted)
        pretrain(validation_corpus, config=auto_config(**few), out=tmp_path / "auto")
        assert "forward and backward passes of 4 rows of 16 tokens take" in stderr(capsys)
        values = hardware_values(tmp_path / "auto")
        assert [name for name, _ in calls] == ["measure_products", "measure"]
        assert calls[1][1].train.matmul == values["train.matmul"] != AUTO
        chosen = {name: values[name] for name in ("train.precision", "train.matmul")}
        pretrain(validation_corpus, config=auto_config(**few, **chosen), out=tmp_path / "given")
        assert_same_run(tmp_path / "auto", tmp_path / "given")
        assert "forward and backward" not in stderr(capsys)

    def test_precisions_give_different_losses(self, validation_corpus, monkeypatch):
        used = []
        monkeypatch.setattr(hardware, "choose_compute", lambda *args: used.append(choose_compute(*args)) or used[-1])
        measure(tiny_config(**{"data.corpus": str(validation_corpus), "model.vocab_size": "800"}))
        assert [compute.dtype for compute in used[1:5]] == 2 * [torch.float32, torch.bfloat16]

    def test_passes_alternate_and_shortest_time_counts(self, monkeypatch):
        now = [0.0]
        order = []
        monkeypatch.setattr(hardware.time, "perf_counter", lambda: now[0])

        def passes(**seconds):
            def run_pass(name):
                order.append(name)
                now[0] += seconds[name].pop(0)

            return {name: lambda name=name: run_pass(name) for name in seconds}

        assert shortest_times(passes(a=[1, 0.5, 0.25, 0.75], b=[0.5, 0.25, 1, 0.5])) == {"a": 0.25, "b": 0.25}
        assert order == list("abababab")
        assert shortest_times(passes(a=[9, 8], b=[5, 4])) == {"a": 8, "b": 4}  # slow passes run once

    def test_large_micro_batch_measured_with_fewer_rows(self):
        large = Config.preset("base", "google").override({"model.vocab_size": "30522"})
        assert 1 <= hardware._num_rows(large, 1) < 8
        tiny = tiny_config(**{"model.vocab_size": "800", "train.accumulate": "1"})
        assert hardware._num_rows(tiny, 1) == 8 and hardware._num_rows(tiny, 2) == 4


class TestRules:
    def test_no_measurement_without_choice(self, validation_corpus, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bw": True, "amx_tile": True})
        for name in ("measure", "measure_products"):
            monkeypatch.setattr(hardware, name, lambda _: pytest.fail("a measurement"))
        pretrain(validation_corpus, config=auto_config(**{"train.steps": "4"}), out=tmp_path / "run")
        assert hardware_values(tmp_path / "run") == CHOSEN
        assert "auto" not in stderr(capsys)

    def test_fp32_without_measurement(self, bf16_cpu):
        assert choose_precision(AUTO, CPU) == AUTO
        assert choose_compute(auto_config(), CPU).dtype == torch.float32


class TestResume:
    def test_same_command_keeps_choices(self, whole_run, run, validation_corpus, timed, capsys):
        shutil.rmtree(checkpoint_folder.latest(run))
        pretrain(validation_corpus, config=auto_config(), out=run)
        assert_same_run(run, whole_run)
        assert hardware_values(run) == CHOSEN and not (run / "changes.jsonl").exists()
        assert "auto" not in stderr(capsys)

    def test_other_precision_needs_allow_changes(self, run, validation_corpus, timed, capsys):
        changed = auto_config(**{"train.precision": "bf16", "train.steps": "27"})
        with pytest.raises(ValueError, match=r"train.precision = 'bf16', but .* with 'fp32'; .* pass --allow-changes"):
            pretrain(validation_corpus, config=changed, out=run)
        pretrain(validation_corpus, config=changed, out=run, allow_changes=True)
        assert "changed at step 24: train.precision = 'fp32' is now 'bf16'" in stderr(capsys)
        pretrain(validation_corpus, config=auto_config(**{"train.steps": "27"}), out=run)
        assert hardware_values(run)["train.precision"] == "bf16"


@pytest.mark.parametrize(("kernels", "fails_at", "expected"), [("*", 0, [1, 2]), ("x", 2, [1]), ("x", 1, [1, 2])])
def test_micro_batches_fit_chosen_kernels(monkeypatch, tmp_path, kernels, fails_at, expected):
    """References need more memory than kernels, or a step runs out of memory despite the estimate."""
    seen = []

    def resolve(config, device, folder, world_size, time_steps):
        seen.append(config.train.accumulate)
        settled = config.override({"model.attention": "sdpa", "train.execution": "eager"})
        messages = ["step by graph: out of memory"] if seen[-1] == fails_at else ["checked"]
        return settled, {kernels: "reference"}, messages

    def choose(config, compute, device, world_size):
        accumulate = 2 if ("*", "reference") in compute.kernels else config.train.num_micro_batches
        return accumulate, f"{accumulate} fit"

    monkeypatch.setattr(hardware, "resolve_kernels", resolve)
    monkeypatch.setattr(hardware, "choose_accumulate", choose)
    monkeypatch.setattr(hardware, "before_kernels", lambda config, _: config)
    monkeypatch.setattr(hardware, "choose_compute", lambda *_: ComputeConfig("sdpa", torch.float32))
    config = auto_config(**{"train.accumulate": AUTO})
    cuda = torch.device("cuda:0")
    settled, _, messages = hardware._resolve_gpu(config, cuda, tmp_path, 1, None, is_divisible=True)
    assert seen == expected and messages == ["checked", f"{expected[-1]} fit"]
    assert settled.train.accumulate == expected[-1] and settled.train.execution == "eager"


def test_ranks_wait_for_check_of_first_rank(monkeypatch, tmp_path):
    """The check runs in another thread, on the first rank's GPU."""
    done = []

    class World:
        size = 1

        def from_first_patiently(self, work):
            with ThreadPoolExecutor(1) as executor:
                return executor.submit(work).result()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(trainer, "resolve_hardware", lambda config, *_: (config, {"*": "x"}, ["a line"]))
    config = auto_config(**{"train.kernels": "reference"})
    run, lines = trainer._resolve_for_all(Run(tmp_path, config), torch.device("cuda"), World())
    assert (run.config, run.kernels, lines, done) == (config, (("*", "x"),), ["a line"], [3])


class TestAnotherDevice:
    def test_unavailable_choices_made_again(self, whole_run, run, validation_corpus, timed, capsys):
        """A run from a GPU or another processor is resumed on this CPU."""
        recorded = {"train.execution": "graph", "model.attention": "varlen", "train.matmul": "onednn"}
        recorded_as(run, **recorded)
        pretrain(validation_corpus, config=auto_config(), out=run)
        err = stderr(capsys)
        for key, value in recorded.items():
            assert f'{key} = auto: {CHOSEN[key]}, since the recorded "{value}" cannot run on this device' in err
        assert hardware_values(run) == hardware_values(checkpoint_folder.latest(run)) == CHOSEN
        assert lines(run) == lines(whole_run)
        record = json.loads((run / "changes.jsonl").read_text())
        changes = {"model.attention": ["varlen", "sdpa"], "train.matmul": ["onednn", "default"]}
        assert (record["step"], record["changes"]) == (21, changes)

    def test_too_large_micro_batch_divided(self, run, validation_corpus, timed, monkeypatch, capsys):
        shutil.rmtree(checkpoint_folder.latest(run))
        asked = []
        choose = lambda config, *_: asked.append(config.train.accumulate) or (4, "4 micro-batches fit")  # noqa: E731
        monkeypatch.setattr(hardware, "choose_accumulate", choose)
        pretrain(validation_corpus, config=auto_config(), out=run)
        assert not asked and hardware_values(run)["train.accumulate"] == 2  # as configured
        shutil.rmtree(checkpoint_folder.latest(run))
        pretrain(validation_corpus, config=auto_config(**{"train.accumulate": AUTO}), out=run)
        assert 'train.accumulate = auto: 4, since the recorded "2" cannot run on this device' in stderr(capsys)
        assert asked == [2] and hardware_values(run)["train.accumulate"] == 4
        assert not (run / "changes.jsonl").exists()

    def test_new_choice_survives_kill(self, run, validation_corpus, timed, monkeypatch):
        recorded_as(run, **{"train.execution": "graph", "model.attention": "varlen"})
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr("electra_fast.training.trainer.Trainer.train", lambda *_: 1 / 0)
            pretrain(validation_corpus, config=auto_config(), out=run)
        assert pretrain(validation_corpus, config=auto_config(), out=run).step == STEPS
        assert len((run / "changes.jsonl").read_text().splitlines()) == 1

    @pytest.mark.parametrize(
        ("key", "value", "need"),
        [
            ("train.execution", "graph", "needs a CUDA device"),
            ("model.attention", "varlen", "needs a CUDA device"),
            ("train.matmul", "onednn", "requires AVX-512"),
        ],
    )
    def test_unavailable_explicit_value_refused(self, run, validation_corpus, timed, key, value, need):
        recorded_as(run, **{key: value})
        with pytest.raises(ValueError, match=f'{key.partition(".")[2]} = "{value}": {need}'):
            pretrain(validation_corpus, config=Config.load(run / "config.toml"), out=run)

    def test_better_choices_reported_but_not_made(self, whole_run, run, validation_corpus, timed, monkeypatch, capsys):
        """A run from a CPU is resumed on a device with three other choices."""
        shutil.rmtree(checkpoint_folder.latest(run))
        better = {"train.precision": "bf16", "model.attention": "varlen", "train.execution": "graph"}
        better["train.matmul"] = "default"

        def rule(name):
            return lambda config, _: better[name] if config.value(name) == AUTO else config.value(name)

        monkeypatch.setattr(hardware, "_RULES", {name: rule(name) for name in better})
        pretrain(validation_corpus, config=auto_config(), out=run)
        err = stderr(capsys)
        assert "model.attention = sdpa, train.precision = fp32, train.execution = eager: kept as recorded in" in err
        options = "--model.attention varlen --train.precision bf16 --train.execution graph --allow-changes"
        assert f"a new run on this device would use {options}\n" in err
        assert_same_run(run, whole_run)
        pretrain(validation_corpus, config=tiny_config(**{"model.attention": "sdpa"}), out=run)
        assert "a new run on this device would use --train.execution graph\n" in stderr(capsys)


class TestNothingRecorded:
    def test_import_makes_new_choices(self, run, validation_corpus, tmp_path, timed, monkeypatch):
        recorded_as(run, **{"train.execution": "graph", "model.attention": "varlen"})
        export(run, out=tmp_path / "out", unfinished=True)
        import_(tmp_path / "out", out=tmp_path / "again")
        assert set(hardware_values(tmp_path / "again").values()) == {AUTO}
        timed(0.2, 0.1)
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr("electra_fast.training.trainer.Trainer.train", lambda *_: 1 / 0)
            pretrain(validation_corpus, config=Config.load(tmp_path / "again/config.toml"), out=tmp_path / "again")
        pretrain(validation_corpus, config=Config.load(tmp_path / "again/config.toml"), out=tmp_path / "again")
        assert hardware_values(checkpoint_folder.latest(tmp_path / "again")) == {
            **CHOSEN,
            "train.precision": "bf16",
            "train.accumulate": 1,
        }
