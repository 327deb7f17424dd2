"""The commands of the command line and their arguments, also for completion in a shell; `commands` runs them."""

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

# Commands that take `--section.key value`, and the defaults that their help states.
CONFIGURED: dict[str, tuple[Configuration, ...]] = {
    "pretrain": (Config(),),
    "adapt": (Config(), FinetuningConfig()),
    "flops": (Config(),),
    "plan": (Config(),),
    "doctor": (Config(),),
    "finetune": (FinetuningConfig(),),
    "reproduce": (Config.preset(DEFAULT_PRESET, "google"), FinetuningConfig()),
}
# Those that run a model, and so take --device.
ON_DEVICE = ("demo", "plan", "pretrain", "adapt", "finetune", "predict", "detect", "evaluate", "doctor", "reproduce")
# The default of columns where a fine-tuned model knows them.
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
    # Offered, while the command itself answers other values with the closest of these.
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
            if name not in ("predict", "detect"):  # which write JSON lines
                _flag(sub, "--json", "print one JSON object")
            for defaults in CONFIGURED.get(name, ()):
                is_chosen = name == "adapt" and isinstance(defaults, Config)
                chosen = "as chosen, or the source's" if is_chosen else None
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
    _path(sub, "--trim", "keep those entries of this model's or file's tokenizer that the text uses", "MODEL")
    help = "vocabulary size (default: 30522; with --trim all that the text uses)"
    _option(sub, "--size", None, help, "N", type=int)
    _option(sub, "--min-frequency", 2, "minimum occurrences of a merge")
    _flag(sub, "--cased", "keep case (default: lowercase the text)")
    _flag(sub, "--strip-accents", "remove accents and other marks, as BERT's uncased vocabularies do")
    _option(sub, "--character-coverage", 0.9999, "fraction of the text that the kept characters must cover", "FRACTION")
    _option(sub, "--sample", 1 << 30, "amount of text to count words in; 0: all", "BYTES", type=number(int, "bytes"))
    _option(sub, "--seed", 0, "seed of the sample")


def _prepare(sub: Parser) -> None:
    _add_inputs(sub)
    _path(sub, "--vocab", "vocab.txt, tokenizer.json, spm.model, or a folder with one", required=True)
    _option(sub, "--out", None, "corpus folder, or its URL: s3://, gs:// or az://", required=True)
    case = sub.add_mutually_exclusive_group()
    case.add_argument("--cased", action="store_true", default=None, help="keep case (default: as --vocab does)")
    case.add_argument("--uncased", action="store_false", dest="cased", default=None, help="lowercase the text")
    help = "process only every N-th input group, starting with the I-th (default: all)"
    _option(sub, "--partition", None, help, "I/N")
    help = "when resuming, compare whole inputs with those of the finished work, not only size, time and samples"
    _flag(sub, "--verify-inputs", help)
    _option(sub, "--holdout", 0.0, "fraction of documents set aside for validation", "FRACTION")
    help = "leave out documents, or lines, that have occurred before in the corpus (default: only count them)"
    _option(sub, "--drop-duplicates", None, help, choices=("documents", "lines"))
    help = "distribute the work over this Dask scheduler, e.g. tcp://host:8786 (default: this machine only)"
    _option(sub, "--scheduler", None, help, "ADDRESS")


def _inspect(sub: Parser) -> None:
    _option(sub, "corpus", None, "corpus folder, or its URL", "CORPUS")
    for name in ("sequence_length", "masking", "mask_prob", "packing", "cut_at"):
        help = Config.describe_key(f"data.{name}")
        _option(sub, f"--{name.replace('_', '-')}", getattr(DataConfig, name), help)
    _option(sub, "--seed", 0, "seed that selects the row")


def _verify(sub: Parser) -> None:
    _option(sub, "corpus", None, "corpus folder, or its URL", "CORPUS")


def _pretrain(sub: Parser) -> None:
    _add_corpora(sub)
    _path(sub, "--out", "run folder (default: train.out of the configuration)")
    _add_config(sub, "configuration (default: that of the run in --out, else of --preset)")
    _flag(sub, "--dry-run", "show the resolved configuration, the plan and the first batch; no run")
    _flag(sub, "--allow-changes", "resume with changed configuration keys")
    help = "go back to this checkpoint: renames later checkpoints, removes later log lines (default: the last one)"
    _option(sub, "--from-step", None, help, "N", type=_checkpoint_step)


