"""The data engine beside what people use today: text to ids, and ids to masked batches of tensors.

    python bench/data_engine.py [--text FILE] [--vocab VOCAB.TXT] [--runs 5] [--json OUT.JSON]
    pip install tokenizers transformers datasets mosaicml-streaming litdata nanotoken   # the peers

Everything on one pinned core, page cache warm; all take turns within each run, loaders in processes of
their own that are stopped meanwhile; each run tokenises text that none of them has seen. Ids are
compared with Hugging Face's before anything is timed. Rows are 128 tokens, batches 65,536 tokens,
shuffled. Peers read rows cut beforehand and end in Hugging Face's `DataCollatorForLanguageModeling`
(*rows only*: without it; *vectorised*: its masking called on the whole batch, which is faster and
unusual), while ours packs documents as it reads. No worker processes: there is one core. A peer that
is not installed or fails is a line of the table that says why. Figures are the median (and spread) of
million tokens a second by the clock and of processor time, which is fairer on a busy machine. Without
--text it makes its own.
"""

import argparse
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before anything starts threads.
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np  # noqa: E402
import torch  # noqa: E402

import electra_fast  # noqa: E402
from electra_fast.data.corpus import Tokenizer  # noqa: E402

PEERS = ["tokenizers", "nanotoken", "transformers", "datasets", "mosaicml-streaming", "litdata"]
LENGTH, BATCH = 128, 512
DOCUMENT = 4096
Figures = dict[str, dict[str, Any]]


def main() -> None:
    """Make text, vocabulary and rows; measure both kinds of work; print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="a file of UTF-8 text, documents divided by blank lines")
    parser.add_argument("--vocab", type=Path, help="an uncased vocab.txt (default: one trained on the text)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=1, help="text of a run of tokenising")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a run of loading")
    parser.add_argument("--json", type=Path, default=Path("data_engine.json"))
    arguments = parser.parse_args()
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = int(arguments.megabytes * 1e6)
        text = arguments.text or made_up_text(folder / "text.txt", max(size * (arguments.runs + 1), 8_000_000))
        vocab = arguments.vocab or trained_vocab(text, folder / "vocab.txt")
        result = {
            "machine": machine(),
            "versions": {name: version(name) for name in PEERS},
            "tokenise": tokenising(vocab, parts_of(text, size, arguments.runs)),
            "load": loading(vocab, text, folder, arguments.runs, arguments.seconds),
        }
    for title in ("tokenise", "load"):
        print_table(title, result[title])
    print("versions:", ", ".join(f"{name} {found}" for name, found in result["versions"].items()))
    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {arguments.json}; {result['machine']}")


# --- text to ids --------------------------------------------------------------------------------


def tokenising(vocab: Path, parts: list[list[str]]) -> Figures:
    """Rates of all tokenizers on parts of text that are new to them."""
    openers = {"electra-fast": ours_encode, "tokenizers encode_batch_fast": hf_encode, "nanotoken": nano_encode}
    ways, figures = opened(openers, vocab)
    # By instances that are not timed, for tokenizers remember words.
    checkers, _ = opened(openers, vocab)
    counts = [compare_ids({name: checkers[name] for name in ways}, part, figures) for part in parts]
    for number, (part, count) in enumerate(zip(parts, counts, strict=True)):
        names = list(ways)
        for name in names if number % 2 else names[::-1]:
            record(figures[name], count, timed(lambda encode=ways[name][0], part=part: encode(part)))
    return figures


def opened(openers: dict[str, Callable[..., Any]], *arguments: Any) -> tuple[dict[str, Any], Figures]:
    """What could be opened, and a line for each, with the reason where it could not."""
    ways: dict[str, Any] = {}
    figures: Figures = {}
    for name, opener in openers.items():
        figures[name] = {"Mtok/s": [], "Mtok/cpu-s": []}
        try:
            ways[name] = opener(*arguments)
        except Exception as error:  # a peer may fail in any way: the table says how
            if name.startswith("electra-fast"):
                raise
            figures[name]["missing"] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
    return ways, figures


def compare_ids(ways: dict[str, Any], part: list[str], figures: Figures) -> int:
    """Compare everybody's ids with Hugging Face's; an error if ours differ. Returns how many there are."""
    ids = {name: ids_of(encode(part)) for name, (encode, ids_of) in ways.items()}
    truth = ids.get("tokenizers encode_batch_fast", ids["electra-fast"])
    for name, found in ids.items():
        same = sum(map(np.array_equal, found, truth))
        if name == "electra-fast" and same < len(truth):
            raise SystemExit(f"our ids differ in {len(truth) - same} of {len(truth)} documents: nothing was timed")
        if same < len(truth):
            figures[name]["note"] = f"other ids in {len(truth) - same} of {len(truth)} documents"
    return sum(map(len, truth))


def ours_encode(vocab: Path) -> Any:
    """Ours, ending in numpy arrays."""
    return Tokenizer(vocab, lowercase=True).encode_batch, lambda found: found


def hf_tokenizer(vocab: Path) -> Any:
    """Hugging Face's, as BERT's."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    entries = {word: number for number, word in enumerate(vocab.read_text(encoding="utf-8").splitlines())}
    tokenizer = Tokenizer(models.WordPiece(entries, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def hf_encode(vocab: Path) -> Any:
    """Its fastest call, ending in `Encoding` objects; taking their ids out is not counted."""
    tokenizer = hf_tokenizer(vocab)
    encode = lambda part: tokenizer.encode_batch_fast(part, add_special_tokens=False)  # noqa: E731
    return encode, lambda found: [np.array(encoding.ids) for encoding in found]


def nano_encode(vocab: Path) -> Any:
    """Nanotoken, ending in one numpy array and offsets."""
    import nanotoken

    tokenizer = nanotoken.Tokenizer.from_vocab(str(vocab), lowercase=True)
    encode = lambda part: tokenizer.encode_batch(part, add_special_tokens=False, parallel=False)  # noqa: E731
    return encode, lambda found: [found.ids[a:b] for a, b in itertools.pairwise(found.offsets)]


# --- ids to batches -----------------------------------------------------------------------------


def loading(vocab: Path, text: Path, folder: Path, runs: int, seconds: float) -> Figures:
    """Rates of all loaders, each in a process of its own, so that nobody's threads count as another's."""
    electra_fast.prepare([text], vocab=vocab, lowercase=True, out=folder / "shards", progress=False)
    np.save(folder / "rows.npy", rows_of(electra_fast.Corpus(folder / "shards")))
    figures: Figures = {}
    ways: dict[str, tuple[Any, Any]] = {}
    context = multiprocessing.get_context("spawn")
    for name in loaders(vocab, folder):
        figures[name] = {"Mtok/s": [], "Mtok/cpu-s": []}
        pipe, end = context.Pipe()
        process = context.Process(target=serve, args=(name, vocab, folder, seconds, end), daemon=True)
        process.start()
        end.close()
        ways[name] = (pipe, process)
        reason = answer(pipe)  # opened one after the other: peers write files that the next one reads
        if reason:
            figures[name]["missing"] = reason
            del ways[name]
        else:
            os.kill(process.pid or 0, signal.SIGSTOP)  # some have threads that never rest
    try:
        for number in range(runs):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                pipe, process = ways[name]
                os.kill(process.pid, signal.SIGCONT)
                pipe.send("run")
                record(figures[name], *pipe.recv())
                os.kill(process.pid, signal.SIGSTOP)
    finally:
        for pipe, process in ways.values():
            os.kill(process.pid, signal.SIGCONT)
            pipe.close()  # asks it to end
            process.join(timeout=10)
    return figures


def answer(pipe: Any) -> str:
    """What a process says when it is ready: nothing, or why it cannot be."""
    try:
        return str(pipe.recv())
    except EOFError:
        return "the process ended"


def serve(name: str, vocab: Path, folder: Path, seconds: float, pipe: Any) -> None:
    """The process of one loader: open it, then run whenever told to."""
    torch.set_num_threads(1)
    try:
        batches = loaders(vocab, folder)[name]()
        for _ in range(3):
            if next(batches).shape != (BATCH, LENGTH):
                raise ValueError("batches of another shape")
    except Exception as error:  # a peer may fail in any way: the table says how
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0][:100])
        return
    pipe.send("")
    try:
        while pipe.recv():
            tokens, start, processor = 0, time.perf_counter(), time.process_time()
            while time.perf_counter() - start < seconds:
                tokens += next(batches).numel()
            pipe.send((tokens, (time.perf_counter() - start, time.process_time() - processor)))
    except EOFError:
        os._exit(0)  # peers' threads would go on


