"""Each task type is learned with each kind of encoder and its way of joining pairs."""

import random

import pytest
import torch
import transformers
from test_pair_templates import save_tokenizer

import electra_fast as ef
from electra_fast.files.json_files import read_records

# Class of `transformers`, tokenizer and settings of each kind of encoder.
ROBERTA = {"type_vocab_size": 1, "pad_token_id": 1}
MODERN = {"global_attn_every_n_layers": 1, "pad_token_id": 1, "cls_token_id": 0, "sep_token_id": 2}
ENCODERS = {
    "ELECTRA": ("Electra", "BERT", {"embedding_size": 16}),
    "BERT": ("Bert", "BERT", {}),
    "RoBERTa": ("Roberta", "RoBERTa", ROBERTA),
    "XLM-R": ("XLMRoberta", "XLM-R", ROBERTA),
    "CamemBERT": ("Camembert", "CamemBERT", ROBERTA),
    "DistilBERT": ("DistilBert", "DistilBERT", {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}),
    "ModernBERT": ("ModernBert", "in steps", MODERN),
}
SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 64, "initializer_range": 0.1}
SETTINGS = {"learning_rate": 5e-3, "batch_size": 16, "epochs": 8, "sequence_length": 32, "max_query_length": 8}
SETTINGS |= {"layer_decay": 1.0, "class_weights": "none", "precision": "fp32", "matmul": "default"}
WORDS = ["the", "a", "new", "in", "and"]

# Task types whose names differ from the keys of `rows`.
NAMES = {"pairs": "classification", "multi-label": "classification", "questions": "question-answering"}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Returns a function that writes a random encoder of a kind with its tokenizer."""

    def encoder(kind):
        folder = tmp_path_factory.mktemp("encoder")
        name, tokenizer, settings = ENCODERS[kind]
        model_class = getattr(transformers, f"{name}Model")
        torch.manual_seed(0)
        model_class(model_class.config_class(**SIZES | settings)).save_pretrained(folder)
        save_tokenizer(folder, tokenizer)
        return folder

    return encoder


def rows(task, count, seed):
    """Yields examples whose labels depend only on the words "sit" and "cat"."""
    rng = random.Random(seed)
    for _ in range(count):
        words = rng.choices(WORDS, k=7)
        has_sit = rng.random() < 0.5
        has_cat = rng.random() < 0.5
        places = rng.sample(range(7), 2)
        for place, word, is_there in zip(places, ("sit", "cat"), (has_sit, has_cat), strict=True):
            words[place] = word if is_there else words[place]
        text = " ".join(words)
        yield {
            "classification": {"text": text, "label": "yes" if has_sit else "no"},
            "pairs": {"sentence1": " ".join(rng.choices(WORDS, k=3)), "sentence2": text, "label": str(has_sit)},
            "multi-label": {"text": text, "label": ["s"] * has_sit + ["c"] * has_cat},
            "regression": {"text": text, "label": 1.7e9 + 1e4 * has_sit},
            "tagging": {"tokens": words, "tags": [{"sit": "B-S", "cat": "B-C"}.get(word, "O") for word in words]},
            # The question contains the answer too, but an answer must come from the context.
            "questions": {"question": "the cat in", "context": text, "answers": ["cat"] * has_cat},
        }[task]


QUICK = [
    ("classification", "CamemBERT", "fast", "accuracy"),
    ("multi-label", "DistilBERT", "fast", "f1_micro"),
    ("regression", "ModernBERT", "fast", "pearson"),
    ("tagging", "XLM-R", "fast", "f1"),
    ("pairs", "RoBERTa", "fast", "accuracy"),
    ("questions", "BERT", "google", "exact_match"),
]
SLOW = [
    *(("pairs", kind, "fast", "accuracy") for kind in ENCODERS if kind != "RoBERTa"),
    *(("questions", kind, "google", "exact_match") for kind in ENCODERS if kind != "BERT"),
    ("questions", "RoBERTa", "fast", "exact_match"),
]


@pytest.mark.parametrize(
    ("task", "kind", "recipe", "metric"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_task_is_learned(encoder, write_rows, tmp_path, task, kind, recipe, metric):
    sizes = {"train": 256, "dev": 64}
    files = {name: write_rows([*rows(task, size, size)], f"{name}.jsonl") for name, size in sizes.items()}
    name = NAMES.get(task, task)
    settings = {f"finetune.{key}": value for key, value in SETTINGS.items()}
    out = tmp_path / "out"
    results = ef.finetune(encoder(kind), task=name, out=out, **files, recipe=recipe, overrides=settings)
    scores = results[name]["medians"]
    assert scores[metric] > 0.95
    *_, last = (record["loss"] for record in read_records(out / name / "seed-0/metrics.jsonl") if "loss" in record)
    assert last < (SETTINGS["batch_size"] if recipe == "google" else 1)  # `google` sums over the batch
    assert abs(scores.get("null_threshold", 0)) < 500  # odds, not the offset of masked tokens
