"""The ONNX graph of a fine-tuned model: torch's export of the `transformers` class, checked against our network.

`export` writes it, and `onnx_model` reads it. `quantize` converts it to int8.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from electra_fast.errors import ElectraFastError
from electra_fast.finetuning.batches import pack
from electra_fast.finetuning.encoding import EncodedExamples
from electra_fast.finetuning.finetuned_model import FinetunedModel
from electra_fast.finetuning.inference import Inference
from electra_fast.finetuning.model import Inputs
from electra_fast.finetuning.model_folder import HEAD_KEY, Finetuned, read_finetuned
from electra_fast.huggingface.config import ONNX_FILE, read_table
from electra_fast.huggingface.onnx import NamedOutputs, quiet, write_graph
from electra_fast.huggingface.tokenizer import INPUT_NAMES
from electra_fast.model.compute import use_compute

MAX_ERROR = 1e-4
"""Maximum difference from our network in fp32, as a fraction of the largest output."""
# Matrix products with weights, and embedding tables. Products of activations are slower in int8 than in fp32.
_QUANTIZED = ["MatMul", "Gemm", "Gather"]


class _RawHead(nn.Module):
    """An encoder of `transformers` with a linear layer on [CLS] or on all tokens, for heads without a class."""

    def __init__(self, encoder: nn.Module, finetuned: Finetuned, on_tokens: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.on_tokens = on_tokens
        weight, bias = (finetuned.state[f"head.classifier.{part}"] for part in ("weight", "bias"))
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        x_BLD = self.encoder(**inputs).last_hidden_state
        return {"logits": nn.functional.linear(x_BLD if self.on_tokens else x_BLD[:, 0], self.weight, self.bias)}


def write_finetuned_graph(source: Path, path: Path, predictor: FinetunedModel) -> float:
    """Writes the model of a fine-tuned folder as an ONNX file in fp32; returns the largest difference from our network.

    `predictor` is the same model in fp32 on the CPU. Raises ElectraFastError for a difference above `MAX_ERROR`.
    """
    import transformers

    table = read_table(source)
    finetuned = read_finetuned(source)
    outputs = predictor.task_type.onnx_outputs
    with quiet():
        loader = getattr(transformers, table["architectures"][0])
        model: nn.Module = loader.from_pretrained(source, attn_implementation="eager", dtype=torch.float32)
        if HEAD_KEY in table:
            model = _RawHead(model, finetuned, on_tokens=outputs["logits"] == 3)
        write_graph(NamedOutputs(model, INPUT_NAMES[finetuned.shape.architecture], [*outputs]), path, finetuned.shape)
    error = _difference(predictor, path, finetuned)
    if not error <= MAX_ERROR:
        raise ElectraFastError(
            f"{source}: the outputs of {ONNX_FILE} in onnxruntime differ from torch by {error:.1e} of the largest "
            f"output, more than {MAX_ERROR:g}; nothing was written, since the exported graph is wrong: try other "
            "versions of torch, transformers, onnx, onnxscript and onnxruntime"
        )
    return error


def quantize(source: Path, target: Path) -> None:
    """Writes an ONNX file with int8 weights per channel; activations are quantized dynamically."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with quiet():
        quantize_dynamic(
            source,
            target,
            op_types_to_quantize=_QUANTIZED,
            per_channel=True,
            weight_type=QuantType.QInt8,  # unsigned int8 is as slow as fp32
            extra_options={"MatMulConstBOnly": True},
        )


def _difference(predictor: FinetunedModel, path: Path, finetuned: Finetuned) -> float:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    shape = finetuned.shape
    error = 0.0
    # Padded rows that are longer and shorter than the local attention window and the exporter's sample.
    length = min(shape.max_positions, max(64, 2 * shape.local_attention))
    for lengths in ([length, length // 3, 3], [max(3, min(9, length)), 4]):
        random = np.random.default_rng(length)
        offsets = np.cumsum([0, *lengths])
        ids = random.integers(shape.vocab_size, size=offsets[-1], dtype=np.int32)
        types = random.integers(2, size=offsets[-1], dtype=np.int32)
        encoded = EncodedExamples(ids, types, offsets, 0, ())
        is_token = np.arange(max(lengths)) < np.array(lengths)[:, None]
        columns = {"attention_mask": is_token.astype(np.int64)}
        for name, values in (("input_ids", ids), ("token_type_ids", types)):
            columns[name] = np.zeros(is_token.shape, np.int64)
            columns[name][is_token] = values
        inputs = {node.name: columns[node.name] for node in session.get_inputs()}
        outputs = session.run([*predictor.task_type.onnx_outputs], inputs)
        expected = _outputs(predictor, encoded)
        if predictor.task_type.onnx_outputs.get("logits") == 2:
            pairs = list(zip(outputs, [expected], strict=True))
        else:
            tokens = np.split(expected, len(outputs), axis=1) if len(outputs) > 1 else [expected]
            pairs = [(grid[is_token].reshape(flat.shape), flat) for grid, flat in zip(outputs, tokens, strict=True)]
        error = max(error, *(float(np.abs(onnx - torch_).max() / np.abs(torch_).max()) for onnx, torch_ in pairs))
    return error


@torch.no_grad()
def _outputs(predictor: FinetunedModel, encoded: EncodedExamples) -> NDArray[Any]:
    """Returns our head's outputs in the units of the data, [n, C] or [tokens, C]."""
    inference: Inference = predictor._inference
    model = inference.model
    compute = inference.compute
    device = torch.device("cpu")
    by_example = model.only_first
    rows = []
    order = []
    for part in pack(encoded, np.arange(len(encoded)), in_one_row=compute.computes_segments(device)):
        with use_compute(compute):
            values = model.outputs(Inputs.of(part, device), compute).numpy()  # type: ignore[operator]
        places = part.examples if by_example else part.sources.ravel()
        rows.append(values[places >= 0])
        order.append(places[places >= 0])
    outputs = np.concatenate(rows)[np.argsort(np.concatenate(order))]
    return np.asarray(predictor.task_type.in_units(predictor.task, outputs))
