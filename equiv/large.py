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
"""Memory of a case with large outputs, in sizes of them: expected, actual, and what ops need."""

INPUT_COPIES = 2.0
"""And in sizes of its inputs: what the candidate sees, and what that must still be afterwards."""

HEAVY = 2.0
"""Inputs of a case with large outputs, in sizes of these, above which it takes other dimensions."""


@dataclass(frozen=True)
class Large:
    """A case with large operands or outputs: what of it is, and the bytes of each kind."""

    case: Case
    what: str
    input_bytes: int
    output_bytes: int

    @property
    def needed(self) -> int:
        """About how much memory it takes, in bytes."""
        return int(INPUT_COPIES * self.input_bytes + OUTPUT_COPIES * self.output_bytes)


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
        others = {n: x.pair.dims[n].production[-1] for n in list(x.pair.dims)[1:]}
        widest = _widest(x, point, others)
        row_bytes = widest.shape[-1] * DTYPES[widest.dtype].itemsize
        dims = x.dims_of(((1 << 32) + (1 << 24)) // row_bytes, **others)
        yield _large(x, point | dims, f"{widest.name} past 2^32 bytes, dense", overlap=False)


def _large_output(x: Lanes, point: dict[str, Any]) -> Large:
    """Return a point's case whose widest output is large.

    As much as can be of the first dimension, unless inputs whose rows can't overlap grow with that
    one too far beyond the outputs.
    """
    found = None
    for others in _inner(x.pair):
        widest = _widest(x, point, others)
        size, columns = DTYPES[widest.dtype].itemsize, widest.shape[-1]
        elements = max(1 << 31, (1 << 32) // size if x.target.cuda else 0)
        full = point | x.dims_of(elements // columns + 4096, **others)
        found = _large(x, full, f"{widest.name} past 2^31 elements")
        if found.input_bytes <= HEAVY * found.output_bytes:
            break
    assert found is not None
    return found


def _large_writes(x: Lanes, point: dict[str, Any], large: Case) -> Iterator[Large]:
    """Yield a case with more than 2^31 elements of each operand that the op writes, a cache say.

    None of one that the case with large outputs has as large, or that doesn't grow with the rows.
    """

    def written(at: dict[str, Any]) -> dict[str, int]:
        return {o.name: math.prod(o.shape) for o in x.pair.operands(at) if o.mutable}

    rows = 1 << 16
    for name, size in written(point | x.dims_of(rows)).items():
        full = point | x.dims_of((rows << 31) // max(size, 1) + 4096)
        if written(dict(large.point))[name] <= 1 << 31 < written(full)[name]:
            yield _large(x, full, f"{name} past 2^31 elements")


def _large(x: Lanes, full: dict[str, Any], what: str, *, overlap: bool = True) -> Large:
    """Return the case at a point, the rows of its inputs overlapping where they may."""
    views, inputs = [], 0
    for o in x.pair.operands(full):
        itemsize, pitches = DTYPES[o.dtype].itemsize, dense_pitches(o.shape)
        if overlap and not o.mutable and len(o.shape) > 1:
            pitches = (max(1, o.align_bytes // itemsize), *pitches[1:])
            views.append((o.name, View(pitches)))
        inputs += span_elements(o.shape, pitches) * itemsize
    outputs = sum(math.prod(o.shape) * DTYPES[o.dtype].itemsize for o in x.pair.outputs(full))
    return Large(
        x.case(full, views=tuple(views), fill=Fill("tiled", x.seed)), what, inputs, outputs
    )


def _widest(x: Lanes, point: dict[str, Any], others: dict[str, int]) -> Output:
    """Return the output with the most columns."""
    outputs: list[Output] = list(x.pair.outputs(point | x.dims_of(1, **others)))
    return max(outputs, key=lambda o: o.shape[-1])


def _inner(pair: OpPair) -> Iterator[dict[str, int]]:
    """Yield dimensions but the first: the least there are, then those of production."""
    others = list(pair.dims)[1:]
    yield {n: max(1, pair.dims[n].minimum) for n in others}
    for values in zip(*(sorted(pair.dims[n].production) for n in others), strict=False):
        yield dict(zip(others, values, strict=True))
