"""Writing safetensors files with the permissions of any other file that is written here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file as _save_file
from torch import Tensor


def save_file(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """As safetensors' `save_file`, which makes files that their owner alone may read: here the umask decides."""
    path.touch()
    mode = path.stat().st_mode
    _save_file(dict(tensors), path, metadata=dict(metadata) if metadata else None)
    path.chmod(mode & 0o777)
