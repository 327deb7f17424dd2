"""Small fine-tuning tasks: files of a few dozen examples, and encoders that train in a second."""

import json
import random
from pathlib import Path

WORDS = "the class function value object string list name error file returns module method type code line".split()
GOOD = ["fine", "true", "valid", "new"]
BAD = ["wrong", "false", "invalid", "old"]
# Settings with which fine-tuning a tiny encoder takes a second and is repeatable.
QUICK = {"finetune.epochs": "1", "finetune.batch_size": "8", "finetune.sequence_length": "24"}
QUICK |= {"finetune.precision": "fp32", "finetune.matmul": "default", "finetune.select": "last"}
# Lines of metrics.jsonl: few, so that checkpoints fall between them and a resume restores a half-filled log window.
NUM_LOGS = 2
NO_DROPOUT = {"finetune.dropout": "0", "finetune.attention_dropout": "0", "finetune.head_dropout": "0"}


def sentences(count, seed=0):
    """Yields sentences of 3 to 30 words with their class: 1 if they contain a good word, 0 if a bad word."""
    rng = random.Random(seed)
    for _ in range(count):
        label = rng.randrange(2)
        words = rng.choices(WORDS, k=rng.randrange(3, 30))
        words.insert(rng.randrange(len(words)), rng.choice(GOOD if label else BAD))
        yield " ".join(words), label


def pairs(count, seed=0):
    """Yields pairs of sentences with a random label. Half of the pairs have the same beginning."""
    rng = random.Random(seed)
    texts = [text for text, _ in sentences(2 * count, seed)]
    for first, second in zip(texts[::2], texts[1::2], strict=True):
        yield first, second if rng.random() < 0.5 else first[: len(first) // 2] + second, rng.randrange(2)


def write_splits(folder: Path, header, row, examples, **counts) -> Path:
    """Writes a file for each split. `row` formats an example's number and the example."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate(counts.items()):
        rows = (row(number, *example) for number, example in enumerate(examples(count, seed)))
        (folder / f"{name}.tsv").write_text(header + "".join(rows))
    return folder


def write_sst2(folder: Path, train=40, dev=16, test=8) -> Path:
    lines = (f"{i}\t{text}\n" for i, (text, _) in enumerate(sentences(test, 2)))
    write_splits(folder, "sentence\tlabel\n", lambda _, text, y: f"{text}\t{y}\n", sentences, train=train, dev=dev)
    (folder / "test.tsv").write_text("index\tsentence\n" + "".join(lines))
    return folder


def write_cola(folder: Path, train=40, dev=16) -> Path:
    return write_splits(folder, "", lambda _, text, y: f"gj04\t{y}\t\t{text}\n", sentences, train=train, dev=dev)


def write_mrpc(folder: Path, train=27, dev=10) -> Path:
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    return write_splits(folder, header, lambda _, a, b, y: f"{y}\t1\t2\t{a}\t{b}\n", pairs, train=train, dev=dev)


def write_stsb(folder: Path, train=27, dev=10) -> Path:
    def row(number, a, b, _):
        return f"{number}\t{a}\t{b}\t{len(a) * 7 % 50 / 10:.3f}\n"

    return write_splits(folder, "index\tsentence1\tsentence2\tscore\n", row, pairs, train=train, dev=dev)


def save_encoder(folder: Path, vocab: Path, architecture="bert", seed=0, **changes) -> Path:
    """Saves a randomly initialized encoder with `transformers`, and its vocabulary."""
    import torch
    from transformers import (
        DebertaV2Config,
        DebertaV2Model,
        ElectraConfig,
        ElectraModel,
        ModernBertConfig,
        ModernBertModel,
    )

    torch.manual_seed(seed)
    sizes = {"vocab_size": len(vocab.read_text().splitlines()), "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}
    if architecture == "bert":
        # Weights large enough for the outputs to depend on the input.
        config = ElectraConfig(**sizes | {"embedding_size": 16, "initializer_range": 0.2} | changes)
        model = ElectraModel(config)
    elif architecture == "deberta":
        relative = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
        relative |= {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False}
        model = DebertaV2Model(DebertaV2Config(**sizes | relative | {"initializer_range": 0.2} | changes))
    else:
        rope = {
            kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("full_attention", "sliding_attention")
        }
        layers = {"layer_types": ["full_attention"] * 2, "rope_parameters": rope}
        special = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
        model = ModernBertModel(ModernBertConfig(**sizes | layers | special | changes))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text(vocab.read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"do_lower_case": True, "tokenizer_class": "BertTokenizer"})
    )
    return folder
