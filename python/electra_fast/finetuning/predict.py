"""`predict`: predictions of a fine-tuned model for the examples of a file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from electra_fast.config.config import AUTO
from electra_fast.finetuning.config import Precision
from electra_fast.finetuning.loading import load_finetuned
from electra_fast.finetuning.prediction_output import answer_file
from electra_fast.finetuning.readers.delimited import Dialect
from electra_fast.finetuning.task import Prediction


def predict(
    model: str | Path,
    file: str | Path,
    *,
    out: str | Path | None = None,
    top_k: int | None = None,
    threshold: float | None = None,
    n_best: int | None = None,
    null_threshold: float | None = None,
    text: str | Sequence[str] = (),
    quoting: str = "auto",
    delimiter: str = "",
    no_header: bool = False,
    format: str = "auto",
    skip_bad_rows: int = 0,
    precision: Precision = "auto",
    device: str = AUTO,
) -> list[Prediction] | None:
    """Predicts the examples of a file with a fine-tuned model.

    An answer also has the other columns of its row; a column with the name of a field of the answer is in the field
    `input`. With `out`, the file may be larger than memory, except for .json, and a pipe is answered line by line.

    Args:
        model: A fine-tuned model, such as `out/TASK/seed-0/model` of `finetune`.
        file: The examples: .txt (one per line), .tsv, .csv, .jsonl, .json, .parquet, .arrow, or a URL; for tagging also
            .conll, for question answering also a SQuAD .json file; `-` is standard input.
        out: Output file with one JSON object per line; `-` is standard output. By default, the answers are returned.
        top_k: See `FinetunedModel.predict`.
        threshold: See `FinetunedModel.predict`.
        n_best: See `FinetunedModel.predict`.
        null_threshold: See `FinetunedModel.predict`.
        text: The text columns; by default the columns of training, or the usual names.
        quoting: Quotes around the cells of a table; see `finetune`.
        delimiter: Cell separator of a table; by default inferred from the extension and the first line.
        no_header: The first line is data; the columns are named 0, 1, 2, ...
        format: Read the file as if it had this extension; `auto`: its own extension or, for a pipe, by the first line.
        skip_bad_rows: Maximum number of unusable rows to skip.
        precision: Dtype of activations; `auto` is bf16 on CUDA, and on a CPU the faster one in a short measurement.
        device: `auto` (CUDA if there is a GPU), `cpu`, `cuda` or `cuda:N`.

    Returns:
        One answer per example, in order (see `FinetunedModel.predict`); None with `out`.

    Raises:
        FileNotFoundError, ValueError: The message names the file, line, value and remedy.
        Interrupted: A signal stopped the command.
    """
    predictor = load_finetuned(Path(model), device, precision)
    settings = predictor._chosen(top_k=top_k, threshold=threshold, n_best=n_best, null_threshold=null_threshold)
    dialect = Dialect(quoting, delimiter, no_header)
    source = predictor.source(Path(file), text, dialect=dialect, format=format, skip_bad_rows=skip_bad_rows)
    answer = partial(predictor.predict, **settings)
    purpose = f"{model} is for {predictor.kind}"
    return answer_file(answer, predictor.task_type, source, out, preface=predictor.note, purpose=purpose)
