"""Pre-train text encoders by replaced-token detection (ELECTRA).

The names here are the public API. They are imported on first use, so that `electra-fast prepare` does not load torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from electra_fast._data import VERSION as __version__

if TYPE_CHECKING:
    from electra_fast.adaptation import AdaptResult, adapt
    from electra_fast.config.config import Config
    from electra_fast.data.corpus import Corpus, Tokenizer, Verification, verify
    from electra_fast.data.inspect import Inspection, inspect
    from electra_fast.data.loader import BatchLoader, to_torch
    from electra_fast.data.prepare import prepare, vocab
    from electra_fast.data.prepare_report import PrepareReport, Vocabulary
    from electra_fast.demonstration import DemoResult, demo
    from electra_fast.errors import (
        Diverged,
        ElectraFastError,
        ExecutorFailed,
        InputError,
        Interrupted,
        OutOfMemory,
        StopTraining,
        TrainingFailed,
    )
    from electra_fast.finetuning.error_detection import detect
    from electra_fast.finetuning.evaluate import EvaluationReport, evaluate
    from electra_fast.finetuning.export import OnnxExport, export
    from electra_fast.finetuning.finetune import FinetuneResults, TaskResult, finetune
    from electra_fast.finetuning.finetuned_model import FinetunedModel
    from electra_fast.finetuning.loading import load
    from electra_fast.finetuning.minimal_pairs import PairsReport
    from electra_fast.finetuning.onnx_model import OnnxModel
    from electra_fast.finetuning.predict import predict
    from electra_fast.finetuning.pretrained_model import PretrainedModel
    from electra_fast.hardware.flops import FlopCount, flops
    from electra_fast.huggingface.export import ExportResult, ImportResult, import_
    from electra_fast.model.model import Electra
    from electra_fast.reproduction.report import Comparison
    from electra_fast.reproduction.reproduce import reproduce
    from electra_fast.run_report.report import Report, report
    from electra_fast.training.doctor import DoctorReport, doctor
    from electra_fast.training.evaluate import Evaluation
    from electra_fast.training.plan import Plan, plan
    from electra_fast.training.pretrain import PretrainResult, pretrain

# Before torch loads OpenMP: let waiting threads sleep. On a busy machine, spinning ones are up to fifteen times slower
# (bench/LOG.md), and training hardly waits (`distributed.step_processes`).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_NAMES = {
    "adaptation": "AdaptResult adapt",
    "config.config": "Config",
    "data.corpus": "Corpus Tokenizer Verification verify",
    "data.inspect": "Inspection inspect",
    "data.loader": "BatchLoader to_torch",
    "data.prepare": "prepare vocab",
    "data.prepare_report": "PrepareReport Vocabulary",
    "demonstration": "DemoResult demo",
    "errors": "Diverged ElectraFastError ExecutorFailed InputError Interrupted OutOfMemory StopTraining TrainingFailed",
    "finetuning.error_detection": "detect",
    "finetuning.evaluate": "EvaluationReport evaluate",
    "finetuning.export": "OnnxExport export",
    "finetuning.finetune": "FinetuneResults TaskResult finetune",
    "finetuning.finetuned_model": "FinetunedModel",
    "finetuning.loading": "load",
    "finetuning.minimal_pairs": "PairsReport",
    "finetuning.onnx_model": "OnnxModel",
    "finetuning.predict": "predict",
    "finetuning.pretrained_model": "PretrainedModel",
    "hardware.flops": "FlopCount flops",
    "huggingface.export": "ExportResult ImportResult import_",
    "model.model": "Electra",
    "reproduction.report": "Comparison",
    "reproduction.reproduce": "reproduce",
    "run_report.report": "Report report",
    "training.doctor": "DoctorReport doctor",
    "training.evaluate": "Evaluation",
    "training.plan": "Plan plan",
    "training.pretrain": "PretrainResult pretrain",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
# Former names; the error about one of them has the current name.
_FORMER = {"train_vocab": "vocab", "import_folder": "import_", "load_finetuned": "load", "load_error_detector": "load"}

__all__ = [
    "AdaptResult", "BatchLoader", "Comparison", "Config", "Corpus", "DemoResult", "Diverged", "DoctorReport", "Electra",
    "ElectraFastError", "Evaluation", "EvaluationReport", "ExecutorFailed", "ExportResult", "FinetuneResults",
    "FinetunedModel", "FlopCount", "ImportResult", "InputError", "Inspection", "Interrupted", "OnnxExport", "OnnxModel",
    "OutOfMemory", "PairsReport", "Plan", "PrepareReport", "PretrainResult", "PretrainedModel", "Report",
    "StopTraining", "TaskResult", "Tokenizer", "TrainingFailed", "Verification", "Vocabulary", "__version__", "adapt",
    "demo", "detect", "doctor", "evaluate", "export", "finetune", "flops", "import_", "inspect", "load", "plan",
    "predict", "prepare", "pretrain", "report", "reproduce", "to_torch", "verify", "vocab",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        if name in _FORMER:
            raise AttributeError(f"{__name__}.{name} is now {__name__}.{_FORMER[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Returns the public names, imported or not, for completion in notebooks."""
    return list(__all__)
