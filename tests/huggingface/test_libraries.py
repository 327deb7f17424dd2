"""Exports of all architectures in the libraries of their users, and folders saved by these libraries read here.

Libraries that no other test needs are imported inside tests, since every worker imports every test file.
"""

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import in_process
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_encoder import Bare
from test_export import make_run
from torch import Tensor

import electra_fast as ef
from electra_fast.data.corpus import Tokenizer
from electra_fast.errors import ElectraFastError
from electra_fast.huggingface.encoder import load_encoder
from electra_fast.huggingface.export import export, import_
from electra_fast.huggingface.folder import read_model
from electra_fast.huggingface.onnx import write_onnx
from electra_fast.model.attention import AttentionMask

pytestmark = pytest.mark.slow

TEXTS = ["The cats sat", "w1 w2 w3 cat w4", "w5", "the w6 sat w7 w8 w9 the cats"]
PAIRS = [("w1 the cat", "cats sat"), ("w2", "w3 w4 w5 w6"), ("the", "w7"), ("w8 w9", "w1")]
RECIPES = {
    "bert": ("google", {"data.packing": "best-fit", "model.embedding_size": 16, "model.hidden_size": 32}),
    "modernbert": ("modern", {"model.hidden_size": 32, "model.local_attention": 4, "model.global_attention_every": 2}),
    "deberta": ("deberta", {"model.hidden_size": 32, "model.embedding_size": 32, "model.position_buckets": 8}),
}
Export = tuple[str, Path]


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    """Keeps sentence-transformers from asking the hub, which it does even for folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module", params=["bert", "modernbert", "deberta"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Returns architecture and folder of an export; token type 1 of the first never occurred in training."""
    folder = tmp_path_factory.mktemp(request.param)
    make_run(folder / "run", *RECIPES[request.param])
    export(folder / "run", out=folder / "out")
    return request.param, folder / "out"


def tokenized(folder: Path, *texts: list[str]) -> dict[str, Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return dict(tokenizer(*texts, padding=True, return_tensors="pt"))


@torch.no_grad()
def assert_read_back(folder: Path, base: Any, before: Path) -> None:
    """Checks that a folder saved by another library has its hidden states here, and the same vocabulary."""
    encoder = load_encoder(folder)
    batch = tokenized(before, *map(list, zip(*PAIRS, strict=True)))
    ids = batch["input_ids"]
    mask = batch["attention_mask"]
    num_rows, length = ids.shape
    padded = AttentionMask.padded(num_rows, length, mask, encoder.shape.local_attention)
    hidden = Bare(encoder)(ids, (torch.arange(length) * mask).flatten(), padded, batch.get("token_type_ids"))
    expected = base.eval()(**batch).last_hidden_state
    assert (hidden - expected)[mask.bool()].abs().max() <= 1e-5
    assert Tokenizer(encoder.tokenizer).content_hash == Tokenizer(before).content_hash
    changed = encoder.state.keys() - {
        n for n, tensor in load_encoder(before).state.items() if encoder.state[n].equal(tensor)
    }
    assert changed  # training changed it


def steps(parameters: Any, loss: Callable[[], Tensor]) -> None:
    """Takes a few steps, which lower a loss."""
    optimizer = torch.optim.AdamW([parameter for parameter in parameters if parameter.requires_grad], lr=1e-2)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_auto_classes_load_with_any_number_of_labels(exported: Export, task: str) -> None:
    architecture, out = exported
    numbers = [{}] if task == "QuestionAnswering" else [{"num_labels": 2}, {"num_labels": 3}]
    folders = [(out / "encoder", number) for number in numbers]
    if architecture == "modernbert" and task != "QuestionAnswering":
        folders.append((out / "discriminator", {"num_labels": 2}))
    encoder = transformers.AutoModel.from_pretrained(out / "encoder").state_dict()
    for folder, number in folders:
        name = f"AutoModelFor{task}"
        model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True, **number)
        assert not info["unexpected_keys"] and not info["mismatched_keys"]
        assert bool(info["missing_keys"]) == (folder.name == "encoder")
        assert all(name.startswith(("classifier.", "head.", "pooler.", "qa_outputs.")) for name in info["missing_keys"])
        state = model.base_model.state_dict()
        assert state.keys() == encoder.keys() and all(state[name].equal(encoder[name]) for name in encoder)
        if number:
            assert model(**tokenized(folder, TEXTS)).logits.shape[-1] == number["num_labels"]


