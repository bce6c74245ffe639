"""The equivalence test keeps its level where launches move all texts alike, on simulated pairs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ppl import judge, stats, verdict
from ppl.between import Between
from ppl.between import between as between_launches
from ppl.simulate import Noise, noisy
from ppl.stats import ArrayF8, Tost

REPEATS = 500
MARGIN = 1e-4
MOST = 37
"""99 % bound on a count of 500 at 5 %."""
TEXTS = 10
ERROR = 2.5e-5
"""Standard error over texts, in nats, of the mean difference with two launches an arm."""
TIMES = (0.0, 0.3, 1.0, 3.0)
UNITS = {"margins": MARGIN, "errors": ERROR}
NATURES = ("route by text", "launch by text", "both")


def draws(
    launch: float, shift: float, *, nature: str = "both", launches: int = 2, seed: int = 7
) -> Iterator[list[ArrayF8]]:
    """Draw each arm's levels ``[launches, texts]``; ``launch`` is the effect's standard deviation.

    The spread of texts has the same size whether it is the route's, drawn once a text, or each
    launch's own.
    """
    rng = np.random.default_rng(seed)
    spread = ERROR * np.sqrt(TEXTS) / (np.sqrt(2) if nature == "both" else 1)
    of_text = spread * (nature != "launch by text")
    of_launch = spread * (nature != "route by text") * np.sqrt(launches / 2)
    for _ in range(REPEATS):
        every = launch * np.sqrt(launches / 2) * rng.standard_normal((2, launches, 1))
        made = -2.0 + every + of_launch * rng.standard_normal((2, launches, TEXTS))
        made[1] += shift + of_text * rng.standard_normal(TEXTS)
        yield [made[0], made[1]]


def equivalence(arms: list[ArrayF8], margin: float = MARGIN) -> Tost:
    means = arms[1].mean(0) - arms[0].mean(0)
    return stats.tost(means, margin, between_launches(arms))


def passed(t: Tost) -> bool:
    inside = -t.margin < t.low and t.high < t.margin
    assert inside == (t.p < stats.LEVEL)
    return inside


@pytest.mark.parametrize("nature", NATURES)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("times", TIMES)
def test_a_shift_at_the_margin_seldom_passes_whatever_launches_do(
    times: float, unit: str, nature: str
) -> None:
    launch = times * UNITS[unit]
    for launches in (2, 4):
        for sign in (-1, 1):
            made = draws(launch, sign * MARGIN, nature=nature, launches=launches)
            assert sum(passed(equivalence(arms)) for arms in made) <= MOST


def test_the_interval_over_texts_alone_would_let_it_pass() -> None:
    """The fault that the test above is there for."""
    made = list(draws(3 * MARGIN, MARGIN))
    alone = [stats.tost(a[1].mean(0) - a[0].mean(0), 10 * MARGIN) for a in made]
    assert sum(t.high < MARGIN for t in alone) > 5 * MOST
    assert sum(equivalence(a).high < MARGIN for a in made) <= MOST


@pytest.mark.parametrize("nature", NATURES)
@pytest.mark.parametrize("times", TIMES)
def test_the_interval_covers_at_least_at_its_rate(times: float, nature: str) -> None:
    shift = 2e-4
    for unit in UNITS.values():
        made = [equivalence(a) for a in draws(times * unit, shift, nature=nature, seed=8)]
        assert sum(t.low > shift for t in made) <= MOST
        assert sum(t.high < shift for t in made) <= MOST


@pytest.mark.parametrize("times", TIMES)
def test_three_margins_never_pass(times: float) -> None:
    for unit in UNITS.values():
        assert not any(passed(equivalence(a)) for a in draws(times * unit, 3 * MARGIN, seed=9))


def test_launches_of_equal_bits_change_nothing() -> None:
    rng = np.random.default_rng(10)
    for launches in (2, 3, 7):
        for _ in range(50):
            stock, fused = rng.exponential(2.0, (2, TEXTS)) * 1e-4
            arms = [np.tile(x, (launches, 1)) for x in (stock, fused)]
            between = between_launches(arms)
            assert between == Between(error=0.0, degrees=2 * launches - 2, shared=0.0)
            plain = stats.tost(fused - stock, MARGIN)
            made = stats.tost(fused - stock, MARGIN, between)
            assert made.model_copy(update={"launches": None}) == plain


def test_the_error_of_launches_is_the_one_that_was_drawn() -> None:
    made = [between_launches(a) for a in draws(MARGIN, 0.0, nature="launch by text", launches=4)]
    found = [b for b in made if b is not None]
    assert {b.degrees for b in found} == {6}
    squares = np.mean([(b.error**2, b.shared**2) for b in found], axis=0)
    assert np.sqrt(squares[0]) == pytest.approx(np.hypot(MARGIN, ERROR), rel=0.05)
    assert np.sqrt(squares[1]) == pytest.approx(ERROR, rel=0.02)
    assert between_launches([np.zeros((1, 3)), np.zeros((1, 3))]) is None
    one = between_launches([np.array([[0.0, 0.0], [2.0, 2.0]]), np.zeros((1, 2))])
    assert one == Between(error=np.sqrt(2 * 1.5), degrees=1, shared=0.0)


@pytest.mark.parametrize("counts", [(2, 2), (4, 4), (5, 2)])
@pytest.mark.parametrize("times", TIMES[1:])
def test_launches_that_move_one_arm_alone(times: float, counts: tuple[int, int]) -> None:
    """An arm whose launches are of equal bits tells nothing of the other's spread."""
    rng = np.random.default_rng(12)
    count = 0
    for _ in range(REPEATS):
        stock, fused = (np.full((n, TEXTS), -2.0) for n in counts)
        fused += MARGIN + times * MARGIN * rng.standard_normal((counts[1], 1))
        fused += 0.3 * ERROR * np.sqrt(TEXTS) * rng.standard_normal(TEXTS)
        between = between_launches([stock, fused])
        assert between is not None
        assert between == between_launches([fused, stock])
        assert between.degrees == counts[1] - 1
        count += passed(equivalence([stock, fused]))
    assert count <= MOST


