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
from keyword import iskeyword
from pathlib import Path
from typing import Any

import electra_fast
from electra_fast import _data
from electra_fast.cli.parser import build_parser
from electra_fast.config.config import Config, config_of
from electra_fast.config.presets import DEFAULT_PRESET, DEFAULT_RECIPE, OBJECTIVE_SPECS
from electra_fast.config.section import format_value
from electra_fast.errors import ElectraFastError, InputError, Interrupted, ReportedElsewhere, is_out_of_memory
from electra_fast.interruption import interrupt_at_once
from electra_fast.messages import error_line, escape_unencodable, pointing_to_reference, quietly, say, show
from electra_fast.results import Result

# Exit code of a run that `train.max_minutes` stopped: EX_TEMPFAIL of sysexits.h, meaning "try again".
TIME_IS_UP = 75

# The system's messages for a full disk, quota or file; libraries include them in their own messages.
DISK_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))

# Commands that resume after an interruption, except `pretrain`, which prints its own message. Others write nothing.
RESUMABLE = ("demo", "prepare", "adapt", "finetune", "reproduce")

# Remedies for a lack of memory.
LESS_MEMORY = {
    "adapt": "raise train.accumulate (the same batch in smaller parts)",
    "pretrain": "raise train.accumulate (the same batch in smaller parts), or choose a smaller model",
    "finetune": "lower finetune.batch_size or finetune.sequence_length",
    "evaluate": "lower --batch-size",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: after an interruption, 128 plus the signal's number."""
    interrupt_at_once()
    _data.explain_bus_errors()
    escape_unencodable()
    options = argparse.Namespace(command=None)
    try:
        options = build_parser().parse(sys.argv[1:] if arguments is None else arguments)
        with quietly() if options.quiet else pointing_to_reference():
            return HANDLERS.get(options.command, _run)(options) or 0
    except KeyboardInterrupt as interruption:
        number = interruption.signal if isinstance(interruption, Interrupted) else signal.SIGINT
        is_reported = isinstance(interruption, Interrupted) and interruption.is_reported
        resumes = options.command in RESUMABLE
        state = "finished work is kept; run again to resume" if resumes else "nothing was written"
        message = str(interruption).strip() or f"interrupted; {state}"
        if not is_reported:
            with contextlib.suppress(OSError):  # the terminal may be gone
                say(f"electra-fast: {message}")
        return 128 + number
    except BrokenPipeError:
        # The reader of our output, such as `head`, closed the pipe: not an error.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # closed by the interpreter
        return 0
    except ReportedElsewhere:
        return 2
    except Exception as error:
        if isinstance(error, (ElectraFastError, OSError)):
            message = _message(error, getattr(options, "out", None))
        elif is_out_of_memory(error):
            message = f"out of memory: {error}; {LESS_MEMORY.get(options.command, 'free some memory and rerun')}"
        elif isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("electra_fast"):
            message = f"{options.command} needs {error.name}; install it with `pip install electra-fast`"
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
        # Of two file names, the second is the file being written.
        name = (is_full and error.filename2) or error.filename or (is_full and out)
        text = f"{name}: {error.strerror}" if name else text
    if is_full and "free some space" not in text:  # the data engine's message includes the remedy
        text += "; free some space there, or choose another disk, and run the same command again"
    return text


def _call(options: argparse.Namespace, **replaced: Any) -> Any:
    """Calls the command's function with those options that are its parameters; `replaced` overrides some."""
    function, arguments = _function(options)
    return function(**arguments | replaced)


def _function(options: argparse.Namespace) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the command's function and those options that are its parameters."""
    function = getattr(electra_fast, options.command + "_" * iskeyword(options.command))
    names = inspect.signature(function).parameters.keys()
    return function, {name: value for name, value in vars(options).items() if name in names}


def _run(options: argparse.Namespace) -> None:
    if (result := _call(options)) is not None:  # predict and detect write their results themselves
        _print(options, result)


def _print(options: argparse.Namespace, result: Result) -> None:
    show([result.to_json()] if options.json else result.lines())


def _base_config(options: argparse.Namespace) -> Config | Path | None:
    """Returns the preset or file of the command line, without its keys, or None."""
    if not (options.preset or options.recipe):
        path: Path | None = options.config
        return path
    if options.config is not None:
        raise InputError("--config and --preset: cannot be combined; set `preset` and `recipe` in the file instead")
    objective = options.overrides.get("objective.name", "electra")
    return Config.preset(options.preset or DEFAULT_PRESET, options.recipe or DEFAULT_RECIPE, objective)


def _config(options: argparse.Namespace) -> Config:
    return config_of(_base_config(options), options.overrides)


def _corpora(folders: list[str] | None) -> str | list[str] | None:
    """Returns the folders, a single one as a string, since it may contain colons; None for none."""
    return folders[0] if folders and len(folders) == 1 else folders or None


def _demo(options: argparse.Namespace) -> None:
    from rich.console import Console

    result = _call(options)
    if options.json:
        _print(options, result)
    else:
        result.write(Console())  # in colors


def _prepare(options: argparse.Namespace) -> None:
    from electra_fast.data.prepare_executor import dask_executor

    scheduler = dask_executor(options.scheduler) if options.scheduler else contextlib.nullcontext()
    with scheduler as executor:
        _print(options, _call(options, executor=executor))


def _pretrain(options: argparse.Namespace) -> int:
    from electra_fast.distributed.launch import Launch, is_restarted
    from electra_fast.training.run import config_of_run

    if is_restarted():  # the first attempt has already gone back to that step
        options.from_step = None
    corpus = _corpora(options.corpus)
    config = config_of_run(_base_config(options), corpus, options.overrides, options.out, options.from_step)
    if options.dry_run:
        from electra_fast.training.plan import dry_run, plan

        if options.json:
            _print(options, plan(corpus, config=config, device=options.device))
        else:
            show(dry_run(config, corpus, options.device))
        return 0
    is_first = Launch.from_environment().rank == 0
    optimizer = config.resolved().optimizer
    rates = ("optimizer.learning_rate", "optimizer.muon_learning_rate")
    if is_first and optimizer.name == "muon" and [rate in options.overrides for rate in rates] == [True, False]:
        rate = f"{rates[1]} = {optimizer.muon_learning_rate:g}"
        say(f"--lr is the learning rate of the parameters that AdamW updates; Muon's matrices use {rate}")
    result = _call(options, corpus=corpus, config=config, overrides=None)
    if is_first:
        _print(options, result)
    return 0 if result.is_finished else TIME_IS_UP


def _adapt(options: argparse.Namespace) -> int:
    if options.dry_run:
        from electra_fast.adaptation import dry_run

        if options.json:
            raise InputError("--dry-run prints text; remove --json")
        _, arguments = _function(options)
        show(dry_run(**arguments))
        return 0
    result = _call(options)
    _print(options, result)
    return 0 if result.is_finished else TIME_IS_UP


def _evaluate(options: argparse.Namespace) -> None:
    files = options.pairs and [options.pairs, *options.data]  # only the first is the option's value
    _print(options, _call(options, data=None if files else _corpora(options.data), pairs=files))


def _flops(options: argparse.Namespace) -> None:
    """Prints the FLOPs of any objective, and the keys that had to change for it."""
    overrides = options.overrides
    name = overrides.get("objective.name")
    try:
        config = _config(options)
    except InputError:
        if name not in OBJECTIVE_SPECS:
            raise
        options.overrides = {key: value for key, value in overrides.items() if key != "objective.name"}
        before = _config(options)
        overrides = {"objective.name": name}
        config = before.with_objective(name)
    else:
        options.overrides = {}
        before = _config(options) if name else config
    changed = {key: now for key, (_, now) in before.differences(config).items() if key not in overrides}
    if changed:
        say(f"{name}: counted with {', '.join(f'{key} = {format_value(now)}' for key, now in changed.items())}")
    _print(options, electra_fast.flops(config))


def _plan(options: argparse.Namespace) -> None:
    from electra_fast.training.run import config_of_run

    config = None
    recipe = None
    corpus = _corpora(options.corpus)
    if options.hours is None:
        config = config_of_run(_base_config(options), corpus, options.overrides)
    elif options.config or options.preset or options.overrides:
        raise InputError(
            "--hours chooses preset and keys itself; remove --preset, --config and keys, or remove --hours"
        )
    else:
        recipe = options.recipe
    _print(options, _call(options, corpus=corpus, config=config, recipe=recipe))


def _doctor(options: argparse.Namespace) -> int:
    say("doctor: checking this machine; with a GPU, this takes a minute or two")
    report = _call(options, config=_config(options))
    _print(options, report)
    return 1 if report.problems else 0


# Commands that do more than call their function and print its result.
HANDLERS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "demo": _demo,
    "prepare": _prepare,
    "plan": _plan,
    "pretrain": _pretrain,
    "adapt": _adapt,
    "evaluate": _evaluate,
    "doctor": _doctor,
    "flops": _flops,
}
