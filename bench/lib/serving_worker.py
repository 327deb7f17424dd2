"""A contender of `serving.py` in a separate process, with the Python that has its libraries.

    python bench/lib/serving_worker.py CONTENDER FOLDER THREADS

Reports when it has answered its first text, then answers batches, which are lines of JSON. Imports only the
contender's libraries, so that start-up and memory are the contender's. With `quantize` as the contender, writes
optimum's int8 model of a folder into another folder, the third argument.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Predict = Callable[[list[str]], list[str]]
"""From texts to labels."""


def ours(folder: str, precision: str) -> Predict:
    import electra_fast as ef

    model: Any = ef.load(folder, precision=precision, device="cpu")  # type: ignore[arg-type]
    return lambda texts: [answer["label"] for answer in model.predict(texts)]


def from_pipeline(classify: Any) -> Predict:
    def predict(texts: list[str]) -> list[str]:
        inputs = texts[0] if len(texts) == 1 else texts
        return [answer["label"] for answer in classify(inputs, batch_size=len(texts), truncation=True)]

    return predict


def transformers(folder: str) -> Predict:
    from transformers import pipeline

    return from_pipeline(pipeline("text-classification", folder, device="cpu"))


def optimum(folder: str, threads: int) -> Predict:
    from onnxruntime import SessionOptions
    from optimum.onnxruntime import ORTModelForSequenceClassification
    from transformers import AutoTokenizer, pipeline

    options = SessionOptions()
    options.intra_op_num_threads = threads
    model = ORTModelForSequenceClassification.from_pretrained(
        folder, file_name="model_quantized.onnx", session_options=options
    )
    return from_pipeline(pipeline("text-classification", model, tokenizer=AutoTokenizer.from_pretrained(folder)))


def quantize(folder: str, out: str) -> None:
    """Quantizes as in optimum's documentation for a processor with AVX-512 VNNI."""
    from optimum.onnxruntime import ORTModelForSequenceClassification, ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig
    from transformers import AutoTokenizer

    ORTModelForSequenceClassification.from_pretrained(folder, export=True).save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    config = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=False)
    ORTQuantizer.from_pretrained(out).quantize(save_dir=out, quantization_config=config)


def load(contender: str, folder: str, threads: int) -> Predict:
    if contender == "transformers":
        return transformers(folder)
    return optimum(folder, threads) if contender == "optimum" else ours(folder, contender)


def resident_mib() -> float:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), float("nan"))


def timed(predict: Predict, batches: list[list[str]], seconds: float, least: int) -> dict[str, Any]:
    """Seconds per batch over a period, for at least `least` batches, and the labels of these batches."""
    times: list[float] = []
    labels: list[str] = []
    predict(batches[-1])
    start = time.perf_counter()
    while len(times) < least or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        answers = predict(batches[len(times) % len(batches)])
        times.append(time.perf_counter() - begin)
        labels += answers if len(times) <= least else []
    return {"seconds": times, "labels": labels}


def main() -> None:
    contender, folder, last = sys.argv[1:]
    if contender == "quantize":
        return quantize(folder, last)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(last)])
    out = sys.stdout
    sys.stdout = sys.stderr
    predict = load(contender, folder, int(last))
    predict(["a fine film"])
    print(json.dumps({"mib": resident_mib()}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(predict, **json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
