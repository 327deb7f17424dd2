"""Precision and matrix library of fine-tuning and prediction on a CPU are measured, reported, recorded and kept."""

import json

import in_process
import numpy as np
import pytest
import safetensors.torch
import torch
from test_finetuning import model_bytes
from tiny_task import QUICK, sentences

import electra_fast as ef
from electra_fast.errors import Diverged
from electra_fast.finetuning import inference
from electra_fast.finetuning.error_detection import read_detector
from electra_fast.finetuning.tasks.classifiers import SequenceClassifier
from electra_fast.finetuning.training import job as job_module
from electra_fast.finetuning.training import step as step_module
from electra_fast.finetuning.training.step import FinetuneStep, TaskBackward
from electra_fast.model.matmul import DEFAULT, KINDS, ONEDNN, MatmulMeasurement, fastest_matmul
from electra_fast.training import loss_scaling
from electra_fast.training.loss_scaling import LossScaler

AUTO = {"finetune.precision": "auto", "finetune.matmul": "auto"}
TEXTS = [text for text, _ in sentences(12, 5)]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device makes other choices")


@pytest.fixture
def bf16_cpu(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})


@pytest.fixture
def timed(monkeypatch):
    """Returns a function that sets the results of measurements; without a call, a measurement fails the test."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "avx512_bw": True})

    def set_times(fp32, bf16, speedup=1.0):
        def shortest_times(passes):
            for run in passes.values():
                run()
            return {"fp32": fp32, "bf16": bf16}

        seconds = {DEFAULT: dict.fromkeys(KINDS, speedup), ONEDNN: dict.fromkeys(KINDS, 1.0)}
        for module in (job_module, inference):
            monkeypatch.setattr(module, "shortest_times", shortest_times)
        monkeypatch.setattr(job_module, "measure_matmul", lambda *_: MatmulMeasurement(seconds, 1e-7))

    for name in ("shortest_times", "measure_matmul"):
        monkeypatch.setattr(job_module, name, lambda *_: pytest.fail("a measurement"))
    monkeypatch.setattr(inference, "shortest_times", lambda *_: pytest.fail("a measurement"))
    monkeypatch.setattr(inference, "fastest_matmul", lambda *_: ONEDNN)
    return set_times


class TestFinetuning:
    @pytest.fixture
    def finetune(self, encoder_folder, glue_folder):
        """Returns a function that fine-tunes with a number of seeds and returns `hardware` of task.json."""

        def finetune(out, seeds=1, **changes):
            overrides = QUICK | AUTO | changes
            ef.finetune(encoder_folder, task="sst2", glue=glue_folder, out=out, seeds=seeds, overrides=overrides)
            return json.loads((out / "sst2/task.json").read_text())["hardware"]

        return finetune

    def test_faster_choice_is_reported_recorded_and_kept(self, finetune, tmp_path, timed, capsys, products_by):
        timed(0.2, 0.1, 2.0)
        used = products_by(TaskBackward, "run")
        expected = {"device": "cpu", "precision": "bf16", "matmul": ONEDNN}
        assert finetune(tmp_path / "whole", seeds=2) == expected
        stderr = capsys.readouterr().err
        seconds = "(a part of a step takes 0.2 s in fp32, 0.1 s in bf16)"
        assert f"sst2: finetune.precision = auto: bf16 {seconds}" in stderr
        assert f"sst2: finetune.matmul = auto: {ONEDNN} (time of fp32 products with torch's default" in stderr
        finetune(tmp_path / "run")
        capsys.readouterr()
        timed(2.0, 0.1, 0.2)  # another result, if it were measured again
        assert finetune(tmp_path / "run", seeds=2) == expected
        assert "= auto" not in capsys.readouterr().err
        assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "whole")
        assert used == {ONEDNN}

    def test_explicit_choice_is_not_measured(self, finetune, tmp_path, timed, capsys):
        changes = {"finetune.precision": "bf16", "finetune.matmul": "default"}
        assert finetune(tmp_path, **changes) == {"device": "cpu", "precision": "bf16", "matmul": "default"}
        assert "auto" not in capsys.readouterr().err

    def test_missing_or_unusable_record_falls_back_to_fp32(self, finetune, tmp_path, timed, monkeypatch):
        """A folder without a record keeps fp32 and torch's default; bf16 is dropped if this machine lacks it."""
        timed(0.1, 0.2)
        chosen = {"device": "cpu", "precision": "fp32", "matmul": "default"}
        assert finetune(tmp_path) == chosen
        path = tmp_path / "sst2/task.json"
        record = json.loads(path.read_text())
        assert "matmul" not in record["finetune"]
        path.write_text(json.dumps({name: value for name, value in record.items() if name != "hardware"}))
        timed(0.2, 0.1, 2.0)
        assert finetune(tmp_path, seeds=2) == chosen
        path.write_text(json.dumps(record | {"hardware": chosen | {"precision": "bf16", "matmul": ONEDNN}}))
        monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
        assert finetune(tmp_path, seeds=3) == chosen

    @pytest.mark.parametrize(("task", "head"), [("stsb", "transformers"), ("squad2", "published")])
    def test_real_measurement(self, job_of, bf16_cpu, task, head):
        before = torch.get_rng_state()
        threads = torch.get_num_threads()
        job = job_of(task, **AUTO, **{"finetune.head": head})
        (note,) = job.notes
        assert note.startswith(f"finetune.precision = auto: {job.hardware['precision']} (a part of a step takes ")
        assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads

    def test_fp16_trains_with_loss_scaling(self, finetune, tmp_path, monkeypatch):
        """Without rounding to fp16, training with and without scaling is bitwise equal."""
        fp32 = QUICK | {"finetune.learning_rate": "3e-4"}
        assert finetune(tmp_path / "fp16", **fp32 | {"finetune.precision": "fp16"})["precision"] == "fp16"
        finetune(tmp_path / "exact", **fp32)
        monkeypatch.setattr(step_module, "loss_scaler", lambda _, device: LossScaler(device))
        finetune(tmp_path / "scaled", **fp32)
        fp16, exact, scaled = (model_bytes(tmp_path / name) for name in ("fp16", "exact", "scaled"))
        assert scaled == exact
        (name,) = exact
        actual, expected = (safetensors.torch.load(models[name]) for models in (fp16, exact))
        for weight in expected:
            torch.testing.assert_close(actual[weight], expected[weight], atol=5e-4, rtol=0)

    def test_fp16_scale_is_checkpointed_and_overflow_diverges(self, finetune, job_of, tmp_path, monkeypatch):
        work = job_of("stsb", **{"finetune.precision": "fp16"}).work
        step, other = (FinetuneStep(work.model(), work) for _ in range(2))
        step.scaler.adapt(torch.tensor(torch.inf))
        other.load_state_dict({name: tensor.clone() for name, tensor in step.state_dict().items()})
        assert float(other.scaler.scale) == loss_scaling.INITIAL_SCALE / 2
        other.reset()
        assert float(other.scaler.scale) == loss_scaling.INITIAL_SCALE
        monkeypatch.setattr(loss_scaling, "INITIAL_SCALE", 1.0)
        monkeypatch.setattr(step_module, "global_norm", lambda _: torch.tensor(torch.inf))
        with pytest.raises(Diverged, match="the loss or its gradient became NaN or infinite in steps 1-"):
            finetune(tmp_path / "out", **{"finetune.precision": "fp16"})


