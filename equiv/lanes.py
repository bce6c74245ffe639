"""The lanes of the kernel layer: families of cases with one purpose each.

========== ========================================================================================
patterns   every bit pattern through every column (or group of 8), each dtype, each axis value
shapes     dimensions around the launch plan's marks and powers of two, production's values, 0, odd
strides    pitches and offsets inside the domain: gaps, workspace slices, permuted, repeated
alignment  every base offset mod 32 and pitches off the alignment, with their declared outcome
sizes      offsets past 2^31 elements, 2^31 and 2^32 bytes
modes      inference mode, repeats, held results, a memory hog; on a GPU streams, graphs, producers
========== ========================================================================================

Each plan names what it covers, what it leaves out, and the least count of each kind of case without
which the lane is NOT COVERED.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from equiv import strategies
from equiv.arena import dense_pitches
from equiv.case import Case
from equiv.domain import LANE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hypothesis.strategies import SearchStrategy

    from equiv.pairs import OpPair
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


def domain_points(pair: OpPair) -> Iterator[dict[str, Any]]:
    """Yield every valid combination of axis values inside the domain."""
    for values in itertools.product(*pair.domain_axes.values()):
        point = dict(zip(pair.domain_axes, values, strict=True))
        if pair.valid(point):
            yield point


def outside_points(pair: OpPair) -> Iterator[dict[str, Any]]:
    """Yield combinations outside the domain, one axis off at a time."""
    for inside in domain_points(pair):
        for axis, values in pair.axes.items():
            for value in values:
                if value not in pair.domain_axes[axis]:
                    point = {**inside, axis: value}
                    if pair.valid(point):
                        yield point


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
        from equiv.plans import PLANS

        plan = Plan(lane)
        self.base = self.base.with_(lane=lane)
        PLANS[lane](self, plan)
        # Small ones first: what fails then is small, and what time runs out for is the largest.
        distinct = dict.fromkeys(plan.explicit)
        plan.explicit = sorted(distinct, key=lambda c: self.pair.rows(dict(c.point)))
        self._trim(plan)
        return plan

    def simplest(self) -> list[Case]:
        """Return one small case for each combination of the axes inside the domain."""
        dims = self.dims_of(36, **dict.fromkeys(list(self.pair.dims)[1:], 3))
        return [self.case({**p, **dims}).with_(lane="shapes") for p in domain_points(self.pair)]

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

    def dims_of(self, rows: int, **fixed: int) -> dict[str, int]:
        """Return dimensions with about so many rows: the first takes what the others leave."""
        first, *others = self.pair.dims
        point = {n: fixed.get(n, max(1, self.pair.dims[n].minimum)) for n in others}
        inner = 1
        for n in others:
            inner *= max(point[n], 1)
        point[first] = fixed.get(first, max(rows // inner, 1))
        return {n: point[n] for n in self.pair.dims}

    def case(self, point: Mapping[str, Any], **changes: Any) -> Case:
        """Return the lane's case at a point."""
        ordered = tuple((n, point[n]) for n in (*self.pair.dims, *self.pair.axes))
        return self.base.with_(point=ordered, **changes)

    def each_axis(self, count: int) -> dict[str, int]:
        """Return the least count of each value of each axis of the domain."""
        return {
            f"{a}={v}": count
            for a, values in self.pair.domain_axes.items()
            if len(self.pair.axes[a]) > 1
            for v in values
        }

    def strategy(
        self, *, strided: bool, modes: Sequence[str], max_rows: int | None = None
    ) -> SearchStrategy[Case]:
        """Return what hypothesis draws a lane's cases from."""
        return strategies.cases(
            pair=self.pair,
            base=self.base,
            marks=self.marks,
            max_rows=max_rows or self.drawn_rows,
            strided=strided,
            modes=modes,
        )


LATTICE_BYTES = 32
"""Of base offsets: the widest load of a GPU's, twice what these kernels use."""


def places_of(pair: OpPair, case: Case) -> list[str]:
    """Name where the bases and pitches of a case lie, inside the domain's axes alone.

    ``"kv_nope base 2"``: its first element lies 2 bytes off a multiple of 32; ``"k_pe pitch 4"``:
    rows are 4 elements further apart than in a dense tensor.
    """
    if any(case[a] not in values for a, values in pair.domain_axes.items()):
        return []
    shapes = {o.name: o.shape for o in pair.operands(dict(case.point))}
    found = []
    for name, view in case.views:
        dense = dense_pitches(shapes[name])
        wider = [p - d for p, d in zip(view.pitches, dense, strict=True) if p != d]
        if wider:
            found.append(f"{name} pitch {wider[-1]}")
        else:
            found.append(f"{name} base {view.offset_bytes % LATTICE_BYTES}")
    return found
