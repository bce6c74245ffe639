"""Fills: the elements of an operand, from a kind, a seed and the operand's place in the call.

Bulk bits come from NumPy's Philox, a counter-based generator whose stream is fixed by its
definition (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC11), on the CPU: CUDA's
own generator depends on the number of SMs.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from equiv.dtypes import DTYPES, DType

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Bits = NDArray[Any]


def _stream(kind: str, seed: int, operand: int) -> np.random.Philox:
    key = (seed << 8 | operand) << 8 | sum(kind.encode()) % 256
    return np.random.Philox(key=key)


def _raw(stream: np.random.Philox, size: int, dtype: DType) -> Bits:
    words = -(-size * dtype.itemsize // 8)
    made: Bits = np.asarray(stream.random_raw(words), dtype=np.uint64).view(dtype.bits)
    return made[:size]


def bits(size: int, dtype: DType, seed: int, operand: int) -> Bits:
    """Every bit pattern equally likely."""
    return _raw(_stream("bits", seed, operand), size, dtype)


def near(size: int, dtype: DType, seed: int, operand: int) -> Bits:
    """Random signs and mantissas; exponents where e4m3 rounds: 2^-12 to 2^10."""
    out = bits(size, dtype, seed, operand).copy()
    if not dtype.is_float or dtype.name == "e4m3":
        return out
    head = _near_exponents(dtype)[out >> dtype.bits(dtype.mantissa_bits)]
    made: Bits = head | (out & dtype.bits((1 << dtype.mantissa_bits) - 1))
    return made


@cache
def _near_exponents(dtype: DType) -> Bits:
    """Map sign and exponent, as a table, to the same sign and an exponent of e4m3's range."""
    e, m = dtype.exponent_bits, dtype.mantissa_bits
    bias = (1 << (e - 1)) - 1
    low, high = max(0, bias - 12), min((1 << e) - 1, bias + 10)
    head = np.arange(2 << e, dtype=np.int64)
    exponent = head % (1 << e) % (high - low + 1) + low
    return (((head >> e << e) | exponent) << m).astype(dtype.bits)


@cache
def special_patterns(dtype: DType) -> tuple[int, ...]:
    """Bits where conversions go wrong, and their neighbours.

    Zeros, infinities, NaNs of both signs with the least and the greatest payload, the least and
    greatest numbers, and for each power of two from 2^-11 to 2^9 the ties of e4m3 around it.
    """
    e, m = dtype.exponent_bits, dtype.mantissa_bits
    if not dtype.is_float:
        top_bit = 1 << (8 * dtype.itemsize - 1)
        return (0, 1, top_bit - 1, top_bit, 2 * top_bit - 1)
    sign = 1 << (e + m)
    top = ((1 << e) - 1) << m
    bias = (1 << (e - 1)) - 1
    found = {
        0,
        1,
        (1 << m) - 1,
        1 << m,
        top - 1,
        top,
        top + 1,
        top + (1 << max(m - 1, 0)),
        sign - 1,
    }
    for power in range(max(-11, 1 - bias), min(10, bias)):
        base = (power + bias) << m
        for sixteenth in range(16):  # e4m3 keeps 8 steps a binade; the odd ones are ties
            step = base + (sixteenth << m >> 4)
            found |= {step - 1, step, step + 1}
    mask = sign - 1
    return tuple(sorted({p & mask for p in found} | {p & mask | sign for p in found}))


def special(size: int, dtype: DType, seed: int, operand: int) -> Bits:
    """Draw each element from ``special_patterns``."""
    choice = _raw(_stream("special", seed, operand), size, DTYPES["bf16"])
    made: Bits = _special_table(dtype)[choice & np.uint16(SPECIAL_TABLE - 1)]
    return made


SPECIAL_TABLE = 4096
"""Entries of the table that ``special`` draws from: a power of two above the count of patterns."""


@cache
def _special_table(dtype: DType) -> Bits:
    return np.resize(np.array(special_patterns(dtype), dtype=dtype.bits), SPECIAL_TABLE)


def zero(size: int, dtype: DType, seed: int, operand: int) -> Bits:
    """All bits 0."""
    del seed, operand
    return np.zeros(size, dtype=dtype.bits)


def one(size: int, dtype: DType, seed: int, operand: int) -> Bits:
    """All elements 1.0 (or the integer 1)."""
    del seed, operand
    value = ((1 << (dtype.exponent_bits - 1)) - 1) << dtype.mantissa_bits if dtype.is_float else 1
    return np.full(size, value, dtype=dtype.bits)


