"""What hypothesis draws: points, views, fills and modes. Simpler first, so that cases shrink."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from equiv.arena import dense_pitches
from equiv.case import Case, Fill, View
from equiv.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from equiv.pairs import Operand, OpPair

    Draw = Callable[[st.SearchStrategy[Any]], Any]

FILLS = ("bits", "near", "special", "rows")
MEDIAN_ROWS = 1_200
"""About where the median of drawn row counts lies: large enough for several blocks of any launch plan."""


def seeds() -> st.SearchStrategy[int]:
    """Seeds of fills."""
    return st.integers(0, 2**32 - 1)


def fills() -> st.SearchStrategy[Fill]:
    """Kinds and seeds of fills."""
    return st.builds(Fill, st.sampled_from(FILLS), seeds())


def axes(pair: OpPair) -> st.SearchStrategy[dict[str, Any]]:
    """Draw values of the axes inside the domain."""
    return st.fixed_dictionaries(
        {a: st.sampled_from(list(v)) for a, v in pair.domain_axes.items()}
    ).filter(pair.valid)


@st.composite
def points(draw: Draw, pair: OpPair, marks: Sequence[int], max_rows: int) -> dict[str, Any]:
    """Draw a point: axes, and dimensions whose product comes near a mark or is log-uniform.

    ``marks`` are row counts at which a launch plan changes. Every dimension but the first is
    small, one of production's, or anything in its range; the first takes up the rest.
    """
    point = draw(axes(pair))
    first, *others = pair.dims
    inner = 1
    for name in others:
        dim = pair.dims[name]
        small = st.integers(dim.minimum, min(dim.maximum, 33))
        value = draw(
            st.one_of(small, st.sampled_from(list(dim.production) or [dim.minimum]))
            if dim.production
            else small
        )
        point[name] = value
        inner *= max(value, 1)
    dim = pair.dims[first]
    top = max(1, min(dim.maximum, max_rows // inner))
    kind = draw(st.integers(0, 19))
    if kind in {0, 1}:
        value = draw(st.integers(dim.minimum, min(17, top)))
    elif kind == 2 and marks:  # noqa: PLR2004 - one in twenty
        mark = draw(st.sampled_from(list(marks)))
        value = mark // inner + draw(st.sampled_from([0, 1, -1, 2]))
    elif kind == 3:  # noqa: PLR2004 - one in twenty is large, log-uniform
        value = 2 ** draw(st.integers(5, max(5, top.bit_length() - 1)))
        value += draw(st.integers(0, value - 1))
    else:
        value = draw(st.integers(1, max(2, 2 * MEDIAN_ROWS // inner)))
    point[first] = max(dim.minimum, min(value, top))
    return {name: point[name] for name in (*pair.dims, *pair.axes)}


@st.composite
def view(draw: Draw, operand: Operand) -> View | None:
    """Draw an operand's view: dense, production's, gaps at any level, permuted, or repeated.

    Pitches and offset are multiples of the operand's alignment.
    """
    unit = max(1, operand.align_bytes // DTYPES[operand.dtype].itemsize)
    offset = operand.align_bytes * draw(st.integers(0, 512 // operand.align_bytes - 1))
    kind = draw(st.sampled_from(["dense", "gaps", "layout", "permuted", "repeated"]))
    outer = len(operand.shape) - 1
    if kind == "layout" and operand.layouts:
        pitches, base = draw(st.sampled_from(list(operand.layouts)))
        return View(tuple(pitches), base)
    if kind == "dense":
        return View(dense_pitches(operand.shape), offset) if offset else None
    order = list(range(outer))
    if kind == "permuted":
        order.reverse()
    pitches_of: dict[int, int] = {outer: 1}
    step = -(-operand.shape[-1] // unit) * unit
    for d in reversed(order):
        step += unit * draw(st.integers(0, 9)) if kind != "permuted" or draw(st.booleans()) else 0
        pitches_of[d] = step
        step *= max(operand.shape[d], 1)
    if kind == "repeated" and outer:
        pitches_of[draw(st.integers(0, outer - 1))] = 0
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
    point = draw(points(pair, marks, max_rows))
    views = []
    if strided:
        for operand in pair.operands(point):
            drawn = draw(view(operand))
            if drawn is not None:
                views.append((operand.name, drawn))
    mode = draw(st.sampled_from(list(modes)))
    return base.with_(
        point=tuple(point.items()), views=tuple(views), fill=draw(fills()), mode=mode
    )


@st.composite
def smaller(draw: Draw, *, pair: OpPair, case: Case) -> Case:
    """Draw a case no larger than one that failed, for hypothesis to shrink."""
    point: dict[str, Any] = dict(case.point)
    for name, dim in pair.dims.items():
        value = point[name]
        low = min(dim.minimum, value)
        point[name] = draw(st.integers(low, value))
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
