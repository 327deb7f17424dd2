"""Weights of classes against scikit-learn's, and what `auto` chooses."""

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from electra_fast.data.corpus import Tokenizer
from electra_fast.errors import InputError
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.readers import own_data
from electra_fast.finetuning.readers.memory_table import MemoryTable
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.finetuning.tasks.class_weights import class_weights

LABELS = ("a", "b", "c")


def test_balanced_weights_are_those_of_scikit_learn():
    targets = np.repeat([0, 1, 2], [70, 29, 1])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=targets)
    weights, note = class_weights("balanced", LABELS, np.bincount(targets))
    np.testing.assert_allclose(weights, expected)
    assert note == "class_weights = balanced; weights from 0.476 ('a') to 33.3 ('c')"


@pytest.mark.parametrize(
    ("counts", "expected", "reason"),
    [
        ([50, 46, 4], None, "none, since no class is rare"),
        ([95, 5, 0], None, "none, since no class is rare"),  # no training example has it
        ([60, 57, 3], [40 / 60, 40 / 57, 10], "'c', with 3 in training, is below a tenth of an even share of 40"),
    ],
)
def test_auto_weights_rare_classes_up_to_a_limit(counts, expected, reason):
    weights, note = class_weights("auto", LABELS, np.array(counts))
    assert (weights is None) if expected is None else weights.tolist() == pytest.approx(expected)
    assert reason in note


def test_given_weights_and_groups():
    counts, groups = np.array([5, 1, 1]), {"bc": [1, 2]}
    assert class_weights("bc=3,b=2", LABELS, counts, groups=groups)[0].tolist() == [1, 2, 3]
    for text, message in (
        ("d=1", "'d=1' must be LABEL=WEIGHT, a label of a, b, c"),
        ("a=-1", "at least 0"),
        ("x", "auto"),
    ):
        with pytest.raises(InputError, match=message):
            class_weights(text, LABELS, counts)


def test_examples_have_the_weights_of_their_classes(tiny_vocab):
    rows = [{"text": f"value {number}", "label": "ab"[number == 0]} for number in range(30)]
    tables = {name: MemoryTable.of(name, rows) for name in ("train", "dev")}
    kind, config = TASK_TYPES["classification"], FinetuneSection(class_weights="auto")
    data = own_data.read("classification", *tables.values(), None)
    found = kind.training_set(Tokenizer(tiny_vocab), data.task, data.train, config)
    np.testing.assert_allclose(found.weights, [10] + [15 / 29] * 29)
    assert "'b', with 1 in training, is below" in found.notes[0]