def _evaluate(sub: Parser) -> None:
    help = "fine-tuned model, e.g. DIR/TASK/seed-0/model; or run, checkpoint or Hugging Face folder"
    _path(sub, "model", help, "MODEL")
    help = (
        "of a fine-tuned model: labeled file; of a run: CORPUS[:WEIGHT], also several, of which the validation parts "
        "(prepare --holdout) are used, or all of one that has none (default: the run's own)"
    )
    sub.add_argument("data", nargs="*", metavar="DATA", help=help)
    _path(sub, "--out", "folder for a report and predictions.jsonl; of a pre-trained model for evaluation.json")
    help = "dtype of activations (default: auto, as for predict; fp32 of a pre-trained model, so that figures compare)"
    _option(sub, "--precision", None, help, choices=PRECISIONS)
    help = "examples or rows per batch (default: as suits the device; the run's, on a GPU in its micro-batches)"
    _option(sub, "--batch-size", None, help, type=int)
    labeled = sub.add_argument_group("for a fine-tuned model")
    _add_text(labeled, AS_TRAINED)
    _add_label(labeled, AS_TRAINED)
    _several(labeled, "--labels", "A,B,...", "tagging: names of tags that are numbers")
    corpus = sub.add_argument_group("for a pre-trained model")
    _option(corpus, "--sequence-length", None, "tokens per row (default: the run's, or the corruptor's)", type=int)
    _option(corpus, "--max-batches", 0, "number of batches; 0: all", "N")
    help = (
        "source of replacements, so that models compare: the generator of this run, checkpoint or Hugging Face folder, "
        "or unigram for the corpus's token frequencies (default: the model's own generator)"
    )
    _option(corpus, "--corrupted-by", None, help, "FOLDER")
    help = "also compute masked-language-model accuracy (Appendix G), on N rows with one masked token each"
    _option(corpus, "--mlm-examples", 0, help, "N")
    help = "instead of DATA: tables of a better and a worse sentence (--text); how often the better one scores higher"
    _option(corpus, "--pairs", None, help, "FILE [FILE ...]")
    _option(corpus, "--group", "", "column of the pairs' groups (default: UID or paradigm, else the file)", "COLUMN")


def _finetune(sub: Parser) -> None:
    help = (
        "run, checkpoint or Hugging Face folder of any class: ELECTRA, ModernBERT, DeBERTaV2, BERT, RoBERTa, XLM-R, "
        "CamemBERT, DistilBERT"
    )
    _path(sub, "model", help, "MODEL")
    help = (
        "with --train: classification, regression, tagging or question-answering; of GLUE: cola, sst2, mrpc, stsb, "
        "qqp, mnli, qnli, rte, wnli, or several separated by commas; of SQuAD: squad1 or squad2 (default: all that "
        "--glue or --squad holds)"
    )
    _option(sub, "--task", None, help)
    _path(sub, "--out", "output folder for models, reports and results.json", required=True)
    _option(sub, "--seeds", 1, "runs per task, with seeds 0 to N-1", "N")
    help = "also fine-tune the same network from random weights, to show what pre-training is worth"
    _flag(sub, "--untrained-twin", help)
    help = "fine-tuned folder whose answers are learned too; the same network is also trained without, in alone/"
    _path(sub, "--teacher", help, "FOLDER")
    help = "examples without labels, to learn from the teacher's answers; columns as in --train"
    _path(sub, "--unlabeled", help, "FILE", nargs="+", action="extend")
    _option(sub, "--recipe", FINETUNING_RECIPE, f"{', '.join(FINETUNING_RECIPES)}")
    help = "network of the model (default: the first of these that it has)"
    _option(sub, "--role", None, help, choices=tuple(PARTS))
    _path(sub, "--glue", "GLUE: folder of a task, or of several tasks' folders", "DIR")
    _path(sub, "--squad", "SQuAD: folder of its files, train*.json and dev*.json", "DIR")
    title = "your own data (.tsv, .csv, .jsonl, .parquet; tags: .conll; questions: .json)"
    own = sub.add_argument_group(title)
    _path(own, "--train", "training data, or its URL, as of --dev and --test", "FILE")
    _path(own, "--dev", "validation data (default: part of --train)", "FILE")
    _path(own, "--test", "data to predict, and to score if labeled", "FILE")
    _add_text(own, "text; sentence1,sentence2; ...")
    _add_label(own, "label, labels, gold_label, score, target")
    for split in ("dev", "test"):
        for kind in ("text", "label"):
            help = f"--{kind} of --{split}, if its columns differ (default: as --{kind})"
            _several(own, f"--{split}-{kind}", "COLUMN", help)
    help = "classes (default: those in --train); -1 and - are no classes unless named here"
    _several(own, "--labels", "A,B,...", help)
    _option(own, "--dev-fraction", 0.1, "fraction of --train to set aside if --dev is not given", "FRACTION")
    _option(own, "--split-seed", 0, "seed of what is set aside, and of --folds", "SEED")
    help = "cross-validate on K parts of --train, each with a model of the others"
    _option(own, "--folds", None, help, "K", type=int)
    help = "rows with one value in this column stay together when --train is split (equal texts always do)"
    _option(own, "--group", "", help, "COLUMN")


