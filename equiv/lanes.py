"""The lanes of the kernel layer: families of cases with one purpose each.

========== ==========================================================================================
patterns   every bit pattern through every column (or group of 8), each dtype, each axis value
shapes     dimensions around the launch plan's marks and powers of two, production's values, 0, odd
strides    pitches and offsets inside the domain: gaps, workspace slices, permuted, repeated
alignment  every base offset mod 32 and pitches off the alignment, with their declared outcome
sizes      offsets past 2^31 elements, 2^31 and 2^32 bytes
modes      inference mode, repeats, held results, a memory hog; on a GPU streams, graphs, producers
========== ==========================================================================================

Each plan names what it covers, what it leaves out, and the least count of each kind of case without
which the lane is NOT COVERED.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from equiv import strategies
from equiv.arena import dense_pitches
from equiv.case import Case, Fill, View
from equiv.domain import LANE_NAMES
from equiv.dtypes import DTYPES
from equiv.modes import CPU_MODES, CUDA_MODES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hypothesis.strategies import SearchStrategy

    from equiv.pairs import Operand, OpPair
    from equiv.profiles import Profile

LANES = LANE_NAMES

DEFAULT_SMS = 132
"""Multiprocessors that launch plans are drawn for where there is no GPU: an H100's or H200's."""


@dataclass(frozen=True)
class Target:
    """Where cases run: device, its multiprocessors and memory, and how fast the candidate is."""

    device: str
    multiprocessors: int = DEFAULT_SMS
    devices: int = 0
    memory_bytes: int = 0
    rows_per_second: float = float("inf")

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device.startswith("cuda")


@dataclass
class Plan:
    """What one lane runs.

    Attributes
    ----------
    explicit : enumerated cases, all run.
    drawn : what hypothesis draws from, or None.
    least : kind of case to the least count; kinds are those of ``kinds_of``.
    left_out : what the lane would cover elsewhere, with the reason.

    """

    lane: str
    explicit: list[Case] = field(default_factory=list)
    drawn: SearchStrategy[Case] | None = None
    least: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def kinds_of(pair: OpPair, case: Case, marks: Sequence[int]) -> list[str]:
    """Name the kinds that a case counts for: its axes, mode, fill, extremes and layouts."""
    point = dict(case.point)
    kinds = [f"{a}={point[a]}" for a in pair.axes if len(pair.axes[a]) > 1]
    kinds += [f"mode={case.mode}", f"fill={case.fill.kind}"]
    rows = pair.rows(point)
    if rows == 0:
        kinds.append("empty")
    if marks and rows > max(marks):
        kinds.append("beyond one grid pass")
    for operand in pair.operands(point):
        v = dict(case.views).get(operand.name)
        if v is None:
            continue
        if any(p == 0 for p in v.pitches):
            kinds.append(f"{operand.name} repeated")
        elif v.pitches != dense_pitches(operand.shape):
            kinds.append(f"{operand.name} strided")
        if v.offset_bytes % 512:
            kinds.append(f"{operand.name} offset")
    return kinds


def _domain(pair: OpPair) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*pair.domain_axes.values()):
        point = dict(zip(pair.domain_axes, values, strict=True))
        if pair.valid(point):
            yield point


def _outside(pair: OpPair) -> Iterator[dict[str, Any]]:
    """Points of the axes outside the domain, one axis off at a time."""
    for inside in _domain(pair):
        for axis, values in pair.axes.items():
            for value in values:
                if value not in pair.domain_axes[axis]:
                    point = {**inside, axis: value}
                    if pair.valid(point):
                        yield point


def _case(base: Case, pair: OpPair, point: dict[str, Any], **changes: Any) -> Case:
    ordered = tuple((n, point[n]) for n in (*pair.dims, *pair.axes))
    return base.with_(point=ordered, **changes)


def _layouts(operand: Operand) -> Iterator[View]:
    """Views of an operand inside the domain: an offset, gaps at each level, permuted, repeated."""
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


class Lanes:
    """Makes the plans of a pair for a target and profile.

    Parameters
    ----------
    pair, target, profile : what is run, where, and how much.
    candidate : its name, which cases carry.
    seed : of explicit fills and of the drawing.

    """

    def __init__(
        self, pair: OpPair, target: Target, profile: Profile, candidate: str, seed: int
    ) -> None:
        self.pair = pair
        self.target = target
        self.profile = profile
        self.seed = seed
        self.marks = tuple(pair.rows_per_pass(target.multiprocessors))
        self.base = Case(pair.name, "", (), candidate=candidate, device=target.device)
        budget = min(profile.lane_seconds / 4, 20.0) * target.rows_per_second / 2
        # A GPU runs every production shape in any profile but the quick one.
        wanted = profile.largest_rows if target.cuda and profile.largest_rows else profile.max_rows
        self.max_rows = int(min(wanted, budget))
        self.largest_rows = int(min(profile.largest_rows, budget))
        self.drawn_rows = int(min(profile.drawn_rows, max(budget / 10, 64)))

    def plan(self, lane: str) -> Plan:
        """Return the plan of a lane."""
        made: dict[str, Callable[[Plan], None]] = {
            "patterns": self._patterns,
            "shapes": self._shapes,
            "strides": self._strides,
            "alignment": self._alignment,
            "sizes": self._sizes,
            "modes": self._modes,
        }
        plan = Plan(lane)
        self.base = self.base.with_(lane=lane)
        made[lane](plan)
        plan.explicit = list(dict.fromkeys(plan.explicit))
        self._trim(plan)
        return plan

    def simplest(self) -> list[Case]:
        """Return one small case for each combination of the axes inside the domain."""
        base = self.base.with_(lane="shapes")
        dims = self._dims(36, **dict.fromkeys(list(self.pair.dims)[1:], 3))
        return [_case(base, self.pair, {**p, **dims}) for p in _domain(self.pair)]

    def _trim(self, plan: Plan) -> None:
        """Leave the largest enumerated cases out where the candidate is too slow for them all."""
        room = self.profile.lane_seconds * self.target.rows_per_second / 2
        sizes = {c: self.pair.rows(dict(c.point)) for c in plan.explicit}
        if sum(sizes.values()) <= room:
            return
        mark = max(self.marks, default=0)
        beyond = min((n for n in sizes.values() if mark < n <= 2 * mark), default=0)
        dropped = 0
        for case in sorted(plan.explicit, key=lambda c: -sizes[c]):
            if sum(sizes.values()) <= room:
                break
            if sizes[case] == beyond or case.fill.kind.startswith("sweep"):
                beyond = -1 if sizes[case] == beyond else beyond
                continue
            del sizes[case]
            dropped += 1
        plan.explicit = [c for c in plan.explicit if c in sizes]
        if dropped:
            plan.left_out.append(
                f"{dropped} of the largest enumerated cases: the candidate is too slow here"
            )

    def _dims(self, rows: int, **fixed: int) -> dict[str, int]:
        """Return dimensions with about so many rows: the first takes what the others leave."""
        first, *others = self.pair.dims
        point = {n: fixed.get(n, max(1, self.pair.dims[n].minimum)) for n in others}
        inner = 1
        for n in others:
            inner *= max(point[n], 1)
        point[first] = fixed.get(first, max(rows // inner, 1))
        return {n: point[n] for n in self.pair.dims}

    # -- the lanes -------------------------------------------------------------------

    def _patterns(self, plan: Plan) -> None:
        whole = 1 << 16
        group = whole // 8
        points = list(
            dict.fromkeys(tuple(p.items()) for p in (*_domain(self.pair), *_outside(self.pair)))
        )
        room = self.profile.lane_seconds * self.target.rows_per_second / 2
        fits = len(points) * whole * self.profile.sweep_seeds <= room
        kind, rows = ("sweep", whole) if fits else ("sweep8", group)
        if kind == "sweep8":
            plan.left_out.append(
                "every pattern in every single column (groups of 8 columns are swept instead): "
                "the candidate is too slow for the profile"
            )
        others = list(self.pair.dims)[1:]
        for s in range(self.profile.sweep_seeds):
            for point in map(dict, points):
                dims = self._dims(rows)
                plan.explicit.append(
                    _case(self.base, self.pair, {**point, **dims}, fill=Fill(kind, self.seed + s))
                )
                if s == 1 and others:
                    value = self.pair.dims[others[0]].production[1:2] or (3,)
                    dims = self._dims(rows + value[0], **{others[0]: value[0]})
                    plan.explicit.append(
                        _case(
                            self.base, self.pair, {**point, **dims}, fill=Fill(kind, self.seed + s)
                        )
                    )
        for a, values in self.pair.domain_axes.items():
            if len(self.pair.axes[a]) > 1:
                plan.least |= {f"{a}={v}": 1 for v in values}
        plan.least[f"fill={kind}"] = len(list(_domain(self.pair))) * self.profile.sweep_seeds

    def _shapes(self, plan: Plan) -> None:
        first, *others = self.pair.dims
        skipped = []
        inside = list(_domain(self.pair))
        # Each enumerated shape takes its turn of the axes; the empty and the marks take all.
        turn = itertools.cycle(inside)
        grids: list[dict[str, int]] = []
        for combination in itertools.product(
            *[sorted({1, 2, 3, *self.pair.dims[n].production}) for n in others]
        ):
            fixed = dict(zip(others, combination, strict=True))
            inner = 1
            for v in combination:
                inner *= v
            for rows in self.marks:
                grids += [{first: max(rows // inner + d, 0), **fixed} for d in (-1, 0, 1, 2)]
            grids += [{first: t, **fixed} for t in (1, 2, 3, *self.pair.dims[first].production)]
        grids += self._edges(inside[0])
        seen = set()
        for i, dims in enumerate(grids):
            key = tuple(dims.items())
            if key in seen:
                continue
            seen.add(key)
            point = {**next(turn), **dims}
            if self.pair.rows(point) > self.max_rows:
                skipped.append(key)
                continue
            plan.explicit.append(
                _case(
                    self.base,
                    self.pair,
                    point,
                    fill=Fill(strategies.FILLS[i % len(strategies.FILLS)], self.seed + i),
                )
            )
        if self.profile.name == "dev":
            plan.explicit = plan.explicit[:: max(1, len(plan.explicit) // 60)]
        for point in inside:
            empties = [{first: 0}, {first: 0, **dict.fromkeys(others, 12)}]
            if others:
                empties.append(dict.fromkeys(others, 0))
            for dims in empties:
                plan.explicit.append(
                    _case(self.base, self.pair, {**point, **self._dims(3, **dims)})
                )
        for point in _outside(self.pair):
            dims = self._dims(6)
            plan.explicit.append(_case(self.base, self.pair, {**point, **dims}))
        fitting = [
            k for k in skipped if self.pair.rows({**inside[0], **dict(k)}) <= self.largest_rows
        ]
        if fitting:
            most = max(fitting, key=lambda k: self.pair.rows({**inside[0], **dict(k)}))
            skipped.remove(most)
            plan.explicit.append(_case(self.base, self.pair, {**inside[-1], **dict(most)}))
        if skipped:
            largest = max(self.pair.rows(dict(k)) for k in skipped)
            plan.left_out.append(
                f"{len(skipped)} production shapes above {self.max_rows:,} rows (largest {largest:,})"
            )
        plan.drawn = self._strategy(strided=False, modes=("eager",))
        plan.least = {"empty": 1, **self._each_axis(20)}
        if self.marks and self.drawn_rows > max(self.marks):
            plan.least["beyond one grid pass"] = 5

    def _edges(self, point: dict[str, Any]) -> Iterator[dict[str, int]]:
        """Yield the first dimension around powers of two: where tiles and narrow indices end."""
        first, *others = self.pair.dims
        for width in (1, 3):
            fixed = {n: max(width, self.pair.dims[n].minimum) for n in others}
            for t in (2**k + d for k in range(2, 17) for d in (-1, 0, 1)):
                dims = {first: t, **fixed}
                largest = self.pair.dims[first].maximum
                if t <= largest and self.pair.rows({**point, **dims}) <= self.max_rows:
                    yield dims

    def _strides(self, plan: Plan) -> None:
        for point in _domain(self.pair):
            dims = self._dims(37, **dict.fromkeys(list(self.pair.dims)[1:], 3))
            full = {**point, **dims}
            for o in self.pair.operands(full):
                for view in (*[View(tuple(p), b) for p, b in o.layouts], *_layouts(o)):
                    plan.explicit.append(_case(self.base, self.pair, full, views=((o.name, view),)))
        plan.drawn = self._strategy(strided=True, modes=("eager",))
        plan.least = self._each_axis(16)
        for o in self.pair.operands({**next(_domain(self.pair)), **self._dims(6)}):
            plan.least[f"{o.name} offset"] = 4
            if len(o.shape) > 1:
                plan.least[f"{o.name} strided"] = 8
                if not o.mutable:
                    plan.least[f"{o.name} repeated"] = 4

    def _alignment(self, plan: Plan) -> None:
        axes = [*_domain(self.pair)]
        axes += [p for p in _outside(self.pair) if self.pair.operands({**p, **self._dims(6)})]
        for point in axes:
            dims = self._dims(6, **dict.fromkeys(list(self.pair.dims)[1:], 3))
            full = {**point, **dims}
            operands = self.pair.operands(full)
            offsets = []
            for o in operands:
                size = DTYPES[o.dtype].itemsize
                offsets.append(list(range(0, 32, size)))
            lattice: list[tuple[int, ...]] = []
            if self.profile.lattice and point in [*_domain(self.pair)]:
                lattice = list(itertools.product(*[o[: min(len(o), 16)] for o in offsets]))
            for i, own in enumerate(offsets):
                for value in own:
                    lattice.append(tuple(value if j == i else 0 for j in range(len(operands))))
            for combination in dict.fromkeys(lattice):
                views = tuple(
                    (o.name, View(dense_pitches(o.shape), b))
                    for o, b in zip(operands, combination, strict=True)
                    if b
                )
                plan.explicit.append(_case(self.base, self.pair, full, views=views))
            for o in operands:  # pitches off the alignment, one dimension at a time
                dense = dense_pitches(o.shape)
                for d in range(len(o.shape) - 1):
                    if o.shape[d] < 2:
                        continue
                    for extra in (1, 2, 4, 8):
                        pitches = list(dense)
                        for outer in range(d + 1):
                            pitches[outer] += extra * (dense[outer] // dense[d])
                        view = ((o.name, View(tuple(pitches))),)
                        plan.explicit.append(_case(self.base, self.pair, full, views=view))
        plan.least = dict.fromkeys(self._each_axis(1), 16)
        if not self.profile.lattice:
            plan.left_out.append("combinations of two operands' offsets (each alone was run)")

    def _sizes(self, plan: Plan) -> None:
        pitch = 1 << 28
        first = next(iter(self.pair.dims))
        for point in _domain(self.pair):
            # Input offsets past 2^31 and 2^32 elements, by pitch alone: few rows are touched.
            dims = {**self._dims(0, **dict.fromkeys(list(self.pair.dims)[1:], 2)), first: 18}
            full = {**point, **dims}
            for o in self.pair.operands(full):
                if len(o.shape) < 2:  # noqa: PLR2004 - no pitch but that of single elements
                    continue
                needed = dims[first] * pitch * DTYPES[o.dtype].itemsize
                if self.target.cuda and 3 * needed > self.target.memory_bytes:
                    plan.left_out.append(
                        f"{o.name} by a pitch of 2^28 (needs {3 * needed >> 30} GiB)"
                    )
                    continue
                dense = dense_pitches(o.shape)
                view = ((o.name, View((pitch, *dense[1:]))),)
                plan.explicit.append(_case(self.base, self.pair, full, views=view))
        self._large_outputs(plan)
        plan.least = self._each_axis(1)

    def _large_outputs(self, plan: Plan) -> None:
        """Outputs past 2^31 elements and 2^32 bytes, of overlapping input rows, and dense once."""
        first = next(iter(self.pair.dims))
        if not self.profile.dense_sizes and not (self.target.cuda and self.profile.largest_rows):
            plan.left_out.append("outputs past 2^31 elements (nightly, or gate on a GPU)")
            return
        for point in _domain(self.pair):
            one = {**point, **self._dims(1)}
            widest = max(self.pair.outputs(one), key=lambda o: o.shape[-1])
            size = DTYPES[widest.dtype].itemsize
            elements = (1 << 31) + 4096 * widest.shape[-1]
            if self.target.cuda:
                elements = max(elements, (1 << 32) // size + 4096 * widest.shape[-1])
            rows = elements // widest.shape[-1]
            dims = {**self._dims(rows), first: rows}
            full = {**point, **dims}
            views = []
            for o in self.pair.operands(full):
                if o.mutable or len(o.shape) < 2:  # noqa: PLR2004 - rows that may overlap
                    continue
                step = max(1, o.align_bytes // DTYPES[o.dtype].itemsize)
                views.append((o.name, View((step, *dense_pitches(o.shape)[1:]))))
            plan.explicit.append(
                _case(self.base, self.pair, full, views=tuple(views), fill=Fill("tiled", self.seed))
            )
        if self.target.cuda:
            point = next(_domain(self.pair))
            others = {n: self.pair.dims[n].production[-1] for n in list(self.pair.dims)[1:]}
            one = {**point, **self._dims(1, **others)}
            widest = max(self.pair.outputs(one), key=lambda o: o.shape[-1])
            row_bytes = widest.shape[-1] * DTYPES[widest.dtype].itemsize
            rows = ((1 << 32) + (1 << 24)) // row_bytes
            dims = self._dims(rows, **others)
            plan.explicit.append(
                _case(self.base, self.pair, {**point, **dims}, fill=Fill("tiled", self.seed))
            )

    def _modes(self, plan: Plan) -> None:
        modes = [m for m in CPU_MODES if m != "eager"]
        if self.target.cuda:
            modes += [m for m in CUDA_MODES if m != "second_device" or self.target.devices > 1]
        left = [m for m in CUDA_MODES if m not in modes]
        if left:
            why = "one GPU alone" if self.target.cuda else "no GPU"
            plan.left_out.append(f"modes {', '.join(left)} ({why})")
        others = list(self.pair.dims)[1:]
        for mode in modes:
            for i, point in enumerate(_domain(self.pair)):
                sizes = [self._dims(37, **dict.fromkeys(others, 3))]
                if self.marks and max(self.marks) + 64 < self.drawn_rows and mode != "hog":
                    sizes.append(self._dims(max(self.marks) + 30, **dict.fromkeys(others, 12)))
                for dims in sizes:
                    fill = Fill("near" if i % 2 else "bits", self.seed + i)
                    plan.explicit.append(
                        _case(self.base, self.pair, {**point, **dims}, mode=mode, fill=fill)
                    )
        plan.drawn = self._strategy(strided=True, modes=modes, max_rows=min(self.drawn_rows, 4_000))
        plan.least = {f"mode={m}": 4 for m in modes}

    # -- helpers ---------------------------------------------------------------------

    def _each_axis(self, count: int) -> dict[str, int]:
        return {
            f"{a}={v}": count
            for a, values in self.pair.domain_axes.items()
            if len(self.pair.axes[a]) > 1
            for v in values
        }

    def _strategy(
        self, *, strided: bool, modes: Sequence[str], max_rows: int | None = None
    ) -> SearchStrategy[Case]:
        return strategies.cases(
            pair=self.pair,
            base=self.base,
            marks=self.marks,
            max_rows=max_rows or self.drawn_rows,
            strided=strided,
            modes=modes,
        )