def loaders(vocab: Path, folder: Path) -> dict[str, Callable[[], Iterator[torch.Tensor]]]:
    """What gives endless shuffled batches of [512, 128] int tensors; ours first."""
    mask = "+ DataCollatorForLanguageModeling"
    rows = np.load(folder / "rows.npy", mmap_mode="r")
    return {
        "electra-fast, packed and masked": lambda: ours_batches(folder / "shards"),
        f"datasets {mask}": lambda: masked(hf_batches(rows, folder), vocab, whole=False),
        f"datasets {mask}, vectorised": lambda: masked(hf_batches(rows, folder), vocab, whole=True),
        "datasets, rows only": lambda: hf_batches(rows, folder),
        f"MosaicML Streaming {mask}, vectorised": lambda: masked(mds_batches(rows, folder), vocab, whole=True),
        "MosaicML Streaming, rows only": lambda: mds_batches(rows, folder),
        f"litdata {mask}, vectorised": lambda: masked(litdata_batches(rows, folder), vocab, whole=True),
        "litdata, rows only": lambda: litdata_batches(rows, folder),
    }


def rows_of(corpus: Any) -> np.ndarray[Any, Any]:
    """All tokens, cut into rows as peers' recipes do: end to end, without regard to documents."""
    cls, sep = (corpus.special_tokens[name] for name in ("cls", "sep"))
    tokens = np.concatenate(list(corpus))
    body = tokens[: len(tokens) // (LENGTH - 2) * (LENGTH - 2)].reshape(-1, LENGTH - 2)
    return np.pad(body.astype(np.int64), ((0, 0), (1, 1)), constant_values=((0, 0), (cls, sep)))


def ours_batches(corpus: Path) -> Iterator[torch.Tensor]:
    """Ours: the thread that fills batches runs on the same core."""
    loader = electra_fast.BatchLoader(corpus, sequence_length=LENGTH, batch_size=BATCH)
    return (electra_fast.to_torch(batch)["input_ids"] for batch in loader)


def masked(batches: Iterator[torch.Tensor], vocab: Path, *, whole: bool) -> Iterator[torch.Tensor]:
    """The collator of `transformers` on these batches: called on rows, or its masking alone on all."""
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    collator = DataCollatorForLanguageModeling(PreTrainedTokenizerFast(tokenizer_object=hf_tokenizer(vocab), **names))
    if whole:
        return (collator.torch_mask_tokens(batch)[0] for batch in batches)
    return (collator([{"input_ids": row} for row in batch])["input_ids"] for batch in batches)


def hf_batches(rows: np.ndarray[Any, Any], folder: Path) -> Iterator[torch.Tensor]:
    """A dataset on disk, whole batches of shuffled indices at a time: its fastest way."""
    import datasets

    target = folder / "datasets"
    if not target.exists():
        datasets.disable_progress_bars()
        features = datasets.Features({"input_ids": datasets.List(datasets.Value("int64"), length=LENGTH)})
        datasets.Dataset.from_dict({"input_ids": rows}, features=features).save_to_disk(target)
    dataset = datasets.load_from_disk(target).with_format("numpy")
    draw = np.random.default_rng(0)
    while True:
        order = draw.permutation(len(rows))
        for start in range(0, len(rows) - BATCH + 1, BATCH):
            yield torch.from_numpy(dataset[order[start : start + BATCH]]["input_ids"].reshape(-1, LENGTH))


def mds_batches(rows: np.ndarray[Any, Any], folder: Path) -> Iterator[torch.Tensor]:
    """MDS shards, shuffled by its default algorithm."""
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
    """Litdata's binary chunks of tokens, shuffled."""
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


# --- measuring and printing ---------------------------------------------------------------------


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the clock and of this process's processor time."""
    start, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - processor


def record(figure: dict[str, Any], tokens: int, seconds: tuple[float, float]) -> None:
    """Add a run's two rates."""
    for key, value in zip(("Mtok/s", "Mtok/cpu-s"), seconds, strict=True):
        figure[key].append(tokens / value / 1e6)


def print_table(title: str, figures: Figures) -> None:
    """One line each, the absent ones with their reason."""
    print(f"\n| {title} | Mtok/s | Mtok per processor second | ours is faster by |\n| --- | --- | --- | --- |")
    ours = statistics.median(next(iter(figures.values()))["Mtok/cpu-s"])
    for name, figure in figures.items():
        if "missing" in figure:
            print(f"| {name} | missing ({figure['missing']}) | | |")
            continue
        cells = [spread(figure[key]) for key in ("Mtok/s", "Mtok/cpu-s")]
        factor = ours / statistics.median(figure["Mtok/cpu-s"])
        note = f"; {figure['note']}" if "note" in figure else ""
        print(f"| {name}{note} | {cells[0]} | {cells[1]} | {factor:.1f} |")
    print(flush=True)


def spread(values: list[float]) -> str:
    """Median and extremes."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def version(name: str) -> str:
    """The installed version, or that there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def machine() -> str:
    """Processor, number of cores, and how busy they are."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(":")[1].strip() for line in info.splitlines() if "model name" in line), platform.machine())
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"


def parts_of(text: Path, size: int, runs: int) -> list[list[str]]:
    """For each run documents of about 4 KB that no other run has."""
    content = text.read_text(encoding="utf-8")
    parts = [content[start : start + size] for start in range(0, min(len(content), size * runs), size)]
    return [[part[start : start + DOCUMENT] for start in range(0, len(part), DOCUMENT)] for part in parts]


def made_up_text(path: Path, size: int) -> Path:
    """Zipf-distributed words of syllables, with capitals, numbers and punctuation, in documents."""
    draw, syllables = (
        random.Random(0),
        [a + b for a in "bcdfghklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "é")],
    )
    words = ["".join(draw.choices(syllables, k=1 + min(number.bit_length() // 5, 3))) for number in range(200_000)]
    ranks = iter(np.random.default_rng(0).zipf(1.15, size // 3) % len(words))
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            for _ in range(draw.randrange(1, 30)):
                sentence = [words[rank] for rank in itertools.islice(ranks, draw.randrange(4, 30))] or ["end"]
                file.write(f"{' '.join(sentence).capitalize()}, {draw.randrange(3000)}.\n")
            file.write("\n")
    return path


def trained_vocab(text: Path, path: Path) -> Path:
    """A vocabulary of 16,000 entries trained on the text's beginning."""
    sample = path.with_suffix(".sample.txt")
    sample.write_text(text.read_text(encoding="utf-8")[:3_000_000], encoding="utf-8")
    electra_fast.train_vocab([sample], out=path, size=16_000, progress=False)
    return path


if __name__ == "__main__":
    main()
