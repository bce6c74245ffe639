"""Make a failing case small: structure first, then bytes.

Structure is hypothesis's: ``hypothesis.find`` shrinks what it drew, and a failing case of an
enumerated lane is looked for again among those no larger than it. Bytes come after: a fill of zeros
with single elements set, as few as still fail, and those as plain as still fail.
"""

from __future__ import annotations

import contextlib
import time
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import Phase, find, settings
from hypothesis.errors import Flaky, NoSuchExample

from equiv.arena import dense_pitches, overlaps, span_elements
from equiv.case import Case, Fill
from equiv.dtypes import DTYPES
from equiv.errors import UsageError
from equiv.fills import fill
from equiv.strategies import size_of, smaller

if TYPE_CHECKING:
    from collections.abc import Callable

    from equiv.pairs import OpPair

    Fails = Callable[[Case], bool]

MAX_ELEMENTS = 4096
"""Above so many input elements only those of the first difference are tried."""

MAX_TRIES = 250
"""Runs spent on the bytes of one case."""


class Deadline:
    """Answers ``fails`` until the time is up; then only what it already knows."""

    def __init__(self, fails: Fails, seconds: float, tries: int = 10_000) -> None:
        self._fails = fails
        self._end = time.monotonic() + seconds
        self._left = tries
        self.known: dict[str, bool] = {}

    def __call__(self, case: Case) -> bool:
        """Whether the case fails in the same way; False once the time is up."""
        line = str(case)
        if line not in self.known:
            if time.monotonic() > self._end or self._left <= 0:
                return False
            self._left -= 1
            try:
                self.known[line] = self._fails(case)
            except UsageError:  # an element or view that the smaller case hasn't
                self.known[line] = False
        return self.known[line]


def structure(pair: OpPair, case: Case, fails: Fails, seconds: float, options: settings) -> Case:
    """Return the smallest failing case that hypothesis finds, no larger than ``case``."""
    deadline = Deadline(fails, seconds)
    options = settings(
        options,
        max_examples=60,
        database=None,
        phases=[Phase.generate, Phase.shrink],
    )
    best = [case]

    def keep(candidate: Case) -> bool:
        failed = deadline(candidate)
        if failed and weight(pair, candidate) <= weight(pair, best[0]):
            best[0] = candidate
        return failed

    with contextlib.suppress(NoSuchExample, Flaky):
        find(smaller(pair=pair, case=case), keep, settings=options, random=Random(0))
    return descend(pair, best[0], deadline)


def descend(pair: OpPair, case: Case, fails: Deadline) -> Case:
    """Bisect each dimension down to its least failing value, the others held.

    It finds the edge of a fault that starts at some size, which random draws below it miss.
    """
    for name, dim in pair.dims.items():
        point = dict(case.point)

        def at(value: int, point: dict[str, int | str] = point, name: str = name) -> Case:
            return case.with_(point=tuple({**point, name: value}.items()))  # noqa: B023

        high = int(point[name])
        low = min(dim.minimum, high)
        if low == high:
            continue
        for value in (low, low + 1):
            if value < high and fails(at(value)):
                low = high = value
        while low + 1 < high:
            middle = (low + high) // 2
            if fails(at(middle)):
                high = middle
            else:
                low = middle
        case = at(high)
    return case


def weight(pair: OpPair, case: Case) -> tuple[int, int, int, int]:
    """Order cases by size: rows, then the first dimension, then views and mode."""
    point = dict(case.point)
    first = point[next(iter(pair.dims))]
    return (
        pair.rows(point),
        int(first),
        sum(v.offset_bytes + sum(v.pitches) for _, v in case.views) + len(case.views),
        int(case.mode != "eager"),
    )


def contents(pair: OpPair, case: Case) -> dict[str, tuple[np.ndarray, str]]:
    """Return each operand's elements, flat in its logical order, and its dtype."""
    found = {}
    views = dict(case.views)
    for i, o in enumerate(pair.operands(dict(case.point))):
        d = DTYPES[o.dtype]
        pitches = views[o.name].pitches if o.name in views else dense_pitches(o.shape)
        shape = o.shape
        if overlaps(o.shape, pitches):
            shape = (span_elements(o.shape, pitches),)
        bits = fill(case.fill.kind, shape, d, case.fill.seed, i)
        if shape != o.shape:
            steps = tuple(p * d.itemsize for p in pitches)
            bits = np.lib.stride_tricks.as_strided(bits, o.shape, steps)
        flat = np.array(bits).reshape(-1)
        for name, index, value in case.overrides:
            if name == o.name:
                flat[index] = value
        found[o.name] = (flat, o.dtype)
    return found


