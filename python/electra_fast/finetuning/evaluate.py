"""`evaluate`: scores of a fine-tuned model on labeled examples, or of a pre-trained one on a corpus or on pairs."""

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
    """The content of report.json; prints its scores.

    `task`, `kind`, `examples` and `scores`, `{name: {"model": x, "majority": x}}`; sections by task (classes,
    confusion, calibration, entity_types, matching, residuals, answer_lengths, ...); and `errors`, the worst ones.
    `majority` has the scores of the data's own most frequent label.
    """

    def lines(self) -> Iterator[str]:
        """Yields a line per score."""
        return table_lines(self["scores"])


def read_examples(model: Predictor, file: Path, given: Mapping[str, Any]) -> tuple[Split, list[str]]:
    """Reads labeled examples for a fine-tuned model with the options of its reader; returns also notes for the user."""
    reader = model.task_type.read_labeled
    trained = (model.text_columns, model.label_columns)
    options = reader_options(given, reader, f"not for {model.kind}", (*trained[0], *trained[1]))
    with local_file(file) as copy:
        split, notes = reader(model.task, copy, trained, **options)
    num_texts = model.num_texts or len(split.texts[0])
    if len(split.texts[0]) != num_texts:
        reads = "one text" if num_texts == 1 else "a pair of texts"
        raise InputError(f"{split.path}: this model reads {reads}; choose the columns with --text")
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
    """Evaluates a fine-tuned model on labeled examples, or a pre-trained one on a corpus or on minimal pairs.

    Args:
        model: A fine-tuned model; or a run, a checkpoint or an encoder folder of `transformers`.
        data: Of a fine-tuned model: labeled examples, in a file or in memory as for `finetune`. Of a pre-trained one: a
            corpus, of which the validation part (`prepare --holdout`) is used, or all if it has none; or several, as
            for `pretrain`; by default the corpus that the run was trained on.
        out: A folder: of a fine-tuned model for report.md, report.json, their pictures and predictions.jsonl; of a
            pre-trained one for evaluation.json, and with `pairs` the scores of all sentences, pairs.jsonl.
        device: `auto` (CUDA if there is a GPU), `cpu`, `cuda` or `cuda:N`.
        precision: Dtype of activations: `auto`, `fp32`, `fp16` or `bf16`. By default `auto` for a fine-tuned model, the
            faster one, and for a pre-trained one `fp32`, so that figures compare.
        batch_size: Examples or rows per batch; by default as many as suit the device, or that of the run.
        text: The text columns of the examples; by default those of training, or the usual ones. This and the arguments
            up to `skip_bad_rows` are for fine-tuned models. Of `pairs`: the columns of the better and the worse
            sentence, by default `sentence_good` and `sentence_bad`, or `good` and `bad`.
        label: Their label columns; by default those of training, or the usual ones.
        labels: For tags: the names of those that are numbers.
        label_map: As for `finetune`.
        label_separator: As for `finetune`.
        scheme: As for `finetune`.
        quoting: As for `finetune`.
        delimiter: As for `finetune`.
        no_header: As for `finetune`.
        skip_bad_rows: Number of unusable rows that may be left out, those with labels that the model lacks among them.
        sequence_length: Tokens per row; this and what follows are for pre-trained models. By default 128 for
            `unigram_auc`, or the longest row that the model can read if that is shorter; for the rest that of the run,
            or of the corruptor if given.
        max_batches: Largest number of batches; 0: all.
        corrupted_by: Source of replacements, so that several models are judged on the same text: the generator of a
            run, checkpoint or Hugging Face folder, or "unigram" for the token counts of `data` (rows of 128 tokens by
            default). Rows are then packed, masked and sampled as in the recipe `paper`, and every discriminator is
            judged over all tokens. By default the model's own generator.
        mlm_examples: Rows with one masked token each, for the masked-language-model accuracy, in fp32; 0: none.
        pairs: Instead of `data`: rows with a better and a worse sentence, in files or in memory as for `finetune`. Each
            of `PretrainedModel.score`'s scores ranks them.
        group: The column of the pairs' groups; by default `UID` or `paradigm`, else each file is a group.

    Returns:
        Of a fine-tuned model the report on the examples. Of a pre-trained one first `unigram_auc`, comparable between
        models on the same data: the AUC on replacements drawn by the frequency of the masked tokens. Then
        `discriminator_auc` and the means of `metrics.jsonl` with the model's own generator, which are not comparable
        (None for a discriminator alone), and the `rows` and `tokens` they cover.

        With `corrupted_by`, `loss` is None, since weights differ between models, and `sequence_length` and
        `corruption` are added; the latter, 16 hexadecimal digits, are equal for models that read exactly the same text.

        With `pairs`, the share of pairs whose better sentence scores higher, by score and group.

        With `mlm_examples`, also `mlm_accuracy`, `mlm_recall_at_100` (the true token is one of the generator's 100
        likeliest), `mlm_generator_accuracy` and the number of examples.

    Warns if a model was pre-trained on all of the corpus.

    Raises:
        FileNotFoundError, ValueError: The message names the file, line, value and remedy.
    """
    defaults = options_of(evaluate)
    given = {name: value for name, value in locals().items() if name in defaults and value != defaults[name]}
    if not is_finetuned(Path(model)):
        # Takes long, and predictions need none.
        from electra_fast.finetuning.minimal_pairs import evaluate_pairs
        from electra_fast.training import evaluate as pretrained

        if pairs is not None:
            if data is not None:
                raise InputError("give a corpus or pairs, not both")
            refuse(given, {"pairs", *options_of(evaluate_pairs)}, "not for --pairs")
            return evaluate_pairs(model, **given)
        if isinstance(data, str | Path) and Path(data).is_file() and Path(model).exists():
            raise InputError(
                f"{model}: not fine-tuned, so it cannot predict the labels of {data}; name a fine-tuned model, as "
                f"DIR/TASK/seed-0/model, or fine-tune this one with `electra-fast finetune {model}`"
            )
        refuse(given, options_of(pretrained.evaluate), f"for fine-tuned models, and {model} is not one")
        return pretrained.evaluate(model, data, **given)
    own = {*_COMMON}.union(*(options_of(task_type.read_labeled) for task_type in TASK_TYPES.values()))
    refuse(given, own, f"for pre-trained models, and {model} is fine-tuned")
    wanted = f"{model}: a fine-tuned model is evaluated on a file of labeled examples"
    if data is None:
        raise InputError(f"{wanted}; name it after the model")
    if isinstance(data, list) and all(isinstance(each, str) for each in data):
        raise InputError(f"{wanted}; name one")
    if isinstance(data, str | Path) and (Path(data) / "manifest.json").is_file():
        raise InputError(f"{wanted}, and {data} is a corpus, on which pre-trained models are")
    file = file_or_table("data", data)
    predictor = load_finetuned(Path(model), device, precision or "auto")
    given = {name: value for name, value in given.items() if name not in _COMMON}
    task = predictor.task
    task_type = predictor.task_type
    split, notes = read_examples(predictor, file, given)
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