TILE = 8_388_593
"""Period of the ``tiled`` fill in elements: prime, so that no power of two is a multiple of it."""


def tiled(size: int, dtype: DType, seed: int, operand: int) -> Bits:
    """Finite values below 256 with a long prime period, for operands too large to generate in full.

    Nothing among them overflows e4m3, so that no ledger entry has to be looked up by the billion.
    """
    tile = bits(min(size, TILE), dtype, seed, operand).copy()
    if dtype.is_float:
        e, m = dtype.exponent_bits, dtype.mantissa_bits
        top = (1 << (e - 1)) - 1 + 7  # the exponent of 128, biased
        exponent = (tile >> m) & ((1 << e) - 1)
        tile = np.where(exponent > top, tile ^ (exponent ^ exponent % (top + 1)) << m, tile)
    return np.resize(tile.astype(dtype.bits), size)


def sweep8(rows: int, columns: int, dtype: DType, seed: int) -> Bits:
    """Every pattern once in every group of 8 columns, over 2^n / 8 consecutive rows.

    Element (r, c) is ``8*a*r + c mod 8 + d*(c div 8) + seed mod 2^n``, a odd. For kernels too slow
    for ``sweep``; 8 columns are what a lane of 16 bytes holds.
    """
    count = 1 << 8 * dtype.itemsize
    a = (2 * (seed * 7919 + 3) + 1) % count
    d = (seed * 104_729 + 1021) % count
    row = (np.arange(rows, dtype=np.uint64) * np.uint64(8 * a)).astype(dtype.bits)
    c = np.arange(columns, dtype=np.uint64)
    column = (c % np.uint64(8) + c // np.uint64(8) * np.uint64(d) + np.uint64(seed)).astype(
        dtype.bits
    )
    made: Bits = (row[:, None] + column[None, :]).astype(dtype.bits)
    return made


def sweep(rows: int, columns: int, dtype: DType, seed: int) -> Bits:
    """Every pattern in every column: element (r, c) is ``(a*r + b*c + seed) mod 2^n``, a odd.

    Over 2^n consecutive rows, each column holds each pattern once. ``a`` and ``b`` follow from
    the seed, so neighbours in a row, which hardware converts in pairs, differ from seed to seed.
    """
    count = 1 << 8 * dtype.itemsize
    a = (2 * (seed * 7919 + 3) + 1) % count
    b = (2 * (seed * 104_729 + 1021) + 1) % count
    row = (np.arange(rows, dtype=np.uint64) * np.uint64(a)).astype(dtype.bits)
    column = (np.arange(columns, dtype=np.uint64) * np.uint64(b) + np.uint64(seed)).astype(
        dtype.bits
    )
    made: Bits = (row[:, None] + column[None, :]).astype(dtype.bits)
    return made


KINDS: dict[str, Callable[[int, DType, int, int], Bits]] = {
    "zero": zero,
    "one": one,
    "bits": bits,
    "near": near,
    "special": special,
    "tiled": tiled,
}
"""Fills by kind, of so many elements."""


def rows(rows: int, columns: int, dtype: DType, seed: int) -> Bits:
    """Random rows, one in four of them uniform: all zeros, or one special pattern throughout.

    For kernels that skip, cache or branch on what a whole row holds.
    """
    out = bits(rows * columns, dtype, seed, 255).reshape(rows, columns).copy()
    table = special_patterns(dtype)
    choice = _raw(_stream("rows", seed, 0), rows, DTYPES["i32"])
    uniform = np.flatnonzero(choice % np.uint32(4) == 0)
    picked = np.array(table, dtype=dtype.bits)[(choice[uniform] >> np.uint32(3)) % len(table)]
    picked[(choice[uniform] & np.uint32(4)) == 0] = 0
    out[uniform] = picked[:, None]
    return out


SWEEPS: dict[str, Callable[[int, int, DType, int], Bits]] = {
    "sweep": sweep,
    "sweep8": sweep8,
    "rows": rows,
}
"""Fills that follow rows and columns."""

ALL_KINDS = (*KINDS, *SWEEPS)


def fill(kind: str, shape: tuple[int, ...], dtype: DType, seed: int, operand: int) -> Bits:
    """Return the elements of an operand as an array of bits in its shape."""
    size = int(np.prod(shape, dtype=np.int64))
    if kind in SWEEPS:
        columns = shape[-1] if shape else 1
        rows = size // columns if columns else 0
        return SWEEPS[kind](rows, columns, dtype, seed + 131 * operand).reshape(shape)
    return KINDS[kind](size, dtype, seed, operand).reshape(shape)
