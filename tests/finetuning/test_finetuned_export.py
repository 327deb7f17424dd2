"""`export --onnx` for fine-tuned models, compared with `transformers` in onnxruntime, and its input errors."""

import json
import shutil

import in_process
import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from safetensors.torch import load_file
from task_reading import refused
from tiny_task import QUICK, save_encoder, sentences

import electra_fast as ef
from electra_fast.errors import ElectraFastError
from electra_fast.finetuning import export as export_module
from electra_fast.finetuning.tasks import TASK_TYPES

LABELS = {
    "classification": ["no", "yes", "maybe"],
    "multi-label": ["red", "green", "blue"],
    "regression": ["value"],
    "tagging": ["O", "B-A", "I-A"],
    "question-answering": ["start", "end"],
}
FAMILIES = {"bert": "Electra", "modernbert": "ModernBert", "deberta": "DebertaV2"}
WINDOW = {"local_attention": 8, "layer_types": ["full_attention", "sliding_attention"]}
TEXTS = [text for text, _ in sentences(24)]
NAMES = {"README.md", "config.json", "model.onnx", "tokenizer.json", "tokenizer_config.json", "vocab.txt"}


def save_model(folder, vocab, kind="classification", architecture="bert", seed=0):
    """Saves a model of a `transformers` class with random weights."""
    save_encoder(folder, vocab, architecture, **(WINDOW if architecture == "modernbert" else {}))
    hf = TASK_TYPES[kind].hf
    labels = LABELS[kind]
    more = {"problem_type": hf.problem_type} if hf.problem_type else {}
    more |= {"classifier_pooling": "cls"} if architecture == "modernbert" else {}
    more |= {"pooler_hidden_act": "gelu"} if architecture == "deberta" else {}
    names = dict(enumerate(labels))
    config = transformers.AutoConfig.from_pretrained(
        folder, id2label=names, label2id={name: i for i, name in names.items()}, initializer_range=0.3, **more
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{FAMILIES[architecture]}For{hf.ending}")(config)
    model.save_pretrained(folder)
    if kind == "question-answering":  # for rows of 64 tokens
        path = folder / "config.json"
        settings = {"max_query_length": 16, "doc_stride": 16}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"electra_fast_settings": settings}))
    return folder, model.eval()


def examples_of(kind):
    pairs = [(text, other) for text, other in zip(TEXTS, TEXTS[1:], strict=False)]
    return pairs if kind == "question-answering" else TEXTS


