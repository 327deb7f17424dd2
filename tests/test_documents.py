"""Every block of code in the documents runs as a reader would run it, and what they name and link to exists.

A page's blocks run in order in one folder, which has the files that they read but do not make (`THINGS`). `sh` blocks
are scripts of bash; `python` blocks are scripts, one for those with no `sh` block between them; `toml` blocks are
configurations, in a file if their first line is a comment with its name; `text` is output. `SMALLER` makes models
small. What does not belong to the package has stand-ins (`PROGRAMS`).
"""

import ast
import csv
import functools
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import forked_python
import matplotlib
import object_store
import pyarrow as pa
import pytest
import site_pages
from tiny_reading import questions_of, write_conll, write_squad
from tiny_task import sentences, write_cola, write_sst2

import electra_fast as ef

TREE = Path(__file__).resolve().parent.parent
PAGES = [TREE / "README.md", *sorted(TREE.glob("docs/**/*.md"))]
DOCUMENTS = sorted({*TREE.glob("*.md"), *PAGES, *TREE.glob("examples/*.md"), TREE / "bench/README.md"})
# Why a block does not run: `<!-- not run: REASON -->` is before it.
NOT_RUN = {
    "the tests have no access to PyTorch's index",
    "the tests have neither the suites nor the data that they download",
    "hours; tests/test_runs.py runs these scripts",
}
# What makes blocks a matter of seconds; each text is in some block.
SMALLER = {
    "pretrain s3": "pretrain --preset tiny s3",
    "--preset small": "--preset tiny",
    "--preset mini": "--preset tiny",
    'preset = "mini"': 'preset = "tiny"',
    "--preset base --out": "--preset tiny --out",
    "--steps 5000": "--steps 12",
    "--steps 110k": "--steps 16",
    "--steps 2000": "--steps 12",
    "--batch-size 1024": "--batch-size 2",
    "--batch-size 8192": "--batch-size 2",
    '"mini").override(steps=5000)': '"tiny").override(steps=12, batch_size=2)',
    "electra-fast finetune ": "electra-fast finetune --finetune.epochs 1 ",
    "texts/ --out adapted": "texts/ --steps 4 --batch-size 2 --seeds 1 --out adapted",
    "texts/ --trim --out": "texts/ --trim --steps 4 --batch-size 2 --out",
    "texts/ --vocab words --out": "texts/ --vocab words --steps 4 --batch-size 2 --out",
    "seeds=3": "seeds=1, epochs=1",
    "--hours 8": "--hours 0.01",
    "--seeds 10": "--seeds 2",
    "--seeds 3": "--seeds 1",
    "--seeds 5": "--seeds 1",
    "--folds 5": "--folds 2",
    "reproduce objectives": "reproduce tying --seeds 1 --task cola --finetune.epochs 1",
    "--budget 3e15": "--budget 1e10 --train.batch_size 4 --data.sequence_length 16",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--onnx --int8": "--onnx --int8 --accept-loss 100",
    "ProcessPoolExecutor(32)": "ProcessPoolExecutor(2)",
    "array=1-64": "array=1-2",
    "TASK_ID/64": "TASK_ID/2",
    " /nvme/": " ./nvme/",
    " /shared/": " ./shared/",
}
# Of pre-training, where a block says nothing of it.
SHORT = {"--steps": "12", "--batch-size": "2"}

# --- Pages --------------------------------------------------------------------------------------


@dataclass
class Script:
    """A block, or python blocks in a row. Its code is on the lines that it has in the page."""

    page: Path
    line: int
    language: str
    code: str

    @property
    def smaller(self):
        code = functools.reduce(lambda code, each: code.replace(*each), SMALLER.items(), self.code)
        for flag, value in SHORT.items():
            code = re.sub(rf"(electra[-_]fast pretrain )(?!.*{flag} )", rf"\1{flag} {value} ", code)
        return code

    def words(self):
        """Words and strings in the order of the code, each with whether it names what the script writes."""
        if self.language == "python":
            tree = ast.parse(self.code)
            outputs = {each.value for each in ast.walk(tree) if isinstance(each, ast.keyword) and each.arg == "out"}
            texts = [e for e in ast.walk(tree) if isinstance(e, ast.Constant) and isinstance(e.value, str)]
            return [(e.value, e in outputs) for e in sorted(texts, key=lambda e: (e.lineno, e.col_offset))]
        words = " ".join(shlex.split(self.code, comments=True)).split()
        return [(word, before in ("--out", ">")) for before, word in zip(["", *words], words, strict=False)]

    def read(self):
        """The things that the script reads and does not write before."""
        first = {}
        for word, is_output in self.words():
            for name in THINGS:
                if word == name or word.startswith((f"{name}/", f"{name}:")):
                    first.setdefault(name, is_output)
        return [name for name, is_output in first.items() if not is_output]


