"""ONNX files of exported folders, which onnxruntime and other engines run without torch.

torch's exporter based on `torch.export` (dynamo=True) writes them; the older one, which traces a call, is deprecated.
The result is compared with torch at lengths that the exporter did not see. It contains only operators of the ONNX
standard.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from electra_fast.config.config import ModelConfig
from electra_fast.errors import ElectraFastError, InputError
from electra_fast.huggingface.config import MODEL_TYPES, ONNX_FILE, read_encoder_shape, read_table
from electra_fast.huggingface.tokenizer import INPUT_NAMES

MAX_ERROR = 3e-5
"""Largest difference from torch as a fraction of the largest output; rounding causes 4e-6 in 22 layers of width 512."""
_PACKAGES = ("transformers", "onnx", "onnxscript", "onnxruntime")
_EXPORTED_SHAPE = (2, 16)
_OPSET = 20  # the first with Gelu
_TIMED_LENGTH = 128
_TIMED_RUNS = 10


def require_packages() -> None:
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise InputError(f"--onnx (onnx=True) needs {', '.join(missing)}; run pip install {' '.join(missing)}")


@torch.no_grad()
def write_onnx(folder: Path, output: str) -> str:
    """Writes model.onnx to a model's folder: the model's inputs with any batch size and length, and one output.

    `output` is `last_hidden_state` for the encoder alone, or `logits` for the whole model; fp32.

    Returns a sentence with the difference from torch and the time per example of both. Raises ElectraFastError and
    deletes the file if onnxruntime's output differs from torch's.
    """
    import onnxruntime

    table = read_table(folder)
    path = folder / ONNX_FILE
    shape = read_encoder_shape(folder, table)
    names = INPUT_NAMES[MODEL_TYPES[table["model_type"]]]
    with quiet():
        model = NamedOutputs(_load(folder, table, output), names, [output])
        write_graph(model, path, shape)
        model.set_attention("sdpa")  # the default in `transformers`; eager attention exports to fewer operators
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> Any:
        (values,) = session.run([output], {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})
        return values

    # Padded rows, longer and shorter than the window of local attention.
    length = min(shape.max_positions, max(64, 2 * shape.local_attention))
    error = 0.0
    for lengths in ([length, length // 3, 1], [max(2, min(9, length))]):
        inputs = random_inputs(names, shape.vocab_size, len(lengths), max(lengths))
        is_token = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        inputs[names.index("attention_mask")].copy_(is_token)
        (expected,) = model(*inputs)
        values = torch.from_numpy(run(*inputs))
        if expected.shape[:2] == is_token.shape:  # else one row per example, from a fine-tuned classifier
            expected = expected[is_token]
            values = values[is_token]
        error = max(error, float((values - expected).abs().max() / expected.abs().max()))
    if not error <= MAX_ERROR:
        path.unlink()
        raise ElectraFastError(
            f"{folder.name}/{ONNX_FILE}: onnxruntime's {output} differs from torch's by {error:.1e} of its largest "
            f"entry, more than {MAX_ERROR:g}, so nothing was written; try other versions of torch, onnx, onnxscript "
            "and onnxruntime"
        )
    example = random_inputs(names, shape.vocab_size, 1, min(shape.max_positions, _TIMED_LENGTH))
    times = {"onnxruntime": _milliseconds(lambda: run(*example)), "torch": _milliseconds(lambda: model(*example))}
    return (
        f"{output} within {error:.1e} of torch's; one example of {example[0].shape[1]} tokens takes "
        + " and ".join(f"{value:.3g} ms with {name}" for name, value in times.items())
        + f" ({torch.get_num_threads()} threads)"
    )


class NamedOutputs(nn.Module):
    """A model of `transformers` as a function from tensors, in the order of `names`, to some of its outputs."""

    def __init__(self, model: nn.Module, names: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.outputs = outputs
        self.eval()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.model(**dict(zip(self.names, inputs, strict=True)))
        return tuple(outputs[output] for output in self.outputs)

    def set_attention(self, implementation: str) -> None:
        self.model.set_attn_implementation(implementation)  # type: ignore[operator]


@torch.no_grad()
def write_graph(model: NamedOutputs, path: Path, shape: ModelConfig) -> None:
    """Writes a model as an ONNX file for any batch size, and any length up to its number of positions."""
    import onnx

    names = list(model.names)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=shape.max_positions)}
    torch.onnx.export(
        model,
        random_inputs(names, shape.vocab_size, *_EXPORTED_SHAPE),
        path,
        dynamo=True,
        opset_version=_OPSET,
        dynamic_shapes={"inputs": (axes,) * len(names)},
        input_names=names,
        output_names=list(model.outputs),
        external_data=False,
    )
    # onnxruntime would fuse Add and LayerNormalization into an operator that is several times slower.
    graph = onnx.load(path)
    normed = {node.input[0] for node in graph.graph.node if node.op_type == "LayerNormalization"}
    for node in graph.graph.node:
        if node.op_type == "Add" and node.output[0] in normed:
            node.op_type = "Sum"
    onnx.save(graph, path)


def _load(folder: Path, table: dict[str, Any], output: str) -> Any:
    import transformers

    whole = getattr(transformers, table["architectures"][0]).from_pretrained(folder, attn_implementation="eager")
    return whole if output == "logits" else whole.base_model


def random_inputs(names: Sequence[str], vocab_size: int, num_rows: int, length: int) -> tuple[Tensor, ...]:
    """Returns random inputs without padding, int64 [B, L]."""
    random = torch.Generator().manual_seed(length)
    limits = {"input_ids": vocab_size, "token_type_ids": 2}
    return tuple(
        torch.ones(num_rows, length, dtype=torch.int64)
        if name == "attention_mask"
        else torch.randint(limits[name], (num_rows, length), generator=random)
        for name in names
    )


def _milliseconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_TIMED_RUNS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    had_bar = transformers_logging.is_progress_bar_enabled()
    disabled = logging.root.manager.disable
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if had_bar:
            transformers_logging.enable_progress_bar()
