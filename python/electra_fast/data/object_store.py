"""Files in object stores: exports, mirrors of runs and labeled examples. The Rust extension retries failed requests."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path, PosixPath

from electra_fast._data import delete_objects, download, list_objects, upload, url_of

__all__ = ["delete_objects", "download", "list_objects", "local_file", "read", "upload", "upload_folder", "url_of"]


def read(url: str) -> bytes | None:
    """Returns the content of a small object, or None if it does not exist. Raises OSError or ValueError."""
    with tempfile.TemporaryDirectory(prefix="electra-fast-") as folder:
        path = os.path.join(folder, "object")
        try:
            download(url, path)
        except FileNotFoundError:
            return None
        return Path(path).read_bytes()


def upload_folder(folder: Path, url: str, last: str) -> None:
    """Uploads all files of a folder, files named `last` after the others. Raises OSError or ValueError."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: (path.name == last, path)):
        upload(str(path), f"{url}/{path.relative_to(folder).as_posix()}")


class StoredFile(PosixPath):
    """A copy of an object on disk. Messages and records show its URL."""

    url: str

    def __str__(self) -> str:
        return getattr(self, "url", None) or super().__str__()

    def __fspath__(self) -> str:
        return super().__str__()


@contextlib.contextmanager
def local_file(path: Path) -> Iterator[Path]:
    """Yields the path itself, or the path of a temporary copy if it is a URL; errors have the URL in their message."""
    url = url_of(str(path))
    if url is None:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = StoredFile(folder, os.path.basename(url))
        copy.url = url
        download(url, os.fspath(copy))
        yield copy
