"""Configuration keys on the command line: `--section.key value`, and which key a mistaken option may mean."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from electra_fast.config import key_names


def take_overrides(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Takes `--section.key value` and `--section.key=value` out of the arguments.

    argparse can't: it would read the value of an option that it doesn't know as a positional.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--") or "." not in name:
            rest.append(word)
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                raise ValueError(f"{name} needs a value")
            value = words.pop(0)
        overrides[name.removeprefix("--")] = value
    return rest, overrides


def nearest_keys(argument: str) -> list[str]:
    """The keys whose last part is an argument such as `--batch-size` or comes nearest to it."""
    name = argument.partition("=")[0].lstrip("-").replace("-", "_")
    last_parts = [key.partition(".")[2] for key in key_names()]
    close = difflib.get_close_matches(name, last_parts, n=1, cutoff=0.7)
    return [key for key, part in zip(key_names(), last_parts, strict=True) if part in close]
