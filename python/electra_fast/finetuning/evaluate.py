"""`evaluate`: scores a fine-tuned model on labeled examples, or a pre-trained one on a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from electra_fast.data.object_store import local_file
from electra_fast.errors import InputError
from electra_fast.files.atomic_files import replace_file
from electra_fast.finetuning.model_folder import is_finetuned
from electra_fast.finetuning.predict import load_finetuned
from electra_fast.finetuning.readers.delimited import DIALECT, Dialect, with_fields
from electra_fast.finetuning.readers.table_formats import MemoryTable
from electra_fast.finetuning.report.report import make_report, write_report
from electra_fast.finetuning.task_data import options_of, refuse, with_tuples
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.messages import say
from electra_fast.training import evaluate as pretrained

_TUPLES = ("text", "label", "labels", "label_map")


def evaluate(source: str | Path, data: Any = None, **options: Any) -> dict[str, Any]:
    """Evaluates a fine-tuned model on labeled examples, or a pre-trained one on a corpus.

    Args:
        source: A fine-tuned model; or a run, a checkpoint or a folder of `transformers`, which `training.evaluate`
            evaluates with its own arguments.
        data: Labeled examples, in a file or in memory as for `finetune`; or corpora, by default that of the run.
        **options: Those of a fine-tuned model follow.
        out: A folder for report.json, report.md, their pictures and predictions.jsonl.
        precision: As for `load_finetuned`.
        text, label: The columns; by default those of training, or the usual ones.
        skip_bad_rows: Number of unusable rows that may be left out, those with labels that the model lacks among them.
        labels: For tags: the names of those that are numbers.
        label_map, label_separator, scheme, quoting, delimiter, no_header: As for `finetune`.

    Returns:
        The report on the examples: `{"task", "kind", "examples", "scores": {name: {"model": x, "majority": x}}, ...}`,
        with sections by task (classes, confusion, calibration, entity_types, matching, residuals, answer_lengths, ...)
        and `errors`, the worst ones. `majority` has the scores of the data's own most frequent label.

    Raises:
        FileNotFoundError, ValueError: The message names the file, line, value and remedy.
    """
    own, others = options_of(evaluate_file) | DIALECT, options_of(pretrained.evaluate)
    for task_type in TASK_TYPES.values():
        own |= options_of(task_type.read_labeled)
    unknown = next((name for name in options if name not in own | others), None)
    if unknown is not None:
        raise TypeError(f"evaluate() got an unexpected keyword argument {unknown!r}")
    if not is_finetuned(Path(source)):
        if isinstance(data, str | Path) and Path(data).is_file() and Path(source).exists():
            raise InputError(
                f"{source}: not fine-tuned, so it cannot predict the labels of {data}; name a fine-tuned model, as "
                f"DIR/TASK/seed-0/model, or fine-tune this one with `electra-fast finetune --model {source}`"
            )
        refuse(options, others, f"for fine-tuned models, and {source} is not one")
        return pretrained.evaluate(source, data, **options)
    refuse(options, own, f"for pre-trained models, and {source} is fine-tuned")
    if data is None:
        raise InputError(f"{source}: a fine-tuned model is evaluated on labeled examples; name their file with --data")
    if isinstance(data, list) and all(isinstance(each, str) for each in data):
        raise InputError(f"{source}: a fine-tuned model is evaluated on one file; give --data once")
    file = Path(data) if isinstance(data, str | Path) else MemoryTable.of("data", data)
    with local_file(file) as copy:
        return evaluate_file(source, copy, **options)


def evaluate_file(
    model: str | Path,
    file: Path,
    *,
    out: str | Path | None = None,
    precision: Any = "auto",
    **options: Any,
) -> dict[str, Any]:
    predictor = load_finetuned(model, precision=precision)
    task, task_type = predictor.task, predictor.task_type
    dialect = Dialect(*(options.pop(name, default) for name, default in DIALECT.items()))
    refuse(options, options_of(task_type.read_labeled), f"not for {predictor.kind}")
    options = with_tuples(options, _TUPLES)
    trained = (predictor.text_columns, predictor.label_columns)
    dialect = with_fields(dialect, (*trained[0], *trained[1], *(options.get(name, ()) for name in ("text", "label"))))
    split, notes = task_type.read_labeled(task, file, trained, quoting=dialect, **options)
    num_texts = predictor.num_texts or len(split.texts[0])
    if len(split.texts[0]) != num_texts:
        reads = "one text" if num_texts == 1 else "a pair of texts"
        raise InputError(f"{file}: this model reads {reads}; choose the columns with --text")
    for note in (*filter(None, [predictor.note]), *notes):
        say(note)
    answers = predictor.predict_split(split)
    report = make_report(task, [(split, answers)], baselines={"majority": task_type.majority(task, split, split)})
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        replace_file(Path(out) / "predictions.jsonl", task_type.prediction_lines(task, split, answers))
        write_report(Path(out), report)
    return report.content
