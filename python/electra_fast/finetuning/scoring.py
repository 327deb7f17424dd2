"""Scores of texts with a pre-trained model, without fine-tuning. `minimal_pairs` ranks pairs of sentences by them.

A text's score is a sum over its tokens without [CLS] and [SEP] (bench/LOG.md compares other sums):

* `discriminator`: log(1 - D), where D is the probability that the token was replaced.
* `both`: log(1 - D) + 0.02 log p(token), where p is the `generator` probability below. The sum in Electric, log p -
  logit(D) (arXiv 2012.08561), ranks fewer pairs correctly than the discriminator alone.
* `corrective`: log p(token), from a network that reads the unmasked text and predicts the original tokens: the
  discriminator with its corrective head, or the encoder of `replace-mlm` and `all-tokens-mlm`.
* `generator`: log p(token) with only this token masked, the pseudo-log-likelihood of a masked language model (Salazar
  et al., arXiv 1910.14659).

Shapes: N texts, n tokens of all texts, T tokens of a batch, D hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from electra_fast.config.config import AUTO
from electra_fast.errors import InputError
from electra_fast.finetuning.embedding import checked_texts
from electra_fast.finetuning.encoding import EncodedExamples
from electra_fast.finetuning.inference import choose_inference
from electra_fast.finetuning.model import EncoderWithHead, Inputs
from electra_fast.huggingface.config import role_shape
from electra_fast.huggingface.folder import read_model
from electra_fast.huggingface.source import checkpoint_of, open_tokenizer
from electra_fast.model.compute import ComputeConfig, choose_device, use_compute
from electra_fast.model.model import Electra
from electra_fast.model.networks import PARTS
from electra_fast.ops.vocabulary_nll import vocabulary_nll
from electra_fast.progress import EncodingProgress

Scores = NDArray[np.float64]

KINDS = ("discriminator", "both", "corrective", "generator")
"""Kinds of scores. The default is the first kind that a model has."""
# The summands of `both`, and the weight of the second, chosen on half of BLiMP's paradigms.
_BOTH = ("discriminator", "generator")
_GENERATOR_WEIGHT = 0.02
# Maximum number of tokens of masked copies in memory.
_COPIED_TOKENS = 1 << 21


class PretrainedNetwork(EncoderWithHead):
    """A network of a pre-trained model, with the head for replaced tokens or without a head."""

    def __init__(self, model: Electra, role: str, head: nn.Module | None = None) -> None:
        with torch.device("meta"):
            super().__init__(role_shape(model.config, role), head or nn.Identity())
        for name, part in zip(("embeddings", "encoder"), PARTS[role][:2], strict=True):
            self.add_module(name, model.get_submodule(part))
        self._decoders = (model.generator_head,) if role == "generator" else ()  # no submodules

    def absolute(self, position_ids_T: Tensor) -> Tensor | None:
        """Returns the generator's embeddings of absolute positions, or None."""
        return self._decoders[0].absolute(position_ids_T) if self._decoders else None

    def predictions(self, inputs: Inputs, compute: ComputeConfig) -> tuple[Tensor, ...]:
        """Returns the head's outputs, or hidden states if there is no head; [T, ...]."""
        hidden_TD = self.hidden_states(inputs, compute)
        is_bare = isinstance(self.head, nn.Identity)
        return (hidden_TD if is_bare else self.head(hidden_TD, inputs.columns_5RL[2].flatten()),)