def test_pipelines(exported: Export) -> None:
    architecture, out = exported
    model = read_model(out)
    folder = {name: str(out / name) for name in ("encoder", "generator", "discriminator")}
    if architecture != "deberta":  # `transformers` lacks its decoder
        best = transformers.pipeline("fill-mask", folder["generator"])("the [MASK] sat", top_k=3)
        batch = tokenized(out / "generator", ["the [MASK] sat"])
        with torch.no_grad():
            likeliest = model.generator_logits(batch["input_ids"])[0, 2].softmax(-1).topk(3)
        assert [item["token"] for item in best] == likeliest.indices.tolist()
        assert [item["score"] for item in best] == pytest.approx(likeliest.values.tolist(), abs=1e-5)

    (features,) = transformers.pipeline("feature-extraction", folder["encoder"])(TEXTS[0])
    encoder = transformers.AutoModel.from_pretrained(folder["discriminator"])
    with torch.no_grad():
        expected = encoder(**tokenized(out / "encoder", [TEXTS[0]]))
    np.testing.assert_allclose(features, expected.last_hidden_state[0].numpy(), atol=1e-6)

    if architecture == "modernbert":  # there is none for ElectraForPreTraining
        labels = transformers.pipeline("token-classification", folder["discriminator"], ignore_labels=[])(TEXTS[1])
        with torch.no_grad():
            ids = tokenized(out / "discriminator", [TEXTS[1]])["input_ids"]
            replaced = model.discriminator_logits(ids)[0, 1:-1].sigmoid().tolist()
        assert [item["entity"] for item in labels] == ["replaced" if p > 0.5 else "original" for p in replaced]
        assert [item["score"] for item in labels] == pytest.approx([max(p, 1 - p) for p in replaced], abs=1e-5)
        assert max(replaced) - min(replaced) > 0.1


def test_trainer(exported: Export, tmp_path: Path) -> None:
    """The text pairs train token type 1, although the export's config.json records it as untrained."""
    architecture, out = exported
    batch = tokenized(out / "encoder", *map(list, zip(*PAIRS, strict=True)))
    rows = [{name: item[i] for name, item in batch.items()} | {"labels": i % 2} for i in range(len(PAIRS))]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out / "encoder", num_labels=2)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=6, learning_rate=1e-2, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "encoder")
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    losses = [item["loss"] for item in trainer.state.log_history if "loss" in item]
    assert losses[-1] < losses[0]
    trainer.save_model(str(tmp_path / "saved"))
    assert_read_back(tmp_path / "saved", model.base_model, out / "encoder")
    if architecture == "bert":
        model.base_model.save_pretrained(tmp_path / "pair" / "generator")  # to continue its pre-training, and export it
        tokenizer.save_pretrained(tmp_path / "pair" / "generator")
        import_(tmp_path / "pair", out=tmp_path / "run")
        export(tmp_path / "run", out=tmp_path / "again")
        assert_read_back(tmp_path / "again", model.base_model, out / "encoder")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # raised in peft
def test_peft_lora(exported: Export, tmp_path: Path) -> None:
    import peft

    _, out = exported
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out / "encoder", num_labels=3)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear"))
    batch = tokenized(out / "encoder", TEXTS)
    steps(adapted.parameters(), lambda: adapted(**batch, labels=torch.tensor([0, 1, 2, 0])).loss)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    transformers.AutoTokenizer.from_pretrained(out / "encoder").save_pretrained(tmp_path / "merged")
    assert_read_back(tmp_path / "merged", merged.base_model, out / "encoder")


def test_sentence_transformers_embeddings(exported: Export, tmp_path: Path) -> None:
    import sentence_transformers
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    _, out = exported
    model = sentence_transformers.SentenceTransformer(str(out / "encoder"), device="cpu")
    assert model[1].pooling_mode == "mean"
    loss = MultipleNegativesRankingLoss(model)
    columns = [model.preprocess(list(column)) for column in zip(*PAIRS, strict=True)]
    steps(model.parameters(), lambda: loss([dict(column) for column in columns], None))
    model.save_pretrained(str(tmp_path / "saved"))
    reloaded = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_array_equal(reloaded.encode(TEXTS), model.encode(TEXTS))
    assert_read_back(tmp_path / "saved", model[0].auto_model, out / "encoder")