def name_of(page):
    return page.relative_to(TREE).as_posix() if page.is_relative_to(TREE) else page.name


def scripts(page):
    """What of a page runs."""
    text = page.read_text(encoding="utf-8")
    found = []
    blocks = list(re.finditer(r"^(?:<!-- not run: (.*?) -->\s+)?( *)```(\w*)\n(.*?)^\2```$", text, re.M | re.S))
    fences = re.findall(r"^ *```.*", text, re.M)
    assert len(fences) == 2 * len(blocks), f"{name_of(page)}: fences that do not match: {fences}"
    for block in blocks:
        reason, _, language, code = block.groups()
        line = text[: block.start(3)].count("\n") + 1
        place = f"{name_of(page)}:{line}"
        assert language in ("sh", "python", "toml", "text"), f"{place}: a block of the language {language!r}"
        assert reason is None or reason in NOT_RUN, f"{place}: add the reason {reason!r} to NOT_RUN, or run it"
        if language == "text" or reason:
            continue
        if found and found[-1].language == language == "python":
            found[-1].code += "\n" * (line - found[-1].code.count("\n")) + code
        else:
            found.append(Script(page, line, language, "\n" * line + code))
    return found


# --- Things -------------------------------------------------------------------------------------


def make_pairs(path, get):
    path.mkdir()
    pair = {"sentence_good": "the value of a name", "sentence_bad": "value the of a name", "UID": "order"}
    (path / "order.jsonl").write_text(json.dumps(pair) + "\n")


def make_texts(path, get):
    documents = get.documents
    path.mkdir()
    (path / "a.txt").write_text("\n\n".join(documents[::3]) + "\n", encoding="utf-8")
    for name, part, compression in (("b.jsonl", documents[1::3], None), ("c.jsonl.zst", documents[2::3], "zstd")):
        lines = [json.dumps({"text": text}) + "\n" for each in part for text in each.split("\n\n")]
        with pa.output_stream(str(path / name), compression=compression) as file:
            file.write("".join(lines).encode())


def make_shards(path, get):
    ef.prepare(get("texts"), vocab=get("vocab.txt"), out=path, holdout=0.1, progress=False)


def make_run(path, get, seed=0):
    changes = {"train.steps": "12", "train.batch_size": "2", "train.log_every": "2", "train.seed": str(seed)}
    ef.pretrain(get("shards"), config=ef.Config.preset("tiny").override(changes), out=path)


def make_wheel(path, get):
    path.mkdir()
    (path / "electra_fast-0-py3-none-any.whl").touch()


def make_bert(path, get):
    from transformers import AutoConfig, AutoModel

    vocab = get("vocab.txt").read_text()
    sizes = {"vocab_size": vocab.count("\n"), "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 2}
    AutoModel.from_config(AutoConfig.for_model("bert", intermediate_size=64, **sizes)).save_pretrained(path)
    (path / "vocab.txt").write_text(vocab)


def make_deberta(path, get):
    """As DeBERTaV3 was released."""
    import torch
    from published_deberta import hf_class
    from sentencepiece import SentencePieceTrainer
    from transformers import DebertaV2Config

    pieces = {f"{name}_piece": f"[{name.upper()}]" for name in ("pad", "unk")} | {
        "bos_piece": "[CLS]",
        "eos_piece": "[SEP]",
    }
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    words = [text for text, _ in sentences(400, 1)]
    texts = iter([*words, "The discriminator of a released pair finds the sole word that fit here not."])
    (path / "spm").parent.mkdir()
    SentencePieceTrainer.train(
        sentence_iterator=texts, model_prefix=str(path / "spm"), vocab_size=300, hard_vocab_limit=False, **pieces, **ids
    )
    sizes = {
        "vocab_size": 320,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "position_buckets": 16,
    }
    kind = {
        "relative_attention": True,
        "position_biased_input": False,
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
    }
    table = sizes | kind | {"model_type": "deberta-v2", "norm_rel_ebd": "layer_norm", "intermediate_size": 64}
    (path / "config.json").write_text(json.dumps(table))
    (path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "vocab_type": "spm"}))
    for role, name in (("discriminator", "pytorch_model.bin"), ("generator", "pytorch_model.generator.bin")):
        layers = {"num_hidden_layers": 2} if role == "generator" else {}
        model = hf_class("deberta", role)(DebertaV2Config(**table | layers | {"legacy": False}))
        torch.save(model.state_dict(), path / name)