def test_what_the_error_of_launches_costs() -> None:
    """At no shift: a quarter of the margin as the error over texts, all of it each launch's own."""
    for launches, least in ((2, 0.50), (4, 0.85)):
        made = list(draws(0.0, 0.0, nature="launch by text", launches=launches))
        assert sum(passed(equivalence(a)) for a in made) >= least * REPEATS
    route = list(draws(0.0, 0.0, nature="route by text"))
    alone = [stats.tost(a[1].mean(0) - a[0].mean(0), MARGIN) for a in route]
    assert (
        sum(passed(equivalence(a)) for a in route) == sum(passed(t) for t in alone) > 0.9 * REPEATS
    )


def test_launches_widen_the_shift_that_could_have_been_detected() -> None:
    means = np.linspace(-1e-4, 1e-4, TEXTS)
    alone = stats.detectable_shift(means)
    assert alone is not None
    still = Between(error=0.0, degrees=2, shared=0.0)
    assert stats.detectable_shift(means, still) == alone
    moved = Between(error=1e-3, degrees=2, shared=0.0)
    assert stats.detectable_shift(means, moved) == pytest.approx(np.hypot(alone, 7.85**0.5 * 1e-3))


# -- the margin that the launches themselves set ----------------------------------------


@pytest.mark.parametrize("launches", [2, 4])
@pytest.mark.parametrize("launch", [0.0, 1e-5, 3e-5, 1e-4, 3e-4])
def test_a_shift_of_the_true_default_margin_seldom_passes(launch: float, launches: int) -> None:
    """Of 3 true errors between launches, or 1e-4 nats: the margin is drawn with the launches."""
    true = np.hypot(launch, ERROR)  # every launch has its own noise on each text as well
    shift = verdict.default_margin(true)
    count = 0
    for arms in draws(launch, shift, nature="launch by text", launches=launches, seed=11):
        between = between_launches(arms)
        assert between is not None
        count += passed(equivalence(arms, verdict.default_margin(between.error)))
    assert count <= MOST


# -- from results to a verdict ------------------------------------------------------------

PASSES = ("IDENTICAL", "WITHIN_NOISE", "EQUIVALENT")


@pytest.mark.parametrize("margin", [MARGIN, None])
def test_verdicts_at_the_margin_with_launches_that_move_all_texts(margin: float | None) -> None:
    words: dict[str, int] = {}
    for seed in range(REPEATS):
        shift = margin or 3e-4
        noise = Noise(token=1e-4, launch_of_text=2e-5, launch=1e-4, shift=shift)
        made = noisy(seed, noise, rows=200)
        found = judge.judge(made.records, made.load, claim="equivalent", margin=margin)
        words[found.verdict] = words.get(found.verdict, 0) + 1
    assert sum(words.get(w, 0) for w in PASSES) <= MOST, words
    assert words["INCONCLUSIVE"] > 0.9 * REPEATS


def test_relaunches_that_move_all_texts_are_never_different() -> None:
    for seed in range(REPEATS):
        noise = Noise(token=1e-4, launch_of_text=2e-5, launch=(3e-5, 1e-4, 3e-4)[seed % 3])
        made = noisy(seed, noise, rows=200)
        found = judge.judge(made.records, made.load, claim="equivalent", margin=MARGIN)
        assert found.verdict in {"WITHIN_NOISE", "EQUIVALENT", "INCONCLUSIVE"}


def test_a_wide_error_of_launches_is_inconclusive_and_says_what_to_do() -> None:
    made = noisy(3, Noise(launch_of_text=5e-6, launch=1e-4))
    wide = judge.judge(made.records, made.load, claim="equivalent", margin=4e-4)
    assert (wide.verdict, wide.exit_code) == ("INCONCLUSIVE", 3)
    assert "launch both servers more often (launches alone are +-" in wide.decided.reasons[0]
    assert wide.statistics is not None
    assert wide.statistics.exposed.half_of_texts < 1e-4
    made = noisy(5, Noise(launch_of_text=5e-6, launch=1e-6))
    narrow = judge.judge(made.records, made.load, claim="equivalent", margin=4e-4)
    assert narrow.verdict == "WITHIN_NOISE"
