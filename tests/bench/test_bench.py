"""The scripts of bench/: groups that break, and whole scripts."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gpu
import pytest
import step_counts
import torch
from lib import groups
from lib.groups import BENCH
from lib.kernel_cases import CASES
from lib.workload import shape

import electra_fast

GOOD = """
import argparse, json, os
parser = argparse.ArgumentParser()
parser.add_argument("--results")
options, _ = parser.parse_known_args()
for i in range(NUMBER):
    line = f"result {i} " + "x" * 200
    print(line)
    with open(options.results, "a") as file:
        record = {"card": "NVIDIA H200", "group": os.environ["ELECTRA_FAST_BENCH_GROUP"], "ok": i != 3, "line": line}
        file.write(json.dumps(record) + "\\n")
"""
FAULTS = {
    "raises": "raise RuntimeError('an illegal memory access was encountered')",
    "hangs": "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(1)",
    "killed": "import os, signal; print('at work'); os.kill(os.getpid(), signal.SIGKILL)",
    "half a line": 'import sys; open(sys.argv[2], "a").write(\'{"group": "half a li\\n\'); sys.exit(3)',
    "child": "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])",
}


def write_groups(folder, bodies):
    for name, body in bodies.items():
        (folder / f"{name}.py").write_text(body)
    return [groups.Group(name, (str(folder / f"{name}.py"),), 20 if name != "hangs" else 3) for name in bodies]


@pytest.mark.slow
def test_failed_group_keeps_other_results(tmp_path, capsys):
    bodies = {"before": GOOD.replace("NUMBER", "2"), **FAULTS, "after": GOOD.replace("NUMBER", "2")}
    out = tmp_path / "out"
    code = groups.run("gpu B1", write_groups(tmp_path, bodies), out, tmp_path / "cache", 100, ["--quick"])
    assert code == 1
    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "results.jsonl", "summary.txt"]
    text = (out / "summary.txt").read_text()
    assert capsys.readouterr().out.endswith(text + "\n")
    assert "gpu B1 on NVIDIA H200: 3 of 7 groups ok" in text
    outcomes = dict(re.findall(r"^ +\d+ s  (.+?): (.+)$", text, re.MULTILINE))
    assert outcomes == {
        "before": "ok",
        "raises": "exit code 1",
        "hangs": "killed after 3 s",
        "killed": "died of SIGKILL",
        "half a line": "exit code 3",
        "child": "ok",
        "after": "ok",
    }
    assert "| RuntimeError: an illegal memory access" in text and "| at work" in text
    assert re.search(r'killed after 3 s\n +\|   File ".*hangs.py", line 2', text)  # where it hung
    assert text.count("result 0") == text.count("result 1") == 2


@pytest.mark.slow
def test_stopped_script_stops_its_group_and_prints_results(tmp_path):
    """SIGTERM, as `timeout` sends it, to a script in the background of a shell, where SIGINT is ignored."""
    (tmp_path / "hangs.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    code = (
        "import signal, sys, pathlib; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"sys.path.insert(0, {str(BENCH)!r}); from lib import groups; here = pathlib.Path({str(tmp_path)!r})\n"
        "hangs, other = (groups.Group(name, (str(here / f'{name}.py'),), 50) for name in ('hangs', 'other'))\n"
        "groups.stop_with_summary()\n"
        "sys.exit(groups.run('gpu B1', [hangs, other], here / 'out', here / 'cache', 100, []))\n"
    )
    script = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    first = script.stdout.readline()
    script.terminate()
    rest, _ = script.communicate(timeout=30)
    assert script.returncode == 1
    assert "hangs: interrupted" in rest and "other: not started" in rest
    assert (tmp_path / "out/summary.txt").read_text() in rest
    with pytest.raises(ProcessLookupError):  # soon: who has ended is gone once its parent, or else init, has noticed
        for _ in range(100):
            os.kill(int(first.split()[-1]), 0)
            time.sleep(0.1)


@pytest.mark.slow
def test_script_without_groups(tmp_path):
    """`card.py` as a person runs it; every saved result names the card."""
    command = [sys.executable, str(BENCH / "card.py"), "--device", "cpu", "--results", str(tmp_path / "results.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [record["line"] for record in records] == done.stdout.splitlines()
    assert all(record["card"].startswith("cpu") and record["torch"] == torch.__version__ for record in records)


@pytest.mark.slow
def test_cpu_step_against_itself(tmp_path):
    """Whole processes of two contenders; the shape is run to its table, and every line is saved."""
    results = tmp_path / "results.jsonl"
    package = Path(electra_fast.__file__).parent.parent
    command = [sys.executable, str(BENCH / "cpu_step.py"), "--shapes", "tiny:8", "--recipes", "google", "--quick"]
    command += ["--only", "electra-fast, eager", "--against", str(package), "--results", str(results)]
    done = subprocess.run([*command, "--cache", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"torch {torch.__version__}" in done.stdout.splitlines()[0]
    before, now, bf16 = (json.loads(line) for line in results.read_text().splitlines())
    names = ("electra-fast before, eager", "electra-fast, eager", "electra-fast, eager, bf16")
    assert (before["step"], now["step"], bf16["step"]) == names
    assert before["ratio"] == 1 and now["ratio"] > 0 and min(now["rounds"]) > 0
    assert now["steps"] == len(now["rounds"]) >= 3
    assert before["mean_loss"] == pytest.approx(now["mean_loss"], rel=0.05)


@pytest.mark.parametrize("is_quick", [False, True])
def test_gpu_commands_fit_in_time(is_quick):
    options = SimpleNamespace(quick=is_quick, run=Path("run"), texts=[], glue=Path("glue"), pairs=Path("pairs"))
    for name, stage in gpu.stages(options).items():
        assert is_quick or sum(group.seconds for group in stage) <= 9.5 * 60, name
        assert len({group.name for group in stage}) == len(stage)


def test_kernel_cases_are_in_groups():
    words = [word for group in gpu.KERNELS for word in group.split()]
    assert all(any(word in name for word in words) for name in CASES)
    assert all(any(word in name for name in CASES) for word in words)


def test_step_operators_are_counted_without_gpu():
    """Compares the operators of a layer, without heads and embeddings, with a count by hand."""
    config = shape("tiny:8", {"data.corpus": "none", "model.vocab_size": "1000", "objective.name": "mlm"})
    few, more = (step_counts.count_step(config.override({"model.num_layers": str(n)}), "short")[0] for n in (2, 4))
    added = more.launches - few.launches
    assert added["short_attention"] == added["short_attention_backward"] == 2
    num_tokens = 8 * 128
    num_heads = config.model.num_heads
    products = 2 * num_tokens * (3 + 1) * config.model.hidden_size
    others = 4 * num_tokens * (1 + config.model.hidden_size // num_heads + num_heads)  # ids, angles and statistics
    assert more.bytes["short_attention"] - few.bytes["short_attention"] == 2 * (products + others)
