"""Domains to adapt an encoder to: text, and a task whose validation texts are not in it.

Each function returns the documents of the domain, and the task's training and validation examples (label, text), in a
random but fixed order.
"""

from __future__ import annotations

import ast
import gzip
import json
import random
import re
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

NUM_TRAIN = 1_000
NUM_DEV = 2_000
Example = tuple[str, str]
Domain = tuple[list[str], list[Example], list[Example]]

LISTS = Path("/var/lib/apt/lists")
SECTIONS = (
    "admin comm database devel editors electronics fonts games gnome graphics hamradio httpd kde mail math net science "
    "sound tex text utils vcs video web x11"
).split()
MANUALS = Path("/usr/share/man")


def _fields(path: Path) -> Iterator[dict[str, str]]:
    """Yields the fields of each package in one of apt's lists."""
    command = ["/usr/lib/apt/apt-helper", "cat-file", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for stanza in text.split("\n\n"):
        pairs = (line.partition(": ") for line in re.split(r"\n(?! )", stanza))
        yield {name.rstrip(":"): value for name, _, value in pairs}


def packages() -> Domain:
    """Descriptions of Debian's packages, one per source package; the task is to predict a package's section."""
    texts: dict[str, str] = {}
    for path in LISTS.glob("*_Translation-en*"):
        texts |= {fields["Package"]: fields["Description-en"] for fields in _fields(path) if "Description-en" in fields}
    chosen: dict[str, dict[str, str]] = {}
    for path in sorted(LISTS.glob("*_Packages*")):
        for fields in _fields(path):
            source = fields.get("Source", fields.get("Package", "")).partition(" ")[0]
            if fields.get("Package") in texts and (source not in chosen or fields["Package"] == source):
                chosen[source] = fields
    if not chosen:
        raise SystemExit(f"{LISTS}: no descriptions; run apt-get -o Acquire::Languages=en update")
    sections = {}
    for _source, package in sorted(chosen.items()):
        title, *lines = (line.strip() for line in texts[package["Package"]].split("\n"))
        body = "\n".join("" if line == "." else line for line in lines)
        sections[f"{title}.\n" + re.sub(r"(?<!\n)\n(?![\n*+-])", " ", body)] = package["Section"].rpartition("/")[2]
    pairs = [(section, text) for text, section in sections.items()]
    random.Random(0).shuffle(pairs)
    examples = [pair for pair in pairs if pair[0] in SECTIONS]
    dev = examples[:NUM_DEV]
    train = examples[NUM_DEV : NUM_DEV + NUM_TRAIN]
    hidden = {text for _, text in dev}
    return [text for _, text in pairs if text not in hidden], train, dev


def manuals() -> Domain:
    """English manual pages of this machine; the task is to predict the package of a paragraph.

    A package has at most 150 pages; a fifth of them are the validation set.
    """
    owners: dict[str, str] = {}
    for path in Path("/var/lib/dpkg/info").glob("*.list"):
        for line in path.read_text().splitlines():
            if re.match(rf"{MANUALS}/man\d/", line):
                owners[line] = path.stem.partition(":")[0]
    draw = random.Random(0)
    counts = Counter[str]()
    pages = {}
    for name in draw.sample(sorted(owners), len(owners)):
        if counts[owners[name]] < 150 and (text := _page(Path(name))):
            counts[owners[name]] += 1
            pages[name] = text
    sizes = Counter(owners[name] for name in pages)
    usual = {owner for owner, size in sizes.items() if size >= 20}
    texts: list[str] = []
    examples: dict[bool, list[Example]] = {False: [], True: []}
    for name, text in pages.items():
        owner = owners[name]
        is_hidden = owner in usual and draw.random() < 0.2
        if not is_hidden:
            texts.append(text)
        if owner in usual:
            paragraphs = [paragraph for paragraph in text.split("\n\n") if 30 <= len(paragraph.split()) <= 200]
            examples[is_hidden] += [
                (owner, paragraph) for paragraph in draw.sample(paragraphs, min(5, len(paragraphs)))
            ]
    draw.shuffle(texts)
    return texts, _drawn(draw, examples[False], NUM_TRAIN), _drawn(draw, examples[True], NUM_DEV)


def docstrings() -> Domain:
    """Docstrings of the Python packages in this environment; the task is to predict a docstring's package.

    Uses 1,000 docstrings of each of the twenty packages with the most; a fifth of the files are the validation set.
    """
    draw = random.Random(0)
    texts_by_package: dict[str, list[tuple[Path, str]]] = {}
    for package in sorted(path.parent for path in Path(sysconfig.get_path("purelib")).glob("*/__init__.py")):
        files = sorted(package.rglob("*.py"))
        texts_by_package[package.name] = [
            (file, text) for file in draw.sample(files, len(files)) for text in _docstrings(file)
        ]
    usual = sorted(texts_by_package, key=lambda name: -len(texts_by_package[name]))[:20]
    texts: list[str] = []
    examples: dict[bool, list[Example]] = {False: [], True: []}
    for package_name in usual:
        pairs = texts_by_package[package_name][:1_000]
        files = sorted({file for file, _ in pairs})
        hidden = set(draw.sample(files, len(files) // 5))
        texts += [text for file, text in pairs if file not in hidden]
        for file, text in pairs:
            examples[file in hidden].append((package_name, text))
    draw.shuffle(texts)
    return texts, _drawn(draw, examples[False], NUM_TRAIN), _drawn(draw, examples[True], NUM_DEV)


def _docstrings(path: Path) -> list[str]:
    """Returns the docstrings of at least 20 words in a file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    except (SyntaxError, ValueError):  # templates, and files for other versions of Python
        return []
    documented_texts = (ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented))
    return [text for text in documented_texts if len(text.split()) >= 20]


def _drawn(draw: random.Random, examples: list[Example], number: int) -> list[Example]:
    return draw.sample(examples, min(number, len(examples)))


def _page(path: Path) -> str:
    """Returns the paragraphs of a manual page as plain text; empty for a link to another page."""
    if not path.is_file() or path.is_symlink():
        return ""
    source = gzip.open(path, "rt", encoding="utf-8", errors="replace").read()
    if source.lstrip().startswith(".so"):
        return ""
    lines = [
        "" if re.match(r"[.'](PP|P|LP|TP|SH|SS|IP|sp|Pp|Sh|Ss|It)\b", line) else line for line in source.splitlines()
    ]
    lines = [re.sub(r"^[.'](B|I|BR|IR|BI|IB|RB|RI|Nm|Ar|Fl|Cm|Xr)\s+", "", line) for line in lines]
    text = "\n".join(line for line in lines if not line.startswith((".", "'", '\\"')))
    text = re.sub(r"\\f\[?[A-Z]+\]?|\\f[BIRP1-4]|\\&|\\s[+-]?\d", "", text)
    text = text.replace("\\-", "-").replace("\\e", "\\").replace("\\(aq", "'").replace('\\"', '"')
    paragraphs = re.sub(r"(?<!\n)\n(?!\n)", " ", text).split("\n\n")
    return "\n\n".join(stripped for paragraph in paragraphs if (stripped := paragraph.strip()))


DOMAINS = {"packages": packages, "manuals": manuals, "docstrings": docstrings}


def write(name: str, folder: Path) -> None:
    """Writes, once, text.jsonl, task.jsonl (the texts of the task's training set alone), train.jsonl and dev.jsonl."""
    if (folder / "dev.jsonl").exists():
        return
    texts, train, dev = DOMAINS[name]()
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "text.jsonl", [{"text": text} for text in texts])
    _write(folder / "task.jsonl", [{"text": text} for _, text in train])
    for file, examples in (("train", train), ("dev", dev)):
        _write(folder / f"{file}.jsonl", [{"text": text, "label": label} for label, text in examples])


def _write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
