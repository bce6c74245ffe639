"""What each lane enumerates, draws and needs: one function a lane, see ``equiv.lanes``."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from equiv import strategies
from equiv.arena import dense_pitches
from equiv.case import Fill, View
from equiv.dtypes import DTYPES
from equiv.lanes import domain_points, outside_points
from equiv.large import sizes
from equiv.modes import CPU_MODES, CUDA_MODES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from equiv.lanes import Lanes, Plan
    from equiv.pairs import Operand


DEV_SHAPES = 60
"""Enumerated shapes in the quick profile."""

BEYOND = 5
"""Cases beyond one grid pass without which shapes aren't covered."""

SMALL_VALUES = 130
"""Every value of the first dimension up to this is enumerated: all tails of tiles up to 128."""

MOST_VALUES = 256
"""Up to so many values of a dimension are enumerated, each with about ``VALUE_ROWS`` rows."""

VALUE_ROWS = 2_000


def layouts(operand: Operand) -> Iterator[View]:
    """Yield views inside the domain: an offset, gaps at each level, permuted, repeated."""
    unit = max(1, operand.align_bytes // DTYPES[operand.dtype].itemsize)
    dense = dense_pitches(operand.shape)
    outer = [d for d in range(len(dense) - 1) if operand.shape[d] > 1]
    yield View(dense, operand.align_bytes)
    for d in outer:
        wider = list(dense)
        for e in range(d + 1):
            wider[e] += unit * (dense[e] // dense[d])
        yield View(tuple(wider))
        if not operand.mutable:
            yield View(tuple(0 if e == d else p for e, p in enumerate(dense)))
    if len(outer) > 1:
        shape = [operand.shape[d] for d in reversed(outer)]
        swapped = dense_pitches([*shape, operand.shape[-1]])
        pitches = list(dense)
        for d, p in zip(reversed(outer), swapped, strict=False):
            pitches[d] = p
        yield View(tuple(pitches))


def patterns(x: Lanes, plan: Plan) -> None:
    """Plan every bit pattern through every column, or group of 8 columns."""
    whole = 1 << 16
    group = whole // 8
    points = list(
        dict.fromkeys(tuple(p.items()) for p in (*domain_points(x.pair), *outside_points(x.pair)))
    )
    room = x.profile.lane_seconds * x.target.rows_per_second / 2
    fits = len(points) * whole * x.profile.sweep_seeds <= room
    kind, rows = ("sweep", whole) if fits else ("sweep8", group)
    if kind == "sweep8":
        plan.left_out.append(
            "every pattern in every single column (groups of 8 columns are swept instead): "
            "the candidate is too slow for the profile"
        )
    others = list(x.pair.dims)[1:]
    for s in range(x.profile.sweep_seeds):
        for point in map(dict, points):
            dims = x.dims_of(rows)
            plan.explicit.append(x.case({**point, **dims}, fill=Fill(kind, x.seed + s)))
            if s == 1 and others:
                value = x.pair.dims[others[0]].production[1:2] or (3,)
                dims = x.dims_of(rows + value[0], **{others[0]: value[0]})
                plan.explicit.append(x.case({**point, **dims}, fill=Fill(kind, x.seed + s)))
    for a, values in x.pair.domain_axes.items():
        if len(x.pair.axes[a]) > 1:
            plan.least |= {f"{a}={v}": 1 for v in values}
    plan.least[f"fill={kind}"] = len(list(domain_points(x.pair))) * x.profile.sweep_seeds


def shapes(x: Lanes, plan: Plan) -> None:
    """Plan dimensions around marks and powers of two, production's, every head count; refusals."""
    first, *others = x.pair.dims
    inside = list(domain_points(x.pair))
    skipped: list[dict[str, Any]] = []
    # Each enumerated shape takes its turn of the axes.
    turn = itertools.cycle(inside)
    for i, dims in enumerate(_grid(x, inside[0])):
        point = {**next(turn), **dims}
        if x.pair.rows(point) > x.max_rows:
            skipped.append(point)
            continue
        kind = strategies.FILLS[i % len(strategies.FILLS)]
        plan.explicit.append(x.case(point, fill=Fill(kind, x.seed + i)))
    if x.profile.name == "dev":
        _thin(x, plan)
    for i, dims in enumerate(_every_value(x)):
        kind = strategies.FILLS[i % len(strategies.FILLS)]
        plan.explicit.append(x.case({**next(turn), **dims}, fill=Fill(kind, x.seed + i)))
    empties = [{first: 0}, {first: 0, **dict.fromkeys(others, 12)}]
    if others:
        empties.append(dict.fromkeys(others, 0))
    for point in inside:
        plan.explicit += [x.case({**point, **x.dims_of(3, **dims)}) for dims in empties]
    plan.explicit += [x.case({**p, **x.dims_of(6)}) for p in outside_points(x.pair)]
    fitting = [p for p in skipped if x.pair.rows(p) <= x.largest_rows]
    if fitting:
        most = max(fitting, key=x.pair.rows)
        skipped.remove(most)
        plan.explicit.append(x.case(most))
    if skipped:
        largest = max(map(x.pair.rows, skipped))
        plan.left_out.append(
            f"{len(skipped)} production shapes above {x.max_rows:,} rows (largest {largest:,})"
        )
    plan.drawn = x.strategy(strided=False, modes=("eager",))
    plan.least = {"empty": 1, **x.each_axis(20)}
    if x.marks and x.drawn_rows > max(x.marks):
        plan.least["beyond one grid pass"] = BEYOND


def _thin(x: Lanes, plan: Plan) -> None:
    """Keep some of the enumerated shapes, those just beyond a grid pass among them."""
    whole = plan.explicit
    rows = {c: x.pair.rows(dict(c.point)) for c in whole}
    plan.explicit = whole[:: max(1, len(whole) // DEV_SHAPES)]
    if x.marks and x.drawn_rows > max(x.marks):
        beyond = [c for c in whole if rows[c] > max(x.marks)]
        plan.explicit += sorted(beyond, key=rows.__getitem__)[:BEYOND]
    kept = len(dict.fromkeys(plan.explicit))
    if kept < len(whole):
        plan.left_out.append(f"{len(whole) - kept} of {len(whole)} enumerated shapes")


def _grid(x: Lanes, point: dict[str, Any]) -> list[dict[str, int]]:
    """Return dimensions at marks and at production's values, for small and production's others."""
    first, *others = x.pair.dims
    grid: list[dict[str, int]] = []
    choices = [sorted({1, 2, 3, *x.pair.dims[n].production}) for n in others]
    for combination in itertools.product(*choices):
        fixed = dict(zip(others, combination, strict=True))
        inner = math.prod(combination)
        for rows in x.marks:
            grid += [{first: max(rows // inner + d, 0), **fixed} for d in (-1, 0, 1, 2)]
        grid += [{first: t, **fixed} for t in (1, 2, 3, *x.pair.dims[first].production)]
    grid += _edges(x, point)
    return [dict(key) for key in dict.fromkeys(tuple(d.items()) for d in grid)]


def _edges(x: Lanes, point: dict[str, Any]) -> Iterator[dict[str, int]]:
    """Yield the first dimension small, and around powers of two: where tiles and indices end."""
    first, *others = x.pair.dims
    for width in (1, 3):
        fixed = {n: max(width, x.pair.dims[n].minimum) for n in others}
        around = {2**k + d for k in range(2, 17) for d in (-1, 0, 1)}
        for t in sorted(around | set(range(1, SMALL_VALUES + 1))):
            dims = {first: t, **fixed}
            largest = x.pair.dims[first].maximum
            if t <= largest and x.pair.rows({**point, **dims}) <= x.max_rows:
                yield dims


def _every_value(x: Lanes) -> Iterator[dict[str, int]]:
    """Yield every value of each small dimension but the first: all head counts, not some."""
    first, *others = x.pair.dims
    for n in others:
        dim = x.pair.dims[n]
        for value in range(max(1, dim.minimum), min(dim.maximum, MOST_VALUES) + 1):
            dims = x.dims_of(VALUE_ROWS if x.profile.lattice else 1, **{n: value})
            yield {**dims, first: max(dims[first], 3)}


def strides(x: Lanes, plan: Plan) -> None:
    """Plan pitches and offsets inside the domain."""
    for point in domain_points(x.pair):
        dims = x.dims_of(37, **dict.fromkeys(list(x.pair.dims)[1:], 3))
        full = {**point, **dims}
        for o in x.pair.operands(full):
            for view in (*[View(tuple(p), b) for p, b in o.layouts], *layouts(o)):
                plan.explicit.append(x.case(full, views=((o.name, view),)))
    plan.drawn = x.strategy(strided=True, modes=("eager",))
    plan.least = x.each_axis(16)
    for o in x.pair.operands({**next(domain_points(x.pair)), **x.dims_of(6)}):
        plan.least[f"{o.name} offset"] = 4
        if len(o.shape) > 1:
            plan.least[f"{o.name} strided"] = 8
            if not o.mutable:
                plan.least[f"{o.name} repeated"] = 4


def alignment(x: Lanes, plan: Plan) -> None:
    """Plan base offsets mod 32 and some aligned ones, and pitches off the alignment."""
    inside = list(domain_points(x.pair))
    for point in (*inside, *outside_points(x.pair)):
        full = {**point, **x.dims_of(6, **dict.fromkeys(list(x.pair.dims)[1:], 3))}
        operands = x.pair.operands(full)
        both = x.profile.lattice and point in inside
        for offsets in _offsets(operands, both=both):
            views = tuple(
                (o.name, View(dense_pitches(o.shape), b))
                for o, b in zip(operands, offsets, strict=True)
                if b
            )
            plan.explicit.append(x.case(full, views=views))
        for o in operands:
            plan.explicit += [x.case(full, views=((o.name, v),)) for v in _off_pitches(o)]
    plan.least = dict.fromkeys(x.each_axis(1), 16)
    if not x.profile.lattice:
        plan.left_out.append("combinations of two operands' offsets (each alone was run)")


def _offsets(operands: Sequence[Operand], *, both: bool) -> list[tuple[int, ...]]:
    """Return base offsets in bytes: of each operand alone, and of each two of them if ``both``."""
    steps = [range(0, 32, DTYPES[o.dtype].itemsize) for o in operands]
    # Two more that are multiples of 16: where others crash, and aren't run, what is left must do.
    found = [{i: offset} for i, own in enumerate(steps) for offset in (*own, 48, 80)]
    for i, j in itertools.combinations(range(len(operands)), 2) if both else ():
        found += [{i: a, j: b} for a, b in itertools.product(steps[i][:16], steps[j][:16])]
    return list(dict.fromkeys(tuple(f.get(i, 0) for i in range(len(operands))) for f in found))


def _off_pitches(operand: Operand) -> Iterator[View]:
    """Yield views whose pitches are off the dense ones by 1, 2, 4 and 8 elements, a level each."""
    dense = dense_pitches(operand.shape)
    for d in range(len(operand.shape) - 1):
        for extra in (1, 2, 4, 8) if operand.shape[d] > 1 else ():
            pitches = list(dense)
            for outer in range(d + 1):
                pitches[outer] += extra * (dense[outer] // dense[d])
            yield View(tuple(pitches))


def modes(x: Lanes, plan: Plan) -> None:
    """Plan every mode that the device has."""
    modes = [m for m in CPU_MODES if m != "eager"]
    if x.target.cuda:
        modes += [m for m in CUDA_MODES if m != "second_device" or x.target.devices > 1]
    left = [m for m in CUDA_MODES if m not in modes]
    if left:
        why = "one GPU alone" if x.target.cuda else "no GPU"
        plan.left_out.append(f"modes {', '.join(left)} ({why})")
    others = list(x.pair.dims)[1:]
    for mode in modes:
        for i, point in enumerate(domain_points(x.pair)):
            sizes = [x.dims_of(37, **dict.fromkeys(others, 3))]
            if x.marks and max(x.marks) + 64 < x.drawn_rows and mode != "hog":
                sizes.append(x.dims_of(max(x.marks) + 30, **dict.fromkeys(others, 12)))
            for dims in sizes:
                fill = Fill("near" if i % 2 else "bits", x.seed + i)
                plan.explicit.append(x.case({**point, **dims}, mode=mode, fill=fill))
    plan.drawn = x.strategy(strided=True, modes=modes, max_rows=min(x.drawn_rows, 4_000))
    plan.least = {f"mode={m}": 4 for m in modes}


PLANS: dict[str, Callable[[Lanes, Plan], None]] = {
    "patterns": patterns,
    "shapes": shapes,
    "strides": strides,
    "alignment": alignment,
    "sizes": sizes,
    "modes": modes,
}
"""The lanes by name."""
