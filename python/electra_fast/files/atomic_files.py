"""Atomic replacement of files and folders: written under a temporary name, synced to disk, then renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from electra_fast.messages import say

_WRITING = ".writing"
_REPLACED = ".replaced"


def replace_file(path: Path, content: str | bytes) -> None:
    """Creates or replaces a file atomically; text is written as UTF-8."""
    with temporary_file(path) as temporary, errors_named(path):
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)


@contextlib.contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """Yields a unique temporary path in the same folder, and removes the file afterwards if it still exists."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_WRITING}")
    try:
        yield temporary
    finally:
        remove(temporary)


@contextlib.contextmanager
def errors_named(path: Path) -> Iterator[None]:
    """Adds the file's name to an `OSError` of `write` or `fsync`, which has none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with an empty temporary folder, which then replaces `folder`.

    If `write` raises, `folder` is unchanged. After a kill, `folder` is old or new; a kill between the two renames
    leaves the old folder under a temporary name, and `recover` restores it.
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
    """Cleans up after a kill or failure: restores a folder that was being replaced and removes partial writes."""
    temporary, replaced = _temporary_names(folder)
    if replaced.exists() and not folder.exists():
        os.replace(replaced, folder)
    for leftover in (temporary, replaced):
        remove(leftover)  # a temporary file's original is intact or never existed


def recover_all(parent: Path) -> None:
    """Calls `recover` for all entries of `parent` with leftovers; nothing else may write to `parent` meanwhile."""
    names = [path.name for path in parent.glob(".*")]
    endings = (_WRITING, _REPLACED)
    for name in {name[1:].removesuffix(end) for name in names for end in endings if name.endswith(end)}:
        recover(parent / name)


def remove(path: Path) -> None:
    """Removes a file, folder or symbolic link that is no longer needed, if it exists; warns if that fails."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass  # removed concurrently
    except OSError as error:
        say(f"warning: {path}: not removed ({error.strerror}); it is no longer needed")


def foreign_names(folder: Path) -> list[str]:
    """Returns a folder's entries other than leftovers of interrupted work: lock, temporary names and empty folders."""
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
