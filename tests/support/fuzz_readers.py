"""Mutates valid files of every kind that the package reads, and runs the commands that read them.

    python tests/support/fuzz_readers.py --minutes 60 [--seed 0] [--only corpus tokenizer] [--out fuzz-failures]

A command must end within `SECONDS` and `EXTRA_BYTES` of memory, with exit code 0, or with exit code 2 and an error of
one line. Anything else, such as a traceback, a panic, a signal or a control character on the terminal, is a failure.
Its first example is stored in `--out`, with the mutated file and the output.

Checksums are computed again if the case would otherwise only test the checksum. Each case is a fork of a process that
has imported the package, so it takes a few milliseconds. `test_fuzz.py` runs some hundred cases.
"""

import argparse
import contextlib
import gzip
import json
import lzma
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a fork has one thread
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import tiny_reading
import tiny_task
from tiny_run import TINY
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import electra_fast as ef
from electra_fast.cli import main as command_line
from electra_fast.files import checkpoint_folder

SECONDS = 20.0
EXTRA_BYTES = 1 << 30
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Replacements for a number and for a value.
NUMBERS = ["0", "-1", "1", "255", "65536", "2147483648", "4294967295", "9223372036854775807", "18446744073709551616"]
NUMBERS += ["1e308", "-0.0", "NaN", "1" * 400]
VALUES = ["null", "true", '""', '"\\u0000"', '"\\u001b[31m"', "[]", "{}", "[[]]", '{"a": 1}', "[" * 100_000]
VALUES += ['"' + "x" * 70_000 + '"']


@dataclass(frozen=True)
class Target:
    """Files of one kind and the command that reads them, with {folder}, {file} (the mutated file) and {out}."""

    name: str
    folder: Path
    command: tuple[str, ...]
    mutable: str = "**/*"
    reseal: Callable[[Path], None] = lambda folder: None
    specials: bool = False
    """The command refuses pipes and devices. Other commands read them, and would wait for data."""


# --- the files ---


def make_targets(root: Path) -> Iterator[Target]:
    """Yields targets with small valid files of every kind."""
    texts = [text for text, _ in tiny_task.sentences(60)]
    vocab = root / "vocab.txt"
    words = sorted({word for text in texts for word in text.split()})
    letters = [chr(97 + i) for i in range(26)]
    vocab.write_text("\n".join([*SPECIAL, *letters, *(f"##{x}" for x in letters), ".", ",", *words]) + "\n")

    inputs = _inputs(root / "inputs", texts)
    yield Target("inputs", inputs, ("prepare", "{file}", "--vocab", str(vocab), "--out", "{out}"))
    text = inputs / "blank.txt"
    tokenizers = _tokenizers(root / "tokenizers", vocab, texts)
    yield Target("tokenizer", tokenizers, ("prepare", str(text), "--vocab", "{file}", "--out", "{out}"))

    corpus = root / "corpus"
    ef.prepare([str(text)], vocab=vocab, out=corpus, holdout=0.2, progress=False)
    yield Target("corpus, inspect", corpus, ("inspect", "{folder}"), specials=True)
    yield Target("corpus, verify", corpus, ("verify", "{folder}"), specials=True)
    settings = TINY | {"train.steps": "3", "train.checkpoint_every": "1", "data.sequence_length": "16"}
    pretrain = ("pretrain", "--preset", "tiny", *tiny_reading.flags(settings))
    yield Target("corpus, pretrain", corpus, (*pretrain, "{folder}", "--out", "{out}"), specials=True)

    run = root / "run"
    _call([*pretrain, str(corpus), "--out", str(run)])
    resume = ("pretrain", "--out", "{folder}", "--train.steps", "4")
    yield Target("checkpoint, resume", run, resume, "checkpoints/step-3/*", _reseal_checkpoints)
    export = ("export", "{folder}", "--out", "{out}")
    yield Target("checkpoint, export", run, export, "checkpoints/step-3/*", _reseal_checkpoints)
    yield Target("run, resume", run, resume, "*")
    configs = root / "configs"
    configs.mkdir()
    shutil.copy(run / "config.toml", configs)
    yield Target("toml", configs, ("flops", "{file}"))

    exported = root / "exported"
    _call(["export", str(run), "--out", str(exported)])
    yield Target("hugging face, import", exported, ("import", "{folder}", "--out", "{out}"))
    encoder = tiny_task.save_encoder(root / "encoder", vocab)
    modern = tiny_task.save_encoder(root / "modern", vocab, "modernbert")
    data = root / "data"
    tiny_task.write_sst2(data / "classification")
    tiny_reading.write_conll(data / "tagging", train=8, dev=4)
    tiny_reading.write_squad(data / "question-answering", train=3, dev=2)
    quick = tiny_reading.flags(tiny_reading.SETTINGS | {"finetune.epochs": "1"})
    questions = {"classification": ["--text", "sentence", "--label", "label"]}
    models_of = {}
    for task in ("classification", "tagging", "question-answering"):
        train_file = sorted(data.glob(f"{task}/train*"))[0]
        dev_file = sorted(data.glob(f"{task}/dev*"))[0]
        options = ("--task", task, *questions.get(task, []), *quick)
        out = root / f"tuned-{task}"
        start = ("finetune", str(encoder), *options)
        _call([*start, "--train", str(train_file), "--dev", str(dev_file), "--out", str(out)])
        models_of[task] = next(out.glob("*/seed-0/model"))
        files = (*start, "--train", "{file}", "--dev", str(dev_file), "--out", "{out}")
        yield Target(f"finetune, {task}", data / task, files, train_file.name)
        if task != "classification":
            yield Target(f"predict, {task}", data / task, ("predict", str(models_of[task]), "{file}"), dev_file.name)
    tuned = root / "tuned-classification"
    tune = ("finetune", "{folder}", "--task", "tagging", *quick, "--out", "{out}")
    split = [f"--{name}={data}/tagging/{name}.conll" for name in ("train", "dev")]
    for name, folder in (("bert", encoder), ("modern", modern)):
        yield Target(f"hugging face, {name}", folder, (*tune, *split))
    again = ("--task", "classification", *questions["classification"], *quick)
    files = (f"--train={data}/classification/train.tsv", f"--dev={data}/classification/dev.tsv")
    rerun = ("finetune", str(encoder), *again, *files, "--out", "{folder}", "--seeds", "2")
    yield Target("finetune, resume", tuned, rerun)
    rows = _rows(root / "rows", texts)
    predict = ("predict", str(models_of["classification"]), "{file}", "--text", "sentence")
    yield Target("predict, rows", rows, predict)
    of_rows = ("predict", "{folder}", str(rows / "rows.csv"), "--text", "sentence")
    yield Target("fine-tuned folder", models_of["classification"], of_rows)


