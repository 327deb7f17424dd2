"""Files in object stores for readers that need a file on disk, such as those of labeled examples."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path, PosixPath

from electra_fast import _data


class StoredFile(PosixPath):
    """A copy of an object on disk. Messages and records show its URL."""

    url: str

    def __str__(self) -> str:
        return getattr(self, "url", None) or super().__str__()

    def __fspath__(self) -> str:
        return super().__str__()


@contextlib.contextmanager
def local_file(path: Path) -> Iterator[Path]:
    """Yields the path itself, or that of a temporary copy if it is a URL.

    Raises FileNotFoundError, ValueError or OSError naming the URL.
    """
    url = _data.url_of(str(path))
    if url is None:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = StoredFile(folder, os.path.basename(url))
        copy.url = url
        _data.download(url, os.fspath(copy))
        yield copy
