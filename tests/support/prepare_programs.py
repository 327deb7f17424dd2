"""Starts `prepare` in separate processes, and reads the folders that it writes."""

from pathlib import Path

from electra_fast import _data

# Replaces the package's __init__, so that a process starts fast: the data side needs no torch.
IMPORT = f"""
import sys, types
sys.modules["electra_fast"] = types.ModuleType("electra_fast")
sys.modules["electra_fast"].__path__ = [{str(Path(_data.__file__).parent)!r}]
from electra_fast.data.corpus import Corpus, verify
from electra_fast.data.prepare import prepare
assert "torch" not in sys.modules
"""


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of all files, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