def _inputs(folder: Path, texts: list[str]) -> Path:
    """Writes documents in every format of `prepare`."""
    folder.mkdir()
    plain = "\n\n".join(texts).encode()
    table = pa.table({"text": texts, "n": range(len(texts))})
    lines = _json_lines(table)
    (folder / "blank.txt").write_bytes(plain)
    (folder / "utf16.txt").write_bytes("\n\n".join(texts).encode("utf-16"))
    (folder / "text.txt.gz").write_bytes(gzip.compress(plain))
    (folder / "text.txt.xz").write_bytes(lzma.compress(plain))
    (folder / "rows.jsonl").write_bytes(lines)
    (folder / "rows.json").write_text(json.dumps(table.to_pylist(), indent=1))
    (folder / "rows.jsonl.zst").write_bytes(pa.compress(lines, codec="zstd", asbytes=True))
    for codec in ("none", "snappy", "zstd"):
        pq.write_table(table, folder / f"{codec}.parquet", compression=codec, row_group_size=25)
    _write_arrow(folder / "file.arrow", table, pa.ipc.new_file)
    _write_arrow(folder / "stream.arrow", table, pa.ipc.new_stream)
    return folder


def _json_lines(table: pa.Table) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()


def _write_arrow(path: Path, table: pa.Table, writer_of: Callable[..., Any]) -> None:
    with writer_of(str(path), table.schema) as writer:
        writer.write_table(table)


def _tokenizers(folder: Path, vocab: Path, texts: list[str]) -> Path:
    """Writes a vocab.txt, and tokenizer.json files of three models."""
    folder.mkdir()
    shutil.copy(vocab, folder / "vocab.txt")
    kinds: dict[str, tuple[Any, Any]] = {
        "wordpiece": (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer),
        "bpe": (models.BPE(unk_token="[UNK]"), trainers.BpeTrainer),
        "unigram": (models.Unigram(), trainers.UnigramTrainer),
    }
    for name, (model, trainer) in kinds.items():
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel() if name == "bpe" else pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.ByteLevel() if name == "bpe" else decoders.WordPiece()
        unknown = {"unk_token": "[UNK]"} if name == "unigram" else {}
        settings = trainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False, **unknown)
        tokenizer.train_from_iterator(texts, settings)
        tokenizer.save(str(folder / f"{name}.json"))
    return folder


