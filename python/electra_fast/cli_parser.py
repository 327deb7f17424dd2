"""The commands of the command line and their arguments; `cli` runs them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from electra_fast import __version__
from electra_fast.config.config import Config, DataConfig
from electra_fast.config.file import comma_separated, format_value, parse_number
from electra_fast.config.presets import DEFAULT_PRESET, DEFAULT_RECIPE, RECIPES, SIZES
from electra_fast.config.section import Configuration
from electra_fast.errors import InputError
from electra_fast.finetuning.config import DEFAULT_RECIPE as FINETUNING_RECIPE
from electra_fast.finetuning.config import RECIPES as FINETUNING_RECIPES
from electra_fast.finetuning.config import FinetuningConfig
from electra_fast.model.networks import PARTS

# Commands that take `--section.key value`.
CONFIGURED: dict[str, tuple[type[Configuration], ...]] = {
    "pretrain": (Config,),
    "flops": (Config,),
    "plan": (Config,),
    "doctor": (Config,),
    "finetune": (FinetuningConfig,),
    "reproduce": (Config, FinetuningConfig),
}
# The default of columns where a fine-tuned model knows them.
AS_TRAINED = "as in training"


class Parser(argparse.ArgumentParser):
    """Reports an error as one line, without the usage. Reads integers as the configuration does: 10000, 10k or 1e4."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register("type", int, number(int))
        self._negative_number_matcher = re.compile(r"-[\d.,=]")  # values such as `--labels -1,0,1` are not options
        self.commands: dict[str, Parser] = {}

    def flags_of(self, command: str | None) -> list[str]:
        """Returns the flags of a command or, for None, those that precede it."""
        parser = self.commands.get(command or "", self)
        return [flag for action in parser._actions for flag in action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Raises InputError."""
        raise InputError(f"{message}; see `{self.prog} --help`")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Appends its default to the help of every option that takes a value."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        has_no_default = (
            action.required or action.nargs == 0 or not action.option_strings or default is argparse.SUPPRESS
        )
        if has_no_default or "(default:" in text:
            return text
        return f"{text} (default: none)" if default in (None, (), "") else f"{text} (default: %(default)s)"


def number(kind: type, unit: str = "count") -> Callable[[str], int | float]:
    """Returns an argparse type that reads a number."""

    def read(text: str) -> int | float:
        try:
            return parse_number(text, kind, unit)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def build_parser() -> Parser:
    """Returns the parser of all commands; `command` in its result names the chosen one."""
    parser = Parser(prog="electra-fast", description="Pre-train text encoders by replaced-token detection (ELECTRA).")
    parser.add_argument("-V", "--version", action="version", version=f"electra-fast {__version__}")
    _add_quiet(parser, default=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, summary: str) -> Parser:
        sub: Parser = commands.add_parser(name, help=summary, description=summary, formatter_class=_Help)
        _add_quiet(sub, default=argparse.SUPPRESS)  # keeps what stands before the command
        parser.commands[name] = sub
        return sub

    sub = command("demo", "train and export a model in 1 to 3 minutes, without downloads")
    sub.add_argument("--out", type=Path, required=True, help="output folder")

    sub = command("vocab", "train a WordPiece vocabulary")
    _add_inputs(sub)
    sub.add_argument("--out", type=Path, default=Path("vocab.txt"), help="vocab.txt or NAME.json")
    sub.add_argument("--size", type=int, default=30_522, help="vocabulary size")
    sub.add_argument("--min-frequency", type=int, default=2, help="minimum occurrences of a merge")
    sub.add_argument("--cased", action="store_true", help="keep case (default: lowercase the text)")
    sub.add_argument(
        "--strip-accents", action="store_true", help="remove accents and other marks, as BERT's uncased vocabularies do"
    )
    sub.add_argument(
        "--character-coverage",
        type=float,
        default=0.9999,
        metavar="FRACTION",
        help="fraction of the text that the kept characters must cover",
    )
    sub.add_argument(
        "--sample",
        type=number(int, "bytes"),
        default=1 << 30,
        metavar="BYTES",
        help="amount of text to count words in; 0: all",
    )
    sub.add_argument("--seed", type=int, default=0, help="seed of the sample")

    sub = command("prepare", "tokenize text into a corpus of shards; rerun with the same --out to resume")
    _add_inputs(sub)
    sub.add_argument("--vocab", type=Path, required=True, help="vocab.txt, tokenizer.json, or a folder with either")
    sub.add_argument("--out", required=True, help="corpus folder, or its URL: s3://, gs:// or az://")
    case = sub.add_mutually_exclusive_group()
    case.add_argument(
        "--cased", dest="lowercase", action="store_const", const=False, help="keep case (default: as --vocab does)"
    )
    case.add_argument("--uncased", dest="lowercase", action="store_const", const=True, help="lowercase the text")
    sub.add_argument(
        "--partition", metavar="I/N", help="process only every N-th input group, starting with the I-th (default: all)"
    )
    sub.add_argument(
        "--verify-inputs",
        action="store_true",
        help="when resuming, compare whole inputs with those of the finished work, not only size, time and samples",
    )
    sub.add_argument(
        "--holdout", type=float, default=0.0, metavar="FRACTION", help="fraction of documents set aside for validation"
    )
    sub.add_argument(
        "--drop-duplicates",
        choices=("documents", "lines"),
        help="leave out documents, or lines, that have occurred before in the corpus (default: only count them)",
    )
    sub.add_argument("--threads", type=int, default=0, help="tokenization threads; 0: all cores")
    sub.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="distribute the work over this Dask scheduler, e.g. tcp://host:8786 (default: this machine only)",
    )

    sub = command("inspect", "summarize a corpus and show one of its packed, masked rows as text")
    sub.add_argument("directory", type=Path, metavar="CORPUS", help="corpus folder")
    for name, meaning in (
        ("sequence_length", "tokens per row"),
        ("masking", "masking of the row: paper, google, bert, whole-word or span"),
        ("mask_prob", "fraction of its tokens to mask"),
        ("packing", "packing of the row: best-fit or google"),
        ("cut_at", "cut documents at: token, word or line"),
    ):
        default = getattr(DataConfig, name)
        sub.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=meaning)
    sub.add_argument("--seed", type=int, default=0, help="seed that selects the row")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("verify", "verify all checksums of a corpus")
    sub.add_argument("directory", type=Path, metavar="CORPUS", help="corpus folder")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("pretrain", "train a model; rerun with the same --out to resume")
    _add_config(sub, "configuration (default: that of the run in --out, else of --preset)")
    _add_corpora(sub)
    sub.add_argument("--out", type=Path, help="run folder (default: train.out of the configuration)")
    sub.add_argument(
        "--dry-run", action="store_true", help="show the resolved configuration, the plan and the first batch; no run"
    )
    sub.add_argument("--allow-changes", action="store_true", help="resume with changed configuration keys")
    sub.add_argument(
        "--from",
        dest="from_step",
        type=_checkpoint_step,
        metavar="step-N",
        help="go back to this checkpoint: renames later checkpoints, removes later log lines (default: the last one)",
    )
    sub.epilog = _key_help(Config())

    sub = command(
        "evaluate",
        "evaluate a fine-tuned model on labeled examples: scores, and with --out a report; or a pre-trained one on a "
        "corpus: unigram AUC, which is comparable between models, then losses, accuracies and AUC",
    )
    sub.add_argument(
        "source",
        type=Path,
        metavar="MODEL",
        help="fine-tuned model, e.g. DIR/TASK/seed-0/model; or run, checkpoint or Hugging Face folder",
    )
    sub.add_argument(
        "--data",
        action="append",
        metavar="FILE|FOLDER[:WEIGHT]",
        help="labeled file; or corpus, of which the validation part (prepare --holdout) is used, or all of it if it "
        "has none; repeat to mix corpora (default: the corpus of the run)",
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    labeled = sub.add_argument_group("for a fine-tuned model")
    labeled.add_argument("--out", type=Path, help="folder for report.md, report.json, pictures and predictions.jsonl")
    labeled.add_argument(
        "--precision",
        choices=("auto", "fp32", "fp16", "bf16"),
        default="auto",
        help="dtype of activations, as for predict",
    )
    _add_text(labeled, AS_TRAINED)
    _add_label(labeled, AS_TRAINED)
    labeled.add_argument(
        "--labels",
        type=comma_separated,
        default=(),
        metavar="A,B,...",
        help="tagging: names of tags that are numbers",
    )
    corpus = sub.add_argument_group("for a pre-trained model")
    corpus.add_argument("--sequence-length", type=int, help="tokens per row (default: the run's, or the corruptor's)")
    corpus.add_argument(
        "--batch-size", type=int, help="rows per batch (default: the run's, on a GPU in its micro-batches)"
    )
    corpus.add_argument(
        "--batches", dest="max_batches", type=int, default=0, metavar="N", help="number of batches; 0: all"
    )
    corpus.add_argument(
        "--corrupted-by",
        metavar="FOLDER",
        help="source of replacements, so that models compare: the generator of this run, checkpoint or Hugging Face "
        "folder, or unigram for the corpus's token frequencies (default: the model's own generator)",
    )
    corpus.add_argument(
        "--mlm-examples",
        type=int,
        default=0,
        metavar="N",
        help="also compute masked-language-model accuracy (Appendix G), on N rows with one masked token each",
    )

    sub = command(
        "finetune", "fine-tune an encoder on GLUE, SQuAD or your own data; rerun with the same --out to resume"
    )
    sub.add_argument(
        "--task",
        required=True,
        help="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, several separated by commas; glue: all in --data; "
        "squad1, squad2; for your own data: classification, regression, tagging, question-answering",
    )
    sub.add_argument(
        "--model",
        type=Path,
        required=True,
        help="run, checkpoint or Hugging Face folder of any class: ELECTRA, ModernBERT, BERT, RoBERTa, XLM-R, "
        "CamemBERT, DistilBERT",
    )
    sub.add_argument("--out", type=Path, required=True, help="output folder for models, reports and results.json")
    sub.add_argument("--seeds", type=int, default=1, metavar="N", help="runs per task, with seeds 0 to N-1")
    sub.add_argument(
        "--untrained-twin",
        action="store_true",
        help="also fine-tune the same network from random weights, to show what pre-training is worth",
    )
    sub.add_argument("--recipe", default=FINETUNING_RECIPE, help=f"{', '.join(FINETUNING_RECIPES)}")
    sub.add_argument(
        "--role", choices=tuple(PARTS), help="network of the model (default: the first of these that it has)"
    )
    sub.add_argument("--data", type=Path, help="GLUE, SQuAD: folder of the task, or of all tasks' folders")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    _add_own_data(
        sub.add_argument_group(
            "your own data (.tsv, .csv, .jsonl, .parquet; tagging: .conll; question-answering: .json)"
        )
    )
    sub.epilog = _key_help(FinetuningConfig())

    sub = command(
        "predict", "predict labels, values, tags or answers, as JSON lines that keep each row's other columns"
    )
    sub.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="fine-tuned model, e.g. DIR/TASK/seed-0/model; with --task errors: run or export",
    )
    sub.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="file or URL: .txt (one text per line), .tsv, .csv, .jsonl, .json, .parquet, .arrow; tagging: .conll; "
        "question-answering: SQuAD's .json; a pipe, or - for standard input, is answered as it arrives",
    )
    sub.add_argument(
        "--format",
        default="",
        choices=("txt", "tsv", "csv", "jsonl", "json", "parquet", "arrow"),
        help="format of FILE (default: by its extension; of a pipe, by its first line: jsonl if that is an object, "
        "else txt)",
    )
    sub.add_argument(
        "--task",
        choices=("errors",),
        help="errors: find words that do not belong, with a pre-trained discriminator (default: what the model was "
        "fine-tuned for)",
    )
    sub.add_argument(
        "--threshold",
        type=float,
        metavar="P",
        help="lowest probability of a marked word (errors), or of a chosen label (several labels per text) (default: "
        "errors: 0.5; labels: each its own, from the model's config.json)",
    )
    sub.add_argument(
        "--top-k", type=int, metavar="K", help="classification: only the K best labels, best first (default: all)"
    )
    sub.add_argument("--n-best", type=int, metavar="N", help="question-answering: list the N best answers")
    sub.add_argument(
        "--null-threshold",
        type=float,
        metavar="X",
        help="question-answering: no answer where null_odds exceed X (default: from the model's config.json)",
    )
    sub.add_argument(
        "--precision",
        choices=("auto", "fp32", "fp16", "bf16"),
        default="auto",
        help="dtype of activations; auto: bf16 on CUDA, or fp16 before Ampere, the faster of fp32 and bf16 in a short "
        "test on a CPU",
    )
    sub.add_argument("--out", type=Path, help="output file (default: standard output)")
    _add_text(sub, AS_TRAINED)

    sub = command("reproduce", "run the paper's comparisons at equal compute; rerun with the same --out to resume")
    sub.add_argument("experiment", metavar="EXPERIMENT", help="objectives, generators, tying or sizes")
    sub.add_argument("--data", type=Path, required=True, help="corpus with a validation part (prepare --holdout)")
    sub.add_argument("--tasks", type=Path, required=True, help="folder of the GLUE tasks' folders")
    sub.add_argument("--out", type=Path, required=True, help="output folder for the table, the plot and all runs")
    _add_preset(sub, DEFAULT_PRESET, "google")
    sub.add_argument(
        "--budget", type=number(float), metavar="FLOPS", help="true FLOPs of pre-training per run, e.g. 3e15"
    )
    sub.add_argument(
        "--minutes",
        type=number(float, "minutes"),
        metavar="M",
        help="instead of --budget: about how long a run of the first row pre-trains on this machine",
    )
    sub.add_argument("--seeds", type=int, default=3, metavar="N", help="runs per row, with seeds 0 to N-1")
    sub.add_argument("--task", default="glue", help="tasks, as for finetune; glue: all in --tasks")
    sub.add_argument(
        "--finetune-seeds",
        type=int,
        default=1,
        metavar="N",
        help="fine-tuning runs per task, of which the median counts",
    )
    sub.add_argument(
        "--corrupted-by",
        default="unigram",
        metavar="FOLDER",
        help="source of replacements in evaluation, as for evaluate",
    )
    sub.add_argument("--json", action="store_true", help="print results.json")
    sub.epilog = _key_help(Config.preset(DEFAULT_PRESET, "google"), FinetuningConfig())

    sub = command("export", "export a run as Hugging Face folders: encoder/, discriminator/ and generator/")
    sub.add_argument("source", type=Path, metavar="RUN", help="run or checkpoint")
    sub.add_argument("--out", required=True, help="output folder, or URL in an object store, such as s3://bucket/model")
    sub.add_argument("--unfinished", action="store_true", help="export a run that has steps left")
    sub.add_argument("--onnx", action="store_true", help="also write model.onnx, compared with torch by onnxruntime")
    sub.add_argument(
        "--language",
        type=comma_separated,
        default=(),
        metavar="CODE,...",
        help="languages of the text, for the model card, e.g. hu",
    )
    sub.add_argument("--license", metavar="NAME", help="license of the model, for the model card, e.g. apache-2.0")
    sub.add_argument(
        "--dataset",
        type=comma_separated,
        default=(),
        metavar="OWNER/NAME,...",
        help="training texts on the Hugging Face Hub, for the model card",
    )
    sub.add_argument("--base-model", metavar="OWNER/NAME", help="the imported model on the Hub, for the model card")

    sub = command("import", "create a run from exported folders, to continue training")
    sub.add_argument("directory", type=Path, help="folder with discriminator/ and generator/, or one model")
    sub.add_argument("--out", type=Path, required=True, help="run folder")
    sub.add_argument(
        "--generator",
        metavar="small|same-layers:N|MODEL",
        help="adapt one encoder to other text by replaced-token detection, with a new small generator, copies of its "
        "first N layers, or another masked language model of its vocabulary",
    )

    sub = command("doctor", "examine this machine: versions, GPUs, extras, kernels, speed; exit code 1 for a problem")
    _add_config(sub, "check the kernels of this run")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("flops", "count the FLOPs of a configuration: the paper's count and the true one")
    _add_config(sub, "configuration, in place of --preset")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("plan", "tell what a run will take: size, epochs, memory, disk, time, rates, and what is unwise")
    _add_config(sub, "configuration, such as RUN/config.toml, in place of --preset")
    _add_corpora(sub)
    speed = sub.add_mutually_exclusive_group()
    speed.add_argument(
        "--tokens-per-second",
        type=number(float),
        metavar="X",
        help="speed to assume, such as a GPU's elsewhere (default: measured here in seconds, which needs --data)",
    )
    speed.add_argument(
        "--hours",
        type=number(float),
        metavar="H",
        help="propose preset and steps for this time on this machine and corpus",
    )
    sub.add_argument(
        "--gpu-memory",
        type=number(float),
        metavar="GIB",
        help="plan for GPUs elsewhere with this much free memory each: counts memory and the micro-batch that fits",
    )
    sub.add_argument("--gpus", type=int, default=1, metavar="N", help="number of GPUs of --gpu-memory")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("report", "write one page about runs: curves, configurations, evaluations, fine-tuning, samples")
    sub.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run, fine-tuning, or folder with such inside")
    sub.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE.html", help="page to write")
    return parser


def _add_corpora(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--data",
        action="append",
        metavar="FOLDER[:WEIGHT]",
        help="corpus; repeat to mix corpora, in proportion to WEIGHT or else to their tokens (default: data.corpus of "
        "the configuration)",
    )


def _add_quiet(parser: Parser, default: Any) -> None:
    parser.add_argument(
        "-q", "--quiet", action="store_true", default=default, help="no progress and no notes, only warnings and errors"
    )


def _checkpoint_step(text: str) -> int:
    """Returns the step of a checkpoint given by name, folder or number."""
    match = re.fullmatch(r"(?:step-)?(\d+)", text.rstrip("/").rpartition("/")[2])
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a checkpoint such as step-5000")
    return int(match[1])


def _add_inputs(sub: argparse.ArgumentParser) -> None:
    kinds = ".txt, .jsonl, .json, .parquet, .arrow (.gz, .zst, .xz)"
    sub.add_argument("inputs", nargs="+", metavar="INPUT", help=f"{kinds}, folder or glob")
    sub.add_argument(
        "--text-field",
        default="text",
        help="text field of JSON, .parquet and .arrow; several separated by commas; a dot leads into an object",
    )
    sub.add_argument(
        "--documents",
        default="blank-line",
        choices=("blank-line", "line", "file"),
        help="document separator in .txt files",
    )
    sub.add_argument(
        "--invalid-utf8", default="error", choices=("error", "replace"), help="refuse or replace invalid UTF-8"
    )
    sub.add_argument(
        "--format",
        default="auto",
        choices=("auto", "text", "jsonl", "json", "parquet", "arrow"),
        help="format of every file; auto: by its extension, skipping other files",
    )
    sub.add_argument(
        "--skip-bad-records",
        type=int,
        default=0,
        metavar="N",
        help="most malformed JSON records to skip, over all inputs",
    )


def _add_config(sub: Parser, meaning: str) -> None:
    sub.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help=meaning)
    _add_preset(sub)
    sub.epilog = "and configuration keys, as --section.key value; `electra-fast pretrain --help` lists them"


def _add_preset(sub: argparse.ArgumentParser, preset: str | None = None, recipe: str | None = None) -> None:
    sub.add_argument("--preset", default=preset, help=f"size: {', '.join(SIZES)} (default: {DEFAULT_PRESET})")
    sub.add_argument(
        "--recipe", default=recipe, help=f"recipe: {', '.join(RECIPES)} (default: {recipe or DEFAULT_RECIPE})"
    )


def _add_own_data(own: argparse._ActionsContainer) -> None:
    own.add_argument("--train", type=Path, metavar="FILE", help="training data, or its URL, as of --dev and --test")
    own.add_argument("--dev", type=Path, metavar="FILE", help="validation data (default: part of --train)")
    own.add_argument("--test", type=Path, metavar="FILE", help="data to predict, and to score if labeled")
    _add_text(own, "text; sentence1,sentence2; ...")
    _add_label(own, "label, labels, gold_label, score, target")
    for split in ("dev", "test"):
        for kind in ("text", "label"):
            help = f"--{kind} of --{split}, if its columns differ (default: as --{kind})"
            own.add_argument(f"--{split}-{kind}", type=comma_separated, default=(), metavar="COLUMN", help=help)
    own.add_argument(
        "--labels",
        type=comma_separated,
        default=(),
        metavar="A,B,...",
        help="classes (default: those in --train); -1 and - are no classes unless named here",
    )
    own.add_argument(
        "--dev-fraction",
        type=float,
        default=0.1,
        metavar="FRACTION",
        help="fraction of --train to set aside if --dev is not given",
    )
    own.add_argument(
        "--folds", type=int, metavar="K", help="cross-validate on K parts of --train, each with a model of the others"
    )
    help = "rows with one value in this column stay together when --train is split (equal texts always do)"
    own.add_argument("--group", default="", metavar="COLUMN", help=help)


def _add_label(own: argparse._ActionsContainer, default: str) -> None:
    own.add_argument(
        "--label",
        type=comma_separated,
        default=(),
        metavar="COLUMN",
        help=f"label column, or several of 0 and 1 (default: {default})",
    )
    own.add_argument(
        "--label-map",
        type=comma_separated,
        default=(),
        metavar="OLD=NEW,...",
        help="rename labels in all files; OLD= drops these examples",
    )
    own.add_argument(
        "--scheme",
        default="auto",
        help="tagging scheme: IO, IOB1, IOB2, IOBES, IOE, none; auto: inferred from the tags",
    )
    own.add_argument("--label-separator", default="", metavar="TEXT", help="separator of the labels in one cell")


def _add_text(sub: argparse._ActionsContainer, default: str) -> None:
    sub.add_argument(
        "--text",
        type=comma_separated,
        default=(),
        metavar="COLUMN[,COLUMN2]",
        help=f"text column, or two for pairs, or outer.inner for a field of an object (default: {default})",
    )
    sub.add_argument(
        "--quoting",
        default="auto",
        choices=("auto", "csv", "backslash", "none"),
        help="quotes around cells, those within doubled (csv) or after a backslash (Spark, MySQL); auto: csv except in "
        ".tsv files with tabs",
    )
    sub.add_argument("--no-header", action="store_true", help="the first line is data; columns are named 0, 1, 2, ...")
    sub.add_argument(
        "--delimiter",
        default="",
        metavar="CHARACTER",
        help="cell separator, also comma, semicolon, tab, pipe (default: by extension and first line)",
    )
    sub.add_argument(
        "--skip-bad-rows", type=int, default=0, metavar="N", help="most unusable rows to skip, over all files"
    )


def _key_help(*defaults: Configuration) -> str:
    return "configuration keys, as --section.key value (other presets and recipes have other defaults):\n" + "\n".join(
        f"  --{name:<30} {each.describe_key(name)} (default: {each.rule(name) or format_value(each.value(name))})"
        for each in defaults
        for name in each.key_names()
    )
