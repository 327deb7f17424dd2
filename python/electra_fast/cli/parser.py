"""Defines the commands of the command line and their arguments; `commands` runs them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from electra_fast import __version__
from electra_fast.cli.arguments import METAVARS, HelpAll, Parser, PrintCompletion, number
from electra_fast.config.config import Config, DataConfig
from electra_fast.config.presets import DEFAULT_PRESET, DEFAULT_RECIPE, RECIPES, SIZES
from electra_fast.config.section import Configuration, comma_separated
from electra_fast.finetuning.config import DEFAULT_RECIPE as FINETUNING_RECIPE
from electra_fast.finetuning.config import RECIPES as FINETUNING_RECIPES
from electra_fast.finetuning.config import FinetuningConfig
from electra_fast.model.networks import PARTS

# Commands that accept `--section.key value`, with the defaults that their help prints.
CONFIGURED: dict[str, tuple[Configuration, ...]] = {
    "pretrain": (Config(),),
    "adapt": (Config(), FinetuningConfig()),
    "flops": (Config(),),
    "plan": (Config(),),
    "doctor": (Config(),),
    "finetune": (FinetuningConfig(),),
    "reproduce": (Config.preset(DEFAULT_PRESET, "google"), FinetuningConfig()),
}
# Commands that run a model, and therefore accept --device.
ON_DEVICE = ("demo", "plan", "pretrain", "adapt", "finetune", "predict", "detect", "evaluate", "doctor", "reproduce")
# The default of column options where the fine-tuned model stores the columns of its training data.
AS_TRAINED = "as in training"
PRECISIONS = ("auto", "fp32", "fp16", "bf16")
Arguments = argparse._ActionsContainer
"""A parser or a group of its arguments."""


def _option(to: Arguments, name: str, default: Any, help: str, metavar: str | None = None, **more: Any) -> None:
    """Adds an option with a value, of its default's type unless `type` is another."""
    if not isinstance(default, (str, tuple, type(None))):
        more = {"type": type(default)} | more
    metavar = metavar or METAVARS.get(more.get("type", str))
    to.add_argument(name, default=default, help=help, metavar=metavar, **more)


def _path(to: Arguments, name: str, help: str, metavar: str | None = None, **more: Any) -> None:
    to.add_argument(name, type=Path, help=help, metavar=metavar, **more)


def _several(to: Arguments, name: str, metavar: str, help: str) -> None:
    """Adds an option whose value is a list separated by commas."""
    to.add_argument(name, type=comma_separated, default=(), metavar=metavar, help=help)


def _flag(to: Arguments, name: str, help: str) -> None:
    to.add_argument(name, action="store_true", help=help)


def build_parser() -> Parser:
    """Returns the parser of all commands; `command` in its result names the chosen one."""
    parser = Parser(prog="electra-fast", description="Pre-train text encoders by replaced-token detection (ELECTRA).")
    parser.add_argument("-V", "--version", action="version", version=f"electra-fast {__version__}")
    # For completion only: the command itself suggests the closest of these for an unknown value.
    offered = {"preset": list(SIZES), "recipe": list(RECIPES)}
    shells = ("bash", "zsh", "tcsh")
    hidden = argparse.SUPPRESS
    parser.add_argument("--print-completion", action=PrintCompletion, choices=shells, const=offered, help=hidden)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group, summaries in COMMANDS.items():
        for name, summary in summaries.items():
            sub: Parser = commands.add_parser(name, help=summary, description=summary)
            sub.add_argument("--help-all", action=HelpAll, nargs=0, help="show every option and key")
            globals()[f"_{name}"](sub)
            if name in ON_DEVICE:
                _option(sub, "--device", "auto", "auto (CUDA if there is a GPU), cpu, cuda or cuda:N")
            if name not in ("predict", "detect"):  # these two always write JSON lines
                _flag(sub, "--json", "print one JSON object")
            for defaults in CONFIGURED.get(name, ()):
                is_chosen = name == "adapt" and isinstance(defaults, Config)
                chosen = "chosen by adapt, or the source's" if is_chosen else None
                sub.add_keys(defaults, has_short_names=is_chosen or len(CONFIGURED[name]) == 1, default=chosen)
            sub.shown = [f"--{option}" for option in SHOWN.get(name, "").split()]
            parser.commands[name] = sub
            sub.others = parser.commands
        parser.groups[group] = commands._choices_actions[-len(summaries) :]
    return parser


