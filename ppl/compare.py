"""Comparing stored results: identity first, then the numbers that statistics need."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from equiv.document import counted
from ppl.evidence import Identity, LargestDifference, Stratum, TextResult
from ppl.runs import Run
from ppl.stats import ArrayF8
from ppl.store import Floats, Record

SHIFT_SHARE = 0.5
"""Rows shifted by one that fit at least twice as well as they stand are a shifted response."""

FAR = 1e-3
"""Nats that a row moves at least where rows stand in another order."""

FOLLOWING = 0.5
"""Least correlation of two runs on rows that no route touches. Of the same ids it is above 0.99
even with roundings of 0.1 nats a token, of others 0 but for 1 / sqrt(rows)."""
ENOUGH = 64
"""Rows from which a correlation tells that."""

Load = Callable[[Record], Floats]


def ulp_distance(a: Floats, b: Floats) -> NDArray[np.int64]:
    """Return how many float32 values lie between each pair, as int64; +0 and -0 are 0 apart."""
    ordered = []
    for x in (a, b):
        bits = x.view(np.int32).astype(np.int64)
        ordered.append(np.where(bits < 0, -(bits & 0x7FFFFFFF), bits))
    apart: NDArray[np.int64] = np.abs(ordered[0] - ordered[1])
    return apart


def ulp_histogram(a: Floats, b: Floats) -> dict[str, int]:
    """Count tokens by ULP distance: equal, then by powers of two, ``"4-7"``.

    Signed zeros are 0 ULPs apart and yet not bit-equal: they count as ``"signed zero"``.
    """
    differ = a.view(np.uint32) != b.view(np.uint32)
    counts = {"0": int(len(a) - differ.sum())}
    distance = ulp_distance(a[differ], b[differ])
    zeros = int((distance == 0).sum())
    if zeros:
        counts["signed zero"] = zeros
    if len(distance) > zeros:
        powers = np.bincount(np.frexp(distance[distance > 0].astype(np.float64))[1] - 1)
        for power, count in enumerate(powers.tolist()):
            if count:
                low, high = 2**power, 2 ** (power + 1) - 1
                counts[str(low) if low == high else f"{low}-{high}"] = count
    return counts


def ulp_order(step: str) -> int:
    """Return where a class of ``ulp_histogram`` stands: its least distance; equal bits first."""
    if step == "0":
        return -1
    return 0 if step == "signed zero" else int(step.split("-", maxsplit=1)[0])


def shifted(a: Floats, b: Floats) -> bool:
    """Whether b fits a better after a shift by one row, either way."""
    if len(a) < 3:  # noqa: PLR2004 - nothing to shift
        return False
    here = float(np.abs(a - b).mean(dtype=np.float64))
    later = float(np.abs(a[1:] - b[:-1]).mean(dtype=np.float64))
    earlier = float(np.abs(a[:-1] - b[1:]).mean(dtype=np.float64))
    return min(later, earlier) < SHIFT_SHARE * here


def permuted(a: Floats, b: Floats) -> bool:
    """Whether b is a in another order: rows of other tokens, whose mean no test of means moves.

    Rounding alone can't do it but among the few values nearest to 0, which lie closer than ``FAR``.
    """
    if len(a) == 0 or float(np.abs(a - b).max()) < FAR:
        return False
    return np.array_equal(np.sort(a.view(np.uint32)), np.sort(b.view(np.uint32)))


def unlike(a: Floats, b: Floats) -> float | None:
    """Return the correlation of untouched rows that don't follow each other; None where they do.

    A mean hides it: one text scored from other ids moves its mean by a tenth of a nat, and widens
    the interval over texts beyond any margin, which then says nothing.

    Parameters
    ----------
    a, b : of rows that no route touches, in nats.

    """
    if len(a) < ENOUGH:
        return None
    x, y = a.astype(np.float64), b.astype(np.float64)
    if float(np.abs(x - y).mean()) < FAR:
        return None
    x, y = x - x.mean(), y - y.mean()
    size = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    found = float((x * y).sum()) / size if size else 0.0
    return found if found < FOLLOWING else None


def stratum(d: ArrayF8) -> Stratum:
    """Summarise d, in nats, of one stratum of a text."""
    if not len(d):
        return Stratum(tokens=0, differing=0, mean_nats=None, mean_abs_nats=None)
    return Stratum(
        tokens=len(d),
        differing=int(np.count_nonzero(d)),
        mean_nats=float(d.mean()),
        mean_abs_nats=float(np.abs(d).mean()),
    )


def cut_distance(row: int, budget: int, rows: int) -> int | None:
    """Return the rows from a row to the nearest cut of the scheduler's; None without cuts."""
    if rows <= budget:
        return None
    last = (rows - 1) // budget * budget
    below = row // budget * budget
    near = [c for c in (below, below + budget) if 0 < c <= last]
    return min(abs(row - c) for c in near or [budget])


