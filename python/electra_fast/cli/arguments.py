"""The argument parser: spellings of flags, configuration keys as options, `--help` and `--help-all`.

`parser` defines the arguments of each command. Flags may have hyphens or underscores, and may precede or follow
positional arguments. Abbreviated flags are not accepted: the error for an unknown flag suggests the right one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from electra_fast.config.section import Configuration, did_you_mean, format_value, named, nearest, parse_number
from electra_fast.config.spellings import ANSWERS
from electra_fast.errors import InputError

MAX_SHOWN = 10
"""Maximum number of options in `--help`."""
METAVARS = {bool: "true|false", int: "N", float: "X"}


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, without the usage. Parses integers as the configuration does: 10000, 10k or 1e4."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"allow_abbrev": False, "formatter_class": partial(_Help, max_help_position=32)})
        self.register("type", int, number(int))
        self._positionals.title = "arguments"
        self.shown: list[str] = []
        self.commands: dict[str, Parser] = {}
        self.others: dict[str, Parser] = {}
        self.groups: dict[str, list[argparse.Action]] = {}
        help = "print only results, warnings and errors"
        self.add_argument("-q", "--quiet", action="store_true", help=help)

    def flags_of(self, command: str | None) -> list[str]:
        """Returns the flags of a command or, for None, the flags before the command."""
        parser = self.commands.get(command or "", self)
        return [flag for action in parser._actions for flag in action.option_strings]

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses a command with its arguments; `overrides` has its configuration keys by full name, as text."""
        words = list(arguments) or ["--help"]
        start = next((place for place, word in enumerate(words) if not word.startswith("-")), len(words))
        leading = words[:start]
        rest = words[start + 1 :]
        for word in leading:
            if word.partition("=")[0] not in self.flags_of(None):
                raise InputError(f"{word}: name the command first: electra-fast COMMAND {word}")
        if start == len(words) or "--print-completion" in leading:
            return self.parse_args(words)
        command = words[start]
        if command not in self.commands:
            raise InputError(f"{command}: no such command{did_you_mean(command, self.commands)}")
        if not {"-q", "--quiet"}.issuperset(leading):
            self.parse_args(leading)
        sub = self.commands[command]
        namespace = argparse.Namespace(command=command, overrides={})
        return sub.parse_args(sub.arrange([*leading, *rest]), namespace)

    def arrange(self, words: Sequence[str]) -> list[str]:
        """Returns the arguments with options first, each as `--flag=value` in its canonical spelling.

        argparse would split positional arguments at options, and read the value of an unknown option as positional.
        """
        actions = {_plain(flag): (flag, action) for action in self._actions for flag in action.option_strings}
        options: list[str] = []
        positionals: list[str] = []
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word == "--":
                positionals += [word, *rest]
                break
            if not word.startswith("-") or word == "-":
                positionals.append(word)
                continue
            name, equals, value = word.partition("=")
            if _plain(name) not in actions:
                raise InputError(self.answer(name))
            flag, action = actions[_plain(name)]
            takes_value = bool(rest) and not (rest[0].startswith("--") or _plain(rest[0]) in actions)
            if action.nargs == 0:
                if equals or (takes_value and rest[0].lower() in ("true", "false")):
                    raise InputError(f"{name} takes no value; remove {name} for false")
                options.append(flag)
                continue
            if not equals and action.nargs == "?":
                value = rest.pop(0) if takes_value and rest[0].lower() in ("true", "false") else "true"
            elif not equals:
                if not takes_value:
                    raise InputError(f"{name} needs a value")
                value = rest.pop(0)
            options.append(f"{flag}={value}")
            while action.nargs == "+" and rest and not rest[0].startswith("-"):
                options.append(f"{flag}={rest.pop(0)}")
        return options + positionals

    def answer(self, name: str) -> str:
        """Returns a suggestion for an unknown flag: a flag of this command, or the commands that have it."""
        unknown = name.lstrip("-").replace("-", "_").lower()
        long = ([flag for flag in action.option_strings if flag.startswith("--")] for action in self._actions)
        flags = {flag: names[0] for names in long for flag in names}
        candidates = ANSWERS.get(unknown) or ANSWERS.get(unknown.rpartition(".")[2], ())
        answer = next(filter(None, (self._meaning(candidate, name, flags) for candidate in candidates)), "")
        answer = answer or _did_you_mean(flags, nearest(name, flags))
        if not answer:
            flag = f"--{unknown.replace('_', '-')}"
            others = [other for other, sub in self.others.items() if flag in sub.flags_of(None)]
            answer = f"it is an option of {', '.join(others)}" if others else f"see `{self.prog} --help-all`"
        return f"{self.prog} has no option {name}; {answer}"

    def _meaning(self, candidate: str, unknown: str, flags: Mapping[str, str]) -> str:
        """Returns the suggestion of a candidate in `spellings`; "" if this command does not have it."""
        if " " in candidate:
            return candidate
        if candidate.isupper():
            positional = [action for action in self._actions if not action.option_strings]
            metavars = [str(action.metavar).partition("[")[0] for action in positional]
            usage = " ".join([self.prog, *metavars])
            return f"the {candidate.lower()} needs no flag: {usage}" if candidate in metavars else ""
        names = candidate.split("|")
        return _did_you_mean(flags, (flag for name in names for flag in named(name, unknown, flags)))

    def add_keys(self, defaults: Configuration, has_short_names: bool, default: str | None = None) -> None:
        """Adds the keys of a configuration as options, which `--help-all` lists by section.

        The help states `default` for each of them, or its value in `defaults`.
        """
        short = {key: f"--{name.replace('_', '-')}" for name, key in defaults.SHORT_NAMES.items() if has_short_names}
        section = ""
        for key in defaults.key_names():
            if not key.startswith(f"{section}."):
                section = key.partition(".")[0]
                group = self.add_argument_group(f"[{section}]")
            flags = [short[key]] if key in short else []
            group.add_argument(*flags, f"--{key}", action=KeyOption, dest=key, defaults=defaults, default=default)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments") and message.endswith(".toml"):
            message += "; pass a configuration with --config"
        raise InputError(f"{message}; see `{self.prog} --help`")

    def synopsis(self) -> str:
        """Returns the command with its positional arguments and required options."""
        formatter = self._get_formatter()
        needed = (
            formatter._format_action_invocation(action)
            if action.option_strings
            else formatter._format_args(action, action.dest)
            for action in self._actions
            if action.required or not action.option_strings
        )
        return " ".join([self.prog, *needed, "[OPTIONS]"])

    def format_help(self) -> str:
        """Returns the help: the options in `shown`, or all options, and the number of omitted ones."""
        formatter = self._get_formatter()
        formatter.add_text(f"usage: {self.synopsis()}")
        formatter.add_text(self.description)
        for title, actions in self._help_sections():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        if self.shown:
            shown = set(self.shown)
            hidden = [action for action in self._actions if shown.isdisjoint(action.option_strings or shown)]
            keys = sum(isinstance(action, KeyOption) for action in hidden)
            more = [f"{len(hidden) - keys} more options"] + [f"{keys} configuration keys"] * bool(keys)
            formatter.add_text(f"{' and '.join(more)}: {self.prog} --help-all")
        return formatter.format_help()

    def _help_sections(self) -> Iterator[tuple[str | None, list[argparse.Action]]]:
        if self.commands:
            yield from self.groups.items()
            yield "options", [action for action in self._actions if action.option_strings]
        elif self.shown:
            yield "arguments", [action for action in self._actions if not action.option_strings]
            by_flag = {flag: action for action in self._actions for flag in action.option_strings}
            yield "options", [by_flag[flag] for flag in self.shown]
        else:
            yield from ((group.title, group._group_actions) for group in self._action_groups)