def _demo(sub: Parser) -> None:
    _path(sub, "--out", "output folder", required=True)


def _vocab(sub: Parser) -> None:
    _add_inputs(sub)
    _path(sub, "--out", "vocab.txt or NAME.json; with --trim a folder", default=Path("vocab.txt"))
    _path(sub, "--trim", "trim this model's or file's vocabulary to the entries that occur in the text", "MODEL")
    help = "vocabulary size (default: 30522; with --trim, all entries that occur in the text)"
    _option(sub, "--size", None, help, "N", type=int)
    _option(sub, "--min-frequency", 2, "minimum number of occurrences of a merge")
    _flag(sub, "--cased", "keep case (default: lowercase the text)")
    _flag(sub, "--strip-accents", "remove accents and other marks, as BERT's uncased vocabularies do")
    _option(
        sub,
        "--character-coverage",
        0.9999,
        "fraction of the text's characters that the alphabet must cover",
        "FRACTION",
    )
    _option(
        sub,
        "--sample",
        1 << 30,
        "amount of text in which words are counted; 0: all",
        "BYTES",
        type=number(int, "bytes"),
    )
    _option(sub, "--seed", 0, "random seed of the sample")


def _prepare(sub: Parser) -> None:
    _add_inputs(sub)
    _path(sub, "--vocab", "vocab.txt, tokenizer.json, spm.model, or a folder with one", required=True)
    _option(sub, "--out", None, "corpus folder or URL (s3://, gs:// or az://)", required=True)
    case = sub.add_mutually_exclusive_group()
    case.add_argument("--cased", action="store_true", default=None, help="keep case (default: as --vocab does)")
    case.add_argument("--uncased", action="store_false", dest="cased", default=None, help="lowercase the text")
    help = "process only every N-th input group, starting with the I-th (default: all)"
    _option(sub, "--partition", None, help, "I/N")
    help = "when resuming, compare whole input files, not only their sizes, times and samples"
    _flag(sub, "--verify-inputs", help)
    _option(sub, "--holdout", 0.0, "fraction of documents in the validation set", "FRACTION")
    help = "drop documents or lines that occurred before in the corpus (default: only count them)"
    _option(sub, "--drop-duplicates", None, help, choices=("documents", "lines"))
    help = "distribute the work over this Dask scheduler, such as tcp://host:8786 (default: this machine only)"
    _option(sub, "--scheduler", None, help, "ADDRESS")


def _inspect(sub: Parser) -> None:
    _option(sub, "corpus", None, "corpus folder, or its URL", "CORPUS")
    for name in ("sequence_length", "masking", "mask_prob", "packing", "cut_at"):
        help = Config.describe_key(f"data.{name}")
        _option(sub, f"--{name.replace('_', '-')}", getattr(DataConfig, name), help)
    _option(sub, "--seed", 0, "random seed that selects the row")


def _verify(sub: Parser) -> None:
    _option(sub, "corpus", None, "corpus folder, or its URL", "CORPUS")


def _pretrain(sub: Parser) -> None:
    _add_corpora(sub)
    _path(sub, "--out", "run folder (default: train.out of the configuration)")
    _add_config(sub, "configuration (default: the one of the run in --out, if it exists, or --preset)")
    _flag(sub, "--dry-run", "print the resolved configuration, the plan and the first batch, and stop")
    _flag(sub, "--allow-changes", "resume with changed configuration keys")
    help = "resume from this checkpoint: renames later checkpoints, removes later log lines (default: the last one)"
    _option(sub, "--from-step", None, help, "N", type=_checkpoint_step)


