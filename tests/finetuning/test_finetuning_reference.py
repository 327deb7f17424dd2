"""Fine-tuning equals an independent implementation.

The encoder is from `transformers`; heads and recipes (`recipe_reference`) are reimplemented in torch.
"""

import json
import math

import numpy as np
import pytest
import recipe_reference
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from test_span_model import joint_reference
from tiny_reading import tagged_sentences, write_conll, write_squad
from tiny_task import NO_DROPOUT, QUICK, save_encoder, write_mrpc, write_stsb

import electra_fast as ef
from electra_fast.finetuning.batches import training_order
from electra_fast.finetuning.config import recipe_config
from electra_fast.finetuning.readers.question_files import read_squad
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.finetuning.tasks.question_features import question_features, training_targets
from electra_fast.huggingface.encoder import load_encoder

OVERRIDES = QUICK | NO_DROPOUT | {"finetune.layer_decay": "0.8"}
READING = OVERRIDES | {"finetune.sequence_length": "48", "finetune.max_query_length": "16", "finetune.doc_stride": "12"}


class Reference(torch.nn.Module):
    """An encoder of `transformers` with the initial values of our head."""

    def __init__(self, folder, kind, config, num_outputs):
        super().__init__()
        self.encoder = transformers.AutoModel.from_pretrained(folder).eval()
        network = TASK_TYPES[kind].model(load_encoder(folder).shape, config, num_outputs)
        network.initialize_head(0)
        parameters = dict(network.head.named_parameters())
        self.head = torch.nn.ParameterDict(
            {name.replace(".", "_"): p.detach().clone() for name, p in parameters.items()}
        )

    def hidden(self, ids, types):
        """Returns hidden states of one example, without padding; [tokens, D]."""
        inputs = {"input_ids": torch.tensor(ids)[None].long(), "token_type_ids": torch.tensor(types)[None].long()}
        return self.encoder(**inputs).last_hidden_state[0]

    def outputs(self, ids, types=None):
        """Returns the outputs of a head with one or two layers."""
        x = self.hidden(ids, np.zeros(len(ids), int) if types is None else types)
        p = self.parameters_of_head()
        if "dense.weight" in p:
            x = F.gelu(F.linear(x, p["dense.weight"], p["dense.bias"]))
        return F.linear(x, p["classifier.weight"], p["classifier.bias"])

    def parameters_of_head(self):
        return {name[::-1].replace("_", ".", 1)[::-1]: p for name, p in self.head.items()}


def read_pairs(path):
    """Returns pairs of texts, and their labels or scores."""
    header, *lines = [line.split("\t") for line in path.read_text().splitlines()]
    columns = ("#1 String", "#2 String", "Quality") if "Quality" in header else ("sentence1", "sentence2", "score")
    rows = [tuple(line[header.index(name)] for name in columns) for line in lines]
    return [row[:2] for row in rows], [float(row[2]) for row in rows]


def pair_ids(tokenizer, pair, max_length=24):
    """Returns ids and token types of [CLS] a [SEP] b [SEP]; truncates the longer text (if equal, the second)."""
    a, b = (tokenizer.encode(text, add_special_tokens=False) for text in pair)
    while len(a) + len(b) > max_length - 3:
        (a if len(a) > len(b) else b).pop()
    cls = tokenizer.cls_token_id
    sep = tokenizer.sep_token_id
    return [cls, *a, sep, *b, sep], [0] * (len(a) + 2) + [1] * (len(b) + 1)


