"""Encoders against `transformers`, and packed rows against their separate segments."""

import itertools
from pathlib import Path

import pytest
import torch
from published_deberta import hf_class
from torch import Tensor
from variants import randomized

from electra_fast.config.config import Config
from electra_fast.huggingface.config import role_shape
from electra_fast.huggingface.folder import write_model
from electra_fast.huggingface.weights import to_hf
from electra_fast.model.attention import AttentionMask
from electra_fast.model.model import Electra
from electra_fast.ops import operations as ops

SPECIAL_IDS = {"pad": 0, "cls": 2, "sep": 3}
BASE_E = {"model.embedding_size": 128, "model.num_layers": 2}  # one test uses the full depth
TINY_E = {"model.embedding_size": 64}
CONV = {"model.conv_kernel_size": 3, "generator.num_layers": 2}


def make(preset: str, recipe: str, changes: dict[str, object], vocab_size: int) -> Electra:
    return randomized(Electra(Config.preset(preset, recipe).override(changes, vocab_size=vocab_size)), 7)


def hf_model(model: Electra, role: str, folder: Path) -> torch.nn.Module:
    """Returns the same weights in the class of `transformers`, with eager attention."""
    write_model(folder, model, role, SPECIAL_IDS)
    theirs, info = hf_class(model.config.model.architecture, role).from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.isfinite(parameter).all() for parameter in theirs.parameters())
    return theirs.eval()


