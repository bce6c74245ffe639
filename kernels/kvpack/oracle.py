"""An integer model of the pack: 16-bit floats to ``float8_e4m3fn`` bits, without anybody's cast.

Everything here is numpy on bit patterns: no torch, no ml_dtypes, no floating-point arithmetic. It
is the third voice beside the two kernels that are compared: it says which of them is wrong.

``float8_e4m3fn`` is sign, 4 exponent bits (bias 7), 3 fraction bits, no infinity; ``7F`` and
``FF`` are its NaNs, ``7E`` = 448 its largest value, ``01`` = 2**-9 its smallest. Between 448 and
480, which ``7F`` would have been, lies 464: it ties to the even ``7E``. So **a magnitude above 464
overflows, 464 itself is 448**. In bits, overflow begins after ``43E8`` (bf16), ``5F40`` (fp16) and
``43E80000`` (fp32). At the other end 2**-10 ties to 0 and what is above it becomes ``01``.

Source of the format: "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Bits: TypeAlias = npt.NDArray[Any]
"""An array of unsigned integers that hold bit patterns."""
Bytes: TypeAlias = npt.NDArray[np.uint8]
Wide: TypeAlias = npt.NDArray[np.int64]
Overflow: TypeAlias = Literal["saturate", "nan"]

E4M3_MAX = 0x7E
"""The bits of 448, the largest finite value."""
E4M3_NAN = 0x7F
OVERFLOW_BOUNDARY = 464
"""The largest magnitude that still rounds to 448; above it a value overflows."""
NOPE = 128
"""Columns of ``kv_nope`` that go into the key; the others are the value."""

_E4M3_FRACTION = 3
_E4M3_BIAS = 7
_BLOCK = 16384  # elements looked up at a time: their indices, 128 KiB, stay in the L2 cache


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: its width, stored fraction bits and exponent bias."""

    bits: int
    fraction: int
    bias: int
    infinity: int
    """Bits of +inf (of 448 in e4m3fn, which has no inf); a larger magnitude is a NaN."""
    storage: np.dtype[Any]

    @property
    def sign(self) -> int:
        """Mask of the sign bit."""
        return 1 << (self.bits - 1)


FORMATS: dict[str, Format] = {
    "bf16": Format(16, 7, 127, 0x7F80, np.dtype(np.uint16)),
    "fp16": Format(16, 10, 15, 0x7C00, np.dtype(np.uint16)),
    "fp32": Format(32, 23, 127, 0x7F800000, np.dtype(np.uint32)),
    "e4m3": Format(8, _E4M3_FRACTION, _E4M3_BIAS, E4M3_MAX, np.dtype(np.uint8)),
}
"""The formats by the names that op pairs use."""


class Scaled(NamedTuple):
    """Magnitudes on the grid of e4m3: ``|x| = (kept + dropped / (2 * half)) * 2**quantum``."""

    magnitude: Wide
    kept: Wide
    dropped: Wide
    half: Wide
    quantum: Wide


def scale(bits: Bits, dtype: str) -> Scaled:
    """Split magnitudes into whole steps of the e4m3 grid around them and what is left over.

    Parameters
    ----------
    bits : unsigned integers, any shape, patterns of ``dtype``.
    dtype : ``"bf16"``, ``"fp16"`` or ``"fp32"``.

    Returns
    -------
    Scaled
        int64 arrays of the same shape. A step is ``2**quantum``, with ``quantum =
        max(floor(log2(|x|)), -6) - 3``. The grid has no upper end here, and inf and NaN are
        split as if they were numbers: compare ``magnitude`` with ``FORMATS[dtype].infinity``.

    Raises
    ------
    ValueError
        For another ``dtype``.

    """
    if dtype not in ("bf16", "fp16", "fp32"):
        raise ValueError(
            f"dtype={dtype!r}: expected 'bf16', 'fp16' or 'fp32'; e4m3 bytes are not converted"
        )
    form = FORMATS[dtype]
    magnitude = np.asarray(bits).astype(np.int64) & (form.sign - 1)
    field = magnitude >> form.fraction
    implicit = 1 << form.fraction
    significand = (magnitude & (implicit - 1)) + np.where(field > 0, implicit, 0)
    exponent = np.maximum(field, 1) - form.bias - form.fraction  # |x| = significand * 2**exponent
    length = np.searchsorted(1 << np.arange(form.fraction + 1), significand, side="right")
    quantum = np.maximum(exponent + length - 1, 1 - _E4M3_BIAS) - _E4M3_FRACTION
    # Never below fraction - 3, which is 4 or more; above fraction + 3 nothing rounds up any more.
    shift = np.minimum(quantum - exponent, form.fraction + 3)
    kept = significand >> shift
    return Scaled(magnitude, kept, significand - (kept << shift), 1 << (shift - 1), quantum)


