"""`import --vocab`: a model with another vocabulary and, if it was trimmed, the hidden states of the original model."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_encoder import hf_folder
from test_export import WORDS, make_run
from test_trimming import LINES, NAMES, TEMPLATE, byte_level, unigram, word_piece
from tokenizers import Tokenizer as Crate
from tokenizers import models, normalizers, pre_tokenizers
from torch import Tensor

import electra_fast as ef
from electra_fast.config.config import Config
from electra_fast.huggingface.vocabulary import with_vocabulary
from electra_fast.model.model import Electra


def save(folder: Path, crate: Crate) -> Path:
    crate.add_special_tokens(["<mask>"])
    crate.post_processor = TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    crate.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "vocab.txt").unlink(missing_ok=True)
    return folder


@torch.no_grad()
def hidden(model: Any, tokenizer: Any, texts: list[str]) -> list[Tensor]:
    """Returns the hidden states of each text for a model of `transformers`."""
    return [
        model.eval()(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).last_hidden_state
        for text in texts
    ]


@pytest.mark.parametrize(
    ("name", "make", "settings", "generator"),
    [
        ("BertForMaskedLM", word_piece, {"vocab_size": 448}, None),  # a table padded to a multiple of 64
        ("RobertaForMaskedLM", byte_level, {"vocab_size": 501, "pad_token_id": 1}, "same-layers:1"),
        ("XLMRobertaForMaskedLM", unigram, {"vocab_size": 260, "pad_token_id": 1}, None),
        ("ModernBertForMaskedLM", byte_level, {"vocab_size": 512}, "same-layers:1"),
        ("DebertaV2ForTokenClassification", unigram, {"vocab_size": 260, "embedding_size": 32}, "same-layers:2"),
    ],
)
def test_trimmed_model_has_the_same_hidden_states(
    tmp_path: Path, name: str, make: Any, settings: dict[str, Any], generator: str | None
) -> None:
    whole = hf_folder(tmp_path / "model", name, **settings)
    tokenizer = save(tmp_path / "model", make())
    ef.vocab(LINES[:40], out=tmp_path / "small", trim=tokenizer, kind="documents", progress=False)
    ef.import_(tmp_path / "model", out=tmp_path / "run", generator=generator, vocab=tmp_path / "small")
    ef.export(tmp_path / "run", out=tmp_path / "out")
    trimmed = transformers.AutoModel.from_pretrained(tmp_path / "out/encoder")
    new, old = (transformers.AutoTokenizer.from_pretrained(path) for path in (tmp_path / "out/encoder", tokenizer))
    assert len(new) == trimmed.config.vocab_size < len(old)
    for ours, theirs in zip(hidden(trimmed, new, LINES[:40]), hidden(whole.base_model, old, LINES[:40]), strict=True):
        assert theirs.std() > 0.1 and (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    head = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out/generator")
    assert head.get_output_embeddings().weight.shape[0] == len(new)


def vocabulary(folder: Path, *words: str) -> Path:
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[MASK]", "[SEP]", "[PAD]", "[UNK]", "[CLS]", *words]))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": false}')
    return folder


TABLES = {
    "google": {"embeddings.token", "generator_embeddings.token", "generator_head.bias"},
    "modern": {"embeddings.token", "generator_embeddings.token", "generator_head.bias", "corrective_head.bias"},
    "deberta": {"embeddings.token", "generator_embeddings.token", "generator_head.bias"},
}
# New entries, and the pieces of WORDS from which they start.
MADE_OF = {
    "the": "the",
    "##s": "##s",
    "Cat": "cat",  # the old tokenizer lowercases
    "cats": "cat ##s",
    "##SS": "##s ##s",
    "w7-sat": "w7 sat",  # without the unknown piece
    "##the": "the",  # unknown within a word
}


@pytest.mark.parametrize(
    ("recipe", "tying"),
    [("google", "none"), ("google", "embeddings"), ("modern", "none"), ("modern", "embeddings")]
    + [("deberta", "disentangled")],
)
def test_all_tables_have_rows_of_the_same_entries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, tying: str
) -> None:
    model = make_run(tmp_path / "run", recipe, {"model.tying": tying})
    old = ef.Tokenizer(tmp_path / "run")
    changed = with_vocabulary(model, tmp_path / "run/tokenizer", vocabulary(tmp_path / "new", *MADE_OF, "ŋ"))
    stderr = capsys.readouterr().err
    before = dict(model.named_parameters())
    after = dict(changed.named_parameters())
    special = [old.special_tokens[role] for role in ("mask", "sep", "pad", "unk", "cls")]
    made_of = [[number] for number in special] + [[*map(WORDS.index, pieces.split())] for pieces in MADE_OF.values()]
    assert before.keys() == after.keys()
    assert {name for name in after if after[name].shape != before[name].shape} == TABLES[recipe] & after.keys()
    for name, rows in before.items():
        if name not in TABLES[recipe]:
            assert torch.equal(after[name], rows)
            continue
        for row, ids in zip(after[name], made_of, strict=False):
            assert torch.equal(row, rows[ids[0]]) if len(ids) == 1 else torch.allclose(row, rows[ids].mean(0))
        assert torch.allclose(after[name][-1], rows.mean(0), atol=1e-6) and len(after[name]) == 13
    assert changed.config.differences(model.config).keys() == {"model.vocab_size"}
    assert "200 entries become 13: 9 keep a row, 3 start as the mean of several, 1 start as the mean of all; " in stderr


def test_same_entries_change_nothing_and_means_exclude_padding(tmp_path: Path) -> None:
    model = make_run(tmp_path / "run", "google", {})
    table = model.embeddings.token
    old = tmp_path / "vocab.txt"
    new = tmp_path / "new.txt"
    old.write_text("\n".join(WORDS[:150]))
    assert with_vocabulary(model, old, old) is model
    new.write_text("\n".join([*WORDS[:147], WORDS[148], WORDS[147], "ŋ"]))
    changed = with_vocabulary(model, old, new).embeddings.token
    assert torch.equal(changed[:149], table[[*range(147), 148, 147]])
    assert torch.allclose(changed[149], table[:150].mean(0), atol=1e-6)


def by_hand(model: Any, normalizer: Any, splitter: Any, mask: str = "<mask>") -> Crate:
    crate = Crate(model)
    crate.normalizer = normalizer
    crate.pre_tokenizer = splitter
    crate.add_special_tokens([*NAMES, mask])
    crate.add_tokens(["NEW"])
    return crate


def word_piece_by_hand(*more: str, lowercase: bool = True) -> Crate:
    entries = [*NAMES, "the", "##the", "in", "##ing", "##u", "u", "ne", "##w", ",", "##,", "The", *more]
    model = models.WordPiece({entry: number for number, entry in enumerate(entries)}, unk_token="<unk>")
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    return by_hand(model, normalizer, pre_tokenizers.BertPreTokenizer(), "[MASK]")


def byte_level_by_hand() -> Crate:
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("t", "he"), ("i", "n"), ("Ġ", "in"), ("in", "g"), ("Ã", "¼")]
    entries = [*NAMES, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    model = models.BPE({entry: number for number, entry in enumerate(entries)}, merges)
    return by_hand(model, None, pre_tokenizers.ByteLevel(add_prefix_space=False))


def unigram_by_hand() -> Crate:
    pieces = "▁the the ing ▁in in ▁ü , ▁ e g h i n t T ü é ▁neu".split()
    model = models.Unigram([(name, 0.0) for name in NAMES] + [(piece, -float(i)) for i, piece in enumerate(pieces)], 3)
    return by_hand(model, normalizers.NFKC(), pre_tokenizers.Metaspace())


OTHER_KINDS: list[tuple[Any, Any, dict[str, str]]] = [
    (word_piece_by_hand, byte_level_by_hand, {"Ġthe": "the", "the": "##the", "ing": "##ing", "Ã¼": "##u", ",": ","}),
    (word_piece_by_hand, byte_level_by_hand, {"Ġ": "", "Ã": "", "h": "", "NEW": "NEW", "<mask>": "[MASK]"}),
    (word_piece_by_hand, partial(word_piece_by_hand, "in,"), {",": ",", "##,": "##,", "The": "The", "in,": "in ,"}),
    (word_piece_by_hand, partial(word_piece_by_hand, lowercase=False), {"The": "the", "##,": "##,"}),
    (word_piece_by_hand, unigram_by_hand, {"▁ü": "u", "ü": "##u", "▁neu": "ne ##u", "T": "", "▁": "", "in": "in"}),
    (unigram_by_hand, word_piece_by_hand, {"the": "▁the", "##the": "the", "ne": "▁ n e", ",": ",", "</s>": "</s>"}),
    (unigram_by_hand, byte_level_by_hand, {"Ġ": "▁", "Ġt": "▁ t", "he": "h e", "Ã¼": "ü", "Ã": "", "NEW": "NEW"}),
    (byte_level_by_hand, word_piece_by_hand, {"in": "Ġin", "##ing": "ing", "##u": "u", ",": ",", "##,": ","}),
    (byte_level_by_hand, unigram_by_hand, {"▁ü": "Ġ Ã¼", "é": "Ã ©", "▁": "Ġ", "<unk>": "<unk>", "▁neu": "Ġ n e u"}),
]


@pytest.mark.parametrize(("old", "new", "made_of"), OTHER_KINDS)
def test_entries_are_matched_across_kinds_of_tokenizers(
    tmp_path: Path, old: Any, new: Any, made_of: dict[str, str]
) -> None:
    """`##s`, `Ġs` and `▁s` are pieces within or at the start of a word; unknown entries are the mean of all."""
    crates = {name: make() for name, make in (("old", old), ("new", new))}
    for name, crate in crates.items():
        save(tmp_path / name, crate)
    config = Config.preset("tiny", "google").override({"model.vocab_size": crates["old"].get_vocab_size()})
    model = Electra(config)
    changed = with_vocabulary(model, tmp_path / "old", tmp_path / "new")
    for entry, pieces in made_of.items():
        ids = [*map(crates["old"].token_to_id, pieces.split())] or [*range(config.model.vocab_size)]
        rows = model.embeddings.token[torch.tensor(ids)]
        assert torch.allclose(changed.embeddings.token[crates["new"].token_to_id(entry)], rows.mean(0)), entry


def test_unusable_vocabulary_is_rejected(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "google", {})
    ef.export(tmp_path / "run", out=tmp_path / "model", unfinished=True)
    (tmp_path / "vocab.txt").write_text("the\ncat")
    with pytest.raises(ef.InputError, match=r"^.*vocab.txt: no \[PAD\] in the vocabulary; add it, training needs it$"):
        ef.import_(tmp_path / "model", out=tmp_path / "again", vocab=tmp_path / "vocab.txt")
    with pytest.raises(FileNotFoundError, match=r"nothing: not found|nothing"):
        ef.import_(tmp_path / "model", out=tmp_path / "again", vocab=tmp_path / "nothing")
    assert not (tmp_path / "again").exists()