def bytes_(
    pair: OpPair, case: Case, fails: Fails, seconds: float, at: tuple[str, tuple[int, ...]] | None
) -> Case:
    """Return the failing case with as few set elements as still fail, or ``case`` unchanged.

    Parameters
    ----------
    at : output and index of the first difference, whose source elements are tried first.

    """
    deadline = Deadline(fails, seconds, MAX_TRIES)
    empty = case.with_(fill=Fill("zero"), overrides=())
    if deadline(empty):
        return empty
    held = contents(pair, case)
    everything = (
        [
            (name, int(i), int(flat[i]))
            for name, (flat, _) in held.items()
            for i in np.flatnonzero(flat)
        ]
        if sum(len(f) for f, _ in held.values()) <= MAX_ELEMENTS
        else []
    )
    for start in (_sources(pair, case, held, at), everything):
        if start and deadline(empty.with_(overrides=tuple(start))):
            fewest = _fewest(empty, start, deadline)
            return compact(pair, _plainest(empty, fewest, held, deadline), deadline)
    return case


def compact(pair: OpPair, case: Case, fails: Deadline) -> Case:
    """Move a single set element to its operand's first row, and try fewer rows."""
    if len(case.overrides) != 1:
        return case
    ((name, index, bits),) = case.overrides
    shape = next(o.shape for o in pair.operands(dict(case.point)) if o.name == name)
    moved = case.with_(overrides=((name, index % max(shape[-1], 1), bits),))
    if not fails(moved):
        return case
    return descend(pair, moved, fails)


def _sources(
    pair: OpPair,
    case: Case,
    held: dict[str, tuple[np.ndarray, str]],
    at: tuple[str, tuple[int, ...]] | None,
) -> list[tuple[str, int, int]]:
    """Return the input element from which the first differing output element comes."""
    if at is None:
        return []
    point = dict(case.point)
    ids, start, ranges = {}, 0, {}
    for o in pair.operands(point):
        size = held[o.name][0].size
        ids[o.name] = np.arange(start, start + size, dtype=np.int64).reshape(o.shape)
        ranges[o.name] = start
        start += size
    layout = pair.layout(ids, point)
    if at[0] not in layout:
        return []
    source = int(layout[at[0]][at[1]])
    for name, begin in ranges.items():
        flat = held[name][0]
        if begin <= source < begin + flat.size:
            return [(name, source - begin, int(flat[source - begin]))]
    return []


def _fewest(
    empty: Case, start: list[tuple[str, int, int]], fails: Deadline
) -> list[tuple[str, int, int]]:
    """Delta debugging (Zeller and Hildebrandt, 2002): drop ever smaller chunks."""
    kept, chunk = list(start), max(1, len(start) // 2)
    while len(kept) > 1:
        i, dropped = 0, False
        while i < len(kept):
            fewer = kept[:i] + kept[i + chunk :]
            if fewer and fails(empty.with_(overrides=tuple(fewer))):
                kept, dropped = fewer, True
            else:
                i += chunk
        if chunk == 1 and not dropped:
            break
        chunk = max(1, chunk // 2)
    return kept


def _plainest(
    empty: Case,
    kept: list[tuple[str, int, int]],
    held: dict[str, tuple[np.ndarray, str]],
    fails: Deadline,
) -> Case:
    """Replace each element by 1.0, or by fewer set bits, where it still fails."""
    for i, (name, index, bits) in enumerate(kept):
        d = DTYPES[held[name][1]]
        one = int(fill("one", (1,), d, 0, 0)[0])
        now = bits
        for bit in (None, *range(8 * d.itemsize)):
            plain = one if bit is None else now & ~(1 << bit)
            if plain in {0, now}:
                continue
            trial = [*kept[:i], (name, index, plain), *kept[i + 1 :]]
            if fails(empty.with_(overrides=tuple(trial))):
                kept, now = trial, plain
            if now == one:
                break
    return empty.with_(overrides=tuple(kept))


def affordable(pair: OpPair, case: Case) -> bool:
    """Whether a case's elements are few enough to be generated and searched in this process."""
    return size_of(pair, dict(case.point)) <= MAX_SEARCHED


def kept(pair: OpPair, case: Case) -> str:
    """Say why a failing case's inputs stayed as they were drawn."""
    if not affordable(pair, case):
        return f"its inputs stay as drawn: more than {MAX_SEARCHED:,} elements"
    return "its inputs stay as drawn: with zeros but for some elements it wasn't seen to fail"


MAX_SEARCHED = 1 << 26
"""Input elements above which a case's bytes are left as they are."""
