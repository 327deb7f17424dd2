"""Pairs and questions have the same ids and token types as in `transformers`."""

import itertools
import json

import pytest
from tokenizers import Tokenizer as Crate
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

import electra_fast as ef
from electra_fast.data.pair_template import BERT, ROBERTA, PairTemplate
from electra_fast.finetuning.encoding import encode
from electra_fast.finetuning.tasks.question_features import question_features
from electra_fast.huggingface.tokenizer import INPUT_NAMES, copy_tokenizer

VALUES = ("input_ids", "token_type_ids")
NAMES = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
BRACKETS = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
TEXTS = ["the cats sat", "a", "naïve café in new york, 1999", "cat " * 7, "the cat and the cats sit " * 9]


def trained(model, trainer, names, splitter, **parts):
    crate = Crate(model)
    crate.pre_tokenizer = splitter
    for name, part in parts.items():
        setattr(crate, name, part)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if isinstance(model, models.BPE) else []
    more = {"unk_token": "<unk>"} if isinstance(model, models.Unigram) else {}
    options = {"vocab_size": 320, "special_tokens": names, "initial_alphabet": alphabet, "show_progress": False}
    crate.train_from_iterator(TEXTS, trainer(**options | more))
    return crate


def bert(post_processor):
    return trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer,
        BRACKETS,
        pre_tokenizers.BertPreTokenizer(),
        normalizer=normalizers.BertNormalizer(),
        post_processor=post_processor,
    )


def byte_level(post_processor):
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(models.BPE(), trainers.BpeTrainer, NAMES, splitter, post_processor=post_processor)


def unigram(post_processor):
    splitter = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    return trained(models.Unigram(), trainers.UnigramTrainer, NAMES, splitter, post_processor=post_processor)


def joined(pair, names=NAMES, single="{} $A {}"):
    cls, _, sep, *_ = names
    special = [(cls, 0), (sep, 2)]
    pair = pair.replace("<s>", cls).replace("</s>", sep)
    return processors.TemplateProcessing(single=single.format(cls, sep), pair=pair, special_tokens=special)


TRIMS = processors.ByteLevel(trim_offsets=True)
ANY = "PreTrainedTokenizerFast"
KINDS = {
    "BERT": (bert, processors.BertProcessing(("[SEP]", 2), ("[CLS]", 0)), "BertTokenizer", BERT),
    "DistilBERT": (bert, joined("<s> $A </s> $B:1 </s>:1", BRACKETS), "DistilBertTokenizer", BERT),
    "RoBERTa": (byte_level, processors.RobertaProcessing(("</s>", 2), ("<s>", 0)), "RobertaTokenizer", ROBERTA),
    "RoBERTa, no class": (byte_level, processors.RobertaProcessing(("</s>", 2), ("<s>", 0)), None, ROBERTA),
    "XLM-R": (unigram, joined("<s> $A </s> </s> $B </s>"), "XLMRobertaTokenizer", ROBERTA),
    "CamemBERT": (unigram, joined("<s> $A </s> </s> $B </s>"), "CamembertTokenizer", ROBERTA),
    "in steps": (byte_level, processors.Sequence([TRIMS, joined("<s> $A </s> $B </s>")]), ANY, PairTemplate(1, 0)),
    "BERT's words": (bert, joined("<s> $A </s> </s> $B:1 </s>:1", BRACKETS), ANY, PairTemplate(2)),
    "no special tokens": (byte_level, TRIMS, ANY, None),
    "no end": (unigram, joined("<s> $A $B:1", single="{} $A"), ANY, None),
    "three": (unigram, joined("<s> $A </s> </s> </s> $B </s>"), ANY, None),
}


def save_tokenizer(folder, kind):
    make, post_processor, name, _ = KINDS[kind]
    make(post_processor).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": name, "do_lower_case": True} if name else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_token_types_equal_transformers(kind, tmp_path):
    """Checks the model's folder, if it has a template, and a copy with Electra's config.json."""
    make, *_, template = KINDS[kind]
    source = tmp_path / "source"
    source.mkdir()
    model_type = {bert: "bert", byte_level: "roberta", unigram: "xlm-roberta"}[make]
    (source / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_tokenizer(source, kind)
    tokenizer = ef.Tokenizer(source)
    assert tokenizer.pair_template == template
    folders = [source] if template else []
    for more in ({}, {"split_special_tokens": True}):
        folders.append(tmp_path / f"copy-{len(more)}")
        copy_tokenizer(source, folders[-1], INPUT_NAMES["bert"], more)
        (folders[-1] / "config.json").write_text('{"model_type": "electra"}')
    for folder in folders:
        copied_tokenizer = ef.Tokenizer(folder)
        hf_tokenizer = AutoTokenizer.from_pretrained(folder)
        assert copied_tokenizer.content_hash == tokenizer.content_hash
        options = {"truncation": True, "return_token_type_ids": True}
        for examples in ([(text,) for text in TEXTS], [*itertools.product(TEXTS, TEXTS)]):
            for room in (12, 14, 60):  # even, since ties differ for odd lengths
                length = room + (template or BERT).num_special
                expected = hf_tokenizer(*map(list, zip(*examples, strict=True)), **options, max_length=length)
                assert rows(encode(copied_tokenizer, examples, length)) == [
                    *zip(*map(expected.get, VALUES), strict=True)
                ]
                assert rows(encode(tokenizer, examples, length)) == rows(encode(copied_tokenizer, examples, length))
        question_pairs = [("the cat", TEXTS[-1])]
        features = question_features(
            copied_tokenizer, question_pairs, sequence_length=40, doc_stride=9, max_query_length=12
        )
        expected = hf_tokenizer(*question_pairs[0], **options | {"truncation": "only_second"}, max_length=40)
        assert rows(features.encoded)[0] == tuple(map(expected.get, VALUES))


def rows(encoded):
    spans = [slice(*ends) for ends in itertools.pairwise(encoded.offsets.tolist())]
    return [(encoded.ids[span].tolist(), encoded.token_types[span].tolist()) for span in spans]
