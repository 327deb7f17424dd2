"""Unchanged segments and the loss of the head on [CLS]; and the positions that `electra15` samples."""

import pytest
import torch
from test_electra import COMPUTE, KEY, LENGTH, SLOTS, halves, make_batch, make_config, make_model
from variants import VARIANTS

from electra_fast.objectives import objective_of
from electra_fast.objectives.electra import restore_some_segments, sentence_totals
from electra_fast.objectives.objective import MicroBatch, RngKey, corrupt, read_inputs

ROWS = 2000


def read(batch, key, config=None):
    model = make_model(config or make_config())
    return read_inputs(model, MicroBatch(batch, COMPUTE, key))


def unchanged_slots(batch, key):
    """Returns the slots of real masks that have their original token; no sample equals it."""
    samples = restore_some_segments(read(batch, key), torch.full((batch["masked_ids"].numel(),), -1), key)
    return (samples.view(-1, SLOTS) >= 0) & (batch["masked_weights"] > 0)


def test_one_fifth_of_segments_is_unchanged():
    batch = make_batch(ROWS)
    is_whole = unchanged_slots(batch, RngKey(KEY))
    used = batch["masked_weights"] > 0
    segment = torch.where(used, batch["masked_positions"] // 5, -1)  # 0 or 1
    shares = []
    for number in (0, 1):
        ours = segment == number
        count = ours.sum(1)
        num_whole = (is_whole & ours).sum(1)
        assert ((num_whole == 0) | (num_whole == count)).all()  # a segment is unchanged, or sampled everywhere
        shares.append((num_whole > 0)[count > 0].float())
    for share in shares:
        assert abs(share.mean() - 0.2) < 4 * (0.16 / len(share)) ** 0.5
    both = torch.isin(segment, torch.tensor(0)).any(1) & torch.isin(segment, torch.tensor(1)).any(1)
    together = ((is_whole & (segment == 0)).any(1) & (is_whole & (segment == 1)).any(1))[both].float()
    assert abs(together.mean() - 0.04) < 4 * (0.04 * 0.96 / len(together)) ** 0.5  # independently


def test_unchanged_segments_depend_on_step_and_row_only():
    batch = make_batch(ROWS)
    first = unchanged_slots(batch, RngKey(KEY))
    assert torch.equal(first, unchanged_slots(batch, RngKey(KEY)))
    assert not torch.equal(first, unchanged_slots(batch, RngKey(KEY + 1)))
    few = make_batch(4)
    parts = [unchanged_slots(half, RngKey(KEY, torch.tensor(row))) for row, half in halves(few)]
    assert torch.equal(torch.cat(parts), unchanged_slots(few, RngKey(KEY)))
    one_row = {name: tensor[:1].repeat(200, 1) for name, tensor in batch.items() if name != "cu_seqlens"}
    alike = unchanged_slots(one_row | {"cu_seqlens": None}, RngKey(KEY))
    assert alike.any() and not alike.any(1).all()


def test_head_counts_recognized_texts():
    """From hidden states that show which texts are unchanged."""
    model = make_model(make_config(**VARIANTS["contrastive"]))
    batch = make_batch(64)
    inputs = read_inputs(model, MicroBatch(batch, COMPUTE, RngKey(KEY)))
    samples = restore_some_segments(inputs, (inputs.slots.target_M + 1) % 50, RngKey(KEY))
    _, replaced_T = corrupt(inputs, samples)
    per_segment = replaced_T.view(64, LENGTH)[:, :10].view(64, 2, 5).any(2)
    hidden_TD = torch.zeros(replaced_T.shape[0], 64)
    hidden_TD.view(64, LENGTH, 64)[:, [0, 5], 0] = torch.where(per_segment, 3.0, -3.0)
    with torch.no_grad():
        model.sentence_head.classifier.weight.copy_(torch.eye(64)[:1])
    totals = sentence_totals(model, inputs, hidden_TD, replaced_T)
    assert totals["segments"] == totals["contrastive_correct"] == 128
    assert 0.1 < 1 - per_segment.float().mean() < 0.5


@pytest.mark.parametrize("name", ["electra15", "electra15, random positions"])
def test_positions_of_electra15(name):
    """As many positions per row as are masked: the masked ones, or others, independent of them and of each other."""
    config = make_config(**VARIANTS[name])
    batch = make_batch(ROWS)
    objective = objective_of(config)
    inputs = read(batch, RngKey(KEY), config)
    counted = objective.counted(inputs, RngKey(KEY)).view(ROWS, LENGTH)
    masked = batch["input_ids"] == 4
    assert torch.equal(counted.sum(1), masked.sum(1))
    assert torch.equal(counted.sum(1), batch["masked_weights"].sum(1).long())
    assert not counted[:, 10:].any()  # padding
    if name == "electra15":
        assert torch.equal(counted, masked)
        return
    expected = batch["masked_weights"].sum().item() / (10 * ROWS)
    deviation = (expected * (1 - expected) / ROWS) ** 0.5
    assert (counted[:, :10].float().mean(0) - expected).abs().max() < 4.5 * deviation
    # The sampled fraction of masked tokens equals the fraction of all. (Unmasked tokens alone are all original.)
    share = counted[masked].float().mean()
    assert abs(share - (masked.sum(1).float() ** 2).sum() / 10 / masked.sum()) < 4.5 * (0.21 / masked.sum()) ** 0.5
    repeated = objective.counted(inputs, RngKey(KEY + 1)).view(ROWS, LENGTH)
    assert not torch.equal(repeated, counted)
    few = make_batch(4)
    parts = [objective.counted(read(half, RngKey(KEY, row), config), RngKey(KEY, row)) for row, half in halves(few)]
    assert torch.equal(torch.cat(parts), objective.counted(read(few, RngKey(KEY), config), RngKey(KEY)))
