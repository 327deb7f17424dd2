"""How a live line of progress is laid out: in a narrow terminal the figures give way first."""

from __future__ import annotations

from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text


class FiguresColumn(ProgressColumn):
    """The task's field `figures` on one line, cut where there is no room."""

    def render(self, task: Task) -> Text:
        """The text, which never wraps."""
        return Text(task.fields["figures"], no_wrap=True, overflow="ellipsis")


def progress_columns(name: str, count: type[ProgressColumn]) -> tuple[ProgressColumn, ...]:
    """Name, bar, `count`, figures, time taken and ETA."""
    stays = Column(no_wrap=True)  # a table shrinks the columns that may wrap before the others
    return (
        TextColumn(name),
        BarColumn(bar_width=20),
        count(table_column=stays),
        FiguresColumn(),
        TimeElapsedColumn(table_column=stays),
        TextColumn("eta"),
        TimeRemainingColumn(table_column=stays),
    )