def _predict(sub: Parser) -> None:
    _path(sub, "model", "fine-tuned model, e.g. DIR/TASK/seed-0/model", "MODEL")
    _add_file(sub, "; tagging: .conll; question-answering: SQuAD's .json")
    help = (
        "several labels per text: lowest probability of a chosen label (default: each its own, from the model's "
        "config.json)"
    )
    _option(sub, "--threshold", None, help, "P", type=float)
    help = "classification: only the K best labels, best first (default: all)"
    _option(sub, "--top-k", None, help, "K", type=int)
    _option(sub, "--n-best", None, "question-answering: list the N best answers", "N", type=int)
    help = "question-answering: no answer where null_odds exceed X (default: from the model's config.json)"
    _option(sub, "--null-threshold", None, help, "X", type=float)
    _add_inference(sub)
    _path(sub, "--out", "output file; -: standard output", default=Path("-"))
    _add_text(sub, AS_TRAINED)


def _detect(sub: Parser) -> None:
    _path(sub, "model", "run, checkpoint, export or Hugging Face discriminator", "MODEL")
    _add_file(sub)
    _option(sub, "--threshold", 0.5, "lowest probability of a marked word", "P")
    _add_inference(sub)
    _path(sub, "--out", "output file; -: standard output", default=Path("-"))
    _add_text(sub, "text")


def _reproduce(sub: Parser) -> None:
    _option(sub, "experiment", None, "objectives, generators, tying or sizes", "EXPERIMENT")
    _path(sub, "corpus", "corpus with a validation part (prepare --holdout)", "CORPUS")
    _path(sub, "--glue", "folder of the GLUE tasks' folders", "DIR", required=True)
    _path(sub, "--out", "output folder for the table, the plot and all runs", required=True)
    _add_preset(sub, DEFAULT_PRESET, "google")
    _option(sub, "--budget", None, "true FLOPs of pre-training per run, e.g. 3e15", "FLOPS", type=number(float))
    help = "instead of --budget: about how long a run of the first row pre-trains on this machine"
    _option(sub, "--minutes", None, help, "M", type=number(float, "minutes"))
    _option(sub, "--seeds", 3, "runs per row, with seeds 0 to N-1", "N")
    _option(sub, "--task", None, "tasks of GLUE, separated by commas (default: all that --glue holds)")
    _option(sub, "--finetune-seeds", 1, "fine-tuning runs per task, of which the median counts", "N")
    _option(sub, "--corrupted-by", "unigram", "source of replacements in evaluation, as for evaluate", "FOLDER")


def _export(sub: Parser) -> None:
    _path(sub, "run", "run, checkpoint or fine-tuned model", "RUN")
    _option(
        sub,
        "--out",
        None,
        "output folder, of a run also a URL, such as s3://bucket/model",
        required=True,
    )
    _flag(sub, "--unfinished", "export a run that has steps left")
    _flag(sub, "--onnx", "write model.onnx, compared with torch by onnxruntime; of a run beside the other files")
    _flag(sub, "--int8", "of a fine-tuned model, with --onnx: int8, compared in score, size and speed")
    _option(sub, "--data", None, "labeled examples to compare on (default: those that finetune validated on)", "FILE")
    help = "points of 100 of the task's score that int8 may lose"
    _option(sub, "--accept-loss", 1.0, help, "N", type=number(float))
    _several(sub, "--language", "CODE,...", "languages of the text, for the model card, e.g. hu")
    _option(sub, "--license", None, "license of the model, for the model card, e.g. apache-2.0", "NAME")
    _several(sub, "--dataset", "OWNER/NAME,...", "training texts on the Hugging Face Hub, for the model card")
    _option(sub, "--base-model", None, "the imported model on the Hub, for the model card", "OWNER/NAME")


def _import(sub: Parser) -> None:
    _path(sub, "model", "run, folder with discriminator/ and generator/, or one model", "MODEL")
    _path(sub, "--out", "run folder", required=True)
    help = (
        "adapt one encoder to other text by replaced-token detection, with a new small generator, copies of its first "
        "N layers, or another masked language model of its vocabulary"
    )
    _option(sub, "--generator", None, help, "small|same-layers:N|MODEL")
    _flag(sub, "--mlm", "adapt one encoder to other text by masked language modeling")
    help = "another vocabulary: entries of both keep their embeddings, others begin as the mean of their pieces"
    _path(sub, "--vocab", help, "FILE|FOLDER")


