"""Writes docs/reference/: the commands, configuration keys and Python interface, from the installed package.

python .ci/generate_reference.py
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import electra_fast as ef
from electra_fast.cli.arguments import KeyOption, Parser
from electra_fast.cli.parser import CONFIGURED, build_parser
from electra_fast.config.config import Config
from electra_fast.config.presets import RECIPES, SIZES
from electra_fast.config.section import RENAMED_VALUES, Configuration, format_value, nearest
from electra_fast.finetuning.config import RECIPES as FINETUNING_RECIPES
from electra_fast.finetuning.config import RULES, FinetuningConfig
from electra_fast.results import Result

NOTE = "<!-- Written by .ci/generate_reference.py. -->\n\n"
LISTS = ("Args:", "Raises:", "Attributes:")
GROUPS = {
    "Text and corpora": "prepare vocab inspect verify Corpus Tokenizer BatchLoader to_torch",
    "Pre-training": "Config pretrain adapt plan evaluate report",
    "Machine and method": "doctor flops reproduce demo",
    "Models": "load PretrainedModel FinetunedModel OnnxModel export Electra import_",
    "Fine-tuning and prediction": "finetune predict detect",
    "Results": "PrepareReport Vocabulary Inspection Verification PretrainResult AdaptResult Plan "
    "FlopCount DoctorReport Comparison DemoResult ExportResult OnnxExport ImportResult Report "
    "FinetuneResults TaskResult Evaluation EvaluationReport PairsReport",
    "Errors": "ElectraFastError InputError TrainingFailed Interrupted StopTraining Diverged OutOfMemory ExecutorFailed",
}

IN_TRANSFORMERS = """
max_steps num_train_epochs per_device_train_batch_size gradient_accumulation_steps max_grad_norm adam_beta1 adam_beta2
adam_epsilon lr_scheduler_type logging_steps eval_steps save_steps save_total_limit report_to early_stopping_patience
load_best_model_at_end mlm_probability max_seq_length dataloader_num_workers torch_dtype attn_implementation
num_hidden_layers num_attention_heads max_position_embeddings hidden_dropout_prob attention_probs_dropout_prob
classifier_dropout layer_norm_eps global_rope_theta global_attn_every_n_layers
""".split()
"""Names in `transformers` and its training arguments that are different here."""
# Former names of options, keyed by command.
FORMER = {
    "vocab prepare": "text-field skip-bad-records",
    "pretrain": "data from",
    "plan": "data",
    "finetune": "model data",
    "predict": "task",
    "evaluate": "data batches",
    "reproduce": "data tasks",
}
RULES_OF_THE_SURFACE = """# Rules of the interface

Commands, configuration keys and Python follow one set of rules. Tests enforce them for every command.

1. Inputs of a command are positional: text, a corpus, a run, a model, a file. `--out` is its output.
2. An option means the same everywhere: `--text` is the column or field with the text, `--seed` is a seed and
   `--seeds` a number of runs, `--device auto|cpu|cuda|cuda:N` and `--precision auto|fp32|fp16|bf16` select the
   model's device and dtype.
3. Each command is a function of `electra_fast` with its name (`import` is `import_`), the same positional arguments
   and keyword arguments with the names of its options. It returns the command's output: `print(result)` prints its
   text, `result.to_json()` returns the output of `--json`. Only the command line has `--json`, `--quiet`, `--help`,
   `--dry-run` and, where Python passes a `Config`, `--preset` and `--recipe`.
4. Flags have hyphens and keys have underscores; both spellings are accepted. Options and positional arguments may be
   in any order. A boolean key needs no value: `--finetune.calibrate`.
5. `--help` shows at most ten options, `--help-all` every option and key.
6. Names are never abbreviated. For a former name, another tool's name or a typing error, the command suggests the right
   name and exits with code 2.