def largest(text: str, d: ArrayF8, record: Record) -> LargestDifference | None:
    """Return the place of the largest |d| of a text; None where nothing differs."""
    row = int(np.abs(d).argmax())
    if d[row] == 0:
        return None
    return LargestDifference(
        text=text,
        row=row,
        d_nats=float(d[row]),
        rows_to_chunk_cut=cut_distance(row, record.budget, record.rows),
        exposed=row >= record.exposed_from,
    )


@dataclass
class Compared:
    """One text's results.

    Attributes
    ----------
    means, controls : of each run, the mean log-probability of exposed and of unexposed tokens, in
        nats; NaN where there are none.
    distances : of each pair of runs, the mean exposed |d|, in nats.
    unequal : runs with a token that isn't bit-equal to the first stock run's.
    touched : of these, runs with such an unexposed token.
    misplaced : runs whose rows belong to other tokens, and how that shows.

    """

    result: TextResult
    means: dict[Run, float] = field(default_factory=dict)
    controls: dict[Run, float] = field(default_factory=dict)
    distances: dict[frozenset[Run], float] = field(default_factory=dict)
    unequal: list[Run] = field(default_factory=list)
    touched: list[Run] = field(default_factory=list)
    misplaced: dict[Run, str] = field(default_factory=dict)


def compare_text(records: Sequence[Record], load: Load) -> Compared:
    """Compare the runs of one text with each other; only this text's arrays are held.

    Parameters
    ----------
    records : of one text, at least one of each arm.
    load : returns the array of a record.

    """
    ordered = sorted(records, key=lambda r: (r.arm != "stock", r.launch, r.repeat))
    values = {r.run: load(r) for r in ordered}
    first = ordered[0]
    other = next(r for r in ordered if r.arm == "fused")
    a, b = values[first.run], values[other.run]
    d = b.astype(np.float64) - a
    exposed = first.exposed_from
    differing = int(np.count_nonzero(a.view(np.uint32) != b.view(np.uint32)))
    unequal = [r.run for r in ordered[1:] if not _bit_equal(values[r.run], a)]
    touched = [r for r in unequal if not _bit_equal(values[r][:exposed], a[:exposed])]
    means = {run: _mean(v[exposed:]) for run, v in values.items()}
    controls = {run: _mean(v[:exposed]) for run, v in values.items()}
    distances = {}
    places: list[tuple[int, int, float]] = []
    for (i, x), (j, y) in itertools.combinations(enumerate(values), 2):
        gap = np.abs(values[x][exposed:].astype(np.float64) - values[y][exposed:])
        distances[frozenset((x, y))] = float(gap.mean()) if len(gap) else math.nan
        if len(gap):
            places.append((i, j, float(gap.mean())))
    result = TextResult(
        text=first.key.text,
        rows=first.rows,
        exposed=stratum(d[exposed:]),
        unexposed=stratum(d[:exposed]),
        stock_nll_nats=-float(a.mean(dtype=np.float64)),
        fused_nll_nats=-float(b.mean(dtype=np.float64)),
        stock_perplexity=math.exp(-float(a.mean(dtype=np.float64))),
        fused_perplexity=math.exp(-float(b.mean(dtype=np.float64))),
        bit_identical=not unequal,
        differing=differing,
        largest=largest(first.key.text, d, first),
        ulp=ulp_histogram(a, b),
        difference_nats=difference(means) if exposed < first.rows else None,
        run_distances=places,
    )
    wrong = {r: "is shifted by one token" for r in unequal if shifted(a, values[r])}
    wrong |= {
        r: "has the rows in another order"
        for r in unequal
        if r not in wrong and permuted(a, values[r])
    }
    for r in unequal:
        far = unlike(a[:exposed], values[r][:exposed]) if r not in wrong else None
        if far is not None:
            wrong[r] = (
                f"is scored from other ids than {first.arm} launch {first.launch} repeat "
                f"{first.repeat}: on {exposed:,} rows that no route touches they correlate by "
                f"{far:.2f}"
            )
    return Compared(result, means, controls, distances, unequal, touched, wrong)


