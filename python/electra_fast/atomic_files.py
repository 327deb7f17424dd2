"""Atomic replacement of files and folders: written under a temporary name, synced to disk, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

_WRITING, _REPLACED = ".writing", ".replaced"


def replace_file(path: Path, content: str | bytes) -> None:
    """Creates or replaces a file atomically; text is written as UTF-8."""
    temporary = path.with_name(f".{path.name}{_WRITING}")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


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
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)  # of a file: the one that it was to replace is there or never was


def recover_all(parent: Path) -> None:
    """Calls `recover` for all in `parent` that has leftovers; nothing else may write to `parent`."""
    names = {path.name for path in parent.glob(".*")}
    for ending in (_WRITING, _REPLACED):
        for name in names:
            if name.endswith(ending):
                recover(parent / name.removeprefix(".").removesuffix(ending))


def _temporary_names(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}{_WRITING}"), folder.with_name(f".{folder.name}{_REPLACED}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
