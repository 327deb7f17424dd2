"""Every block of code in the documents runs, output on a page is real, and links lead to files and headings that exist.

The blocks of a page run in order in one folder, with the files that they read but do not write (`INPUTS`). `sh` blocks
are bash scripts; consecutive `python` blocks are one script; `toml` blocks are configurations, in a file if their first
line is a comment with its name. A `text` block after `<!-- output -->` is the output of the block before it. `SMALLER`
makes models small, so numbers in the output may differ. Other programs have stand-ins (`PROGRAMS`).

    WRITE_OUTPUT=FOLDER pytest tests/test_documents.py -n 0 -o timeout=0 -k "runs and quickstart"

runs a page in FOLDER at its own sizes, and writes the output into it: all lines if the block is empty, else those that
are there. FOLDER may have better inputs than INPUTS.
"""

import ast
import contextlib
import difflib
import functools
import importlib.metadata
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import forked_python
import matplotlib
import object_store
import pytest
import site_pages
from page_inputs import INPUTS, Inputs

TREE = Path(__file__).resolve().parent.parent
PAGES = [TREE / "README.md", *sorted(TREE.glob("docs/**/*.md"))]
NOTES = [TREE / "bench/README.md", TREE / "bench/MANY_GPUS.md"]
DOCUMENTS = sorted({*TREE.glob("*.md"), *PAGES, *TREE.glob("examples/*.md"), *NOTES})
# Reasons for blocks that do not run, in the line `<!-- not run: REASON -->` before them.
NOT_RUN = {
    "the tests have no access to PyTorch's index",
    "the tests have neither the suites nor the data that they download",
    "hours; tests/test_runs.py runs these scripts",
}
# Replacements that let blocks run in seconds.
SMALLER = {
    "pretrain s3": "pretrain --preset tiny s3",
    "--preset small": "--preset tiny",
    "--preset mini": "--preset tiny",
    'preset = "mini"': 'preset = "tiny"',
    "--preset base --out": "--preset tiny --out",
    "electra-fast demo --out demo": "true",
    "in topics.items()": "in list(topics.items())[:20]",
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
# Options of `pretrain` that a block leaves at their defaults.
SHORT = {"--steps": "12", "--batch-size": "2"}
WRITE_OUTPUT = os.environ.get("WRITE_OUTPUT")
# The beginnings of lines of output that depend on the text or the number of steps; they are in the package's source.
UNCHECKED = ("the model finds replaced tokens", "content_hash", "[CLS]", "proposal  ", "electra-fast pretrain ")
# In a line of output, quantities with their units and predicted labels may differ. `…` is any text.
QUANTITY = r"-?\d(?:[\d,.:]*\d)?(?:e[+-]?\d+)?(?:\s?(?:%|(?:[kMGT]i?B?|m?s|seconds?|minutes?|hours?)\b))?"
END_OF_BLOCK = "\x1e"  # printed by python blocks that have an output


@dataclass
class Script:
    """A block, or consecutive python blocks. Lines of the code have the page's numbers; outputs are matches in it."""

    page: Path
    line: int
    language: str
    code: str
    outputs: list[re.Match] = field(default_factory=list)

    @property
    def smaller(self):
        if WRITE_OUTPUT:
            return self.code
        code = functools.reduce(lambda code, change: code.replace(*change), SMALLER.items(), self.code)
        for flag, value in SHORT.items():
            code = re.sub(rf"(electra[-_]fast pretrain )(?!.*{flag} )", rf"\1{flag} {value} ", code)
        return code

    def words(self):
        """Words and strings in the order of the code, each with whether it names an output of the script."""
        if self.language == "python":
            nodes = list(ast.walk(ast.parse(self.code)))
            outputs = {node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "out"}
            texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
            return [(n.value, n in outputs) for n in sorted(texts, key=lambda n: (n.lineno, n.col_offset))]
        words = " ".join(shlex.split(self.code, comments=True)).split()
        return [(word, before in ("--out", ">")) for before, word in zip(["", *words], words, strict=False)]

    def inputs(self):
        """The names of INPUTS that the script reads and does not write first."""
        is_output = {}
        for word, is_written in self.words():
            for name in INPUTS:
                if word == name or word.startswith((f"{name}/", f"{name}:")):
                    is_output.setdefault(name, is_written)
        return [name for name, is_written in is_output.items() if not is_written]


def name_of(page):
    return page.relative_to(TREE).as_posix() if page.is_relative_to(TREE) else page.name


def scripts(page):
    """The blocks of a page that run."""
    text = page.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^(?:<!-- (?:not run: )?(.*?) -->\s+)?( *)```(\w*)\n(.*?)^\2```$", text, re.M | re.S))
    fences = re.findall(r"^ *```.*", text, re.M)
    assert len(fences) == 2 * len(blocks), f"{name_of(page)}: fences that do not match: {fences}"
    result = []
    for block in blocks:
        comment, _, language, code = block.groups()
        line = text[: block.start(3)].count("\n") + 1
        place = f"{name_of(page)}:{line}"
        assert language in ("sh", "python", "toml", "text"), f"{place}: a block of the language {language!r}"
        assert comment in (None, "output", *NOT_RUN), f"{place}: add the reason {comment!r} to NOT_RUN, or run it"
        if comment == "output":
            assert result and language == "text", f"{place}: an output needs a block that runs before it"
            result[-1].outputs.append(block)
            result[-1].code += f"print({END_OF_BLOCK!r})" * (result[-1].language == "python")
        elif language == "text" or comment:
            continue
        elif result and result[-1].language == language == "python":
            result[-1].code += "\n" * (line - result[-1].code.count("\n")) + code
        else:
            result.append(Script(page, line, language, "\n" * line + code))
    return result


def form(line):
    """A pattern for lines that differ from this one in quantities and spaces; its groups are the texts around `…`."""
    parts = re.split(rf"""({QUANTITY}|\s+|-{{3,}}|…|(?<="label": )"[^"]*")""", line)
    parts[::2] = map(re.escape, parts[::2])
    for i in range(1, len(parts), 2):
        parts[i] = {" ": r"\s+", "-": r"-+", "…": ").*(", '"': '"[^"]*"'}.get(parts[i][-1], QUANTITY)
    return re.compile(f"({''.join(parts)})")


def printed_lines(output):
    """The lines of an output as a terminal shows them in the end: without control characters and earlier progress."""
    return [line.rstrip() for line in re.sub(r"\x1b\[[\d;?]*[a-zA-Z]|.*\r(?!\n)", "", output).splitlines()]


def updated(lines, printed):
    """The lines of a page's output with the numbers that were printed; all printed lines if the page has none."""
    result = []
    for line in lines:
        similar = [text for text in printed if form(line).fullmatch(text)] or difflib.get_close_matches(
            line, printed, 1
        )
        text = max(similar, key=lambda text: len(os.path.commonprefix([text, line])), default=line)
        match = form(line).fullmatch(text)
        result.append("…".join(match.groups()) if match else text)
    return result or printed


def check_outputs(script, output):
    """Compares the outputs on a page with the script's output, or writes that into the page."""
    texts = output.split(f"{END_OF_BLOCK}\n") if script.language == "python" else [output]
    for block, text in reversed(list(zip(script.outputs, texts, strict=False))):
        lines = textwrap.dedent(block[4]).splitlines()
        printed = printed_lines(text)
        if WRITE_OUTPUT:
            new = textwrap.indent("".join(f"{line}\n" for line in updated(lines, printed)), block[2])
            script.page.write_text(f"{block.string[: block.start(4)]}{new}{script.page.read_text()[block.end(4) :]}")
            continue
        for line in lines:
            is_printed = line.lstrip().startswith(UNCHECKED) or any(map(form(line).fullmatch, ["", *printed]))
            assert is_printed, f"{name_of(script.page)}: not printed: {line}\n{text[-8000:]}"


# Stand-ins for other programs and for programs that need other machines.
PROGRAMS = {
    # checks that the packages are installed
    "pip": """#!{python}
import importlib.metadata, re, sys
from packaging.requirements import Requirement
def check(requirement):
    package = importlib.metadata.distribution(requirement.name)
    assert package.version in requirement.specifier, f"{{requirement}}: {{package.version}} is installed"
    for extra in requirement.extras:
        assert extra in package.metadata.get_all("Provides-Extra"), f"{{requirement.name}} has no extra {{extra}}"
        for needed in map(Requirement, package.requires):
            if needed.marker and needed.marker.evaluate({{"extra": extra}}):
                check(needed)
assert sys.argv[1] == "install"
for word in (word for word in sys.argv[2:] if not word.startswith("--")):
    check(Requirement(re.sub(r".*\\.whl|^\\.(?=\\[|$)", "electra-fast", word)))
""",
    # the files are in INPUTS
    "hf": "#!/bin/sh\n",
    # runs the tasks of an array one after another
    "sbatch": """#!/bin/bash -eu
range=$(sed -n 's/^#SBATCH --array=//p' "$1")
for SLURM_ARRAY_TASK_ID in $(seq ${{range/-/ }}); do export SLURM_ARRAY_TASK_ID; bash -eu "$@"; done
""",
    # checks that the targets exist
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
    """A folder with the stand-ins; commands fork from one process, unless their speed and threads are to be shown."""
    folder = tmp_path_factory.mktemp("bin")
    with contextlib.nullcontext() if WRITE_OUTPUT else forked_python.stand_ins(folder):
        for name, code in PROGRAMS.items():
            (folder / name).write_text(code.format(python=sys.executable, tree=TREE))
            (folder / name).chmod(0o755)
        yield folder


@pytest.fixture(scope="module")
def environment(programs, tmp_path_factory):
    """As in a terminal of 120 columns, with separate caches and without network."""
    removed = ("XDG_", "TRITON_", "AWS_", *["OMP_"] * bool(WRITE_OUTPUT))
    variables = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    home = str(tmp_path_factory.mktemp("home"))
    fonts = {"MPLCONFIGDIR": matplotlib.get_cachedir()}  # else every new home lists them again
    output = {"COLUMNS": "120", "PYTHONUNBUFFERED": "1"}  # standard output and errors in the order of writing
    return variables | fonts | output | {"PATH": path, "HOME": home, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


@pytest.fixture(scope="module")
def scheduler(environment, tmp_path_factory):
    """The address of a Dask scheduler with a worker."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    folder = tmp_path_factory.mktemp("dask")
    with subprocess.Popen([sys.executable, "-c", DASK], cwd=folder, env=environment, text=True, **pipes) as cluster:
        yield cluster.stdout.readline().strip()
        cluster.stdin.close()


@pytest.fixture(scope="module")
def inputs(request):
    return Inputs(request)


def execute(command, folder, variables):
    """Returns the exit code of a command, and its output."""
    with (folder / "output").open("w+") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, cwd=folder, env=variables, process_group=0, **streams)
        try:
            code = process.wait(timeout=None if WRITE_OUTPUT else 600)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        output.seek(0)
        return code, output.read()


@pytest.fixture(scope="module")
def run(inputs, environment, request):
    """A function that runs a script in a folder."""

    def run_in(folder, script):
        __tracebackhide__ = True
        for name in script.inputs():
            if not (folder / name).exists():
                inputs.put(name, folder)
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
        return output

    return run_in


@pytest.mark.process
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] * (page.stem != "README")) for page in PAGES],
)
def test_code_of_a_page_runs(page, run, tmp_path):
    outputs = [(script, run(Path(WRITE_OUTPUT or tmp_path), script)) for script in scripts(page)]
    for script, output in reversed(outputs):
        check_outputs(script, output)


def test_unchecked_lines_are_in_the_source():
    sources = "".join(path.read_text(encoding="utf-8") for path in TREE.glob("python/electra_fast/**/*.py"))
    assert all(text in sources for text in UNCHECKED)


@pytest.mark.process
def test_output_differs_in_numbers_only(run, tmp_path):
    page = tmp_path / "page.md"
    output = "loss 17.25, 2 …\n…\nend"
    page.write_text(f"```python\nprint('loss  3.5, 12 s\\nend')\n```\n\n<!-- output -->\n```text\n{output}\n```\n")
    [script] = scripts(page)
    output = run(tmp_path, script)
    check_outputs(script, output)
    with pytest.raises(AssertionError, match="page.md: not printed: loss 17.25"):
        check_outputs(script, output.replace("loss", "lost"))
    assert updated(["loss 1, … more"], ["loss 2.5, and some more"]) == ["loss 2.5, … more"]


@pytest.mark.process
def test_failing_block_is_reported(run, tmp_path):
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
def test_relative_links_exist(document):
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


def test_project_address_is_in_few_files():
    """Formats that need a whole address repeat the address in pyproject.toml."""
    owner = site_pages.addresses()[0].split("/")[3]
    command = ["git", "grep", "-lIE", rf"{owner}\.github\.io|github\.com/{owner}"]
    files = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=True).stdout.split()
    assert {*files} == {"pyproject.toml", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml", "SECURITY.md"}


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
