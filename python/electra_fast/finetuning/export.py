"""`export`: writes a run as Hugging Face folders, or a fine-tuned model in ONNX with a check on labeled examples."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from electra_fast.data.corpus import location
from electra_fast.errors import InputError
from electra_fast.files.atomic_files import foreign_names, replace_folder
from electra_fast.files.json_files import read_object, read_optional, write_object
from electra_fast.finetuning.evaluate import read_examples
from electra_fast.finetuning.finetuned_model import FinetunedModel
from electra_fast.finetuning.model_folder import DEV_FILE, ONNX_KEY, is_finetuned, models_inside, read_description
from electra_fast.finetuning.onnx_graph import quantize, write_finetuned_graph
from electra_fast.finetuning.onnx_model import OnnxModel
from electra_fast.finetuning.predictor import Predictor
from electra_fast.finetuning.readers.table_formats import file_or_table
from electra_fast.finetuning.task import Answers, Split, select
from electra_fast.finetuning.task_data import options_of, refuse
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.huggingface import export as runs
from electra_fast.huggingface.card import front_matter
from electra_fast.huggingface.config import ONNX_FILE
from electra_fast.huggingface.onnx import require_packages
from electra_fast.huggingface.source import tokenizer_folder
from electra_fast.huggingface.tensor_files import weights_file
from electra_fast.huggingface.tokenizer import FILES, INPUT_NAMES, copy_tokenizer
from electra_fast.messages import printable, say
from electra_fast.results import Result

MAX_LOSS = 1.0
"""Maximum loss of int8, in percentage points of the task's metric."""
_NAMES = {"config.json", "README.md", ONNX_FILE, *FILES}
_FOR_FINETUNED = ("onnx", "int8", "data", "accept_loss")
# Names of the field of an answer that holds the prediction.
_PREDICTED = ("label", "labels", "tags", "answer", "value")
# Without a results.json, the metric of a task is the first of these scores that it has.
_METRICS = ("f1_micro", "f1", "spearman", "accuracy")
# Maximum number of texts of a speed measurement, and its duration.
_TIMED_TEXTS = 64
_TIMED_SECONDS = 1.0
_EXAMPLE = "This text is read if there are no examples to measure the speed of a model. " * 3


@dataclass(frozen=True, eq=False, repr=False)
class OnnxExport(Result):
    """The result of `export` for a fine-tuned model: its folder, and a comparison with the source."""

    out: Path
    precision: str
    """`fp32` or `int8`."""
    max_error: float
    """Largest difference between the outputs of ONNX in fp32 and torch, as a fraction of the largest output."""
    metric: str | None
    """Name of the compared score; None without examples."""
    examples: int
    data: str | None
    """The file of the examples."""
    models: dict[str, dict[str, float]]
    """By model (`torch fp32`, the source; `onnx fp32`; `onnx int8`): `score`, `agreement` (fraction of predictions that
    equal the source's), `megabytes`, `milliseconds` (median for one text at a time) and `texts_per_second`."""

    def lines(self) -> Iterator[str]:
        """Yields the model's folder, then the table."""
        yield f"{self.out}: {ONNX_FILE} ({self.precision}), outputs in fp32 within {self.max_error:.1e} of torch's"
        yield from self.table()

    def table(self) -> Iterator[str]:
        """Yields the rows of a Markdown table."""
        columns = ["model", "MB", "ms per text", "texts/s"]
        columns[1:1] = [] if self.metric is None else [self.metric, "agreement"]
        rows = [columns, ["---"] + ["---:"] * (len(columns) - 1)]
        for name, model in self.models.items():
            judged = [] if self.metric is None else [f"{model['score']:.4f}", f"{model['agreement']:.2%}"]
            speed = [f"{model['megabytes']:.1f}", f"{model['milliseconds']:.3g}", f"{model['texts_per_second']:,.1f}"]
            rows.append([name, *judged, *speed])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"


