"""What hypothesis draws: points, views, fills and modes. Simpler first, so that cases shrink."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from equiv.arena import dense_pitches
from equiv.case import Case, Fill, View
from equiv.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from equiv.pairs import Operand, OpPair

    Draw = Callable[[st.SearchStrategy[Any]], Any]


@cache
def integers(low: int, high: int) -> st.SearchStrategy[int]:
    """Integers from ``low`` to ``high``, made once: building strategies costs more than drawing."""
    return st.integers(low, high)


@cache
def choice(values: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """One of some values, made once."""
    return st.sampled_from(values)


FILLS = ("bits", "near", "special", "rows")
COMMON_ROWS = (1, 64, 560, 580, 600, 640, 680, 720, 800)
"""Row counts from which most draws go up by at most a third: their median is several blocks of any
launch plan, and small enough for hundreds of cases a second."""

SEEDS = 2**32 - 1


def domain_points(pair: OpPair) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """Return every valid combination of axis values inside the domain, the simplest first."""
    combinations = itertools.product(*pair.domain_axes.values())
    points_ = (dict(zip(pair.domain_axes, values, strict=True)) for values in combinations)
    return tuple(tuple(p.items()) for p in points_ if pair.valid(p))


def points(draw: Draw, pair: OpPair, marks: Sequence[int], max_rows: int) -> dict[str, Any]:
    """Draw a point: axes, and dimensions whose product comes near a mark or is log-uniform.

    ``marks`` are row counts at which a launch plan changes. Every dimension but the first is
    small, one of production's, or anything in its range; the first takes up the rest.
    """
    point = dict(draw(choice(domain_points(pair))))
    first, *others = pair.dims
    inner = 1
    for name in others:
        dim = pair.dims[name]
        kind = draw(integers(0, 7))
        if kind > 4 and dim.production:  # noqa: PLR2004 - three in eight
            value = draw(choice(tuple(dim.production)))
        else:
            value = draw(integers(dim.minimum, dim.maximum if kind == 4 else min(dim.maximum, 33)))  # noqa: PLR2004
        point[name] = value
        inner *= max(value, 1)
    dim = pair.dims[first]
    top = max(1, min(dim.maximum, max_rows // inner))
    kind = draw(integers(0, 79))
    if kind < 8:  # noqa: PLR2004 - one in ten is tiny
        value = draw(integers(dim.minimum, min(17, top)))
    elif kind == 8 and marks:  # noqa: PLR2004 - one in eighty; the enumerated cases have them all
        mark = draw(choice(tuple(marks)))
        value = mark // inner + draw(choice((0, 1, -1, 2)))
    elif kind == 9:  # noqa: PLR2004 - one in eighty is large, log-uniform
        value = 2 ** draw(integers(5, max(5, top.bit_length() - 1)))
        value += draw(st.integers(0, value - 1))
    else:
        rows = draw(choice(COMMON_ROWS))
        value = -(-rows // inner) + draw(integers(0, max(1, rows // inner // 3)))
    point[first] = max(dim.minimum, min(value, top))
    return {name: point[name] for name in (*pair.dims, *pair.axes)}


def view(draw: Draw, operand: Operand) -> View | None:
    """Draw an operand's view: dense, production's, gaps at any level, permuted, or repeated.

    Pitches and offset are multiples of the operand's alignment. What the op writes isn't repeated.
    """
    unit = max(1, operand.align_bytes // DTYPES[operand.dtype].itemsize)
    offset = operand.align_bytes * draw(integers(0, 512 // operand.align_bytes - 1))
    kind = draw(choice(("dense", "gaps", "layout", "permuted", "repeated")))
    outer = len(operand.shape) - 1
    if outer < 1:
        kind = "dense"
    if kind == "layout" and operand.layouts:
        pitches, base = draw(choice(tuple(operand.layouts)))
        return View(tuple(pitches), base)
    if kind == "dense":
        return View(dense_pitches(operand.shape), offset) if offset else None
    order = list(range(outer))
    if kind == "permuted":
        order.reverse()
    pitches_of: dict[int, int] = {outer: 1}
    step = -(-operand.shape[-1] // unit) * unit
    for d in reversed(order):
        step += unit * draw(integers(0, 9))
        pitches_of[d] = step
        step *= max(operand.shape[d], 1)
    if kind == "repeated" and not operand.mutable:
        pitches_of[draw(integers(0, outer - 1))] = 0
    return View(tuple(pitches_of[d] for d in range(outer + 1)), offset)


@st.composite
def cases(
    draw: Draw,
    *,
    pair: OpPair,
    base: Case,
    marks: Sequence[int],
    max_rows: int,
    strided: bool,
    modes: Sequence[str],
) -> Case:
    """Draw a case of one lane."""
    point = points(draw, pair, marks, max_rows)
    views = []
    if strided:
        for operand in pair.operands(point):
            drawn = view(draw, operand)
            if drawn is not None:
                views.append((operand.name, drawn))
    mode = draw(choice(tuple(modes))) if len(modes) > 1 else modes[0]
    fill = Fill(draw(choice(FILLS)), draw(integers(0, SEEDS)))
    return base.with_(point=tuple(point.items()), views=tuple(views), fill=fill, mode=mode)


@st.composite
def smaller(draw: Draw, *, pair: OpPair, case: Case) -> Case:
    """Draw a case no larger than one that failed, for hypothesis to shrink."""
    point: dict[str, Any] = dict(case.point)
    for name, dim in pair.dims.items():
        value = point[name]
        low = min(dim.minimum, value)
        point[name] = draw(integers(low, value))
    views: list[tuple[str, View]] = []
    old = dict(case.views)
    for operand in pair.operands(point):
        v = old.get(operand.name)
        if v is None:
            continue
        keep = draw(st.sampled_from(["dense", "offset", "all"]))
        if keep == "offset" and v.offset_bytes:
            views.append((operand.name, View(dense_pitches(operand.shape), v.offset_bytes)))
        elif keep == "all":
            views.append((operand.name, v))
    mode = draw(st.sampled_from(list(dict.fromkeys(["eager", case.mode]))))
    return case.with_(point=tuple(point.items()), views=tuple(views), mode=mode)


def size_of(pair: OpPair, point: Mapping[str, Any]) -> int:
    """Return the count of input elements of a point."""
    return sum(math.prod(o.shape) for o in pair.operands(point))
