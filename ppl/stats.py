"""Statistics of paired log-probabilities. The unit of inference is the text, not the token.

Deltas inside a text are correlated, so every interval and test here takes one number a text: the
mean difference of its exposed tokens, in nats. All sums are float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict
from scipy import stats

from ppl.between import Between, between, half_interval, reached

ArrayF8 = NDArray[np.float64]

LEVEL = 0.05
"""Of each one-sided test, so that the interval is of 90 %."""
DETECTABLE = 7.85
"""(z(0.975) + z(0.8))^2: 80 % power at a two-sided 5 %. n = 7.85 s^2 / d^2."""
BOOTSTRAP_DRAWS = 4_999
MOST_WAYS = 20_000
DRAWN = 10_000
"""Ways to divide launches into two arms: up to so many all count, beyond so many are drawn."""
SEPARATION = 5.0
"""Least A/B pair over greatest A/A pair from which a route stands apart.

Four launches whose effects are one shared normal number each, the worst case for telling a route
from a launch, exceed 4.86 one time in a hundred by chance (4,000,000 draws)."""


class _Frozen(BaseModel):
    # One text alone has an infinite interval, which JSON has no number for.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


def _number(value: Any) -> Any:
    """Read infinity in the word that stands for it in JSON; strict reading takes no other word."""
    words = isinstance(value, str) and value in {"Infinity", "-Infinity"}
    return float(value) if words else value


Figure = Annotated[float, BeforeValidator(_number)]
"""A number that may be infinite."""


class Tost(_Frozen):
    """Two one-sided tests of text means against -margin and margin, in nats.

    Attributes
    ----------
    spread, standard_error : over texts alone.
    low, high : the 90 % interval, with the error of launches where it is known.
    p : the smallest one-sided level at which the interval of that level lies inside the margin.
    launches : what launches do; None where no server was launched again, and the interval then
        holds for these launches alone.

    """

    margin: float
    texts: int
    mean: float
    spread: Figure
    standard_error: Figure
    low: Figure
    high: Figure
    p: float
    launches: Between | None = None

    @property
    def half_of_texts(self) -> float:
        """Half the 90 % interval over texts alone, as if launches did nothing to all alike."""
        if self.texts < 2:  # noqa: PLR2004 - no spread
            return math.inf
        return float(stats.t.isf(LEVEL, self.texts - 1)) * self.standard_error

    @property
    def half_of_launches(self) -> float:
        """Half the 90 % interval of these texts over launches alone; 0 where it isn't known."""
        if self.launches is None:
            return 0.0
        return float(stats.t.isf(LEVEL, self.launches.degrees)) * self.launches.error


def tost(means: Sequence[float] | ArrayF8, margin: float, launches: Between | None = None) -> Tost:
    """Test whether the mean over texts lies inside (-margin, margin).

    With the standard error s over n texts and t(k) the 95 % quantile of Student's t with k degrees
    of freedom, half the 90 % interval is t(n - 1) s over texts alone. That holds nothing of what a
    launch does to all texts alike: with launches, it is ::

        max(t(n - 1) s, sqrt(t(n - 1)^2 max(0, s^2 - w^2) + t(f)^2 e^2))

    with e, f and w of ``ppl.between``. The root joins two independent errors, each with its own t
    (Banerjee, Sankhya 22 (1960) 357-358: coverage is at least nominal whatever their ratio, since
    the distribution of a squared normal number is concave); s^2 - w^2 leaves out of s what e holds
    already. So a one-sided test keeps 5 % where launches do nothing, where they do nothing to
    single texts, and where the route does the same to every text; in between it does so in
    simulations (``tests/ppl/test_levels.py``). Normal errors of one spread in both arms are
    assumed.

    Launches of equal bits (e = 0) leave the interval over texts as it is. Where all texts have the
    same mean and launches do nothing the interval is that value. One text has no interval.
    """
    x = np.asarray(means, dtype=np.float64)
    mean = math.fsum(x) / len(x)
    moved = launches is not None and launches.error > 0
    if moved and len(x) > 1:
        assert launches is not None
        spread = float(np.std(x, ddof=1)) if np.ptp(x) > 0 else 0.0
        error = spread / math.sqrt(len(x))
        half = half_interval(LEVEL, error, len(x), launches)
        p = reached(margin - abs(mean), error, len(x), launches)
    elif len(x) > 1 and np.ptp(x) > 0:
        lower = stats.ttest_1samp(x, -margin, alternative="greater")
        upper = stats.ttest_1samp(x, margin, alternative="less")
        p = max(float(lower.pvalue), float(upper.pvalue))
        spread = float(np.std(x, ddof=1))
        error = spread / math.sqrt(len(x))
        half = float(stats.t.ppf(1 - LEVEL, len(x) - 1)) * error
    elif len(x) > 1:
        p, spread, error, half = (0.0 if abs(mean) < margin else 1.0), 0.0, 0.0, 0.0
    else:
        p, spread, error, half = 1.0, math.inf, math.inf, math.inf
    return Tost(
        margin=margin,
        texts=len(x),
        mean=mean,
        spread=spread,
        standard_error=error,
        low=mean - half,
        high=mean + half,
        p=p,
        launches=launches,
    )


