"""The data engine compared with other libraries: text to ids, and ids to masked batches of tensors.

    python bench/data_engine.py [--text FILE] [--vocab VOCAB.TXT] [--runs 5] [--json OUT.JSON]
    pip install tokenizers transformers datasets mosaicml-streaming litdata nanotoken   # the peers

Everything runs on one pinned core with a warm page cache. The contenders take turns within each run; each run of a
loader is a separate process, and each run tokenizes text that is new to all contenders. Ids are compared with
Hugging Face's before anything is timed. Rows are 128 tokens, batches 65,536 tokens, shuffled. Peers read pre-cut rows
and apply Hugging Face's `DataCollatorForLanguageModeling` (*vectorized*: its masking applied to the whole batch, which
is faster but unusual), while ours packs documents on the fly. The table has the reason for a peer that is not installed
or fails. CPU time is fairer on a busy machine. Without --text the text is synthetic.
"""

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Set before any library starts threads.
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np  # noqa: E402
import torch  # noqa: E402
from lib.results import installed, markdown, measured_by_child, processor, reason  # noqa: E402

import electra_fast  # noqa: E402
from electra_fast.data.corpus import Tokenizer  # noqa: E402

PEERS = ["tokenizers", "nanotoken", "transformers", "datasets", "mosaicml-streaming", "litdata"]
LENGTH = 128
BATCH = 512
DOCUMENT = 4096
Results = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="a file of UTF-8 text, documents separated by blank lines")
    parser.add_argument("--vocab", type=Path, help="an uncased vocab.txt (default: one trained on the text)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=1, help="text per tokenizer run")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a loader run")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--loader", help="measure one, print JSON")
    parser.add_argument("--folder", type=Path, help="its corpus")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    torch.set_num_threads(1)
    if arguments.loader:
        loader_result = measure_loader(arguments.loader, arguments.vocab, arguments.folder, arguments.seconds)
        print(json.dumps(loader_result), flush=True)
        os._exit(0)  # peers' threads would keep running
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = int(arguments.megabytes * 1e6)
        text = arguments.text or synthetic_text(folder / "text.txt", max(size * (arguments.runs + 1), 8_000_000))
        vocab = arguments.vocab or trained_vocab(text, folder / "vocab.txt")
        result = {
            "machine": machine(),
            "versions": [*map(installed, PEERS)],
            "tokenize": tokenize(vocab, parts_of(text, size, arguments.runs)),
            "load": load(vocab, text, folder, arguments.runs, arguments.seconds),
        }
    for title in ("tokenize", "load"):
        print_table(title, result[title])
    print(", ".join(result["versions"]))
    print(result["machine"])
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def tokenize(vocab: Path, parts: list[list[str]]) -> Results:
    openers = {"electra-fast": ours_encode, "tokenizers encode_batch_fast": hf_encode, "nanotoken": nano_encode}
    ways, results = opened(openers, vocab)
    # Checked with instances that are not timed, because tokenizers cache words.
    checkers, _ = opened(openers, vocab)
    counts = [compare_ids({name: checkers[name] for name in ways}, part, results) for part in parts]
    for number, (part, count) in enumerate(zip(parts, counts, strict=True)):
        names = list(ways)
        for name in names if number % 2 else names[::-1]:
            record(results[name], count, timed(lambda encode=ways[name][0], part=part: encode(part)))
    return results


def opened(openers: dict[str, Callable[..., Any]], *arguments: Any) -> tuple[dict[str, Any], Results]:
    """The contenders that opened, and a result for every contender, with the reason if it did not open."""
    ways: dict[str, Any] = {}
    results: Results = {}
    for name, opener in openers.items():
        results[name] = {"Mtok/s": [], "Mtok/cpu-s": []}
        try:
            ways[name] = opener(*arguments)
        except Exception as error:  # peers may fail in any way; the table has the reason
            if name.startswith("electra-fast"):
                raise
            results[name]["missing"] = reason(error)
    return ways, results


def compare_ids(ways: dict[str, Any], part: list[str], results: Results) -> int:
    """Compares all ids with Hugging Face's; exits if ours differ. Returns their number."""
    ids = {name: ids_of(encode(part)) for name, (encode, ids_of) in ways.items()}
    expected = ids.get("tokenizers encode_batch_fast", ids["electra-fast"])
    for name, contender_ids in ids.items():
        same = sum(map(np.array_equal, contender_ids, expected))
        if name == "electra-fast" and same < len(expected):
            raise SystemExit(
                f"our ids differ in {len(expected) - same} of {len(expected)} documents: nothing was timed"
            )
        if same < len(expected):
            results[name]["note"] = f"other ids in {len(expected) - same} of {len(expected)} documents"
    return sum(map(len, expected))


def ours_encode(vocab: Path) -> Any:
    return Tokenizer(vocab, cased=False, strip_accents=True).encode_batch, lambda ids: ids


