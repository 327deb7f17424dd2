"""Kernels are tested with poisoned memory."""

import warnings

import pytest


@pytest.fixture(autouse=True)
def _poisoned(poisoned_memory: None) -> None:
    """Uninitialized floats are NaN in these tests."""


@pytest.fixture(autouse=True)
def _warnings_of_others() -> None:
    """Ignores warnings of torch's opcheck, which reads `.grad`."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
