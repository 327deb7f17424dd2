"""Kernels are tested with poisoned memory and, without a GPU, in Triton's interpreter.

The interpreter must be enabled before Triton is imported.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _poisoned(poisoned_memory: None) -> None:
    """Uninitialized floats are NaN in these tests."""