def export(
    run: str | Path,
    *,
    out: str | Path,
    unfinished: bool = False,
    onnx: bool = False,
    int8: bool = False,
    data: Any = None,
    accept_loss: float = MAX_LOSS,
    language: str | Sequence[str] = (),
    license: str | None = None,
    dataset: str | Sequence[str] = (),
    base_model: str | None = None,
) -> runs.ExportResult | OnnxExport:
    """Writes a run's networks as folders for `transformers`, or a fine-tuned model in ONNX.

    For a run: out/encoder, out/discriminator and out/generator, each with tokenizer and model card. encoder/ is the
    model to fine-tune or to use elsewhere: the encoder of the discriminator or, for the objective `mlm`, of the
    generator, without a head. Objectives that train a masked language model of another kind keep its head there and
    have no discriminator/. Heads that no class of `transformers` has are left out and reported on standard error. If
    token type 1 never occurred in training, its embedding becomes a copy of the embedding of type 0.

    For a fine-tuned model, with `onnx`: model.onnx, config.json, tokenizer and model card. `load`, `predict` and
    `evaluate` read this folder without torch. Its outputs in fp32 are compared with torch.

    Args:
        run: A run (its latest checkpoint), a checkpoint, or Hugging Face folders; or a fine-tuned model, such as
            `out/TASK/seed-0/model` of `finetune`.
        out: Output folder; an earlier export is replaced atomically. For a run, also a URL in an object store, such as
            `s3://bucket/model`; an earlier export there is not loadable until the new one is complete.
        unfinished: Export even if the run has steps left.
        onnx: For a run: also write encoder/model.onnx (last hidden states) and discriminator/model.onnx (logits; not
            for `deberta`, whose head `transformers` lacks), compared with torch. Needs the extra `onnx`.
        int8: For a fine-tuned model, with `onnx`: int8 weights per channel and dynamically quantized activations.
        data: For a fine-tuned model: labeled examples to compare scores on, in a file or in memory (see `evaluate`);
            by default the validation set that `finetune` left next to the model.
        accept_loss: Maximum loss of int8, in percentage points of the task's metric.
        language: For the model card of a run, like the next arguments: codes of the text's languages, such as `hu`.
        license: Identifier of the model's license, such as `apache-2.0`.
        dataset: Name of the training text on the Hugging Face Hub, or several names.
        base_model: Name on the Hub of the model that an import started from.

    Raises ValueError if the run is not finished, if `out` contains anything but an earlier export, or if int8 loses
    more than `accept_loss`; ElectraFastError if the outputs of an ONNX file are wrong; OSError if an upload fails, with
    the local folder that contains the export.
    """
    source = Path(run)
    defaults = options_of(export)
    del defaults["out"], defaults["data"]  # `data` may be a table, and tables compare by cell
    arguments = {name: value for name, value in locals().items() if name in defaults and value != defaults[name]}
    arguments |= {} if data is None else {"data": data}
    if hint := models_inside(source):
        raise InputError(f"{source}: {hint}")
    if not is_finetuned(source):
        refuse(arguments, options_of(runs.export), f"for fine-tuned models, and {source} is not one")
        return runs.export(run, out=out, **arguments)
    refuse(arguments, _FOR_FINETUNED, f"for runs, and {source} is a fine-tuned model")
    if not onnx:
        raise InputError(f"{source}: is a Hugging Face folder already; add --onnx (onnx=True) to convert it to ONNX")
    if not accept_loss >= 0:
        raise InputError(f"--accept-loss = {accept_loss}: must be at least 0 percentage points")
    if "accept_loss" in arguments and not int8:
        raise InputError("--accept-loss: is for --int8 only; add --int8 (int8=True), or remove it")
    require_packages()
    return _OnnxWriter(source, _free_folder(out), int8, data, accept_loss).write()


def _free_folder(out: str | Path) -> Path:
    target = location(out)
    if not isinstance(target, Path):
        raise InputError(f"{target}: a fine-tuned model is exported to a local folder; upload that folder afterwards")
    if target.exists() and not target.is_dir():
        raise InputError(f"{target}: is a file; choose another folder")
    if names := foreign_names(target):
        if ONNX_KEY not in read_optional(target / "config.json"):
            raise InputError(f"{target}: not empty and not an earlier export; choose another folder")
        if other := next((name for name in names if name not in _NAMES), None):
            raise InputError(f"{target}: {other} is not part of the earlier export and would be lost; move it away")
    return target