def _rows(folder: Path, texts: list[str]) -> Path:
    """Writes rows to predict, in every format."""
    folder.mkdir()
    table = pa.table({"sentence": texts[:12], "id": range(12)})
    for name, delimiter in (("rows.csv", ","), ("rows.tsv", "\t")):
        options = pa.csv.WriteOptions(delimiter=delimiter, quoting_style="needed")
        pa.csv.write_csv(table, folder / name, options)
    (folder / "rows.jsonl").write_bytes(_json_lines(table))
    (folder / "rows.json").write_text(json.dumps(table.to_pylist()))
    pq.write_table(table, folder / "rows.parquet")
    _write_arrow(folder / "rows.arrow", table, pa.ipc.new_file)
    return folder


def _reseal_checkpoints(folder: Path) -> None:
    """Updates the checksums in the state of the mutated checkpoint."""
    for directory in folder.glob("checkpoints/step-*"):
        state = directory / checkpoint_folder.STATE
        with contextlib.suppress(
            ValueError, TypeError, KeyError, OSError, RecursionError
        ):  # the state may be missing or malformed
            content = json.loads(state.read_bytes())
            del content["checksum"]
            files = [path for path in directory.iterdir() if path.is_file() and path != state]
            state.write_text(json.dumps(checkpoint_folder.sealed(content, directory, files)))


# --- the mutations ---