class TestPrediction:
    @pytest.fixture
    def folder(self, finetuned):
        return finetuned[0] / "sst2/seed-0/model"

    @pytest.mark.parametrize(("times", "precision", "atol"), [((0.2, 0.1), "bf16", 0.1), ((0.1, 0.2), "fp32", 1e-5)])
    def test_auto_chooses_faster_precision_and_reports_it(
        self, folder, tmp_path, timed, products_by, times, precision, atol
    ):
        used = products_by(SequenceClassifier, "predictions")
        exact = ef.load(folder, precision="fp32")
        assert exact.note == ""
        timed(*times)
        model = ef.load(folder)
        seconds = f"{times[0]} s in fp32, {times[1]} s in bf16"
        assert model.note == f"precision = auto: {precision} (256 tokens take {seconds})"
        outputs = model.outputs(TEXTS)
        expected = exact.outputs(TEXTS)
        np.testing.assert_allclose(outputs, expected, atol=atol)
        assert np.array_equal(outputs, expected) == (precision == "fp32")
        (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
        run = in_process.run("predict", folder, tmp_path / "texts.txt")
        assert run.stderr.startswith(model.note + "\n") and run.returncode == 0
        assert [json.loads(line)["scores"] for line in run.stdout.splitlines()] == [
            answer["scores"] for answer in model.predict(TEXTS)
        ]
        assert used == {ONEDNN}

    def test_explicit_precision_is_not_measured(self, folder, tmp_path, timed):
        (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
        scores = []
        for precision in ("fp32", "bf16"):
            run = in_process.run("predict", folder, tmp_path / "texts.txt", "--precision", precision)
            assert "= auto" not in run.stderr and run.returncode == 0
            scores.append([json.loads(line)["scores"] for line in run.stdout.splitlines()])
            answers = ef.load(folder, precision=precision).predict(TEXTS)
            assert scores[-1] == [answer["scores"] for answer in answers]
        assert scores[0] != scores[1]

    def test_fp16_outputs_are_correct_or_error(self, folder):
        model = ef.load(folder, precision="fp16")
        exact = ef.load(folder, precision="fp32").outputs(TEXTS)
        np.testing.assert_allclose(model.outputs(TEXTS), exact, atol=0.02)
        with torch.no_grad():
            for parameter in model._model.parameters():
                parameter *= 1e4
        with pytest.raises(ValueError, match='the maximum of fp16; set precision = "fp32"'):
            model.outputs(TEXTS)

    def test_error_detector_chooses_precision(self, whole_run, timed):
        timed(0.2, 0.1)
        detector = read_detector(whole_run)
        assert detector.note.startswith("precision = auto: bf16 (512 tokens take 0.2 s in fp32")
        exact = ef.load(whole_run, precision="fp32").detect(TEXTS)
        answers = detector.predict(TEXTS)
        assert answers != exact
        assert [answer["score"] for answer in answers] == pytest.approx([answer["score"] for answer in exact], abs=0.02)

    def test_real_measurements(self, folder, own_processor):
        """The answers are close for any choice."""
        fastest_matmul.cache_clear()
        exact = ef.load(folder, precision="fp32").outputs(TEXTS)
        np.testing.assert_allclose(ef.load(folder).outputs(TEXTS), exact, atol=0.1)
        fastest_matmul.cache_clear()
