"""The networks over one flat buffer of tokens: encoders, and `Electra` with the networks of an objective.

Three architectures share this code: `bert`, the paper's post-norm encoder (exported as `transformers`' Electra),
`modernbert`, pre-norm with rotary positions, GeGLU and no biases (exported as ModernBERT), and `deberta`, post-norm
with disentangled attention (exported as DeBERTaV2).

Shapes: T packed tokens, M masked slots, V vocabulary, E embedding, D hidden, S rows of the table of relative positions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from electra_fast.config.config import Config, ModelConfig
from electra_fast.errors import InputError
from electra_fast.model import matmul
from electra_fast.model.attention import AttentionMask, Queries
from electra_fast.model.disentangled import RelativePositions
from electra_fast.model.heads import DiscriminatorHead, LogitHead, MaskedLMHead, make_head
from electra_fast.model.layers import BertLayer, Convolution, DebertaLayer, Embeddings, Linear, ModernLayer, Norm
from electra_fast.model.networks import networks_of
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout
from electra_fast.ops.sampling import alias_table

# Two networks may share modules, so the dropout call indices of the second start after the generator's.
FIRST_CALL = {"generator": 0, "discriminator": 1 << 15, "encoder": 1 << 15}
# Offset of the call index for the dropout of the convolution.
_CONVOLUTION_CALL = 1 << 12


class Encoder(nn.Module):
    """Projection E → D if the widths differ, then the layers; [T, E] → [T, D].

    With `queries`, the result has only the hidden states of those tokens; → [n, D]. `absolute_TD`, embeddings of
    absolute positions (`deberta`), adds the enhanced mask decoder: the last layer runs twice on its input, first with
    the sum of its input and the absolute positions as queries, then with its first output as queries.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.architecture = config.architecture
        hidden = config.hidden_size
        is_bert = config.architecture == "bert"
        is_modern = config.architecture == "modernbert"
        differs = config.embedding_size != hidden
        self.head_dim = hidden // config.num_heads
        self.max_positions = config.max_positions
        self.rope_theta = config.rope_theta
        self.local_rope_theta = config.local_rope_theta
        self.is_local = [config.is_local(i) for i in range(config.num_layers)]
        self.projection = Linear(config.embedding_size, hidden, bias=is_bert) if differs else None
        self.input_norm = None if is_bert else Norm(hidden, config)
        post_norm = BertLayer if is_bert else DebertaLayer
        self.layers = nn.ModuleList(
            ModernLayer(config, is_first=i == 0) if is_modern else post_norm(config) for i in range(config.num_layers)
        )
        self.output_norm = Norm(hidden, config) if is_modern else None
        if config.architecture == "deberta":
            self.relative = nn.Parameter(torch.empty(2 * config.position_buckets, hidden))
            self.relative_norm = Norm(hidden, config)
        self.convolution = Convolution(config) if config.conv_kernel_size else None

    def forward(
        self,
        x_TE: Tensor,
        position_ids_T: Tensor,
        mask: AttentionMask,
        dropout: Dropout,
        queries: Queries | None = None,
        absolute_TD: Tensor | None = None,
        slots: tuple[Tensor, int] | None = None,
    ) -> Tensor:
        x_TD = x_TE if self.projection is None else self.projection(x_TE)
        if self.input_norm is not None:
            x_TD = self.input_norm(x_TD)
        if self.architecture == "deberta":
            return self._disentangled(x_TD, position_ids_T, mask, dropout, queries, absolute_TD)
        normed_TD = x_TD
        norms = [] if self.output_norm is None else self.norms
        rotary = local_rotary = None
        precision = torch.promote_types(x_TD.dtype, torch.float32)  # dtype of the angles
        if self.architecture == "modernbert":
            rotary = ops.rotary_angles(position_ids_T, self.head_dim, self.rope_theta, precision)
        if any(self.is_local):
            assert mask.local is not None, "the mask was made without model.local_attention"
            local_rotary = ops.rotary_angles(position_ids_T, self.head_dim, self.local_rope_theta, precision)
        for i, layer in enumerate(self.layers):
            context = (mask.local, local_rotary) if self.is_local[i] else (mask, rotary)
            only = (queries, slots) if i == len(self.layers) - 1 else (None, None)
            end = (*context, dropout.call(1 + 2 * i), *only)  # call 0 is for the embeddings
            if norms:
                x_TD, normed_TD = layer(x_TD, normed_TD, norms[i], *end)
            else:
                x_TD = layer(x_TD, *end)
        return normed_TD if norms else x_TD

    @property
    def norms(self) -> list[nn.Module]:
        """The norm after each layer of `modernbert`."""
        between = [layer.get_submodule("attention_norm") for layer in self.layers[1:]]
        return [*between, self.get_submodule("output_norm")]

    def _disentangled(
        self,
        x_TD: Tensor,
        position_ids_T: Tensor,
        mask: AttentionMask,
        dropout: Dropout,
        queries: Queries | None,
        absolute_TD: Tensor | None,
    ) -> Tensor:
        """Applies the layers of `deberta` to the normed embeddings."""
        embedded_TD = x_TD = ops.dropout(x_TD, dropout)
        table_SD = self.relative_norm(self.relative.to(x_TD.dtype))
        relative = RelativePositions.of(table_SD, self.max_positions, mask.length, position_ids_T)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers[:last] if absolute_TD is not None else self.layers):
            convolution = self.convolution if i == 0 else None
            only = queries if i == last and convolution is None else None
            x_TD = layer(x_TD, mask, relative, dropout.call(1 + 2 * i), only)
            if convolution is not None:
                x_TD = convolution(embedded_TD, x_TD, position_ids_T, dropout.call(_CONVOLUTION_CALL))
        if absolute_TD is not None:
            states_TD = x_TD + absolute_TD.to(x_TD.dtype)
            for i in (last, last + 1):
                call = dropout.call(1 + 2 * i)
                states_TD = self.layers[last](x_TD, mask, relative, call, query_states_TD=states_TD)
            return states_TD
        if queries is not None and len(x_TD) != len(queries.index_n):  # a single layer, with a convolution
            return ops.gather_rows(x_TD, queries.index_n)
        return x_TD


