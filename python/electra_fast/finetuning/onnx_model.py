"""`OnnxModel`: runs a fine-tuned model that `export --onnx` wrote, in onnxruntime on a CPU, without torch."""

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

# Tokens per batch, including padding, that fit in a core's caches (bench/LOG.md).
BATCH_TOKENS = 256
# Maximum ratio of the longest to the shortest example of a batch: more padding costs more than another call.
LENGTH_RATIO = 1.2
# CPU features for int8 products. Without any of them, int8 is slower than fp32 in onnxruntime.
_BYTE_PRODUCTS = {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}


@dataclass(frozen=True)
class OnnxInference:
    """Inference with onnxruntime. `sessions` maps a thread count to a session; `interpret` is `TaskType.of_onnx`."""

    sessions: Callable[[int], Any]
    output_names: Sequence[str]
    interpret: Callable[[Sequence[NDArray[Any]], EncodedExamples, Ints], tuple[NDArray[Any], ...]]
    precision: str
    batch_size: int | None = None
    """Examples per batch; None: as many as fit in the caches, or one in int8."""

    def __str__(self) -> str:
        return f"{self.precision} in onnxruntime on cpu"

    def by_example(self, encoded: EncodedExamples) -> tuple[NDArray[Any], ...]:
        """See `Inference.by_example`."""
        order = list[Ints]()
        batch_outputs = []
        for examples, _, outputs in self._batches(encoded):
            order.append(examples)
            batch_outputs.append(self.interpret(outputs, encoded, examples))
        inverse = np.argsort(np.concatenate(order))
        return tuple(np.concatenate(output_batches)[inverse] for output_batches in zip(*batch_outputs, strict=True))

    def by_token(self, encoded: EncodedExamples) -> NDArray[Any]:
        """See `Inference.by_token`."""
        values = None
        for examples, sources_nW, outputs in self._batches(encoded):
            (grid,) = self.interpret(outputs, encoded, examples)
            if values is None:
                values = np.zeros((len(encoded.ids), *grid.shape[2:]), grid.dtype)
            values[sources_nW[sources_nW >= 0]] = grid[sources_nW >= 0]
        assert values is not None
        return values

    def _batches(self, encoded: EncodedExamples) -> Iterator[tuple[Ints, Ints, list[NDArray[Any]]]]:
        """Yields batches of similar lengths: examples, index of each token in `encoded.ids` (-1: padding), outputs."""
        batches = list(self._split_batches(encoded.lengths))
        threads = num_threads()
        if len(batches) < threads or threads == 1:
            run = partial(self._run, self.sessions(threads), encoded)
            yield from map(run, batches)
            return
        # One batch per thread, because threads that share a batch wait for each other at every product.
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(partial(self._run, self.sessions(1), encoded), batches)

    def _split_batches(self, lengths: Ints) -> Iterator[Ints]:
        """Yields the examples of each batch, in order of length."""
        # In int8, activation ranges are computed per batch, so one example per batch keeps its outputs independent.
        size = self.batch_size or (1 if self.precision == "int8" else None)
        order = np.argsort(lengths, kind="stable")
        while len(order):
            batch, order = np.split(order, [size or _batch_size(lengths[order])])
            yield batch

    def _run(self, session: Any, encoded: EncodedExamples, examples: Ints) -> tuple[Ints, Ints, list[NDArray[Any]]]:
        lengths_n1 = encoded.lengths[examples][:, None]
        position_W = np.arange(lengths_n1.max())
        is_token_nW = position_W < lengths_n1
        sources_nW = np.where(is_token_nW, encoded.offsets[examples][:, None] + position_W, -1)
        columns = {"attention_mask": is_token_nW.astype(np.int64)}
        for name, values in (("input_ids", encoded.ids), ("token_type_ids", encoded.token_types)):
            columns[name] = np.where(is_token_nW, values[sources_nW], 0).astype(np.int64)
        inputs = {node.name: columns[node.name] for node in session.get_inputs()}
        return examples, sources_nW, session.run(self.output_names, inputs)


