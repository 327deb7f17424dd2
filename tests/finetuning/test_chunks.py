"""Chunks and their contexts against the published rules."""

import pytest
import squad_transcription as transcription

from electra_fast.finetuning.encoding import chunk_spans, max_context


@pytest.mark.parametrize(
    "sizes, spans",
    [
        ((0, 4, 2), []),
        ((4, 4, 2), [(0, 4)]),
        ((7, 4, 2), [(0, 4), (2, 4), (4, 3)]),
        ((7, 4, 9), [(0, 4), (4, 3)]),
        ((8, 4, 4), [(0, 4), (4, 4)]),
        ((3, 2, 1), [(0, 2), (1, 2)]),
    ],
)
def test_spans(sizes, spans):
    assert chunk_spans(*sizes) == spans


def test_the_context_is_the_smaller_side_and_a_little_of_the_length():
    assert max_context([(0, 4), (2, 4), (4, 3)], 7).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert max_context([(0, 4), (1, 4)], 5).tolist() == [0, 0, 0, 1, 1]  # token 2 has one before or after it in both
    assert max_context([(0, 4), (3, 6)], 9).tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]  # token 3: 0.06 over 0.04
    assert max_context([], 0).tolist() == []


@pytest.mark.parametrize("room, strides", [(1, [1, 2]), (4, range(1, 6)), (13, range(1, 15)), (381, [64, 128, 200])])
def test_all_sizes_as_published(room, strides):
    for stride in strides:
        for num_tokens in [*range(3 * room if room < 100 else 0), 2 * room, 3 * room + 7, 5 * room - 1]:
            spans = chunk_spans(num_tokens, room, stride)
            assert spans == transcription.chunk_spans(num_tokens, room, stride)
            expected = [transcription.chunk_of_most_context(spans, token) for token in range(num_tokens)]
            assert max_context(spans, num_tokens).tolist() == expected


def test_a_hundred_tokens_of_length_count_as_one_of_context():
    assert max_context([(0, 200), (150, 100)], 250)[174:177].tolist() == [0, 0, 1]  # token 175: 24 + 2 and 25 + 1
    assert max_context([(0, 200), (150, 105)], 255)[174:177].tolist() == [0, 1, 1]
