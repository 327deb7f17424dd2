"""Fine-tuned models in ONNX give the same answers as in torch, without importing torch."""

import json
import shutil
import subprocess
import sys

import in_process
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from onnx import TensorProto, helper, numpy_helper
from tiny_task import WORDS, save_encoder

import electra_fast as ef
from electra_fast.errors import InputError
from electra_fast.finetuning import onnx_model
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.model import TaskModel
from electra_fast.finetuning.model_folder import ONNX_KEY, Finetuned, write_finetuned
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.huggingface.encoder import load_encoder
from electra_fast.huggingface.tokenizer import INPUT_NAMES, copy_tokenizer, special_ids

KINDS = {
    "classification": (("neg", "pos", "neu"), {}),
    "multi-label": (("a", "b", "c"), {"thresholds": {"a": 0.2}}),
    "regression": (("value",), {"scale": 1.5, "shift": 2.0}),
    "tagging": (("O", "B-PER", "I-PER", "B-LOC", "I-LOC"), {"scheme": "IOB2", "doc_stride": 12}),
    "question-answering": (("start", "end"), {"doc_stride": 12, "max_query_length": 16, "null_threshold": 0.0}),
}
LENGTH = 48


def text(random, length):
    return " ".join(random.choice(WORDS, length))


def examples(kind, num_texts):
    """Returns texts, or pairs, from empty to longer than the model reads."""
    random = np.random.default_rng(0)
    lengths = [0, 1, 2, 5, 5, 9, 20, 44, 100] * 3
    if kind == "question-answering":
        return [(text(random, 1 + length % 30), text(random, 1 + length)) for length in lengths]
    texts = [text(random, length) for length in lengths]
    return texts if num_texts == 1 else list(zip(texts, reversed(texts), strict=True))


def write_folder(encoder, folder, kind, num_texts, head="transformers"):
    """Writes a fine-tuned folder with random weights."""
    labels, settings = KINDS[kind]
    pretrained = load_encoder(encoder)
    task_type = TASK_TYPES[kind]
    model = task_type.model(pretrained.shape, FinetuneSection(head=head), len(labels))
    model.load_encoder(pretrained.state)
    model.initialize_head(0)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.mul_(10)
    folder.mkdir()
    copy_tokenizer(pretrained.tokenizer, folder, INPUT_NAMES[pretrained.shape.architecture])
    described = Finetuned(pretrained.shape, head, kind, labels, LENGTH, num_texts, model.state_dict(), settings)
    write_finetuned(folder, described, special_ids(folder), 0.0)
    return folder