@pytest.mark.parametrize(
    ("task", "recipe", "epochs", "architecture"),
    [
        ("mrpc", "google", "0.3", "bert"),
        ("stsb", "fast", "1", "bert"),
        ("mrpc", "fast", "1", "deberta"),
        pytest.param("mrpc", "paper", "1", "bert", marks=pytest.mark.slow),
        pytest.param("stsb", "google", "1", "deberta", marks=pytest.mark.slow),
    ],
)
def test_training_on_pairs_equals_reference(tmp_path, tiny_vocab, task, recipe, epochs, architecture):
    """After two steps (the first of `google` has learning rate 0) or an epoch, the outputs are equal."""
    encoder_folder = save_encoder(tmp_path / "encoder", tiny_vocab, architecture)
    is_value = task == "stsb"
    data = (write_stsb if is_value else write_mrpc)(tmp_path / task)
    overrides = OVERRIDES | {"finetune.epochs": epochs}
    ef.finetune(encoder_folder, task=task, glue=data, out=tmp_path / "out", recipe=recipe, overrides=overrides)
    exported = tmp_path / "out" / task / "seed-0" / "model"
    trained_model = transformers.AutoModelForSequenceClassification.from_pretrained(exported).eval()

    config = recipe_config(recipe, task, load_encoder(encoder_folder).shape, overrides).finetune
    kind, scale = ("regression", 5) if is_value else ("classification", 1)
    model = Reference(encoder_folder, kind, config, 1 if is_value else 2)
    examples, targets = read_pairs(data / "train.tsv")
    if recipe == "google":
        examples = examples + [(b, a) for a, b in examples]
        targets = targets * 2
    order = training_order(config, len(examples), seed=0)
    assert len(order) == math.ceil(math.ceil(len(examples) / 8) * float(epochs)) >= 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    reduction = "sum" if recipe == "google" else "mean"

    def batch_loss(chosen):
        outputs = torch.stack([model.outputs(*pair_ids(tokenizer, examples[i]))[0] for i in chosen])
        wanted = torch.tensor([targets[i] for i in chosen])
        if is_value:
            return F.mse_loss(outputs[:, 0], wanted / 5, reduction=reduction)
        return F.cross_entropy(outputs, wanted.long(), reduction=reduction)

    untrained = {name: p.detach().clone() for name, p in model.head.items()}
    recipe_reference.train(model, batch_loss, order, recipe, config.learning_rate)
    assert all((p - untrained[name]).abs().max() > 1e-5 for name, p in model.head.items())
    for pair in read_pairs(data / "dev.tsv")[0]:
        ids, types = pair_ids(tokenizer, pair)
        with torch.no_grad():
            logits = trained_model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0]
            torch.testing.assert_close(logits, model.outputs(ids, types)[0] * scale, rtol=1e-5, atol=1e-5)


def reading_losses(model, encoded, targets, head):
    """Returns a function from a chunk's index to its loss."""

    def loss_of(i):
        place = slice(encoded.offsets[i], encoded.offsets[i + 1])
        types = torch.tensor(encoded.token_types[place])
        hidden = model.hidden(encoded.ids[place], encoded.token_types[place])
        p = model.parameters_of_head()
        at, to, impossible = targets[i]
        if head == "transformers":
            start, end = model.outputs(encoded.ids[place], encoded.token_types[place]).unbind(1)
            return (F.cross_entropy(start, at) + F.cross_entropy(end, to)) / 2
        start, end, unanswerable = joint_reference(p, hidden, types)
        spans = (F.cross_entropy(start, at) + F.cross_entropy(end(at), to)) / 2
        return spans + 0.5 * F.binary_cross_entropy_with_logits(unanswerable, impossible.float())

    return loss_of