class Proposal(nn.Module):
    """Proposes replacements independently of the text; has no parameters.

    `uniform` samples from all entries of the vocabulary, including special ones, as in the published code. `unigram`
    samples in proportion to the counts of the training corpus, which `set_counts` sets and checkpoints store.
    """

    table_V2: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        is_uniform = config.generator.kind == "uniform"
        vocab_size = config.model.vocab_size
        # On the CPU, even in a model on the meta device, since the table is computed from values.
        uniform_V = torch.ones(vocab_size, device="cpu")
        table = alias_table(uniform_V) if is_uniform else torch.zeros(vocab_size, 2, dtype=torch.int64)
        self.register_buffer("table_V2", table, persistent=not is_uniform)

    @property
    def has_counts(self) -> bool:
        """True once a distribution is set."""
        return bool(self.table_V2.any())

    def set_counts(self, counts_V: Tensor) -> None:
        """Sets the distribution from counts, int or float, at most [V]; entries without a count are never sampled."""
        counts_V = torch.nn.functional.pad(counts_V, (0, len(self.table_V2) - len(counts_V)))
        self.table_V2.copy_(alias_table(counts_V))

    def sample(self, slot_M: Tensor, seed_and_step: Tensor) -> Tensor:
        """Returns one sample per slot, with the same random keys as the generator's; int64 [M] → int64 [M]."""
        return ops.sample_alias(self.table_V2, slot_M, seed_and_step)