def _adapt(sub: Parser) -> None:
    _path(sub, "model", "run, checkpoint or Hugging Face folder", "MODEL")
    _add_inputs(sub)
    _path(sub, "--out", "run folder", required=True)
    _option(sub, "--general", None, "general text, prepared with the model's tokenizer, to mix in", "CORPUS")
    help = "for replaced-token detection by an encoder without a generator, as for import"
    _option(sub, "--generator", None, help, "small|same-layers:N|MODEL")
    _path(sub, "--vocab", "another vocabulary for the model, as for import", "FILE|FOLDER")
    _flag(sub, "--trim", "keep only the entries of the vocabulary that TEXT uses")
    _option(sub, "--holdout", 0.02, "fraction of documents set aside for validation", "FRACTION")
    _flag(sub, "--dry-run", "show what it would choose and why, and the plan; leaves nothing")
    _path(sub, "--task-data", "labeled data of the domain: fine-tunes on them before and after, and compares", "FILE")
    help = "classification, regression, tagging or question-answering"
    _option(sub, "--task", "classification", help)
    _path(sub, "--dev", "labeled data to score on (default: part of --task-data)", "FILE")
    _several(sub, "--task-text", "COLUMN[,COLUMN2]", "text column of --task-data (default: text; ...)")
    _several(sub, "--label", "COLUMN", "label column of --task-data (default: label, labels, ...)")
    _option(sub, "--seeds", 3, "fine-tuning runs before and after, with seeds 0 to N-1", "N")


def _doctor(sub: Parser) -> None:
    _add_config(sub, "check the kernels of this run")


def _flops(sub: Parser) -> None:
    _add_config(sub, "configuration, in place of --preset")


def _plan(sub: Parser) -> None:
    _add_corpora(sub)
    _add_config(sub, "configuration, such as RUN/config.toml, in place of --preset")
    speed = sub.add_mutually_exclusive_group()
    help = "speed to assume, such as a GPU's elsewhere (default: measured here in seconds, on CORPUS)"
    _option(speed, "--tokens-per-second", None, help, "X", type=number(float))
    help = "propose preset and steps for this time on this machine and corpus"
    _option(speed, "--hours", None, help, "H", type=number(float))
    help = "plan for GPUs elsewhere with this much free memory each: counts memory and the micro-batch that fits"
    _option(sub, "--gpu-memory", None, help, "GIB", type=number(float))
    _option(sub, "--gpus", 1, "number of GPUs of --gpu-memory", "N")


def _report(sub: Parser) -> None:
    _path(sub, "runs", "run, fine-tuning, or folder with such inside", "RUN", nargs="+")
    _path(sub, "--out", "page to write", "FILE.html", default=Path("report.html"))


# What a command is for, in the order of work.
COMMANDS = {
    "Build": {
        "demo": "train and export a model in 1 to 3 minutes, without downloads",
        "vocab": "train a WordPiece vocabulary, or trim that of a model to a text",
        "prepare": "tokenize text into a corpus of shards; rerun with the same --out to resume",
        "inspect": "summarize a corpus and show one of its packed, masked rows as text",
        "verify": "verify all checksums of a corpus",
        "plan": "tell what a run will take: size, epochs, memory, disk, time, rates, and what is unwise",
        "pretrain": "train a model; rerun with the same --out to resume",
        "adapt": "continue an encoder on text of a domain, and compare before and after; rerun to resume",
        "export": "export a run as Hugging Face folders, or a fine-tuned model in ONNX, also in int8",
        "import": "create a run from exported folders or a run, to continue training",
    },
    "Use": {
        "finetune": "fine-tune an encoder on GLUE, SQuAD or your own data; rerun with the same --out to resume",
        "predict": "predict labels, values, tags or answers, as JSON lines that keep each row's other columns",
        "detect": (
            "find words that do not belong, such as typing errors, by a pre-trained model, as JSON lines with each "
            "row's other columns"
        ),
        "evaluate": (
            "evaluate a fine-tuned model on labeled examples: scores, and with --out a report; or a pre-trained one on "
            "a corpus: unigram AUC, which is comparable between models, then losses, accuracies and AUC; or on pairs"
        ),
    },
    "Look": {
        "report": "write one page about runs: curves, configurations, evaluations, fine-tuning, samples",
        "doctor": "examine this machine: versions, GPUs, extras, kernels, speed; exit code 1 for a problem",
        "flops": "count the FLOPs of a configuration: the paper's count and the true one",
    },
    "Research": {
        "reproduce": "run the paper's comparisons at equal compute; rerun with the same --out to resume",
    },
}
# The options of a command's --help, if not all.
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
        "corpus; several are mixed in proportion to WEIGHT or else to their tokens (default: data.corpus of the "
        "configuration)"
    )
    sub.add_argument("corpus", nargs="*", metavar="CORPUS[:WEIGHT]", help=help)


