"""Out of memory: retries with smaller batches if the result is the same, otherwise one line with the key to set."""

import shutil

import numpy as np
import pytest
import torch
from tiny_run import tiny_config
from tiny_task import QUICK, sentences

import electra_fast as ef
from electra_fast.errors import OutOfMemory
from electra_fast.finetuning.tasks.classifiers import SequenceClassifier
from electra_fast.finetuning.training.step import TaskBackward
from electra_fast.objectives.electra import ElectraObjective
from electra_fast.training.evaluate import evaluate
from electra_fast.training.step import Backward

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1 MiB is free."
SHORT = r"out of memory \(CUDA out of memory. Tried to allocate 2.00 GiB\); "


@pytest.fixture
def limit(monkeypatch):
    """Returns a function that makes a method run out of memory unless its arguments pass a test."""

    def limit(owner, name, passes):
        original = getattr(owner, name)
        passed = []

        def limited(self, *args):
            if not passes(*args):
                raise torch.OutOfMemoryError(TEXT)
            passed.append(args)
            return original(self, *args)

        monkeypatch.setattr(owner, name, limited)
        return passed

    return limit


def test_evaluation_retries_with_fewer_rows(whole_run, validation_corpus, limit):
    settings = {"max_batches": 2, "sequence_length": 16}
    expected = dict(evaluate(whole_run, validation_corpus, **settings))
    passed = limit(ElectraObjective, "forward", lambda _, batch: len(batch.tensors["input_ids"]) <= 3)
    result = dict(evaluate(whole_run, validation_corpus, **settings))
    floats = [name for name, value in expected.items() if isinstance(value, float)]
    assert [result.pop(name) for name in floats] == pytest.approx([expected.pop(name) for name in floats], rel=1e-6)
    assert result == expected and [len(batch.tensors["input_ids"]) for _, batch in passed] == [2] * 16
    limit(ElectraObjective, "forward", lambda *_: False)
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(whole_run, validation_corpus, **settings)


def test_prediction_retries_with_fewer_examples(finetuned, limit):
    texts = [text for text, _ in sentences(40, 5)]
    model = ef.load(finetuned[0] / "sst2/seed-0/model", precision="fp32")
    expected = model.outputs(texts)
    passed = limit(SequenceClassifier, "predictions", lambda inputs, _: inputs.columns_5RL[0].numel() < 300)
    np.testing.assert_allclose(model.outputs(texts), expected, atol=1e-5)
    assert len(passed) > 2
    limit(SequenceClassifier, "predictions", lambda *_: False)
    with pytest.raises(torch.OutOfMemoryError):
        model.outputs(texts)


@pytest.mark.parametrize(
    ("accumulate", "remedy"), [(2, "run again with --train.accumulate 4"), (8, "choose a smaller")]
)
def test_training_suggests_next_accumulate(whole_run, validation_corpus, tmp_path, limit, accumulate, remedy):
    run = shutil.copytree(whole_run, tmp_path / "run")
    limit(Backward, "run", lambda *_: False)
    config = tiny_config(**{"train.steps": "27", "train.accumulate": str(accumulate)})
    with pytest.raises(OutOfMemory, match=f"run: step 24: {SHORT}{remedy}"):
        ef.pretrain(validation_corpus, config=config, out=run)


def test_failed_graph_capture_does_not_hide_out_of_memory(whole_run, validation_corpus, tmp_path, monkeypatch):
    def run(*_):
        try:
            raise torch.OutOfMemoryError(TEXT)
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(Backward, "run", run)
    with pytest.raises(OutOfMemory, match=r"--train.accumulate 4"):
        ef.pretrain(validation_corpus, config=tiny_config(), out=tmp_path / "run")


def test_finetuning_suggests_half_the_batch_size(encoder_folder, glue_folder, tmp_path, limit):
    limit(TaskBackward, "run", lambda *_: False)
    with pytest.raises(OutOfMemory, match=f"seed-0: step 0: {SHORT}run again with --finetune.batch_size 4"):
        ef.finetune(encoder_folder, task="sst2", glue=glue_folder / "SST-2", out=tmp_path / "out", overrides=QUICK)