def _did_you_mean(flags: Mapping[str, str], meant: Iterable[str]) -> str:
    names = dict.fromkeys(flags[flag] for flag in meant)
    return f"did you mean {' or '.join(names)}?" if names else ""


def _plain(flag: str) -> str:
    return flag.replace("-", "_")


def number(kind: type, unit: str = "count") -> Callable[[str], int | float]:
    """Returns an option's `type` for numbers, which may have a unit."""

    def read(text: str) -> int | float:
        try:
            return parse_number(text, kind, unit)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


class KeyOption(argparse.Action):
    """An option that sets a configuration key by adding its text to `overrides`. A boolean key needs no value."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, defaults: Configuration, default: str | None = None
    ) -> None:
        value = defaults.value(dest)
        self.configuration = defaults
        default = default or defaults.rule(dest) or format_value(value)
        super().__init__(
            option_strings,
            dest,
            nargs="?" if isinstance(value, bool) else None,
            const="true",
            default=argparse.SUPPRESS,
            metavar=METAVARS.get(type(value), "TEXT"),
            help=f"{defaults.describe_key(dest)} (default: {default})".replace("%", "%%"),
        )

    def __call__(self, _parser: argparse.ArgumentParser, namespace: Any, value: Any, _option: Any = None) -> None:
        if namespace.overrides.setdefault(self.dest, value) != value:
            raise InputError(
                f"{'/'.join(self.option_strings)}: expected one value, got {namespace.overrides[self.dest]} and {value}"
            )


class HelpAll(argparse.Action):
    """Prints the help with every option and key, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        parser.shown = []
        parser.print_help()
        parser.exit()


class _Help(argparse.HelpFormatter):
    """Appends the default to the help of every option that has a value."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = action.default
        has_no_default = (
            action.required or action.nargs == 0 or not action.option_strings or default is argparse.SUPPRESS
        )
        if has_no_default or "(default:" in text:
            return text
        return f"{text} (default: none)" if default in (None, (), "") else f"{text} (default: %(default)s)"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, action.dest.upper())}"


class PrintCompletion(argparse.Action):
    """Prints a shell's completion script, which the package `shtab` writes, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, _namespace: Any, shell: Any, _option: Any = None) -> NoReturn:
        assert isinstance(parser, Parser)
        try:
            import shtab
        except ImportError:
            raise InputError("--print-completion needs shtab: pip install shtab") from None
        for sub in parser.commands.values():
            for action in sub._actions:
                if isinstance(action, KeyOption):
                    action.choices = action.configuration.choices(action.dest)
                elif action.dest in self.const:
                    action.choices = self.const[action.dest]
                if action.type is Path:
                    action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab's protocol
        print(shtab.complete(parser, shell))
        parser.exit()