def onnx_folder(folder, target, precision="fp32"):
    """Copies a folder without its weights, to add a model.onnx."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("model.safetensors"))
    return with_keys(target, **{ONNX_KEY: {"precision": precision}})


def with_keys(folder, **keys):
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | keys))
    return folder


def tables(kind, vocab_size):
    """Returns values of tokens and of token types, [V, C] and [2, C]."""
    random = np.random.default_rng(1)
    size = len(KINDS[kind][0])
    return [random.normal(0, 2, shape).astype(np.float32) for shape in ((vocab_size, size), (2, size))]


def write_lookup(path, kind, vocab_size, names=("input_ids", "token_type_ids", "attention_mask"), outputs=None):
    """Writes a graph: logits per token are the sum of both `tables`, and logits per example the sum over its tokens."""
    tokens, types = tables(kind, vocab_size)
    per_token = TASK_TYPES[kind].onnx_outputs if outputs is None else outputs
    nodes = [("Gather", ["tokens", "input_ids"], ["a"]), ("Gather", ["types", "token_type_ids"], ["b"])]
    arrays = {"tokens": tokens, "types": types}
    if "start_logits" in per_token:
        nodes += [("Add", ["a", "b"], ["both"])]
        for place, name in enumerate(per_token):
            arrays[f"{name}_index"] = np.array(place)
            nodes += [("Gather", ["both", f"{name}_index"], [name])]
    elif kind == "tagging":
        nodes += [("Add", ["a", "b"], [name]) for name in per_token]
    else:
        arrays["last"] = np.array([2])
        arrays["middle"] = np.array([1])
        nodes += [("Add", ["a", "b"], ["c"]), ("Cast", ["attention_mask"], ["d"]), ("Unsqueeze", ["d", "last"], ["e"])]
        nodes += [("Mul", ["c", "e"], ["f"]), *(("ReduceSum", ["f", "middle"], [name]) for name in per_token)]
    options = {"Cast": {"to": TensorProto.FLOAT}, "ReduceSum": {"keepdims": 0}}
    graph = helper.make_graph(
        [
            helper.make_node(*node, **options.get(node[0], {"axis": 2} if node[1][0] == "both" else {}))
            for node in nodes
        ],
        kind,
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in names],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * (rank - 1) + [_last(kind, rank)])
            for name, rank in per_token.items()
        ],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def _last(kind, rank):
    return len(KINDS[kind][0]) if (kind == "tagging") == (rank == 3) and kind != "question-answering" else None


@pytest.fixture
def looked_up(monkeypatch):
    """Returns a function that makes networks in torch compute the same as `write_lookup`."""

    def look_up(kind, vocab_size):
        tokens, types = map(torch.from_numpy, tables(kind, vocab_size))

        def outputs(self, inputs, compute, key=None):
            ids_T, types_T, *_ = (column.flatten().long() for column in inputs.columns_5RL)
            values_TC = tokens[ids_T] + types[types_T]
            return inputs.by_example(values_TC, 0.0).sum(1) if self.only_first else values_TC

        monkeypatch.setattr(TaskModel, "outputs", outputs)

    return look_up


@pytest.fixture(scope="module")
def folders(encoder_folder, tmp_path_factory):
    """Returns a function that returns a task's folder for torch, and a folder with a `write_lookup` graph."""
    base = tmp_path_factory.mktemp("folders")
    written = {}

    def folders(kind, num_texts=1):
        if (kind, num_texts) not in written:
            folder = write_folder(encoder_folder, base / f"{kind}-{num_texts}", kind, num_texts)
            target = onnx_folder(folder, base / f"{kind}-{num_texts}-onnx")
            write_lookup(target / "model.onnx", kind, load_encoder(encoder_folder).shape.vocab_size)
            written[kind, num_texts] = folder, target
        return written[kind, num_texts]

    return folders


def assert_same_answers(actual, expected, tolerance=1e-4):
    """Asserts equal keys, texts and labels, and numbers within the tolerance."""
    if isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=tolerance, abs=tolerance)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert_same_answers(actual[name], value, tolerance)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for pair in zip(actual, expected, strict=True):
            assert_same_answers(*pair, tolerance)
    else:
        assert actual == expected


CASES = [(kind, 1) for kind in KINDS if kind != "question-answering"]
CASES += [(kind, 2) for kind in ("classification", "multi-label", "regression", "question-answering")]


@pytest.mark.parametrize("kind, num_texts", [case for case in CASES if case[0] != "regression"])
def test_answers_equal_torch_for_same_logits(folders, looked_up, monkeypatch, kind, num_texts):
    """For any batch size, texts are truncated or split into chunks, batched, padded and put back in order."""
    folder, target = folders(kind, num_texts)
    texts = examples(kind, num_texts)
    model = ef.load(folder, precision="fp32")
    looked_up(kind, model._shape.vocab_size)
    expected = model.predict(texts)
    for tokens, threads in (
        (1, 1),
        (64, 2),
        (4096, 64),
    ):  # sequential batches, parallel batches, fewer batches than threads
        monkeypatch.setattr(onnx_model, "BATCH_TOKENS", tokens)
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        assert_same_answers(ef.load(target).predict(texts), expected)
    split = model.task_type.split(texts, num_texts)
    assert_same_answers(ef.load(target).predict_split(split, batch_size=4), expected)


