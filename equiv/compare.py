"""The one byte comparison of the project.

``torch.equal`` on fp8 is False for equal NaN bytes, and ``assert_close`` takes 00 for 80 and 7F for
FF: so elements are compared as integers of their own size, and nothing has a tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from equiv.dtypes import DTYPES, DType, decode, describe, explain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from equiv.pairs import Output


@dataclass(frozen=True)
class Difference:
    """Where and how one output departs from what is expected.

    Attributes
    ----------
    output : its name.
    elements, bytes : how many differ.
    total_elements : of the output.
    index : the first one, in the output's shape.
    place : the same in words, ``token 3, head 1, column 130 (rope)``.
    expected, actual : its bits.
    dtype : of the output.

    """

    output: str
    elements: int
    bytes: int
    total_elements: int
    index: tuple[int, ...]
    place: str
    expected: int
    actual: int
    dtype: str

    @property
    def category(self) -> str:
        """What kind of difference it is, one of ``CATEGORIES``."""
        return _category(self.expected, self.actual, DTYPES[self.dtype])

    def sentence(self) -> str:
        """Return the difference in one line."""
        dtype = DTYPES[self.dtype]
        return (
            f"{self.output}: {self.bytes:,} bytes in {self.elements:,} of "
            f"{self.total_elements:,} elements; first at {self.place}: "
            f"expected {describe(self.expected, dtype)}, got "
            f"{describe(self.actual, dtype)}: {explain(self.expected, self.actual, dtype)}"
        )


CATEGORIES = ("value", "NaN against a number", "NaN bits", "sign of zero")
"""Kinds of difference that are told apart, so that a common one doesn't hide a rare one."""


def _category(a: int, b: int, dtype: DType) -> str:
    """Name the category of two elements that differ."""
    va, vb = decode(a, dtype), decode(b, dtype)
    nans = (va != va) + (vb != vb)  # noqa: PLR0124 - NaN is the one value unequal to itself
    if nans:
        return "NaN bits" if nans > 1 else "NaN against a number"
    return "sign of zero" if va == vb == 0 else "value"


def by_category(
    expected: NDArray[Any], actual: NDArray[Any], mask: NDArray[np.bool_], dtype_name: str
) -> list[tuple[str, NDArray[np.bool_]]]:
    """Split differing elements by category: for each one met, its mask.

    Each pair of elements that occurs is looked at once, so large cases cost little more.
    """
    dtype = DTYPES[dtype_name]
    flat = np.flatnonzero(mask)
    a = expected.reshape(-1)[flat].astype(np.uint64)
    b = actual.reshape(-1)[flat].astype(np.uint64)
    shift = np.uint64(8 * min(dtype.itemsize, 4))
    keys = (a << shift) | b if dtype.itemsize <= 4 else a ^ b  # noqa: PLR2004 - 64-bit integers
    distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    names = [_category(int(a[i]), int(b[i]), dtype) for i in first]
    found = []
    for category in CATEGORIES:
        inside = np.array([n == category for n in names], dtype=bool)[inverse.reshape(-1)]
        if len(distinct) and inside.any():
            part = np.zeros(mask.size, dtype=bool)
            part[flat[inside]] = True
            found.append((category, part.reshape(mask.shape)))
    return found


def place_of(output: Output, index: tuple[int, ...]) -> str:
    """Say which element an index is: ``token 3, head 1, column 130 (rope)``."""
    words = [f"{axis} {i}" for axis, i in zip(output.axes, index, strict=True)]
    part = next((n for n, (lo, hi) in output.parts.items() if lo <= index[-1] < hi), None)
    return ", ".join(words) + (f" ({part})" if part else "")


def part_of(output: Output, column: int) -> str:
    """Name the column range of an output, ``k.rope``; the output alone where it has none."""
    part = next((n for n, (lo, hi) in output.parts.items() if lo <= column < hi), None)
    return f"{output.name}.{part}" if part else output.name


def differing(expected: NDArray[Any], actual: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Return the mask of elements whose bits differ, or None where none does.

    Parameters
    ----------
    expected, actual : arrays of bits of equal shape and dtype (``uint8``, ``uint16``, ...).

    """
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        msg = f"can't compare {expected.dtype}{expected.shape} with {actual.dtype}{actual.shape}"
        raise ValueError(msg)
    if np.array_equal(expected, actual):
        return None
    return np.asarray(expected != actual)


def summarise(
    output: Output,
    expected: NDArray[Any],
    actual: NDArray[Any],
    mask: NDArray[np.bool_],
    start: int = 0,
) -> Difference:
    """Describe the differing elements under ``mask``, which holds at least one.

    ``start`` is the place in the output's first dimension where the arrays begin.
    """
    flat = int(np.argmax(mask))
    at = tuple(int(i) for i in np.unravel_index(flat, mask.shape))
    index = (at[0] + start, *at[1:]) if at else at
    a, b = np.ascontiguousarray(expected[mask]), np.ascontiguousarray(actual[mask])
    return Difference(
        output=output.name,
        elements=len(a),
        bytes=int((a.view(np.uint8) != b.view(np.uint8)).sum()),
        total_elements=int(np.prod(output.shape, dtype=np.int64)),
        index=index,
        place=place_of(output, index),
        expected=int(expected[at]),
        actual=int(actual[at]),
        dtype=output.dtype,
    )


def voices(reference: int, candidate: int, oracle: int) -> str:
    """Say who the oracle says is wrong at one element, given its bits by each of the three."""
    if reference == oracle != candidate:
        return "the oracle agrees with the reference: the candidate is wrong"
    if candidate == oracle != reference:
        return "the oracle agrees with the candidate: the reference departs from the model"
    if candidate != oracle:
        return f"the oracle agrees with neither (it says {oracle:x})"
    return "the oracle agrees with both"
