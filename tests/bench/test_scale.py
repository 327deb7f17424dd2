"""`docs/scale.md` has the tables that `bench/scale.py` prints, and its numbers of parameters are the presets'."""

import pytest
import scale
from lib.groups import BENCH
from torch._subclasses.fake_tensor import FakeTensorMode

import electra_fast as ef


def test_the_page_has_the_tables():
    page = (BENCH.parent / "docs/scale.md").read_text(encoding="utf-8")
    assert [table for table in scale.tables() if table not in page] == []


@pytest.mark.parametrize("preset", scale.MODELS)
def test_sizes_are_those_of_the_presets(preset):
    config = ef.Config.preset(preset, "google").override({"model.vocab_size": "30522"})
    with FakeTensorMode():
        parameters = sum(parameter.numel() for parameter in ef.Electra(config).parameters())
    assert scale.MODELS[preset][:3] == (parameters, config.model.num_layers, config.model.hidden_size)
