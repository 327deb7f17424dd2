"""Facts about GPUs, tested without a GPU."""

import shutil
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from electra_fast.card import Card, missing_for_triton
from electra_fast.config.config import Config, ModelConfig
from electra_fast.model import compute
from electra_fast.model.compute import DTYPES, available_attention, choose_attention, choose_precision
from electra_fast.training.reporting import settings

# Name, capability and AMD's architecture; expected architecture, and peaks in TFLOP/s in bf16, fp16 and fp32.
CARDS: list[tuple[str, tuple[int, int], str, str, Any]] = [
    ("Tesla P100-PCIE-16GB", (6, 0), "", "", None),
    ("Tesla V100-SXM2-16GB", (7, 0), "", "Volta", (None, 125, 15.7)),
    ("Tesla V100-PCIE-32GB", (7, 0), "", "Volta", (None, 112, 14)),
    ("Tesla T4", (7, 5), "", "Turing", (None, 65, 8.1)),
    ("NVIDIA A100-SXM4-80GB", (8, 0), "", "Ampere", (312, 312, 19.5)),
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", (8, 0), "", "Ampere", None),
    ("NVIDIA A30", (8, 0), "", "Ampere", (165, 165, 10.3)),
    ("NVIDIA A10G", (8, 6), "", "Ampere", (70, 70, 35)),
    ("NVIDIA GeForce RTX 3090", (8, 6), "", "Ampere", (71, 71, 35.6)),
    ("NVIDIA GeForce RTX 3090 Ti", (8, 6), "", "Ampere", (80, 80, 40)),
    ("NVIDIA L40S", (8, 9), "", "Ada", (362, 362, 91.6)),
    ("NVIDIA RTX 6000 Ada Generation", (8, 9), "", "Ada", (364.2, 364.2, 91.1)),
    ("NVIDIA GeForce RTX 4090", (8, 9), "", "Ada", (165, 165, 82.6)),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), "", "Ada", None),
    ("NVIDIA H100 80GB HBM3", (9, 0), "", "Hopper", (989, 989, 67)),
    ("NVIDIA H100 PCIe", (9, 0), "", "Hopper", (756, 756, 51)),
    ("NVIDIA GH200 480GB", (9, 0), "", "Hopper", (989, 989, 67)),
    ("NVIDIA H20", (9, 0), "", "Hopper", (148, 148, 44)),
    ("NVIDIA B200", (10, 0), "", "Blackwell", (2250, 2250, 75)),
    ("NVIDIA B300 SXM6 AC", (10, 3), "", "Blackwell", (2250, 2250, 75)),
    ("NVIDIA GeForce RTX 5090", (12, 0), "", "consumer Blackwell", (209.5, 209.5, 104.8)),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", (12, 0), "", "consumer Blackwell", (440, 440, 110)),
    ("NVIDIA GB10", (12, 1), "", "consumer Blackwell", (125, 125, 31)),
    ("AMD Instinct MI300X", (9, 4), "gfx942", "gfx942", (1307, 1307, 163.4)),
    ("AMD Instinct MI100", (9, 0), "gfx908", "gfx908", None),
]
# Cards with fast fp32 only, or without published peaks.
SLOW = ("P100-PCIE-16GB", "MI100")
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulates a machine with everything that Triton needs; returns the folder of Python's headers."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.9.0"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    (tmp_path / "Python.h").touch()
    return tmp_path


@pytest.mark.parametrize(("name", "capability", "gfx", "architecture", "peaks"), CARDS, ids=[row[0] for row in CARDS])
def test_card_capabilities(
    name: str, capability: tuple[int, int], gfx: str, architecture: str, peaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(name, capability, is_rocm=bool(gfx), gfx=gfx)
    assert card.architecture == architecture and card.is_hopper == (architecture == "Hopper")
    expected = [None if peak is None else pytest.approx(peak * 1e12) for peak in peaks or [None] * 3]
    assert [card.peak_flops(precision) for precision in ("bf16", "fp16", "fp32")] == expected
    monkeypatch.setattr(compute, "card_of", lambda _: card)
    precision = "fp16" if architecture in ("Volta", "Turing") else "fp32" if name.endswith(SLOW) else "bf16"
    monkeypatch.setattr("electra_fast.model.attention.missing_for_triton", lambda _: None)
    shape = ModelConfig()
    has_flash = precision == "bf16" and not gfx
    for length, best in ((128, "short" if card.is_hopper else "varlen"), (512, "varlen")):
        attention = choose_attention("auto", shape, CUDA, DTYPES[precision], length)
        assert attention == (best if has_flash else "sdpa")
    if DTYPES[precision] != torch.float32:
        fits = architecture in ("Ampere", "Ada", "Hopper", "Blackwell", "consumer Blackwell", "gfx942")
        config = Config().override({"train.precision": precision})
        assert ("short" in available_attention(config, CUDA)) == fits
    assert choose_precision("auto", CUDA) == precision and choose_precision("fp32", CUDA) == "fp32"
    assert (missing_for_triton(card) is None) == (architecture not in ("", "Volta"))


def test_run_records_card_and_peak_of_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("electra_fast.card.card_of", lambda _: Card("Tesla T4", (7, 5)))
    said = {}
    for precision in ("fp16", "bf16"):
        config = Config.preset("tiny").override({"train.precision": precision})
        said[precision] = " ".join(settings(config, CUDA, 1, 8, [], ""))
    assert said["fp16"].startswith("MFU is relative to this device's dense peak in fp16, 65 TFLOP/s train.precision =")
    assert said["bf16"] == "no MFU: the peak of this device in bf16 is unknown"
    assert str(Card("Tesla T4", (7, 5))) == "Tesla T4 (Turing 7.5)"
    assert str(Card("AMD Instinct MI300X", (9, 4), is_rocm=True, gfx="gfx942")) == "AMD Instinct MI300X (gfx942)"


def test_missing_requirement_of_triton_reported(monkeypatch: pytest.MonkeyPatch, headers: Path) -> None:
    def missing() -> str:
        return str(missing_for_triton(Card("Tesla V100-SXM2-16GB", (7, 0))))

    assert missing_for_triton(None) is None
    assert missing().startswith("Triton needs compute capability 7.5, and Tesla V100-SXM2-16GB has 7.0; ")
    (headers / "Python.h").unlink()
    assert f"{headers}/Python.h is missing; install python3-dev" in missing()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.delenv("CC", raising=False)
    assert "found no gcc or clang; install gcc" in missing()
    monkeypatch.setenv("CC", "gcc-99")
    assert "found no gcc-99; install gcc" in missing()
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.7.1"))
    assert missing().startswith("Triton 3.7.1 compiles wrong code (triton issue 11366); upgrade torch")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert missing().endswith("pip install triton")