def hf_tokenizer(vocab: Path) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    entries = {word: number for number, word in enumerate(vocab.read_text(encoding="utf-8").splitlines())}
    tokenizer = Tokenizer(models.WordPiece(entries, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def hf_encode(vocab: Path) -> Any:
    """Hugging Face's fastest method; output: `Encoding` objects. Extracting their ids is not timed."""
    tokenizer = hf_tokenizer(vocab)
    encode = lambda part: tokenizer.encode_batch_fast(part, add_special_tokens=False)  # noqa: E731
    return encode, lambda encodings: [np.array(encoding.ids) for encoding in encodings]


def nano_encode(vocab: Path) -> Any:
    import nanotoken

    tokenizer = nanotoken.Tokenizer.from_vocab(str(vocab), lowercase=True)
    encode = lambda part: tokenizer.encode_batch(part, add_special_tokens=False, parallel=False)  # noqa: E731
    return encode, lambda encoded: [encoded.ids[a:b] for a, b in itertools.pairwise(encoded.offsets)]


def load(vocab: Path, text: Path, folder: Path, runs: int, seconds: float) -> Results:
    """Speeds of all loaders, each in a separate process, so that its CPU time includes only its threads."""
    electra_fast.prepare([text], vocab=vocab, cased=False, out=folder / "shards", progress=False)
    np.save(folder / "rows.npy", rows_of(electra_fast.Corpus(folder / "shards")))
    results: Results = {name: {"Mtok/s": [], "Mtok/cpu-s": []} for name in loaders(vocab, folder)}
    for number in range(runs):
        for name in list(results)[:: -1 if number % 2 else 1]:
            if "missing" in results[name]:
                continue
            arguments = ["--loader", name, "--vocab", str(vocab), "--folder", str(folder), "--seconds", str(seconds)]
            try:
                result = measured_by_child(__file__, arguments, name)
            except SystemExit as error:  # peers may fail in any way; the table has the reason
                if name.startswith("electra-fast"):
                    raise
                results[name]["missing"] = str(error).splitlines()[-1][:100]
                continue
            record(results[name], int(result["tokens"]), (result["seconds"], result["cpu_seconds"]))
    return results


def measure_loader(name: str, vocab: Path, folder: Path, seconds: float) -> dict[str, float]:
    batches = loaders(vocab, folder)[name]()
    for _ in range(3):
        if next(batches).shape != (BATCH, LENGTH):
            raise ValueError("batches of another shape")
    tokens = 0
    start = time.perf_counter()
    cpu_start = time.process_time()
    while time.perf_counter() - start < seconds:
        tokens += next(batches).numel()
    taken = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}
    return {"tokens": tokens, **taken}


def loaders(vocab: Path, folder: Path) -> dict[str, Callable[[], Iterator[torch.Tensor]]]:
    """Factories of endless shuffled batches of [512, 128] int tensors; ours first."""
    mask = "+ DataCollatorForLanguageModeling"
    rows = np.load(folder / "rows.npy", mmap_mode="r")
    return {
        "electra-fast, packed and masked": lambda: ours_batches(folder / "shards"),
        f"datasets {mask}": lambda: masked(hf_batches(rows, folder), vocab, whole=False),
        f"datasets {mask}, vectorized": lambda: masked(hf_batches(rows, folder), vocab, whole=True),
        f"MosaicML Streaming {mask}, vectorized": lambda: masked(mds_batches(rows, folder), vocab, whole=True),
        f"litdata {mask}, vectorized": lambda: masked(litdata_batches(rows, folder), vocab, whole=True),
    }


def rows_of(corpus: Any) -> np.ndarray[Any, Any]:
    """All tokens, concatenated and cut into rows regardless of documents, as the peers' recipes do."""
    cls, sep = (corpus.special_tokens[name] for name in ("cls", "sep"))
    tokens = np.concatenate(list(corpus))
    body = tokens[: len(tokens) // (LENGTH - 2) * (LENGTH - 2)].reshape(-1, LENGTH - 2)
    return np.pad(body.astype(np.int64), ((0, 0), (1, 1)), constant_values=((0, 0), (cls, sep)))


def ours_batches(corpus: Path) -> Iterator[torch.Tensor]:
    """Ours; the thread that fills batches runs on the same core."""
    loader = electra_fast.BatchLoader(corpus, sequence_length=LENGTH, batch_size=BATCH)
    return (electra_fast.to_torch(batch)["input_ids"] for batch in loader)


def masked(batches: Iterator[torch.Tensor], vocab: Path, *, whole: bool) -> Iterator[torch.Tensor]:
    """The collator of `transformers` applied to rows, or only its masking applied to the whole batch."""
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    collator = DataCollatorForLanguageModeling(PreTrainedTokenizerFast(tokenizer_object=hf_tokenizer(vocab), **names))
    if whole:
        return (collator.torch_mask_tokens(batch)[0] for batch in batches)
    return (collator([{"input_ids": row} for row in batch])["input_ids"] for batch in batches)


def hf_batches(rows: np.ndarray[Any, Any], folder: Path) -> Iterator[torch.Tensor]:
    """A dataset on disk, read in whole batches of shuffled indices: the fastest way."""
    import datasets

    target = folder / "datasets"
    if not target.exists():
        datasets.disable_progress_bars()
        features = datasets.Features({"input_ids": datasets.List(datasets.Value("int64"), length=LENGTH)})
        datasets.Dataset.from_dict({"input_ids": rows}, features=features).save_to_disk(target)
    dataset = datasets.load_from_disk(target).with_format("numpy")
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(len(rows))
        for start in range(0, len(rows) - BATCH + 1, BATCH):
            yield torch.from_numpy(dataset[order[start : start + BATCH]]["input_ids"].reshape(-1, LENGTH))


def mds_batches(rows: np.ndarray[Any, Any], folder: Path) -> Iterator[torch.Tensor]:
    from streaming import MDSWriter, StreamingDataset

    target = folder / "mds"
    if not target.exists():
        with MDSWriter(out=str(target), columns={"input_ids": f"ndarray:int64:{LENGTH}"}) as writer:
            for row in rows:
                writer.write({"input_ids": row})
    dataset = StreamingDataset(local=str(target), shuffle=True, batch_size=BATCH)
    samples = (sample["input_ids"] for _ in itertools.count() for sample in dataset)
    while True:
        yield torch.from_numpy(np.stack(list(itertools.islice(samples, BATCH))))


def litdata_batches(rows: np.ndarray[Any, Any], folder: Path) -> Iterator[torch.Tensor]:
    from litdata import StreamingDataset, TokensLoader
    from litdata.streaming import Cache

    target = folder / "litdata"
    if not target.exists():
        cache = Cache(str(target), chunk_bytes="64MB", item_loader=TokensLoader(LENGTH))
        for number, row in enumerate(rows):
            cache[number] = torch.from_numpy(row)
        cache.done()
        cache.merge()
    dataset = StreamingDataset(str(target), item_loader=TokensLoader(LENGTH), shuffle=True)
    samples = (row for _ in itertools.count() for row in dataset)
    while True:
        yield torch.stack(list(itertools.islice(samples, BATCH)))


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    start = time.perf_counter()
    cpu_start = time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - cpu_start


def record(result: dict[str, Any], tokens: int, seconds: tuple[float, float]) -> None:
    for key, value in zip(("Mtok/s", "Mtok/cpu-s"), seconds, strict=True):
        result[key].append(tokens / value / 1e6)


def print_table(title: str, results: Results) -> None:
    ours = statistics.median(next(iter(results.values()))["Mtok/cpu-s"])
    rows = []
    for name, result in results.items():
        if "missing" in result:
            rows.append([name, f"missing ({result['missing']})", "", ""])
            continue
        cells = [
            f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"
            for values in (result["Mtok/s"], result["Mtok/cpu-s"])
        ]
        note = f"; {result['note']}" if "note" in result else ""
        rows.append([name + note, *cells, f"{ours / statistics.median(result['Mtok/cpu-s']):.1f}"])
    print("\n" + markdown([title, "Mtok/s", "Mtok per CPU second", "our speedup"], rows) + "\n", flush=True)


def machine() -> str:
    return f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"


def parts_of(text: Path, size: int, runs: int) -> list[list[str]]:
    """Distinct documents of about 4 KB for each run."""
    content = text.read_text(encoding="utf-8")
    parts = [content[start : start + size] for start in range(0, min(len(content), size * runs), size)]
    return [[part[start : start + DOCUMENT] for start in range(0, len(part), DOCUMENT)] for part in parts]


def synthetic_text(path: Path, size: int) -> Path:
    """Documents of Zipf-distributed made-up words, with capitals, numbers and punctuation."""
    rng = random.Random(0)
    syllables = [a + b for a in "bcdfghklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "é")]
    words = ["".join(rng.choices(syllables, k=1 + min(number.bit_length() // 5, 3))) for number in range(200_000)]
    ranks = iter(np.random.default_rng(0).zipf(1.15, size // 3) % len(words))
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            for _ in range(rng.randrange(1, 30)):
                sentence = [words[rank] for rank in itertools.islice(ranks, rng.randrange(4, 30))] or ["end"]
                file.write(f"{' '.join(sentence).capitalize()}, {rng.randrange(3000)}.\n")
            file.write("\n")
    return path


def trained_vocab(text: Path, path: Path) -> Path:
    sample = path.with_suffix(".sample.txt")
    sample.write_text(text.read_text(encoding="utf-8")[:3_000_000], encoding="utf-8")
    electra_fast.vocab([sample], out=path, size=16_000, strip_accents=True, progress=False)
    return path


if __name__ == "__main__":
    main()