def change(file: Path, rng: random.Random, specials: bool) -> None:
    """Changes a file's bytes in one to three places, mostly a few. Rarely replaces it by a folder, link or device."""
    data = file.read_bytes()
    if rng.random() < 0.03:
        file.unlink()
        special = [lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero")] if specials else []
        rng.choice([file.mkdir, lambda: file.symlink_to(file), *special])()
        return
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        data = rng.choice(MUTATIONS)(data, rng)
    file.write_bytes(data)


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return b"\xff"
    # Headers and footers matter more than the bytes between them.
    place = rng.choice(
        [rng.randrange(len(data)), rng.randrange(min(64, len(data))), -1 - rng.randrange(min(64, len(data)))]
    )
    changed = bytearray(data)
    changed[place] ^= 1 << rng.randrange(8) if rng.random() < 0.7 else rng.randrange(1, 256)
    return bytes(changed)


def _slice(data: bytes, rng: random.Random) -> bytes:
    first, last = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    last = min(last, first + rng.choice([1, 4, 64, 1 << 20]))
    part = data[first:last]
    if rng.random() < 0.5:
        return data[:first] + data[last:]
    return data[:last] + part * rng.choice([1, 2, 50]) + data[last:]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _insert(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    piece = rng.choice(
        [b"\0", b"\xff\xfe", b"\x1b[31m", b"\n", b"\t", b'"', b"\xf0\x9f\x98\x80", b"{", rng.randbytes(8)]
    )
    return data[:place] + piece + data[place:]


def _number(data: bytes, rng: random.Random) -> bytes:
    numbers = list(re.finditer(rb"-?\d+(\.\d+)?(e-?\d+)?", data[: 1 << 16]))
    if not numbers:
        return _flip(data, rng)
    chosen = rng.choice(numbers)
    return data[: chosen.start()] + rng.choice(NUMBERS).encode() + data[chosen.end() :]


def _value(data: bytes, rng: random.Random) -> bytes:
    """Replaces a value of JSON or TOML."""
    values = list(re.finditer(rb"(?<=[:=,\[]) ?(\"[^\"\n]*\"|[\w.+-]+)", data[: 1 << 16]))
    if not values:
        return _insert(data, rng)
    chosen = rng.choice(values)
    return data[: chosen.start()] + rng.choice(VALUES).encode() + data[chosen.end() :]


def _words(data: bytes, rng: random.Random) -> bytes:
    """Replaces a number of four or eight bytes, as in binary headers."""
    if len(data) < 16:
        return _insert(data, rng)
    size = rng.choice([4, 8])
    place = rng.randrange(0, min(len(data), 4096) - size)
    value = rng.choice([0, 1, 255, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1]) % (1 << 8 * size)
    return data[:place] + value.to_bytes(size, "little") + data[place + size :]


MUTATIONS = [_flip, _flip, _slice, _cut, _insert, _number, _number, _value, _value, _words]


# --- the cases ---


def run_case(target: Target, rng: random.Random, work: Path, keep: Path, failures: dict[str, str]) -> None:
    """Copies the files, changes one of them, runs the command, and checks its end."""
    shutil.rmtree(work, ignore_errors=True)
    folder = work / "files"
    out = work / "out"
    shutil.copytree(target.folder, folder)
    file = rng.choice(sorted(path for path in folder.glob(target.mutable) if path.is_file()))
    change(file, rng, target.specials)
    target.reseal(folder)
    shutil.copytree(folder, work / "before", symlinks=True, ignore=lambda *_: [file.name] if file.is_fifo() else [])
    places = {"folder": folder, "file": file, "out": out}
    code, extra = run_command([part.format(**places) for part in target.command], work)
    printed = (work / "stderr").read_text(errors="replace")
    problem = _problem(code, extra, printed + (work / "stdout").read_text(errors="replace"))
    if problem and problem not in failures:
        where = f"{file.relative_to(folder)}: {printed.strip()[-1000:]}"
        example = keep / f"{target.name.replace(', ', '-').replace(' ', '-')}-{len(failures)}"
        shutil.rmtree(example, ignore_errors=True)
        shutil.copytree(work / "before", example / "files", symlinks=True)
        (example / "printed").write_text(f"{problem}\n{' '.join(target.command)}\n{where}\n")
        failures[problem] = where


def run_command(arguments: list[str], work: Path) -> tuple[int, int]:
    """Returns the exit code (-1000 after `SECONDS`, negative for a signal), and the bytes that the command added."""
    before = _of_this_process("RssAnon")
    child = os.fork()
    if child == 0:
        _become_command(arguments, work)
    handle = os.pidfd_open(child)
    try:
        if not select.select([handle], [], [], SECONDS)[0]:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.waitpid(child, 0)
            return -1000, 0
    finally:
        os.close(handle)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code, max(0, (usage.ru_maxrss << 10) - before)


def _of_this_process(name: str) -> int:
    """Returns the bytes in a line of /proc/self/status."""
    match = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) << 10


def _become_command(arguments: list[str], work: Path) -> None:
    code = 1
    try:
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(work / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = open(1, "w", closefd=False)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_DATA, (_of_this_process("VmData") + 4 * EXTRA_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = command_line(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _problem(code: int, extra: int, printed: str) -> str:
    """Returns a description of a command's failure, equal for equal faults; empty if there is none."""
    if code == -1000:
        return f"did not end within {SECONDS:.0f} s"
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    if code not in (0, 2):
        lines = [line for line in printed.splitlines() if line and "this is a bug" not in line]
        places = re.findall(r'File ".*/(electra_fast/[^"]+)", line (\d+)', printed)
        return f"exit code {code}: {re.sub(r'[0-9]+', 'N', lines[-1][:100] if lines else '')} at {places[-1:]}"
    if "panicked at" in printed:
        return "printed a panic: " + re.sub(r"\d+", "N", printed.split("panicked at")[1].splitlines()[0])[:120]
    if extra > EXTRA_BYTES:
        return f"took over {EXTRA_BYTES >> 20} MiB"
    if any(ord(c) < 32 and c not in "\n\t\r" for c in printed):
        return "printed a control character"
    errors = [line for line in printed.splitlines() if line.startswith("electra-fast: error:")]
    if code == 2 and len(errors) != 1:
        return f"exit code 2 with {len(errors)} lines of error"
    if errors and len(errors[0]) > 2000:
        return "an error line of over 2,000 characters"
    return ""


def _call(arguments: list[str]) -> None:
    if code := command_line(arguments):
        raise SystemExit(f"{' '.join(arguments)}: exit code {code}")


def main() -> int:
    """Runs cases of each target in turn; seed and number determine a case. Prints each kind of failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="at most")
    parser.add_argument("--cases", type=int, default=1 << 40, help="of each kind, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[""], help="targets whose name contains one of these words")
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), help="folder for an example of each failure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "seeds").mkdir()
        targets = [t for t in make_targets(work / "seeds") if any(word in t.name for word in options.only)]
        failures: dict[str, dict[str, str]] = {target.name: {} for target in targets}
        number = 0
        end = time.monotonic() + 60 * options.minutes
        while number < options.cases and time.monotonic() < end:
            for target in targets:
                rng = random.Random(f"{options.seed} {target.name} {number}")
                run_case(target, rng, work / "case", options.out, failures[target.name])
            number += 1
    print(f"{number} cases of each of {len(targets)} targets")
    for name, problems in failures.items():
        for problem, where in problems.items():
            print(f"\n== {name}: {problem}\n{where}")
    return int(any(failures.values()))


if __name__ == "__main__":
    sys.exit(main())
