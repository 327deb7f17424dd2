"""Changes to the recipe that the package does not have, for `recipes.py`: each replaces functions of this process.

Shapes: T packed tokens, M masked slots, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import electra_fast as ef
from electra_fast import checkpoint
from electra_fast.data.mixture import Mixture
from electra_fast.files import checkpoint_folder
from electra_fast.model import model as networks
from electra_fast.model.attention import AttentionMask
from electra_fast.model.initialization import initialize
from electra_fast.model.model import Electra
from electra_fast.objectives import electra
from electra_fast.objectives import objective as parts
from electra_fast.objectives.electra import ElectraObjective
from electra_fast.objectives.objective import MicroBatch, Output, RngKey, Stage
from electra_fast.optimizers import muon
from electra_fast.optimizers.muon import Muon
from electra_fast.optimizers.optimizer import Schedule
from electra_fast.training import step
from lib.rotary_bert import use_rotary_positions

# Share of the steps in which the rate falls, and in which the discriminator's text keeps masks.
_DECAY, _MASKED = 0.4, 1 / 3
_STREAM = 16


def _momentum_warmup() -> None:
    """Raises Muon's momentum from 0.85 to its value over the first 300 updates (Jordan et al., 2024)."""

    def nesterov(self: Muon, names: Sequence[str], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        last = self.state.config.muon_momentum
        momentum = 0.85 + (last - 0.85) * min(1.0, float(self.state.scalars[4]) / 300)
        self.state.update_exp_avg({name: gradients[name] for name in names}, momentum)
        grads, exp_avgs = [gradients[name] for name in names], [self.state.exp_avg[name] for name in names]
        return dict(zip(names, torch._foreach_lerp(grads, exp_avgs, momentum), strict=True))

    Muon._nesterov = nesterov  # type: ignore[method-assign]


def _three_iterations() -> None:
    """Orthogonalizes by three Newton-Schulz iterations instead of five."""

    def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        a, b, c = 3.4445, -4.7750, 2.0315
        tall = matrices.shape[1] > matrices.shape[2]
        x = matrices.mT if tall else matrices
        x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)
        for _ in range(3):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return (x.mT if tall else x).to(matrices.dtype)

    muon.orthogonalize = orthogonalize


def _row_norms() -> None:
    """Divides each row of an orthogonalized update by its running root mean square, at equal norm (NorMuon, 2025).

    The running means start again when a run is resumed.
    """
    finish, decay = Muon.finish, 0.95

    def normalized(self: Muon) -> None:
        means: dict[int, Tensor] = self.__dict__.setdefault("row_means", {})
        results = self._orthogonalization.result

        def result(number: int) -> Tensor:
            update_Kmn = results(number).float()
            squares = update_Kmn.square().mean(2, keepdim=True)
            means[number] = means.get(number, torch.zeros_like(squares)).lerp(squares, 1 - decay)
            rows = update_Kmn / means[number].sqrt().clamp(min=1e-8)
            norms = [each.norm(dim=(1, 2), keepdim=True) for each in (update_Kmn, rows)]
            return rows * (norms[0] / norms[1].clamp(min=1e-8))

        self._orthogonalization.result = result  # type: ignore[method-assign]
        finish(self)
        self._orthogonalization.result = results  # type: ignore[method-assign]

    Muon.finish = normalized  # type: ignore[method-assign]


def _constant_then_decay() -> None:
    """Keeps the peak learning rate until the last 40 % of the steps, where it falls to 0 on a line."""

    def scale(config: Schedule, number: int, num_steps: int) -> float:
        warmup = config.num_warmup_steps(num_steps)
        return min(1.0, (number + 1) / max(1.0, warmup), (num_steps - number) / (_DECAY * num_steps))

    step.lr_scale = scale


def _decay_to_a_tenth() -> None:
    """Lets the learning rate fall to a tenth of its peak instead of 0."""
    linear = step.lr_scale

    def scale(config: Schedule, number: int, num_steps: int) -> float:
        rising = number < config.num_warmup_steps(num_steps)
        return linear(config, number, num_steps) if rising else 0.1 + 0.9 * linear(config, number, num_steps)

    step.lr_scale = scale


