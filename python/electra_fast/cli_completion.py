"""Completion of commands, options and configuration keys in a shell, by the package `shtab`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from electra_fast.cli_parser import CONFIGURED, Parser
from electra_fast.config.presets import RECIPES, SIZES
from electra_fast.errors import InputError

# Offered, while the command itself answers other values with the closest of these.
_VALUES = {"preset": list(SIZES), "recipe": list(RECIPES)}


class PrintCompletion(argparse.Action):
    """Prints the completion script of a shell, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, _namespace: Any, shell: Any, _option: Any = None) -> NoReturn:
        """Raises InputError if shtab is not installed."""
        assert isinstance(parser, Parser)
        print(completion_script(parser, shell))
        parser.exit()


def completion_script(parser: Parser, shell: str) -> str:
    """Returns the script for a shell, bash, zsh or tcsh. Raises InputError if shtab is not installed."""
    try:
        import shtab
    except ImportError:
        raise InputError("--print-completion needs shtab: pip install shtab") from None
    for name, sub in parser.commands.items():
        for action in sub._actions:
            action.choices = _VALUES.get(action.dest, action.choices)
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab's protocol
        for configuration in CONFIGURED.get(name, ()):
            for key in configuration.key_names():
                text = configuration.describe_key(key).replace("%", "%%")
                choices = configuration.choices(key)
                sub.add_argument(f"--{key}", help=text, choices=choices, default=argparse.SUPPRESS)
    return str(shtab.complete(parser, shell))