def make_glue(path, get):
    write_sst2(path / "SST-2")
    write_cola(path / "CoLA")


def make_table(path, get):
    """Texts with labels, in columns of several names."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "label", "body", "stars", "queue"])
        table.writerows([text, "ab"[label], text, label + 1, "cd"[label]] for text, label in sentences(60))


def make_questions(path, get):
    rows = questions_of(get("squad") / "train-v2.0.json")
    lines = ({"question": asked, "context": text, "answers": text.split()[:1]} for _, asked, text in rows)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_tasks(path, get):
    ef.finetune(get("run"), task="classification", train=get("labeled.csv"), out=path, epochs=1)


# How files and folders are made that pages speak of: by functions of their path and of `Things`.
THINGS = {
    "dist": make_wheel,
    "texts": make_texts,
    "vocab.txt": lambda path, get: shutil.copy(get.vocab, path),
    "shards": make_shards,
    "wiki": make_shards,
    "books": lambda path, get: ef.prepare(reversed(get.documents), vocab=get("vocab.txt"), out=path, progress=False),
    "s3://bucket/wiki": lambda path, get: get.store.upload(get("texts"), "wiki"),
    "s3://bucket/reviews.csv": lambda path, get: get.store.put("bucket/reviews.csv", get("labeled.csv").read_bytes()),
    "run": make_run,
    "run1": make_run,
    "run2": lambda path, get: make_run(path, get, seed=1),
    "model": lambda path, get: ef.export(get("run"), out=path),
    "bert-base-uncased": make_bert,
    "deberta-v3-xsmall": make_deberta,
    "glue": make_glue,
    "blimp": make_pairs,
    "squad": lambda path, get: write_squad(path, 2),
    **dict.fromkeys(("labeled.csv", "reviews.csv", "tickets.csv", "new.csv", "new-tickets.csv"), make_table),
    "own.jsonl": make_questions,
    **dict.fromkeys(("train.conll", "dev.conll"), lambda path, get: write_conll(path.parent)),
    "ocr.txt": lambda path, get: path.write_text("the functon returns a valve\n"),
    "tasks": make_tasks,
}


class Things:
    """Files and folders that pages speak of, each made when it is first needed."""

    def __init__(self, folder, vocab, documents, store):
        self.folder = folder
        self.vocab = vocab
        self.documents = documents
        self._store = store

    @property
    def store(self):
        return self._store()

    def __call__(self, name):
        path = self.folder / name
        if not path.exists():
            THINGS[name](path, self)
        return path

    def put(self, name, folder):
        source = self(name)
        if source.is_dir():
            shutil.copytree(source, folder / name)
        elif source.exists():  # here, not in a bucket
            shutil.copy(source, folder / name)


# --- Programs -----------------------------------------------------------------------------------

# Stand-ins for what is no part of the package, or needs other machines.
PROGRAMS = {
    # whether what it would install is installed
    "pip": """#!{python}
import importlib.metadata, re, sys
from packaging.requirements import Requirement
def check(requirement):
    found = importlib.metadata.distribution(requirement.name)
    assert found.version in requirement.specifier, f"{{requirement}}: there is {{found.version}}"
    for extra in requirement.extras:
        assert extra in found.metadata.get_all("Provides-Extra"), f"{{requirement.name}} has no extra {{extra}}"
        for each in map(Requirement, found.requires):
            if each.marker and each.marker.evaluate({{"extra": extra}}):
                check(each)
assert sys.argv[1] == "install"
for word in (word for word in sys.argv[2:] if not word.startswith("--")):
    check(Requirement(re.sub(r".*\\.whl", "electra-fast", word)))
