"""What a chart draws of many tokens: an envelope that hides no extreme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppl.stats import ArrayF8

BINS = 320
"""Bins of a text's rows: about a pixel or two each."""
DECADES = 5
"""Powers of ten that a signed axis shows beyond its linear middle, at most."""


@dataclass(frozen=True)
class Bin:
    """Rows ``first`` to ``last``, the least and greatest difference, and the row of the largest."""

    first: int
    last: int
    low: float
    high: float
    row: int


def envelope(d: ArrayF8, bins: int = BINS) -> list[Bin]:
    """Divide the rows of d evenly, and keep the extremes of each part, of both signs.

    At most ``bins`` rows are kept as they are, one a bin.
    """
    rows = len(d)
    starts = np.unique(np.linspace(0, rows, min(bins, rows), endpoint=False).astype(np.int64))
    low, high = np.minimum.reduceat(d, starts), np.maximum.reduceat(d, starts)
    ends = np.append(starts[1:], rows)
    made = []
    for first, end, least, most in zip(starts, ends, low, high, strict=True):
        row = int(first + np.abs(d[first:end]).argmax())
        made.append(Bin(int(first), int(end - 1), float(least), float(most), row))
    return made


def signed_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return a symmetric logarithmic axis for values of both signs: linear part, end and ticks.

    The axis is linear between -c and c, and logarithmic beyond. c is the power of ten at or below
    the median of the values that aren't 0, so that half of them lie beyond it, but no more than
    ``DECADES`` below the greatest.
    """
    sizes = sorted(abs(v) for v in values if v)
    if not sizes:
        return 1.0, 1.0, [0.0]
    top = math.ceil(math.log10(sizes[-1]) - 1e-9)
    power = min(math.floor(math.log10(sizes[len(sizes) // 2])), top - 1)
    power = max(power, top - DECADES)
    ticks = [10.0**k for k in range(power, top + 1)]
    return 10.0**power, sizes[-1], [-t for t in reversed(ticks)] + [0.0, *ticks]
