"""Atomic replacement of files and folders: written under a temporary name, synced to disk, then renamed.

`foreign_names` tells what a kill or a full disk has left of that from what belongs to somebody.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_WRITING, _REPLACED = ".writing", ".replaced"


def replace_file(path: Path, content: str | bytes) -> None:
    """Creates or replaces a file atomically; text is written as UTF-8."""
    temporary = path.with_name(f".{path.name}{_WRITING}")
    with errors_named(path):
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)


@contextlib.contextmanager
def errors_named(path: Path) -> Iterator[None]:
    """Gives an `OSError` of `write` or `fsync`, which know no names, that of the file being written."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with an empty temporary folder, which then replaces `folder`.

    If `write` raises, `folder` is unchanged. After a kill it is the old one, the new one, or, between
    the two renames, the old one under a temporary name, which `recover` restores.
    """
    final = folder.resolve()
    temporary, replaced = _temporary_names(final)
    recover(final)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        for path in (*temporary.rglob("*"), temporary):
            with errors_named(path):
                _sync(path)
        if final.exists():
            os.replace(final, replaced)
        os.replace(temporary, final)
        _sync(final.parent)
    finally:
        recover(final)


def recover(folder: Path) -> None:
    """Cleans up after a kill or a failure: restores a folder that was being replaced, removes partial writes."""
    temporary, replaced = _temporary_names(folder)
    if replaced.exists() and not folder.exists():
        os.replace(replaced, folder)
    for leftover in (temporary, replaced):
        remove(leftover)  # of a file: the one that it was to replace is there or never was


def recover_all(parent: Path) -> None:
    """Calls `recover` for all in `parent` that has leftovers; nothing else may write to `parent`."""
    names, endings = [path.name for path in parent.glob(".*")], (_WRITING, _REPLACED)
    for name in {name[1:].removesuffix(end) for name in names for end in endings if name.endswith(end)}:
        recover(parent / name)


def remove(path: Path) -> None:
    """Removes a file or folder that is no longer needed, if it exists; of a symbolic link, the link alone.

    What cannot be removed is a warning on standard error: tidying is no reason to lose work.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass  # somebody else is removing it too
    except OSError as error:
        print(f"warning: {path}: not removed ({error.strerror}); it is no longer needed", file=sys.stderr)


def foreign_names(folder: Path) -> list[str]:
    """Names of what a folder holds, except for a lock, temporary files and folders of this module, and empty folders.

    Those are what a kill or a full disk leaves of work that has only just begun. Nothing if there is no folder.
    """
    return sorted(path.name for path in folder.iterdir() if not _is_leftover(path)) if folder.exists() else []


def _is_leftover(path: Path) -> bool:
    if path.name == ".lock" or (path.name.startswith(".") and path.name.endswith(_WRITING)):
        return True
    return path.is_dir() and not path.is_symlink() and not foreign_names(path)


def _temporary_names(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}{_WRITING}"), folder.with_name(f".{folder.name}{_REPLACED}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