@pytest.mark.parametrize("num_texts", [1, 2])
def test_values_are_in_data_units(folders, num_texts):
    _, target = folders("regression", num_texts)
    model = ef.load(target)
    texts = examples("regression", num_texts)
    encoded = model.task_type.features(model.tokenizer, model.task_type.split(texts, num_texts), model._config).encoded
    tokens, types = tables("regression", model.tokenizer.vocab_size)
    expected = np.add.reduceat(tokens[encoded.ids] + types[encoded.token_types], encoded.offsets[:-1])[:, 0]
    np.testing.assert_allclose([answer["value"] for answer in model.predict(texts)], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(model.outputs(texts)[:, 0], expected, rtol=1e-5, atol=1e-5)


def exported(folder, target, names, outputs):
    """Exports the class of `transformers` with torch's exporter."""

    class Graph(torch.nn.Module):
        def __init__(self):
            super().__init__()
            table = json.loads((folder / "config.json").read_text())
            network = getattr(transformers, table["architectures"][0])
            self.model = network.from_pretrained(folder, attn_implementation="eager")

        def forward(self, *inputs):
            result = self.model(**dict(zip(names, inputs, strict=True)))
            return tuple(result[name] for name in outputs)

    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=64)}
    inputs = tuple(torch.ones(2, 16, dtype=torch.int64) for _ in names)
    shapes = {"inputs": (axes,) * len(names)}
    options = {"input_names": names, "output_names": list(outputs), "external_data": False}
    torch.onnx.export(Graph().eval(), inputs, target / "model.onnx", dynamo=True, dynamic_shapes=shapes, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ["bert", "modernbert", "deberta"])
@pytest.mark.parametrize("kind, num_texts", CASES)
def test_exported_networks_equal_torch(tiny_vocab, tmp_path, kind, num_texts, architecture):
    encoder = save_encoder(tmp_path / "encoder", tiny_vocab, architecture)
    folder = write_folder(encoder, tmp_path / "model", kind, num_texts)
    target = onnx_folder(folder, tmp_path / "onnx")
    exported(folder, target, INPUT_NAMES[architecture], TASK_TYPES[kind].onnx_outputs)
    texts = examples(kind, num_texts)
    assert_same_answers(ef.load(target).predict(texts), ef.load(folder, precision="fp32").predict(texts))


def test_evaluation_scores_answers(folders, write_rows):
    _, target = folders("classification")
    texts = examples("classification", 1)[1:]
    answers = ef.load(target).predict(texts)
    gold = [answer["label"] if number % 3 else "neg" for number, answer in enumerate(answers)]
    rows = [{"text": text, "label": label} for text, label in zip(texts, gold, strict=True)]
    report = ef.evaluate(target, write_rows(rows))
    accuracy = np.mean([answer["label"] == label for answer, label in zip(answers, gold, strict=True)])
    assert report["scores"]["accuracy"]["model"] == pytest.approx(accuracy)


def test_repr_of_onnx_model(folders):
    _, target = folders("classification")
    model = ef.load(target, device="cpu", precision="fp32")
    assert repr(model) == "OnnxModel: classification, 3 labels: neg, pos, neu, fp32 in onnxruntime on cpu"
    assert model.predict([]) == [] and model.note == ""
    with pytest.raises(InputError, match="encode: not supported by an ONNX model"):
        model.encode(["a text"])


def test_int8_on_processor_without_int8_instructions(folders, tmp_path, monkeypatch):
    """The model works, and a note reports that it is slow."""
    for flags in ("flags\t\t: fpu avx2 avx512f", "Features\t: fp asimd", "flags: avx_vnni", "Features: i8mm", ""):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n")
        has_them = onnx_model.has_byte_products(tmp_path / "cpuinfo")
        assert has_them == (flags == "" or flags.endswith(("avx_vnni", "i8mm")))
    assert onnx_model.has_byte_products(tmp_path / "nowhere")  # a system without /proc/cpuinfo
    target = onnx_folder(folders("classification")[1], tmp_path / "int8", "int8")
    (tmp_path / "a.txt").write_text("a text\n")
    for has_them in (True, False):
        monkeypatch.setattr(onnx_model, "has_byte_products", lambda: has_them)  # noqa: B023
        done = in_process.run("predict", target, tmp_path / "a.txt")
        assert done.returncode == 0 and json.loads(done.stdout)["label"]
        assert ("lacks int8 instructions" in done.stderr) != has_them


