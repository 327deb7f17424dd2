"""`doctor`: one screen about a machine, and exit code 1 if it has problems."""

import json

import pytest
import torch

from electra_fast.cli import main
from electra_fast.config.config import Config
from electra_fast.data.corpus import Corpus
from electra_fast.hardware import kernel_choice
from electra_fast.training import doctor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")


@pytest.mark.process
def test_report_fits_one_screen(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["doctor", "--preset", "tiny", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 24 and lines[-1] == "no problems found"
    assert lines[0].startswith("electra-fast ") and f"torch {torch.__version__}" in lines[0]
    assert any(line.startswith("extras: transformers ") and "loads" in line for line in lines)
    assert any(line.startswith(f"cache: {tmp_path / 'electra-fast'}, ") for line in lines)
    assert any("prepare" in line and "loader" in line and "M tokens/s" in line for line in lines)


@pytest.mark.process
def test_problems_have_remedies(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(doctor, "EXTRAS", {"numpy": "import numpy.no_such_module", "no-such-package": "import json"})
    monkeypatch.setattr(doctor, "_driver", lambda: "580.1")
    monkeypatch.setattr(doctor, "_data_engine", lambda *_: {})
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["extras"]["no-such-package"] == "not installed"
    gpu, extra, cache = report["problems"]
    assert gpu.startswith("there is a GPU (driver 580.1), but torch")
    assert "ModuleNotFoundError: No module named 'numpy.no_such_module'; reinstall" in extra
    assert cache.startswith(f"{tmp_path}/file/electra-fast: ") and cache.endswith("to a writable folder")


@pytest.mark.process
def test_kernel_table(tiny_corpus, tmp_path, monkeypatch):
    """Uses Triton's interpreter."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_choice, "available_attention", lambda *_: ["sdpa"])
    size = {"sequence_length": 8, "batch_size": 2, "vocab_size": Corpus(tiny_corpus).vocab_size}
    config = Config.preset("tiny", "modern", "mlm").override({"model.num_layers": 1}, **size)
    problems = []
    report = doctor._kernels(config, torch.device("cpu"), tiny_corpus, tmp_path / "run", problems)
    assert report["summary"].startswith("kernels checked in ") and report["execution"] in ("eager", "graph", "branches")
    assert not problems
    lines = list(doctor._kernel_lines(report))
    (line,) = (text for text in lines if text.startswith("  generator_head:32 "))
    assert "reference " in line and "kernel " in line and " ms; error 0." in line
    assert any(text.startswith("  step ") for text in lines)