def write_labeled(path, folder, kind):
    """Writes examples labeled with the model's predictions, so that the model scores 1."""
    rows = []
    for example, answer in zip(
        examples_of(kind), ef.load(folder, precision="fp32").predict(examples_of(kind)), strict=True
    ):
        if kind == "tagging":
            rows.append({"words": answer["words"], "tags": answer["tags"]})
        elif kind == "question-answering":
            question, context = example
            rows.append({"question": question, "context": context, "answers": {"text": [answer["answer"]]}})
        else:
            field = {"multi-label": "labels", "regression": "value"}.get(kind, "label")
            rows.append({"text": example, "label": answer[field]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def outputs_of(folder, inputs):
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_outputs()]
    feeds = {node.name: inputs[node.name].numpy() for node in session.get_inputs()}
    return dict(zip(names, session.run(names, feeds), strict=True))


def tokens_of(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer(TEXTS[:7], return_tensors="pt", padding=True, truncation=True, return_token_type_ids=True)


@pytest.fixture(autouse=True)
def short_measurement(monkeypatch):
    monkeypatch.setattr(export_module, "_TIMED_SECONDS", 0)


@pytest.fixture
def model(tiny_vocab, tmp_path):
    return save_model(tmp_path / "model", tiny_vocab)[0]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("kind", LABELS)
def test_outputs_equal_transformers(tiny_vocab, tmp_path, kind, architecture):
    folder, reference = save_model(tmp_path / "model", tiny_vocab, kind, architecture)
    result = ef.export(folder, out=tmp_path / "out", onnx=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} - {"special_tokens_map.json"} == NAMES
    tokens = tokens_of(tmp_path / "out")
    is_token = tokens["attention_mask"].bool().numpy()
    with torch.no_grad():
        inputs = dict(tokens) if architecture == "bert" else {**tokens, "token_type_ids": None}
        expected = reference(**{name: tensor for name, tensor in inputs.items() if tensor is not None})
    for name, values in outputs_of(tmp_path / "out", tokens).items():
        actual = values
        reference_values = expected[name].numpy()
        if actual.shape[:2] == is_token.shape:
            actual = actual[is_token]
            reference_values = reference_values[is_token]
        np.testing.assert_allclose(actual, reference_values, atol=1e-4 * np.abs(reference_values).max())
    assert [*result.models] == ["torch fp32", "onnx fp32"] and result.metric is None
    assert ef.load(tmp_path / "out").predict(examples_of(kind)[:3])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classification", "tagging"])
def test_published_head_on_modernbert(tiny_vocab, tmp_path, kind):
    """The head is one layer on the hidden states of the `transformers` encoder."""
    data = write_labeled(tmp_path / "data.jsonl", save_model(tmp_path / "model", tiny_vocab, kind)[0], kind)
    encoder = save_encoder(tmp_path / "encoder", tiny_vocab, "modernbert", **WINDOW)
    overrides = QUICK | {"finetune.head": "published", "finetune.learning_rate": "1e-2"}
    ef.finetune(encoder, task=kind, train=data, dev=data, out=tmp_path / "tasks", overrides=overrides)
    folder = tmp_path / "tasks" / kind / "seed-0" / "model"
    ef.export(folder, out=tmp_path / "out", onnx=True)
    tensors = load_file(folder / "model.safetensors")
    tokens = tokens_of(folder)
    with torch.no_grad():
        inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        hidden = transformers.AutoModel.from_pretrained(folder)(**inputs).last_hidden_state
    is_token = tokens["attention_mask"].bool().numpy()
    expected = (hidden @ tensors["classifier.weight"].T + tensors["classifier.bias"]).numpy()
    expected = expected[:, 0] if kind == "classification" else expected[is_token]
    (actual,) = outputs_of(tmp_path / "out", tokens).values()
    actual = actual if kind == "classification" else actual[is_token]
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", LABELS)
def test_int8_is_compared_with_source(tiny_vocab, tmp_path, kind):
    folder, _ = save_model(tmp_path / "model", tiny_vocab, kind)
    data = write_labeled(tmp_path / "data.jsonl", folder, kind)
    result = ef.export(folder, out=tmp_path / "out", onnx=True, int8=True, data=data, accept_loss=100)
    source, whole, small = (result.models[name] for name in ("torch fp32", "onnx fp32", "onnx int8"))
    assert source["score"] > 0.9 and source["agreement"] == whole["agreement"] == 1
    assert small["megabytes"] < 0.7 * whole["megabytes"] and small["agreement"] > 0.5
    if kind == "classification":  # computed directly with onnxruntime
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        golds = [json.loads(line)["label"] for line in data.read_text().splitlines()]
        logits = [outputs_of(tmp_path / "out", tokenizer(text, return_tensors="pt"))["logits"] for text in TEXTS]
        equal = np.mean(
            [LABELS[kind][text_logits.argmax()] == gold for text_logits, gold in zip(logits, golds, strict=True)]
        )
        # Exactly equal, since an int8 model reads one text per batch: activations have one scale per batch.
        assert small["score"] == small["agreement"] == equal
    card = (tmp_path / "out/README.md").read_text()
    assert all(line in card for line in result.table()) and "int8 per channel" in card
    assert json.loads((tmp_path / "out/config.json").read_text())["electra_fast_onnx"] == {"precision": "int8"}
    assert json.loads(result.to_json())["models"]["onnx int8"] == small


def test_loss_above_limit_is_refused(model, tmp_path, tiny_vocab, monkeypatch):
    data = write_labeled(tmp_path / "data.jsonl", model, "classification")
    out = tmp_path / "out"
    options = ["--onnx", "--out", out, "--data", data]
    assert in_process.run("export", model, *options).returncode == 0
    before = (out / "model.onnx").read_bytes()
    other, _ = save_model(tmp_path / "other", tiny_vocab, seed=1)
    ef.export(other, out=tmp_path / "worse", onnx=True)
    monkeypatch.setattr(export_module, "quantize", lambda _, target: shutil.copy(tmp_path / "worse/model.onnx", target))
    done = in_process.run("export", model, *options, "--int8")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "int8 loses" in done.stderr and "percentage points of accuracy, more than 1: 1.0000 in fp32" in done.stderr
    assert (out / "model.onnx").read_bytes() == before and not list(tmp_path.glob(".out*"))
    done = in_process.run("export", model, *options, "--int8", "--accept-loss", "100")
    assert done.returncode == 0 and "| onnx int8  | " in done.stdout
    assert (out / "model.onnx").read_bytes() != before


def test_wrong_graph_is_not_written(model, tmp_path, tiny_vocab, monkeypatch):
    other, _ = save_model(tmp_path / "other", tiny_vocab, seed=1)
    ef.export(other, out=tmp_path / "wrong", onnx=True)
    monkeypatch.setattr(
        torch.onnx, "export", lambda model, inputs, path, **_: shutil.copy(tmp_path / "wrong/model.onnx", path)
    )
    with pytest.raises(ElectraFastError, match="outputs of model.onnx in onnxruntime differ from torch by"):
        ef.export(model, out=tmp_path / "out", onnx=True)
    assert not (tmp_path / "out").exists()


def test_input_errors_are_one_line(model, tmp_path, encoder_folder):
    out = tmp_path / "out"

    def assert_refused(message, source=model, **options):
        with refused(message):
            ef.export(source, **{"out": out, "onnx": True} | options)
        assert not out.exists()

    assert_refused("is a Hugging Face folder already; add --onnx", onnx=False)
    assert_refused("--language: is for runs", language="hu")
    assert_refused("--unfinished: is for runs", unfinished=True)
    assert_refused("--int8: is for fine-tuned models", encoder_folder, int8=True)
    assert_refused("--accept-loss: is for --int8", accept_loss=3.0)
    assert_refused("--accept-loss = -1: must be", int8=True, accept_loss=-1)
    assert_refused("to evaluate int8 on; pass labeled examples with --data FILE", int8=True)
    assert_refused("s3://bucket/model: a fine-tuned model is exported to a local folder", out="s3://bucket/model")
    assert_refused("not empty and not an earlier export", out=model)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert_refused("empty.jsonl", int8=True, data=empty)
    unknown = tmp_path / "unknown.jsonl"
    unknown.write_text('{"text": "a class", "label": "purple"}\n')
    assert_refused("purple", int8=True, data=unknown)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"electra_fast_onnx": {"precision": "fp32"}}))
    assert_refused("is in ONNX already; pass the folder of the model")


