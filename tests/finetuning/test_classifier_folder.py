"""Fine-tuned folders have equal outputs in `transformers` and with `load`."""

import json
import os
import shutil
import signal
import threading
import warnings
from decimal import Decimal
from pathlib import Path

import in_process
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.torch import load_file
from sklearn.metrics import f1_score
from test_pair_templates import save_tokenizer
from tiny_reading import flags as settings
from tiny_task import QUICK, save_encoder, sentences, write_mrpc, write_sst2, write_stsb
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DebertaV2ForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    ModernBertConfig,
    RobertaConfig,
    RobertaModel,
    pipeline,
)

import electra_fast as ef
from electra_fast.errors import InputError
from electra_fast.finetuning.finetuned_model import FinetunedModel

SENTENCES = ["The class of a value", "false", "A method with a list of names, and more than that", ""]
PAIRS = [("The class", "a value of it"), ("false", "true"), ("An object and a list", "")]


@pytest.fixture(scope="module", params=["bert", "modernbert", "deberta"])
def encoder(request, tmp_path_factory, tiny_vocab):
    return save_encoder(tmp_path_factory.mktemp("encoder"), tiny_vocab, request.param)


@pytest.fixture(scope="module")
def sst2(encoder, tmp_path_factory):
    """A model fine-tuned on single sentences."""
    return trained("sst2", encoder, tmp_path_factory.mktemp("sst2"), write_sst2)


def trained(task, encoder, out, write, **changes):
    overrides = QUICK | {"finetune.learning_rate": "1e-3"} | changes
    ef.finetune(encoder, task=task, glue=write(out / "data"), out=out / "out", overrides=overrides)
    return out / "out" / task / "seed-0" / "model"


def hf_logits(folder, examples):
    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    columns = [list(column) for column in zip(*examples, strict=True)] if isinstance(examples[0], tuple) else [examples]
    with torch.no_grad():
        return model.eval()(**tokenizer(*columns, return_tensors="pt", padding=True)).logits.numpy()


def test_outputs_equal_transformers(sst2):
    """Special tokens in a text are read as text by both; long texts are truncated at the same token."""
    texts = [*SENTENCES, "a [SEP] b", "[CLS]", "the [MASK] of a class"]
    model = ef.load(sst2)
    np.testing.assert_allclose(model.outputs(texts), hf_logits(sst2, texts), atol=1e-5)
    texts.append(" ".join(["class value name"] * 30))
    classify = pipeline("text-classification", str(sst2), device="cpu", truncation=True)
    for answer, expected in zip(model.predict(texts), classify(texts), strict=True):
        assert answer["label"] == expected["label"]
        assert answer["scores"][expected["label"]] == pytest.approx(expected["score"], abs=1e-5)


@pytest.mark.parametrize(("architecture", "layer"), [("bert", "classifier"), ("deberta", "pooler")])
def test_published_head_is_converted_to_transformers_class(tiny_vocab, tmp_path, architecture, layer):
    """Since gelu(z) - gelu(-z) = z, a head with another layer can compute the published head."""
    encoder = save_encoder(tmp_path / "encoder", tiny_vocab, architecture)
    folder = trained("mrpc", encoder, tmp_path, write_mrpc, **{"finetune.head": "published"})
    np.testing.assert_allclose(ef.load(folder).outputs(PAIRS), hf_logits(folder, PAIRS), atol=1e-5)
    weight = load_file(folder / "model.safetensors")[f"{layer}.dense.weight"]
    assert torch.equal(weight[0], -weight[2]) and not weight[4:].any()
    assert "raw" not in (folder / "README.md").read_text() and "## Head" in (folder / "README.md").read_text()


