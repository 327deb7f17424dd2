"""The choice of an attention backend: the requirements of each, and the resolution of `auto`."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from electra_fast.card import Card
from electra_fast.config.config import Config, ModelConfig
from electra_fast.model import attention, compute
from electra_fast.model.attention import BACKENDS
from electra_fast.model.compute import available_attention, choose_attention, choose_compute

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
HOPPER = Card("NVIDIA H100 80GB HBM3", (9, 0))


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "card_of", lambda _: HOPPER)
    monkeypatch.setattr(attention, "missing_for_triton", lambda _: None)


def chosen(
    backend: str,
    device: torch.device = CUDA,
    dtype: torch.dtype = torch.bfloat16,
    row_length: int | None = None,
    **shape: Any,
) -> str:
    model = ModelConfig(**{"hidden_size": 256, "num_heads": 4, "attention_dropout": 0.0} | shape)
    return choose_attention(backend, model, device, dtype, row_length)


@pytest.mark.parametrize(
    ("backend", "changes", "missing"),
    [
        ("varlen", {"device": CPU}, "a CUDA device, not cpu"),
        ("short", {"device": CPU}, "a CUDA device, not cpu"),
        ("xformers", {"dtype": torch.float32}, "16-bit activations, not torch.float32; set train.precision"),
        ("short", {"dtype": torch.float32}, "16-bit activations, not torch.float32; set train.precision"),
        ("flex", {"attention_dropout": 0.1}, "model.attention_dropout = 0.0"),
        ("xformers", {"local_attention": 8, "architecture": "modernbert"}, "model.local_attention = 0"),
        ("short", {}, "rows of one length up to 512 tokens, not different lengths"),
        ("short", {"row_length": 513}, "rows of one length up to 512 tokens, not 513"),
        ("short", {"row_length": 128, "num_heads": 2}, "a head dimension of at most 64, not 128"),
        ("varlen", {"hidden_size": 16}, "a head dimension that is a multiple of 8, not 4"),
    ],
)
def test_missing_requirement_is_reported(backend: str, changes: dict[str, Any], missing: str) -> None:
    with pytest.raises(ValueError) as error:
        chosen(backend, **changes)
    assert str(error.value).startswith(f'model.attention = "{backend}": needs {missing}')
    assert str(error.value).endswith('; or set model.attention = "sdpa"') and "\n" not in str(error.value)


def test_requested_backend_is_used_if_it_can_run() -> None:
    for backend, changes in (
        ("varlen", {"local_attention": 8, "architecture": "modernbert"}),
        ("short", {"row_length": 512, "attention_dropout": 0.1}),
        ("flex", {"dtype": torch.float32}),
    ):
        assert chosen(backend, **changes) == backend


def test_missing_package_or_card_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "xformers" else object())
    with pytest.raises(ValueError, match=r"needs the package xformers \(pip install xformers\)"):
        chosen("xformers")
    config = Config.preset("small", "google")
    assert available_attention(config, CUDA) == ["short", "varlen", "sdpa"]
    assert available_attention(config.override({"model.attention_dropout": "0"}), CUDA)[2:] == ["sdpa", "flex"]
    monkeypatch.setattr(attention, "missing_for_triton", lambda _: "no compiler")
    with pytest.raises(ValueError, match=r"needs a working Triton \(no compiler\); or set"):
        chosen("flex")
    assert chosen("auto", row_length=128) == "varlen"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    with pytest.raises(ValueError, match="needs a torch built with flash attention, not "):
        chosen("varlen")
    assert chosen("auto", row_length=128) == "sdpa"


XFORMERS = """
import logging, types

_cpp_library_load_exception = None
try:
    raise ImportError("for PyTorch and CUDA\\nhelp") from OSError("libcudart.so.12: cannot open shared object file")
except ImportError as error:
    _cpp_library_load_exception = error
    error.build_info = types.SimpleNamespace(torch_version="2.10.0+cu128")
    logging.getLogger("xformers").warning("WARNING[XFORMERS]")
"""


def test_xformers_is_used_only_if_its_extension_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a package of the same modules as xformers 0.0.35, whose attention refuses CUDA tensors without it."""
    (tmp_path / "xformers/ops/fmha").mkdir(parents=True)
    (tmp_path / "xformers/_cpp_lib.py").write_text(XFORMERS)
    for name in ("", "ops", "ops/fmha"):
        (tmp_path / "xformers" / name / "__init__.py").write_text("" if name else "from . import _cpp_lib")
    monkeypatch.syspath_prepend(tmp_path)
    names = [f"xformers{name}" for name in ("", "._cpp_lib", ".ops", ".ops.fmha")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    config = Config.preset("small", "google")
    with pytest.raises(ValueError, match=r"libcudart.so.12: cannot .* file \(it was built with torch 2.10.0\+cu128\);"):
        chosen("xformers")
    assert "xformers" not in available_attention(config, CUDA) and not caplog.records
    sys.modules["xformers._cpp_lib"]._cpp_library_load_exception = None  # type: ignore[attr-defined]
    assert chosen("xformers") == "xformers" and available_attention(config, CUDA)[-1] == "xformers"
    for name in names:
        del sys.modules[name]


@pytest.mark.parametrize(("length", "fraction", "expected"), [(128, 0.25, "short"), (512, 0.25, "varlen")])
def test_choice_depends_on_row_length(length: int, fraction: float, expected: str) -> None:
    config = Config.preset("small", "google").override({"data.sequence_length": length, "generator.fraction": fraction})
    assert choose_compute(config, CUDA).attention == expected


def test_auto_is_short_if_it_can_run_else_varlen() -> None:
    assert chosen("auto", attention_dropout=0.1, row_length=128) == "short"
    assert chosen("auto", attention_dropout=0.1, row_length=129) == "varlen"
    assert chosen("auto", row_length=128, num_heads=2) == "varlen"
    assert chosen("auto", dtype=torch.float32, row_length=128) == "sdpa"
    assert chosen("auto") == "varlen"
    assert chosen("auto", CPU, torch.float32) == "sdpa"


@pytest.mark.parametrize(
    ("name", "capability"), [("A100", (8, 0)), ("L4", (8, 9)), ("B200", (10, 0)), ("5090", (12, 0))]
)
@pytest.mark.parametrize("length", [128, 512])
def test_unproven_backend_is_left_to_the_check(
    name: str, capability: tuple[int, int], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`short` is its first candidate, but `auto` without a check is `varlen`."""
    monkeypatch.setattr(compute, "card_of", lambda _: Card(name, capability))
    config = Config.preset("small", "modern").override({"data.sequence_length": length})
    assert available_attention(config, CUDA)[:4] == ["short", "varlen", "sdpa", "flex"]
    assert choose_compute(config, CUDA).attention == "varlen"


def test_rows_of_512_have_every_candidate() -> None:
    config = Config.preset("base", "modern")
    assert config.data.sequence_length == 512
    assert available_attention(config, CUDA)[:4] == ["short", "varlen", "sdpa", "flex"]
    assert choose_compute(config, CUDA).attention == "varlen"


def test_configuration_lists_every_backend() -> None:
    for name in ("auto", *BACKENDS):
        assert Config.preset("tiny").override({"model.attention": name}).model.attention == name