def _evaluate(sub: Parser) -> None:
    help = "fine-tuned model, such as DIR/TASK/seed-0/model; or a run, checkpoint or Hugging Face folder"
    _path(sub, "model", help, "MODEL")
    help = (
        "for a fine-tuned model, a labeled file; for a run, one or more CORPUS[:WEIGHT]: their validation sets "
        "(prepare --holdout), or the whole corpus if it has none (default: the run's corpora)"
    )
    sub.add_argument("data", nargs="*", metavar="DATA", help=help)
    _path(sub, "--out", "folder for report and predictions.jsonl or, for a pre-trained model, evaluation.json")
    help = "dtype of activations (default: as in predict; for a pre-trained model fp32, so that results are comparable)"
    _option(sub, "--precision", None, help, choices=PRECISIONS)
    help = "examples or rows per batch (default: chosen for the device; for a run, its batch or micro-batch size)"
    _option(sub, "--batch-size", None, help, type=int)
    labeled = sub.add_argument_group("for a fine-tuned model")
    _add_text(labeled, AS_TRAINED)
    _add_label(labeled, AS_TRAINED)
    _several(labeled, "--labels", "A,B,...", "tagging: names for integer tags, in the order of their ids")
    corpus = sub.add_argument_group("for a pre-trained model")
    _option(corpus, "--sequence-length", None, "tokens per row (default: the run's, or from --corrupted-by)", type=int)
    _option(corpus, "--max-batches", 0, "number of batches; 0: all", "N")
    help = (
        "take the replacements from the generator of this run, checkpoint or Hugging Face folder, or draw them by "
        "token frequency (unigram), so that models are comparable (default: the model's generator)"
    )
    _option(corpus, "--corrupted-by", None, help, "FOLDER")
    help = "also compute masked-language-model accuracy (Appendix G) on N rows with one masked token each"
    _option(corpus, "--mlm-examples", 0, help, "N")
    help = "instead of DATA: tables of minimal pairs (columns --text); reports how often the better sentence wins"
    _option(corpus, "--pairs", None, help, "FILE [FILE ...]")
    _option(corpus, "--group", "", "column with the pair's group (default: UID or paradigm, or the file)", "COLUMN")


def _finetune(sub: Parser) -> None:
    _path(sub, "model", "run, checkpoint or folder of a supported Hugging Face model", "MODEL")
    help = (
        "with --train: classification, regression, tagging or question-answering; with --glue: one or more of cola, "
        "sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, separated by commas; with --squad: squad1 or squad2 (default: "
        "every task in --glue or --squad)"
    )
    _option(sub, "--task", None, help)
    _path(sub, "--out", "output folder for models, reports and results.json", required=True)
    _option(sub, "--seeds", 1, "runs per task, with seeds 0 to N-1", "N")
    help = "also fine-tune the same network from random weights, to measure the gain from pre-training"
    _flag(sub, "--untrained-twin", help)
    help = "fine-tuned model whose outputs are learned too; a baseline without it is trained in alone/"
    _path(sub, "--teacher", help, "FOLDER")
    help = "unlabeled examples, learned from the teacher's outputs; columns as in --train"
    _path(sub, "--unlabeled", help, "FILE", nargs="+", action="extend")
    _option(sub, "--recipe", FINETUNING_RECIPE, f"{', '.join(FINETUNING_RECIPES)}")
    help = "which network of the model to fine-tune (default: the first of these that it has)"
    _option(sub, "--role", None, help, choices=tuple(PARTS))
    _path(sub, "--glue", "folder of one GLUE task, or of several", "DIR")
    _path(sub, "--squad", "folder with SQuAD's train*.json and dev*.json", "DIR")
    title = "your own data (.tsv, .csv, .jsonl, .parquet; tags: .conll; questions: .json)"
    group = sub.add_argument_group(title)
    _path(group, "--train", "training file or URL", "FILE")
    _path(group, "--dev", "validation file or URL (default: a fraction of --train)", "FILE")
    _path(group, "--test", "file or URL to predict, and to score if it has labels", "FILE")
    _add_text(group, "the first of text; sentence1,sentence2; ...")
    _add_label(group, "the first of label, labels, gold_label, score, target")
    for split in ("dev", "test"):
        for kind in ("text", "label"):
            help = f"--{kind} for --{split}, if its columns differ (default: as --{kind})"
            _several(group, f"--{split}-{kind}", "COLUMN", help)
    help = "classes (default: all in --train); -1 and - are not classes unless listed here"
    _several(group, "--labels", "A,B,...", help)
    _option(group, "--dev-fraction", 0.1, "fraction of --train for validation if there is no --dev", "FRACTION")
    _option(group, "--split-seed", 0, "random seed of the validation split and of --folds", "SEED")
    _option(group, "--folds", None, "K-fold cross-validation on --train", "K", type=int)
    help = "never split rows with the same value in this column (equal texts are never split)"
    _option(group, "--group", "", help, "COLUMN")


