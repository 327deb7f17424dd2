"""Fine-tuning equals an independent implementation: modules of `transformers`, and the recipes written out in torch."""

import math

import pytest
import recipe_reference
import torch
import torch.nn.functional as F
from tiny_task import NO_DROPOUT, QUICK, write_mrpc, write_stsb
from transformers import AutoTokenizer, ElectraForSequenceClassification, ElectraModel

import electra_fast as ef
from electra_fast.finetuning.batches import training_order
from electra_fast.finetuning.config import recipe_config
from electra_fast.finetuning.tasks.classification import SequenceClassifier
from electra_fast.huggingface.encoder import load_encoder

MAX_LENGTH = 24
BATCH = 8
READ = {"mrpc": write_mrpc, "stsb": write_stsb}


def read_tsv(path):
    header, *lines = [line.split("\t") for line in path.read_text().splitlines()]
    columns = ("#1 String", "#2 String", "Quality") if "Quality" in header else ("sentence1", "sentence2", "score")
    return [tuple(line[header.index(name)] for name in columns) for line in lines]


class Reference(torch.nn.Module):
    """An encoder of `transformers` and a head written out; its first values are those of our own module."""

    def __init__(self, folder, head, num_outputs, seed):
        super().__init__()
        self.electra = ElectraModel.from_pretrained(folder).eval()
        ours = SequenceClassifier(load_encoder(folder).shape, head, num_outputs, F.mse_loss)
        ours.initialize_head(seed)
        own = dict(ours.head.named_parameters())
        self.head = torch.nn.ParameterDict({name.replace(".", "_"): p.detach().clone() for name, p in own.items()})

    def forward(self, ids, mask, types):
        x = self.electra(ids, attention_mask=mask, token_type_ids=types).last_hidden_state[:, 0]
        if "dense_weight" in self.head:
            x = F.gelu(F.linear(x, self.head["dense_weight"], self.head["dense_bias"]))
        return F.linear(x, self.head["classifier_weight"], self.head["classifier_bias"])


def collate(tokenizer, examples):
    """[CLS] a [SEP] b [SEP] with padding; the longer text loses its last token until both fit, at a tie the second."""
    rows = []
    for first, second in examples:
        a, b = (tokenizer.encode(text, add_special_tokens=False) for text in (first, second))
        while len(a) + len(b) > MAX_LENGTH - 3:
            (a if len(a) > len(b) else b).pop()
        cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
        rows.append(([cls, *a, sep, *b, sep], [0] * (len(a) + 2) + [1] * (len(b) + 1)))
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    types = torch.tensor([types + [0] * (width - len(types)) for _, types in rows])
    return ids, torch.arange(width) < torch.tensor([[len(ids)] for ids, _ in rows]), types


def train_reference(model, tokenizer, examples, targets, order, recipe, learning_rate, kind):
    reduction = "sum" if recipe == "google" else "mean"

    def loss_of(chosen):
        outputs = model(*collate(tokenizer, [examples[i] for i in chosen]))
        wanted = torch.tensor([targets[i] for i in chosen])
        if kind == "regression":
            return F.mse_loss(outputs[:, 0], wanted / 5, reduction=reduction)
        return F.cross_entropy(outputs, wanted, reduction=reduction)

    recipe_reference.train(model, loss_of, order, recipe, learning_rate)


@pytest.mark.parametrize(
    "task, recipe, epochs",
    [("mrpc", "paper", "1"), ("mrpc", "google", "0.3"), ("stsb", "google", "1"), ("stsb", "fast", "1")],
)
def test_training_equals_the_recipe_written_out(tmp_path, encoder_folder, task, recipe, epochs):
    """Two steps (the first of `google` has rate 0), or an epoch: the trained models give equal outputs."""
    data = READ[task](tmp_path / task)
    overrides = QUICK | NO_DROPOUT | {"finetune.epochs": epochs, "finetune.layer_decay": "0.8"}
    ef.finetune(task, model=encoder_folder, data=data, out=tmp_path / "out", recipe=recipe, overrides=overrides)
    exported = tmp_path / "out" / task / "seed-0" / "model"
    ours = ElectraForSequenceClassification.from_pretrained(exported).eval()

    config = recipe_config(recipe, task, load_encoder(encoder_folder).shape, overrides).finetune
    kind = "regression" if task == "stsb" else "classification"
    reference = Reference(encoder_folder, config.head, 1 if kind == "regression" else 2, seed=0)
    rows = read_tsv(data / "train.tsv")
    examples = [(a, b) for a, b, _ in rows]
    targets = [float(y) if kind == "regression" else int(y) for *_, y in rows]
    if recipe == "google":
        examples, targets = examples + [(b, a) for a, b in examples], targets + targets
    order = training_order(config, len(examples), seed=0)
    assert len(order) == math.ceil(math.ceil(len(examples) / BATCH) * float(epochs)) >= 2
    tokenizer = AutoTokenizer.from_pretrained(exported)
    train_reference(reference, tokenizer, examples, targets, order, recipe, config.learning_rate, kind)

    batch = collate(tokenizer, [(a, b) for a, b, _ in read_tsv(data / "dev.tsv")])
    with torch.no_grad():
        expected = reference(*batch) * (5 if kind == "regression" else 1)
        torch.testing.assert_close(ours(batch[0], batch[1], batch[2]).logits, expected, rtol=1e-5, atol=1e-5)
        untrained = Reference(encoder_folder, config.head, expected.shape[1], seed=0)(*batch)
    assert (untrained * (5 if kind == "regression" else 1) - expected).abs().max() > 1e-4  # the steps changed something