def _batch_size(lengths: Ints) -> int:
    """Returns the number of examples in the next batch, at least 1; `lengths` are in ascending order."""
    lengths = lengths[:BATCH_TOKENS]
    fits = (lengths * np.arange(1, 1 + len(lengths)) <= BATCH_TOKENS) & (lengths <= LENGTH_RATIO * lengths[0])
    return max(1, int(fits.sum()))


class OnnxModel(Predictor):
    """A fine-tuned model in a folder that `export --onnx` wrote; `predict` computes in the exported precision."""

    def __init__(self, folder: str | Path, *, device: str = AUTO, precision: str = AUTO) -> None:
        folder = Path(folder)
        finetuned = read_description(folder)
        remedy = "remove the option, or pass the folder of the model that it was exported from"
        if device not in (AUTO, "cpu"):
            raise InputError(f"{folder}: device = {device!r}: must be cpu for an ONNX model; {remedy}")
        if precision not in (AUTO, finetuned.onnx):
            raise InputError(
                f"{folder}: precision = {precision!r}: must be {finetuned.onnx} for this ONNX model; {remedy}"
            )
        super().__init__(folder, finetuned)
        sessions = functools.cache(partial(_session, folder, finetuned, self.task_type.onnx_outputs))
        sessions(num_threads())  # raises now if the file is unusable
        interpret = partial(self.task_type.of_onnx, config=self._config)
        self._inference = OnnxInference(sessions, list(self.task_type.onnx_outputs), interpret, finetuned.onnx)
        if finetuned.onnx == "int8" and not has_byte_products():
            self.note = "int8: this processor lacks int8 instructions (such as AVX-VNNI), so fp32 is faster"

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        """Raises InputError, since the graph has only the outputs of its task."""
        raise InputError("encode: not supported by an ONNX model; load the folder that it was exported from")


def _session(folder: Path, finetuned: Finetuned, outputs: Mapping[str, int], threads: int) -> Any:
    """Opens model.onnx with a number of threads.

    Raises InputError if onnxruntime cannot load it, or if its inputs or outputs do not match the task.
    """
    path = folder / ONNX_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing; copy the whole folder that `export` wrote")
    try:
        import onnxruntime
    except ImportError:
        raise InputError(f"{path}: needs onnxruntime; pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Waiting threads sleep: spinning is several times as slow on a busy machine (bench/LOG.md).
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # the exception has the message too
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base class
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{path}: onnxruntime {onnxruntime.__version__} cannot load the file ({reason}); if it is complete, "
            "pip install --upgrade onnxruntime, otherwise copy or export it again"
        ) from None
    inputs = [node.name for node in session.get_inputs()]
    dimensions = {node.name: len(node.shape) for node in session.get_outputs()}
    wanted = INPUT_NAMES[finetuned.shape.architecture]
    if sorted(inputs) != sorted(wanted) or dimensions != dict(outputs):
        raise InputError(
            f"{path}: expected the inputs {', '.join(wanted)} and output dimensions {dict(outputs)} for "
            f"{finetuned.kind}, got {', '.join(inputs)} and {dimensions}; export it again with --onnx"
        )
    num_outputs = session.get_outputs()[0].shape[-1]
    if "logits" in outputs and type(num_outputs) is int and num_outputs != len(finetuned.labels):
        number = len(finetuned.labels)
        raise InputError(f"{path}: has {num_outputs} logits, but config.json has {number} labels; export again")
    return session


def num_threads() -> int:
    """Returns the number of threads, as torch chooses it: OMP_NUM_THREADS, or the cores of this process."""
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if re.fullmatch(r"[1-9]\d*", setting):
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_byte_products(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether the processor has int8 instructions; True if /proc/cpuinfo does not say."""
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    features = {word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split()}
    return not features or bool(features & _BYTE_PRODUCTS)
