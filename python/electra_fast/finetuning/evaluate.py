"""`evaluate`: scores of a fine-tuned model on labeled examples, or of a pre-trained model on a corpus or on pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from electra_fast.data.object_store import local_file
from electra_fast.errors import InputError
from electra_fast.files.atomic_files import replace_file
from electra_fast.finetuning.config import Precision
from electra_fast.finetuning.loading import load_finetuned
from electra_fast.finetuning.model_folder import is_finetuned
from electra_fast.finetuning.predictor import Predictor
from electra_fast.finetuning.readers.table_formats import file_or_table
from electra_fast.finetuning.report.report import make_report, write_report
from electra_fast.finetuning.task import Split
from electra_fast.finetuning.task_data import options_of, reader_options, refuse
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.messages import say
from electra_fast.results import Entries, table_lines

if TYPE_CHECKING:
    from electra_fast.finetuning.minimal_pairs import PairsReport
    from electra_fast.training.evaluate import Evaluation

_COMMON = ("out", "device", "precision", "batch_size")


class EvaluationReport(Entries):
    """The content of report.json; prints the scores.

    It has `task`, `kind`, `examples` and `scores`, `{name: {"model": x, "majority": x}}`; sections that depend on the
    task (classes, confusion, calibration, entity_types, matching, residuals, answer_lengths, ...); and `errors`, the
    worst errors. `majority` is the baseline that always predicts the most frequent label of the evaluated data.
    """

    def lines(self) -> Iterator[str]:
        """Yields one line per score."""
        return table_lines(self["scores"])


def read_examples(model: Predictor, file: Path, arguments: Mapping[str, Any]) -> tuple[Split, list[str]]:
    """Reads labeled examples for a fine-tuned model with its reader's options; also returns notes for the user."""
    reader = model.task_type.read_labeled
    trained = (model.text_columns, model.label_columns)
    options = reader_options(arguments, reader, f"not for {model.kind}", (*trained[0], *trained[1]))
    with local_file(file) as copy:
        split, notes = reader(model.task, copy, trained, **options)
    num_texts = model.num_texts or len(split.texts[0])
    if len(split.texts[0]) != num_texts:
        reads = "one text" if num_texts == 1 else "a pair of texts"
        raise InputError(f"{split.path}: the model reads {reads}; choose the columns with --text")
    return split, notes


