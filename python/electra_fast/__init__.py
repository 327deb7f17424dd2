"""Pre-train text encoders by replaced-token detection (ELECTRA).

The names here are the library's contract; each is documented where it is defined. Importing the
package needs no GPU, and whatever is slow to import is imported by the function that needs it.
"""

import os

# Before torch loads OpenMP: let threads that wait for each other sleep. Spinning ones are no faster
# here, and fifteen times slower when the machine has anything else to do (bench/LOG.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from electra_fast._data import VERSION as __version__
from electra_fast.config import Config
from electra_fast.corpus import Corpus, Tokenizer, prepare, train_vocab, verify
from electra_fast.data import BatchLoader, to_torch
from electra_fast.evaluate import evaluate
from electra_fast.export import export, import_folder, load
from electra_fast.model import Electra
from electra_fast.pretrain import pretrain

__all__ = [
    "__version__",
    "BatchLoader",
    "Config",
    "Corpus",
    "Electra",
    "Tokenizer",
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
