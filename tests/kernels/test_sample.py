"""The sampling kernel draws what its reference draws, from the same keys."""

import subprocess
import sys

import pytest
import torch

from electra_fast.kernels import sample
from electra_fast.sampling import sample_categorical_reference

# Triton 3.6's interpreter converts arrays in a way that NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 5), (7, 128), (37, 300), (255, 1000), (3, 30_522)])
def test_equals_reference(num_rows, vocab_size):
    random = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(num_rows, vocab_size, generator=random) * 3).to(DEVICE)
    slots = torch.arange(num_rows, device=DEVICE) + 2**31  # counters past the signed range
    key = torch.tensor([2**40 + 7, 12], device=DEVICE)
    drawn = sample.sample_categorical(logits, slots, key)
    assert torch.equal(drawn, sample_categorical_reference(logits, slots, key))


def test_never_draws_what_has_no_mass():
    logits = torch.full((200, 700), -torch.inf, device=DEVICE)
    logits[:, [3, 131, 699]] = 0.0
    drawn = sample.sample_categorical(logits, torch.arange(200, device=DEVICE), torch.tensor([1, 2], device=DEVICE))
    counts = torch.bincount(drawn, minlength=700)
    assert counts[[3, 131, 699]].sum() == 200
    assert (counts[[3, 131, 699]] > 40).all()


def test_strided_rows():
    wide = torch.randn(9, 512, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    slots, key = torch.arange(9, device=DEVICE), torch.tensor([5, 6], device=DEVICE)
    drawn = sample.sample_categorical(wide[:, :300], slots, key)
    assert torch.equal(drawn, sample.sample_categorical(wide[:, :300].contiguous(), slots, key))
    with pytest.raises(ValueError, match="contiguous"):
        sample.sample_categorical(wide.T, slots, key)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from electra_fast.kernels import sample
signature = {"logits_ptr": "*bf16", "row_stride": "i32", "slot_ptr": "*i64", "seed_and_step_ptr": "*i64",
             "sample_ptr": "*i64", "vocab_size": "i32", "num_tiles": "i32", "TILE": "constexpr", "TILES": "constexpr"}
constants = {"TILE": sample.TILE, "TILES": sample.TILES_A_STEP}
source = ASTSource(sample._sample_categorical_kernel, signature, constants)
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
assert kernel.asm["cubin"], "no machine code"
assert kernel.metadata.shared <= 227 * 1024, kernel.metadata.shared
print(kernel.asm["ptx"].count("ex2.approx"))
"""


def test_compiles_for_hopper(monkeypatch):
    """Ahead of time for sm_90, which needs no GPU; in a process of its own, without the interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
