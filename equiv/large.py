"""What the lane ``sizes`` plans: offsets past 2^31 and 2^32, by pitch alone and in full."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from equiv.arena import dense_pitches, span_elements
from equiv.case import Fill, View
from equiv.dtypes import DTYPES
from equiv.lanes import domain_points

if TYPE_CHECKING:
    from collections.abc import Iterator

    from equiv.case import Case
    from equiv.lanes import Lanes, Plan
    from equiv.pairs import OpPair, Output

FAR_PITCH = 1 << 28
FAR_ROWS = 18
"""Rows a pitch of 2^28 elements apart: the last lies past 2^32 elements."""

OUTPUT_COPIES = 3.0
"""Memory of a case, in sizes of what it writes: expected, actual, and the other colour or ops."""

INPUT_COPIES = 2.0
"""And in sizes of its inputs: what the candidate sees, and what that must still be afterwards."""

PROBE_ROWS = 1 << 16
"""Rows at which the size of a tensor is looked at, to tell how many it takes."""

MORE_ROWS = 4096
"""More than it takes."""

HEAVY = 2.0
"""Inputs of a case with large outputs, in sizes of these, above which it takes other dimensions."""


@dataclass(frozen=True)
class Large:
    """A case with large operands or outputs: what of it is, and the bytes of each kind.

    ``written_bytes`` are those of the operands that the op may write, which the inputs include.
    """

    case: Case
    what: str
    input_bytes: int
    output_bytes: int
    written_bytes: int

    @property
    def needed(self) -> int:
        """About how much memory it takes, in bytes."""
        compared = self.output_bytes + self.written_bytes
        return int(INPUT_COPIES * self.input_bytes + OUTPUT_COPIES * compared)


def sizes(x: Lanes, plan: Plan) -> None:
    """Plan offsets past 2^31 and 2^32: of inputs by pitch alone, of outputs in full."""
    for point, name in itertools.product(domain_points(x.pair), x.pair.dims):
        # Input offsets past 2^31 and 2^32 elements, by pitch alone: few rows are touched.
        full = {**point, **dict.fromkeys(x.pair.dims, 2), name: FAR_ROWS}
        for o in x.pair.operands(full):
            needed = FAR_ROWS * FAR_PITCH * DTYPES[o.dtype].itemsize
            fits = not x.target.cuda or 3 * needed <= x.target.memory_bytes
            for d in (d for d, n in enumerate(o.shape[:-1]) if n == FAR_ROWS):
                if not fits:
                    plan.left_out.append(
                        f"{o.name} by a pitch of 2^28 (needs {3 * needed >> 30} GiB)"
                    )
                    continue
                pitches = [FAR_PITCH if e == d else p for e, p in enumerate(dense_pitches(o.shape))]
                plan.explicit.append(x.case(full, views=((o.name, View(tuple(pitches))),)))
    if x.profile.dense_sizes or (x.target.cuda and x.profile.largest_rows):
        for found in _in_full(x):
            if 0 < x.target.memory_bytes < found.needed:
                plan.left_out.append(f"{found.what} (needs {found.needed >> 30} GiB)")
            else:
                plan.explicit.append(found.case)
    else:
        plan.left_out.append("outputs past 2^31 elements (nightly, or gate on a GPU)")
    plan.least = x.each_axis(1)


def _in_full(x: Lanes) -> Iterator[Large]:
    """Yield outputs past 2^31 elements and 2^32 bytes, of overlapping input rows; dense once."""
    for point in domain_points(x.pair):
        large = _large_output(x, point)
        yield large
        if x.target.cuda:
            yield from _large_writes(x, point, large.case)
    if x.target.cuda:
        point = next(domain_points(x.pair))
        inner = list(x.pair.dims)[1:]
        others = {n: (x.pair.dims[n].production or (1,))[-1] for n in inner}
        widest = _widest(x, point, others)
        full = _past(x, point, (1 << 32) // DTYPES[widest.dtype].itemsize, widest.name, others)
        yield _large(x, full, f"{widest.name} past 2^32 bytes, dense", overlap=False)


def _large_output(x: Lanes, point: dict[str, Any]) -> Large:
    """Return a point's case whose widest output is large.

    As much as can be of the first dimension, unless inputs whose rows can't overlap grow with that
    one too far beyond the outputs.
    """
    found = None
    for others in _inner(x.pair):
        widest = _widest(x, point, others)
        size = DTYPES[widest.dtype].itemsize
        elements = max(1 << 31, (1 << 32) // size if x.target.cuda else 0)
        full = _past(x, point, elements, widest.name, others)
        found = _large(x, full, f"{widest.name} past 2^31 elements")
        if found.input_bytes <= HEAVY * found.output_bytes:
            break
    assert found is not None
    return found


def _large_writes(x: Lanes, point: dict[str, Any], large: Case) -> Iterator[Large]:
    """Yield a case with more than 2^31 elements of each operand that the op writes, a cache say.

    None of one that the case with large outputs has as large, or that doesn't grow with the rows.
    """
    for o in x.pair.operands(point | x.dims_of(1)):
        full = _past(x, point, 1 << 31, o.name, {}) if o.mutable else {}
        if full and _size(x, dict(large.point), o.name) <= 1 << 31 < _size(x, full, o.name):
            yield _large(x, full, f"{o.name} past 2^31 elements")


def _size(x: Lanes, point: dict[str, Any], name: str) -> int:
    """Return the elements of an operand or output at a point."""
    shapes = {o.name: o.shape for o in x.pair.operands(point)}
    shapes |= {o.name: o.shape for o in x.pair.outputs(point)}
    return math.prod(shapes[name])


def _past(
    x: Lanes, point: dict[str, Any], elements: int, name: str, others: dict[str, int]
) -> dict[str, Any]:
    """Return a point with so many rows that the named tensor has more than ``elements``.

    It may have any shape: what it has at fewer rows says how many it takes.
    """
    dims = x.dims_of(PROBE_ROWS, **others)
    rows, inner = math.prod(dims.values()), math.prod(list(dims.values())[1:])
    wanted = elements * rows // max(_size(x, point | dims, name), 1)
    return point | x.dims_of(wanted + max(MORE_ROWS, inner), **others)


def _large(x: Lanes, full: dict[str, Any], what: str, *, overlap: bool = True) -> Large:
    """Return the case at a point, the rows of its inputs overlapping where they may."""
    views, inputs, written = [], 0, 0
    for o in x.pair.operands(full):
        itemsize, pitches = DTYPES[o.dtype].itemsize, dense_pitches(o.shape)
        if overlap and not o.mutable and len(o.shape) > 1:
            pitches = (max(1, o.align_bytes // itemsize), *pitches[1:])
            views.append((o.name, View(pitches)))
        inputs += span_elements(o.shape, pitches) * itemsize
        written += math.prod(o.shape) * itemsize * o.mutable
    outputs = sum(math.prod(o.shape) * DTYPES[o.dtype].itemsize for o in x.pair.outputs(full))
    case = x.case(full, views=tuple(views), fill=Fill("tiled", x.seed))
    return Large(case, what, inputs, outputs, written)


def _widest(x: Lanes, point: dict[str, Any], others: dict[str, int]) -> Output:
    """Return the output with the most columns."""
    outputs: list[Output] = list(x.pair.outputs(point | x.dims_of(1, **others)))
    return max(outputs, key=lambda o: o.shape[-1])


def _inner(pair: OpPair) -> Iterator[dict[str, int]]:
    """Yield dimensions but the first: the least there are, then those of production, if any."""
    others = list(pair.dims)[1:]
    yield {n: max(1, pair.dims[n].minimum) for n in others}
    for values in zip(*(sorted(pair.dims[n].production) for n in others), strict=False):
        yield dict(zip(others, values, strict=True))