def evaluate(
    model: str | Path,
    data: Any = None,
    *,
    out: str | Path | None = None,
    device: str = "auto",
    precision: Precision | None = None,
    batch_size: int | None = None,
    text: str | Sequence[str] = (),
    label: str | Sequence[str] = (),
    labels: str | Sequence[str] = (),
    label_map: str | Sequence[str] | Mapping[str, str] = (),
    label_separator: str = "",
    scheme: str = "auto",
    quoting: str = "auto",
    delimiter: str = "",
    no_header: bool = False,
    skip_bad_rows: int = 0,
    sequence_length: int | None = None,
    max_batches: int = 0,
    corrupted_by: str | Path | None = None,
    mlm_examples: int = 0,
    pairs: Any = None,
    group: str = "",
) -> EvaluationReport | Evaluation | PairsReport:
    """Evaluates a fine-tuned model on labeled examples, or a pre-trained model on a corpus or on minimal pairs.

    Args:
        model: A fine-tuned model; or a run, a checkpoint or an encoder folder of `transformers`.
        data: For a fine-tuned model: labeled examples, in a file or in memory (see `finetune`). For a pre-trained
            model: a corpus or several (see `pretrain`); by default the corpus of the run. A corpus is evaluated on
            its validation set (`prepare --holdout`), or as a whole if it has none.
        out: Output folder. For a fine-tuned model: report.md, report.json, their pictures and predictions.jsonl. For a
            pre-trained model: evaluation.json and, with `pairs`, the scores of all sentences in pairs.jsonl.
        device: `auto` (CUDA if there is a GPU), `cpu`, `cuda` or `cuda:N`.
        precision: Dtype of activations: `auto`, `fp32`, `fp16` or `bf16`. The default is `auto`, the faster dtype, for
            a fine-tuned model, and `fp32` for a pre-trained model, so that results are comparable.
        batch_size: Examples or rows per batch; by default chosen for the device, or the run's.
        text: The text columns of the examples; by default the columns of training, or the usual names. This and the
            arguments up to `skip_bad_rows` are for fine-tuned models. For `pairs`: the columns of the better and the
            worse sentence, by default `sentence_good` and `sentence_bad`, or `good` and `bad`.
        label: The label columns; by default the columns of training, or the usual names.
        labels: For tagging: names of integer tags.
        label_map: See `finetune`.
        label_separator: See `finetune`.
        scheme: See `finetune`.
        quoting: See `finetune`.
        delimiter: See `finetune`.
        no_header: See `finetune`.
        skip_bad_rows: Maximum number of unusable rows to skip, including rows with labels that the model lacks.
        sequence_length: Tokens per row; this and the following arguments are for pre-trained models. The default for
            `unigram_auc` is 128, or the longest row that the model can read if that is shorter. For all other results
            it is the sequence length of the run, or of the model in `corrupted_by`.
        max_batches: Maximum number of batches; 0: all.
        corrupted_by: Source of replacements, to evaluate several models on the same corrupted text: the generator of a
            run, checkpoint or Hugging Face folder, or "unigram" for the token counts of `data` (rows of 128 tokens by
            default). Rows are then packed, masked and sampled as in the recipe `paper`, and every discriminator is
            evaluated on all tokens. The default is the model's generator.
        mlm_examples: Rows with one masked token each, for the masked-language-model accuracy, in fp32; 0: none.
        pairs: Instead of `data`: rows with a better and a worse sentence, in files or in memory (see `finetune`). They
            are ranked by each score of `PretrainedModel.score`.
        group: The column of the pairs' groups; by default `UID` or `paradigm`, otherwise each file is a group.

    Returns:
        For a fine-tuned model: the report on the examples.
        For a pre-trained model: `unigram_auc`, the AUC on replacements drawn by the frequency of the masked tokens,
        comparable between models on the same data; `discriminator_auc` and the means of `metrics.jsonl` with the
        model's generator, which are not comparable (None without a generator); the numbers of `rows` and `tokens`.

        With `corrupted_by`, `loss` is None, since weights differ between models, and `sequence_length` and
        `corruption` are added. `corruption`, 16 hexadecimal digits, is equal for models that read the same text.

        With `pairs`: the fraction of pairs whose better sentence scores higher, by score and group.

        With `mlm_examples`: also `mlm_accuracy`, `mlm_recall_at_100` (the true token is among the generator's 100 most
        likely tokens), `mlm_generator_accuracy` and the number of examples.

    Warns if a model was pre-trained on the whole corpus.

    Raises:
        FileNotFoundError, ValueError: The message names the file, line, value and remedy.
    """
    defaults = options_of(evaluate)
    arguments = {name: value for name, value in locals().items() if name in defaults and value != defaults[name]}
    if not is_finetuned(Path(model)):
        # These imports take long, and fine-tuned models do not need them.
        from electra_fast.finetuning.minimal_pairs import evaluate_pairs
        from electra_fast.training import evaluate as pretrained

        if pairs is not None:
            if data is not None:
                raise InputError("data and pairs: cannot be combined; pass a corpus or --pairs")
            refuse(arguments, {"pairs", *options_of(evaluate_pairs)}, "not for --pairs")
            return evaluate_pairs(model, **arguments)
        if isinstance(data, str | Path) and Path(data).is_file() and Path(model).exists():
            raise InputError(
                f"{model}: not fine-tuned, so it cannot predict the labels of {data}; pass a fine-tuned model, such as "
                f"DIR/TASK/seed-0/model, or fine-tune this model with `electra-fast finetune {model}`"
            )
        refuse(arguments, options_of(pretrained.evaluate), f"for fine-tuned models, and {model} is not one")
        return pretrained.evaluate(model, data, **arguments)
    accepted = {*_COMMON}.union(*(options_of(task_type.read_labeled) for task_type in TASK_TYPES.values()))
    refuse(arguments, accepted, f"for pre-trained models, and {model} is fine-tuned")
    expected = f"{model}: a fine-tuned model is evaluated on a file of labeled examples"
    if data is None:
        raise InputError(f"{expected}; pass the file after the model")
    if isinstance(data, list) and all(isinstance(item, str) for item in data):
        raise InputError(f"{expected}; pass a single file")
    if isinstance(data, str | Path) and (Path(data) / "manifest.json").is_file():
        raise InputError(f"{expected}, but {data} is a corpus; pass such a file, or a pre-trained model")
    file = file_or_table("data", data)
    predictor = load_finetuned(Path(model), device, precision or "auto")
    arguments = {name: value for name, value in arguments.items() if name not in _COMMON}
    task = predictor.task
    task_type = predictor.task_type
    split, notes = read_examples(predictor, file, arguments)
    for note in (*filter(None, [predictor.note]), *notes):
        say(note)
    answers = predictor.predict_split(split, batch_size)
    report = make_report(task, [(split, answers)], baselines={"majority": task_type.majority(task, split, split)})
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        replace_file(Path(out) / "predictions.jsonl", task_type.prediction_lines(task, split, answers))
        write_report(Path(out), report)
        say(f"{Path(out) / 'report.md'}: {report.facts['examples']:,} examples")
    return EvaluationReport(report.content)