def test_encode_equals_sentence_transformers(exported: Export, tmp_path: Path) -> None:
    """For an export, a model fine-tuned elsewhere, and a folder that the library saved with another pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    architecture, out = exported
    texts = [*TEXTS, "", "w3 " * 300, "the cats sat, w9. " * 4]
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(out / "encoder", num_labels=2)
    classifier.save_pretrained(tmp_path / "tuned")
    transformers.AutoTokenizer.from_pretrained(out / "encoder").save_pretrained(tmp_path / "tuned")
    encoder = Transformer(str(out / "encoder"), max_seq_length=16)
    theirs = SentenceTransformer(modules=[encoder, Pooling(32, "cls"), Normalize()], device="cpu")
    theirs.save_pretrained(str(tmp_path / "saved"))
    np.testing.assert_allclose(ef.load(tmp_path / "saved").encode(texts), theirs.encode(texts), atol=1e-5)
    for folder, pooling in itertools.product((out / "encoder", tmp_path / "tuned"), ("mean", "cls")):
        theirs = SentenceTransformer(modules=[Transformer(str(folder)), Pooling(32, pooling)], device="cpu")
        for normalize in (False, True):
            vectors = ef.load(folder).encode(texts, pooling=pooling, normalize=normalize)
            np.testing.assert_allclose(vectors, theirs.encode(texts, normalize_embeddings=normalize), atol=1e-5)


def test_sentence_transformers_cross_encoder(exported: Export, tmp_path: Path) -> None:
    import sentence_transformers

    _, out = exported
    model = sentence_transformers.CrossEncoder(str(out / "encoder"), num_labels=1, device="cpu")
    batch = model.preprocess(PAIRS)
    targets = torch.tensor([1.0, 0.0, 1.0, 0.0])
    score = torch.nn.functional.binary_cross_entropy_with_logits
    steps(model.parameters(), lambda: score(model(dict(batch))["scores"].flatten(), targets))
    model.save_pretrained(str(tmp_path / "saved"))
    reloaded = sentence_transformers.CrossEncoder(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_array_equal(reloaded.predict(PAIRS), model.predict(PAIRS))
    assert_read_back(tmp_path / "saved", model[0].auto_model.base_model, out / "encoder")


def test_code_in_cards_runs(exported: Export) -> None:
    architecture, out = exported
    shape = {"encoder": 2, "discriminator": 1, "generator": 1}
    for folder in out.iterdir():
        blocks = re.findall("```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
        assert len(blocks) == shape[folder.name]
        names: dict[str, Any] = {}
        for block in blocks:
            exec(block.replace("path/to/this/folder", str(folder)), names)
        if folder.name == "encoder":
            assert names["vectors"].shape == (2, 32)
        elif folder.name == "generator":
            assert len(names["candidates"]) == 5
        elif architecture == "modernbert":
            assert {item["entity"] for item in names["results"]} <= {"original", "replaced"}
        elif architecture == "deberta":
            assert [len(item["words"]) for item in names["results"]] == [7]
        else:
            assert all(0 <= probability <= 1 for probability in names["probabilities"])


def assert_onnx_agrees(folder: Path, output: str, hf_model: Any) -> None:
    """Compares tokens in batches of other sizes and lengths than the exporter saw; a local window is 4 tokens."""
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    inputs = transformers.AutoTokenizer.from_pretrained(folder).model_input_names
    assert {item.name: item.shape for item in session.get_inputs()} == dict.fromkeys(inputs, ["batch", "sequence"])
    for length in (1, 3, 41):
        ids = torch.randint(5, 200, (3, length), generator=torch.Generator().manual_seed(1))
        mask = (torch.arange(length) < torch.tensor([[length], [1 + length // 3], [1]])).long()
        batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}
        batch = {name: batch[name] for name in inputs}
        with torch.no_grad():
            expected = hf_model.eval()(**batch)[output]
        (actual,) = session.run([output], {name: item.numpy() for name, item in batch.items()})
        assert np.abs(actual - expected.numpy())[mask.bool().numpy()].max() <= 1e-5


def test_deberta_onnx(tmp_path: Path) -> None:
    make_run(tmp_path / "run", *RECIPES["deberta"])
    result = export(tmp_path / "run", out=tmp_path / "out", onnx=True)
    folder = tmp_path / "out/encoder"
    assert [*result.onnx] == ["encoder/model.onnx"]
    assert_onnx_agrees(folder, "last_hidden_state", transformers.AutoModel.from_pretrained(folder))


def test_onnx_of_detector_with_local_attention(tmp_path: Path) -> None:
    make_run(tmp_path / "run", *RECIPES["modernbert"])
    export(tmp_path / "run", out=tmp_path / "out")
    folder = tmp_path / "out/discriminator"
    write_onnx(folder, "logits")
    assert_onnx_agrees(folder, "logits", transformers.AutoModelForTokenClassification.from_pretrained(folder))


def test_export_with_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    out = tmp_path / "out"
    make_run(run, "google", {"objective.name": "mlm", "model.num_layers": 1})
    done = in_process.run("export", run, "--out", out, "--onnx")
    line = r"/encoder/model.onnx: last_hidden_state within [\d.]+e-\d\d of torch's; one example of 128 tokens takes"
    assert done.returncode == 0 and re.search(re.escape(str(out)) + line, done.stdout), done.stdout
    assert [path.parent.name for path in out.glob("*/model.onnx")] == ["encoder"]
    assert_onnx_agrees(out / "encoder", "last_hidden_state", transformers.AutoModel.from_pretrained(out / "encoder"))

    # The same file instead of the exporter's, with other weights
    stale = shutil.copyfile(out / "encoder/model.onnx", tmp_path / "stale.onnx")
    whole = out / "generator/model.safetensors"
    tensors = load_file(whole)
    (name,) = (name for name in tensors if name.endswith("layer.0.output.LayerNorm.bias"))
    save_file(tensors | {name: tensors[name] + 1e-3}, whole, {"format": "pt"})
    monkeypatch.setattr(torch.onnx, "export", lambda model, inputs, path, **_: shutil.copyfile(stale, path))
    with pytest.raises(ElectraFastError, match="^encoder/model.onnx: onnxruntime's last_hidden_state differs .* by"):
        export(out, out=tmp_path / "never", onnx=True)
    assert not (tmp_path / "never").exists() and len(list(tmp_path.iterdir())) == 4
    monkeypatch.setattr("electra_fast.huggingface.onnx.find_spec", lambda name: None if "script" in name else "here")
    done = in_process.run("export", run, "--out", out, "--onnx")
    assert done.returncode == 2 and "needs onnxscript; run pip install onnxscript" in done.stderr
