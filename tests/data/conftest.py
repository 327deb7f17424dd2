"""A vocabulary of numbered words."""

import pytest

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="session")
def vocab(tmp_path_factory):
    """w0 to w499, with ids from 5. Modules with other words in their texts define another one."""
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    path.write_text("\n".join([*SPECIAL_TOKENS, *(f"w{n}" for n in range(500))]))
    return path