def test_number_of_threads_equals_torch(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    assert onnx_model.num_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert onnx_model.num_threads() >= 1


def test_unusable_models_are_refused_in_one_line(folders, tmp_path, monkeypatch):
    folder, good = folders("classification")
    vocab_size = ef.load(good).tokenizer.vocab_size
    (tmp_path / "a.txt").write_text("a text\n")

    def refused(match, target=good, *options):
        done = in_process.run("predict", target, tmp_path / "a.txt", *options)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and match in done.stderr, done.stderr

    def copy(name, kind="classification"):
        return shutil.copytree(folders(kind)[1], tmp_path / name)

    refused("device = 'cuda': must be cpu for an ONNX model; remove the option", good, "--device", "cuda")
    refused("must be fp32 for this ONNX model; remove the option", good, "--precision", "bf16")
    refused("must have the precision fp32 or int8", with_keys(copy("precision"), **{ONNX_KEY: {"precision": "fp4"}}))
    refused("config.json has 2 labels", with_keys(copy("labels"), id2label={"0": "neg", "1": "pos"}))
    refused("scale = 0: must be", with_keys(copy("scale", "regression"), electra_fast_settings={"scale": 0}))
    (bare := copy("bare") / "config.json").unlink()
    refused("model.onnx without its config.json; copy the whole folder", bare.parent)
    (graphless := copy("graphless") / "model.onnx").unlink()
    refused("model.onnx: missing; copy the whole folder", graphless.parent)
    headless = with_keys(copy("headless"), architectures=["ElectraModel"], problem_type=None)
    refused("not a fine-tuned model", headless)
    truncated = copy("truncated") / "model.onnx"
    truncated.write_bytes(truncated.read_bytes()[:-100])
    refused(f"onnxruntime {onnxruntime.__version__} cannot load the file", truncated.parent)
    refused("copy or export it again", truncated.parent)
    (foreign := copy("foreign") / "model.onnx").write_bytes(b"PK\x03\x04")
    refused("cannot load the file", foreign.parent)
    for name, node in {"operator": ("FusedAttention", ""), "domain": ("Add", "com.example")}.items():
        graph = onnx.load(good / "model.onnx")
        graph.graph.node[0].op_type, graph.graph.node[0].domain = node
        if node[1]:
            graph.opset_import.append(helper.make_opsetid(node[1], 1))
        onnx.save(graph, copy(name) / "model.onnx")
        refused("pip install --upgrade onnxruntime", tmp_path / name)
    for name, outputs in {"encoder": {"last_hidden_state": 2}, "two": {"logits": 2, "more": 2}}.items():
        write_lookup(copy(name) / "model.onnx", "classification", vocab_size, outputs=outputs)
        refused("export it again with --onnx", tmp_path / name)
    write_lookup(copy("tags") / "model.onnx", "tagging", vocab_size, ("input_ids", "token_type_ids"))
    refused("got input_ids, token_type_ids", tmp_path / "tags")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    refused("model.onnx: needs onnxruntime; pip install onnxruntime")


def test_folder_with_weights_and_graph_is_read_by_torch(folders, tmp_path):
    """Folders with weights are read by torch, and folders with only a graph by onnxruntime, also without our key."""
    folder, target = folders("classification")
    both = shutil.copytree(folder, tmp_path / "both")
    shutil.copy(target / "model.onnx", both)
    assert isinstance(ef.load(both), ef.FinetunedModel)
    (both / "model.safetensors").unlink()
    assert isinstance(ef.load(both), ef.OnnxModel)


# A new interpreter that cannot import the packages that an installation for predictions lacks.
WITHOUT_TORCH = """
import sys
sys.modules |= dict.fromkeys(sys.argv[1].split(","))
from electra_fast.cli import main
sys.exit(main(sys.argv[2:]))
"""
LEFT_OUT = "torch,transformers,safetensors,rich,matplotlib,sklearn,scipy,onnx"


@pytest.mark.process
def test_predictions_without_torch(folders, tmp_path):
    folder, target = folders("tagging")
    (tmp_path / "a.txt").write_text("The class of a value\n")

    def predict(model):
        command = [sys.executable, "-c", WITHOUT_TORCH, LEFT_OUT, "predict", model, tmp_path / "a.txt"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = predict(target)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ef.load(target).predict(["The class of a value"])[0]
    done = predict(folder)
    assert done.returncode == 2 and "predict needs torch; install it with `pip install electra-fast`" in done.stderr