def _generator_first() -> None:
    """Trains the embeddings too while the generator trains alone, and lets one schedule span both stages."""
    stages = ElectraObjective.stages

    def unfrozen(self: ElectraObjective) -> tuple[Stage, ...]:
        first, *rest = stages(self)
        return (replace(first, frozen=tuple(name for name in first.frozen if name != "embeddings")), *rest)

    def scale(self: step.TrainStep, number: int) -> float:
        return step.lr_scale(self.config.optimizer, number, self.config.train.steps)

    ElectraObjective.stages = unfrozen  # type: ignore[method-assign]
    step.TrainStep.lr_scale = scale  # type: ignore[method-assign]


def _equal_queries_and_keys() -> None:
    """Starts each layer's keys with the values of its queries, so that tokens attend to like ones nearby."""

    def equal(model: nn.Module, architecture: str, seed: int) -> None:
        initialize(model, architecture, seed)
        for name, weight in model.named_parameters():
            if name.endswith("qkv.weight"):
                width = len(weight) // 3
                with torch.no_grad():
                    weight[width : 2 * width] = weight[:width]

    networks.initialize = equal


def _two_corruptions() -> None:
    """Samples twice from each prediction of the generator, and trains the discriminator on both texts."""
    once = ElectraObjective.forward

    def forward(self: ElectraObjective, model: Electra, batch: MicroBatch) -> Output:
        if not model.training:
            return once(self, model, batch)
        weights, inputs = self.config.objective, parts.read_inputs(model, batch)
        generated = parts.generate(model, inputs, batch.rng_key)
        seed, number = batch.rng_key.seed_and_step.unbind()
        other = RngKey(torch.stack((seed + 1, number)), batch.rng_key.first_row)
        with torch.no_grad():
            again = parts.generate(model, inputs, other)
        loss, totals = batch.mean(self.gen_weight * generated.loss, "masked_weight"), {}
        for sample_M in (generated.drawn_M, again.drawn_M):
            corrupted_T, replaced_T = parts.corrupt(inputs, sample_M)
            hidden_TD = model.hidden("discriminator", corrupted_T, *inputs.context)
            logits_T = model.discriminator_head(hidden_TD)
            found, totals = parts.rtd_loss(logits_T, replaced_T, inputs.valid_T)
            loss = loss + batch.mean(weights.disc_weight / 2 * found, "tokens")
            hidden_MD, table_VE = inputs.slots.of_states(hidden_TD), model.embeddings.token
            corrected = parts.predict(model.config, model.corrective_head, table_VE, hidden_MD, inputs.slots, None)
            loss = loss + batch.mean(weights.corrective_weight / 2 * corrected.loss, "masked_weight")
        totals |= generated.totals(inputs.slots, "generator") | corrected.totals(inputs.slots, "corrective")
        return Output(loss, totals)

    ElectraObjective.forward = forward  # type: ignore[method-assign]


def _masks_at_first(share: float) -> Callable[[], None]:
    """Leaves `share` of the masks in the discriminator's text during the first third of the steps."""

    def patch() -> None:
        corrupt, counted = electra.corrupt, ElectraObjective.counted
        kept: dict[str, Tensor] = {}

        def counted_T(self: ElectraObjective, inputs: parts.NetworkInputs, rng_key: RngKey) -> Tensor:
            return counted(self, inputs, rng_key) & ~kept["T"]

        def corrupted(inputs: parts.NetworkInputs, sample_M: Tensor) -> tuple[Tensor, Tensor]:
            corrupted_T, replaced_T = corrupt(inputs, sample_M)
            key, masked_T = kept["key"], inputs.masked_ids_BL.flatten()
            columns_BL = torch.arange(inputs.masked_ids_BL.shape[1]).expand(inputs.masked_ids_BL.shape)
            drawn_T = parts.random_words(RngKey(key), columns_BL, _STREAM).flatten() < round(share * 2**32)
            is_slot_T = torch.zeros(len(masked_T) + 1, dtype=torch.bool)
            is_slot_T[inputs.slots.position_M] = True
            kept["T"] = drawn_T & is_slot_T[:-1]
            return torch.where(kept["T"], masked_T, corrupted_T), replaced_T & ~kept["T"]

        forward = ElectraObjective.forward

        def masked_at_first(self: ElectraObjective, model: Electra, batch: MicroBatch) -> Output:
            number = int(batch.rng_key.seed_and_step[1])
            is_early = model.training and number < _MASKED * self.config.train.steps
            kept["key"] = batch.rng_key.seed_and_step
            electra.corrupt = corrupted if is_early else corrupt
            ElectraObjective.counted = counted_T if is_early else counted  # type: ignore[method-assign]
            return forward(self, model, batch)

        ElectraObjective.forward = masked_at_first  # type: ignore[method-assign]

    return patch


