"""The commands and arguments of the command line, which `cli` runs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from electra_fast import __version__
from electra_fast.config.config import Config
from electra_fast.config.file import comma_separated, parse_number
from electra_fast.config.presets import DEFAULT_RECIPE, RECIPES, SIZES
from electra_fast.config.section import Configuration
from electra_fast.errors import InputError
from electra_fast.finetuning.config import DEFAULT_RECIPE as FINETUNING_RECIPE
from electra_fast.finetuning.config import RECIPES as FINETUNING_RECIPES
from electra_fast.finetuning.config import FinetuningConfig
from electra_fast.model.networks import PARTS


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything else here, instead of printing the usage first.

    Integers are read as the configuration's are: 10000, 10k or 1e4.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register("type", int, number(int))
        self._negative_number_matcher = re.compile(r"-[\d.,=]")  # values such as `--labels -1,0,1` are no options
        self.commands: dict[str, Parser] = {}

    def flags_of(self, command: str | None) -> list[str]:
        """All flags of a command; without one, those before it."""
        parser = self.commands.get(command or "", self)
        return [flag for action in parser._actions for flag in action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Raises InputError."""
        raise InputError(f"{message}; `{self.prog} --help` tells more")


def number(kind: type, unit: str = "count") -> Callable[[str], int | float]:
    """What reads a number for argparse."""

    def read(text: str) -> int | float:
        try:
            return parse_number(text, kind, unit)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def build_parser() -> Parser:
    """All commands and their arguments; `command` is the chosen one's name."""
    parser = Parser(prog="electra-fast", description="Pre-train text encoders by replaced-token detection (ELECTRA).")
    parser.add_argument("--version", action="version", version=f"electra-fast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, summary: str) -> Parser:
        layout = argparse.RawDescriptionHelpFormatter
        parser.commands[name] = commands.add_parser(name, help=summary, description=summary, formatter_class=layout)
        return parser.commands[name]

    sub = command("demo", "text to a trained, exported model in a minute or two; downloads nothing")
    sub.add_argument("--out", type=Path, required=True, help="folder for everything that it makes")

    sub = command("vocab", "train a WordPiece vocabulary")
    _add_inputs(sub)
    sub.add_argument("--out", type=Path, default=Path("vocab.txt"), help="vocab.txt, or NAME.json (%(default)s)")
    sub.add_argument("--size", type=int, default=30_522, help="entries (%(default)s)")
    sub.add_argument("--min-frequency", type=int, default=2, help="occurrences that a merge needs (%(default)s)")
    sub.add_argument("--cased", action="store_true", help="keep capitals")
    sub.add_argument(
        "--strip-accents", action="store_true", help="drop accents and other marks, as BERT's uncased vocabularies do"
    )
    sub.add_argument(
        "--character-coverage",
        type=float,
        default=0.9999,
        metavar="FRACTION",
        help="of the text that the characters kept must make up (%(default)s)",
    )
    sub.add_argument(
        "--sample",
        type=number(int, "bytes"),
        default=1 << 30,
        metavar="BYTES",
        help="text to count words in; 0: all (%(default)s)",
    )
    sub.add_argument("--seed", type=int, default=0, help="decides the sample (%(default)s)")

    sub = command("prepare", "turn text into a corpus of tokenized shards; run again to resume")
    _add_inputs(sub)
    sub.add_argument("--vocab", type=Path, required=True, help="vocab.txt, tokenizer.json or its folder")
    sub.add_argument("--out", type=Path, required=True, help="the corpus' folder")
    case = sub.add_mutually_exclusive_group()
    case.add_argument("--cased", dest="lowercase", action="store_const", const=False, help="keep capitals")
    case.add_argument("--uncased", dest="lowercase", action="store_const", const=True, help="lower the text's case")
    sub.add_argument("--partition", metavar="I/N", help="only every N-th input group, starting with the I-th")
    sub.add_argument(
        "--verify-inputs",
        action="store_true",
        help="compare all of the inputs with what finished work in OUT was made of, not only size, time and samples",
    )
    sub.add_argument(
        "--holdout",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="documents set aside for validation (%(default)s)",
    )
    sub.add_argument("--threads", type=int, default=0, help="tokenization threads; 0: all cores (%(default)s)")
    sub.add_argument(
        "--scheduler", metavar="ADDRESS", help="work on the workers of this Dask scheduler, such as tcp://host:8786"
    )

    sub = command("inspect", "what is in a corpus, and one packed, masked row of it as text")
    sub.add_argument("directory", type=Path)
    sub.add_argument("--sequence-length", type=int, default=128, help="tokens per row (%(default)s)")
    shown = RECIPES[DEFAULT_RECIPE]
    masking, mask_prob = shown["data.masking"], shown["data.mask_prob"]
    sub.add_argument("--masking", default=masking, help="paper, google, bert, whole-word or span (%(default)s)")
    sub.add_argument("--mask-prob", type=float, default=mask_prob, help="of the row shown (%(default)s)")
    sub.add_argument("--packing", default="best-fit", help="of the row shown: best-fit or google (%(default)s)")
    sub.add_argument("--cut-at", default="token", help="of the row shown: token, word or line (%(default)s)")
    sub.add_argument("--seed", type=int, default=0, help="which row to show (%(default)s)")
    sub.add_argument("--json", action="store_true", help="one object on standard output")

    sub = command("verify", "check every checksum of a corpus")
    sub.add_argument("directory", type=Path)
    sub.add_argument("--json", action="store_true", help="one object on standard output")

    sub = command("pretrain", "train; run again to resume (then --out alone is enough)")
    sub.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml")
    _add_preset(sub)
    sub.add_argument(
        "--data",
        action="append",
        metavar="FOLDER[:WEIGHT]",
        help="corpus (data.corpus); repeated: several, which give rows in proportion to their weights, or tokens",
    )
    sub.add_argument("--out", type=Path, help="the run's folder (train.out)")
    sub.add_argument(
        "--allow-changes", action="store_true", help="resume with other keys than the run was started with"
    )
    sub.add_argument(
        "--from",
        dest="from_step",
        type=_checkpoint_step,
        metavar="step-N",
        help="go back to this checkpoint, once: later ones are renamed, later lines of the logs removed",
    )
    sub.epilog = _key_help(Config)

    sub = command(
        "evaluate",
        "AUC on replacements by frequency, which compares between models; then validation losses, accuracies and AUC",
    )
    sub.add_argument("source", type=Path, metavar="RUN", help="run, checkpoint or Hugging Face folder")
    sub.add_argument(
        "--data",
        action="append",
        required=True,
        metavar="FOLDER[:WEIGHT]",
        help="corpus; its validation part (prepare --holdout) where it has one, else all of it; repeated: of several",
    )
    sub.add_argument("--sequence-length", type=int, help="tokens per row (the run's own, or the corruptor's)")
    sub.add_argument("--batch-size", type=int, help="rows per batch (the run's own)")
    sub.add_argument("--batches", type=int, default=0, help="stop after so many; 0: all (%(default)s)")
    sub.add_argument(
        "--corrupted-by",
        metavar="FOLDER",
        help="what replaces masked tokens, so that models compare: the generator of this run, checkpoint or Hugging "
        "Face folder; unigram: the corpus' token counts (the model's own generator)",
    )
    sub.add_argument(
        "--mlm-examples",
        type=int,
        default=0,
        metavar="N",
        help="also the masked-language-model accuracy (Appendix G), by so many rows with one masked token each",
    )
    sub.add_argument("--json", action="store_true", help="one object on standard output")

    sub = command("finetune", "fine-tune an encoder on GLUE, SQuAD or own data; run again to resume")
    sub.add_argument(
        "--task",
        required=True,
        help="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli; several with commas; glue: all that --data has; "
        "squad1, squad2; or own data: classification, regression, tagging, question-answering",
    )
    sub.add_argument("--model", type=Path, required=True, help="run, checkpoint or Hugging Face folder")
    sub.add_argument("--out", type=Path, required=True, help="folder for models, predictions and results.json")
    sub.add_argument("--seeds", type=int, default=1, metavar="N", help="runs per task: seeds 0 to N-1 (%(default)s)")
    sub.add_argument("--recipe", default=FINETUNING_RECIPE, help=f"{', '.join(FINETUNING_RECIPES)} (%(default)s)")
    sub.add_argument("--role", choices=tuple(PARTS), help="network of a run (the first of these that it has)")
    sub.add_argument("--data", type=Path, help="GLUE, SQuAD: the task's folder, or one with the tasks' folders")
    sub.add_argument("--json", action="store_true", help="one object on standard output")
    _add_own_data(
        sub.add_argument_group("own data (.tsv, .csv, .jsonl, .parquet; tagging: .conll; question-answering: .json)")
    )
    sub.epilog = _key_help(FinetuningConfig)

    sub = command(
        "predict",
        "labels, values, tags or answers of a fine-tuned model, as lines of JSON with each row's other columns",
    )
    sub.add_argument(
        "model", type=Path, metavar="MODEL", help="fine-tuned folder, as DIR/TASK/seed-0/model; errors: run or export"
    )
    sub.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help=".txt (a text per line), .tsv, .csv, .jsonl, .json, .parquet, .arrow; tagging: .conll; "
        "question-answering: SQuAD's .json; a pipe, or - for standard input, is answered as it comes",
    )
    sub.add_argument(
        "--format",
        default="",
        choices=("txt", "tsv", "csv", "jsonl", "json", "parquet", "arrow"),
        help="read FILE as if it ended so (by its extension; a pipe by its first line: jsonl if that is an object, "
        "else a text per line)",
    )
    sub.add_argument(
        "--task", choices=("errors",), help="errors: words that do not belong, by a pre-trained model's discriminator"
    )
    sub.add_argument(
        "--threshold", type=float, metavar="P", help="errors: the probability from which a word is marked (0.5)"
    )
    sub.add_argument("--n-best", type=int, metavar="N", help="question-answering: list so many answers")
    sub.add_argument(
        "--null-threshold",
        type=float,
        metavar="X",
        help="question-answering: no answer where null_odds exceed it (as the model's config.json says)",
    )
    sub.add_argument(
        "--precision",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="dtype of activations (auto: bf16 on CUDA, on a CPU the one that a short measurement finds faster)",
    )
    sub.add_argument("--out", type=Path, help="file to write (standard output)")
    _add_text(sub)

    sub = command("reproduce", "the paper's comparisons at equal compute; run again to resume")
    sub.add_argument("experiment", metavar="EXPERIMENT", help="objectives, generators, tying or sizes")
    sub.add_argument("--data", type=Path, required=True, help="corpus with a validation part (prepare --holdout)")
    sub.add_argument("--tasks", type=Path, required=True, help="folder that has the GLUE tasks' folders")
    sub.add_argument("--out", type=Path, required=True, help="folder for the table, the picture and all runs")
    _add_preset(sub, "small", "google")
    sub.add_argument(
        "--budget", type=number(float), metavar="FLOPS", help="true FLOPs of each run's pre-training, as 3e15"
    )
    sub.add_argument(
        "--minutes",
        type=number(float, "minutes"),
        metavar="M",
        help="instead: about how long a run of the first row pre-trains here",
    )
    sub.add_argument("--seeds", type=int, default=3, metavar="N", help="runs per row: seeds 0 to N-1 (%(default)s)")
    sub.add_argument("--task", default="glue", help="tasks as for finetune; glue: all that --tasks has (%(default)s)")
    sub.add_argument(
        "--finetune-seeds", type=int, default=1, metavar="N", help="fine-tunings per task; their median (%(default)s)"
    )
    sub.add_argument(
        "--corrupted-by",
        default="unigram",
        metavar="FOLDER",
        help="what replaces masked tokens where the rows are evaluated, as for evaluate (%(default)s)",
    )
    sub.add_argument("--workers", type=int, default=0, metavar="N", help="runs side by side; 0: a GPU or core each")
    sub.add_argument("--json", action="store_true", help="results.json on standard output")
    sub.epilog = _key_help(Config, FinetuningConfig)

    sub = command("export", "write discriminator/ and generator/ as Hugging Face folders")
    sub.add_argument("source", type=Path, metavar="RUN", help="run or checkpoint")
    sub.add_argument("--out", type=Path, required=True)
    sub.add_argument("--unfinished", action="store_true", help="export a run that has steps left")
    sub.add_argument(
        "--language", type=comma_separated, default=(), metavar="CODE,...", help="of the text, for the model card: hu"
    )
    sub.add_argument("--license", metavar="NAME", help="of the model, for the model card: apache-2.0")

    sub = command("import", "make a run from exported folders, to continue training")
    sub.add_argument("directory", type=Path, help="folder with discriminator/ and generator/, or one model")
    sub.add_argument("--out", type=Path, required=True, help="the run's folder")

    sub = command("flops", "the paper's count of floating-point operations and the true one")
    sub.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml")
    _add_preset(sub)
    sub.add_argument("--json", action="store_true", help="one object on standard output")
    return parser


