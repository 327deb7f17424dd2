"""Tokenizer folders that `transformers.AutoTokenizer` loads, written from the data engine's tokenizer.

A run has one in RUN/tokenizer/, and `export` copies it into each model's folder. `check_vocabulary` ensures that a
model is used only with corpora of the same vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from electra_fast.data.corpus import Corpus, Tokenizer, write_tokenizer
from electra_fast.data.pair_template import BERT, bert_post_processor
from electra_fast.errors import InputError
from electra_fast.files.json_files import read_optional, write_object

INPUT_NAMES = {
    "bert": ["input_ids", "token_type_ids", "attention_mask"],
    "modernbert": ["input_ids", "attention_mask"],
    "deberta": ["input_ids", "attention_mask"],
}
"""The inputs of a model of each architecture."""
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "added_tokens.json")


def copy_tokenizer(
    source: Path, directory: Path, input_names: list[str], settings: Mapping[str, Any] | None = None
) -> None:
    """Copies a tokenizer's files into the folder of a model with the inputs `input_names`.

    `settings` override entries of tokenizer_config.json. With `split_special_tokens`, only the model's special tokens
    are split in text: other special tokens are written as ordinary added tokens. Rules that are not BERT's are written
    for PreTrainedTokenizerFast, because a class such as RobertaTokenizer would replace them. A post-processor that is
    not of the form `PairTemplate` becomes BERT's, since training then joins texts in that way.

    If the source has only a vocab.txt, like the published ELECTRA models, creates the other files. Raises
    FileNotFoundError if there is no tokenizer.
    """
    tokenizer = Tokenizer(source)
    rules = json.loads(tokenizer.to_json())
    special = tokenizer.special_tokens
    template = tokenizer.pair_template
    splits = (settings or {}).get("split_special_tokens")
    others = [
        added for added in rules["added_tokens"] if splits and added["special"] and added["id"] not in special.values()
    ]
    of_bert = rules["model"]["type"] == "WordPiece" and template == BERT
    if (source / "tokenizer.json").is_file() and of_bert and not others:
        directory.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
    else:
        write_tokenizer(directory, tokenizer, tokenizer_length(source) or 512)
    for token in others:
        token["special"] = False
    if template is None:
        cls, sep = ((tokenizer.id_to_token(special[name]), special[name]) for name in ("cls", "sep"))
        rules["post_processor"] = bert_post_processor(cls, sep)
    if others or template is None:
        write_object(directory / "tokenizer.json", rules)
    path = directory / "tokenizer_config.json"
    config = read_optional(path) or {"tokenizer_class": "PreTrainedTokenizerFast"}
    write_object(path, config | {"model_input_names": input_names} | dict(settings or {}))


def special_ids(directory: Path) -> dict[str, int]:
    return Tokenizer(directory).special_tokens


def tokenizer_length(folder: Path) -> int | None:
    """Returns the length limit of a tokenizer's folder in tokens, or None."""
    return read_length(folder / "tokenizer_config.json", "model_max_length")


def read_length(path: Path, key: str) -> int | None:
    length = read_optional(path).get(key)
    if length is not None and (type(length) not in (int, float) or not length >= 3):
        raise InputError(f"{path}: {key} = {length!r}: must be a number of tokens, at least 3")
    return None if length is None else int(min(length, 1 << 30))


def run_tokenizer(run: Path) -> Path:
    """Returns the tokenizer folder of a run. Raises FileNotFoundError if it is missing."""
    folder = run / "tokenizer"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; copy the run's tokenizer back there")
    return folder


def check_vocabulary(folder: Path, corpus: Corpus) -> None:
    """Raises ValueError unless the tokenizer in `folder` has the vocabulary and rules of the corpus."""
    model_tokenizer = Tokenizer(folder)
    corpus_tokenizer = Tokenizer.of(corpus)
    if model_tokenizer.content_hash != corpus_tokenizer.content_hash:
        raise InputError(
            f"{_description(model_tokenizer)} is not the vocabulary of the corpus, {_description(corpus_tokenizer)}, "
            f"so token ids differ; prepare the text with --vocab {folder}, or choose a corpus with this vocabulary"
        )


def _description(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.path} ({tokenizer.vocab_size:,} entries, hash {tokenizer.content_hash})"