class _OnnxWriter:
    """Writes the ONNX folder of a fine-tuned model; raises InputError early for bad arguments."""

    def __init__(self, source: Path, out: Path, int8: bool, data: Any, accept_loss: float) -> None:
        description = read_description(source)
        if description.onnx:
            raise InputError(f"{source}: is in ONNX already; pass the folder of the model that it was exported from")
        if description.head == "published" and "logits" not in TASK_TYPES[description.kind].onnx_outputs:
            raise InputError(
                f'{source}: the head "published" of {description.kind} searches between its layers, which an ONNX '
                'graph cannot; fine-tune with finetune.head = "transformers" (--finetune.head transformers)'
            )
        seed_folder = source.resolve().parent  # of `finetune`, unless the model has been moved
        self.task_folder = seed_folder.parent if seed_folder.name.startswith("seed-") else seed_folder
        self.source = source
        self.out = out
        self.int8 = int8
        self.accept_loss = accept_loss
        self.torch = FinetunedModel(source, device="cpu", precision="fp32")
        self.split, self.data = self._examples(data)
        self.answers: Answers = []
        self.metric: str | None = None
        self.models: dict[str, dict[str, float]] = {}

    def write(self) -> OnnxExport:
        exports: list[OnnxExport] = []
        replace_folder(self.out, lambda folder: exports.append(self._write(folder)))
        return exports[0]

    def _examples(self, data: Any) -> tuple[Split, str | None]:
        """Returns the examples and their file, or a placeholder text, to measure the speed only, and None."""
        validation_file = self.task_folder / DEV_FILE
        if data is not None:
            file = file_or_table("data", data)
            split, notes = read_examples(self.torch, file, {})
            for note in notes:
                say(note)
            return split, str(file)
        if validation_file.is_file():
            split, _ = self.torch.task_type.read_labeled(self.torch.task, validation_file, ((), ()))
            return split, str(validation_file)
        if self.int8:
            raise InputError(
                f"{self.source}: no {validation_file} to evaluate int8 on; pass labeled examples with --data FILE"
            )
        num_texts = self.torch.num_texts or self.torch.task_type.num_texts or 1
        example = _EXAMPLE if num_texts == 1 else (_EXAMPLE,) * num_texts
        return self.torch._split([example] * _TIMED_TEXTS, ()), None

    def _write(self, folder: Path) -> OnnxExport:
        source = self.source
        description = read_description(self.source)
        path = folder / ONNX_FILE
        copy_tokenizer(
            tokenizer_folder(source, description.shape.vocab_size), folder, INPUT_NAMES[description.shape.architecture]
        )
        self._describe(folder, "fp32")
        error = write_finetuned_graph(source, path, self.torch)
        self._compare("torch fp32", self.torch, weights_file(source))
        self._compare("onnx fp32", OnnxModel(folder), path)
        if self.int8:
            whole = path.rename(folder / f"fp32.{ONNX_FILE}")
            quantize(whole, path)
            whole.unlink()
            self._describe(folder, "int8")
            model = OnnxModel(folder)
            self._compare("onnx int8", model, path)
            if model.note:
                say(f"note: {model.note}")
        precision = "int8" if self.int8 else "fp32"
        result = OnnxExport(self.out, precision, error, self.metric, len(self.split.texts), self.data, self.models)
        self._check_loss(result)
        (folder / "README.md").write_text(self._card(result, path), encoding="utf-8")
        return result

    def _describe(self, folder: Path, precision: str) -> None:
        write_object(
            folder / "config.json", read_object(self.source / "config.json") | {ONNX_KEY: {"precision": precision}}
        )

    def _compare(self, name: str, model: Predictor, file: Path) -> None:
        row: dict[str, float] = {}
        if self.data is not None:
            answers = model.predict_split(self.split)
            self.answers = self.answers or answers
            scores = model.task_type.scores_of_answers(model.task, self.split, answers)
            self.metric = self.metric or self._metric(scores)
            row = {"score": scores[self.metric], "agreement": _agreement(answers, self.answers)}
        milliseconds, rate = _speed(model, self.split)
        row |= {"megabytes": file.stat().st_size / 1e6, "milliseconds": milliseconds, "texts_per_second": rate}
        self.models[name] = row

    def _metric(self, scores: Mapping[str, float]) -> str:
        """Returns the metric in results.json if the model is in the output folder of `finetune`, else the usual one."""
        results = read_optional(self.task_folder.parent / "results.json").get(self.task_folder.name)
        named = [results.get("metric")] if isinstance(results, dict) else []
        return next(str(name) for name in (*named, *_METRICS) if name in scores)

    def _check_loss(self, result: OnnxExport) -> None:
        if not self.int8 or self.metric is None:
            return
        before = result.models["torch fp32"]
        after = result.models["onnx int8"]
        loss = 100 * (before["score"] - after["score"])
        if loss > self.accept_loss + 1e-9:
            raise InputError(
                f"int8 loses {loss:.2f} percentage points of {self.metric}, more than {self.accept_loss:g}: "
                f"{before['score']:.4f} in fp32, {after['score']:.4f} in int8 on {result.examples:,} examples of "
                f"{self.data} ({after['agreement']:.2%} of the predictions are equal; {before['megabytes']:.1f} and "
                f"{after['megabytes']:.1f} MB, {before['milliseconds']:.3g} and {after['milliseconds']:.3g} ms per text"
                "); nothing was written: export without --int8, or accept the loss with --accept-loss "
                f"{math.ceil(loss)} (accept_loss={math.ceil(loss)})"
            )

    def _card(self, result: OnnxExport, path: Path) -> str:
        import onnxruntime

        task_type = self.torch.task_type
        hf = self.torch.task_type.hf
        family = read_object(self.source / "config.json")["model_type"]
        summary = printable(task_type.summary(self.torch.task, self.torch.num_texts or task_type.num_texts or 1))
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        inputs, outputs = (
            ", ".join(f"`{tensor.name}` [{', '.join(map(str, tensor.shape))}]" for tensor in tensors)
            for tensors in (session.get_inputs(), session.get_outputs())
        )
        scores = f" Scores on {result.examples:,} examples." if result.metric else ""
        quantized = " Weights are int8 per channel, and activations are quantized dynamically." if self.int8 else ""
        sections = (
            front_matter({"library_name": "onnx", "pipeline_tag": hf.pipeline, "tags": [family, "onnx"]}),
            f"# {self.torch.kind} in ONNX\n\n{summary}",
            "## Comparison\n\n" + "\n".join(result.table()) + f"\n\nMeasured on a CPU during the export.{scores}",
            "## Use\n\n`electra-fast predict path/to/this/folder FILE`, without torch; or any ONNX runtime: "
            f"{ONNX_FILE} has the inputs {inputs}, int64, and the outputs {outputs}.{quantized}",
        )
        return "\n\n".join(sections) + "\n"