def encode_e4m3(bits: Bits, dtype: str, *, overflow: Overflow = "saturate") -> Bytes:
    """Convert patterns to ``float8_e4m3fn``: ``sign | 8 * (quantum + 9) + round_half_even(steps)``.

    ``steps`` and ``quantum`` are those of ``scale``. A carry out of the fraction walks into
    the exponent, as it should.

    Parameters
    ----------
    bits : unsigned integers, any shape, patterns of ``dtype``.
    dtype : ``"bf16"``, ``"fp16"`` or ``"fp32"``.
    overflow : what a magnitude above 464, and inf, become. ``"saturate"``: ``7E`` or ``FE``, as
        torch 2.13 has it on the CPU. ``"nan"``: ``7F`` or ``FF``, as torch 2.11 and ml_dtypes do.

    Returns
    -------
    uint8, the same shape. NaN keeps its sign (``7F`` or ``FF``), -0 stays ``80``.

    Raises
    ------
    ValueError
        For another ``dtype`` or ``overflow``.

    """
    if overflow not in ("saturate", "nan"):
        raise ValueError(f"overflow={overflow!r}: expected 'saturate' or 'nan'")
    magnitude, kept, dropped, half, quantum = scale(bits, dtype)
    form = FORMATS[dtype]
    steps = kept + ((dropped > half) | ((dropped == half) & (kept & 1 == 1)))
    code = steps + ((quantum + _E4M3_BIAS - 1 + _E4M3_FRACTION) << _E4M3_FRACTION)
    limit = E4M3_MAX if overflow == "saturate" else E4M3_NAN
    code = np.where((code > E4M3_MAX) | (magnitude == form.infinity), limit, code)
    code = np.where(magnitude > form.infinity, E4M3_NAN, code)
    return _with_sign(code, bits, form)


def encode_e4m3_as_interpreter(bits: Bits, dtype: str) -> Bytes:
    """Convert as Triton's interpreter does (3.6.0 to 3.9.0), which is not a correct conversion.

    A closed form of ``triton/runtime/interpreter.py``, ``_convert_float`` with rounding to
    nearest, for a downcast to ``float8e4nv``. With ``f`` the fraction, normalised where the input
    is subnormal, ``E`` the exponent re-biased to e4m3, and ``r`` the upper three bits of ``f``
    plus its fourth (0 to 8), the magnitude becomes:

    ============================  ================================================================
    ``E >= 1``                    ``min(E, 15) << 3 | r``: ties go away from zero; where ``r`` is
                                  8 and ``E`` odd the carry is lost, which halves the value;
                                  overflow, inf and NaN keep their own three bits, ``78`` to ``7F``
    ``E <= 0``, input normal      ``r >> s | 8 >> s``, ``s = 1 - E``: rounded where a normal value
                                  would be, then truncated; the carry of an ``r`` of 8 is lost
    input subnormal               ``r``: a value that should be 0 becomes up to ``08``
    0                             0
    ============================  ================================================================

    Parameters
    ----------
    bits : unsigned integers, any shape, patterns of ``dtype``.
    dtype : ``"bf16"`` or ``"fp16"``.

    Returns
    -------
    uint8, the same shape; the sign is kept.

    Raises
    ------
    ValueError
        For another ``dtype``.

    """
    if dtype not in ("bf16", "fp16"):
        raise ValueError(f"dtype={dtype!r}: expected 'bf16' or 'fp16'")
    form = FORMATS[dtype]
    magnitude = np.asarray(bits).astype(np.int64) & (form.sign - 1)
    mask = (1 << form.fraction) - 1
    field, stored = magnitude >> form.fraction, magnitude & mask
    subnormal = field == 0
    length = np.searchsorted(1 << np.arange(form.fraction + 1), stored, side="right")
    # The distance of the leading one from the implicit place. Zero has none: it stays 0.
    lead = form.fraction + 1 - length
    fraction = np.where(subnormal, (stored << lead) & mask, stored)
    exponent = np.where(subnormal, 1 - lead, field) - form.bias + _E4M3_BIAS
    dropped = form.fraction - _E4M3_FRACTION
    rounded = (fraction >> dropped) + (fraction >> (dropped - 1) & 1)
    shift = np.clip(1 - exponent, 0, form.fraction)
    below = np.where(subnormal, rounded, rounded >> shift | (1 << _E4M3_FRACTION) >> shift)
    code = np.where(exponent > 0, np.minimum(exponent, 15) << _E4M3_FRACTION | rounded, below)
    return _with_sign(code, bits, form)


