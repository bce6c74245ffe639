"""What a case claims: its point, whether its views are aligned, and the declared outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from equiv.arena import is_aligned, overlaps
from equiv.dtypes import DTYPES
from equiv.errors import UsageError
from equiv.fills import ALL_KINDS
from equiv.modes import CUDA_MODES, MODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equiv.case import Case
    from equiv.pairs import Operand, OpPair

MAX_ELEMENTS = 1 << 40
"""Elements of one tensor, beyond which no host has the memory."""

MAX_OFFSET = 1 << 30
"""Bytes of offset that a base may have."""

LANE_NAMES = ("patterns", "shapes", "strides", "alignment", "sizes", "modes")
"""The lanes that a case may name; ``equiv.lanes`` describes them."""

MAX_SPAN = 1 << 46
"""Elements that a view may span at the most: beyond it no address space has room."""


@dataclass(frozen=True)
class Claim:
    """A case's point as a mapping, its operands, its alignment and outcome."""

    point: dict[str, Any]
    operands: Sequence[Operand]
    aligned: bool
    outcome: str


def claim_of(pair: OpPair, case: Case) -> Claim:
    """Work out what is claimed for a case.

    Raises
    ------
    UsageError : the case names a dimension, axis, operand, fill or element that the pair hasn't.

    """
    point = dict(case.point)
    wanted = [*pair.dims, *pair.axes]
    if sorted(point) != sorted(wanted):
        msg = f"case {case}: the point has {', '.join(point) or 'nothing'}; pair {pair.name} needs {', '.join(wanted)}"
        raise UsageError(msg)
    for name, dim in pair.dims.items():
        value = point[name]
        if not isinstance(value, int) or value < 0:
            msg = f"case {case}: {name} is {value!r}, expected an integer from {dim.minimum} up"
            raise UsageError(msg)
    for name, values in pair.axes.items():
        if point[name] not in values:
            msg = f"case {case}: {name} is {point[name]!r}, expected one of {', '.join(map(str, values))}"
            raise UsageError(msg)
    if not pair.valid(point):
        msg = f"case {case}: pair {pair.name} has no such combination of axes"
        raise UsageError(msg)
    if case.mode not in MODES or (case.mode in CUDA_MODES and not case.device.startswith("cuda")):
        what = "needs a GPU" if case.mode in MODES else f"is unknown; known: {', '.join(MODES)}"
        raise UsageError(f"case {case}: mode {case.mode!r} {what}")
    if case.lane not in LANE_NAMES:
        raise UsageError(f"case {case}: unknown lane {case.lane!r}; known: {', '.join(LANE_NAMES)}")
    operands = pair.operands(point)
    if max(math.prod(t.shape) for t in (*operands, *pair.outputs(point))) > MAX_ELEMENTS:
        raise UsageError(f"case {case}: an operand or output has more than 2^40 elements")
    by_name = {o.name: o for o in operands}
    views = dict(case.views)
    for name, view in views.items():
        if name not in by_name or len(view.pitches) != len(by_name[name].shape):
            msg = f"case {case}: view of {name!r} doesn't fit; operands are {', '.join(f'{o.name}{list(o.shape)}' for o in operands)}"
            raise UsageError(msg)
        if view.offset_bytes % DTYPES[by_name[name].dtype].itemsize:
            msg = f"case {case}: offset {view.offset_bytes} of {name} isn't a multiple of its element size"
            raise UsageError(msg)
        if view.offset_bytes > MAX_OFFSET:
            raise UsageError(f"case {case}: the offset of {name} is more than 2^30 bytes")
        if by_name[name].mutable and overlaps(by_name[name].shape, view.pitches):
            raise UsageError(f"case {case}: {name} is written, so its elements can't overlap")
        if sum(n * p for n, p in zip(by_name[name].shape, view.pitches, strict=True)) > MAX_SPAN:
            msg = f"case {case}: the view of {name} spans more than 2^46 elements"
            raise UsageError(msg)
    if case.fill.kind not in ALL_KINDS:
        msg = f"case {case}: unknown fill {case.fill.kind!r}; known: {', '.join(ALL_KINDS)}"
        raise UsageError(msg)
    for name, index, bits in case.overrides:
        operand = by_name.get(name)
        size = 1
        for extent in operand.shape if operand else ():
            size *= extent
        if operand is None or index >= size or bits >> 8 * DTYPES[operand.dtype].itemsize:
            msg = f"case {case}: can't set element {index} of {name!r} to {bits:x}"
            raise UsageError(msg)
    aligned = all(is_aligned(o, views.get(o.name)) for o in operands)
    return Claim(point, operands, aligned, pair.outcome(point, aligned))
