"""Batches packed into rows without padding, the order in which training reads examples, and their targets.

A batch's examples are contiguous in the flat token buffer that the encoder reads: they are segments of a few rows of
nearly equal length. Everything here is numpy; `model.Inputs` converts it to tensors.

Shapes: n examples, R rows, L row length, S segments (a row's padding counts as one).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.encoding import EncodedExamples, Ints, join_encoded

# Length of the shuffle buffer in the published code.
SHUFFLE_BUFFER = 100
# A row is long enough for this many tokens and for this many examples of average length. On a CPU, attention computes
# the scores of all tokens of a row before masking, so long rows cost more; rows of few examples have unequal lengths.
ROW_TOKENS = 64
ROW_EXAMPLES = 3
# If attention computes only the scores within examples, examples of at least this mean length share one row per part.
LONG_EXAMPLES = 32
# Examples of about the same length need fewer per row for rows of equal length: rows have up to this many tokens.
LONG_ROW = 192
# Static batches have a multiple of this many rows. A larger number means fewer graphs and more padding.
ROW_MULTIPLE = 4


def num_steps(config: FinetuneSection, num_examples: int) -> int:
    """Returns the number of optimizer steps: whole batches per epoch, the last one padded, times the epochs."""
    return max(1, math.ceil(math.ceil(num_examples / config.batch_size) * config.epochs))


def evaluation_steps(config: FinetuneSection, num_examples: int) -> frozenset[int]:
    """Returns the steps, counted from 1, that end with an evaluation; the last step always does."""
    total = num_steps(config, num_examples)
    per_epoch = math.ceil(num_examples / config.batch_size)
    interval = max(1.0, per_epoch / config.evals_per_epoch) if config.evals_per_epoch else math.inf
    return frozenset((*(round(number * interval) for number in range(1, int(total / interval) + 1)), total))


def training_order(config: FinetuneSection, num_examples: int, seed: int) -> Ints:
    """Returns the indices of the examples of each step, int64 [steps, batch_size]; -1 is padding.

    `shuffle`: each epoch has a new order, and its last batch has the remaining examples. `buffer`, as in the published
    code: one order, padded to whole batches and repeated, is read through a shuffle buffer of 100 examples. Each draw
    takes a random entry and replaces it with the next example, so adjacent epochs overlap.
    """
    random = np.random.Generator(np.random.PCG64([seed, num_examples]))
    steps = num_steps(config, num_examples)
    total = steps * config.batch_size
    per_epoch = math.ceil(num_examples / config.batch_size) * config.batch_size
    nothing = np.full(per_epoch - num_examples, -1)

    def epoch() -> Ints:
        return np.concatenate((random.permutation(num_examples), nothing))

    if config.order == "shuffle":
        order = np.concatenate([epoch() for _ in range(math.ceil(total / per_epoch))])[:total]
    else:
        order = _shuffle_through_buffer(np.resize(epoch(), total + SHUFFLE_BUFFER), random)
    return order.reshape(steps, config.batch_size)


def _shuffle_through_buffer(stream: Ints, random: np.random.Generator) -> Ints:
    total = len(stream) - SHUFFLE_BUFFER
    buffer = stream[:SHUFFLE_BUFFER].tolist()
    out = np.empty(total, np.int64)
    places = random.integers(SHUFFLE_BUFFER, size=total).tolist()
    following = stream[SHUFFLE_BUFFER:].tolist()
    for i, (place, entering) in enumerate(zip(places, following, strict=True)):
        out[i] = buffer[place]
        buffer[place] = entering
    return out


@dataclass(frozen=True)
class PackedBatch:
    """Examples as segments of rows.

    Args:
        columns: The model's input, int32 [5, R, L]: token ids, 0 on padding; token types; each token's position in its
            example; segments, 1, 2, ... for the examples of a row and 0 on padding; and owners, the index in
            `examples` of a token's example, or the length of `examples` on padding.
        cu_seqlens: Cumulative lengths of the segments; a row's padding is a segment; int32 [S + 1].
        first_tokens: Index of each example's [CLS] in the flat buffer of R * L tokens; int64 [n].
        second_starts: Position in each example at which its second text starts, 0 if not recorded; int64 [n].
        examples: Index of each example in the batch, -1 for an empty example; int64 [n].
        sources: Index of each token in `EncodedExamples.ids`, -1 on padding; int64 [R, L].
        longest: Tokens of the longest example.
        num_tokens: Tokens without padding.
    """

    columns: Ints
    cu_seqlens: Ints
    first_tokens: Ints
    second_starts: Ints
    examples: Ints
    sources: Ints
    longest: int
    num_tokens: int


def pack(
    encoded: EncodedExamples,
    examples: Ints,
    num_parts: int = 1,
    *,
    are_alike: bool = False,
    in_one_row: bool = False,
) -> list[PackedBatch]:
    """Packs examples into `num_parts` batches with about the same number of tokens, in rows of about equal length.

    If there are fewer examples than parts, each example is one part. `are_alike`: the examples have about the same
    length, and each long one gets a separate row. `in_one_row`: attention computes only the scores within examples
    (`computes_segments`), so examples of more than a few tokens can share one row.
    """
    from electra_fast.ops.cpu_ops import MAX_ROW  # imports torch, which ONNX models do without

    lengths = encoded.lengths[examples]
    num_parts = min(num_parts, len(examples))
    if not num_parts:
        return []
    mean = float(lengths.mean())
    row_examples = max(ROW_TOKENS / mean, ROW_EXAMPLES)
    if are_alike:
        row_examples = min(row_examples, max(1, LONG_ROW // mean))
    rows_per_part = max(1, round(len(examples) / row_examples / num_parts))
    if in_one_row and mean >= LONG_EXAMPLES and lengths.max() <= MAX_ROW:
        rows_per_part = 1
    rows = _balance(lengths, num_parts * rows_per_part)
    parts = (rows[number::num_parts] for number in range(num_parts))
    return [_fill_rows(encoded, examples, part, max(int(lengths[row].sum()) for row in part)) for part in parts]


def pack_static(encoded: EncodedExamples, examples: Ints, row_length: int, num_examples: int) -> PackedBatch:
    """Packs examples into rows of one length, so that arrays have only a few different shapes, as CUDA graphs require.

    The number of rows is a multiple of `ROW_MULTIPLE`. Arrays are padded to `num_examples` with empty examples at the
    first token, and `cu_seqlens` with empty segments.
    """
    lengths = encoded.lengths[examples]
    rows: list[list[int]] = []
    room: list[int] = []
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        row = next((r for r, free in enumerate(room) if free >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_length)
        rows[row].append(item)
        room[row] -= length
    rows += [[] for _ in range(-len(rows) % ROW_MULTIPLE or (0 if rows else ROW_MULTIPLE))]
    packed = _fill_rows(encoded, examples, rows, row_length)
    missing = num_examples - len(examples)
    num_ends = num_examples + len(rows) + 1
    ends = np.full(num_ends, len(rows) * row_length, np.int32)
    ends[: len(packed.cu_seqlens)] = packed.cu_seqlens
    columns = packed.columns.copy()
    columns[4, packed.sources < 0] = num_examples
    return replace(
        packed,
        columns=columns,
        longest=row_length,
        cu_seqlens=ends,
        first_tokens=np.concatenate((packed.first_tokens, np.zeros(missing, np.int64))),
        second_starts=np.concatenate((packed.second_starts, np.zeros(missing, np.int64))),
        examples=np.concatenate((packed.examples, np.full(missing, -1))),
    )


def _balance(lengths: Ints, num_rows: int) -> list[list[int]]:
    """Assigns items to rows, longest item first, each to the shortest row so far; drops empty rows."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    heap = [(0, row) for row in range(num_rows)]
    for item in np.argsort(-lengths, kind="stable").tolist():
        filled, row = heap[0]
        heapq.heapreplace(heap, (filled + int(lengths[item]), row))
        rows[row].append(item)
    return [row for row in rows if row]