""",
    # what it would download is there
    "hf": "#!/bin/sh\n",
    # one task of the array after another
    "sbatch": """#!/bin/bash -eu
range=$(sed -n 's/^#SBATCH --array=//p' "$1")
for SLURM_ARRAY_TASK_ID in $(seq ${{range/-/ }}); do export SLURM_ARRAY_TASK_ID; bash -eu "$@"; done
""",
    # whether there are such targets: the tests do not make themselves
    "make": """#!/bin/bash -eu
for target; do grep -q "^$target:" '{tree}/Makefile'; done
""",
}
DASK = """
from distributed import LocalCluster
if __name__ == "__main__":
    with LocalCluster(1, threads_per_worker=1, processes=False, protocol="tcp", dashboard_address=None) as cluster:
        print(cluster.scheduler_address, flush=True)
        input()
"""


@pytest.fixture(scope="module")
def store():
    with object_store.running() as running:
        yield running


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder with the stand-ins."""
    with forked_python.stand_ins(tmp_path_factory.mktemp("bin")) as folder:
        for name, code in PROGRAMS.items():
            (folder / name).write_text(code.format(python=sys.executable, tree=TREE))
            (folder / name).chmod(0o755)
        yield folder


@pytest.fixture(scope="module")
def environment(programs, tmp_path_factory):
    """As in a terminal, with caches of its own and without network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "TRITON_", "AWS_"))}
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    home = str(tmp_path_factory.mktemp("home"))
    fonts = {"MPLCONFIGDIR": matplotlib.get_cachedir()}  # else every new home lists them anew
    return kept | fonts | {"PATH": path, "HOME": home, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


@pytest.fixture(scope="module")
def scheduler(environment, tmp_path_factory):
    """The address of a Dask scheduler with a worker."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    folder = tmp_path_factory.mktemp("dask")
    with subprocess.Popen([sys.executable, "-c", DASK], cwd=folder, env=environment, text=True, **pipes) as cluster:
        yield cluster.stdout.readline().strip()
        cluster.stdin.close()


@pytest.fixture(scope="module")
def things(tmp_path_factory, tiny_vocab, tiny_text, request):
    folder = tmp_path_factory.mktemp("things")
    return Things(folder, tiny_vocab, tiny_text, lambda: request.getfixturevalue("store"))


def execute(command, folder, variables):
    """The exit code of a command, and what it has written."""
    with (folder / "output").open("w+") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, cwd=folder, env=variables, process_group=0, **streams)
        try:
            code = process.wait(timeout=600)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        output.seek(0)
        return code, output.read()


@pytest.fixture(scope="module")
def run(things, environment, request):
    """A function that runs a script in a folder."""

    def run_in(folder, script):
        __tracebackhide__ = True
        for name in script.read():
            if not (folder / name).exists():
                things.put(name, folder)
        code = script.smaller
        variables = environment | {"PAGE": name_of(script.page)}
        if "s3://" in code:
            variables |= request.getfixturevalue("store").environment
        if "tcp://host:8786" in code:
            code = code.replace("tcp://host:8786", request.getfixturevalue("scheduler"))
        name = f"{script.page.stem}.{script.line}"
        command = [script.language]
        if script.language == "toml":
            named = re.match(r"\s*# (\S+\.toml)$", code, re.M)
            name = named[1] if named else f"{name}.toml"
            command = ["electra-fast", "flops", "--config"]
        if script.language == "sh":
            command = ["sbatch"] if "#SBATCH" in code else ["bash", "-eu"]
            code = f"trap 'echo \"$PAGE:$LINENO: $BASH_COMMAND\" >&2' ERR{code}"  # on the first line
        (folder / name).write_text(code, encoding="utf-8")
        code, output = execute([*command, name], folder, variables)
        assert code == 0, f"{name_of(script.page)}:{script.line}: exit code {code}\n{output[-8000:]}"

    return run_in


# --- Tests --------------------------------------------------------------------------------------


FIRST_PAGES = (TREE / "README.md", TREE / "docs/index.md")


@pytest.mark.process
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=name_of(page), marks=() if page in FIRST_PAGES else pytest.mark.slow) for page in PAGES],
)
def test_the_code_of_a_page_runs(page, run, tmp_path):
    for script in scripts(page):
        run(tmp_path, script)


