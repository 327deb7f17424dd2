"""`load` returns the right class for any folder; `encode` equals the pooled hidden states of `transformers`."""

import json
import pickle
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from test_encoder import hf_folder
from test_error_detection import save_run

import electra_fast as ef
from electra_fast.huggingface.export import export

TEXTS = ["The value of the expression isn't a name.", "", "name", "of the class " * 60, "a value, a class; the number"]
TEXTS += [" ".join(TEXTS[0].split()[:n]) for n in range(1, 8)]


@torch.no_grad()
def reference(folder, pooling="mean", length=None):
    """Returns vectors computed one text at a time, without padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    vectors = []
    for text in TEXTS:
        row = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
        hidden = model(**row).last_hidden_state[0]
        vectors.append((hidden.mean(0) if pooling == "mean" else hidden[0]).numpy())
    return np.stack(vectors)


@pytest.fixture(scope="module", params=["google", "modern", "deberta"])
def run_and_export(request, tmp_path_factory, tiny_vocab):
    folder = tmp_path_factory.mktemp(request.param)
    local = {"model.local_attention": "4"} if request.param == "modern" else {}
    run = save_run(folder / "run", tiny_vocab, recipe=request.param, **local)
    export(run, out=folder / "export", unfinished=True)
    return run, folder / "export"


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_equal_transformers(run_and_export, pooling, capsys):
    run, out = run_and_export
    expected = reference(out / "encoder", pooling)
    for source in (run, out, str(out / "encoder"), out / "discriminator"):
        model = ef.load(source)
        _ = capsys.readouterr()
        assert isinstance(model, ef.PretrainedModel)
        vectors = model.encode(iter(TEXTS), pooling=pooling)
        assert vectors.dtype == np.float32 and vectors.shape == expected.shape
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        stderr = capsys.readouterr().err
        assert stderr.count("encode: truncated 1 of 12 texts to ") == 1 and stderr.count("\n") == 1
        scaled = model.encode(pd.Series(TEXTS), pooling=pooling, normalize=True)
        np.testing.assert_allclose(scaled, vectors / np.linalg.norm(vectors, axis=1, keepdims=True), atol=1e-6)
        np.testing.assert_allclose(model.encode(TEXTS[0], pooling=pooling), vectors[0], atol=1e-5)
    assert np.abs(expected - expected.mean(0)).max() > 0.1


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "DistilBertModel", "DebertaV2Model"])
def test_foreign_encoders_equal_transformers(tmp_path, name, tiny_vocab, encoder_folder):
    types = {"type_vocab_size": 1} if name == "RobertaModel" else {}
    hf_folder(tmp_path, name, vocab_size=len(tiny_vocab.read_text().split("\n")), **types)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    for file in ("vocab.txt", "tokenizer_config.json"):
        shutil.copyfile(encoder_folder / file, tmp_path / file)
    model = ef.load(tmp_path)
    assert model.max_length == 64 - (name == "RobertaModel")
    np.testing.assert_allclose(model.encode(TEXTS), reference(tmp_path, length=model.max_length), atol=1e-5)
    with pytest.raises(ValueError, match="an encoder without a head"):
        model.model  # noqa: B018  # loads it


def test_finetuned_model_encodes(finetuned):
    folder = finetuned[0] / "sst2/seed-0/model"
    model = ef.load(folder)
    assert isinstance(model, ef.FinetunedModel) and model.max_length == 24
    before = model.predict(TEXTS)
    np.testing.assert_allclose(model.encode(TEXTS), reference(folder, length=24), atol=1e-5)
    assert model.predict(TEXTS) == before


def test_sentence_transformers_settings_are_used(encoder_folder, tmp_path):
    folder = shutil.copytree(encoder_folder, tmp_path / "saved")
    plain = ef.load(folder)

    def save(kinds, pooling, **more):
        modules = [{"path": kind, "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
        (folder / "Pooling").mkdir(exist_ok=True)
        for name, content in {"modules": modules, "Pooling/config": pooling, **more}.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return ef.load(folder).encode(TEXTS)

    three = ("Transformer", "Pooling", "Normalize")
    vectors = save(three, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    np.testing.assert_allclose(vectors, plain.encode(TEXTS, pooling="cls", normalize=True), atol=1e-6)
    vectors = save(three[:2], {"pooling_mode": "mean"}, sentence_bert_config={"max_seq_length": 8})
    np.testing.assert_allclose(vectors, reference(encoder_folder, length=8), atol=1e-5)
    prompts = {"prompts": {"q": "name: "}, "default_prompt_name": "q"}
    vectors = save(three[:2], {"pooling_mode": ["mean"]}, sentence_bert_config={}, config_sentence_transformers=prompts)
    np.testing.assert_allclose(vectors, plain.encode([f"name: {text}" for text in TEXTS]), atol=1e-5)
    for kinds, pooling in (((*three, "Dense"), {}), (three, {"pooling_mode": "max"}), (three, {"pooling_mode": []})):
        with pytest.raises(ValueError, match="use sentence-transformers"):
            save(kinds, pooling)


def test_empty_list_and_single_text(encoder_folder):
    model = ef.load(encoder_folder, device="cpu", precision="fp32")
    pattern = r"PretrainedModel: .*: bert, 2 layers of 32, 0\.\d\d M parameters without heads, up to 64 tokens, on cpu"
    assert re.fullmatch(pattern, repr(model))
    assert model.encode([]).shape == (0, 32) and model.encode("a name").shape == (32,)
    with pytest.raises(ef.InputError, match="pooling = 'max': must be one of mean, cls"):
        model.encode(["a"], pooling="max")


def test_model_can_be_pickled(run_and_export):
    model = ef.load(run_and_export[0])
    ids = torch.tensor([[2, 7, 3]])
    expected = model.encode(TEXTS), model.discriminator_logits(ids), model.detect(TEXTS)
    again = pickle.loads(pickle.dumps(model))
    actual = again.encode(TEXTS), again.discriminator_logits(ids), again.detect(TEXTS)
    assert np.array_equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1]) and actual[2] == expected[2]
    assert torch.equal(model.generator_logits(ids), model.model.generator_logits(ids)) and model.config.model.num_layers


def test_load_errors_are_one_line(finetuned, encoder_folder, tmp_path):
    out = finetuned[0]
    for folder in (out, out / "sst2", out / "sst2/seed-0"):
        inside = re.escape(str(out / "sst2/seed-0/model"))
        with pytest.raises(ef.InputError, match=rf"^{folder}: contains models; pass one of them: .*{inside}.*$"):
            ef.load(folder)
    for source in (encoder_folder, out / "sst2/seed-0/model"):
        with pytest.raises(ef.InputError, match="device = 'gpu': must be auto, cpu, cuda or cuda:N"):
            ef.load(source, device="gpu")
        with pytest.raises(ef.InputError, match="precision = 'half': must be one of auto, fp32, fp16, bf16"):
            ef.load(source, precision="half")
    for folder, message in {tmp_path / "none": "no such folder", tmp_path: "no model here"}.items():
        with pytest.raises(FileNotFoundError, match=message):
            ef.load(folder)
