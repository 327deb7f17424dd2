"""Contenders of the scripts that time a pre-training step: ours, and Electra of `transformers` on the same batches."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import electra_fast as ef
from electra_fast.model.compute import ComputeConfig
from lib.workload import as_chosen, new_step

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Runner:
    """A contender's training step on a batch of the loader, its mean loss so far, and its stream."""

    step: Callable[[Any], None]
    loss: Callable[[], float]
    stream: torch.cuda.Stream | None = None
    facts: Callable[[], Mapping[str, Any]] = dict


Build = Callable[[ef.Config, torch.device], Runner]


def ours(
    config: ef.Config, device: torch.device, execution: str | None = None, compute: ComputeConfig | None = None
) -> Runner:
    """Our step, as in `pretrain` without an execution."""
    train_step = new_step(config, device, execution, compute)
    numbers = count()

    def step(rows: Any) -> None:
        with as_chosen(train_step):
            train_step(rows, next(numbers))

    def loss() -> float:
        return float(train_step.objective.metrics(train_step.read_totals())["loss"] or 0)

    def facts() -> Mapping[str, Any]:
        seconds = [round(capture.seconds, 2) for capture in train_step.graphs.captures]
        compute = train_step.backward.compute
        return {"attention": compute.attention, "kernels": dict(compute.kernels), "capture_seconds": seconds}

    return Runner(step, loss, train_step.graphs.stream, facts)


def peer(
    config: ef.Config,
    device: torch.device,
    *,
    masked: bool,
    dtype: torch.dtype = torch.bfloat16,
    compile_with: Mapping[str, Any] | None = None,
) -> Runner:
    """The same step with ElectraForMaskedLM and ElectraForPreTraining of `transformers`, or two DebertaV2Model.

    `dtype` is autocast's; `compile_with` has the arguments of torch.compile, None: eager.
    """
    generator, discriminator = (model.to(device) for model in peer_models(config))
    parameters = list(dict.fromkeys([*generator.parameters(), *discriminator.parameters()]))
    if config.model.architecture == "bert":
        assert sum(p.numel() for p in parameters) == sum(p.numel() for p in ef.Electra(config).parameters())
    options = config.optimizer
    optimizer = torch.optim.AdamW(
        parameters,
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.epsilon,
        weight_decay=options.weight_decay,
        fused=True,
    )
    loss_of = partial(peer_loss, generator, discriminator, config, masked=masked, dtype=dtype)
    if compile_with is not None:
        loss_of = torch.compile(loss_of, **compile_with)
    total = torch.zeros((), device=device)
    num_steps = count()

    def step(rows: Any) -> None:
        # Without `cu_seqlens`, which has a dynamic shape and is not used.
        batch = {name: x for name, x in ef.to_torch(rows, device=device).items() if name != "cu_seqlens"}
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, options.clip_norm)
        optimizer.step()
        total.add_(loss.detach())
        next(num_steps)

    return Runner(step, lambda: total.item() / next(num_steps))


def peer_models(config: ef.Config) -> tuple[nn.Module, nn.Module]:
    from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

    if config.model.architecture == "deberta":
        networks = DebertaPeer(config.generator_shape()), DebertaPeer(config.model)
        networks[1].electra.embeddings = networks[0].electra.embeddings
        return networks[0].train(), networks[1].train()

    def hf_config(shape: Any) -> ElectraConfig:
        return ElectraConfig(
            vocab_size=shape.vocab_size,
            embedding_size=shape.embedding_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=shape.max_positions,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="sdpa",
        )

    generator = ElectraForMaskedLM(hf_config(config.generator_shape()))
    discriminator = ElectraForPreTraining(hf_config(config.model))
    discriminator.electra.embeddings = generator.electra.embeddings
    return generator.train(), discriminator.train()


