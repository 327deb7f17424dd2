"""Shared fixtures: a small vocabulary, a small corpus, one thread, a plain processor; the order of test files.

Nothing is downloaded and no file is shipped: the text is Python's own documentation, which every
Python brings along.
"""

import os

# Before torch is imported, and for every process that a test starts: a worker per core leaves no core for a second
# thread, and results must not depend on the number of threads.
os.environ["OMP_NUM_THREADS"] = "1"
# Recorded losses and tolerances are a CPU's. With `CUDA_VISIBLE_DEVICES=0` tests use a GPU, as in bench/gpu.py.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import collections
import json
import random
import re
import shutil
import signal
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

# Without a GPU, kernels run in Triton's interpreter, which must be enabled before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


from electra_fast.ops import operations

# Raise an error for an operation that the check of kernels did not list.
operations.is_strict = True

pytest_plugins = ("child_processes",)
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
NUM_WORDS = 600
NUM_TOPICS = 40
# Files that train whole runs, longest first: if one started last, the other workers would wait for it. `make check`
# skips them.
LONG_FILES = """
documents ranks prepare_to_store mirror demo reproduction kernels examples finetuning learning step_processes
golden_losses selection finetuning_hardware step classifier_folder pretrain stall step_by_kernels resume generator_head
memory export step_on_fake_cuda finetuning_reference divergence settings graphs model_by_kernels loss_scaling
""".split()


def pytest_configure() -> None:
    """Resets signal handlers: children of `nohup` and of a shell's background jobs inherit ignored signals."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves long files to the front: workers take whole files in this order (`--dist loadfile`)."""
    order = {f"test_{name}.py": position for position, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    for item in items:
        if item.path.name in order:
            item.add_marker("long")


@pytest.fixture(scope="session", autouse=True)
def plain_processor() -> Iterator[Callable[[], Any]]:
    """Leaves `auto` nothing to measure in this process, since the result would depend on the machine and its load.

    Yields the function that returns the processor's real capabilities.
    """
    original = torch.cpu.get_capabilities
    plain = dict(original()) | dict.fromkeys(("avx512_bf16", "amx_bf16", "avx512_bw"), False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "get_capabilities", lambda: plain)
        yield original


@pytest.fixture
def own_processor(plain_processor: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor with all its capabilities."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", plain_processor)


@pytest.fixture
def products_by(monkeypatch: pytest.MonkeyPatch) -> Callable[..., set[str]]:
    """Returns a function that records the libraries to which calls of a class's method switch fp32 products."""

    def watch(owner: type, method: str = "forward") -> set[str]:
        libraries: set[str] = set()
        original = getattr(owner, method)
        switch = torch.backends.mkldnn.matmul

        def watched(*args: Any, **kwargs: Any) -> Any:
            libraries.add("onednn" if switch.fp32_precision == "bf16" else "default")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, method, watched)
        return libraries

    return watch


