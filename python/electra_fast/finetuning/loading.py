"""`load`: opens the folder of any model for use from Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

from electra_fast.config.config import AUTO
from electra_fast.errors import InputError
from electra_fast.finetuning.config import Precision
from electra_fast.finetuning.model_folder import is_finetuned, models_inside, read_description

if TYPE_CHECKING:
    from electra_fast.finetuning.finetuned_model import FinetunedModel
    from electra_fast.finetuning.onnx_model import OnnxModel
    from electra_fast.finetuning.pretrained_model import PretrainedModel


def load(
    path: str | Path, *, device: str = AUTO, precision: Precision = "auto"
) -> PretrainedModel | FinetunedModel | OnnxModel:
    """Loads a model: a `FinetunedModel` or `OnnxModel` if it was fine-tuned for a task, else a `PretrainedModel`.

    Args:
        path: A run (its latest checkpoint), a checkpoint, an export or one of its folders; a folder that `finetune`
            wrote; a folder that `export --onnx` wrote, which needs no torch; or a folder of a supported model of
            `transformers` or sentence-transformers.
        device: `auto` (CUDA if there is a GPU), `cpu`, `cuda` or `cuda:N`.
        precision: Dtype of activations: `fp32`, `fp16` or `bf16`. With `auto`, `encode` computes in fp32, like
            sentence-transformers; `predict` and `detect` compute in bf16 on CUDA, and on a CPU in the faster dtype in a
            short measurement. An ONNX model has a fixed precision.

    Raises:
        FileNotFoundError, ValueError: The message names the file, field, value and remedy.
    """
    source = Path(path)
    if precision not in get_args(Precision):
        raise InputError(f"precision = {precision!r}: must be one of {', '.join(get_args(Precision))}")
    if hint := models_inside(source):
        raise InputError(f"{source}: {hint}")
    if is_finetuned(source):
        return load_finetuned(source, device, precision)
    from electra_fast.finetuning.pretrained_model import PretrainedModel  # imports torch

    return PretrainedModel(source, device=device, precision=precision)


def load_finetuned(folder: Path, device: str, precision: str) -> FinetunedModel | OnnxModel:
    """Loads a fine-tuned model; raises the errors of `load`, also for a folder of another kind."""
    if read_description(folder).onnx:
        from electra_fast.finetuning.onnx_model import OnnxModel

        return OnnxModel(folder, device=device, precision=precision)
    from electra_fast.finetuning.finetuned_model import FinetunedModel  # imports torch, which ONNX does without

    return FinetunedModel(folder, device=device, precision=precision)