def _fill_rows(encoded: EncodedExamples, examples: Ints, rows: list[list[int]], width: int) -> PackedBatch:
    lengths = encoded.lengths[examples]
    items = [item for row in rows for item in row]
    columns = np.zeros((5, len(rows), width), np.int32)
    sources = np.full((len(rows), width), -1)
    ids, types, positions, segments, owners = columns
    owners[:] = len(items)
    ends = [0]
    first_tokens = list[int]()
    for r, row in enumerate(rows):
        at = 0
        for segment, item in enumerate(row, start=1):
            start = encoded.offsets[examples[item]]
            length = int(lengths[item])
            place = slice(at, at + length)
            ids[r, place] = encoded.ids[start : start + length]
            types[r, place] = encoded.token_types[start : start + length]
            positions[r, place] = np.arange(length)
            segments[r, place] = segment
            owners[r, place] = len(first_tokens)
            sources[r, place] = np.arange(start, start + length)
            first_tokens.append(r * width + at)
            at += length
            ends.append(r * width + at)
        if at < width:
            positions[r, at:] = np.arange(width - at)
            ends.append((r + 1) * width)
    second_starts = encoded.second_starts
    return PackedBatch(
        columns,
        np.array(ends, np.int32),
        np.array(first_tokens, np.int64),
        np.zeros(len(items), np.int64) if second_starts is None else second_starts[examples[items]],
        np.array(items, np.int64),
        sources,
        int(lengths[items].max(initial=1)),
        int(lengths[items].sum()),
    )