@pytest.mark.parametrize(
    ("recipe", "version"), [("paper", 1), ("google", 2), pytest.param("fast", 2, marks=pytest.mark.slow)]
)
def test_epoch_of_squad_equals_reference(tmp_path, encoder_folder, recipe, version):
    data = write_squad(tmp_path / "squad", version)
    name = f"squad{version}"
    ef.finetune(encoder_folder, task=name, squad=data, out=tmp_path / "out", recipe=recipe, overrides=READING)
    folder = tmp_path / "out" / name / "seed-0" / "model"

    defaults = TASK_TYPES["question-answering"].defaults
    config = recipe_config(recipe, name, load_encoder(encoder_folder).shape, READING, defaults).finetune
    train = read_squad(name, data).train
    tokenizer = ef.Tokenizer(folder)
    features = question_features(tokenizer, train.texts, sequence_length=48, doc_stride=12, max_query_length=16)
    targets = torch.tensor(training_targets(tokenizer, features, list(train.targets)))
    assert len(features.question) > len(train.texts) and (targets[:, 2].sum() > 0) == (version == 2)

    model = Reference(encoder_folder, "question-answering", config, 2)
    before = {name: p.detach().clone() for name, p in model.head.items()}
    loss_of = reading_losses(model, features.encoded, targets, config.head)

    def batch_loss(chosen):
        losses = torch.stack([loss_of(i) for i in chosen])
        return losses.sum() if recipe == "google" else losses.mean()

    order = training_order(config, len(features.question), seed=0)
    recipe_reference.train(model, batch_loss, order, recipe, config.learning_rate)
    stored = load_file(folder / "model.safetensors")
    prefix = "qa_outputs." if config.head == "transformers" else "head."
    for key, expected in model.parameters_of_head().items():
        if key in ("classifier.bias", "start.bias", "end.bias"):
            continue  # shifts all logits: the gradient is only rounding errors, which Adam amplifies
        trained_tensor = stored[
            prefix + key.removeprefix("classifier.") if config.head == "transformers" else prefix + key
        ]
        torch.testing.assert_close(trained_tensor, expected, rtol=1e-5, atol=1e-5, msg=key)
        assert (expected - before[key.replace(".", "_")]).abs().max() > 1e-5
    for key, expected in model.encoder.state_dict().items():
        if f"electra.{key}" in stored:
            torch.testing.assert_close(stored[f"electra.{key}"], expected, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize("recipe", ["google", pytest.param("fast", marks=pytest.mark.slow)])
def test_epoch_of_tagging_equals_reference(tmp_path, encoder_folder, recipe):
    """Sentences are short enough for one chunk; labels are at the first piece of each word."""
    data = write_conll(tmp_path / "data", words=(3, 8))
    arguments = {"train": data / "train.conll", "dev": data / "dev.conll"}
    ef.finetune(encoder_folder, task="tagging", out=tmp_path / "out", recipe=recipe, overrides=READING, **arguments)
    folder = tmp_path / "out" / "tagging" / "seed-0" / "model"
    config = recipe_config(recipe, "tagging", load_encoder(encoder_folder).shape, READING).finetune
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    labels = json.loads((folder / "config.json").read_text())["label2id"]
    rows = []
    for tokens, tags in tagged_sentences(24, 0, (3, 8)):
        encoding = tokenizer(tokens, is_split_into_words=True)
        words = encoding.word_ids()
        first = [at for at, word in enumerate(words) if word is not None and word not in words[:at]]
        rows.append((encoding["input_ids"], first, [labels[tag] for tag in tags]))

    model = Reference(encoder_folder, "tagging", config, len(labels))

    def batch_loss(chosen):
        losses = []
        for i in chosen:
            ids, first, wanted = rows[i]
            losses.append(F.cross_entropy(model.outputs(ids)[first], torch.tensor(wanted), reduction="none"))
        return torch.cat(losses).sum() if recipe == "google" else torch.cat(losses).mean()

    recipe_reference.train(model, batch_loss, training_order(config, 24, seed=0), recipe, config.learning_rate)
    trained_model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    for ids, _, _ in rows:
        with torch.no_grad():
            torch.testing.assert_close(
                trained_model(torch.tensor([ids])).logits[0], model.outputs(ids), rtol=1e-5, atol=1e-5
            )


def test_question_answers_equal_transformers(tmp_path, encoder_folder):
    data = write_squad(tmp_path / "squad")
    ef.finetune(encoder_folder, task="squad1", squad=data, out=tmp_path / "out", overrides=READING)
    folder = tmp_path / "out" / "squad1" / "seed-0" / "model"
    hf_model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reader = ef.load(folder)
    question = "Which class"
    context = "The class of a value, and the name of an object."
    inputs = tokenizer(question, context, return_tensors="pt")
    with torch.no_grad():
        outputs = hf_model(**inputs)
    (answer,) = reader.predict([(question, context)], n_best=5)
    start = outputs.start_logits[0]
    end = outputs.end_logits[0]
    allowed = [i for i, part in enumerate(inputs.sequence_ids(0)) if part == 1]
    best = max((float(start[i] + end[j]), i, j) for i in allowed for j in allowed if i <= j < i + 30)
    offsets = tokenizer(question, context, return_offsets_mapping=True)["offset_mapping"]
    assert (answer["start"], answer["end"]) == (offsets[best[1]][0], offsets[best[2]][1])
    assert answer["answer"] == context[answer["start"] : answer["end"]]
    assert answer["null_odds"] == pytest.approx(float(start[0] + end[0]) - best[0], abs=1e-4)
    assert len(answer["n_best"]) == 5 and answer["n_best"][0]["answer"] == answer["answer"]