def _predict(sub: Parser) -> None:
    _path(sub, "model", "fine-tuned model, such as DIR/TASK/seed-0/model", "MODEL")
    _add_file(sub, "; tagging: .conll; question-answering: SQuAD's .json")
    help = "several labels per text: minimum probability of a predicted label (default: per label, in config.json)"
    _option(sub, "--threshold", None, help, "P", type=float)
    help = "classification: print only the K best labels, best first (default: all)"
    _option(sub, "--top-k", None, help, "K", type=int)
    _option(sub, "--n-best", None, "question-answering: print the N best answers", "N", type=int)
    help = "question-answering: predict no answer if null_odds exceed X (default: in the model's config.json)"
    _option(sub, "--null-threshold", None, help, "X", type=float)
    _add_inference(sub)
    _path(sub, "--out", "output file; -: standard output", default=Path("-"))
    _add_text(sub, AS_TRAINED)


def _detect(sub: Parser) -> None:
    _path(sub, "model", "run, checkpoint, export or Hugging Face discriminator", "MODEL")
    _add_file(sub)
    _option(sub, "--threshold", 0.5, "minimum probability of a reported word", "P")
    _add_inference(sub)
    _path(sub, "--out", "output file; -: standard output", default=Path("-"))
    _add_text(sub, "text")


def _reproduce(sub: Parser) -> None:
    _option(sub, "experiment", None, "objectives, generators, tying or sizes", "EXPERIMENT")
    _path(sub, "corpus", "corpus with a validation set (prepare --holdout)", "CORPUS")
    _path(sub, "--glue", "folder with the folders of GLUE tasks", "DIR", required=True)
    _path(sub, "--out", "output folder for the table, the plot and all runs", required=True)
    _add_preset(sub, DEFAULT_PRESET, "google")
    _option(sub, "--budget", None, "exact FLOPs of pre-training per run, such as 3e15", "FLOPS", type=number(float))
    help = "instead of --budget: approximate pre-training time of the first row's run on this machine"
    _option(sub, "--minutes", None, help, "M", type=number(float, "minutes"))
    _option(sub, "--seeds", 3, "runs per row, with seeds 0 to N-1", "N")
    _option(sub, "--task", None, "GLUE tasks, separated by commas (default: every task in --glue)")
    _option(sub, "--finetune-seeds", 1, "fine-tuning runs per task; their median is the score", "N")
    _option(sub, "--corrupted-by", "unigram", "source of replacements in evaluation, as in evaluate", "FOLDER")