def _agreement(answers: Answers, others: Answers) -> float:
    """Returns the fraction of equal predictions; values count as equal within a tenth of their standard deviation."""
    field = next(name for name in _PREDICTED if name in answers[0])
    pairs = [(answer[field], reference_labels[field]) for answer, reference_labels in zip(answers, others, strict=True)]
    if field == "tags":  # of each word
        pairs = [pair for labels, reference_labels in pairs for pair in zip(labels, reference_labels, strict=True)]
    if field == "value":
        values, references = np.array(pairs).T
        return float(np.mean(np.abs(values - references) <= references.std() / 10))
    return float(np.mean([labels == reference_labels for labels, reference_labels in pairs])) if pairs else 1.0


def _speed(model: Predictor, split: Split) -> tuple[float, float]:
    """Returns the median milliseconds for one text at a time, and texts per second for many; includes tokenization."""
    count = min(len(split.texts), _TIMED_TEXTS)
    singles = [select(split, "predict", [row]) for row in range(count)]
    texts = select(split, "predict", range(count))
    model.predict_split(singles[0])
    times = list[float]()
    ends = time.perf_counter() + _TIMED_SECONDS
    while time.perf_counter() < ends or len(times) < 5:
        start = time.perf_counter()
        model.predict_split(singles[len(times) % count])
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    rounds = 0
    while not rounds or time.perf_counter() < start + _TIMED_SECONDS:
        model.predict_split(texts)
        rounds += 1
    return 1000 * statistics.median(times), rounds * count / (time.perf_counter() - start)
