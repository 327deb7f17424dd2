"""docs/reference/messages.md lists each warning, note and failure of a run in the code, and nothing else."""

import ast
import re
from pathlib import Path

from electra_fast.cli.parser import CONFIGURED, build_parser

TREE = Path(__file__).resolve().parent.parent
PAGE = (TREE / "docs/reference/messages.md").read_text(encoding="utf-8")
MODULES = [ast.parse(path.read_text(encoding="utf-8")) for path in (TREE / "python/electra_fast").rglob("*.py")]
MARK = re.compile(r"\b(?:warning|note): ")
# Calls whose argument is the text of a failure or stop, and lists of warnings.
FAILURES = {"Diverged", "ExecutorFailed", "Interrupted", "TrainingFailed", "_end", "_end_diverged"}
LISTS = re.compile(r'(\["warnings"\]|\bproblems)\.append$')


def text_of(node):
    """The text of a string expression, with … for variable parts."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"


def is_text(node):
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and (is_text(node.left) or is_text(node.right))
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def outermost(node):
    """The texts of the string expressions of a node that are not part of another."""
    if is_text(node):
        yield text_of(node)
    else:
        for child in ast.iter_child_nodes(node):
            yield from outermost(child)


def beginning(text):
    """A message without its mark and the names before it."""
    return re.sub(r"^[…:;,\s]+", "", MARK.split(text)[-1])


def says_something(text):
    return len(re.findall(r"[^\W\d_]{2,}", beginning(text))) > 1


def reports(module):
    """The messages that must be listed: marked as warnings or notes, from functions with such names, and failures."""
    yield from (text for text in outermost(module) if MARK.search(text))
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and "warning" in node.name:
            results = (child for child in ast.walk(node) if isinstance(child, ast.Return | ast.Yield))
            values = [result.value for result in results if result.value]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_report = name.split(".")[-1] in FAILURES or LISTS.search(name)
            values = [*node.args, *(keyword.value for keyword in node.keywords)] if is_report else []
        else:
            continue
        yield from (text for value in values for text in outermost(value))


def in_rust():
    for path in (TREE / "crates").rglob("*.rs"):
        for text in re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text(encoding="utf-8"), re.DOTALL):
            yield re.sub(r"\{[^{}]*\}", "…", re.sub(r"\\\n\s*", "", text))


def listed():
    """The messages of the page: its headings of the third level that are code."""
    return re.findall(r"^### `([^`]+)`$", PAGE, re.MULTILINE)


def test_every_message_of_the_code_is_listed():
    texts = [text for module in MODULES for text in reports(module)] + [text for text in in_rust() if MARK.search(text)]
    known = tuple(map(beginning, listed()))
    missing = {text for text in texts if says_something(text) and not beginning(text).startswith(known)}
    assert len(texts) > 50 and missing == set()


def test_every_listed_message_is_in_the_code():
    nodes = (node for module in MODULES for node in ast.walk(module) if is_text(node))
    texts = {beginning(text) for text in (*map(text_of, nodes), *in_rust())}
    gone = [message for message in listed() if not any(text.startswith(beginning(message)) for text in texts)]
    assert gone == [] and all(map(says_something, listed()))


def test_options_and_keys_of_the_page_exist():
    keys = {name for sections in CONFIGURED.values() for section in sections for name in section.key_names()}
    flags = {flag for command in build_parser().commands for flag in build_parser().flags_of(command)}
    for code in re.findall(r"`([^`]+)`", PAGE):
        options = {flag for flag in re.findall(r"(?<!\S)(--[a-z][\w.-]*)", code)}
        assert options <= flags | {f"--{key}" for key in keys}, code
        named = re.findall(r"\b(?:model|generator|objective|data|optimizer|train|finetune)\.[a-z_]+\b(?![./])", code)
        assert keys.issuperset(named), code
