"""The sampling kernel draws what its reference draws, from the same keys."""

import pytest
import torch
from ahead_of_time import MOST_SHARED_BYTES, compile_kernel

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


def test_compiles_ahead_of_time():
    types = {"logits_ptr": "*bf16", "row_stride": "i32", "slot_ptr": "*i64", "seed_and_step_ptr": "*i64"}
    types |= {"sample_ptr": "*i64", "vocab_size": "i32", "num_tiles": "i32"}
    constants = {"TILE": sample.TILE, "TILES": sample.TILES_A_STEP}
    for capability in (90, 80):
        code = compile_kernel("sample", "_sample_categorical_kernel", types, constants, capability=capability)
        assert code.spilled_bytes == 0 and code.registers <= 255
        assert code.shared_bytes <= MOST_SHARED_BYTES[capability]
