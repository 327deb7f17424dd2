"""`detect`: finds words that do not belong in a text, such as typing errors.

It needs no fine-tuning: the discriminator of a run, a checkpoint or a Hugging Face folder predicts replaced tokens.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from electra_fast import checkpoint
from electra_fast.config.config import AUTO
from electra_fast.data.corpus import Pieces, Tokenizer
from electra_fast.errors import InputError
from electra_fast.finetuning.config import Precision
from electra_fast.finetuning.embedding import checked_texts
from electra_fast.finetuning.encoding import text_chunks
from electra_fast.finetuning.inference import choose_inference
from electra_fast.finetuning.prediction_input import ExampleReader, Source
from electra_fast.finetuning.prediction_output import answer_file
from electra_fast.finetuning.readers.delimited import Dialect
from electra_fast.finetuning.readers.rows import Row, as_names, text_of
from electra_fast.finetuning.scoring import PretrainedNetwork
from electra_fast.finetuning.task import Prediction, rounded
from electra_fast.huggingface.config import is_headless, own_config, read_table
from electra_fast.huggingface.folder import read_models
from electra_fast.huggingface.source import checkpoint_of, folders_of, open_tokenizer
from electra_fast.model.compute import choose_device
from electra_fast.model.model import Electra

ROLE = "discriminator"


class ErrorDetector(ExampleReader):
    """Predicts for each word of a text the probability that it does not belong there.

    Texts of more than `sequence_length` tokens, including [CLS] and [SEP], are split into chunks that overlap by half.
    """

    def __init__(
        self,
        model: Electra,
        tokenizer: Tokenizer,
        device: torch.device,
        sequence_length: int,
        precision: str,
    ) -> None:
        self.sequence_length = sequence_length
        self.tokenizer = tokenizer
        network = PretrainedNetwork(model, ROLE, model.discriminator_head)
        self._inference, self.note = choose_inference(network.to(device).eval(), device, precision)

    usual_columns = (("text",),)

    def example(self, path: Path, line: int, row: Row, columns: tuple[str, ...], number: int) -> str:
        return text_of(path, line, row, columns[0])

    def predict(self, texts: Iterable[str], threshold: float = 0.5) -> list[Prediction]:
        """Returns one answer per text, in the format of `PretrainedModel.detect`."""
        check_threshold(threshold)
        texts = checked_texts(texts, "detect")
        pieces = self.tokenizer.encode_with_offsets(texts)
        room = self.sequence_length - 2
        encoded, places = text_chunks(pieces, self.tokenizer.special_tokens, room, max(1, room // 2))
        logits = self._inference.by_token(encoded).astype(np.float64) if len(encoded) else np.zeros(0)
        probabilities = 1 / (1 + np.exp(-np.clip(logits, -700, 700)))  # that each token was replaced
        words = map(_words, texts, pieces, (probabilities[place] for place in places))
        return [_answer(text_words, threshold) for text_words in words]


def detect(
    model: str | Path,
    file: str | Path,
    *,
    out: str | Path | None = None,
    threshold: float = 0.5,
    text: str | Sequence[str] = (),
    quoting: str = "auto",
    delimiter: str = "",
    no_header: bool = False,
    format: str = "auto",
    skip_bad_rows: int = 0,
    precision: Precision = "auto",
    device: str = AUTO,
) -> list[Prediction] | None:
    """Finds words that do not belong in the texts of a file; needs no fine-tuning.

    Reads the file, writes the answers and raises errors in the same way as `predict`.

    Args:
        model: A run, a checkpoint, an export or a Hugging Face discriminator.
        file: The texts: .txt (one per line), .tsv, .csv, .jsonl, .json, .parquet, .arrow, or a URL; `-` is standard
            input.
        out: Output file with one JSON object per line; `-` is standard output. By default, the answers are returned.
        threshold: Minimum probability of an error, 0 to 1.
        text: The text column of a table; by default `text`.
        quoting: Quotes around the cells of a table; see `finetune`.
        delimiter: Cell separator of a table; by default inferred from the extension and the first line.
        no_header: The first line is data; the columns are named 0, 1, 2, ...
        format: Read the file as if it had this extension; `auto`: its own extension or, for a pipe, by the first line.
        skip_bad_rows: Maximum number of unusable rows to skip.
        precision: Dtype of activations; `auto` is bf16 on CUDA, and on a CPU the faster one in a short measurement.
        device: `auto` (CUDA if there is a GPU), `cpu`, `cuda` or `cuda:N`.

    Returns:
        One answer per text, in order: `score`, `errors` and `words` (see `PretrainedModel.detect`) and the other
        columns of its row; None with `out`.
    """
    check_threshold(threshold)
    detector = read_detector(model, device, precision)
    dialect = Dialect(quoting, delimiter, no_header)
    source = Source(Path(file), as_names(text), (), 1, dialect, format, skip_bad_rows)
    purpose = f"{model} finds errors in texts"
    predict = partial(detector.predict, threshold=threshold)
    return answer_file(predict, detector, source, out, preface=detector.note, purpose=purpose)


def check_threshold(threshold: float) -> None:
    if not 0 <= threshold <= 1:
        raise InputError(f"threshold = {threshold}: must be a probability from 0 to 1")


def read_detector(source: str | Path, device: str = AUTO, precision: str = AUTO) -> ErrorDetector:
    """Reads the detector of a run (its latest checkpoint), a checkpoint, an export or a Hugging Face discriminator.

    The sequence length is that used in pre-training or, if the folder does not record it, the number of positions.
    Raises FileNotFoundError, or ValueError that names the file, field, value and remedy.
    """
    source = Path(source)
    is_recorded = True
    if (stored := checkpoint_of(source)) is not None:
        model = checkpoint.load_model(stored)
        _check_roles(source, model.networks)
    else:
        folders = folders_of(source)
        _check_roles(source, ["encoder" if is_headless(read_table(path)) else role for role, path in folders.items()])
        folder = folders[ROLE]
        model = read_models({ROLE: folder})
        is_recorded = own_config(folder / "config.json", read_table(folder)) is not None
    length = model.config.data.sequence_length if is_recorded else model.config.model.max_positions
    _, tokenizer = open_tokenizer(source, model.config.model.vocab_size)
    return ErrorDetector(model, tokenizer, choose_device(device), length, precision)


def _check_roles(source: Path, roles: Iterable[str]) -> None:
    if ROLE not in roles:
        raise InputError(
            f"{source}: has no {ROLE}, only the {' and the '.join(roles)}; detection needs a model that was "
            'pre-trained to find replaced tokens, for example with objective.name = "electra"'
        )


def _words(text: str, pieces: Pieces, probabilities: NDArray[np.float64]) -> list[Prediction]:
    """Returns a text's words in order, without words that contain only spaces."""
    if not len(pieces.ids):
        return []
    firsts = np.flatnonzero(np.diff(pieces.words, prepend=-1))
    starts = np.minimum.reduceat(pieces.offsets[:, 0], firsts).tolist()
    ends = np.maximum.reduceat(pieces.offsets[:, 1], firsts).tolist()
    any_replaced = 1 - np.multiply.reduceat(1 - probabilities, firsts)
    spans = [_as_written(text, *limits) for limits in zip(starts, ends, [*starts[1:], len(text)], strict=True)]
    return [
        {"text": text[start:end], "start": start, "end": end, "probability": rounded(probability)}
        for (start, end), probability in zip(spans, any_replaced, strict=True)
        if start < end
    ]


def _as_written(text: str, start: int, end: int, limit: int) -> tuple[int, int]:
    """Returns a word's span, without the spaces of byte-level tokenizers, with marks that others drop."""
    while end < limit and unicodedata.category(text[end]).startswith("M"):
        end += 1
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def _answer(words: list[Prediction], threshold: float) -> Prediction:
    probabilities = [word["probability"] for word in words]
    errors = [word for word in words if word["probability"] >= threshold]
    return {"score": rounded(float(np.mean(probabilities))) if words else 0.0, "errors": errors, "words": words}
