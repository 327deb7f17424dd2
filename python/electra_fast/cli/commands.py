"""The command line: parses arguments, calls one function, and reports the result.

Results go to standard output, progress and notes to standard error. A user's mistake is one line and exit code 2; set
ELECTRA_FAST_TRACEBACK=1 for its traceback. A bug keeps its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import inspect
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from electra_fast import _data
from electra_fast.cli.parser import COMMANDS, build_parser
from electra_fast.config.config import Config, config_of
from electra_fast.config.presets import DEFAULT_PRESET, DEFAULT_RECIPE, OBJECTIVE_SPECS
from electra_fast.config.section import format_value
from electra_fast.errors import ElectraFastError, InputError, Interrupted, ReportedElsewhere, is_out_of_memory
from electra_fast.interruption import interrupt_at_once
from electra_fast.messages import error_line, escape_unencodable, quietly, say, show
from electra_fast.results import Result

# Exit code of a run that `train.max_minutes` stopped: EX_TEMPFAIL of sysexits.h, meaning "try again".
TIME_IS_UP = 75

# The system's messages for a full disk, quota or file, which libraries pass on as text.
DISK_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))

# Commands that resume after an interruption. Others have written nothing; `pretrain` has a message of its own.
RESUMABLE = ("demo", "prepare", "finetune", "reproduce")

# Ways to use less memory.
LESS_MEMORY = {
    "pretrain": "raise train.accumulate (the same batch in smaller parts), or choose a smaller model",
    "finetune": "lower finetune.batch_size or finetune.sequence_length",
    "evaluate": "lower --batch-size",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code, which is 128 plus the signal's number after an interruption."""
    interrupt_at_once()
    _data.explain_bus_errors()
    escape_unencodable()
    options = argparse.Namespace(command=None)
    try:
        options = build_parser().parse(sys.argv[1:] if arguments is None else arguments)
        with quietly() if options.quiet else contextlib.nullcontext():
            return HANDLERS[options.command](options) or 0
    except KeyboardInterrupt as interruption:
        number = interruption.signal if isinstance(interruption, Interrupted) else signal.SIGINT
        is_reported = isinstance(interruption, Interrupted) and interruption.is_reported
        resumes = options.command in RESUMABLE
        kept = "finished work is kept; run again to resume" if resumes else "nothing was written"
        message = str(interruption).strip() or f"interrupted; {kept}"
        if not is_reported:
            with contextlib.suppress(OSError):  # the terminal may be gone
                say(f"electra-fast: {message}")
        return 128 + number
    except BrokenPipeError:
        # The reader of our output, such as `head`, has closed it: not an error.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # closed by the interpreter
        return 0
    except ReportedElsewhere:
        return 2
    except Exception as error:
        if isinstance(error, (ElectraFastError, OSError)):
            message = _message(error, getattr(options, "out", None))
        elif is_out_of_memory(error):
            message = f"out of memory: {error}; {LESS_MEMORY.get(options.command, 'free some memory and rerun')}"
        else:
            error.add_note("electra-fast: this is a bug; please report it with the lines above")
            raise
        if os.environ.get("ELECTRA_FAST_TRACEBACK"):
            raise
        say(f"electra-fast: error: {error_line(message)}")
        return 2


def _message(error: Exception, out: object) -> str:
    text = str(error)
    is_full = any(name in text for name in DISK_FULL)
    if isinstance(error, OSError) and error.errno is not None:
        # With two file names, the second is that of the file being written.
        name = (is_full and error.filename2) or error.filename or (is_full and out)
        text = f"{name}: {error.strerror}" if name else text
    if is_full and "free some space" not in text:  # the data engine's message has it
        text += "; free some space there, or choose another disk, and run the same command again"
    return text


def _print_result(result: Result, options: argparse.Namespace) -> None:
    show([result.to_json()] if options.json else result.lines())


def _asked(options: argparse.Namespace) -> Config | Path | None:
    """Returns the configuration that the command line names, before its keys: a preset, a file, or none."""
    if not (options.preset or options.recipe):
        path: Path | None = options.config
        return path
    if options.config is not None:
        raise InputError("give --config or --preset, not both (the file itself may set `preset` and `recipe`)")
    objective = options.overrides.get("objective.name", "electra")
    return Config.preset(options.preset or DEFAULT_PRESET, options.recipe or DEFAULT_RECIPE, objective)


def _config(options: argparse.Namespace) -> Config:
    return config_of(_asked(options), options.overrides)


def _corpora(folders: list[str] | None) -> str | list[str] | None:
    """Returns the given folders, None for none; a single one may contain colons."""
    return folders[0] if folders and len(folders) == 1 else folders or None


def _arguments(function: Callable[..., Any], options: argparse.Namespace) -> dict[str, Any]:
    """Returns a function's keyword arguments that are options of its command."""
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and hasattr(options, each.name)]
    return _named(options, *names)