def _checkpoint_step(text: str) -> int:
    """The step of a checkpoint, given by its name, its folder or its number."""
    match = re.fullmatch(r"(?:step-)?(\d+)", text.rstrip("/").rpartition("/")[2])
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a checkpoint, as step-5000")
    return int(match[1])


def _add_inputs(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "inputs", nargs="+", metavar="INPUT", help=".txt, .jsonl, .parquet, .arrow (.gz, .zst, .xz), folder or glob"
    )
    sub.add_argument(
        "--text-field", default="text", help="field of .jsonl, .parquet and .arrow; several with commas (%(default)s)"
    )
    sub.add_argument(
        "--documents",
        default="blank-line",
        choices=("blank-line", "line", "file"),
        help="what ends a document of a .txt (%(default)s)",
    )
    sub.add_argument(
        "--invalid-utf8", default="error", choices=("error", "replace"), help="what to do about it (%(default)s)"
    )
    sub.add_argument(
        "--format",
        default="auto",
        choices=("auto", "text", "jsonl", "parquet", "arrow"),
        help="what every file is read as; auto goes by its name and passes over other kinds (%(default)s)",
    )
    sub.add_argument(
        "--skip-bad-records",
        type=int,
        default=0,
        metavar="N",
        help="broken records of .jsonl that may be left out, over all the input (%(default)s)",
    )


