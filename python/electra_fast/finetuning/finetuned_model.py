"""`FinetunedModel`: a fine-tuned model in torch."""

from __future__ import annotations

from pathlib import Path

from electra_fast.config.config import AUTO
from electra_fast.finetuning.embedding import TextEncoder
from electra_fast.finetuning.inference import choose_inference
from electra_fast.finetuning.model_folder import read_finetuned
from electra_fast.finetuning.predictor import Predictor
from electra_fast.huggingface.sentence_settings import SentenceSettings
from electra_fast.huggingface.tokenizer import tokenizer_length
from electra_fast.model.compute import choose_device


class FinetunedModel(Predictor, TextEncoder):
    """A fine-tuned model from a folder of `finetune`, or of the `transformers` classes for these tasks.

    `predict` computes in `precision`; by default bf16 on CUDA, and on a CPU the faster dtype in a short measurement.
    """

    def __init__(self, folder: str | Path, *, device: str = AUTO, precision: str = AUTO) -> None:
        folder = Path(folder)
        finetuned = read_finetuned(folder)
        target = choose_device(device)
        Predictor.__init__(self, folder, finetuned)
        self._model = model = self.task_type.model(finetuned.shape, self._config, len(finetuned.labels))
        model.load_state_dict(self.task_type.from_units(self.task, finetuned.state, self._settings))
        model.to(target).eval()
        sentences = SentenceSettings(tokenizer_length(folder))
        TextEncoder.__init__(self, finetuned.shape, model, self.tokenizer, sentences, target, precision)
        self._inference, self.note = choose_inference(model, target, precision)