@dataclass(frozen=True)
class TrainingBatch:
    """The examples of a step, or of one process's part: tokens, targets, and weights in the loss.

    With a teacher, `answers` has its outputs, and `weights` has two rows: of the labels and of the answers.
    """

    packed: PackedBatch
    targets: NDArray[Any]
    weights: NDArray[Any]
    answers: NDArray[Any] | None = None


@dataclass(frozen=True)
class StepBatch:
    """A step's examples, one part per process. The seed and the step number determine the dropout masks."""

    parts: list[TrainingBatch]
    seed: int


@dataclass(frozen=True)
class TrainingSet:
    """Tokenized training examples with a target and a loss weight per example, or per token if `per_token`.

    A weight without a target is 0. `class_weights` are float64 [C]; None if all are 1. `notes` are for the user.
    `answers` are a teacher's outputs, float32 [n, C]; `weights` then has two rows, of targets and of answers.
    """

    encoded: EncodedExamples
    targets: NDArray[Any]
    weights: NDArray[Any]
    per_token: bool = False
    class_weights: NDArray[Any] | None = None
    notes: tuple[str, ...] = ()
    answers: NDArray[Any] | None = None

    def taught(self, answers: NDArray[Any], unlabeled: TrainingSet | None, weight: float) -> TrainingSet:
        """Returns these examples and unlabeled ones with a teacher's answers to all of them; NaN if it has no answer.

        A label's weight is multiplied by 1 - `weight`. An answer weighs `weight`, or 1 for an unlabeled example.
        """
        others = [] if unlabeled is None else [unlabeled]
        nothing = [np.zeros(len(unlabeled_set.weights)) for unlabeled_set in others]
        of_labels = np.concatenate([(1 - weight) * self.weights, *nothing])
        of_answers = np.full(len(answers), 1.0)
        of_answers[: len(self.weights)] = weight
        return replace(
            self,
            encoded=join_encoded([self.encoded, *(unlabeled_set.encoded for unlabeled_set in others)]),
            targets=np.concatenate([self.targets, *(unlabeled_set.targets for unlabeled_set in others)]),
            weights=np.stack((of_labels, of_answers * ~np.isnan(answers).any(1))),
            answers=np.nan_to_num(answers.astype(np.float32)),
        )

    def batch(self, parts: Sequence[PackedBatch], chosen: NDArray[Any], reduction: str, seed: int) -> StepBatch:
        """Returns the batch of the examples `chosen`, packed in `parts`; `reduction` is `finetune.loss_reduction`."""
        places = [
            part.sources if self.per_token else np.where(part.examples >= 0, chosen[part.examples], -1)
            for part in parts
        ]
        weights = [self.weights[..., place] * (place >= 0) for place in places]
        total = sum(part_weights.sum() for part_weights in weights)
        scale = total if reduction == "mean" and total > 0 else 1.0
        return StepBatch(
            [
                TrainingBatch(
                    part,
                    self.targets[place],
                    (part_weights / scale).astype(np.float32),
                    None if self.answers is None else self.answers[place],
                )
                for part, place, part_weights in zip(parts, places, weights, strict=True)
            ],
            seed,
        )
