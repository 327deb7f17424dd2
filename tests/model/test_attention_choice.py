"""The choice of an attention backend: what each needs, and which one `auto` is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from electra_fast.config.config import Config
from electra_fast.model.attention import ATTENTION_BACKENDS
from electra_fast.model.compute import choose_attention, choose_compute

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


IN_BF16 = {"device": CUDA, "dtype": torch.bfloat16, "dropout": 0.0}


@pytest.mark.parametrize(
    ("backend", "changes", "missing"),
    [
        ("varlen", {"device": CPU}, "a CUDA device, and this is cpu"),
        ("short", {"device": CPU}, "a CUDA device, and this is cpu"),
        ("xformers", {"dtype": torch.float32}, "16-bit activations, and these are torch.float32; set train.precision"),
        ("short", {"dtype": torch.float32}, "16-bit activations, and these are torch.float32; set train.precision"),
        ("flex", {"dropout": 0.1}, "model.attention_dropout = 0.0"),
        ("xformers", {"local_attention": 8}, "model.local_attention = 0"),
        ("short", {}, "rows of at most 128 tokens, and these differ in length"),
        ("short", {"row_length": 129}, "rows of at most 128 tokens, and these have 129"),
        ("short", {"row_length": 128, "head_dim": 96}, "heads of at most 64 dimensions, and these have 96"),
    ],
)
def test_a_backend_names_a_missing_requirement(backend: str, changes: dict[str, Any], missing: str) -> None:
    with pytest.raises(ValueError) as error:
        choose_attention(backend, **IN_BF16 | changes)
    assert str(error.value).startswith(f'model.attention = "{backend}" needs {missing}')
    assert str(error.value).endswith('; or set model.attention = "sdpa"') and "\n" not in str(error.value)


def test_a_backend_that_can_run_is_taken() -> None:
    for backend, changes in (
        ("varlen", {"local_attention": 8}),
        ("short", {"local_attention": 8, "row_length": 128, "dropout": 0.1}),
        ("flex", {"dtype": torch.float32}),
    ):
        assert choose_attention(backend, **IN_BF16 | changes) == backend


@pytest.mark.parametrize(
    ("backend", "missing", "lacks"),
    [
        ("xformers", "xformers", r"the package xformers \(pip install xformers\)"),
        ("varlen", "torch.nn.attention.varlen", "a torch that has torch.nn.attention.varlen, and this is "),
    ],
)
def test_a_missing_package_is_named(backend: str, missing: str, lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else object())
    with pytest.raises(ValueError, match=f'model.attention = "{backend}" needs {lacks}'):
        choose_attention(backend, CUDA, torch.bfloat16, 0.0)
    assert choose_attention("auto", CUDA, torch.bfloat16, 0.0) == ("sdpa" if backend == "varlen" else "varlen")


def test_short_is_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(ValueError, match="a GPU of compute capability 9, .* and this has 8.6; or set"):
        choose_attention("short", CUDA, torch.bfloat16, 0.0, row_length=128)
    assert choose_attention("auto", CUDA, torch.bfloat16, 0.0, row_length=128) == "varlen"


@pytest.mark.parametrize(("length", "fraction", "expected"), [(128, 0.25, "short"), (512, 0.25, "varlen")])
def test_a_run_chooses_by_its_rows(
    length: int, fraction: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    config = Config.preset("small", "google").replace(
        {"data": {"sequence_length": length}, "generator": {"fraction": fraction}}
    )
    assert choose_compute(config, CUDA).attention == expected


def test_auto_is_short_where_it_can_run_and_else_varlen() -> None:
    assert choose_attention("auto", CUDA, torch.bfloat16, 0.1, local_attention=8, row_length=128) == "short"
    assert choose_attention("auto", CUDA, torch.bfloat16, 0.1, row_length=129) == "varlen"
    assert choose_attention("auto", CUDA, torch.bfloat16, 0.0, row_length=128, head_dim=96) == "varlen"
    assert choose_attention("auto", CUDA, torch.float32, 0.0, row_length=128) == "sdpa"
    assert choose_attention("auto", CPU, torch.float32, 0.0) == "sdpa"


def test_the_configuration_knows_every_backend() -> None:
    for name in ("auto", *ATTENTION_BACKENDS):
        assert Config.preset("tiny").override({"model.attention": name}).model.attention == name