def test_published_reader_is_refused(tiny_vocab, tmp_path):
    folder, _ = save_model(tmp_path / "model", tiny_vocab, "question-answering")
    config = json.loads((folder / "config.json").read_text()) | {"electra_fast_head": "published"}
    (folder / "config.json").write_text(json.dumps(config))
    with refused("searches between its layers, which an ONNX graph cannot; fine-tune with"):
        ef.export(folder, out=tmp_path / "out", onnx=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classification", "multi-label", "regression", "tagging", "question-answering"])
def test_comparison_uses_validation_set_of_finetune(tiny_vocab, tmp_path, kind):
    """By default, `export` compares on the validation set that `finetune` wrote."""
    folder, _ = save_model(tmp_path / "model", tiny_vocab, kind)
    encoder = save_encoder(tmp_path / "encoder", tiny_vocab)
    train = write_labeled(tmp_path / "train.jsonl", folder, kind)
    task = "classification" if kind == "multi-label" else kind
    overrides = QUICK | (
        {"finetune.sequence_length": "64", "finetune.max_query_length": "24"} if "question" in kind else {}
    )
    results = ef.finetune(encoder, task=task, train=train, dev=train, out=tmp_path / "tasks", overrides=overrides)
    trained = tmp_path / "tasks" / task / "seed-0" / "model"
    result = ef.export(trained, out=tmp_path / "out", onnx=True)
    assert result.data == str(tmp_path / "tasks" / task / "dev.jsonl") and result.examples == len(
        train.read_text().splitlines()
    )
    assert result.metric == results[task]["metric"]
    assert result.models["onnx fp32"]["score"] == pytest.approx(results[task]["median"], abs=1e-4)
