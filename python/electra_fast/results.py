"""`Result`: the base class of values that public functions return; they print as their command does."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from electra_fast.messages import printable

if TYPE_CHECKING:
    from rich.console import Console


class Result(Mapping[str, Any]):
    """A dataclass whose fields are also items: `result.steps` is `result["steps"]`.

    `print(result)` and a notebook show the command's output; `result.to_json()` returns its output with `--json`.
    Subclasses are decorated with `@dataclass(frozen=True, eq=False, repr=False)`, so that a result equals the
    dictionary of its fields.
    """

    def lines(self) -> Iterator[str]:
        """Yields the command's lines of output: one per field."""
        return table_lines(self)

    def to_json(self) -> str:
        """Returns one JSON object."""
        return json.dumps(self, default=lambda value: str(value) if isinstance(value, PurePath) else vars(value))

    def __str__(self) -> str:
        return "\n".join(map(printable, self.lines()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


class Entries(Result):
    """A result whose entries depend on the request; they are attributes and items, as fields are."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        vars(self).update(entries)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def console_lines(write: Callable[[Console], None], width: int) -> Iterator[str]:
    """Yields the lines that `write` prints on a console, as plain text also in a notebook and with FORCE_COLOR."""
    from rich.console import Console  # predictions without torch do not need it

    text = io.StringIO()
    write(Console(file=text, width=width, color_system=None, force_jupyter=False, force_terminal=False))
    yield from (line.rstrip() for line in text.getvalue().splitlines())


def table_lines(table: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yields one line per entry, with names aligned; nested tables follow their name, indented."""
    width = max(map(len, table), default=0)
    for name, value in table.items():
        if isinstance(value, Mapping) and any(isinstance(entry, Mapping) for entry in value.values()):
            yield f"{indent}{name}"
            yield from table_lines(value, indent + "  ")
        elif isinstance(value, Mapping):
            yield f"{indent}{name:<{width}}  " + "  ".join(f"{key} {_number(entry)}" for key, entry in value.items())
        else:
            yield f"{indent}{name:<{width}}  {_number(value)}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