def sign_flip(means: Sequence[float] | ArrayF8, seed: int = 0) -> float:
    """Return the two-sided p of a mean of zero, over all 2^n sign flips (10,000 above 13 texts)."""
    x = np.asarray(means, dtype=np.float64)
    if len(x) < 2 or not x.any():  # noqa: PLR2004 - nothing to flip
        return 1.0

    def mean(values: ArrayF8, axis: int) -> ArrayF8:
        return np.asarray(values.mean(axis=axis))

    done: Any = stats.permutation_test(
        (x,),
        mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=9_999,
        rng=np.random.default_rng(seed),
    )
    return float(done.pvalue)


def bootstrap(means: Sequence[float] | ArrayF8, seed: int = 0) -> tuple[float, float] | None:
    """Return a 95 % percentile interval over texts; at 10 texts it really covers about 90 %."""
    x = np.asarray(means, dtype=np.float64)
    if len(x) < 2:  # noqa: PLR2004 - nothing to draw from
        return None
    done: Any = stats.bootstrap(
        (x,),
        np.mean,
        n_resamples=BOOTSTRAP_DRAWS,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(done.confidence_interval.low), float(done.confidence_interval.high)


def detectable_shift(
    means: Sequence[float] | ArrayF8, launches: Between | None = None
) -> float | None:
    """Return the smallest mean shift that the texts could have shown: sqrt(7.85 s^2 / n) nats.

    Launches add their variance, less what the spread over texts holds of it: with e and w of
    ``ppl.between`` sqrt(7.85 max(s^2 / n, s^2 / n - w^2 + e^2)). Normal quantiles: with few
    launches it takes more.
    """
    x = np.asarray(means, dtype=np.float64)
    if len(x) < 2:  # noqa: PLR2004 - no spread
        return None
    variance = float(np.var(x, ddof=1)) / len(x)
    if launches is not None:
        own = max(0.0, variance - launches.shared**2)
        variance = max(variance, own + launches.error**2)
    return math.sqrt(DETECTABLE * variance)


def leave_one_out(
    means: Sequence[float], margin: float, arms: Sequence[ArrayF8] = ()
) -> list[Tost]:
    """Return the test without each text in turn; nothing where fewer than two would be left.

    Parameters
    ----------
    arms : as of ``ppl.between``; nothing where launches don't count.

    """
    x = list(means)
    if len(x) <= 2:  # noqa: PLR2004
        return []
    return [
        tost(
            x[:i] + x[i + 1 :],
            margin,
            between([np.delete(a, i, axis=1) for a in arms]) if arms else None,
        )
        for i in range(len(x))
    ]


def holm(p: Sequence[float]) -> list[float]:
    """Return p values adjusted by Holm's method, in the order given."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    adjusted = [0.0] * len(p)
    highest = 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, p[i] * (len(p) - rank)))
        adjusted[i] = highest
    return adjusted


def rate_bound(n: int) -> float:
    """Return the 95 % upper bound on a rate of which n independent draws showed none."""
    return float(1 - (1 - 0.95) ** (1 / n)) if n else 1.0


def draws_to_see(rate: float) -> int:
    """Return the independent draws that show an event of this rate with 95 % probability."""
    return math.ceil(math.log(0.05) / math.log1p(-rate))


class Noise(_Frozen):
    """A/B pairs against between-launch A/A pairs, by one distance: mean |d| of exposed tokens.

    Attributes
    ----------
    launches : of each arm.
    within : distances between launches of one arm (A/A).
    across : distances between a launch of each arm (A/B).
    p : share of the ways to divide the launches into two arms at which A/B exceeds A/A by at
        least as much: exact, every way counted, up to ``MOST_WAYS`` of them.
    least_p : the smallest p that so many launches can give.
    separation : least A/B over greatest A/A; None where A/A is 0 and A/B isn't (infinite).
    distinguishable : whether the route stands apart from a relaunch.

    """

    launches: tuple[int, int]
    within: tuple[float, ...]
    across: tuple[float, ...]
    p: float
    least_p: float
    separation: float | None
    distinguishable: bool


def noise(distance: ArrayF8, arms: Sequence[int]) -> Noise | None:
    """Compare distances between launches of one arm with those between the arms.

    The launches are exchangeable where the route does nothing, so the arms' names are permuted over
    them, and all pairs of launches count. With two launches an arm p is never below 1/3: a route is
    then told apart by ``SEPARATION`` as well, and never by the larger of two numbers.

    Parameters
    ----------
    distance : ``[n, n]``, symmetric, of n launches.
    arms : of each launch, 0 or 1.

    Returns
    -------
    None where an arm was launched once only: there is no A/A between launches.

    """
    n, second = len(arms), sum(arms)
    if min(second, n - second) < 2:  # noqa: PLR2004 - a pair
        return None
    pairs = list(itertools.combinations(range(n), 2))
    within = [float(distance[i, j]) for i, j in pairs if arms[i] == arms[j]]
    across = [float(distance[i, j]) for i, j in pairs if arms[i] != arms[j]]
    total = math.fsum(within) + math.fsum(across)

    def excess(ours: ArrayF8) -> ArrayF8:
        apart = np.asarray((ours @ distance * (1 - ours)).sum(-1), dtype=np.float64)
        return np.asarray(apart / len(across) - (total - apart) / len(within))

    mine = np.asarray([float(bool(a)) for a in arms])
    ways = _ways(n, second)
    tolerance = 1e-12 * float(np.abs(distance).max())
    as_large = int(np.count_nonzero(excess(ways) >= excess(mine) - tolerance))
    # Drawn ways lack the one that was observed.
    drawn = len(ways) < math.comb(n, second)
    p = (as_large + drawn) / (len(ways) + drawn)
    # Where both arms have as many launches, swapping the arms' names divides them the same way.
    least = (2 if 2 * second == n else 1) / math.comb(n, second)
    greatest, lowest = max(within), min(across)
    apart = lowest > SEPARATION * greatest
    return Noise(
        launches=(n - second, second),
        within=tuple(within),
        across=tuple(across),
        p=p,
        least_p=least,
        separation=lowest / greatest if greatest > 0 else (None if lowest > 0 else 1.0),
        distinguishable=p <= LEVEL or (least > LEVEL and p <= least and apart),
    )


def _ways(n: int, second: int) -> ArrayF8:
    """Return ``[ways, n]`` of 0 and 1, ``second`` ones in each: all, or ``DRAWN`` at random."""
    if math.comb(n, second) <= MOST_WAYS:
        chosen = np.asarray(list(itertools.combinations(range(n), second)))
    else:
        rng = np.random.default_rng(0)
        chosen = rng.random((DRAWN, n)).argpartition(second, axis=1)[:, :second]
    ways = np.zeros((len(chosen), n))
    np.put_along_axis(ways, chosen, 1.0, axis=1)
    return ways


def launch_error(
    arms: Sequence[Sequence[float]], pooled: Sequence[bool] = (True, True)
) -> tuple[float, int] | None:
    """Return the standard error of a difference of two arms from their launches' means, and its df.

    sqrt(s^2 (1/a + 1/b)), s^2 pooled over the arms with a + b - 2 degrees of freedom, or of one arm
    alone with a - 1; None where no arm that counts was launched twice.

    Parameters
    ----------
    pooled : whether each arm's spread counts.

    """
    counted = [a for a, counts in zip(arms, pooled, strict=True) if counts]
    degrees = sum(len(a) - 1 for a in counted)
    if degrees < 1 or min(len(a) for a in arms) < 1:
        return None
    squares = math.fsum((x - math.fsum(a) / len(a)) ** 2 for a in counted for x in a)
    return math.sqrt(squares / degrees * math.fsum(1 / len(a) for a in arms)), degrees
