"""Networks of question answering: predict the span of a context that answers a question, and whether one exists.

There are two heads: two logits per token as in `transformers`, and the published head, whose end depends on the start.

Shapes: T tokens of the flat buffer, n examples (chunks of a context, each with the question), W tokens of the longest
example, D hidden, K start candidates, each with K end candidates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from electra_fast.config.config import ModelConfig
from electra_fast.finetuning.model import Inputs, TaskModel, make_head
from electra_fast.finetuning.tasks.question_features import DISALLOWED, NOTHING, SpanScores
from electra_fast.model.compute import ComputeConfig
from electra_fast.model.layers import Linear
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import linear

JOINT_WIDTH = 512
"""Width of the inner layers of the published head."""


def _disallowed(inputs: Inputs) -> Tensor:
    """Returns 0 for context, its [SEP] (as in the published code) and [CLS], else DISALLOWED; fp32 [T]."""
    positions_T = inputs.columns_5RL[2].flatten()
    owners_T = inputs.columns_5RL[4].flatten()
    context_n = F.pad(inputs.second_n, (0, 1))  # padding belongs to no example
    is_allowed: Tensor = (positions_T >= context_n[owners_T]) | (positions_T == 0)
    return DISALLOWED * (1 - is_allowed.float())


class TwoLogitReader(TaskModel):
    """A start and an end logit for each token, as in `transformers`' question answering.

    A span's score is the sum of its two logits. [CLS] to [CLS] means that there is no answer.
    """

    def __init__(self, shape: ModelConfig, beam_size: int = 20, head_dropout: float = 0.0) -> None:
        super().__init__(shape, make_head("transformers", shape, 2, on_tokens=True), "transformers", head_dropout)
        self.beam_size = beam_size

    def losses(self, inputs: Inputs, targets: Tensor, compute: ComputeConfig, key: Tensor | None = None) -> Tensor:
        """Returns the mean of both cross-entropies, [n]; `targets` int64 [n, 3]: start, end, unanswerable."""
        logits = self.outputs(inputs, compute, key).unbind(1)
        start, end = (
            F.cross_entropy(inputs.by_example(logits_T, NOTHING), targets[:, place], reduction="none")
            for place, logits_T in enumerate(logits)
        )
        return (start + end) / 2

    def predictions(self, inputs: Inputs, compute: ComputeConfig) -> SpanScores:
        """Returns the best starts, and the best ends, which are the same for all starts."""
        logits = (self.outputs(inputs, compute) + _disallowed(inputs)[:, None]).unbind(1)
        start_nW, end_nW = (inputs.by_example(logits_T, NOTHING, self.beam_size) for logits_T in logits)
        starts, ends = (grid.topk(self.beam_size) for grid in (start_nW, end_nW))
        every = (-1, self.beam_size, -1)
        return SpanScores(
            *(starts.indices, starts.values),
            *(ends.indices[:, None].expand(every), ends.values[:, None].expand(every)),
            start_nW[:, 0] + end_nW[:, 0],
        )


class JointHead(nn.Module):
    """The layers of the published head, with Glorot uniform matrices and no dropout."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        width = shape.hidden_size
        self.start = Linear(width, 1)
        self.end_dense = Linear(2 * width, JOINT_WIDTH)
        self.end = Linear(JOINT_WIDTH, 1)
        self.answerable_dense = Linear(2 * width, JOINT_WIDTH)
        self.answerable = Linear(JOINT_WIDTH, 1)