def _export(sub: Parser) -> None:
    _path(sub, "run", "run, checkpoint or fine-tuned model", "RUN")
    _option(sub, "--out", None, "output folder or, for a run, also a URL such as s3://bucket/model", required=True)
    _flag(sub, "--unfinished", "export a run that has steps left")
    _flag(
        sub, "--onnx", "write model.onnx and compare its outputs with torch's (for a run, in addition to its folders)"
    )
    _flag(sub, "--int8", "fine-tuned model with --onnx: quantize to int8 and compare score, size and speed")
    _option(sub, "--data", None, "labeled examples for --int8 (default: the validation set of finetune)", "FILE")
    help = "largest drop of the task's score with --int8, in points of 100"
    _option(sub, "--accept-loss", 1.0, help, "N", type=number(float))
    _several(sub, "--language", "CODE,...", "languages of the text, for the model card, such as hu")
    _option(sub, "--license", None, "license of the model, for the model card, such as apache-2.0", "NAME")
    _several(sub, "--dataset", "OWNER/NAME,...", "training datasets on the Hugging Face Hub, for the model card")
    _option(sub, "--base-model", None, "name of the imported model on the Hub, for the model card", "OWNER/NAME")


def _import(sub: Parser) -> None:
    _path(sub, "model", "run, folder with discriminator/ and generator/, or one model", "MODEL")
    _path(sub, "--out", "run folder", required=True)
    help = (
        "adapt one encoder by replaced-token detection, with a new small generator, a copy of its first N layers, or "
        "another masked language model with the same vocabulary"
    )
    _option(sub, "--generator", None, help, "small|same-layers:N|MODEL")
    _flag(sub, "--mlm", "adapt one encoder by masked language modeling")
    help = "new vocabulary: shared entries keep their embeddings, new ones get the mean embedding of their pieces"
    _path(sub, "--vocab", help, "FILE|FOLDER")


def _adapt(sub: Parser) -> None:
    _path(sub, "model", "run, checkpoint or Hugging Face folder", "MODEL")
    _add_inputs(sub)
    _path(sub, "--out", "run folder", required=True)
    _option(sub, "--general", None, "corpus of general text to mix in, prepared with the model's tokenizer", "CORPUS")
    help = "generator for an encoder that has none, as in import"
    _option(sub, "--generator", None, help, "small|same-layers:N|MODEL")
    _path(sub, "--vocab", "new vocabulary for the model, as in import", "FILE|FOLDER")
    _flag(sub, "--trim", "trim the vocabulary to the entries that occur in TEXT")
    _option(sub, "--holdout", 0.02, "fraction of documents in the validation set", "FRACTION")
    _flag(sub, "--dry-run", "print the choices with their reasons and the plan, and stop")
    _path(sub, "--task-data", "labeled file of the domain: fine-tunes on it before and after, and compares", "FILE")
    help = "classification, regression, tagging or question-answering"
    _option(sub, "--task", "classification", help)
    _path(sub, "--dev", "labeled validation file (default: a fraction of --task-data)", "FILE")
    _several(sub, "--task-text", "COLUMN[,COLUMN2]", "text column of --task-data (default: as in finetune)")
    _several(sub, "--label", "COLUMN", "label column of --task-data (default: as in finetune)")
    _option(sub, "--seeds", 3, "fine-tuning runs before and after, with seeds 0 to N-1", "N")


def _doctor(sub: Parser) -> None:
    _add_config(sub, "configuration whose kernels are checked")


def _flops(sub: Parser) -> None:
    _add_config(sub, "configuration, instead of --preset")


def _plan(sub: Parser) -> None:
    _add_corpora(sub)
    _add_config(sub, "configuration, such as RUN/config.toml, instead of --preset")
    speed = sub.add_mutually_exclusive_group()
    help = "assume this speed (default: a short measurement on this machine with CORPUS)"
    _option(speed, "--tokens-per-second", None, help, "X", type=number(float))
    help = "propose a preset and a number of steps for this time on this machine and corpus"
    _option(speed, "--hours", None, help, "H", type=number(float))
    help = "plan for GPUs with this much free memory each that are not in this machine: memory use and micro-batch"
    _option(sub, "--gpu-memory", None, help, "GIB", type=number(float))
    _option(sub, "--gpus", 1, "number of GPUs with --gpu-memory", "N")


