"""Files and folders that are whole or absent: written under another name, synced to disk, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

_WRITING, _REPLACED = ".writing", ".replaced"


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a file in place of what is there; text as UTF-8."""
    temporary = path.with_name(f".{path.name}{_WRITING}")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Has `write` fill an empty folder, which then takes the place of `folder`.

    Whatever `write` raises leaves `folder` as it was. A kill leaves it as it was, or new, or, for
    the moment between two renames, under another name, from which `recover` brings it back.
    """
    final = folder.resolve()
    temporary, replaced = _other_names(final)
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
    """Tidies up after a kill or a failure: brings back what was being replaced, removes what was half-written."""
    temporary, replaced = _other_names(folder)
    if replaced.exists() and not folder.exists():
        os.replace(replaced, folder)
    for leftover in (temporary, replaced):
        if leftover.exists():
            shutil.rmtree(leftover)


def recover_all(parent: Path) -> None:
    """`recover` for every folder of `parent` that was ever begun there; `parent` must be ours alone."""
    names = {path.name for path in parent.glob(".*")}
    for ending in (_WRITING, _REPLACED):
        for name in names:
            if name.endswith(ending):
                recover(parent / name.removeprefix(".").removesuffix(ending))


def _other_names(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}{_WRITING}"), folder.with_name(f".{folder.name}{_REPLACED}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