def _checkpoint_step(text: str) -> int:
    """Returns the step of a checkpoint given by name, folder or number."""
    match = re.fullmatch(r"(?:step-)?(\d+)", text.rstrip("/").rpartition("/")[2])
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a checkpoint such as step-5000")
    return int(match[1])


def _add_inputs(sub: Parser) -> None:
    sub.set_defaults(kind="files")
    kinds = ".txt, .jsonl, .json, .parquet, .arrow (.gz, .zst, .xz)"
    sub.add_argument("inputs", nargs="+", metavar="TEXT", help=f"{kinds}, folder or glob")
    help = "text field of JSON, .parquet and .arrow; several separated by commas; a dot leads into an object"
    _option(sub, "--text", "text", help, "FIELD")
    separators = ("blank-line", "line", "file")
    _option(sub, "--documents", "blank-line", "document separator in .txt files", choices=separators)
    _option(sub, "--invalid-utf8", "error", "refuse or replace invalid UTF-8", choices=("error", "replace"))
    formats = ("auto", "txt", "jsonl", "json", "parquet", "arrow")
    help = "format of every file; auto: by its extension, skipping other files"
    _option(sub, "--format", "auto", help, choices=formats)
    _option(sub, "--skip-bad-rows", 0, "most malformed JSON records to skip, over all inputs", "N")
    _option(sub, "--threads", 0, "threads; 0: all cores", "N")


def _add_config(sub: Parser, meaning: str) -> None:
    _path(sub, "--config", meaning, "FILE.toml")
    _add_preset(sub)


def _add_preset(sub: Parser, preset: str | None = None, recipe: str | None = None) -> None:
    _option(sub, "--preset", preset, f"size: {', '.join(SIZES)} (default: {DEFAULT_PRESET})")
    _option(sub, "--recipe", recipe, f"recipe: {', '.join(RECIPES)} (default: {recipe or DEFAULT_RECIPE})")


def _add_file(sub: Parser, more: str = "") -> None:
    help = (
        f"file or URL: .txt (one text per line), .tsv, .csv, .jsonl, .json, .parquet, .arrow{more}; a pipe, or - for "
        "standard input, is answered as it arrives"
    )
    _path(sub, "file", help, "FILE")
    help = "format of FILE; auto: by its extension; of a pipe, by its first line: jsonl if that is an object, else txt"
    formats = ("auto", "txt", "tsv", "csv", "jsonl", "json", "parquet", "arrow")
    _option(sub, "--format", "auto", help, choices=formats)


def _add_inference(sub: Parser) -> None:
    help = (
        "dtype of activations; auto: bf16 on CUDA, or fp16 before Ampere, the faster of fp32 and bf16 in a short test "
        "on a CPU"
    )
    _option(sub, "--precision", "auto", help, choices=PRECISIONS)


def _add_label(own: Arguments, default: str) -> None:
    _several(own, "--label", "COLUMN", f"label column, or several of 0 and 1 (default: {default})")
    _several(own, "--label-map", "OLD=NEW,...", "rename labels in all files; OLD= drops these examples")
    help = "tagging scheme: IO, IOB1, IOB2, IOBES, IOE, none; auto: inferred from the tags"
    _option(own, "--scheme", "auto", help)
    _option(own, "--label-separator", "", "separator of the labels in one cell", "TEXT")


def _add_text(to: Arguments, default: str) -> None:
    help = f"text column, or two for pairs, or outer.inner for a field of an object (default: {default})"
    _several(to, "--text", "COLUMN[,COLUMN2]", help)
    help = (
        "quotes around cells, those within doubled (csv) or after a backslash (Spark, MySQL); auto: csv except in "
        ".tsv files with tabs"
    )
    _option(to, "--quoting", "auto", help, choices=("auto", "csv", "backslash", "none"))
    _flag(to, "--no-header", "the first line is data; columns are named 0, 1, 2, ...")
    help = "cell separator, also comma, semicolon, tab, pipe (default: by extension and first line)"
    _option(to, "--delimiter", "", help, "CHARACTER")
    _option(to, "--skip-bad-rows", 0, "most unusable rows to skip, over all files", "N")