"""

FILE = """```toml
preset = "mini"                # sizes
recipe = "modern"              # encoder, optimizer, masks

[data]
corpus = "shards"

[train]
out = "run"
steps = "10k"
```
"""


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a Markdown table; a bar within a cell is escaped."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def commands() -> str:
    """Each command with its arguments."""
    parser = build_parser()
    parts = [
        "# Commands\n",
        "`electra-fast COMMAND --help-all` prints the same and every key, `--help` the ten main options. Results go to",
        "standard output, progress and notes to standard error. An input error is one line and exit code 2; a run that",
        "a signal stops exits with 128 plus its number, and a run that reaches `train.max_minutes` with 75.\n",
    ]
    for name, command in parser.commands.items():
        parts += [f"## {name}\n", _sentence(command.description or ""), *_arguments(name, command)]
    return NOTE + "\n".join(parts)


def _arguments(name: str, command: Parser) -> list[str]:
    of_every_command = ("help", "help_all", "quiet")
    short = [action for action in command._actions if isinstance(action, KeyOption) and len(action.option_strings) > 1]
    tables: dict[str, list[argparse.Action]] = {"": []}
    for group in command._action_groups:
        title = "" if group in (command._positionals, command._optionals) else f"{_sentence(group.title or '')[:-1]}:\n"
        actions = [action for action in group._group_actions if action.dest not in of_every_command]
        if not any(isinstance(action, KeyOption) for action in actions):
            tables.setdefault(title, []).extend(actions)
    tables[""] += short
    parts = [f"\n```text\n{command.synopsis()}\n```\n"]
    for title, actions in tables.items():
        parts += [title] * bool(title)
        parts.append(table(["argument", "meaning", "default"], [_argument(command, action) for action in actions]))
    if name in CONFIGURED:
        parts += ["And [configuration keys](configuration.md), as `--section.key value`.\n"]
    return parts


def _value(command: Parser, action: argparse.Action) -> str:
    return command._get_formatter()._format_args(action, action.dest.upper())


def _argument(command: Parser, action: argparse.Action) -> list[str]:
    value = _value(command, action)
    names = ", ".join(f"`{flag} {value}`".replace(" `", "`") for flag in action.option_strings) or f"`{value}`"
    help = (action.help or "").replace("%%", "%")
    if stated := re.search(r"(.*) \(default: (.*)\)$", help):
        return [names, *stated.groups()]
    if action.required:
        return [names, help, "required"]
    if action.nargs == 0 or not action.option_strings:
        return [names, help, ""]
    none = action.default in (None, (), "")
    return [names, help, "none" if none else f"`{action.default}`"]


def configuration() -> str:
    """Each configuration key, and the changes by presets and recipes."""
    presets = list(SIZES)
    recipes = list(RECIPES)
    parts = [
        "# Configuration keys\n",
        "Set them on the command line, `--steps 100k`, or in a TOML file, `pretrain --config FILE.toml`:\n",
        FILE,
        "Without its first two lines, the preset is `small` and the recipe `modern`, as in `ef.Config()`.",
        "Numbers may have units: `100k`, `1e5`, `4h`, `200GB`. Later sources win: preset and recipe, requirements of",
        "the objective, file, command line. `RUN/config.toml` has all values of a run.\n",
        f"## Pre-training\n\n{_keys(Config())}",
        "## Presets\n\nIn the recipe `modern`; keys with one value for all presets are omitted.\n",
        _columns({name: Config.preset(name) for name in presets}),
        "## Recipes\n\nWith the preset `small`.\n",
        _columns({name: Config.preset("small", name) for name in recipes}),
        f"## Fine-tuning\n\nDefaults are for the recipe `fast`.\n\n{_keys(FinetuningConfig())}",
        "## Recipes of fine-tuning\n",
        _columns(
            {name: FinetuningConfig().override(keys) for name, keys in FINETUNING_RECIPES.items()},
            RULES,
        ),
        "## Names in `transformers`\n",
        "Different names in `Trainer`, its examples and its models, with our keys.\n",
        _in_transformers(),
    ]
    return NOTE + "\n".join(parts)


def _in_transformers() -> str:
    keys = [*Config.key_names(), *FinetuningConfig.key_names()]
    rows = [[f"`{name}`", ", ".join(f"`{key}`" for key in nearest(name, keys))] for name in IN_TRANSFORMERS]
    return table(["`transformers`", "here"], rows)


def surface() -> str:
    """The rules, the short names of keys, and former names."""
    short = [
        [f"`--{name.replace('_', '-')}`", f"`{name}=`", f"`{key}`", commands]
        for names, commands in (
            (Config.SHORT_NAMES, "pretrain, plan, flops, doctor"),
            (FinetuningConfig.SHORT_NAMES, "finetune"),
        )
        for name, key in names.items()
    ]
    parsers = build_parser().commands
    former = [
        [f"`{command} --{flag}`", parsers[command].answer(f"--{flag}").partition("; ")[2]]
        for commands, flags in FORMER.items()
        for command in commands.split()
        for flag in flags.split()
    ]
    former = [[old, re.sub(r"did you mean (.*)\?", r"\1", new)] for old, new in former]
    former.append(["`pretrain FILE.toml`, likewise plan, flops, doctor", "--config FILE.toml"])
    values = [[f"`{key}`", old, new] for key, renamed in RENAMED_VALUES.items() for old, new in renamed.items()]
    parts = [
        RULES_OF_THE_SURFACE,
        "## Short names of keys\n\nGiven in both forms with different values, a key is an error.\n",
        table(["option", "`Config.override`", "key", "commands"], short),
        "## Former names\n\nFiles with a former value are read.\n",
        table(["option", "now"], former),
        table(["key", "former value", "now"], values),
        table(["Python", "now"], [[f"`ef.{old}`", f"`ef.{new}`"] for old, new in ef._FORMER.items()]),
    ]
    return NOTE + "\n".join(parts)


def _keys(defaults: Configuration) -> str:
    sections: dict[str, list[list[str]]] = {}
    for name in defaults.key_names():
        default = defaults.rule(name) or f"`{format_value(defaults.value(name))}`"
        row = [f"`{name}`", defaults.describe_key(name), default]
        sections.setdefault(name.partition(".")[0], []).append(row)
    return "\n".join(
        f"### `[{section}]`\n\n{table(['key', 'meaning', 'default'], rows)}" for section, rows in sections.items()
    )


def _columns(configurations: dict[str, Any], rules: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """A table with a column of values, or of rules for them, per configuration."""
    first = next(iter(configurations.values()))
    rows = []
    for name in first.key_names():
        values = [
            (rules or {}).get(column, {}).get(name.partition(".")[2]) or format_value(configuration.value(name))
            for column, configuration in configurations.items()
        ]
        if len(set(values)) > 1:
            rows.append([f"`{name}`", *values])
    return table(["key", *(f"`{name}`" for name in configurations)], rows)


def python() -> str:
    """Each public name with its docstring."""
    named = {name for names in GROUPS.values() for name in names.split()}
    if missing := set(ef.__all__) - named - {"__version__"}:
        raise SystemExit(f"no group in .ci/generate_reference.py for {', '.join(sorted(missing))}")
    parts = ["# Python interface\n", "```python\nimport electra_fast as ef\n```\n"]
    for group, names in GROUPS.items():
        parts.append(f"## {group}\n")
        for name in names.split():
            thing = getattr(ef, name)
            parts.append(_documented(f"ef.{name}", thing, level=3))
            if inspect.isclass(thing) and not issubclass(thing, Exception | Result):
                parts += [
                    _documented(f"{name}.{member_name}", member, level=4) for member_name, member in _members(thing)
                ]
    return NOTE + "\n".join(parts)


def _members(owner: type) -> Iterable[tuple[str, Any]]:
    """The public methods and properties that a class defines, not those that it inherits from torch."""
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("electra_fast"):
            for name, member in vars(base).items():
                function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                if not name.startswith("_") and (inspect.isfunction(function) or isinstance(member, property)):
                    if name != "forward":
                        yield name, function


def _documented(name: str, thing: Any, *, level: int) -> str:
    heading = f"{'#' * level} {name if ' ' in name else f'`{name}`'}\n"
    text = _markdown(inspect.getdoc(thing) or "")
    if isinstance(thing, property) or (inspect.isclass(thing) and issubclass(thing, Exception)):
        return f"{heading}\n{text}\n"
    called = f"ef.{thing.__name__}" if " " in name else name
    return f"{heading}\n```text\n{_signature(called, thing)}\n```\n\n{text}\n"


def _signature(name: str, thing: Any) -> str:
    """A signature on one line or, if that is too long, with a line per parameter."""
    signature = inspect.signature(thing)
    shown: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not any(part.startswith("*") for part in shown):
            shown.append("*")
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        annotation = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        shown.append(f"{prefix}{parameter.name}{annotation}{default}")
    returns = signature.return_annotation
    end = ")" if returns is signature.empty or inspect.isclass(thing) else f") -> {_type(returns)}"
    line = f"{name}({', '.join(shown)}{end}"
    return line if len(line) <= 100 else "\n".join([f"{name}(", *(f"    {parameter}," for parameter in shown), end])


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _markdown(docstring: str) -> str:
    """Turns sections such as `Args:` and their entries into lists."""
    lines = []
    section = ""
    for line in docstring.splitlines():
        if re.fullmatch(r"(Args|Returns|Yields|Raises|Attributes|Example):", line):
            section = line
            lines += [f"**{line[:-1]}**", ""]
        elif section in LISTS and (entry := re.match(r"    ([\w*]+(?:, [\w*]+)*): (.*)", line)):
            lines.append(f"* `{entry[1].replace(', ', '`, `')}`: {entry[2]}")
        elif section and line.startswith("    "):
            lines.append(f"  {line.strip()}" if section in LISTS else line if section == "Example:" else line.strip())
        else:
            section = section if not line else ""
            lines.append(line)
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


PAGES = {"surface.md": surface, "commands.md": commands, "configuration.md": configuration, "python.md": python}


def main() -> None:
    """Writes the pages."""
    folder = Path(__file__).resolve().parent.parent / "docs/reference"
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
