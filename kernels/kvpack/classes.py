"""Named classes of input elements: what a declared divergence may point at.

Each class is a predicate on bit patterns, ``CLASSES[name](bits, dtype) -> bool array`` of the same
shape. They speak of one element that is converted to ``float8_e4m3fn``; an element that isn't
(e4m3 bytes of ``k_pe``) is in none of them, whatever its value. Numbers of patterns, of 65,536:

============================  =======  ======  ===================================================
class                            bf16    fp16  an element is in it when
============================  =======  ======  ===================================================
``overflow``                   30,512  14,720  its magnitude is above 464, or inf
``infinity``                        2       2  it is inf
``nan``                           254   2,046  it is a NaN
``positive_nan``                  127   1,023  it is a NaN without the sign bit
``negative_nan``                  127   1,023  it is a NaN with the sign bit
``negative_zero``                   1       1  it is -0
``subnormal_input``               254   2,046  it is subnormal itself
``subnormal_result``              990   7,934  its byte is subnormal: ``01`` to ``07``, signed
``rounds_to_zero``             29,952  10,240  it isn't 0 and its byte is
``tie``                           254     254  it is halfway between neighbours (464 is one)
``finite_exact``                  254     254  its byte has its value, zeros included
``finite_rounded``             34,516  48,516  its byte is a finite neighbour of its value
``interpreter_wrong``          27,958  22,246  Triton's interpreter has another byte than the model
``interpreter_wrong_if_nan``   27,928  21,992  the same where overflow gives NaN (torch 2.11)
============================  =======  ======  ===================================================

``finite_exact``, ``finite_rounded``, ``overflow`` and ``nan`` part the patterns among them. What
the interpreter makes of an element is ``oracle.interpreter_table(dtype)``, exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvpack.oracle import E4M3_NAN, FORMATS, Bits, Bytes, e4m3_table, interpreter_table, scale

Mask: TypeAlias = npt.NDArray[np.bool_]
Predicate: TypeAlias = Callable[[Bits, str], Mask]

UNCONVERTED = ("e4m3", "fp32")
"""Formats of which no element is in any class: bytes that pass through, and what has no oracle."""

_PATTERNS = np.arange(1 << 16, dtype=np.uint16)
_SUBNORMAL_MAX = 0x07


def members(name: str, bits: Bits, dtype: str) -> Mask:
    """Tell which elements are in a class.

    Parameters
    ----------
    name : a key of ``CLASSES``.
    bits : unsigned integers, any shape, patterns of ``dtype``.
    dtype : ``"bf16"`` or ``"fp16"``; of ``UNCONVERTED`` no element is in a class.

    Returns
    -------
    bool, the shape of ``bits``.

    Raises
    ------
    ValueError
        For another ``name`` or ``dtype``.

    """
    if dtype in UNCONVERTED:
        return np.zeros(np.shape(bits), np.bool_)
    found: Mask = class_table(name, dtype)[bits]
    return found


@cache
def class_table(name: str, dtype: str) -> Mask:
    """Return the class of every 16-bit pattern of ``dtype``: bool ``[65536]``, read-only."""
    if name not in _RULES:
        raise ValueError(
            f"element class {name!r} is not known: expected one of {', '.join(_RULES)}"
        )
    table = _RULES[name](dtype)
    table.flags.writeable = False
    return table


def _equal(left: Bits, right: Bits | int) -> Mask:
    same: Mask = left == right  # numpy's stubs say Any
    return same


def _magnitude(dtype: str) -> npt.NDArray[np.uint16]:
    return _PATTERNS & np.uint16(FORMATS[dtype].sign - 1)


def _negative(dtype: str) -> Mask:
    return (_PATTERNS & np.uint16(FORMATS[dtype].sign)) > 0


def _result(dtype: str) -> Bytes:
    return e4m3_table(dtype) & np.uint8(E4M3_NAN)


def _nan(dtype: str) -> Mask:
    return _magnitude(dtype) > FORMATS[dtype].infinity


def _overflow(dtype: str) -> Mask:
    # Where overflow makes a NaN and the input isn't one.
    return _equal(e4m3_table(dtype, overflow="nan") & E4M3_NAN, E4M3_NAN) & ~_nan(dtype)


def _finite(dtype: str) -> Mask:
    return ~_nan(dtype) & ~_overflow(dtype)


def _exact(dtype: str) -> Mask:
    return _finite(dtype) & _equal(scale(_PATTERNS, dtype).dropped, 0)


def _tie(dtype: str) -> Mask:
    grid = scale(_PATTERNS, dtype)
    return _finite(dtype) & _equal(grid.dropped, grid.half)


def _subnormal_input(dtype: str) -> Mask:
    magnitude = _magnitude(dtype)
    return (magnitude > 0) & (magnitude < 1 << FORMATS[dtype].fraction)


def _subnormal_result(dtype: str) -> Mask:
    return (_result(dtype) > 0) & (_result(dtype) <= _SUBNORMAL_MAX)


def _interpreter_wrong(dtype: str) -> Mask:
    return ~_equal(interpreter_table(dtype), e4m3_table(dtype))


def _interpreter_wrong_if_nan(dtype: str) -> Mask:
    return ~_equal(interpreter_table(dtype), e4m3_table(dtype, overflow="nan"))


_RULES: dict[str, Callable[[str], Mask]] = {
    "overflow": _overflow,
    "infinity": lambda dtype: _equal(_magnitude(dtype), FORMATS[dtype].infinity),
    "nan": _nan,
    "positive_nan": lambda dtype: _nan(dtype) & ~_negative(dtype),
    "negative_nan": lambda dtype: _nan(dtype) & _negative(dtype),
    "negative_zero": lambda dtype: _negative(dtype) & ~(_magnitude(dtype) > 0),
    "subnormal_input": _subnormal_input,
    "subnormal_result": _subnormal_result,
    "rounds_to_zero": lambda dtype: ~(_result(dtype) > 0) & (_magnitude(dtype) > 0),
    "tie": _tie,
    "finite_exact": _exact,
    "finite_rounded": lambda dtype: _finite(dtype) & ~_exact(dtype),
    "interpreter_wrong": _interpreter_wrong,
    "interpreter_wrong_if_nan": _interpreter_wrong_if_nan,
}

CLASSES: dict[str, Predicate] = {name: partial(members, name) for name in _RULES}
"""The predicates by name; each takes ``(bits, dtype)``, see ``members``."""
