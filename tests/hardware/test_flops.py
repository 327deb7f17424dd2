"""The published count, exactly, and the true count, compared with torch's counter."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from variants import VARIANTS

from electra_fast.config.config import Config
from electra_fast.hardware.flops import flops, flops_per_token, objectives_report, published_training_flops
from electra_fast.model.compute import ComputeConfig
from electra_fast.model.model import Electra
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey
from electra_fast.ops.operations import linear, use_impl

# Output of `flops_computation.py` in the published code.
PUBLISHED = {
    "electra_small": 1.293743798272e18,
    "electra_base": 6.424541834277683e19,
    "electra_400k": 7.117606040895488e20,
    "electra_1.75M": 3.113952642891776e21,
    "bert_small": 1.4187399146496e18,
    "bert_base": 6.428335104e19,
    "bert_large": 1.91720905883648e20,
}

# The published head of masked language modeling at small, per token: 20 of 128 positions, V = 30522, e = 128, h = 256.
MASKED_HEAD = 0.15625 * (2 * 128 * 30522 + 2 * 256 * 128 + 14 * 128 + 7 * 30522)
RTD_HEAD = 2 * 256**2 + 11 * 256


@pytest.mark.parametrize(
    ("preset", "changes", "name"),
    [
        ("small", {}, "electra_small"),
        ("base", {}, "electra_base"),
        ("large", {}, "electra_400k"),
        ("large", {"train.steps": 1_750_000}, "electra_1.75M"),
        ("small", {"objective.name": "mlm", "train.steps": 1_450_000}, "bert_small"),
        ("base", {"objective.name": "mlm", "train.steps": 1_000_000}, "bert_base"),
        ("large", {"objective.name": "mlm", "train.steps": 1_000_000, "train.batch_size": 256}, "bert_large"),
    ],
)
def test_presets_match_published_totals(preset: str, changes: dict[str, object], name: str) -> None:
    assert published_training_flops(Config.preset(preset, "google").override(changes)) == PUBLISHED[name]


@pytest.mark.parametrize(("key", "value"), [("architecture", "modernbert"), ("heads", "plain")])
def test_no_published_count_for_other_encoders(key: str, value: str) -> None:
    config = Config.preset("tiny", "google").override({f"model.{key}": value})
    assert published_training_flops(config) is flops(config)["published_total"] is None


@pytest.mark.parametrize(
    ("preset", "parts", "total"),
    [("small", (62, 5, 3.5), 70), ("base", (570, 77, 21), 668), ("large", (1969, 153, 28), 2150)],
)
def test_true_mflops_per_token(preset: str, parts: tuple[float, ...], total: float) -> None:
    flops = flops_per_token(Config.preset(preset, "google").override({"data.mask_prob": 0.15}))
    counts = (flops.discriminator, flops.generator, flops.generator_head)
    assert [x / 1e6 for x in counts] == pytest.approx(parts, rel=0.05)
    assert flops.total / 1e6 == pytest.approx(total, rel=0.005)
    assert flops.total == sum(counts)


OTHER_SHAPES = {
    "modern": {"model.architecture": "modernbert"},
    "a projection": {"model.embedding_size": "32", "model.num_layers": "3"},
    "a modern projection": {"model.architecture": "modernbert", "model.embedding_size": "32", "objective.name": "mlm"},
    "no projection": {"model.embedding_size": "64"},
    "deberta": {"model.architecture": "deberta", "model.conv_kernel_size": "3", "model.num_layers": "3"},
    "deberta, few buckets": {
        "model.architecture": "deberta",
        "model.position_buckets": "8",
        "generator.num_layers": "1",
    },
    "generator first": {"objective.generator_first": "9", "model.tying": "none", "generator.embedding_size": "16"},
}


@pytest.mark.parametrize("name", [*VARIANTS, *OTHER_SHAPES])
def test_true_counts_match_torch_counter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward passes of each stage, with the references, whose products torch counts.

    The math backend computes attention as the formula counts it. Torch does not count in-place products, and flash
    attention computes the scores again in its backward pass.
    """

    def nll(x_TE: Tensor, table_VE: Tensor, bias_V: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
        logits = linear(x_TE, table_VE, bias_V)
        return torch.nn.functional.cross_entropy(logits, target_T, reduction="none"), logits.argmax(-1) == target_T

    monkeypatch.setattr("electra_fast.objectives.mlm.vocabulary_nll", nll)
    sizes = {"model.vocab_size": "300", "data.mask_prob": "0.25", "data.sequence_length": "32"}
    sizes |= {"model.dropout": "0", "model.attention_dropout": "0", "train.batch_size": "4"}
    config = Config.preset("tiny", "google").override(sizes | (VARIANTS | OTHER_SHAPES)[name])
    num_rows = 4
    length = 32
    slots = 8
    shape = (num_rows, length)
    mask_shape = (num_rows, slots)
    batch = {
        "input_ids": torch.randint(5, 300, shape, dtype=torch.int32),
        "token_type_ids": torch.zeros(shape, dtype=torch.int32),
        "position_ids": torch.arange(length, dtype=torch.int32).expand(shape),
        "segment_ids": torch.ones(shape, dtype=torch.int32),
        "cu_seqlens": torch.arange(0, num_rows * length + 1, length, dtype=torch.int32),
        "masked_positions": torch.arange(0, length, 4, dtype=torch.int32).expand(mask_shape).contiguous(),
        "masked_ids": torch.randint(5, 300, mask_shape, dtype=torch.int32),
        "masked_weights": torch.ones(mask_shape),
    }
    for stage in objective_of(config).stages():
        model = Electra(config)
        for part in stage.frozen:
            model.get_submodule(part).requires_grad_(False)
        denominators = stage.objective.loss_denominators(batch)
        compute = ComputeConfig("sdpa", torch.float32)
        key = RngKey(torch.tensor([1, 2]))
        with use_impl("reference"), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            stage.objective.forward(model, MicroBatch(batch, compute, key, denominators)).loss.backward()
        expected = flops_per_token(config, [stage]).total * num_rows * length
        # The baseline does not propagate a gradient, but is counted as if it did.
        assert counter.get_total_flops() == pytest.approx(expected, rel=2e-4 if "adversarial" in name else 1e-12)


def test_run_cost_sums_stages() -> None:
    config = Config.preset("small", "paper").with_objective("two-stage")
    stages = objective_of(config).stages()
    first, second = (flops_per_token(config, [stage]) for stage in stages)
    mlm = flops_per_token(config.with_objective("mlm"))
    assert (first, mlm.generator) == (mlm, first.generator)
    assert second.generator == pytest.approx(mlm.generator / 3)  # frozen: forward only
    assert second.discriminator == flops_per_token(config.with_objective("electra")).discriminator
    assert flops_per_token(config).total == pytest.approx((first.total + second.total) / 2)


def test_generator_first_steps_cost_only_generator() -> None:
    config = Config.preset("small", "google").override({"train.steps": "100", "objective.generator_first": "25"})
    first, second = (flops_per_token(config, [stage]) for stage in objective_of(config).stages())
    assert second == flops_per_token(config.override({"objective.generator_first": "0"}))
    assert (first.generator, first.generator_head) == (second.generator, second.generator_head)
    assert first.total == first.generator + first.generator_head
    assert flops_per_token(config).total == pytest.approx((first.total + 3 * second.total) / 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # A generator and an encoder, with BERT's head instead of the discriminator's.
        ("replace-mlm", PUBLISHED["electra_small"] + 2 * 128e6 * 128 * (MASKED_HEAD - RTD_HEAD)),
        ("all-tokens-mlm", PUBLISHED["electra_small"] + 2 * 128e6 * 128 * (MASKED_HEAD / 0.15625 + 2 * 256 - RTD_HEAD)),
    ],
)
def test_published_count_of_other_objectives(name: str, expected: float) -> None:
    assert published_training_flops(Config.preset("small", "paper").with_objective(name)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"train.steps": "1"}, {"two-stage"}),
        (
            {"objective.name": "mlm", "model.tying": "all"},
            {"electra", "electra15", "replace-mlm", "all-tokens-mlm", "adversarial"},
        ),
    ],
)
def test_impossible_objectives_have_no_count(changes: dict[str, str], missing: set[str]) -> None:
    """The configured objective has its count, even if others are impossible."""
    config = Config.preset("small", "paper").override(changes)
    content = flops(config)
    assert content["per_token"]["total"] == flops_per_token(config).total  # type: ignore[index]
    report = objectives_report(config)
    assert {name for name, counts in report.items() if counts["per_token"] is None} == missing
    for counts in report.values():
        assert (counts["times_electra"] is None) == (counts["per_token"] is None or "electra" in missing)


def test_local_attention_counts_window() -> None:
    config = Config.preset("tiny", "modern").override({"model.num_layers": 4, "objective.name": "mlm"})
    local = config.override({"model.local_attention": 8})  # layers 1 and 2
    length = config.data.sequence_length
    hidden = config.model.hidden_size
    saved = flops_per_token(config).generator - flops_per_token(local).generator
    assert saved == 3 * 2 * 4 * (length - 9) * hidden


def test_report_totals_are_consistent() -> None:
    config = Config.preset("small", "google")
    content = flops(config)
    assert content["published_total"] == PUBLISHED["electra_small"]
    assert content["tokens_per_step"] == 128 * 128
    assert content["tokens"] == 128 * 128 * 1_000_000
    assert content["total"] == pytest.approx(flops_per_token(config).total * 128 * 128 * 1e6)
    assert content["vocab_size"] == 30522
    assert set(content["per_token"]) == {"discriminator", "generator", "generator_head", "total"}  # type: ignore[call-overload]