class Electra(nn.Module):
    """The networks of an objective by role, with their heads; `model.tying` determines the shared parameters.

    The generator's parts are `generator_embeddings`, `generator` and `generator_head`. The other network has
    `embeddings`, and `discriminator` and `discriminator_head`, or `encoder` and `encoder_head` if it predicts tokens.
    `networks` lists the networks that exist. Some objectives have more heads. `proposal` replaces the generator if
    `generator.kind` is not `model`.

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
    embeddings: Embeddings

    def __init__(self, config: Config, roles: Collection[str] | None = None) -> None:
        super().__init__()
        if config.model.vocab_size < 1:
            raise InputError("model.vocab_size = 0: must be above 0; set it, or take it from a corpus")
        self.config = config
        self.num_entries = config.model.vocab_size
        networks = networks_of(config)
        self.networks = {role: network for role, network in networks.items() if roles is None or role in roles}
        tying = config.model.tying if len(self.networks) > 1 else "none"
        for role, network in self.networks.items():
            if role == "generator":
                self.generator_embeddings = Embeddings(network.shape)
            else:
                base = self.generator_embeddings if tying == "disentangled" else None
                is_shared = tying in ("embeddings", "all")
                self.embeddings = self.generator_embeddings if is_shared else Embeddings(network.shape, base=base)
            shares_encoder = tying == "all" and role != "generator"
            self.add_module(role, self.get_submodule("generator") if shares_encoder else Encoder(network.shape))
            for name, head in network.heads.items():
                self.add_module(name, make_head(role, head.kind, network.shape))
        self.proposal = None if config.generator.kind == "model" else Proposal(config)
        initialize(self, config.model.architecture, config.train.seed)
        if tying == "disentangled" and not self.embeddings.token.is_meta:
            nn.init.zeros_(self.embeddings.token)

    def limit_vocabulary(self, num_entries: int) -> None:
        """Prevents predictions of the tables' padding rows, after the tokenizer's last entry."""
        self.num_entries = num_entries
        for head in self.children():
            if isinstance(head, MaskedLMHead):
                head.num_entries = num_entries
        is_uniform = self.config.generator.kind == "uniform"
        if self.proposal is not None and is_uniform and num_entries < self.config.model.vocab_size:
            self.proposal.set_counts(torch.ones(num_entries))

    def folded(self, modules: Mapping[str, str] | None = None) -> dict[str, Tensor]:
        """Returns the parameters, without copies except for `disentangled` token tables, which are summed.

        `modules` selects modules and renames them: {new name: module}.
        """
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters(remove_duplicate=False)}
        tables = {name: module.table for name, module in self.named_children() if isinstance(module, Embeddings)}
        tensors |= {f"{name}.token": table.detach() for name, table in tables.items()}
        if modules is None:
            return tensors
        return {
            new + name.removeprefix(module): tensor
            for new, module in modules.items()
            for name, tensor in tensors.items()
            if name.startswith(f"{module}.")
        }

    def _require(self, role: str) -> None:
        if role not in self.networks:
            present = " and ".join(self.networks)
            if role in networks_of(self.config):
                raise InputError(f"this model has no {role}, because only its {present} was loaded")
            name = self.config.objective.name
            raise InputError(f'this model has no {role}, only the {present} (objective.name = "{name}")')

    def hidden(
        self,
        role: str,
        ids_T: Tensor,
        positions_T: Tensor,
        types_T: Tensor,
        mask: AttentionMask,
        dtype: torch.dtype,
        dropout_key: Tensor | None = None,
        *,
        slots: tuple[Tensor, int] | None = None,
    ) -> Tensor:
        """Returns the last hidden states of a network; [T] → [T, D]. Raises ValueError if there is no such network.

        Applies dropout if the network's encoder is in training mode. With `slots`, the arguments of `ops.slot_states`
        after the first, returns only the states at masked slots; → [M, D].
        """
        self._require(role)
        if not torch.compiler.is_compiling() and os.getpid() != matmul.first_process:
            matmul.allow_forks()
        encoder = self.get_submodule(role)
        embeddings = self.generator_embeddings if role == "generator" else self.embeddings
        dropout = Dropout(self.config.model.dropout if encoder.training else 0.0, dropout_key, FIRST_CALL[role])
        x_TE = embeddings(ids_T, positions_T, types_T, dtype, dropout)
        absolute_TD = self.generator_head.absolute(positions_T) if role == "generator" else None
        # With dropout, all tokens are computed, because its masks are keyed by token.
        has_dropout = encoder.training and (self.config.model.dropout or self.config.model.attention_dropout)
        early = None if has_dropout or encoder.architecture == "deberta" else slots
        hidden_TD: Tensor = encoder(x_TE, positions_T, mask, dropout, absolute_TD=absolute_TD, slots=early)
        return hidden_TD if slots is None or early is not None else ops.slot_states(hidden_TD, *slots)

    def discriminator_logits(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Returns replaced-token logits as in `transformers`; integer [B, L] → fp32 [B, L]."""
        inputs = self._flat_inputs(input_ids, attention_mask, token_type_ids)
        hidden_TD = self.hidden("discriminator", *inputs)
        logits_T: Tensor = self.discriminator_head(hidden_TD, inputs[1])
        return logits_T.view(input_ids.shape)

    def generator_logits(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Returns vocabulary logits as in `transformers`; integer [B, L] → fp32 [B, L, V]."""
        hidden_TD = self.hidden("generator", *self._flat_inputs(input_ids, attention_mask, token_type_ids))
        logits_TV: Tensor = self.generator_head(hidden_TD, self.generator_embeddings.table)
        return logits_TV.view(*input_ids.shape, -1)

    def encoder_logits(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Returns `generator_logits` for the encoder of `replace-mlm` and `all-tokens-mlm`, without a copy head."""
        hidden_TD = self.hidden("encoder", *self._flat_inputs(input_ids, attention_mask, token_type_ids))
        logits_TV: Tensor = self.encoder_head(hidden_TD, self.embeddings.table)
        return logits_TV.view(*input_ids.shape, -1)

    def _flat_inputs(
        self, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, AttentionMask, torch.dtype]:
        num_rows, length = input_ids.shape
        if length > self.config.model.max_positions and self.config.model.architecture != "modernbert":
            raise InputError(
                f"sequence length = {length}: must be at most model.max_positions = {self.config.model.max_positions}"
            )
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        positions_BL = torch.arange(length, device=input_ids.device).expand(num_rows, -1)
        if attention_mask is not None and self.config.model.architecture == "deberta":
            positions_BL = positions_BL * attention_mask  # a convolution must not read padding
        if attention_mask is None and self.config.model.local_attention:
            attention_mask = torch.ones_like(input_ids)
        mask = AttentionMask.padded(num_rows, length, attention_mask, self.config.model.local_attention)
        return input_ids.reshape(-1), positions_BL.reshape(-1), types.reshape(-1), mask, torch.float32


def initialize(model: nn.Module, architecture: str, seed: int) -> None:
    """Initializes every parameter from a seed: biases 0, norms 1, matrices as follows.

    `bert`, as in the published code: a normal with standard deviation 0.02, truncated at two standard deviations, but
    Glorot uniform, TensorFlow's default, if that code sets no initializer (the projection E → D and the discriminator's
    classifier). `deberta`: this normal for all matrices. `modernbert`: this normal for tables; matrices uniform with
    variance 1 / (3 inputs), or 0 if they write to the residual stream, so that every layer starts as the identity.
    """
    random = torch.Generator().manual_seed(seed)
    modern = architecture == "modernbert"
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # no values to set, and torch would import its compiler
            continue
        with torch.no_grad():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)  # nn.Linear would sample its biases
            elif modern and name.endswith(("attention_out.weight", "feed_forward_out.weight")):
                parameter.zero_()
            elif modern and ".token" not in name:
                bound = parameter.shape[1] ** -0.5
                parameter.uniform_(-bound, bound, generator=random)
            elif architecture == "bert" and name.endswith(("projection.weight", "classifier.weight")):
                glorot_uniform_(parameter, random)
            else:
                _truncated_normal(parameter, 0.02, random)


def glorot_uniform_(x: Tensor, random: torch.Generator) -> None:
    """Fills a matrix uniformly with variance 2 / (inputs + outputs)."""
    bound = math.sqrt(6 / sum(x.shape))
    x.uniform_(-bound, bound, generator=random)


def _truncated_normal(x: Tensor, deviation: float, random: torch.Generator) -> None:
    """Fills x from a normal truncated at two standard deviations, by inversion.

    `nn.init.trunc_normal_` gives other values in torch 2.15 than in 2.11, and is twelve times slower.
    """
    mass = math.erf(2 / math.sqrt(2))
    x.uniform_(-mass, mass, generator=random).erfinv_().mul_(deviation * math.sqrt(2))
    x.clamp_(-2 * deviation, 2 * deviation)  # a value at the edge may be rounded beyond it
