"""Pre-train text encoders by replaced-token detection (ELECTRA).

The names here are the library's contract; each is documented where it is defined. They are imported
when first asked for, so that `electra-fast prepare` needs neither torch's memory nor its seconds.
"""

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from electra_fast._data import VERSION as __version__

if TYPE_CHECKING:
    from electra_fast.config import Config
    from electra_fast.corpus import Corpus, Tokenizer, verify
    from electra_fast.data import BatchLoader, to_torch
    from electra_fast.errors import Interrupted, TrainingFailed
    from electra_fast.evaluate import evaluate
    from electra_fast.export import export, import_folder, load
    from electra_fast.model import Electra
    from electra_fast.prepare import prepare, train_vocab
    from electra_fast.pretrain import pretrain

# Before torch loads OpenMP: let threads that wait for each other sleep. Spinning ones are no faster
# here, and fifteen times slower when the machine has anything else to do (bench/LOG.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HOME = {
    "BatchLoader": "data",
    "Config": "config",
    "Corpus": "corpus",
    "Electra": "model",
    "Interrupted": "errors",
    "Tokenizer": "corpus",
    "TrainingFailed": "errors",
    "evaluate": "evaluate",
    "export": "export",
    "import_folder": "export",
    "load": "export",
    "prepare": "prepare",
    "pretrain": "pretrain",
    "to_torch": "data",
    "train_vocab": "prepare",
    "verify": "corpus",
}

__all__ = [
    "BatchLoader",
    "Config",
    "Corpus",
    "Electra",
    "Interrupted",
    "Tokenizer",
    "TrainingFailed",
    "__version__",
    "evaluate",
    "export",
    "import_folder",
    "load",
    "prepare",
    "pretrain",
    "to_torch",
    "train_vocab",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """The public names, imported or not: what a notebook completes."""
    return list(__all__)


class _Package(ModuleType):
    """A verb and the module that defines it share a name (`pretrain`): to the package it is the verb."""

    def __setattr__(self, name: str, value: object) -> None:
        if _HOME.get(name) == name and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