def _with_sign(code: Wide, bits: Bits, form: Format) -> Bytes:
    negative = (np.asarray(bits).astype(np.int64) & form.sign) != 0
    return np.where(negative, code | FORMATS["e4m3"].sign, code).astype(np.uint8)


@cache
def e4m3_table(dtype: str, *, overflow: Overflow = "saturate") -> Bytes:
    """Return ``encode_e4m3`` of every 16-bit pattern.

    Parameters
    ----------
    dtype : ``"bf16"`` or ``"fp16"``.
    overflow : as for ``encode_e4m3``.

    Returns
    -------
    uint8 ``[65536]``, read-only, cached.

    """
    return _frozen(encode_e4m3(_every_pattern(dtype), dtype, overflow=overflow))


@cache
def interpreter_table(dtype: str) -> Bytes:
    """Return ``encode_e4m3_as_interpreter`` of every pattern: uint8 ``[65536]``, read-only."""
    return _frozen(encode_e4m3_as_interpreter(_every_pattern(dtype), dtype))


def _every_pattern(dtype: str) -> Bits:
    if dtype not in ("bf16", "fp16"):
        raise ValueError(
            f"dtype={dtype!r}: expected 'bf16' or 'fp16'; only 16-bit formats have a table"
        )
    return np.arange(1 << 16, dtype=np.uint16)


def _frozen(table: Bytes) -> Bytes:
    table.flags.writeable = False
    return table


def pack(
    kv_bits: Bits,
    pe_bits: Bits,
    *,
    dtype: str,
    fp8: bool,
    pe_dtype: str | None = None,
    overflow: Overflow = "saturate",
    table: Bytes | None = None,
) -> tuple[Bits, Bits]:
    """Pack bit patterns: ``k = [f(kv[..., :128]) | f(pe)]``, ``v = f(kv[..., 128:])``.

    ``f`` is the conversion to e4m3 with ``fp8``, and nothing otherwise or for e4m3 ``pe_bits``.

    Parameters
    ----------
    kv_bits : uint16 ``[T, H, N]``, ``N > 128``, any strides.
    pe_bits : uint16 ``[T, 1, R]``, or uint8 where ``pe_dtype`` is ``"e4m3"``; any strides.
    dtype : ``"bf16"`` or ``"fp16"``, the format of ``kv_bits``.
    fp8 : convert.
    pe_dtype : the format of ``pe_bits``; ``dtype`` where not given.
    overflow : as for ``encode_e4m3``.
    table : another conversion, such as ``interpreter_table(dtype)``, instead of ``e4m3_table``.

    Returns
    -------
    k : ``[T, H, 128 + R]``, contiguous, uint8 with ``fp8``, else uint16.
    v : ``[T, H, N - 128]``, contiguous, of the same type.

    Raises
    ------
    ValueError
        For shapes, integer types or formats other than these.

    """
    pe_dtype = pe_dtype or dtype
    _check(kv_bits, pe_bits, dtype, pe_dtype, fp8=fp8)
    tokens, heads, columns = kv_bits.shape
    storage = np.uint8 if fp8 else np.uint16
    k = np.empty((tokens, heads, NOPE + pe_bits.shape[2]), storage)
    v = np.empty((tokens, heads, columns - NOPE), storage)
    if not fp8:
        k[..., :NOPE] = kv_bits[..., :NOPE]
        v[...] = kv_bits[..., NOPE:]
    else:
        table = e4m3_table(dtype, overflow=overflow) if table is None else table
        if pe_dtype != "e4m3":
            pe_bits = table[pe_bits]
        _convert(kv_bits, table, k, v)
    k[..., NOPE:] = pe_bits
    return k, v