def _report(sub: Parser) -> None:
    _path(sub, "runs", "run, fine-tuning folder, or folder that contains some", "RUN", nargs="+")
    _path(sub, "--out", "output page", "FILE.html", default=Path("report.html"))


# Summaries of the commands, in the order of work.
COMMANDS = {
    "Build": {
        "demo": "train and export a model in 1 to 3 minutes, without downloads",
        "vocab": "train a WordPiece vocabulary, or trim a model's vocabulary to a text",
        "prepare": "tokenize text into a corpus of shards; rerun with the same --out to resume",
        "inspect": "summarize a corpus and print one of its packed, masked rows as text",
        "verify": "verify all checksums of a corpus",
        "plan": "estimate a run before it starts: size, epochs, memory, disk, time, learning rates and warnings",
        "pretrain": "train a model; rerun with the same --out to resume",
        "adapt": "continue pre-training an encoder on a domain's text, and compare before and after; rerun to resume",
        "export": "export a run as Hugging Face folders, or a fine-tuned model to ONNX in fp32 or int8",
        "import": "create a run from a Hugging Face model, an export or another run, to continue pre-training",
    },
    "Use": {
        "finetune": "fine-tune an encoder on GLUE, SQuAD or your own data; rerun with the same --out to resume",
        "predict": "predict labels, values, tags or answers, as JSON lines that keep the other columns of each row",
        "detect": (
            "find words that do not fit, such as typing errors, with a pre-trained model, as JSON lines that keep the "
            "other columns of each row"
        ),
        "evaluate": (
            "evaluate a fine-tuned model on labeled examples (scores and, with --out, a report), or a pre-trained "
            "model on a corpus (unigram AUC for comparing models; losses, accuracies, AUC) or on minimal pairs"
        ),
    },
    "Look": {
        "report": "write one HTML page about runs: curves, configurations, evaluations, fine-tuning, samples",
        "doctor": "check this machine: versions, GPUs, extras, kernels, speed; exits with 1 if it finds a problem",
        "flops": "count the FLOPs of a configuration, exactly and as in the paper",
    },
    "Research": {
        "reproduce": "repeat the paper's comparisons at equal compute; rerun with the same --out to resume",
    },
}
# The options in a command's --help; others list all.
SHOWN = {
    "vocab": "out size trim cased strip-accents text format documents threads json",
    "prepare": "vocab out holdout drop-duplicates text format documents partition threads json",
    "plan": "config preset recipe hours gpu-memory gpus steps batch-size lr json",
    "pretrain": "out config preset recipe steps batch-size lr precision device dry-run",
    "export": "out onnx int8 data accept-loss unfinished language license json",
    "finetune": "task train dev test text label glue out seeds epochs",
    "adapt": "out task-data label dev generator steps lr holdout seeds dry-run",
    "predict": "out text format threshold top-k n-best null-threshold device precision",
    "detect": "out threshold text precision device",
    "evaluate": "out text label sequence-length corrupted-by pairs group device precision json",
    "doctor": "config preset recipe device precision json",
    "flops": "config preset recipe steps batch-size sequence-length json",
    "reproduce": "glue out preset recipe budget minutes seeds task finetune-seeds json",
}


def _add_corpora(sub: Parser) -> None:
    help = (
        "corpus; several are mixed in proportion to WEIGHT, by default their numbers of tokens (default: data.corpus "
        "of the configuration)"
    )
    sub.add_argument("corpus", nargs="*", metavar="CORPUS[:WEIGHT]", help=help)


def _checkpoint_step(text: str) -> int:
    """Returns the step of a checkpoint from its name, folder or number."""
    match = re.fullmatch(r"(?:step-)?(\d+)", text.rstrip("/").rpartition("/")[2])
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a checkpoint's name, such as step-5000")
    return int(match[1])