def _bit_equal(a: Floats, b: Floats) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def unlike_stock(done: Sequence[Compared]) -> str:
    """Say that the fused arm varies where no run of stock does; empty where stock does as well.

    What a relaunch does is known from both arms. But a fused arm whose scatter was its own floor
    would pass with whatever it does now and then, as a race does, and unexposed tokens are no part
    of a distance between launches.
    """
    for what, lists in (
        ("unexposed tokens of stock, which no route touches, are", [c.touched for c in done]),
        ("runs of stock are", [c.unequal for c in done]),
    ):
        arms = [arm for mine in lists for arm, _, _ in mine]
        if arms and "stock" not in arms:
            return (
                f"all {what} bit-equal over its launches, unlike {counted(len(arms), 'result')} of "
                "the fused arm: no noise that servers were seen to have"
            )
    return ""


def by_launch(means: dict[Run, float]) -> dict[tuple[str, int], float]:
    """Average repeats: launches of several repeats count once."""
    grouped: dict[tuple[str, int], list[float]] = {}
    for (arm, launch, _), mean in means.items():
        grouped.setdefault((arm, launch), []).append(mean)
    return {launch: math.fsum(mine) / len(mine) for launch, mine in grouped.items()}


def difference(means: dict[Run, float]) -> tuple[float, float, float]:
    """Return fused minus stock, each the mean over its launches, and the range over their pairs."""
    launches = by_launch(means)
    fused, stock = ([m for (arm, _), m in launches.items() if arm == a] for a in ("fused", "stock"))
    middle = math.fsum(fused) / len(fused) - math.fsum(stock) / len(stock)
    return middle, min(fused) - max(stock), max(fused) - min(stock)


def _mean(values: Floats) -> float:
    """Return the mean in float64, pairwise; NaN of nothing."""
    return float(values.mean(dtype=np.float64)) if len(values) else math.nan


def identity(texts: Sequence[TextResult]) -> Identity:
    """Sum up identity over texts, for the first run of each arm."""
    histogram: dict[str, int] = {}
    for t in texts:
        for name, count in t.ulp.items():
            histogram[name] = histogram.get(name, 0) + count
    places = [t.largest for t in texts if t.largest is not None]
    return Identity(
        texts=len(texts),
        identical_texts=sum(t.bit_identical for t in texts),
        tokens=sum(t.rows for t in texts),
        identical_tokens=sum(t.rows - t.differing for t in texts),
        exposed_tokens=sum(t.exposed.tokens for t in texts),
        largest=max(places, key=lambda p: abs(p.d_nats), default=None),
        ulp=dict(sorted(histogram.items(), key=lambda item: ulp_order(item[0]))),
    )
