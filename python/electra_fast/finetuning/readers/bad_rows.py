"""What is wrong with single rows of a user's files, collected so that all of them are reported at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from electra_fast.errors import InputError

MAX_SHOWN = 20


class BadRows:
    """Leaves out rows that cannot be used, up to a number, and says which.

    Every reader wraps the reading of one row in `collect`, keeps the row only if nothing was raised, and calls
    `finish` after the last row.

    Args:
        allowed: How many rows may be left out, over all files (`--skip-bad-rows`).
    """

    def __init__(self, allowed: int = 0) -> None:
        self.allowed, self.number, self._shown = allowed, 0, list[str]()

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Records the InputError that reading a row raises; its message names the file, line and remedy."""
        try:
            yield
        except InputError as error:
            self.number += 1
            if self.number <= MAX_SHOWN:
                self._shown.append(str(error))

    def finish(self, hint: str = "") -> tuple[str, ...]:
        """Returns notes on what was left out; raises InputError with every bad row's line if there are too many.

        `hint` ends the list of rows.
        """
        shown = "; ".join(self._shown)
        if self.number > MAX_SHOWN:
            shown += f"; and {self.number - MAX_SHOWN:,} more"
        shown += hint
        if self.number > self.allowed:
            several = f"{self.number:,} bad rows: {shown} (--skip-bad-rows leaves rows out)"
            raise InputError(shown if self.number == 1 else several)
        what = "1 bad row is" if self.number == 1 else f"{self.number:,} bad rows are"
        return (f"{what} left out: {shown}",) if self.number else ()