@pytest.fixture
def hostile_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a file or folder of every name that a program could import."""
    folder = tmp_path / "hostile"
    for name in (*sys.stdlib_module_names, "kernels", "_data", "sitecustomize", "triton"):
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise SystemExit('imported from the current folder')\n")
    for name in ("torch", "numpy", "electra_fast", "tokenizers", "transformers", "rich", "pyarrow"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('imported from the current folder')\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes rows as JSON lines to a file."""

    def write(rows: list[Any], name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture(scope="session")
def tiny_text() -> list[str]:
    """English documents with blank lines, one per topic of Python's language reference."""
    return [topics[name] for name in sorted(topics)[:NUM_TOPICS]]


@pytest.fixture(scope="session")
def tiny_vocab(tmp_path_factory: pytest.TempPathFactory, tiny_text: list[str]) -> Path:
    """An uncased WordPiece `vocab.txt`: special tokens, characters and the most frequent words of the text."""
    counts = collections.Counter(re.findall(r"[a-z]{2,}", " ".join(tiny_text).lower()))
    words = sorted(counts, key=lambda word: (-counts[word], word))[:NUM_WORDS]
    letters = string.ascii_lowercase + string.digits
    entries = [*SPECIAL_TOKENS, *letters, *string.punctuation, *(f"##{letter}" for letter in letters), *words]
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("\n".join(entries) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory, tiny_text: list[str], tiny_vocab: Path) -> Path:
    """A prepared corpus of `tiny_text`, from two files. Tests that write to it copy it first."""
    import electra_fast

    folder = tmp_path_factory.mktemp("corpus")
    half = len(tiny_text) // 2
    for name, documents in {"first.txt": tiny_text[:half], "second.txt": tiny_text[half:]}.items():
        (folder / name).write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    texts = [str(folder / "first.txt"), str(folder / "second.txt")]
    electra_fast.prepare(texts, vocab=str(tiny_vocab), out=str(folder / "shards"))
    return folder / "shards"


@pytest.fixture(scope="session")
def validation_corpus(tmp_path_factory: pytest.TempPathFactory, tiny_text: list[str], tiny_vocab: Path) -> Path:
    """The corpus of `tiny_text` with a fifth of its documents in the validation set."""
    import electra_fast

    folder = tmp_path_factory.mktemp("held-out") / "shards"
    electra_fast.prepare(iter(tiny_text), vocab=str(tiny_vocab), out=folder, holdout=0.2, progress=False)
    return folder


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory, validation_corpus: Path) -> Path:
    """An uninterrupted run of `tiny_run`, to compare resumed runs with. Tests that write to it copy it first."""
    from tiny_run import tiny_config

    from electra_fast.training.pretrain import pretrain

    out = tmp_path_factory.mktemp("whole") / "run"
    pretrain(validation_corpus, config=tiny_config(), out=out)
    return out


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """An S3 server on the loopback interface; `object_store.use` sends `s3://` there."""
    import object_store

    with object_store.running() as store:
        yield store


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    """Forks processes that run `tiny_run` without importing torch again."""
    from ranks import Server

    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def exact_run(server: Any, validation_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run with dropout on one rank; runs on several ranks must equal it bitwise."""
    from tiny_run import EXACT

    out = tmp_path_factory.mktemp("exact") / "run"
    server.run(1, validation_corpus, out, **EXACT)
    return out


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory, tiny_vocab: Path) -> Path:
    """A random encoder of a few thousand parameters, as `transformers` saves an ElectraModel."""
    from tiny_task import save_encoder

    return save_encoder(tmp_path_factory.mktemp("encoder"), tiny_vocab)


@pytest.fixture(scope="session")
def glue_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two GLUE tasks of a few dozen examples."""
    from tiny_task import write_mrpc, write_sst2

    folder = tmp_path_factory.mktemp("glue")
    write_sst2(folder / "SST-2")
    write_mrpc(folder / "MRPC")
    return folder


@pytest.fixture(scope="session")
def squad_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both versions of SQuAD, a dozen paragraphs each."""
    from tiny_reading import write_squad

    return write_squad(write_squad(tmp_path_factory.mktemp("squad"), 1), 2)


@pytest.fixture(scope="session")
def conll_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tagged sentences, some of which are longer than a chunk of `tiny_reading.SETTINGS`."""
    from tiny_reading import write_conll

    return write_conll(tmp_path_factory.mktemp("conll"), train=60, dev=20, words=(3, 70))


@pytest.fixture(scope="session")
def finetuned(tmp_path_factory: pytest.TempPathFactory, encoder_folder: Path, glue_folder: Path) -> tuple[Path, Any]:
    """Both tasks with two seeds, uninterrupted. Tests that write to the folder copy it first."""
    from tiny_task import NUM_LOGS, QUICK

    import electra_fast
    from electra_fast.finetuning.training import seed_run

    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seed_run, "_NUM_LOGS", NUM_LOGS)
        results = electra_fast.finetune(encoder_folder, glue=glue_folder, out=out, seeds=2, overrides=QUICK)
    return out, results


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills uninitialized floats with NaN, so that an unwritten output cannot pass as a result."""
    from torch.utils._device import _device_constructors

    _device_constructors()  # `with torch.device(...)` caches it on first use

    def poisoned(allocate: Any) -> Any:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = allocate(*args, **kwargs)
            with torch.no_grad():
                return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocate_poisoned

    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    assert torch.empty(2).isnan().all()


def unique_documents() -> list[list[int]]:
    """Documents of 1 to 800 tokens, 40,000 in total, with unique ids, so that a token identifies its position."""
    rng = random.Random(3)
    documents = []
    next_id = len(SPECIAL_TOKENS)
    while next_id < 40_000:
        length = min(1 + int(rng.expovariate(1 / 150)), 800)
        documents.append(list(range(next_id, next_id + length)))
        next_id += length
    return documents


@pytest.fixture(scope="session")
def documents() -> list[list[int]]:
    return unique_documents()


@pytest.fixture(scope="session")
def prepared_documents(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> Path:
    """A folder with these documents as text, their vocabulary and their corpus."""
    from electra_fast import prepare

    folder = tmp_path_factory.mktemp("documents")
    words = [f"w{i}" for i in range(documents[-1][-1] + 1)]
    (folder / "vocab.txt").write_text("\n".join(SPECIAL_TOKENS + words[len(SPECIAL_TOKENS) :]) + "\n")
    (folder / "text.txt").write_text("\n\n".join(" ".join(words[i] for i in ids) for ids in documents) + "\n")
    prepare([folder / "text.txt"], vocab=folder / "vocab.txt", out=folder / "shards", progress=False)
    return folder


@pytest.fixture
def corpus(tmp_path: Path, prepared_documents: Path) -> Path:
    """A copy of the corpus of these documents for each test, which may damage it."""
    return shutil.copytree(prepared_documents, tmp_path, dirs_exist_ok=True) / "shards"