class DebertaPeer(nn.Module):
    """DebertaV2Model with both heads, named as in Electra's classes; without an enhanced mask decoder and GDES."""

    def __init__(self, shape: Any) -> None:
        from transformers import DebertaV2Config, DebertaV2Model

        super().__init__()
        hidden = shape.hidden_size
        config = DebertaV2Config(
            vocab_size=shape.vocab_size,
            hidden_size=hidden,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            intermediate_size=shape.intermediate_size,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=shape.position_buckets,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            position_biased_input=False,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.electra = DebertaV2Model(config)
        self.generator_predictions = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.norm = nn.LayerNorm(hidden)
        self.classifier = nn.Linear(hidden, 1)
        self.dense = nn.Linear(hidden, hidden)
        self.bias = nn.Parameter(torch.zeros(shape.vocab_size))

    def generator_lm_head(self, x: Tensor) -> Tensor:
        return F.linear(x, self.electra.embeddings.word_embeddings.weight, self.bias)

    def forward(self, ids: Tensor, **inputs: Any) -> Any:
        hidden = self.electra(ids, **inputs).last_hidden_state
        logits = self.classifier(F.gelu(self.dense(self.norm(hidden + hidden[:, :1]))))
        return SimpleNamespace(logits=logits.squeeze(-1))


def peer_loss(
    generator: Any, discriminator: Any, config: ef.Config, batch: Batch, masked: bool, dtype: torch.dtype
) -> Tensor:
    ids = batch["input_ids"].long()
    positions = batch["masked_positions"].long()
    original = batch["masked_ids"].long()
    weight = batch["masked_weights"]
    segments = batch["segment_ids"]
    inputs = {
        "attention_mask": (segments[:, None, :, None] == segments[:, None, None, :]) if masked else None,
        "token_type_ids": batch["token_type_ids"].long(),
        "position_ids": batch["position_ids"].long(),
    }
    with torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32):
        hidden = generator.electra(ids, **inputs).last_hidden_state
        chosen = hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = generator.generator_lm_head(generator.generator_predictions(chosen)).float()
        nll = F.cross_entropy(logits.flatten(0, 1), original.flatten(), reduction="none")
        generator_loss = (nll * weight.flatten()).sum() / weight.sum().clamp(min=1)
        with torch.no_grad():
            probs = logits.softmax(-1)
            sample = (probs / torch.empty_like(probs).exponential_()).argmax(-1)
            current = ids.gather(1, positions)  # unused slots write back the value they read
            corrupted = ids.scatter(1, positions, torch.where(weight > 0, sample, current))
            replaced = corrupted != ids.scatter(1, positions, torch.where(weight > 0, original, current))
            valid = (segments > 0).float()
        scores = discriminator(corrupted, **inputs).logits.float()
    token_losses = F.binary_cross_entropy_with_logits(scores, replaced.float(), reduction="none")
    discriminator_loss = (token_losses * valid).sum() / valid.sum().clamp(min=1)
    return config.objective.gen_weight * generator_loss + config.objective.disc_weight * discriminator_loss


@dataclass(frozen=True)
class Times:
    """Seconds of each step, and the tokens of all steps."""

    seconds: list[float]
    num_tokens: int


def run(runner: Runner, batches: Iterator[Any], num_steps: int, device: torch.device) -> Times:
    """Runs steps without synchronizing between them and times each; on a GPU, with CUDA events."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize()
    marks: list[Any] = []
    num_tokens = 0

    def mark() -> None:
        if is_cuda:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record(runner.stream or torch.cuda.current_stream())
        else:
            marks.append(time.perf_counter())

    mark()
    for _ in range(num_steps):
        rows = next(batches)
        runner.step(rows)
        num_tokens += int((ef.to_torch(rows)["segment_ids"] > 0).sum())
        mark()
    if is_cuda:
        torch.cuda.synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    return Times([a.elapsed_time(b) / 1e3 if is_cuda else b - a for a, b in pairs], num_tokens)