def _named(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


READING = ("text", "documents", "invalid_utf8", "format", "skip_bad_rows", "threads")


def _demo(options: argparse.Namespace) -> None:
    from rich.console import Console

    from electra_fast.demonstration import demo

    result = demo(**_named(options, "out", "device"))
    if options.json:
        _print_result(result, options)
    else:
        result.write(Console())  # in colors


def _vocab(options: argparse.Namespace) -> None:
    from electra_fast.data.prepare import vocab

    names = ("out", "size", "cased", "strip_accents", "character_coverage", "min_frequency", "sample", "seed", *READING)
    _print_result(vocab(options.inputs, kind="files", **_named(options, *names)), options)


def _prepare(options: argparse.Namespace) -> None:
    from electra_fast.data.prepare import prepare
    from electra_fast.data.prepare_executor import dask_executor

    names = ("vocab", "out", "cased", "partition", "verify_inputs", "holdout", "drop_duplicates")
    scheduler = dask_executor(options.scheduler) if options.scheduler else contextlib.nullcontext()
    with scheduler as executor:
        report = prepare(options.inputs, executor=executor, kind="files", **_named(options, *names, *READING))
    _print_result(report, options)


def _inspect(options: argparse.Namespace) -> None:
    from electra_fast.data.inspect import inspect

    names = ("sequence_length", "masking", "mask_prob", "packing", "cut_at", "seed")
    _print_result(inspect(options.corpus, **_named(options, *names)), options)


def _verify(options: argparse.Namespace) -> None:
    from electra_fast.data.corpus import verify

    _print_result(verify(options.corpus), options)


def _pretrain(options: argparse.Namespace) -> int:
    from electra_fast.distributed.launch import Launch, is_restarted
    from electra_fast.training.pretrain import pretrain
    from electra_fast.training.run import config_of_run

    if is_restarted():  # the first attempt has gone back already
        options.from_step = None
    corpus = _corpora(options.corpus)
    config = config_of_run(_asked(options), corpus, options.overrides, options.out, options.from_step)
    if options.dry_run:
        from electra_fast.training.plan import dry_run, plan

        if options.json:
            _print_result(plan(corpus, config=config, device=options.device), options)
        else:
            show(dry_run(config, corpus, options.device))
        return 0
    is_first = Launch.from_environment().rank == 0
    optimizer = config.resolved().optimizer
    rates = ("optimizer.learning_rate", "optimizer.muon_learning_rate")
    if is_first and optimizer.name == "muon" and [rate in options.overrides for rate in rates] == [True, False]:
        rate = f"{rates[1]} = {optimizer.muon_learning_rate:g}"
        say(f"--lr is the rate of the parameters that AdamW updates; Muon's matrices follow {rate}")
    result = pretrain(corpus, config=config, **_named(options, "out", "from_step", "device", "allow_changes"))
    if is_first:
        _print_result(result, options)
    return 0 if result.is_finished else TIME_IS_UP


def _evaluate(options: argparse.Namespace) -> None:
    from electra_fast.finetuning.evaluate import evaluate

    _print_result(evaluate(options.model, _corpora(options.data), **_arguments(evaluate, options)), options)


def _export(options: argparse.Namespace) -> None:
    from electra_fast.huggingface.export import export

    names = ("out", "unfinished", "onnx", "language", "license", "dataset", "base_model")
    _print_result(export(options.run, **_named(options, *names)), options)


def _import(options: argparse.Namespace) -> None:
    from electra_fast.huggingface.export import import_

    _print_result(import_(options.model, **_named(options, "out", "generator")), options)


def _flops(options: argparse.Namespace) -> None:
    """Prints the FLOPs of any objective; names the keys that had to change for it."""
    from electra_fast.hardware.flops import flops

    given, name = options.overrides, options.overrides.get("objective.name")
    try:
        config = _config(options)
    except InputError:
        if name not in OBJECTIVE_SPECS:
            raise
        options.overrides = {key: value for key, value in given.items() if key != "objective.name"}
        before, given = _config(options), {"objective.name": name}
        config = before.with_objective(name)
    else:
        options.overrides = {}
        before = _config(options) if name else config
    changed = {key: now for key, (_, now) in before.differences(config).items() if key not in given}
    if changed:
        say(f"{name}: counted with {', '.join(f'{key} = {format_value(now)}' for key, now in changed.items())}")
    _print_result(flops(config), options)


def _finetune(options: argparse.Namespace) -> None:
    from electra_fast.finetuning.finetune import finetune

    _print_result(finetune(options.model, **_arguments(finetune, options)), options)


def _reproduce(options: argparse.Namespace) -> None:
    from electra_fast.reproduction.reproduce import reproduce

    names = (
        *("glue", "out", "preset", "recipe", "budget", "minutes", "seeds", "task"),
        *("finetune_seeds", "corrupted_by", "device", "overrides"),
    )
    _print_result(reproduce(options.experiment, options.corpus, **_named(options, *names)), options)


def _predict(options: argparse.Namespace) -> None:
    from electra_fast.finetuning.predict import predict

    predict(options.model, options.file, **_arguments(predict, options))


def _detect(options: argparse.Namespace) -> None:
    from electra_fast.finetuning.error_detection import detect

    detect(options.model, options.file, **_arguments(detect, options))


def _plan(options: argparse.Namespace) -> None:
    from electra_fast.training.plan import plan
    from electra_fast.training.run import config_of_run

    config, corpus = None, _corpora(options.corpus)
    names = ["device", "tokens_per_second", "hours", "gpu_memory", "gpus"]
    if options.hours is None:
        config = config_of_run(_asked(options), corpus, options.overrides)
    elif options.config or options.preset or options.overrides:
        raise InputError("--hours proposes preset and keys, and takes none but --recipe; leave it out to plan your own")
    else:
        names.append("recipe")
    _print_result(plan(corpus, config=config, **_named(options, *names)), options)


def _doctor(options: argparse.Namespace) -> int:
    from electra_fast.training.doctor import doctor

    say("doctor: examining this machine; with a GPU, this takes a minute or two")
    report = doctor(_config(options), device=options.device)
    _print_result(report, options)
    return 1 if report.problems else 0


def _report(options: argparse.Namespace) -> None:
    from electra_fast.run_report.report import report

    _print_result(report(options.runs, out=options.out), options)


HANDLERS: dict[str, Callable[[argparse.Namespace], int | None]] = {name: globals()[f"_{name}"] for name in COMMANDS}
