"""Question answering and tagging, compared with the pipelines of `transformers` on the same model.

    python bench/reading_throughput.py [--model RUN] [--squad dev-v1.1.json] [--questions 500] [--rounds 3]

From text to answers: questions about contexts, and entities in their sentences. The model has a random head; without
`--model` its encoder is a random one of the preset `mini`, without `--squad` the text has made-up words. Pipelines
use batches of 1 and of 32; question answering needs `pip install "transformers<5"`. Rounds alternate.
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from finetune_throughput import add_encoder_options, make_inputs, write_model
from lib.results import Results, measured_by_child, parse_arguments, processor

import electra_fast as ef
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.readers.question_files import iterate_questions
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.huggingface.encoder import load_encoder

LENGTH = 384
STRIDE = 128  # both are the pipeline's: its default stride, and its longest chunk for 512 positions
LABELS = {"question-answering": ("start", "end"), "tagging": ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")}
CONTENDERS = ("ours", "pipeline, batches of 1", "pipeline, batches of 32")
BOUNDARY = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"])")


def make_model(options: argparse.Namespace, kind: str) -> Path:
    encoder = load_encoder(options.model)
    folder = Path(options.cache) / "finetune" / f"{kind}-{encoder.content_hash[:12]}"
    length = min(LENGTH, encoder.shape.max_positions)
    config = FinetuneSection(sequence_length=length, doc_stride=STRIDE)
    model = TASK_TYPES[kind].model(encoder.shape, config, len(LABELS[kind]))
    write_model(folder, encoder, model, kind, LABELS[kind], length, doc_stride=STRIDE, scheme="IOB2")
    return folder


def questions(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Pairs of question and context; made-up pairs are as long as SQuAD's, five per context."""
    if options.squad:
        question_pairs = [(question, context) for _, question, context in iterate_questions(options.squad)]
        return question_pairs[: options.questions]
    words = [entry for entry in options.vocab.read_text().split() if entry.startswith("w")]
    random = np.random.default_rng(0)
    text = lambda length: " ".join(words[i] for i in random.zipf(1.2, length) % len(words))  # noqa: E731
    pairs: list[tuple[str, str]] = []
    while len(pairs) < options.questions:
        context = ". ".join(text(20).capitalize() for _ in range(random.integers(3, 12))) + "."
        pairs += [(text(10) + "?", context) for _ in range(5)]
    return pairs[: options.questions]


def sentences(pairs: list[tuple[str, str]]) -> list[str]:
    contexts = dict.fromkeys(context for _, context in pairs)
    return [sentence for context in contexts for sentence in BOUNDARY.split(context)]


def runner(folder: Path, kind: str, contender: str) -> Callable[[list[Any]], Any]:
    if contender == "ours":
        return ef.load(folder).predict
    from transformers import pipeline

    batch_size = int(contender.split()[-1])
    if kind == "tagging":
        tag = pipeline("token-classification", str(folder), aggregation_strategy="first", batch_size=batch_size)
        return lambda texts: tag(texts)
    read: Any = pipeline("question-answering", str(folder))  # type: ignore[call-overload]  # removed in version 5
    return lambda pairs: read([{"question": q, "context": c} for q, c in pairs], batch_size=batch_size)


def measure(options: argparse.Namespace) -> dict[str, float]:
    kind, contender = options.contender
    options.questions *= 1 if kind == "question-answering" else 5  # about five share a context
    pairs = questions(options)
    examples: list[Any] = pairs if kind == "question-answering" else sentences(pairs)
    try:
        run = runner(make_model(options, kind), kind, contender)
    except KeyError:  # transformers 5 does not know the pipeline
        return {"missing": 1.0}
    run(examples[:16])
    start = time.perf_counter()
    run(examples)
    return {"per_second": len(examples) / (time.perf_counter() - start)}


def child(options: argparse.Namespace, kind: str, contender: str) -> dict[str, float]:
    arguments = ["--contender", kind, contender, "--model", str(options.model)]
    arguments += ["--questions", str(options.questions), "--cache", str(options.cache)]
    arguments += ["--vocab", str(options.vocab)]
    arguments += ["--squad", str(options.squad)] if options.squad else []
    return measured_by_child(__file__, arguments, f"{kind}, {contender}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_encoder_options(parser)
    parser.add_argument("--squad", type=Path, help="questions about contexts (made-up words)")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contender", nargs=2, metavar=("KIND", "NAME"), help="measure one, print JSON")
    options = parse_arguments(parser, for_cpu=True)
    if options.contender:
        print(json.dumps(measure(options)))
        return
    if options.quick:
        options.preset = "tiny"
        options.questions = 10
        options.rounds = 1
    make_inputs(options)
    results = Results(options.results, options.device, processor())
    for kind in LABELS:
        rounds = [{name: child(options, kind, name) for name in CONTENDERS} for _ in range(options.rounds)]
        for name in CONTENDERS:
            if "missing" in rounds[0][name]:
                results.add(f"{kind:18} {name:24} not in this version of transformers", kind=kind, contender=name)
                continue
            speed = statistics.median(turn[name]["per_second"] for turn in rounds)
            ratio = statistics.median(turn["ours"]["per_second"] / turn[name]["per_second"] for turn in rounds)
            line = f"{kind:18} {name:24} {speed:8,.1f} per second  {ratio:6.2f} times our time"
            results.add(line, kind=kind, contender=name, per_second=speed, ratio=ratio)


if __name__ == "__main__":
    main()