@pytest.mark.process
def test_a_block_that_fails_is_named(run, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```sh\ntrue\nfalse it\n```\n")
    with pytest.raises(AssertionError, match="page.md:5: false it"):
        run(tmp_path, *scripts(page))


LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[\w ]+\]: (\S+)$|(?:src|srcset|href)=\"([^\"]+)\"", re.MULTILINE)


def links(text):
    """The targets of a page's links."""
    prose = re.sub(r"^ *```.*?^ *```$|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)
    return [next(filter(None, groups)) for groups in LINK.findall(prose)]


def check_link(document, link):
    """Asserts that a relative link leads to a file or folder of the tree, and to a heading in it."""
    path, _, anchor = link.partition("#")
    target = document.parent / path if path else document
    assert target.exists(), f"{name_of(document)}: {link}"
    headings = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert not anchor or anchor in anchors, f"{name_of(document)}: {link}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document):
    for link in links(document.read_text(encoding="utf-8")):
        if not re.match(r"https?:|mailto:", link):
            check_link(document, link)


@pytest.mark.parametrize("document", PAGES, ids=name_of)
def test_links_of_a_built_page_lead_to_the_same_files(document):
    """In the wheel's description and in the site."""
    source, _ = site_pages.addresses()
    root = TREE / "docs" if document.is_relative_to(TREE / "docs") else None
    text = document.read_text(encoding="utf-8")
    built = site_pages.with_addresses(text, document, "v1", root)
    for before, after in zip(links(text), links(built), strict=True):
        if after.startswith(source):
            path, _, anchor = after.removeprefix(f"{source}/").partition("#")
            assert re.match(r"(blob|raw|tree)/v1/", path), after
            assert (TREE / path.split("/", 2)[2]).resolve() == (document.parent / before.partition("#")[0]).resolve()
            assert path.startswith("tree/") == (TREE / path.split("/", 2)[2]).is_dir() and after.endswith(anchor)
        else:
            assert after == before
            assert re.match(r"https?:|mailto:|#", after) or (
                root and root in (document.parent / after).resolve().parents
            )


def test_the_address_of_the_project_is_in_one_file():
    """Formats that need a whole address repeat that of pyproject.toml."""
    owner = site_pages.addresses()[0].split("/")[3]
    address = re.compile(rf"{owner}\.github\.io|github\.com/{owner}")
    tracked = subprocess.run(["git", "ls-files"], cwd=TREE, capture_output=True, text=True, check=True).stdout.split()
    files = [
        TREE / name for name in tracked if Path(name).suffix in (".md", ".py", ".rs", ".toml", ".yml", ".cff", ".ipynb")
    ]
    named = {name_of(file) for file in files if file.is_file() and address.search(file.read_text(encoding="utf-8"))}
    assert named == {"pyproject.toml", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml", "SECURITY.md"}


def test_every_page_is_in_the_navigation():
    navigation = str(tomllib.loads((TREE / "zensical.toml").read_text())["project"]["nav"])
    pages = {path.relative_to(TREE / "docs").as_posix() for path in TREE.glob("docs/**/*.md")}
    assert set(re.findall(r"'([\w/-]+\.md)'", navigation)) == pages


def test_every_extra_is_in_the_installation_page():
    rows = re.findall(r"^\| (`.*?) \|", (TREE / "docs/install.md").read_text(), re.M)
    extras = importlib.metadata.metadata("electra-fast").get_all("Provides-Extra")
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*extras} - {"test"}


@pytest.mark.parametrize("document", [TREE / "CONTRIBUTING.md", TREE / "bench/README.md"], ids=name_of)
def test_files_and_names_in_a_document_exist(document):
    folders = (TREE / name for name in (".ci", "bench", "crates", "examples", "kernels", "python", "tests"))
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".rs")]
    text = document.read_text(encoding="utf-8")
    for named in re.findall(r"`([\w/]+\.(?:py|rs))`", text):
        assert "NAME" in named or any(f"/{path.relative_to(TREE)}".endswith(f"/{named}") for path in paths), named
    words = {word for path in paths for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    assert {*re.findall(r"`([A-Za-z]*_\w+|[A-Z]\w+)`", text)} <= words
