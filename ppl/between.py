"""What launches do to a difference of two arms: its error, and how it joins that over texts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from scipy import optimize, special

LEAST_P = 1e-12
"""A p below it is given as it."""


class Between(BaseModel):
    """What launches do to the mean difference of two arms, in nats (``between``).

    Attributes
    ----------
    error : standard error of the mean difference from its launches, e.
    degrees : degrees of freedom of e, f.
    shared : standard error from what launches do to each text on its own, w: part of e, and of the
        spread over texts as well.

    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    error: float
    degrees: int
    shared: float


def between(arms: Sequence[NDArray[np.float64]]) -> Between | None:
    """Return what launches do, from each arm's levels by launch and text, in nats.

    With a and b launches, n texts and c = 1/a + 1/b, the analysis of variance of each arm's table
    by launch and text gives mean squares, pooled over the arms (one spread is assumed of both)::

        e^2 = c sum (mean of a launch - mean of its arm)^2 / f,  f = a + b - 2
        w^2 = c sum (residual of a launch and text)^2 / (f (n - 1)) / n

    Launches of equal bits give exactly 0. Where one arm's are, over two or more, and the other's
    aren't, one spread can't be assumed: e, f and w are then of the arm that varies, alone.

    Parameters
    ----------
    arms : of each arm ``[launches, texts]``.

    Returns
    -------
    None where no arm was launched twice.

    """
    degrees = sum(len(x) - 1 for x in arms)
    if degrees < 1 or min(len(x) for x in arms) < 1:
        return None
    texts = arms[0].shape[1]
    steady = [bool((x == x[0]).all()) for x in arms]
    if not all(steady) and any(s and len(x) > 1 for s, x in zip(steady, arms, strict=True)):
        arms = [x for s, x in zip(steady, arms, strict=True) if not s]
        degrees = sum(len(x) - 1 for x in arms)
    of_launches, of_residuals = 0.0, 0.0
    for levels in arms:
        x = levels - levels[0]  # equal launches become zeros, which no mean rounds
        residuals = x - x.mean(0)
        launches = residuals.mean(1)
        of_launches += float((launches**2).sum())
        of_residuals += float(((residuals - launches[:, None]) ** 2).sum())
    c = math.fsum(1 / len(x) for x in arms)
    residual = of_residuals / (degrees * (texts - 1)) if texts > 1 else 0.0
    return Between(
        error=math.sqrt(c * of_launches / degrees),
        degrees=degrees,
        shared=math.sqrt(c * residual / texts),
    )


def half_interval(one_sided: float, error: float, texts: int, launches: Between | None) -> float:
    """Return half the interval of a one-sided level; see ``ppl.stats.tost``."""
    t = -float(special.stdtrit(texts - 1, one_sided))
    alone = t * error
    if launches is None or not launches.error:
        return alone
    own = t * t * max(0.0, error**2 - launches.shared**2)
    every = -float(special.stdtrit(launches.degrees, one_sided)) * launches.error
    return max(alone, math.sqrt(own + every**2))


def reached(gap: float, error: float, texts: int, launches: Between) -> float:
    """Return the level whose interval just reaches from the mean to the margin, gap nats away."""
    if gap <= 0:
        return 1 - reached(-gap, error, texts, launches) if gap else 0.5

    def beyond(one_sided: float) -> float:
        return half_interval(one_sided, error, texts, launches) - gap

    return float(optimize.brentq(beyond, LEAST_P, 0.5)) if beyond(LEAST_P) > 0 else LEAST_P
