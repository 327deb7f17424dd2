"""The language of the project: patterns that CONTRIBUTING.md rules out, in prose and in names.

Prose is Markdown without code, comments, docstrings and other strings of Python and Rust.
`python tests/test_language.py PATH...` prints the places in files and folders.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parent.parent
FOLDERS = (".ci", ".github", "bench", "crates", "docs", "examples", "kernels", "python", "runs", "tests")
# The lab log keeps its entries as they were written; the others are patterns and made-up text.
LEFT_OUT = {"bench/LOG.md", "tests/test_language.py", "tests/support/question_texts.py"}
# Each pattern with its replacement.
PATTERNS = {
    r"\bwhat(?! (?:to|if|happen\w*|you)\b)(?!ever)": "a noun",
    r"[,;] (?:of|by|in|for|to|with|from|at|on|after|before|under) (?:which|whom)\b": "a second sentence",
    r"\b(?:that|those) of\b": "the noun again",
    r"\bbeside\b": "next to, during, in addition to, compared with",
    r"\b(?:fore)?told\b|\btells?\b(?! (?:apart|us|you))|\bjudge[sd]?\b": "predicted, reported, evaluated",
    r"\bas for\b|\b[Aa]s of\b(?! (?:version|\d|torch|transformers))": "as in; for … too; since",
    r"\bones? (?:that|which|whose)\b": "the noun",
    r"\b(?:has|have|had) (?:a|the) mean\b": "averages",
    r"\b(?:go|goes|went|going|gone) on\b": "continues",
    r"\bof (?:its|their|his|her|one's|your|our) own\b": "separate, or nothing",
    r"\b(?:twins?|kin|surest|foretell|foretold|anew|thereof|whence|hence|thereby)\b": "a standard word",
    r"\b(?:of|by|with|than|from) (?:theirs|ours|itself alone)\b": "the noun",
    r"\b\d[\d,.]* ?(?:[TGPE]FLOP)(?!s|/s|S)\b": "FLOPs for a count, FLOP/s for a speed",
    r"\b\d[\d.]* ?G (?:parameters|tokens|weights)\b": "B for billions",
    r"\b(?:held[- ]out|set aside)\b": "validation set",
    r"\b[Ss]o (?:many|much) (?!that\b|as\b|more\b|faster\b|slower\b)": "the number",
    r"\bcan be one of\b|\bthere are: |\bget the file again\b|\bleave (?:it|them) out\b": "must be one of, available",
    r"(?<=[;:] )give\b|\bgive it\b": "pass",
}
NAMES = {"found", "each", "own", "what", "given", "kept"}
QUESTION = re.compile(r"#+ +(?!How it works$)(?:(?:What|Which|How|Why|When|Where|Whether|Who|Is|Are|Does|Can)\b|.*\?$)")
OPENING = re.compile(r"(?:What|Whether|How|Which|Where|Of)\b")
SENTENCE = re.compile(r"test_(?:an?|the|what\w*|where|who|how|it|nobody|nothing|everything)_")
# The list of supported models is on one page. A line with this many of their names repeats it.
MODELS = re.compile(r"\b(?:ELECTRA|ModernBERT|DeBERTa\w*|BERT|RoBERTa|XLM-R\w*|CamemBERT|DistilBERT)\b")
MAX_MODELS = 4
LISTS_OF_MODELS = {"docs/reference/models.md", "docs/reference/glossary.md"}


def prose_of_markdown(text):
    """Yields the lines of a page with their numbers, without code and the addresses of links."""
    text = re.sub(r"^ *```.*?^ *```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    for number, line in enumerate(text.split("\n"), 1):
        yield number, re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>", "`", line)


def prose_of_python(text):
    """Yields lines of comments, docstrings and other strings with a space, without code in backquotes."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("COMMENT", "FSTRING_MIDDLE") or (kind == "STRING" and " " in token.string):
            for offset, line in enumerate(token.string.split("\n")):
                yield token.start[0] + offset, re.sub(r"`[^`]*`", "`", line)


def prose_of_rust(text):
    """Yields comments, and strings with a space."""
    for number, line in enumerate(text.split("\n"), 1):
        for part in re.findall(r'//.*|"(?:[^"\\]|\\.)* (?:[^"\\]|\\.)*"?', line):
            yield number, re.sub(r"`[^`]*`", "`", part)


READERS = {".md": prose_of_markdown, ".py": prose_of_python, ".rs": prose_of_rust}


def places(path):
    """Yields the places in a file: line number, phrase, replacement."""
    text = path.read_text(encoding="utf-8")
    for number, line in READERS[path.suffix](text):
        for pattern, replacement in PATTERNS.items():
            yield from ((number, phrase[0].strip(" ,;"), replacement) for phrase in re.finditer(pattern, line))
        if path.suffix == ".md" and QUESTION.match(line):
            yield number, line, "a heading that is a noun"
        if len({*MODELS.findall(line)}) >= MAX_MODELS and not str(path).endswith((*LISTS_OF_MODELS, "LOG.md")):
            yield number, line.strip(), "a link to docs/reference/models.md"
    if path.suffix == ".py":
        yield from names_in(ast.parse(text))


def names_in(tree):
    """Yields vague names of variables, docstrings that open like a question, and tests named by a sentence."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.arg):
            name = node.arg if isinstance(node, ast.arg) else node.id
            if name in NAMES and not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
                yield node.lineno, name, "a noun of the subject"
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstring = ast.get_docstring(node) or ""
            if OPENING.match(docstring):
                yield node.body[0].lineno, docstring.split("\n")[0][:60], "a noun, or Returns"
            if isinstance(node, ast.FunctionDef) and SENTENCE.match(node.name):
                yield node.lineno, node.name, "the behavior without an article"


def files(paths):
    """Yields the files with prose in files and folders of the tree."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = file.relative_to(TREE).as_posix() if file.is_relative_to(TREE) else file.name
            is_ours = name not in LEFT_OUT and not re.search(r"(^|/)target/|electra_fast/kernels/", name)
            if file.suffix in READERS and file.is_file() and is_ours:
                yield file


@pytest.mark.parametrize("folder", [*FOLDERS, "*.md"])
def test_no_ruled_out_phrase(folder):
    paths = [*files(TREE.glob(folder))]
    texts = [
        f"{path.relative_to(TREE)}:{line}: {text!r}: write {new}" for path in paths for line, text, new in places(path)
    ]
    assert paths and texts == []


def test_patterns_have_an_effect(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# What is it?\n\nIt tells what works, of which 30 TFLOP go on. `what`\nBERT, RoBERTa, XLM-R, ELECTRA\n"
    )
    phrases = ["# What is it?", "what", "of which", "tells", "go on", "30 TFLOP", "BERT, RoBERTa, XLM-R, ELECTRA"]
    assert [phrase for _, phrase, _ in places(page)] == phrases
    module = tmp_path / "module.py"
    module.write_text('"""What it is."""\n\nfound = "none beside it"  # as of theirs\n\ndef test_a_b(each): pass\n')
    assert sorted(number for number, _, _ in places(module)) == [1, 3, 3, 3, 3, 5, 5]
    source = tmp_path / "source.rs"
    source.write_text('let found = "what"; // what is it\nlet text = "one that tells";\n')
    assert [number for number, _, _ in places(source)] == [1, 2, 2]


if __name__ == "__main__":
    for file in files(Path(name).resolve() for name in sys.argv[1:] or (TREE / folder for folder in FOLDERS)):
        for line_number, phrase_text, advice in places(file):
            print(f"{file}:{line_number}: {phrase_text!r}: write {advice}")