def _add_preset(sub: argparse.ArgumentParser, preset: str | None = None, recipe: str | None = None) -> None:
    sub.add_argument("--preset", default=preset, help=f"size: {', '.join(SIZES)} (small)")
    sub.add_argument("--recipe", default=recipe, help=f"method: {', '.join(RECIPES)} ({recipe or DEFAULT_RECIPE})")


def _add_own_data(own: argparse._ActionsContainer) -> None:
    own.add_argument("--train", type=Path, metavar="FILE", help="to train on")
    own.add_argument("--dev", type=Path, metavar="FILE", help="to validate on (a share of --train)")
    own.add_argument("--test", type=Path, metavar="FILE", help="to predict, and to score where it has labels")
    _add_text(own)
    own.add_argument(
        "--label",
        type=comma_separated,
        default=(),
        metavar="COLUMN",
        help="column of the label; several with commas: labels of 0 or 1 (label, labels, gold_label, score, target)",
    )
    for split in ("dev", "test"):
        for kind in ("text", "label"):
            help = f"--{kind} of --{split}, where it has other columns"
            own.add_argument(f"--{split}-{kind}", type=comma_separated, default=(), metavar="COLUMN", help=help)
    own.add_argument(
        "--labels",
        type=comma_separated,
        default=(),
        metavar="A,B,...",
        help="the classes (those of --train); -1 and - are none unless they are named here",
    )
    own.add_argument(
        "--label-map",
        type=comma_separated,
        default=(),
        metavar="OLD=NEW,...",
        help="other names for labels, in all files; OLD= leaves these examples out",
    )
    own.add_argument(
        "--scheme", default="auto", help="of tags: IO, IOB1, IOB2, IOBES, IOE, none; auto: as tags show (%(default)s)"
    )
    own.add_argument("--label-separator", default="", metavar="TEXT", help="between the labels of one cell")
    own.add_argument(
        "--dev-fraction",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="of --train to set aside without --dev (%(default)s)",
    )


def _add_text(sub: argparse._ActionsContainer) -> None:
    sub.add_argument(
        "--text",
        type=comma_separated,
        default=(),
        metavar="COLUMN[,COLUMN2]",
        help="column of the text, or those of a pair (predict: as in training; else text; sentence1,sentence2; ...)",
    )
    sub.add_argument(
        "--quoting",
        default="auto",
        choices=("auto", "csv", "none"),
        help="whether quotes enclose cells; auto: except in .tsv files with tabs",
    )
    sub.add_argument(
        "--delimiter",
        default="",
        metavar="CHARACTER",
        help="between cells, also by name: comma, semicolon, tab, pipe (as the extension and the first line say)",
    )
    sub.add_argument(
        "--skip-bad-rows",
        type=int,
        default=0,
        metavar="N",
        help="rows that cannot be used and may be left out, over all files (%(default)s)",
    )


def _key_help(*configurations: type[Configuration]) -> str:
    return "configuration keys, as --section.key value:\n" + "\n".join(
        f"  --{name:<30} {each.describe_key(name)}" for each in configurations for name in each.key_names()
    )