def _narrow_at_first(*windows: int, until: float) -> Callable[[], None]:
    """Lets tokens attend to windows, one after the other, in all layers during a share of the steps."""

    def patch() -> None:
        forward, packed = ElectraObjective.forward, AttentionMask.packed
        now = {"window": 0}

        def windowed(ids: Tensor, offsets: Tensor | None, backend: str, _: int) -> AttentionMask:
            return packed(ids, offsets, backend, now["window"])

        def narrow(self: ElectraObjective, model: Electra, batch: MicroBatch) -> Output:
            part = int(int(batch.rng_key.seed_and_step[1]) / (until * self.config.train.steps) * len(windows))
            is_early = model.training and part < len(windows)
            now["window"] = windows[part] if is_early else 0
            for module in model.modules():
                if isinstance(module, networks.Encoder):
                    module.is_local = [is_early] * len(module.layers)
            return forward(self, model, batch)

        AttentionMask.packed = staticmethod(windowed)  # type: ignore[method-assign,assignment]
        ElectraObjective.forward = narrow  # type: ignore[method-assign]

    return patch


def _unigram_bias() -> None:
    """Starts the biases of the vocabulary's logits at the logarithm of the corpus's token frequencies."""
    limit = Electra.limit_vocabulary

    def with_bias(self: Electra, num_entries: int) -> None:
        limit(self, num_entries)
        if self.generator_head.bias.any():  # of a trained model
            return
        counts = torch.from_numpy(Mixture(self.config.data.corpus).token_counts()).double()
        frequencies = (counts.clamp(min=1) / counts.sum()).log().float()
        with torch.no_grad():
            for head in (self.generator_head, self.corrective_head):
                head.bias[: len(frequencies)] = frequencies

    Electra.limit_vocabulary = with_bias  # type: ignore[method-assign]


def _averaged(num_checkpoints: int) -> Callable[[], None]:
    """Replaces the weights of a finished run by the mean of those of its last checkpoints, a twentieth apart."""
    pretrain = ef.pretrain

    def averaged(config: ef.Config, data: str, out: Path) -> None:
        pretrain(config, data=data, out=out)
        folders = [checkpoint_folder.path_of(out, number) for number in checkpoint_folder.steps(out)]
        model = checkpoint.load_model(folders[-1])
        all_parameters = [checkpoint.read_parameters(model, each) for each in folders[-num_checkpoints:]]
        with torch.no_grad():
            for name, parameter in checkpoint.stored(model).items():
                parameter.copy_(torch.stack([each[name] for each in all_parameters]).mean(0))
        checkpoint.save(out, model, None, checkpoint_folder.read_state(folders[-1]), keep=1)

    def patch() -> None:
        ef.pretrain = averaged  # type: ignore[assignment]

    return patch


PATCHES: dict[str, Callable[[], None]] = {
    "rotary-positions": use_rotary_positions,
    "momentum-warmup": _momentum_warmup,
    "row-norms": _row_norms,
    "three-iterations": _three_iterations,
    "constant-then-decay": _constant_then_decay,
    "decay-to-a-tenth": _decay_to_a_tenth,
    "generator-first": _generator_first,
    "equal-queries-and-keys": _equal_queries_and_keys,
    "two-corruptions": _two_corruptions,
    "half-masked-at-first": _masks_at_first(0.5),
    "masked-at-first": _masks_at_first(1.0),
    "narrow-at-first": _narrow_at_first(16, until=1 / 3),
    "narrow-half-the-time": _narrow_at_first(16, until=1 / 2),
    "narrower-at-first": _narrow_at_first(8, until=1 / 3),
    "narrowest-at-first": _narrow_at_first(4, until=1 / 3),
    "widening": _narrow_at_first(4, 8, 16, until=1 / 2),
    "unigram-bias": _unigram_bias,
    "averaged-3": _averaged(3),
    "averaged-5": _averaged(5),
}
