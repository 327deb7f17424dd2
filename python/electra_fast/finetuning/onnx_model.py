"""`OnnxModel`: a fine-tuned model that `export --onnx` wrote, computed by onnxruntime on a CPU; it needs no torch."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from electra_fast.config.config import AUTO
from electra_fast.errors import InputError
from electra_fast.finetuning.encoding import EncodedExamples, Ints
from electra_fast.finetuning.model_folder import Finetuned, read_description
from electra_fast.finetuning.predictor import Predictor
from electra_fast.huggingface.config import ONNX_FILE
from electra_fast.huggingface.tokenizer import INPUT_NAMES

# Tokens per batch, padding included: as many as fit in a core's caches (bench/LOG.md).
BATCH_TOKENS = 256
# Longest example of a batch as a multiple of the shortest: padding costs more than another call.
LENGTH_RATIO = 1.2
# Products of bytes: without one of these, onnxruntime computes them more slowly than those of fp32.
_BYTE_PRODUCTS = {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}


@dataclass(frozen=True)
class OnnxInference:
    """Sessions of onnxruntime in use, by their number of threads; `interpret` is `TaskType.of_onnx`."""

    sessions: Callable[[int], Any]
    output_names: Sequence[str]
    interpret: Callable[[Sequence[NDArray[Any]], EncodedExamples, Ints], tuple[NDArray[Any], ...]]
    precision: str
    batch_size: int | None = None
    """Examples per batch; None for as many as suit the caches, in int8 one."""

    def __str__(self) -> str:
        return f"{self.precision} in onnxruntime on cpu"

    def by_example(self, encoded: EncodedExamples) -> tuple[NDArray[Any], ...]:
        """As `Inference.by_example`."""
        order = list[Ints]()
        found = []
        for examples, _, outputs in self._batches(encoded):
            order.append(examples)
            found.append(self.interpret(outputs, encoded, examples))
        back = np.argsort(np.concatenate(order))
        return tuple(np.concatenate(each)[back] for each in zip(*found, strict=True))

    def by_token(self, encoded: EncodedExamples) -> NDArray[Any]:
        """As `Inference.by_token`."""
        values = None
        for examples, sources_nW, outputs in self._batches(encoded):
            (grid,) = self.interpret(outputs, encoded, examples)
            if values is None:
                values = np.zeros((len(encoded.ids), *grid.shape[2:]), grid.dtype)
            values[sources_nW[sources_nW >= 0]] = grid[sources_nW >= 0]
        assert values is not None
        return values

    def _batches(self, encoded: EncodedExamples) -> Iterator[tuple[Ints, Ints, list[NDArray[Any]]]]:
        """Yields examples of similar lengths, the index of each token in `encoded.ids`, -1 on padding, and outputs."""
        batches = list(self._divided(encoded.lengths))
        threads = num_threads()
        if len(batches) < threads or threads == 1:
            run = partial(self._run, self.sessions(threads), encoded)
            yield from map(run, batches)
            return
        # A batch per thread at a time: threads that share a batch wait for each other at every product.
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(partial(self._run, self.sessions(1), encoded), batches)

    def _divided(self, lengths: Ints) -> Iterator[Ints]:
        """Yields the examples of each batch, by ascending length."""
        # In int8, ranges of activations are those of a batch: alone, an example's outputs depend on no other.
        size = self.batch_size or (1 if self.precision == "int8" else None)
        order = np.argsort(lengths, kind="stable")
        while len(order):
            batch, order = np.split(order, [size or _fitting(lengths[order])])
            yield batch

    def _run(self, session: Any, encoded: EncodedExamples, examples: Ints) -> tuple[Ints, Ints, list[NDArray[Any]]]:
        lengths_n1 = encoded.lengths[examples][:, None]
        position_W = np.arange(lengths_n1.max())
        is_token_nW = position_W < lengths_n1
        sources_nW = np.where(is_token_nW, encoded.offsets[examples][:, None] + position_W, -1)
        columns = {"attention_mask": is_token_nW.astype(np.int64)}
        for name, values in (("input_ids", encoded.ids), ("token_type_ids", encoded.token_types)):
            columns[name] = np.where(is_token_nW, values[sources_nW], 0).astype(np.int64)
        inputs = {each.name: columns[each.name] for each in session.get_inputs()}
        return examples, sources_nW, session.run(self.output_names, inputs)


def _fitting(lengths: Ints) -> int:
    """Returns how many of the first examples, of ascending lengths, make a batch; at least one."""
    lengths = lengths[:BATCH_TOKENS]
    fits = (lengths * np.arange(1, 1 + len(lengths)) <= BATCH_TOKENS) & (lengths <= LENGTH_RATIO * lengths[0])
    return max(1, int(fits.sum()))


class OnnxModel(Predictor):
    """A fine-tuned model in ONNX: a folder that `export --onnx` wrote; `predict` computes in its own precision."""

    def __init__(self, folder: str | Path, *, device: str = AUTO, precision: str = AUTO) -> None:
        folder = Path(folder)
        finetuned = read_description(folder)
        remedy = "leave it out, or name the folder with the weights that it was exported from"
        if device not in (AUTO, "cpu"):
            raise InputError(f"{folder}: device = {device!r}: a model in ONNX computes on the CPU; {remedy}")
        if precision not in (AUTO, finetuned.onnx):
            raise InputError(
                f"{folder}: precision = {precision!r}: this model in ONNX computes in {finetuned.onnx}; {remedy}"
            )
        super().__init__(folder, finetuned)
        sessions = functools.cache(partial(_session, folder, finetuned, self.task_type.onnx_outputs))
        sessions(num_threads())  # raises now for a file that cannot be used
        interpret = partial(self.task_type.of_onnx, config=self._config)
        self._inference = OnnxInference(sessions, list(self.task_type.onnx_outputs), interpret, finetuned.onnx)
        if finetuned.onnx == "int8" and not has_byte_products():
            self.note = "int8: this processor has no products of bytes (as AVX-VNNI), so fp32 is faster on it"

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        """Raises InputError: the graph has only the outputs of its task."""
        raise InputError("encode needs the weights: load the folder that this model in ONNX was exported from")


def _session(folder: Path, finetuned: Finetuned, outputs: Mapping[str, int], threads: int) -> Any:
    """Opens model.onnx to compute with so many threads.

    Raises InputError unless onnxruntime can, and inputs and outputs are those of the task.
    """
    path = folder / ONNX_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing; copy the whole folder that `export` wrote")
    try:
        import onnxruntime
    except ImportError:
        raise InputError(f"{path}: needs onnxruntime: pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Threads that wait sleep: on a busy machine, spinning ones take several times as long (bench/LOG.md).
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # what is wrong is in the exception too
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no base of their own
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{path}: onnxruntime {onnxruntime.__version__} cannot load it ({reason}): if it is complete, "
            "pip install --upgrade onnxruntime, else copy or export it again"
        ) from None
    inputs = [each.name for each in session.get_inputs()]
    dimensions = {each.name: len(each.shape) for each in session.get_outputs()}
    wanted = INPUT_NAMES[finetuned.shape.architecture]
    if sorted(inputs) != sorted(wanted) or dimensions != dict(outputs):
        raise InputError(
            f"{path}: has the inputs {', '.join(inputs)} and outputs of dimensions {dimensions}; a model of "
            f"{finetuned.kind} has {', '.join(wanted)} and {dict(outputs)}: export it again with --onnx"
        )
    num_outputs = session.get_outputs()[0].shape[-1]
    if "logits" in outputs and type(num_outputs) is int and num_outputs != len(finetuned.labels):
        raise InputError(f"{path}: has {num_outputs} logits, but config.json has {len(finetuned.labels)} labels")
    return session


def num_threads() -> int:
    """Returns the threads of a product, as torch chooses them: OMP_NUM_THREADS, or the cores of this process."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if re.fullmatch(r"[1-9]\d*", asked):
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_byte_products(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether the processor multiplies bytes; True if this machine does not tell."""
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    features = {word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split()}
    return not features or bool(features & _BYTE_PRODUCTS)