def _convert(kv_bits: Bits, table: Bytes, k: Bytes, v: Bytes) -> None:
    """Look up ``kv_bits`` in ``table``, a cache-sized block of rows at a time, into k and v."""
    tokens, heads, columns = kv_bits.shape
    if kv_bits.size == 0:
        return
    step = min(tokens, max(1, _BLOCK // (heads * columns)))
    indices = np.empty(step * heads * columns, np.intp)
    found = np.empty(indices.size, np.uint8)
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        shape = (stop - start, heads, columns)
        size = (stop - start) * heads * columns
        np.copyto(indices[:size].reshape(shape), kv_bits[start:stop])
        # No index needs wrapping; unlike the default this mode writes to `out` without a copy.
        table.take(indices[:size], out=found[:size], mode="wrap")
        rows = found[:size].reshape(shape)
        k[start:stop, :, :NOPE] = rows[..., :NOPE]
        v[start:stop] = rows[..., NOPE:]


def _check(kv_bits: Bits, pe_bits: Bits, dtype: str, pe_dtype: str, *, fp8: bool) -> None:
    if dtype not in ("bf16", "fp16"):
        raise ValueError(f"dtype={dtype!r}: expected 'bf16' or 'fp16'")
    if pe_dtype != dtype and not (fp8 and pe_dtype == "e4m3"):
        raise ValueError(f"pe_dtype={pe_dtype!r}: expected {dtype!r}, or 'e4m3' with fp8=True")
    for name, bits, form in (("kv_bits", kv_bits, dtype), ("pe_bits", pe_bits, pe_dtype)):
        if bits.dtype != FORMATS[form].storage:
            raise ValueError(
                f"{name} is {bits.dtype}: expected {FORMATS[form].storage}, the bits of {form}"
            )
    if (
        kv_bits.ndim != 3  # noqa: PLR2004
        or kv_bits.shape[2] <= NOPE
        or pe_bits.shape[:-1] != (kv_bits.shape[0], 1)
    ):
        raise ValueError(
            f"shapes {kv_bits.shape} and {pe_bits.shape}: "
            f"expected [T, H, more than {NOPE}] and [T, 1, R]"
        )


def decode(bits: int, dtype: str) -> float:
    """Return the value of a pattern of any of ``FORMATS``, exactly: inf and nan as floats."""
    form = FORMATS[dtype]
    magnitude = bits & (form.sign - 1)
    sign = -1.0 if bits & form.sign else 1.0
    if magnitude > form.infinity:
        return math.nan
    if magnitude == form.infinity and dtype != "e4m3":
        return sign * math.inf
    field, fraction = divmod(magnitude, 1 << form.fraction)
    significand = fraction + (1 << form.fraction if field else 0)
    return sign * significand * 2.0 ** (max(field, 1) - form.bias - form.fraction)


def decode_e4m3(byte: int) -> float:
    """Return the value of a ``float8_e4m3fn`` byte."""
    return decode(byte, "e4m3")


def ulp_distance(a: int, b: int, dtype: str) -> int | None:
    """Count the representable values from ``a`` to ``b``: 0 for equal ones and for +0 and -0.

    Parameters
    ----------
    a, b : patterns of ``dtype``, any of ``FORMATS``.

    Returns
    -------
    The distance, inf counting as the value after the largest, or ``None`` where one is a NaN.

    """
    form = FORMATS[dtype]

    def ordinal(bits: int) -> int | None:
        magnitude = bits & (form.sign - 1)
        if magnitude > form.infinity:
            return None
        return -magnitude if bits & form.sign else magnitude

    left, right = ordinal(a), ordinal(b)
    return None if left is None or right is None else abs(left - right)
