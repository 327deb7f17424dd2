"""Files and folders that blocks of the documents read and do not write, for `test_documents.py`."""

import csv
import json
import shutil
from pathlib import Path

import pyarrow as pa
from tiny_reading import questions_of, write_conll, write_squad
from tiny_task import sentences, write_cola, write_sst2

import electra_fast as ef
from electra_fast import demonstration


def make_pairs(path, get):
    path.mkdir()
    pair = {"sentence_good": "the value of a name", "sentence_bad": "value the of a name", "UID": "order"}
    (path / "order.jsonl").write_text(json.dumps(pair) + "\n")


def make_texts(path, get):
    documents = get.tiny_text
    path.mkdir()
    (path / "a.txt").write_text("\n\n".join(documents[::3]) + "\n", encoding="utf-8")
    for name, part, compression in (("b.jsonl", documents[1::3], None), ("c.jsonl.zst", documents[2::3], "zstd")):
        lines = [json.dumps({"text": text}) + "\n" for text in "\n\n".join(part).split("\n\n")]
        with pa.output_stream(str(path / name), compression=compression) as file:
            file.write("".join(lines).encode())


def make_shards(path, get):
    ef.prepare(get("texts"), vocab=get("vocab.txt"), out=path, holdout=0.1, progress=False)


def make_run(path, get, seed=0):
    changes = {"train.steps": "12", "train.batch_size": "2", "train.log_every": "2", "train.seed": str(seed)}
    ef.pretrain(get("shards"), config=ef.Config.preset("tiny").override(changes), out=path)


def make_demo(path, get):
    path.mkdir()
    demonstration._write_corpus(path / "corpus.jsonl")


def make_wheel(path, get):
    path.mkdir()
    (path / "electra_fast-0-py3-none-any.whl").touch()


def make_bert(path, get):
    from transformers import AutoConfig, AutoModel

    vocab = get("vocab.txt").read_text()
    sizes = {"vocab_size": vocab.count("\n"), "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 2}
    AutoModel.from_config(AutoConfig.for_model("bert", intermediate_size=64, **sizes)).save_pretrained(path)
    (path / "vocab.txt").write_text(vocab)


def make_deberta(path, get):
    """As DeBERTaV3 was released."""
    import torch
    from published_deberta import hf_class
    from sentencepiece import SentencePieceTrainer
    from transformers import DebertaV2Config

    pieces = {"pad_piece": "[PAD]", "unk_piece": "[UNK]", "bos_piece": "[CLS]", "eos_piece": "[SEP]"}
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    texts = iter([*(text for text, _ in sentences(400, 1)), "The sole word of the pair that fit here not."])
    path.mkdir()
    SentencePieceTrainer.train(
        sentence_iterator=texts, model_prefix=str(path / "spm"), vocab_size=300, hard_vocab_limit=False, **pieces, **ids
    )
    sizes = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    kind = {"relative_attention": True, "position_biased_input": False, "position_buckets": 16}
    kind |= {"share_att_key": True, "pos_att_type": "p2c|c2p"}
    table = sizes | kind | {"model_type": "deberta-v2", "norm_rel_ebd": "layer_norm", "intermediate_size": 64}
    (path / "config.json").write_text(json.dumps(table))
    (path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "vocab_type": "spm"}))
    for role, name in (("discriminator", "pytorch_model.bin"), ("generator", "pytorch_model.generator.bin")):
        layers = {"num_hidden_layers": 2} if role == "generator" else {}
        model = hf_class("deberta", role)(DebertaV2Config(**table | layers | {"legacy": False}))
        torch.save(model.state_dict(), path / name)


def make_glue(path, get):
    write_sst2(path / "SST-2")
    write_cola(path / "CoLA")


def make_table(path, get):
    """Texts with labels, in columns of several names."""
    rows = ([text, "ab"[label], text, label + 1, "cd"[label]] for text, label in sentences(60))
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text", "label", "body", "stars", "queue"], *rows])


def make_questions(path, get):
    rows = questions_of(get("squad") / "train-v2.0.json")
    lines = ({"question": asked, "context": text, "answers": text.split()[:1]} for _, asked, text in rows)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_tasks(path, get):
    ef.finetune(get("run"), task="classification", train=get("labeled.csv"), out=path, epochs=1)


# Functions of a path and of `Inputs` that write the files and folders that blocks read.
INPUTS = {
    "dist": make_wheel,
    "examples": lambda path, get: shutil.copytree(Path(__file__).parents[2] / "examples", path),
    "demo": make_demo,
    "texts": make_texts,
    "vocab.txt": lambda path, get: shutil.copy(get.tiny_vocab, path),
    "shards": make_shards,
    "wiki": make_shards,
    "books": lambda path, get: ef.prepare(reversed(get.tiny_text), vocab=get("vocab.txt"), out=path, progress=False),
    "s3://bucket/wiki": lambda path, get: get.store.upload(get("texts"), "wiki"),
    "s3://bucket/reviews.csv": lambda path, get: get.store.put("bucket/reviews.csv", get("labeled.csv").read_bytes()),
    "run": make_run,
    "run1": make_run,
    "run2": lambda path, get: make_run(path, get, seed=1),
    "model": lambda path, get: ef.export(get("run"), out=path),
    "bert-base-uncased": make_bert,
    "deberta-v3-xsmall": make_deberta,
    "glue": make_glue,
    "blimp": make_pairs,
    "squad": lambda path, get: write_squad(path, 2),
    **dict.fromkeys(("labeled.csv", "reviews.csv", "tickets.csv", "new.csv", "new-tickets.csv"), make_table),
    "own.jsonl": make_questions,
    **dict.fromkeys(("train.conll", "dev.conll"), lambda path, get: write_conll(path.parent)),
    "ocr.txt": lambda path, get: path.write_text("the functon returns a valve\n"),
    "tasks": make_tasks,
}


class Inputs:
    """Files and folders that blocks read, each written when it is first needed."""

    def __init__(self, request):
        self.folder = request.getfixturevalue("tmp_path_factory").mktemp("inputs")
        self._fixture = request.getfixturevalue

    def __getattr__(self, name):
        return self._fixture(name)

    def __call__(self, name):
        path = self.folder / name
        if not path.exists():
            INPUTS[name](path, self)
        return path

    def put(self, name, folder):
        source = self(name)
        if source.is_dir():
            shutil.copytree(source, folder / name)
        elif source.exists():  # here, not in a bucket
            shutil.copy(source, folder / name)