class JointReader(TaskModel):
    """The published code's reader: the end depends on the start, and a classifier detects unanswerable chunks.

    End logits depend on the true start in training, and on each of the `beam_size` best starts in prediction.
    `answerable_weight` is the weight of the classifier's loss.
    """

    head: JointHead

    def __init__(self, shape: ModelConfig, beam_size: int = 20, answerable_weight: float = 0.5) -> None:
        super().__init__(shape, JointHead(shape), "published")
        self.beam_size = beam_size
        self.answerable_weight = answerable_weight

    def losses(self, inputs: Inputs, targets: Tensor, compute: ComputeConfig, key: Tensor | None = None) -> Tensor:
        """Returns (start + end) / 2 + weight * unanswerable, [n]; `targets` int64 [n, 3]: start, end, unanswerable."""
        x_TD = self.hidden_states(inputs, compute, key).float()
        start_n, end_n, unanswerable_n = targets.unbind(1)
        start_nW = self._start_logits(x_TD, inputs)
        end_nW = self._end_logits(x_TD, self._end_inner(x_TD), start_n, inputs)
        answerable_n = self._unanswerable_logits(x_TD, start_nW, inputs)
        spans_n = F.cross_entropy(start_nW, start_n, reduction="none") + F.cross_entropy(
            end_nW, end_n, reduction="none"
        )
        unanswerable = F.binary_cross_entropy_with_logits(answerable_n, unanswerable_n.float(), reduction="none")
        return spans_n / 2 + self.answerable_weight * unanswerable

    def predictions(self, inputs: Inputs, compute: ComputeConfig) -> SpanScores:
        """Returns log-probabilities of the best starts and the best ends for each start, and the classifier's logit."""
        x_TD = self.hidden_states(inputs, compute).float()
        start_nW = self._start_logits(x_TD, inputs)
        starts = start_nW.log_softmax(1).topk(self.beam_size)
        inner_TI = self._end_inner(x_TD)
        ends = [
            self._end_logits(x_TD, inner_TI, start_n, inputs).log_softmax(1).topk(self.beam_size)
            for start_n in starts.indices.unbind(1)
        ]
        return SpanScores(
            *(starts.indices, starts.values),
            torch.stack([candidates.indices for candidates in ends], 1),
            torch.stack([candidates.values for candidates in ends], 1),
            self._unanswerable_logits(x_TD, start_nW, inputs),
        )

    def _start_logits(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        logits_T = self.head.start(x_TD).squeeze(1)
        return inputs.by_example(logits_T + _disallowed(inputs), NOTHING, self.beam_size)

    def _end_inner(self, x_TD: Tensor) -> Tensor:
        """Returns the part of the end's inner layer that does not depend on the start; [T, D] → [T, 512]."""
        dense = self.head.end_dense
        return linear(x_TD, dense.weight[:, x_TD.shape[1] :], dense.bias)

    def _end_logits(self, x_TD: Tensor, inner_TI: Tensor, start_n: Tensor, inputs: Inputs) -> Tensor:
        """Returns logits of the end, given the position of the start; [n, W]."""
        place_n = (inputs.first_n + start_n).clamp(max=len(x_TD) - 1)  # an example may have fewer tokens than the beam
        start_nI = linear(ops.gather_rows(x_TD, place_n), self.head.end_dense.weight[:, : x_TD.shape[1]], None)
        inner_TI = F.gelu(inner_TI + self._members(inputs).T @ start_nI)
        logits_T = self.head.end(inner_TI).squeeze(1) + _disallowed(inputs)
        return inputs.by_example(logits_T, NOTHING, self.beam_size)

    def _unanswerable_logits(self, x_TD: Tensor, start_nW: Tensor, inputs: Inputs) -> Tensor:
        """Returns logits from [CLS] and the mean hidden state, weighted by the probability of a start; [n]."""
        positions_T = inputs.columns_5RL[2].flatten()
        owners_T = inputs.columns_5RL[4].flatten()
        n = len(inputs.first_n)
        probability_T = start_nW.softmax(1)[owners_T.clamp(max=n - 1), positions_T.clamp(max=start_nW.shape[1] - 1)]
        mean_nD = (self._members(inputs) * probability_T) @ x_TD
        dense = self.head.answerable_dense
        inner_nI = ops.bias_gelu_reference(
            torch.cat((ops.gather_rows(x_TD, inputs.first_n), mean_nD), 1), dense.weight, dense.bias
        )
        logits: Tensor = self.head.answerable(inner_nI).squeeze(1)
        return logits

    def _members(self, inputs: Inputs) -> Tensor:
        """Returns 1 for an example's tokens, else 0; fp32 [n, T]. Products are deterministic, unlike scatters."""
        owners_T = inputs.columns_5RL[4].flatten()
        return (torch.arange(len(inputs.first_n), device=owners_T.device)[:, None] == owners_T).float()
