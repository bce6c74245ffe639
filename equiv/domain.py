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
    from collections.abc import Mapping, Sequence

    from equiv.case import Case, View
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
    try:
        point = _point(pair, case)
        _names(case)
        operands = pair.operands(point)
        tensors = (*[o.shape for o in operands], *[o.shape for o in pair.outputs(point)])
        if max(math.prod(shape) for shape in tensors) > MAX_ELEMENTS:
            raise UsageError("an operand or output has more than 2^40 elements")
        by_name = {o.name: o for o in operands}
        for name, view in case.views:
            _view(by_name, name, view)
        for name, index, bits in case.overrides:
            operand = by_name.get(name)
            size = math.prod(operand.shape) if operand else 0
            if operand is None or index >= size or bits >> 8 * DTYPES[operand.dtype].itemsize:
                raise UsageError(f"can't set element {index} of {name!r} to {bits:x}")
    except UsageError as e:
        raise UsageError(f"case {case}: {e}") from None
    views = dict(case.views)
    aligned = all(is_aligned(o, views.get(o.name)) for o in operands)
    return Claim(point, operands, aligned, pair.outcome(point, aligned))


def _point(pair: OpPair, case: Case) -> dict[str, Any]:
    """Return the point, checked against the pair's dimensions and axes."""
    point = dict(case.point)
    wanted = [*pair.dims, *pair.axes]
    if sorted(point) != sorted(wanted):
        has = ", ".join(point) or "nothing"
        raise UsageError(f"the point has {has}; pair {pair.name} needs {', '.join(wanted)}")
    for name, dim in pair.dims.items():
        value = point[name]
        if not isinstance(value, int) or value < 0:
            raise UsageError(f"{name} is {value!r}, expected an integer from {dim.minimum} up")
    for name, values in pair.axes.items():
        if point[name] not in values:
            known = ", ".join(map(str, values))
            raise UsageError(f"{name} is {point[name]!r}, expected one of {known}")
    if not pair.valid(point):
        raise UsageError(f"pair {pair.name} has no such combination of axes")
    return point


def _names(case: Case) -> None:
    """Check the names of mode, lane and fill."""
    if case.mode not in MODES or (case.mode in CUDA_MODES and not case.device.startswith("cuda")):
        what = "needs a GPU" if case.mode in MODES else f"is unknown; known: {', '.join(MODES)}"
        raise UsageError(f"mode {case.mode!r} {what}")
    if case.lane not in LANE_NAMES:
        raise UsageError(f"unknown lane {case.lane!r}; known: {', '.join(LANE_NAMES)}")
    if case.fill.kind not in ALL_KINDS:
        raise UsageError(f"unknown fill {case.fill.kind!r}; known: {', '.join(ALL_KINDS)}")


def _view(operands: Mapping[str, Operand], name: str, view: View) -> None:
    """Check that a view fits its operand."""
    operand = operands.get(name)
    if operand is None or len(view.pitches) != len(operand.shape):
        known = ", ".join(f"{o.name}{list(o.shape)}" for o in operands.values())
        raise UsageError(f"view of {name!r} doesn't fit; operands are {known}")
    if view.offset_bytes % DTYPES[operand.dtype].itemsize:
        raise UsageError(
            f"offset {view.offset_bytes} of {name} isn't a multiple of its element size"
        )
    if view.offset_bytes > MAX_OFFSET:
        raise UsageError(f"the offset of {name} is more than 2^30 bytes")
    if operand.mutable and overlaps(operand.shape, view.pitches):
        raise UsageError(f"{name} is written, so its elements can't overlap")
    if sum(n * p for n, p in zip(operand.shape, view.pitches, strict=True)) > MAX_SPAN:
        raise UsageError(f"the view of {name} spans more than 2^46 elements")
