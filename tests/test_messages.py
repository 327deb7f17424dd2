"""Text from files and arguments cannot control a terminal, wherever it is printed."""

import ast
import json
import re
from pathlib import Path

import in_process
import pytest
import site_pages
from tiny_task import QUICK, sentences

import electra_fast
from electra_fast.messages import MAX_ERROR_LENGTH, error_line, pointing_to_reference, printable, say, show

HOSTILE = "\x1b[2Jx\x07\x9b1m\u202e"


def test_control_characters_are_escaped():
    assert printable("a\x1b[31m\r\n\t\x9b\u2028\u202e\ud800") == r"a\x1b[31m\r\n\t\x9b\u2028\u202e\ud800"
    ordinary = "[red]é 日本\u3000\u200d👩\u200d🔬\\n"
    assert printable(ordinary) == ordinary


def test_only_messages_print():
    """All output is escaped there. Exceptions: child processes print answers to their parents, and a log is a file."""
    others = {"arguments.py", "kernel_check.py", "watchdog.py"}
    folder = Path(electra_fast.__file__).parent
    calls = [
        path.name
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert set(calls) == {"messages.py", *others}


def test_first_warning_of_a_command_points_to_the_reference(capsys):
    page = "reference/messages"
    assert (site_pages.TREE / f"docs/{page}.md").exists()
    for print_line in (say, lambda line: show([line])):
        with pointing_to_reference():
            print_line('{"message": "step 3: warning: in JSON"}')
            assert len("".join(capsys.readouterr()).splitlines()) == 1
            print_line("step 3: warning: the first")
            line = capsys.readouterr().err.splitlines()[-1]
            assert line == f"electra-fast: causes and remedies of warnings: {site_pages.addresses()[1]}{page}/"
            print_line("warning: the second")
        print_line("warning: after the command")
        assert len("".join(capsys.readouterr()).splitlines()) == 2


@pytest.mark.parametrize("length", [MAX_ERROR_LENGTH, MAX_ERROR_LENGTH + 1, 100_000])
def test_long_error_keeps_both_ends(length):
    text = "run.toml: " + "x" * (length - 20) + "correct it"
    line = error_line(text)
    assert len(line) == MAX_ERROR_LENGTH and line.startswith("run.toml: x") and line.endswith("xcorrect it")
    assert ("…" in line) == (length > MAX_ERROR_LENGTH)


@pytest.mark.parametrize(
    "arguments",
    [
        ["pretrain", "--config", HOSTILE + "\nelectra-fast: done.toml"],
        ["finetune", "m", "--task", HOSTILE, "--out", "o"],
        ["pretrain", "--" + HOSTILE],
        ["verify", "\n" + HOSTILE],
        [HOSTILE],
    ],
)
def test_error_is_one_printable_line(arguments):
    process = in_process.run(*arguments)
    assert process.returncode == 2 and len(process.stderr.splitlines()) == 1
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", process.stderr)


def test_labels_cannot_control_terminal_or_card(encoder_folder, tmp_path):
    labels = ["[red]good[/red]", f"bad\n# Heading {HOSTILE}"]
    rows = [json.dumps({"text": text, "label": labels[label]}) for text, label in sentences(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    settings = (word for name, value in QUICK.items() for word in (f"--{name}", value))
    out = tmp_path / "out"
    process = in_process.run(
        *("finetune", encoder_folder, "--task", "classification", "--train", tmp_path / "train.jsonl"),
        *("--text", "text", "--label", "label", "--out", out, *settings),
    )
    assert process.returncode == 0
    assert process.stdout.split()[:2] == ["task", "metric"] and "…" not in process.stdout
    card = next(out.rglob("README.md")).read_text()
    predicted = in_process.run("predict", out / "classification/seed-0/model", tmp_path / "train.jsonl").stdout
    assert {json.loads(line)["label"] for line in predicted.splitlines()} <= set(labels)
    for said in (process.stderr, process.stdout, card, predicted):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", said) and "\n# Heading" not in said
    assert labels[0] in process.stderr and labels[0] in card and r"bad\n# Heading \x1b[2Jx" in card
