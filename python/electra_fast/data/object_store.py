"""Files of object stores, as `export` and mirrors of runs use them; the extension repeats failed requests."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from electra_fast._data import delete_objects, download, list_objects, upload, url_of

__all__ = ["delete_objects", "download", "list_objects", "read", "upload", "upload_folder", "url_of"]


def read(url: str) -> bytes | None:
    """Returns the content of a small object, or None if there is none. Raises OSError or ValueError."""
    with tempfile.TemporaryDirectory(prefix="electra-fast-") as folder:
        path = os.path.join(folder, "object")
        try:
            download(url, path)
        except FileNotFoundError:
            return None
        return Path(path).read_bytes()


def upload_folder(folder: Path, url: str, last: str) -> None:
    """Uploads all files of a folder, those named `last` after the others. Raises OSError or ValueError."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: (path.name == last, path)):
        upload(str(path), f"{url}/{path.relative_to(folder).as_posix()}")