def _add_inputs(sub: Parser) -> None:
    sub.set_defaults(kind="files")
    kinds = ".txt, .jsonl, .json, .parquet, .arrow (.gz, .zst, .xz)"
    sub.add_argument("inputs", nargs="+", metavar="TEXT", help=f"{kinds}, folder or glob")
    help = "text field of JSON, .parquet and .arrow; several separated by commas; outer.inner for a field of an object"
    _option(sub, "--text", "text", help, "FIELD")
    separators = ("blank-line", "line", "file")
    _option(sub, "--documents", "blank-line", "document separator in .txt files", choices=separators)
    _option(sub, "--invalid-utf8", "error", "stop at invalid UTF-8, or replace it", choices=("error", "replace"))
    formats = ("auto", "txt", "jsonl", "json", "parquet", "arrow")
    help = "format of all files; auto: by extension, skipping files with unknown extensions"
    _option(sub, "--format", "auto", help, choices=formats)
    _option(sub, "--skip-bad-rows", 0, "skip up to N malformed JSON records in total", "N")
    _option(sub, "--threads", 0, "threads; 0: all cores", "N")


def _add_config(sub: Parser, meaning: str) -> None:
    _path(sub, "--config", meaning, "FILE.toml")
    _add_preset(sub)


def _add_preset(sub: Parser, preset: str | None = None, recipe: str | None = None) -> None:
    _option(sub, "--preset", preset, f"size: {', '.join(SIZES)} (default: {DEFAULT_PRESET})")
    _option(sub, "--recipe", recipe, f"recipe: {', '.join(RECIPES)} (default: {recipe or DEFAULT_RECIPE})")


def _add_file(sub: Parser, more: str = "") -> None:
    help = (
        f"file or URL: .txt (one text per line), .tsv, .csv, .jsonl, .json, .parquet, .arrow{more}; lines of a pipe, "
        "or of standard input (-), are answered as they arrive"
    )
    _path(sub, "file", help, "FILE")
    help = "format of FILE; auto: by extension; for a pipe, jsonl if its first line is an object, or txt"
    formats = ("auto", "txt", "tsv", "csv", "jsonl", "json", "parquet", "arrow")
    _option(sub, "--format", "auto", help, choices=formats)


def _add_inference(sub: Parser) -> None:
    help = (
        "dtype of activations; auto: on CUDA bf16, or fp16 before Ampere; on a CPU the faster of fp32 and bf16 in a "
        "short test"
    )
    _option(sub, "--precision", "auto", help, choices=PRECISIONS)


def _add_label(to: Arguments, default: str) -> None:
    _several(to, "--label", "COLUMN", f"label column, or several 0/1 columns (default: {default})")
    _several(to, "--label-map", "OLD=NEW,...", "rename labels in all files; OLD= drops examples with that label")
    help = "tagging scheme: IO, IOB1, IOB2, IOBES, IOE, none; auto: inferred from the tags"
    _option(to, "--scheme", "auto", help)
    _option(to, "--label-separator", "", "separator between labels in one cell", "TEXT")


def _add_text(to: Arguments, default: str) -> None:
    help = f"text column, or two for pairs; outer.inner for a field of an object (default: {default})"
    _several(to, "--text", "COLUMN[,COLUMN2]", help)
    help = (
        "quotes around cells: doubled within a cell (csv), escaped by a backslash (Spark, MySQL), or none; auto: csv, "
        "but none in .tsv files with tabs"
    )
    _option(to, "--quoting", "auto", help, choices=("auto", "csv", "backslash", "none"))
    _flag(to, "--no-header", "treat the first line as data; columns are named 0, 1, 2, ...")
    help = "cell separator: a character, or comma, semicolon, tab, pipe (default: by extension and first line)"
    _option(to, "--delimiter", "", help, "CHARACTER")
    _option(to, "--skip-bad-rows", 0, "skip up to N unusable rows in total", "N")
