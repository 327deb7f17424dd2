"""The networks: embeddings, encoders and what an objective makes of them, over one flat buffer of tokens.

Two architectures share one shape of code: `bert`, the paper's post-norm encoder (exports to
`transformers`' Electra), and `modernbert`, pre-norm with rotary positions, GeGLU and no biases (exports
to ModernBERT). The objective determines the networks of a model.

Shapes: T packed tokens, M masked slots, V vocabulary, E embedding, D hidden, N heads, H head dimension.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor, nn

from electra_fast.config.config import Config, ModelConfig
from electra_fast.errors import InputError
from electra_fast.model import matmul
from electra_fast.model.attention import AttentionMask, Queries, attention, query_attention, self_attention
from electra_fast.model.networks import networks_of
from electra_fast.ops import operations as ops
from electra_fast.ops.fused import SublayerWeights
from electra_fast.ops.operations import Dropout, linear
from electra_fast.ops.sampling import alias_table

# Two networks may share modules, so the dropout call indices of the second start past the generator's.
FIRST_CALL = {"generator": 0, "discriminator": 1 << 15, "encoder": 1 << 15}
# Added for the dropout of attention weights.
ATTENTION_CALL = 1 << 14


class Norm(nn.Module):
    """LayerNorm; without bias in the `modernbert` architecture."""

    def __init__(self, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.architecture == "bert" else None
        self.eps = config.eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def after_residual(self, linear: Linear, x_TF: Tensor, residual_TD: Tensor, dropout: Dropout) -> Tensor:
        """LayerNorm(residual + dropout(linear(x)))."""
        weights = (linear.weight, linear.bias, residual_TD, self.weight, self.bias)
        return ops.residual_norm(x_TF, *weights, self.eps, dropout)


class Linear(nn.Linear):
    """A linear layer whose fp32 weights are cast to the activations' dtype where they are used."""

    def reset_parameters(self) -> None:
        """Leaves the weights to `initialize`, and the global random state alone."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embeddings(nn.Module):
    """Token (and, in `bert`, position and type) embeddings, [T] → [T, E].

    With `has_sparse_gradient`, the token table's gradient may be a sparse tensor, on a CPU and for few tokens: a step
    of fine-tuning reads a few hundred rows of a table of tens of megabytes, and nothing else has a gradient there.
    """

    def __init__(self, config: ModelConfig, *, has_sparse_gradient: bool = False) -> None:
        super().__init__()
        self.has_sparse_gradient = has_sparse_gradient
        width = config.embedding_size
        self.architecture = config.architecture
        self.token = nn.Parameter(torch.empty(config.vocab_size, width))
        if self.architecture == "bert":
            self.position = nn.Parameter(torch.empty(config.max_positions, width))
            self.token_type = nn.Parameter(torch.empty(2, width))
            self.norm = Norm(width, config)

    def forward(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        token_type_ids_T: Tensor,
        dtype: torch.dtype,
        dropout: Dropout,
    ) -> Tensor:
        sparse = self.has_sparse_gradient and 4 * len(input_ids_T) < len(self.token)
        if self.architecture == "modernbert":
            return ops.gather_rows(self.token, input_ids_T, sparse=sparse).to(dtype)
        ids, tables = (input_ids_T, position_ids_T, token_type_ids_T), (self.token, self.position, self.token_type)
        norm = self.norm
        assert norm.bias is not None
        return ops.embedding_norm(ids, tables, norm.weight, norm.bias, norm.eps, dtype, dropout, sparse=sparse)


class BertLayer(nn.Module):
    """Post-norm layer: norm(x + attention(x)), norm(x + feed-forward(x)); [T, D] → [T, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.num_heads = config.num_heads
        self.attention_dropout = config.attention_dropout
        self.qkv = Linear(hidden, 3 * hidden)
        self.attention_out = Linear(hidden, hidden)
        self.attention_norm = Norm(hidden, config)
        self.feed_forward_in = Linear(hidden, config.intermediate_size)
        self.feed_forward_out = Linear(config.intermediate_size, hidden)
        self.feed_forward_norm = Norm(hidden, config)

    def forward(
        self,
        x_TD: Tensor,
        mask: AttentionMask,
        rotary: tuple[Tensor, Tensor] | None,
        dropout: Dropout,
        queries: Queries | None = None,
    ) -> Tensor:
        attention_dropout, norm = _attention_dropout(self, dropout), self.attention_norm
        if queries is None:
            weights = _sublayer_weights(self.qkv, self.attention_out, norm)
            x_TD = attention(x_TD, weights, norm.eps, mask, self.num_heads, attention_dropout, dropout)
        else:
            q, k, v = _queries_keys_values(self.qkv, x_TD, queries.index_n, self.num_heads)
            mixed_TD = query_attention(q, k, v, queries, attention_dropout.probability)
            x_TD = ops.gather_rows(x_TD, queries.index_n)
            x_TD = norm.after_residual(self.attention_out, mixed_TD, x_TD, dropout)
        weights = _sublayer_weights(self.feed_forward_in, self.feed_forward_out, self.feed_forward_norm)
        return ops.feed_forward(x_TD, weights, self.feed_forward_norm.eps, dropout.call(1))


def _attention_dropout(layer: BertLayer | ModernLayer, dropout: Dropout) -> Dropout:
    """The dropout of a layer's attention weights, given the layer's first dropout."""
    probability = layer.attention_dropout if layer.training else 0.0
    return replace(dropout.call(ATTENTION_CALL), probability=probability)


def _sublayer_weights(into: Linear, out: Linear, norm: Norm) -> SublayerWeights:
    assert norm.bias is not None
    return SublayerWeights(into.weight, into.bias, out.weight, out.bias, norm.weight, norm.bias)


class ModernLayer(nn.Module):
    """Pre-norm layer with rotary positions and GeGLU, no biases; [T, D] → [T, D].

    As in ModernBERT the first layer has no attention norm: the embeddings are normed already.
    """

    def __init__(self, config: ModelConfig, is_first: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.num_heads = config.num_heads
        self.attention_dropout = config.attention_dropout
        self.attention_norm = None if is_first else Norm(hidden, config)
        self.qkv = Linear(hidden, 3 * hidden, bias=False)
        self.attention_out = Linear(hidden, hidden, bias=False)
        self.feed_forward_norm = Norm(hidden, config)
        self.geglu_in = Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.feed_forward_out = Linear(config.intermediate_size, hidden, bias=False)

    def forward(
        self,
        x_TD: Tensor,
        mask: AttentionMask,
        rotary: tuple[Tensor, Tensor] | None,
        dropout: Dropout,
        queries: Queries | None = None,
    ) -> Tensor:
        assert rotary is not None
        attention_dropout = _attention_dropout(self, dropout)
        normed = x_TD if self.attention_norm is None else self.attention_norm(x_TD)
        if queries is None:
            mixed_TD = self_attention(normed, self.qkv.weight, None, mask, self.num_heads, attention_dropout, rotary)
        else:
            q, k, v = _queries_keys_values(self.qkv, normed, queries.index_n, self.num_heads)
            q = ops.rotate(q, *(angles[queries.index_n] for angles in rotary))
            mixed_TD = query_attention(q, ops.rotate(k, *rotary), v, queries, attention_dropout.probability)
            x_TD = ops.gather_rows(x_TD, queries.index_n)
        x_TD = x_TD + ops.dropout(self.attention_out(mixed_TD), dropout)
        normed = self.feed_forward_norm(x_TD)
        out_TD = ops.gated_feed_forward(normed, self.geglu_in.weight, self.feed_forward_out.weight)
        return x_TD + ops.dropout(out_TD, dropout.call(1))


def _queries_keys_values(qkv: Linear, x_TD: Tensor, index_n: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of some tokens, keys and values of all; [T, D], [n] → [n, N, H], [T, N, H] twice."""
    width = x_TD.shape[1]
    bias_q, bias_kv = (None, None) if qkv.bias is None else (qkv.bias[:width], qkv.bias[width:])
    q_nD = linear(ops.gather_rows(x_TD, index_n), qkv.weight[:width], bias_q)
    k, v = linear(x_TD, qkv.weight[width:], bias_kv).view(x_TD.shape[0], 2, num_heads, -1).unbind(1)
    return q_nD.view(len(index_n), num_heads, -1), k, v


class Encoder(nn.Module):
    """Projection E → D where the widths differ, then the layers; [T, E] → [T, D].

    With `queries`, the hidden states of those tokens only; → [n, D].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        modern = config.architecture == "modernbert"
        differs = config.embedding_size != config.hidden_size
        self.head_dim = config.hidden_size // config.num_heads
        self.rope_theta, self.local_rope_theta = config.rope_theta, config.local_rope_theta
        self.is_local = [config.is_local(i) for i in range(config.num_layers)]
        self.projection = Linear(config.embedding_size, config.hidden_size, bias=not modern) if differs else None
        self.input_norm = Norm(config.hidden_size, config) if modern else None
        self.layers = nn.ModuleList(
            ModernLayer(config, is_first=i == 0) if modern else BertLayer(config) for i in range(config.num_layers)
        )
        self.output_norm = Norm(config.hidden_size, config) if modern else None

    def forward(
        self,
        x_TE: Tensor,
        position_ids_T: Tensor,
        mask: AttentionMask,
        dropout: Dropout,
        queries: Queries | None = None,
    ) -> Tensor:
        x_TD = x_TE if self.projection is None else self.projection(x_TE)
        rotary = local_rotary = None
        precision = torch.promote_types(x_TD.dtype, torch.float32)  # of the angles
        if self.input_norm is not None:
            x_TD = self.input_norm(x_TD)
            rotary = ops.rotary_angles(position_ids_T, self.head_dim, self.rope_theta, precision)
        if any(self.is_local):
            assert mask.local is not None, "the mask was made without model.local_attention"
            local_rotary = ops.rotary_angles(position_ids_T, self.head_dim, self.local_rope_theta, precision)
        for i, layer in enumerate(self.layers):
            context = (mask.local, local_rotary) if self.is_local[i] else (mask, rotary)
            only = queries if i == len(self.layers) - 1 else None
            x_TD = layer(x_TD, *context, dropout.call(1 + 2 * i), only)  # call 0 is the embeddings'
        return x_TD if self.output_norm is None else self.output_norm(x_TD)


class MaskedLMHead(nn.Module):
    """Hidden states → logits over the vocabulary through the embedding table; [M, D] → [M, V].

    `bert`: dense D → E, gelu, norm, table. `modernbert`: dense D → D, gelu, norm, projection D → E, table. Plain heads
    of both: projection D → E, table, without a bias. There is a projection only where D and E differ.
    """

    bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        is_plain, is_modern = config.heads == "plain", config.architecture == "modernbert"
        hidden, embedding, bias_V = config.hidden_size, config.embedding_size, torch.zeros(config.vocab_size)
        inner = hidden if is_plain or is_modern else embedding
        self.dense = None if is_plain else Linear(hidden, inner, bias=not is_modern)
        self.norm = None if is_plain else Norm(inner, config)
        self.projection = Linear(inner, embedding, bias=False) if inner != embedding else None
        if is_plain:  # what the operations of the other head add
            self.register_buffer("bias", bias_V, persistent=False)
        else:
            self.bias = nn.Parameter(bias_V)
        self.num_entries = config.vocab_size

    @property
    def output_bias(self) -> Tensor:
        """The bias of the logits, which keeps rows after the tokenizer's last entry from being predicted.

        It is finite in 16 bits.
        """
        num_padding = len(self.bias) - self.num_entries
        if not num_padding:
            return self.bias
        return torch.cat([self.bias[: self.num_entries], self.bias.new_full((num_padding,), -3e4)])

    def transform(self, x_MD: Tensor) -> Tensor:
        """The layers before the table; [M, D] → [M, E]."""
        if self.dense is not None and self.norm is not None:
            x_MD = self.norm(ops.bias_gelu(x_MD, self.dense.weight, self.dense.bias))
        return x_MD if self.projection is None else self.projection(x_MD)

    def forward(self, x_MD: Tensor, table_VE: Tensor) -> Tensor:
        return linear(self.transform(x_MD), table_VE, self.output_bias)


class DiscriminatorHead(nn.Module):
    """Hidden states → one logit per token, positive = "replaced"; [T, D] → fp32 [T].

    `bert`: dense, gelu, dense(1). `modernbert`: dense, gelu, norm, dense(1).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        modern = config.architecture == "modernbert"
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=not modern)
        self.norm = Norm(config.hidden_size, config) if modern else None
        self.classifier = Linear(config.hidden_size, 1)

    def forward(self, x_TD: Tensor) -> Tensor:
        dense, classifier = self.dense, self.classifier
        if self.norm is None:
            return ops.replaced_logits(x_TD, dense.weight, dense.bias, classifier.weight, classifier.bias)
        x_TD = self.norm(ops.bias_gelu(x_TD, dense.weight, dense.bias))
        return ops.token_logits(x_TD, classifier.weight, classifier.bias)


class LogitHead(nn.Module):
    """One logit per hidden state, w'h; [T, D] → fp32 [T].

    Without a bias in `bert`, whose hidden states come from a norm that has one.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.classifier = Linear(config.hidden_size, 1, bias=config.architecture == "modernbert")

    def forward(self, x_TD: Tensor) -> Tensor:
        return ops.token_logits(x_TD, self.classifier.weight, self.classifier.bias)


# By `networks.Head.kind`. Dense heads are the published code's, plain ones the formulas of the paper's draft: e(x)'h
# for the vocabulary, w'h for a token.
_DENSE: dict[str, type[nn.Module]] = {
    "masked_lm": MaskedLMHead,
    "replaced_token": DiscriminatorHead,
    "logit": LogitHead,
}
HEADS = {"dense": _DENSE, "plain": _DENSE | {"replaced_token": LogitHead}}


class Proposal(nn.Module):
    """Proposes replacements without looking at the text; has no parameters.

    `uniform`: every entry of the vocabulary, special ones included, as in the published code. `unigram`: in proportion
    to the counts of the training corpus, which `set_counts` takes and checkpoints store.
    """

    table_V2: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        is_uniform, vocab_size = config.generator.kind == "uniform", config.model.vocab_size
        # Computed from numbers, also in a model on the meta device.
        uniform_V = torch.ones(vocab_size, device="cpu")
        table = alias_table(uniform_V) if is_uniform else torch.zeros(vocab_size, 2, dtype=torch.int64)
        self.register_buffer("table_V2", table, persistent=not is_uniform)

    @property
    def has_counts(self) -> bool:
        """True once there is a distribution to sample from."""
        return bool(self.table_V2.any())

    def set_counts(self, counts_V: Tensor) -> None:
        """Makes these counts the distribution: int or float [V] or fewer; entries without a count are not drawn."""
        counts_V = torch.nn.functional.pad(counts_V, (0, len(self.table_V2) - len(counts_V)))
        self.table_V2.copy_(alias_table(counts_V))

    def sample(self, slot_M: Tensor, seed_and_step: Tensor) -> Tensor:
        """One sample per slot, keyed as the generator's are; int64 [M] → int64 [M]."""
        return ops.sample_alias(self.table_V2, slot_M, seed_and_step)


class Electra(nn.Module):
    """The networks of an objective by role, their heads, and what they share by `model.tying`.

    The generator's parts are `generator_embeddings`, `generator` and `generator_head`. The other network has
    `embeddings`, and `discriminator` and `discriminator_head`, or `encoder` and `encoder_head` where it predicts
    tokens. `networks` lists those present. Some objectives have more heads. `proposal` takes the generator's place
    where `generator.kind` is not `model`.

    Args:
        config: Sizes, objective and tying; `model.vocab_size` must be set.
        roles: The objective's networks to build; all by default.
    """

    generator_head: MaskedLMHead
    discriminator_head: DiscriminatorHead
    encoder_head: MaskedLMHead
    baseline_head: LogitHead
    corrective_head: MaskedLMHead
    sentence_head: LogitHead
    copy_head: LogitHead

    def __init__(self, config: Config, roles: Collection[str] | None = None) -> None:
        super().__init__()
        if config.model.vocab_size < 1:
            raise InputError("model.vocab_size is 0: set it, or take it from a corpus")
        self.config, self.num_entries = config, config.model.vocab_size
        networks = networks_of(config)
        self.networks = {role: network for role, network in networks.items() if roles is None or role in roles}
        tying = config.model.tying if len(self.networks) > 1 else "none"
        for role, network in self.networks.items():
            if role == "generator":
                self.generator_embeddings = Embeddings(network.shape)
            else:
                self.embeddings = self.generator_embeddings if tying != "none" else Embeddings(network.shape)
            shares_encoder = tying == "all" and role != "generator"
            self.add_module(role, self.get_submodule("generator") if shares_encoder else Encoder(network.shape))
            for name, head in network.heads.items():
                self.add_module(name, HEADS[config.model.heads][head.kind](network.shape))
        self.proposal = None if config.generator.kind == "model" else Proposal(config)
        initialize(self, config.model.architecture, config.train.seed)

    def limit_vocabulary(self, num_entries: int) -> None:
        """Keeps rows of the tables after the tokenizer's last entry, which are padding, from being predicted."""
        self.num_entries = num_entries
        for head in self.children():
            if isinstance(head, MaskedLMHead):
                head.num_entries = num_entries
        is_uniform = self.config.generator.kind == "uniform"
        if self.proposal is not None and is_uniform and num_entries < self.config.model.vocab_size:
            self.proposal.set_counts(torch.ones(num_entries))

    def _require(self, role: str) -> None:
        if role not in self.networks:
            present = " and ".join(self.networks)
            if role in networks_of(self.config):
                raise InputError(f"this model was read from the {present} alone and has no {role}")
            name = self.config.objective.name
            raise InputError(f'this model has the {present} only (objective.name = "{name}") and no {role}')

    def hidden(
        self,
        role: str,
        ids_T: Tensor,
        positions_T: Tensor,
        types_T: Tensor,
        mask: AttentionMask,
        dtype: torch.dtype,
        dropout_key: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states of a network; [T] → [T, D]. Raises ValueError if there is no such network.

        Applies dropout if the network's encoder is in training mode.
        """
        self._require(role)
        if not torch.compiler.is_compiling() and os.getpid() != matmul.first_process:
            matmul.allow_forks()
        encoder = self.get_submodule(role)
        embeddings = self.generator_embeddings if role == "generator" else self.embeddings
        dropout = Dropout(self.config.model.dropout if encoder.training else 0.0, dropout_key, FIRST_CALL[role])
        x_TE = embeddings(ids_T, positions_T, types_T, dtype, dropout)
        hidden_TD: Tensor = encoder(x_TE, positions_T, mask, dropout)
        return hidden_TD

    def discriminator_logits(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Replaced-token logits as `transformers` computes them; integer [B, L] → fp32 [B, L]."""
        hidden_TD = self.hidden("discriminator", *self._flat_inputs(input_ids, attention_mask, token_type_ids))
        logits_T: Tensor = self.discriminator_head(hidden_TD)
        return logits_T.view(input_ids.shape)

    def generator_logits(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Vocabulary logits as `transformers` computes them; integer [B, L] → fp32 [B, L, V]."""
        hidden_TD = self.hidden("generator", *self._flat_inputs(input_ids, attention_mask, token_type_ids))
        logits_TV: Tensor = self.generator_head(hidden_TD, self.generator_embeddings.token)
        return logits_TV.view(*input_ids.shape, -1)

    def encoder_logits(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """`generator_logits` of the encoder that `replace-mlm` and `all-tokens-mlm` train, without a copy head."""
        hidden_TD = self.hidden("encoder", *self._flat_inputs(input_ids, attention_mask, token_type_ids))
        logits_TV: Tensor = self.encoder_head(hidden_TD, self.embeddings.token)
        return logits_TV.view(*input_ids.shape, -1)

    def _flat_inputs(
        self, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, AttentionMask, torch.dtype]:
        num_rows, length = input_ids.shape
        if length > self.config.model.max_positions and self.config.model.architecture == "bert":
            raise InputError(f"rows of {length} tokens; this model reads {self.config.model.max_positions}")
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        positions_T = torch.arange(length, device=input_ids.device).repeat(num_rows)
        if attention_mask is None and self.config.model.local_attention:
            attention_mask = torch.ones_like(input_ids)
        mask = AttentionMask.padded(num_rows, length, attention_mask, self.config.model.local_attention)
        return input_ids.reshape(-1), positions_T, types.reshape(-1), mask, torch.float32


def initialize(model: nn.Module, architecture: str, seed: int) -> None:
    """Sets every parameter from a seed: biases 0, norms 1, matrices by the architecture's rule.

    `bert`, as the published code: normal of standard deviation 0.02 truncated at two of them; Glorot
    uniform, TensorFlow's default, where that code names no initializer: the projection E → D and the
    discriminator's classifier. `modernbert`: tables by the normal; matrices uniform of variance
    1 / (3 inputs), those that write to the residual stream 0, so that every layer starts as the identity.
    """
    random = torch.Generator().manual_seed(seed)
    modern = architecture == "modernbert"
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # has no values, and torch would import its compiler to draw none
            continue
        with torch.no_grad():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)  # nn.Linear draws its biases
            elif modern and name.endswith(("attention_out.weight", "feed_forward_out.weight")):
                parameter.zero_()
            elif modern and ".token" not in name:
                bound = parameter.shape[1] ** -0.5
                parameter.uniform_(-bound, bound, generator=random)
            elif not modern and name.endswith(("projection.weight", "classifier.weight")):
                glorot_uniform_(parameter, random)
            else:
                _truncated_normal(parameter, 0.02, random)


def glorot_uniform_(x: Tensor, random: torch.Generator) -> None:
    """Fills a matrix uniformly with variance 2 / (inputs + outputs)."""
    bound = math.sqrt(6 / sum(x.shape))
    x.uniform_(-bound, bound, generator=random)


def _truncated_normal(x: Tensor, deviation: float, random: torch.Generator) -> None:
    """Fills x from a normal truncated at two standard deviations, by inversion.

    Not `nn.init.trunc_normal_`: torch 2.15 draws otherwise than 2.11, and twelve times slower.
    """
    mass = math.erf(2 / math.sqrt(2))
    x.uniform_(-mass, mass, generator=random).erfinv_().mul_(deviation * math.sqrt(2))
    x.clamp_(-2 * deviation, 2 * deviation)  # a draw at the edge may round beyond it
