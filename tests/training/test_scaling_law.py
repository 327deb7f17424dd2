"""The scaling law: its formula, what it calls size, and repeated text."""

import math

import pytest

import electra_fast as ef
from electra_fast.training.scaling_law import ScalingLaw, layer_weights

EXAMPLE = ScalingLaw(floor=0.1, size=0.02, alpha=0.5, data=0.4, beta=1.0, epochs=10.0)


def test_the_error_falls_by_powers_of_weights_and_tokens():
    assert EXAMPLE.error(4e6, 2e6) == pytest.approx(0.1 + 0.02 / 2 + 0.4 / 2)
    assert EXAMPLE.error(1e15, 1e15) == pytest.approx(EXAMPLE.floor, abs=1e-4)


def test_repeated_text_is_worth_less_and_less():
    assert EXAMPLE.fresh(5e6, math.inf) == EXAMPLE.fresh(5e6, 5e6) == 5e6
    assert EXAMPLE.fresh(5e6, 4e6) == pytest.approx(4e6 + 40e6 * (1 - math.exp(-0.025)))
    assert EXAMPLE.fresh(1e12, 4e6) == pytest.approx(4e6 * (1 + EXAMPLE.epochs))
    assert EXAMPLE.error(1e6, 5e6, 4e6) > EXAMPLE.error(1e6, 5e6)


@pytest.mark.parametrize("recipe", ["modern", "google"])
def test_the_size_is_that_of_the_layers_matrices(recipe):
    config = ef.Config.preset("tiny", recipe).override({"model.vocab_size": "100"})
    named = ef.Electra(config).named_parameters()
    matrices = [each for name, each in named if name.startswith("discriminator.layers.") and each.ndim == 2]
    assert layer_weights(config.model) == sum(each.numel() for each in matrices)
