"""What is drawn of many tokens hides no extreme."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ppl.runs import BETWEEN, WITHIN, kind, noise_pair
from ppl.thin import envelope, signed_axis

VALUES = arrays(np.float64, st.integers(1, 300), elements=st.floats(-8, 8))


@given(d=VALUES, bins=st.integers(1, 80))
def test_bins_cover_every_row_once_and_keep_both_extremes(d: np.ndarray, bins: int) -> None:
    made = envelope(d, bins)
    assert len(made) <= bins
    covered = [row for b in made for row in range(b.first, b.last + 1)]
    assert covered == list(range(len(d)))
    for b in made:
        part = d[b.first : b.last + 1]
        assert (b.low, b.high) == (part.min(), part.max())
        assert b.first <= b.row <= b.last
        assert abs(d[b.row]) == np.abs(part).max()


def test_few_rows_are_kept_as_they_are() -> None:
    made = envelope(np.array([0.5, -0.25, 0.0]), 10)
    assert [(b.first, b.last, b.low, b.high) for b in made] == [
        (0, 0, 0.5, 0.5),
        (1, 1, -0.25, -0.25),
        (2, 2, 0.0, 0.0),
    ]


def test_one_token_in_ten_million_is_still_drawn() -> None:
    d = np.zeros(10_000_000)
    d[7_654_321] = -3e-7
    made = [b for b in envelope(d) if b.low or b.high]
    assert [(b.low, b.row) for b in made] == [(-3e-7, 7_654_321)]


@given(VALUES)
def test_a_signed_axis_reaches_the_greatest_value(d: np.ndarray) -> None:
    linear, end, ticks = signed_axis(d.tolist())
    assert linear > 0
    assert end >= np.abs(d).max() or not d.any()
    assert ticks == sorted(ticks)
    assert ticks == [-t for t in reversed(ticks)]
    assert 0.0 in ticks


@pytest.mark.parametrize(
    ("runs", "pair", "is_a"),
    [
        ([("stock", 1, 1), ("stock", 1, 2), ("stock", 2, 1)], (0, 2), BETWEEN),
        ([("stock", 1, 1), ("stock", 1, 2), ("fused", 1, 1), ("fused", 2, 1)], (2, 3), BETWEEN),
        ([("stock", 1, 1), ("fused", 1, 1), ("fused", 1, 2)], (1, 2), WITHIN),
    ],
)
def test_a_relaunch_is_drawn_rather_than_a_repeat(
    runs: list[tuple[str, int, int]], pair: tuple[int, int], is_a: str
) -> None:
    found = noise_pair(runs)
    assert found == (runs[pair[0]], runs[pair[1]])
    assert kind(*found) == is_a
    assert noise_pair([("stock", 1, 1), ("fused", 1, 1)]) is None
