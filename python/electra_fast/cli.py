"""The command line: parse, call one function, report the result.

What a person reads goes to standard error, what a program reads (`--json`) to standard output. A user's
mistake is one line and exit code 2; set ELECTRA_FAST_TRACEBACK=1 to see where it was raised. A bug keeps its
traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from electra_fast import __version__
from electra_fast.config import Config
from electra_fast.config_file import nearest_keys, take_overrides
from electra_fast.errors import ElectraFastError, InputError, Interrupted
from electra_fast.interruption import interrupt_at_once
from electra_fast.presets import RECIPES, SIZES

# The commands that take `--section.key value`.
CONFIGURED = ("pretrain", "flops")

Handler = Callable[[argparse.Namespace], int | None]

# The commands that resume where they were interrupted; any other has written nothing (`pretrain` speaks for itself).
RESUMABLE = ("demo", "prepare")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code, which is 128 + the signal's number after an interruption."""
    interrupt_at_once()
    options = argparse.Namespace(command=None)
    try:
        rest, overrides = take_overrides(sys.argv[1:] if arguments is None else arguments)
        options = _parse(rest)
        if overrides and options.command not in CONFIGURED:
            raise InputError(f"--{next(iter(overrides))}: {options.command} takes no configuration keys")
        options.overrides = overrides
        handler: Handler = options.handler
        return handler(options) or 0
    except KeyboardInterrupt as interruption:
        number = interruption.signal if isinstance(interruption, Interrupted) else signal.SIGINT
        resumes = options.command in RESUMABLE
        kept = "what was finished is kept, run again to resume" if resumes else "nothing was written"
        message = str(interruption).strip() or f"interrupted; {kept}"
        with contextlib.suppress(OSError):  # the terminal may be what has gone
            print(f"electra-fast: {message}", file=sys.stderr)
        return 128 + number
    except BrokenPipeError:
        # Whoever read our output (`head`, say) has closed it: not an error.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # closed by the interpreter
        return 0
    except (ElectraFastError, OSError) as error:
        if os.environ.get("ELECTRA_FAST_TRACEBACK"):
            raise
        print(f"electra-fast: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except Exception as error:
        error.add_note("electra-fast: this is a bug, not a mistake of yours; please report it with the lines above")
        raise


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments; an unknown one is refused with the configuration key that it may mean."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown and options.command in CONFIGURED and (keys := nearest_keys(unknown[0], Config.key_names())):
        raise InputError(f"unrecognized arguments: {unknown[0]}; did you mean --{' or --'.join(keys)}?")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _print_report(report: Mapping[str, Any], as_json: bool) -> None:
    """One JSON object on standard output, or a line per value on standard error."""
    if as_json:
        print(json.dumps(dict(report)))
        return
    width = max(map(len, report))
    for name, value in report.items():
        _say(f"{name:<{width}}  {f'{value:.6g}' if isinstance(value, float) else value}")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything else here, instead of printing the usage first."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; `{self.prog} --help` tells more")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="electra-fast", description="Pre-train text encoders by replaced-token detection (ELECTRA).")
    parser.add_argument("--version", action="version", version=f"electra-fast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, handler: Callable[[argparse.Namespace], int | None], summary: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        sub.set_defaults(handler=handler)
        return sub

    sub = command("demo", _demo, "text to a trained, exported model in a minute or two; downloads nothing")
    sub.add_argument("--out", type=Path, required=True, help="folder for everything that it makes")

    sub = command("vocab", _vocab, "train a WordPiece vocabulary")
    _add_inputs(sub)
    sub.add_argument("--out", type=Path, default=Path("vocab.txt"), help="vocab.txt, or NAME.json (%(default)s)")
    sub.add_argument("--size", type=int, default=30_522, help="entries (%(default)s)")
    sub.add_argument("--min-frequency", type=int, default=2, help="occurrences that a merge needs (%(default)s)")
    sub.add_argument("--cased", action="store_true", help="keep capitals and accents")
    sub.add_argument(
        "--sample", type=int, default=1 << 30, metavar="BYTES", help="text to count words in; 0: all (%(default)s)"
    )
    sub.add_argument("--seed", type=int, default=0, help="decides the sample (%(default)s)")

    sub = command("prepare", _prepare, "turn text into a corpus of tokenized shards; run again to resume")
    _add_inputs(sub)
    sub.add_argument("--vocab", type=Path, required=True, help="vocab.txt, tokenizer.json or its folder")
    sub.add_argument("--out", type=Path, required=True, help="the corpus' folder")
    case = sub.add_mutually_exclusive_group()
    case.add_argument("--cased", dest="lowercase", action="store_const", const=False, help="keep capitals")
    case.add_argument("--uncased", dest="lowercase", action="store_const", const=True, help="lower the text's case")
    sub.add_argument("--partition", metavar="I/N", help="only every N-th group of input files, starting with the I-th")
    sub.add_argument(
        "--holdout",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="documents set aside for validation (%(default)s)",
    )
    sub.add_argument("--threads", type=int, default=0, help="tokenization threads; 0: all cores (%(default)s)")

    sub = command("inspect", _inspect, "what is in a corpus, and one packed, masked row of it as text")
    sub.add_argument("directory", type=Path)
    sub.add_argument("--sequence-length", type=int, default=128, help="tokens per row (%(default)s)")
    sub.add_argument("--masking", default="google", help="paper, google or bert (%(default)s)")
    sub.add_argument("--packing", default="best-fit", help="of the row shown: best-fit or google (%(default)s)")
    sub.add_argument("--seed", type=int, default=0, help="which row to show (%(default)s)")
    sub.add_argument("--json", action="store_true", help="one object on standard output")

    sub = command("verify", _verify, "check every checksum of a corpus")
    sub.add_argument("directory", type=Path)
    sub.add_argument("--json", action="store_true", help="one object on standard output")

    sub = command("pretrain", _pretrain, "train; run again to resume (then --out alone is enough)")
    sub.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml")
    _add_preset(sub)
    sub.add_argument("--data", type=Path, help="corpus (data.corpus)")
    sub.add_argument("--out", type=Path, help="the run's folder (train.out)")
    sub.add_argument(
        "--allow-changes", action="store_true", help="resume with other keys than the run was started with"
    )
    sub.epilog = "configuration keys, as --section.key value:\n" + "\n".join(
        f"  --{name:<30} {Config.describe_key(name)}" for name in Config.key_names()
    )

    sub = command("evaluate", _evaluate, "validation losses, accuracies and AUC of a run or an exported folder")
    sub.add_argument("source", type=Path, metavar="RUN", help="run, checkpoint or Hugging Face folder")
    sub.add_argument(
        "--data",
        type=Path,
        required=True,
        help="corpus; its validation part (prepare --holdout) where it has one, else all of it",
    )
    sub.add_argument("--sequence-length", type=int, help="tokens per row (the run's own)")
    sub.add_argument("--batch-size", type=int, help="rows per batch (the run's own)")
    sub.add_argument("--batches", type=int, default=0, help="stop after so many; 0: all (%(default)s)")
    sub.add_argument("--json", action="store_true", help="one object on standard output")

    sub = command("export", _export, "write discriminator/ and generator/ as Hugging Face folders")
    sub.add_argument("source", type=Path, metavar="RUN", help="run or checkpoint")
    sub.add_argument("--out", type=Path, required=True)

    sub = command("import", _import, "make a run from exported folders, to continue training")
    sub.add_argument("directory", type=Path, help="folder with discriminator/ and generator/")
    sub.add_argument("--out", type=Path, required=True, help="the run's folder")

    sub = command("flops", _flops, "the paper's count of floating-point operations and the true one")
    sub.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml")
    _add_preset(sub)
    sub.add_argument("--json", action="store_true", help="one object on standard output")
    return parser


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


def _add_preset(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--preset", help=f"size: {', '.join(SIZES)}")
    sub.add_argument("--recipe", help=f"method: {', '.join(RECIPES)} (google)")


def _config(options: argparse.Namespace) -> Config:
    """Defaults < preset and recipe < TOML file < command line; by default a run's own, where there is one."""
    if options.command == "pretrain" and not (options.config or options.preset or options.recipe):
        options.config = _own_config(options.out) if options.out else None
    if options.config is not None:
        if options.preset or options.recipe:
            raise InputError("give CONFIG.toml or --preset, not both (a file may name `preset` and `recipe` itself)")
        return Config.load(options.config, options.overrides)
    return Config.preset(options.preset or "small", options.recipe or "google").override(options.overrides)


def _own_config(run: Path) -> Path | None:
    """The configuration that a run was started with; None where there is no run yet."""
    from electra_fast.checkpoint_folder import require_config

    path = run / "config.toml"
    if path.exists():
        return path
    require_config(run)
    return None


def _require_corpus(options: argparse.Namespace, config: Config) -> None:
    """FileNotFoundError names the file that says where the corpus is, if it isn't there."""
    named_here = options.data is not None or "data.corpus" in options.overrides
    if options.config and not named_here and config.data.corpus and not Path(config.data.corpus).exists():
        raise FileNotFoundError(
            f'{options.config}: data.corpus = "{config.data.corpus}": no such folder; '
            "say where the corpus is now with --data DIR"
        )


def _reading(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "text_field": options.text_field,
        "documents": options.documents,
        "invalid_utf8": options.invalid_utf8,
        "format": options.format,
        "skip_bad_records": options.skip_bad_records,
    }


def _demo(options: argparse.Namespace) -> None:
    from electra_fast.demo import demo

    demo(options.out)


def _vocab(options: argparse.Namespace) -> None:
    from electra_fast.data.prepare import train_vocab

    size = train_vocab(
        options.inputs,
        out=options.out,
        size=options.size,
        lowercase=not options.cased,
        min_frequency=options.min_frequency,
        kind="files",
        sample=options.sample,
        seed=options.seed,
        **_reading(options),
    )
    _say(f"{options.out}: {size} entries")


def _prepare(options: argparse.Namespace) -> None:
    from electra_fast.data.prepare import prepare

    prepare(
        options.inputs,
        vocab=options.vocab,
        out=options.out,
        lowercase=options.lowercase,
        partition=options.partition,
        holdout=options.holdout,
        threads=options.threads,
        kind="files",
        **_reading(options),
    )


def _inspect(options: argparse.Namespace) -> None:
    from electra_fast.data.inspect import inspect, show_row

    _print_report(inspect(options.directory, sequence_length=options.sequence_length), options.json)
    if not options.json:
        show_row(
            options.directory,
            sequence_length=options.sequence_length,
            masking=options.masking,
            packing=options.packing,
            seed=options.seed,
        )


def _verify(options: argparse.Namespace) -> None:
    from electra_fast.data.corpus import verify

    _print_report(verify(options.directory), options.json)


def _pretrain(options: argparse.Namespace) -> None:
    from electra_fast.training.pretrain import pretrain

    config = _config(options)
    _require_corpus(options, config)
    pretrain(config, data=options.data, out=options.out, allow_changes=options.allow_changes)


def _evaluate(options: argparse.Namespace) -> None:
    from electra_fast.training.evaluate import evaluate

    report = evaluate(
        options.source,
        options.data,
        sequence_length=options.sequence_length,
        batch_size=options.batch_size,
        max_batches=options.batches,
    )
    _print_report(report, options.json)


def _export(options: argparse.Namespace) -> None:
    from electra_fast.huggingface.export import export

    export(options.source, options.out)
    _say(f"{options.out}: loads with transformers' from_pretrained")


def _import(options: argparse.Namespace) -> None:
    from electra_fast.huggingface.export import import_folder

    import_folder(options.directory, options.out)
    _say(
        f"{options.out}: a run at step 0, with a new schedule of the learning rate and no optimizer state; "
        f"train it with `electra-fast pretrain --out {options.out} --data DIR`"
    )


def _flops(options: argparse.Namespace) -> None:
    from electra_fast.training.flops import report

    _print_report(report(_config(options)), options.json)