def inputs(vocab_size: int, length: int, padded: bool, architecture: str) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    batch = {"input_ids": torch.randint(4, vocab_size, (3, length), generator=random)}
    if padded:
        lengths = torch.tensor([length, length // 2, 3])
        batch["attention_mask"] = (torch.arange(length) < lengths[:, None]).long()
    if architecture == "bert":
        batch["token_type_ids"] = (torch.arange(length) > length // 3).long().expand(3, -1)
    return batch


@pytest.mark.parametrize(
    ("preset", "recipe", "changes"),
    [
        ("tiny", "google", TINY_E),
        ("tiny", "modern", {}),
        ("tiny", "deberta", {"generator.num_layers": 0, "model.position_buckets": 8}),
        ("tiny", "deberta", {"generator.fraction": 0.5, "model.embedding_size": 48} | CONV),
        pytest.param("small", "deberta", {}, marks=pytest.mark.slow),
        pytest.param("base", "google", {}, marks=pytest.mark.slow),
        pytest.param("base", "modern", BASE_E, marks=pytest.mark.slow),
    ],
)
def test_logits_equal_transformers(tmp_path: Path, preset: str, recipe: str, changes: dict[str, object]) -> None:
    model = make(preset, recipe, changes, vocab_size=1000)
    batches = [inputs(1000, 32, padded, model.config.model.architecture) for padded in (False, True)]
    for role in ("discriminator", "generator"):
        check_logits(model, hf_model(model, role, tmp_path), role, batches)


@pytest.mark.parametrize("recipe", ["google", "modern", "deberta"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_states_at_masked_slots_equal_states_of_all_tokens(recipe: str, dropout: float) -> None:
    """Their gradients are equal too, also for a position that is masked twice; unused slots have no loss."""
    keys = {"model.dropout": dropout, "model.attention_dropout": dropout, "generator.num_layers": 2}
    model = make("tiny", recipe, keys, vocab_size=100).train()
    arguments = model._flat_inputs(torch.arange(4, 40).view(3, 12), None, None)
    slots = torch.tensor([3, 3, 36, 14, 20, 12, 35, 36, 24]), 3
    outcomes = []
    for early in (False, True):
        torch.manual_seed(0)
        model.zero_grad()
        states_MD = model.hidden("generator", *arguments, slots=slots if early else None)
        states_MD = states_MD if early else ops.slot_states(states_MD, *slots)
        upstream = torch.linspace(-1, 1, states_MD.numel()).view(states_MD.shape) * (slots[0] < 36)[:, None]
        (states_MD * upstream).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        outcomes.append({"states": states_MD.detach()[[0, 1, 3, 4, 5, 6, 8]]} | gradients)
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-5)


def check_logits(model: Electra, theirs: torch.nn.Module, role: str, batches: list[dict[str, Tensor]]) -> None:
    for batch in batches:
        with torch.no_grad():
            expected = their_logits(theirs, batch)
            actual = logits(model, role, batch)
        assert actual.dtype == torch.float32 and actual.shape == expected.shape
        # Logits differ from token to token, so constants cannot be equal.
        assert expected.std() > 0.01
        is_token = tokens_of(model, batch)
        assert (actual - expected)[is_token].abs().max() <= 1e-5


def tokens_of(model: Electra, batch: dict[str, Tensor]) -> Tensor:
    """Returns the tokens to compare, without padding, since DeBERTa in `transformers` differs there."""
    is_token = torch.ones_like(batch["input_ids"]).bool()
    has_padding = model.config.model.architecture == "deberta" and "attention_mask" in batch
    return batch["attention_mask"].bool() if has_padding else is_token


def their_logits(theirs: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the logits; for a token classifier, the logits of its last label, "replaced"."""
    logits_BL: Tensor = theirs(**batch).logits
    return logits_BL[..., -1] if "TokenClassification" in type(theirs).__name__ else logits_BL


def logits(model: Electra, role: str, batch: dict[str, Tensor]) -> Tensor:
    return model.discriminator_logits(**batch) if role == "discriminator" else model.generator_logits(**batch)


@pytest.mark.parametrize("recipe", ["google", "modern"])
def test_mask_and_token_types_have_an_effect(recipe: str) -> None:
    model = make("tiny", recipe, {}, vocab_size=100)
    ids = torch.randint(4, 100, (1, 16), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(16) < 9).long()[None]
    with torch.no_grad():
        masked = model.discriminator_logits(ids, mask)
        whole = model.discriminator_logits(ids)
        alone = model.discriminator_logits(ids[:, :9])
        typed = model.discriminator_logits(ids, None, torch.ones_like(ids))
    assert (masked[:, :9] - alone).abs().max() <= 1e-5
    assert (masked[:, :9] - whole[:, :9]).abs().max() > 1e-3
    assert ((typed - whole).abs().max() > 1e-3) == (recipe == "google")


@pytest.mark.parametrize("recipe", ["google", "modern", "deberta"])
@pytest.mark.parametrize("role", ["discriminator", "generator"])
def test_gradients_equal_transformers(tmp_path: Path, recipe: str, role: str) -> None:
    changes: dict[str, object] = {"generator.fraction": 1.0, "model.tying": "none"}
    if recipe == "modern":  # a projection that is multiplied into the table has no separate gradient there
        changes["model.embedding_size"] = 64
    model = make("tiny", recipe, changes, vocab_size=200)
    theirs = hf_model(model, role, tmp_path)
    batch = inputs(200, 24, True, model.config.model.architecture)
    actual = logits(model, role, batch)
    weight = torch.randn(actual.shape, generator=torch.Generator().manual_seed(5))
    weight[~tokens_of(model, batch)] = 0
    (actual * weight).mean().backward()
    (their_logits(theirs, batch) * weight).mean().backward()

    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    grads = to_hf(gradients, role, role_shape(model.config, role))
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        bound = 1e-5 * max(1.0, expected[name].abs().max().item())
        assert (grad - expected[name]).abs().max() <= bound, name
    assert max(grad.abs().max() for grad in grads.values()) > 1e-3


def flat_segments(lengths_BS: list[list[int]], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns segment ids [B, L] (0 = padding), positions [T] and segment borders of packed rows."""
    segment_ids = torch.zeros(len(lengths_BS), length, dtype=torch.long)
    positions = []
    borders = [0]
    for row, lengths in enumerate(lengths_BS):
        parts = [*lengths, length - sum(lengths)]
        segment_ids[row] = torch.cat([torch.full((n,), (i + 1) % len(parts)) for i, n in enumerate(parts)])
        positions += [torch.arange(n) for n in parts]
        borders += [borders[-1] + n for n in itertools.accumulate(parts)][: len(parts) - (parts[-1] == 0)]
    return segment_ids, torch.cat(positions), torch.tensor(borders, dtype=torch.int32)


@pytest.mark.parametrize("recipe", ["google", "modern", "deberta"])
def test_packed_segment_equals_separate_segment(recipe: str) -> None:
    model = make("tiny", recipe, {"generator.fraction": 1.0}, vocab_size=100)
    lengths = [[11, 9], [13, 7]]
    segment_ids, positions, borders = flat_segments(lengths, 20)
    ids = torch.randint(4, 100, (40,), generator=torch.Generator().manual_seed(2))
    weight = torch.randn(40, generator=torch.Generator().manual_seed(4))
    types = torch.zeros_like(ids)
    mask = AttentionMask.packed(segment_ids, borders, "sdpa")
    tokens = (ids, positions, types, mask, torch.float32)
    packed = model.discriminator_head(model.hidden("discriminator", *tokens), positions)
    words = model.generator_head(model.hidden("generator", *tokens), model.generator_embeddings.table)
    (packed * weight).sum().backward()
    packed_grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.zero_grad()
    for start, end in itertools.pairwise(borders.tolist()):
        alone = model.discriminator_logits(ids[None, start:end])[0]
        assert (alone - packed[start:end]).abs().max() <= 1e-5
        alone_words = model.generator_logits(ids[None, start:end])[0]
        assert (alone_words - words[start:end]).abs().max() <= 1e-5
        (alone * weight[start:end]).sum().backward()
    whole = model.discriminator_logits(ids.view(2, 20)).view(-1)
    assert (whole - packed).abs().max() > 1e-2
    for name, p in model.named_parameters():
        if name in packed_grads:
            assert p.grad is not None
            assert (p.grad - packed_grads[name]).abs().max() <= 1e-5 * max(1, p.grad.abs().max().item()), name
    assert len(packed_grads) >= 19


def test_row_longer_than_position_table_is_rejected() -> None:
    model = make("tiny", "google", {}, vocab_size=100)
    with pytest.raises(ValueError, match="sequence length = 129: must be at most model.max_positions = 128"):
        model.discriminator_logits(torch.zeros(1, 129, dtype=torch.long))


def test_tying_shares_the_configured_parameters() -> None:
    same: dict[str, dict[str, object]] = {"generator.fraction": 1.0}
    counts = {
        tying: sum(p.numel() for p in make("tiny", "google", same | {"model.tying": tying}, 100).parameters())
        for tying in ("none", "embeddings", "all")
    }
    embeddings = (100 + 128 + 2 + 2) * 32
    encoder = sum(p.numel() for p in make("tiny", "google", same, 100).discriminator.parameters())
    assert counts["none"] - counts["embeddings"] == embeddings
    assert counts["embeddings"] - counts["all"] == encoder


def test_initial_weights_are_a_normal_truncated_at_two_deviations() -> None:
    model = Electra(Config.preset("small", "google").override({"model.vocab_size": 1000}))
    weight = torch.cat([p.detach().flatten() for p in model.discriminator.layers.parameters() if p.dim() == 2]) / 0.02
    assert weight.abs().max() <= 2 + 1e-6
    assert abs(weight.mean()) < 0.002
    assert abs(weight.std() - 0.8796) < 0.001  # standard deviation of a standard normal truncated at two
    inside = (weight.abs() < 1).double().mean()
    assert abs(inside - 0.6827 / 0.9545) < 0.001
    assert all(p.eq(0).all() for name, p in model.named_parameters() if name.endswith("bias"))
    state = torch.get_rng_state()
    repeated = Electra(model.config.override({"train.seed": 1}))
    assert not torch.equal(repeated.embeddings.token, model.embeddings.token)
    assert torch.equal(Electra(model.config).embeddings.token, model.embeddings.token)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("recipe", ["google", "paper"])
def test_layers_without_a_published_initializer_start_glorot_uniform(recipe: str) -> None:
    """Glorot uniform is TensorFlow's default; the standard deviations at `small` are the published code's."""
    model = Electra(Config.preset("small", recipe).override({"model.vocab_size": 100}))
    deviations = {"discriminator.projection": 0.0722, "generator.projection": 0.1021}
    deviations["discriminator_head.classifier"] = 0.0882
    for name, deviation in deviations.items():
        weight = model.get_parameter(f"{name}.weight").detach()
        bound = 3**0.5 * deviation
        assert 0.97 * bound < weight.abs().max() <= 1.001 * bound, name
        # Within 4 standard errors of the deviation and of the mean of n uniform samples.
        assert abs(weight.std() / deviation - 1) < 4 * (0.2 / weight.numel()) ** 0.5 + 1e-3, name
        assert abs(weight.mean()) < 4 * deviation / weight.numel() ** 0.5, name
    for name in ("embeddings.token", "discriminator_head.dense.weight", "generator_head.dense.weight"):
        assert model.get_parameter(name).abs().max() <= 0.04 + 1e-6, name
    modern = Electra(Config.preset("small", "modern").override({"model.vocab_size": 100}))
    assert modern.discriminator_head.classifier.weight.abs().max() <= 256**-0.5


def test_discriminator_logits_of_bf16_states_are_fp32_products() -> None:
    """Logits and gradients equal the exact product of the same states up to fp32 rounding; no two logits are equal."""
    random = torch.Generator().manual_seed(0)
    x_TD = torch.randn(2000, 256, generator=random).bfloat16().requires_grad_()
    weight = (torch.randn(1, 256, generator=random) * 256**-0.5).requires_grad_()
    upstream_T = torch.randn(2000, generator=random)
    logits_T = ops.token_logits(x_TD, weight, torch.zeros(1))
    dx_TD, dweight = torch.autograd.grad(logits_T, (x_TD, weight), upstream_T)
    exact_TD = x_TD.detach().double()
    exact_D = weight.detach().double()[0]
    upstream_T = upstream_T.double()
    rounding = torch.finfo(torch.float32).eps
    assert ((logits_T - exact_TD @ exact_D).abs() <= 256 * rounding * (exact_TD.abs() @ exact_D.abs())).all()
    bound_D = 2000 * rounding * (upstream_T.abs() @ exact_TD.abs())
    assert ((dweight[0] - upstream_T @ exact_TD).abs() <= bound_D).all()
    torch.testing.assert_close(dx_TD, (upstream_T[:, None] * exact_D).bfloat16())
    for recipe in ("google", "modern"):
        head = Electra(Config.preset("small", recipe).override({"model.vocab_size": 100})).discriminator_head
        found_T = head(x_TD, torch.arange(2000))
        assert found_T.dtype == torch.float32 and found_T.unique().numel() > 1990


def test_model_without_vocabulary_is_rejected() -> None:
    with pytest.raises(ValueError, match="model.vocab_size = 0: must be above 0"):
        Electra(Config.preset("tiny"))
