"""The statistics, on cases with known answers and on simulated pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats as scipy_stats

from ppl import stats

REPEATS = 500
MARGIN = 1e-4
MOST_OF_FIVE_PERCENT = 37
"""99 % bound on a count of 500 at 5 %."""


def text_means(shift: float, *, seed: int, texts: int = 10, tokens: int = 1_650) -> np.ndarray:
    """Draw [REPEATS, texts] means: t3 noise of tokens around an offset of the text."""
    rng = np.random.default_rng(seed)
    made = np.empty((REPEATS, texts))
    for i in range(REPEATS):
        noise = rng.standard_t(3, (texts, tokens)).mean(axis=1) * 1e-3
        made[i] = shift + rng.standard_normal(texts) * 3e-5 + noise
    return made


def test_the_bound_is_the_binomial_one() -> None:
    assert scipy_stats.binom.ppf(0.99, REPEATS, 0.05) == MOST_OF_FIVE_PERCENT


def test_tost_seldom_passes_a_shift_at_the_margin() -> None:
    passed = 0
    for sign in (-1, 1):
        made = [stats.tost(x, MARGIN) for x in text_means(sign * MARGIN, seed=1)]
        passes = sum(t.p < stats.LEVEL for t in made)
        assert passes == sum(t.low > -MARGIN and t.high < MARGIN for t in made)
        assert passes <= MOST_OF_FIVE_PERCENT
        passed += passes
    assert passed > 0  # a test that never passes would prove nothing


def test_tost_passes_no_shift_and_never_three_margins() -> None:
    assert sum(stats.tost(x, MARGIN).p < stats.LEVEL for x in text_means(0.0, seed=2)) > 400
    assert not any(stats.tost(x, MARGIN).p < stats.LEVEL for x in text_means(3 * MARGIN, seed=3))


def test_the_interval_covers_at_its_rate() -> None:
    outside = [0, 0]
    for x in text_means(2e-4, seed=4):
        t = stats.tost(x, MARGIN)
        outside[0] += t.low > 2e-4
        outside[1] += t.high < 2e-4
    assert max(outside) <= MOST_OF_FIVE_PERCENT
    assert min(outside) >= 500 * 0.05 - (MOST_OF_FIVE_PERCENT - 25)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12), st.floats(1e-6, 1))
def test_tost_is_the_interval(means: list[float], margin: float) -> None:
    t = stats.tost(means, margin)
    assert t.low <= t.mean <= t.high
    edge = min(abs(t.low + margin), abs(t.high - margin))
    if edge > 1e-9:
        assert (t.p < stats.LEVEL) == (-margin < t.low and t.high < margin)


def test_equal_means_and_one_text() -> None:
    assert stats.tost([0.0] * 10, MARGIN).p == 0.0
    assert stats.tost([1.0] * 10, MARGIN).p == 1.0
    alone = stats.tost([0.0], MARGIN)
    assert (alone.low, alone.high, alone.p) == (-math.inf, math.inf, 1.0)
    assert stats.Tost.model_validate_json(alone.model_dump_json()) == alone


def test_sign_flips_are_exact() -> None:
    assert stats.sign_flip([1.0] * 10) == pytest.approx(2 / 1024)
    assert stats.sign_flip([0.0] * 10) == 1.0
    assert stats.sign_flip([1.0, -1.0]) == 1.0


def test_holm() -> None:
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.9]) == [0.9]


def test_bounds_and_power() -> None:
    assert stats.rate_bound(10) == pytest.approx(0.2589, abs=1e-4)
    assert stats.rate_bound(165_000) == pytest.approx(3 / 165_000, rel=2e-3)
    assert stats.draws_to_see(1e-6) == pytest.approx(2_995_731, abs=2)
    means = np.random.default_rng(0).standard_normal(10)
    shift = stats.detectable_shift(means)
    assert shift is not None
    assert pytest.approx(7.85 * means.var(ddof=1) / shift**2) == 10


def test_the_bootstrap_holds_the_mean() -> None:
    found = stats.bootstrap([1.0, 2.0, 3.0, 4.0])
    assert found is not None
    assert found[0] < 2.5 < found[1]


def test_leaving_one_out_shows_the_text_that_decides() -> None:
    made = stats.leave_one_out([0.0] * 9 + [1.0], MARGIN)
    assert [t.mean for t in made[:9]] == pytest.approx([1 / 9] * 9)
    assert made[9].mean == 0.0


def distances(points: np.ndarray) -> np.ndarray:
    return np.abs(points[:, None] - points[None, :])


def test_noise_with_two_launches_an_arm() -> None:
    arms = [0, 0, 1, 1]
    apart = stats.noise(distances(np.array([0.0, 0.01, 1.0, 1.01])), arms)
    assert apart is not None
    assert apart.p == apart.least_p == pytest.approx(1 / 3)
    assert apart.distinguishable
    near = stats.noise(distances(np.array([0.0, 0.5, 1.0, 1.5])), arms)
    assert near is not None
    assert not near.distinguishable
    exact = stats.noise(distances(np.array([0.0, 0.0, 1.0, 1.0])), arms)
    assert exact is not None
    assert exact.separation is None
    assert exact.distinguishable
    equal = stats.noise(np.zeros((4, 4)), arms)
    assert equal is not None
    assert equal.p == 1.0
    assert not equal.distinguishable
    assert stats.noise(np.zeros((3, 3)), [0, 0, 1]) is None


def test_launches_alone_seldom_look_like_a_route() -> None:
    rng = np.random.default_rng(5)
    for launches, most in ((2, 0.02), (4, 0.07)):
        arms = [0] * launches + [1] * launches
        found = [
            stats.noise(distances(rng.standard_normal(2 * launches)), arms) for _ in range(1_500)
        ]
        assert sum(n.distinguishable for n in found if n) <= most * 1_500


def test_many_launches_are_divided_at_random() -> None:
    arms = [0] * 9 + [1] * 9  # 48,620 ways
    apart = stats.noise(distances(np.r_[np.linspace(0, 1, 9), np.linspace(5, 6, 9)]), arms)
    assert apart is not None
    assert apart.least_p == pytest.approx(2 / 48_620)
    assert 1 / 10_001 <= apart.p < 0.01
    assert apart.distinguishable
    near = stats.noise(distances(np.random.default_rng(3).standard_normal(18)), arms)
    assert near is not None
    assert not near.distinguishable


def test_the_error_of_one_arm_alone() -> None:
    arms = [[0.0, 2.0], [0.0, 20.0]]
    assert stats.launch_error(arms, (True, False)) == (pytest.approx(math.sqrt(2.0)), 1)
    assert stats.launch_error([[0.0], [0.0, 20.0]], (True, False)) is None


def test_the_error_between_launches() -> None:
    assert stats.launch_error([[0.0], [1.0]]) is None
    error = stats.launch_error([[0.0, 2.0], [0.0, 2.0]])
    assert error == (pytest.approx(math.sqrt(2.0)), 2)


def test_one_texts_infinite_interval_is_read_back_strictly() -> None:
    made = stats.tost([1e-3], 1e-4)
    assert (made.spread, made.low, made.high) == (math.inf, -math.inf, math.inf)
    assert stats.Tost.model_validate_json(made.model_dump_json(), strict=True) == made
    odd = made.model_dump_json().replace('"Infinity"', '"12"', 1)
    with pytest.raises(ValidationError):
        stats.Tost.model_validate_json(odd, strict=True)