def test_code_in_model_card_computes_logits(tmp_path, tiny_vocab):
    encoder = save_encoder(tmp_path / "encoder", tiny_vocab, "modernbert")
    folder = trained("sst2", encoder, tmp_path, write_sst2, **{"finetune.head": "published"})
    card = (folder / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace("path/to/this/folder", str(folder))
    namespace = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(code, namespace)
    with torch.no_grad():
        expected = namespace["logits"].detach().numpy()
        np.testing.assert_allclose(ef.load(folder).outputs(["a text"]), expected, atol=1e-5)
    assert AutoModel.from_pretrained(folder).config.electra_fast_head == "published"
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"published"', '"google"'))  # its name in earlier versions
    np.testing.assert_allclose(ef.load(folder).outputs(["a text"]), expected, atol=1e-5)


def test_roberta_pairs_equal_transformers(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"vocab_size": 320, "max_position_embeddings": 66, "type_vocab_size": 1}
    RobertaModel(RobertaConfig(**sizes, initializer_range=0.2)).save_pretrained(tmp_path / "encoder")
    save_tokenizer(tmp_path / "encoder", "RoBERTa")
    folder = trained("mrpc", tmp_path / "encoder", tmp_path, write_mrpc)
    np.testing.assert_allclose(ef.load(folder).outputs(PAIRS), hf_logits(folder, PAIRS), atol=1e-5)


def test_regression_predicts_in_data_units(encoder_folder, tmp_path):
    folder = trained("stsb", encoder_folder, tmp_path, write_stsb)
    model = ef.load(folder)
    np.testing.assert_allclose(model.outputs(PAIRS), hf_logits(folder, PAIRS), atol=1e-4)
    values = [answer["value"] for answer in model.predict(PAIRS)]
    assert values == pytest.approx(hf_logits(folder, PAIRS)[:, 0].tolist(), abs=1e-4)
    lines = (folder.parent / "predictions.dev.tsv").read_text().splitlines()[1:]
    rows = [line.split("\t") for line in (tmp_path / "data" / "dev.tsv").read_text().splitlines()[1:]]
    again = [answer["value"] for answer in model.predict([(row[1], row[2]) for row in rows])]
    assert [float(line.split("\t")[1]) for line in lines] == pytest.approx(np.clip(again, 0, 5), abs=1e-3)


def test_multi_label(encoder_folder, tmp_path, write_rows):
    rows = [{"text": f"value {i}", "labels": [["a"], ["b", "c"], [], ["a", "c"]][i % 4]} for i in range(80)]
    other = write_rows([row | {"text": f"{row['text']} of"} for row in rows], "train.jsonl")
    dev = write_rows(rows, "dev.jsonl")
    out = tmp_path / "out"
    overrides = QUICK | {"finetune.class_weights": "c=2"}
    results = ef.finetune(encoder_folder, task="classification", train=other, dev=dev, out=out, overrides=overrides)
    folder = out / "classification" / "seed-0" / "model"
    config = json.loads((folder / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert list(config["id2label"].values()) == ["a", "b", "c"]
    (run,) = results["classification"]["runs"]
    thresholds = config["electra_fast_settings"]["thresholds"]
    assert thresholds == run["thresholds"] and len({0.5, *thresholds.values()}) == 4
    model = ef.load(folder, precision="fp32")
    probabilities = 1 / (1 + np.exp(-hf_logits(folder, SENTENCES)))
    for answer, row in zip(model.predict(SENTENCES), probabilities, strict=True):
        assert list(answer["scores"].values()) == pytest.approx(row.tolist(), abs=1e-5)
        assert answer["labels"] == [label for label, score in answer["scores"].items() if score > thresholds[label]]
    assert all(answer["labels"] == ["a", "b", "c"] for answer in model.predict(SENTENCES, threshold=0.0))
    truth = np.array([[label in row["labels"] for label in "abc"] for row in rows])
    texts = [row["text"] for row in rows]
    for scores, answers in (("", model.predict(texts)), ("_at_half", model.predict(texts, threshold=0.5))):
        chosen = np.array([[label in answer["labels"] for label in "abc"] for answer in answers])
        for average in ("micro", "macro"):
            expected = f1_score(truth, chosen, average=average, zero_division=0)
            assert run[f"f1_{average}{scores}"] == pytest.approx(expected)
    written = (folder.parent / "predictions.dev.jsonl").read_text().splitlines()
    assert [json.loads(line)["labels"] for line in written] == [answer["labels"] for answer in model.predict(texts)]


def test_thresholds_follow_changed_validation_set(encoder_folder, tmp_path):
    rows = [{"text": f"value {i} of it", "labels": [["a"], ["b", "c"], [], ["a", "c"]][i % 4]} for i in range(120)]
    options = {"model": encoder_folder, "out": tmp_path, "overrides": QUICK, "train": rows[:40], "test": rows[80:]}
    results = [ef.finetune(task="classification", dev=dev, **options) for dev in (rows[40:80], rows[40:60])]
    first, second = (result["classification"]["runs"][0]["thresholds"] for result in results)
    folder = tmp_path / "classification" / "seed-0"
    settings = json.loads((folder / "model" / "config.json").read_text())["electra_fast_settings"]
    assert settings["thresholds"] == second != first
    answers = ef.load(folder / "model", precision="fp32").predict(rows[80:])
    written = (folder / "predictions.test.jsonl").read_text().splitlines()
    assert [json.loads(line)["labels"] for line in written] == [answer["labels"] for answer in answers]


@pytest.mark.parametrize(
    ("architecture", "head"),
    [("bert", "published"), pytest.param("modernbert", "transformers", marks=pytest.mark.slow)],
)
def test_temperature_is_stored_in_weights(tmp_path, tiny_vocab, architecture, head):
    encoder = save_encoder(tmp_path / "encoder", tiny_vocab, architecture)
    outputs = []
    answers = []
    for name in ("false", "true"):
        changes = {"finetune.head": head, "finetune.calibrate": name}
        folder = trained("sst2", encoder, tmp_path / name, write_sst2, **changes)
        model = ef.load(folder, precision="fp32")
        outputs.append(model.outputs(SENTENCES))
        answers.append([answer["label"] for answer in model.predict(SENTENCES)])
    temperature = json.loads((folder.parent / "result.json").read_text())["temperature"]
    assert abs(temperature - 1) > 0.1 and answers[0] == answers[1]
    np.testing.assert_allclose(outputs[1], outputs[0] / temperature, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(outputs[1], hf_logits(folder, SENTENCES), atol=1e-4)
    assert f"logits divided by {temperature:.4g}, the temperature" in (folder / "README.md").read_text()


def test_top_k_limits_scores(sst2):
    model = ef.load(sst2)
    for whole, best in zip(model.predict(SENTENCES), model.predict(SENTENCES, top_k=1), strict=True):
        assert best == {"label": whole["label"], "scores": {whole["label"]: max(whole["scores"].values())}}
    ranked = [[*answer["scores"].values()] for answer in model.predict(SENTENCES, top_k=500)]
    assert ranked == [sorted(scores, reverse=True) for scores in ranked]
    with pytest.raises(InputError, match="--threshold: is not for classification"):
        model.predict(SENTENCES, threshold=0.3)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, tiny_vocab):
    """An untrained classifier of `transformers` whose folder has the text columns `body` and `note`."""
    folder = save_encoder(tmp_path_factory.mktemp("classifier"), tiny_vocab)  # for its tokenizer
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    size = len(tiny_vocab.read_text().splitlines())
    model = ElectraForSequenceClassification(ElectraConfig(vocab_size=size, num_labels=3, **sizes))
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"electra_fast_text_columns": [["body"], ["note"]]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_foreign_classifier_predicts(classifier, tmp_path):
    model = ef.load(classifier)
    np.testing.assert_allclose(model.outputs(PAIRS), hf_logits(classifier, PAIRS), atol=1e-5)
    assert model.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    folder = shutil.copytree(classifier, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["id2label"], config["label2id"]
    (folder / "config.json").write_text(json.dumps(config | {"num_labels": 3}))
    assert ef.load(folder).labels == model.labels


def test_foreign_deberta_classifier_predicts(tmp_path, tiny_vocab):
    folder = save_encoder(tmp_path, tiny_vocab, "deberta")
    config = AutoConfig.from_pretrained(folder, num_labels=3)
    for activation in ("gelu", "tanh"):
        config.pooler_hidden_act = activation
        DebertaV2ForSequenceClassification(config).save_pretrained(folder)
        if activation == "gelu":
            np.testing.assert_allclose(ef.load(folder).outputs(PAIRS), hf_logits(folder, PAIRS), atol=1e-5)
    with pytest.raises(InputError, match="pooler_hidden_act = 'tanh': must be "):
        ef.load(folder)


@pytest.mark.parametrize("form", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_unsupported_head_settings_are_refused(tmp_path, form):
    """A bias of the dense layer, another activation, and tensors that config.json does not mention."""
    config = ModernBertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    config.vocab_size = 64
    path = tmp_path / "config.json"
    for changes in ({"classifier_activation": "tanh"}, {"classifier_bias": True}):
        config.update({"pad_token_id": 0, "classifier_activation": "gelu"} | changes)
        getattr(transformers, f"ModernBertFor{form}")(config).save_pretrained(tmp_path)
        ((name, value),) = changes.items()
        with pytest.raises(InputError, match=f"{path}: {name} = {value!r}: must be "):
            ef.load(tmp_path)
    path.write_text(path.read_text().replace('"classifier_bias": true', '"classifier_bias": false'))
    with pytest.raises(
        InputError, match="tensor head.dense.bias does not belong to the head that config.json describes"
    ):
        ef.load(tmp_path)


def test_predict_streams_in_input_order(classifier, tmp_path):
    """Output to standard output, through a link to a file, and to a device."""
    expected = ef.load(classifier).predict(SENTENCES)
    (tmp_path / "lines.txt").write_text("\n".join(SENTENCES[:3]) + "\n\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in SENTENCES))
    quoted = "".join(f'{i},"{text}"\n' for i, text in enumerate(SENTENCES))
    (tmp_path / "rows.csv").write_text("id,words\n" + quoted)
    (tmp_path / "bare.csv").write_text(quoted)
    bare = ["--no-header", "--text", "1"]
    for name, flags in {"lines.txt": [], "rows.jsonl": [], "rows.csv": ["--text", "words"], "bare.csv": bare}.items():
        run = in_process.run("predict", classifier, tmp_path / name, *flags)
        assert run.returncode == 0, run.stderr
        answers = [json.loads(line) for line in run.stdout.splitlines()]
        ids = [answer.pop({"rows.csv": "id", "bare.csv": "0"}.get(name), None) for answer in answers]
        assert ids == (list("0123") if name.endswith(".csv") else [None] * 4)
        assert answers == expected
    (tmp_path / "link").symlink_to(tmp_path / "answers.jsonl")
    for out in (tmp_path / "link", "/dev/null"):
        assert in_process.run("predict", classifier, tmp_path / "lines.txt", "--out", out).returncode == 0
    assert (tmp_path / "link").is_symlink() and not Path("/dev/null").is_file()
    assert [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()] == expected


@pytest.mark.parametrize(
    ("name", "content", "flags", "message"),
    [
        ("rows.tsv", "a\tb\nx\ty\n", [], "no text column 'body' or 'note', as in training; available columns: a, b"),
        ("rows.tsv", "a\tb\nx\ty\n", ["--text", "c"], "no column 'c'; available columns: a, b"),
        ("rows.tsv", "body\tb\n", [], "no rows"),
        ("rows.txt", "", [], "no rows"),
        ("rows.csv", "body,a;b\nx,y;z\n", [], "choose it with --delimiter"),
        ("rows.csv", "body,a\nx,1\ny\nz,2,3\n", ["--skip-bad-rows", "1"], "line 4: found 3 fields"),
        ("rows.jsonl", '{"body": null}\n', [], "line 1: body = null: must be text"),
        ("rows.doc", "x", [], "unknown extension"),
        ("rows.txt", "a\n", ["--top-k", "0"], "top_k = 0: must be at least 1"),
    ],
)
def test_predict_reports_input_error_in_one_line(classifier, tmp_path, name, content, flags, message):
    (tmp_path / name).write_text(content)
    run = in_process.run("predict", classifier, tmp_path / name, "--out", tmp_path / "answers.jsonl", *flags)
    assert run.returncode == 2 and len(run.stderr.splitlines()) == 1 and message in run.stderr
    assert not list(tmp_path.glob("*answers*"))


def test_finetuned_model_is_finetuned_again(sst2, glue_folder, tmp_path):
    results = ef.finetune(sst2, task="mrpc", glue=glue_folder, out=tmp_path / "again", overrides=QUICK)
    assert results["mrpc"]["runs"][0]["seed"] == 0


def test_predict_uses_columns_of_training(encoder_folder, tmp_path):
    texts = [text for text, _ in sentences(40)]
    rows = "".join(f"{text};title {i};{'ab'[i % 2]}\n" for i, text in enumerate(texts))
    (tmp_path / "train.csv").write_text(f"body;text;label\n{rows}")
    run = in_process.run(
        *("finetune", encoder_folder, "--task", "classification", "--train", tmp_path / "train.csv", "--text", "body"),
        *("--out", tmp_path / "out", *settings(QUICK)),
    )
    assert run.returncode == 0 and "are separated by semicolons" in run.stderr, run.stderr
    folder = tmp_path / "out/classification/seed-0/model"
    lines = in_process.run("predict", folder, tmp_path / "train.csv").stdout.splitlines()
    assert ef.predict(folder, tmp_path / "train.csv") == [json.loads(line) for line in lines]
    assert ef.predict(folder, tmp_path / "train.csv", out=tmp_path / "answers.jsonl") is None
    assert (tmp_path / "answers.jsonl").read_text().splitlines() == lines
    assert [len(prediction["scores"]) for prediction in ef.predict(folder, tmp_path / "train.csv", top_k=1)] == [
        1
    ] * len(lines)
    with pytest.raises(InputError, match="--n-best: is not for classification"):
        ef.predict(folder, tmp_path / "train.csv", n_best=2)
    for number, (line, answer) in enumerate(zip(lines, ef.load(folder).predict(texts), strict=True)):
        assert json.loads(line) == {"text": f"title {number}"} | answer | {"input": {"label": "ab"[number % 2]}}


def test_other_columns_of_any_type_pass_through(classifier, tmp_path):
    times = pa.array([0, None], pa.timestamp("ns"))
    columns = {"body": ["a", "b"], "id": [7, 8], "when": times, "raw": [b"\xff", None], "cost": [Decimal("1.10"), None]}
    columns |= {"x": [float("nan"), 0.5], "label": ["gold", None], "input": [[1.0], None], "kind": [{"a": 1}, None]}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    run = in_process.run("predict", classifier, tmp_path / "rows.parquet")
    answers = [json.loads(line, parse_constant=pytest.fail) for line in run.stdout.splitlines()]
    for answer, prediction in zip(answers, ef.load(classifier).predict(["a", "b"]), strict=True):
        assert {name: answer.pop(name) for name in prediction} == prediction
    first = {"id": 7, "when": "1970-01-01T00:00:00", "raw": "/w==", "cost": "1.10", "x": None, "kind": {"a": 1}}
    second = {"id": 8, "when": None, "raw": None, "cost": None, "x": 0.5, "kind": None}
    assert answers == [
        first | {"input": {"label": "gold", "input": [1.0]}},
        second | {"input": {"label": None, "input": None}},
    ]


def test_predict_with_other_columns_and_bad_rows(classifier, tmp_path):
    (prediction,) = ef.load(classifier).predict(["a"])
    for name, content, flags, message in (
        ("rows.csv", "text\na\n", ["--text", "text"], ""),
        ("lines.txt", "a\n", [], ""),
        ("dev.csv", "note,text\na,b\n", [], ""),
        ("rows.jsonl", '{"body": null}\n{"body": "a"}\n[1]\n', ["--skip-bad-rows", "2"], "2 bad rows are left out: "),
        ("empty.jsonl", '{"body": "a"}\n\n{"body": " "}\n', [], "line 3: the first of 1 examples with empty text"),
    ):
        (tmp_path / name).write_text(content)
        run = in_process.run("predict", classifier, tmp_path / name, *flags)
        first = json.loads(run.stdout.splitlines()[0])
        assert run.returncode == 0 and message in run.stderr
        assert {name: first[name] for name in prediction} == prediction
        if "2 bad rows" in message:
            assert "line 1: body = null" in run.stderr and "line 3: not a JSON object" in run.stderr


def test_pipe_is_answered_line_by_line(classifier):
    """Each line is answered before the next one is written; Ctrl-C follows."""
    lines, write = os.pipe()
    read, answers = os.pipe()
    received = []

    def ask():
        os.write(write, b"id|body\n")
        for number in range(3):
            os.write(write, f"{number}|text\n".encode())
            received.append(json.loads(os.read(read, 1 << 16)))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=ask)
    thread.start()
    out = ("--format", "csv", "--out", f"/dev/fd/{answers}")
    run = in_process.run("predict", classifier, f"/dev/fd/{lines}", *out)
    os.close(answers)
    thread.join()
    for pipe in (lines, write, read):
        os.close(pipe)
    assert run.returncode == 130 and "interrupted; " in run.stderr and "3 predictions" in run.stderr
    assert [answer["id"] for answer in received] == ["0", "1", "2"]


def test_unusable_folders_and_texts_are_refused(finetuned, encoder_folder, tmp_path):
    BertConfig(architectures=["BertForSequenceClassification"]).save_pretrained(tmp_path)
    for folder, error, message in (
        (encoder_folder, InputError, "not a fine-tuned model .*electra-fast finetune "),
        (
            tmp_path,
            InputError,
            "model_type = 'bert': a fine-tuned model must be one of electra, modernbert, deberta-v2",
        ),
        ("nowhere", FileNotFoundError, "no such folder; pass a fine-tuned model"),
    ):
        with pytest.raises(error, match=message):
            FinetunedModel(folder)
    model = ef.load(finetuned[0] / "sst2/seed-0/model")
    for texts, message in {
        "a text": "put a single example into a list",
        ("a", 3): "example 1 = 3: must be a text",
        (("a", "b"),): "example 0: expected one text for this model, got 2 texts",
    }.items():
        with pytest.raises(InputError, match=message):
            model.predict(texts)
    assert model.predict([]) == [] and model.outputs([]).shape == (0, 2)
    (tmp_path / "lines.txt").write_text("a text\n")
    one, pair = (finetuned[0] / task / "seed-0/model" for task in ("sst2", "mrpc"))
    for model, more, message in (
        (pair, [], "text: the model reads a pair of texts"),
        (one, ["--out", tmp_path], "--out must be a file in an existing folder"),
        (one, ["--out", tmp_path / "missing" / "x.jsonl"], "--out must be a file in an existing folder"),
    ):
        run = in_process.run("predict", model, tmp_path / "lines.txt", *more)
        assert run.returncode == 2 and message in run.stderr