class TextScorer:
    """Scores texts with the networks of a run, a checkpoint or Hugging Face folders.

    Raises the errors of `read_model`.
    """

    def __init__(self, source: str | Path, device: str = AUTO, precision: str = AUTO) -> None:
        self.source = Path(source)
        torch_device = choose_device(device)
        self._model = model = read_model(source).to(torch_device)
        _, self._tokenizer = open_tokenizer(self.source, model.config.model.vocab_size)
        precision = "fp32" if precision == AUTO else precision
        networks = {role: PretrainedNetwork(model, role) for role in model.networks}
        self._networks = {role: choose_inference(net, torch_device, precision)[0] for role, net in networks.items()}
        # Network and head by kind. Hugging Face folders do not have the corrective head.
        self._heads = {
            "discriminator": ("discriminator", "discriminator_head"),
            "corrective": ("encoder", "encoder_head"),
            "generator": ("generator", "generator_head"),
        }
        if checkpoint_of(self.source) and hasattr(model, "corrective_head"):
            self._heads["corrective"] = ("discriminator", "corrective_head")
        available = {kind for kind, (role, _) in self._heads.items() if role in model.networks}
        if available.issuperset(_BOTH):
            available.add("both")
        self.kinds = tuple(kind for kind in KINDS if kind in available)
        """The kinds of scores that the model supports."""

    def score(
        self, texts: Iterable[str], kinds: Collection[str], place: Callable[[int], str], *, progress: bool = True
    ) -> dict[str, Scores]:
        """Returns scores by kind, float64 [N] each; see `PretrainedModel.score`. Texts with equal tokens score equally.

        `place` maps the index of a text to its name in messages.
        """
        for kind in kinds:
            if kind not in self.kinds:
                raise InputError(f"{self.source}: kind = {kind!r}: must be one of {', '.join(self.kinds)}")
        pieces = self._tokenizer.encode_batch(checked_texts(texts, "score"))
        longest = self._model.config.model.max_positions
        special = self._tokenizer.special_tokens
        for number, ids in enumerate(pieces):
            if not 0 < len(ids) <= longest - 2:
                limits = f"must have 1 to {longest - 2:,} tokens for this model"
                raise InputError(f"{place(number)}: {limits}, got {len(ids):,}")
        places: dict[bytes, int] = {}
        text_indices = [places.setdefault(ids.astype(np.int32).tobytes(), len(places)) for ids in pieces]
        if not places:
            return dict.fromkeys(kinds, np.zeros(0))
        distinct = (np.frombuffer(key, np.int32) for key in places)
        encoded = _concatenate([np.array([special["cls"], *ids, special["sep"]], np.int32) for ids in distinct])
        is_text = np.ones(len(encoded.ids), np.bool_)
        is_text[encoded.offsets[:-1]] = is_text[encoded.offsets[1:] - 1] = False
        starts = encoded.offsets[:-1] - 2 * np.arange(len(encoded))
        parts = {part: None for kind in kinds for part in (_BOTH if kind == "both" else (kind,))}
        by_token = self._by_token(encoded, parts, progress)
        scores = {part: np.add.reduceat(values[is_text], starts)[text_indices] for part, values in by_token.items()}
        if "both" in kinds:
            scores["both"] = scores["discriminator"] + _GENERATOR_WEIGHT * scores["generator"]
        return {kind: scores[kind] for kind in kinds}

    @torch.no_grad()
    def _by_token(self, encoded: EncodedExamples, kinds: Collection[str], progress: bool) -> dict[str, Scores]:
        """Returns each token's summand in the score, float64 [tokens of `encoded.ids`], by kind."""
        by_role: dict[str, list[str]] = {}  # kinds that need one pass over the unmasked texts
        for kind in kinds:
            if kind != "generator":
                by_role.setdefault(self._heads[kind][0], []).append(kind)
        log_probabilities = {kind: np.zeros(len(encoded.ids)) for kind in kinds}
        copies = encoded.lengths - 2 if "generator" in kinds else np.zeros_like(encoded.lengths)
        num_tokens = int((encoded.lengths * (copies + len(by_role))).sum())
        with EncodingProgress("score", num_tokens, shown=progress) as shown:
            for role, role_kinds in by_role.items():
                for _, part, (hidden_TD,) in self._networks[role].batches(encoded):
                    is_token = part.sources >= 0
                    positions = part.columns[2].ravel()
                    for kind in role_kinds:
                        if kind == "discriminator":
                            addends = self._log_original(hidden_TD, positions)[is_token.ravel()]
                        else:
                            addends = self._log_p(kind, hidden_TD[is_token.ravel()], part.columns[0][is_token])
                        log_probabilities[kind][part.sources[is_token]] = addends
                    shown.advance(part.num_tokens)
            for texts in _text_ranges(encoded.lengths * copies):
                mask = self._tokenizer.special_tokens["mask"]
                tokens, positions, masked_copies = _mask_each_token(encoded, texts, mask)
                for copy, part, (hidden_TD,) in self._networks["generator"].batches(masked_copies):
                    chosen = copy[part.examples]
                    hidden = hidden_TD[torch.from_numpy(part.first_tokens + positions[chosen])]
                    masked = tokens[chosen]
                    log_probabilities["generator"][masked] = self._log_p("generator", hidden, encoded.ids[masked])
                    shown.advance(part.num_tokens)
        return log_probabilities

    def _log_original(self, hidden_TD: Tensor, positions: NDArray[np.int32]) -> Scores:
        """Returns the log probability that each token is original, from hidden states; float64 [T]."""
        positions_T = torch.from_numpy(positions).to(hidden_TD.device)
        with use_compute(self._networks["discriminator"].compute):
            logits_T = self._model.discriminator_head(hidden_TD, positions_T)
            return F.logsigmoid(-logits_T.double()).cpu().numpy()

    def _log_p(self, kind: str, hidden_MD: Tensor, ids: NDArray[np.int32]) -> Scores:
        """Returns the log probability of tokens, from hidden states; float64 [M]."""
        role, name = self._heads[kind]
        head: Any = self._model.get_submodule(name)
        embeddings: Any = self._model.get_submodule(PARTS[role][0])
        ids_M = torch.from_numpy(ids).long().to(hidden_MD.device)
        with use_compute(self._networks[role].compute):
            nll_M, _ = vocabulary_nll(head.transform(hidden_MD), embeddings.table, head.output_bias, ids_M)
            return -nll_M.double().cpu().numpy()


def _concatenate(rows: list[NDArray[np.int32]]) -> EncodedExamples:
    ids = np.concatenate(rows)
    lengths = [0, *map(len, rows)]
    return EncodedExamples(ids, np.zeros_like(ids), np.cumsum(lengths, dtype=np.int64), 0, ())


def _text_ranges(sizes: NDArray[np.int64]) -> Iterator[range]:
    """Yields ranges of texts whose masked copies have about `_COPIED_TOKENS` tokens; nothing if there are no copies."""
    ends = np.cumsum(sizes)
    starts = np.flatnonzero(np.diff(ends // _COPIED_TOKENS, prepend=-1)).tolist()
    yield from (range(*bounds) for bounds in itertools.pairwise([*starts, len(sizes)]) if ends[-1])


def _mask_each_token(
    encoded: EncodedExamples, texts: range, mask: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], EncodedExamples]:
    """Copies texts with one token masked each; returns that token's index in all tokens and in its text, and copies."""
    copies = list[NDArray[np.int32]]()
    positions = []
    tokens = []
    for text in texts:
        start = encoded.offsets[text]
        end = encoded.offsets[text + 1]
        inner = np.arange(1, end - start - 1)
        rows = np.tile(encoded.ids[start:end], (len(inner), 1))
        rows[np.arange(len(inner)), inner] = mask
        copies += [*rows]
        positions.append(inner)
        tokens.append(start + inner)
    return np.concatenate(tokens), np.concatenate(positions), _concatenate(copies)
