"""The model of the K3 epilogues: NumPy on bit patterns, nobody's cast to e4m3."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from k3common import positions
from k3common.arithmetic import E4M3_MAX, LEAST, NAN_BYTE, NAN_WORD, TILE, TILES

Bits: TypeAlias = NDArray[Any]
_BIAS = 120 << 3  # of float32 to e4m3, at e4m3's place of the exponent
_MAGIC = np.float32(16384)  # its last place is 2^-9, e4m3's smallest number
_WORDS = 1 << 16


def widen(bits: Bits, dtype: str) -> NDArray[np.float32]:
    """Return the float32 values of patterns of ``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    if dtype == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "fp16":
        return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
    return np.ascontiguousarray(bits).view(np.float32)


def e4m3(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Convert float32 to e4m3 bits: to nearest even, saturating at 448, every NaN ``7f``.

    From 2^-6 on by rounding the bits to three of the fraction; below by adding 2^14, in which the
    hardware's own rounding leaves multiples of 2^-9.
    """
    size = np.fmin(np.abs(x), np.float32(448))
    word = size.view(np.uint32)
    kept = word >> np.uint32(20)
    rounded = ((word + np.uint32(0x7FFFF) + (kept & np.uint32(1))) >> np.uint32(20)) - np.uint32(
        _BIAS
    )
    small = (size + _MAGIC).view(np.uint32) - _MAGIC.view(np.uint32)
    code = np.where(size < np.float32(2**-6), small, rounded).astype(np.uint8)
    code |= (np.signbit(x) << np.uint8(7)).astype(np.uint8)
    code[np.isnan(x)] = NAN_BYTE
    return code


def narrow(x: NDArray[np.float32], dtype: str) -> Bits:
    """Round float32 to the bits of ``dtype``, to nearest even; every NaN is ``7fff``."""
    word = np.ascontiguousarray(x).view(np.uint32)
    if dtype == "fp32":
        return word
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            made = x.astype(np.float16).view(np.uint16).copy()
    else:
        odd = (word >> np.uint32(16)) & np.uint32(1)
        made = ((word + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    made[np.isnan(x)] = NAN_WORD
    return made


def rotate(bits: Bits, dtype: str) -> NDArray[np.float32]:
    """Rotate ``[T, N, 64]`` by the positions of its tokens, in float32."""
    row = positions.table()[positions.positions(bits.shape[0])][:, None]
    half = row.shape[-1] // 2
    cos, sin = row[..., :half], row[..., half:]
    x = widen(bits, dtype)
    out = np.empty_like(x)
    with np.errstate(invalid="ignore", over="ignore"):
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return out


def quantise(x: NDArray[np.float32], scale_inv: float) -> NDArray[np.uint8]:
    """Return e4m3 bits of ``x * scale_inv``, the product rounded to float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return e4m3(x * np.float32(scale_inv))


@lru_cache(maxsize=16)
def _table(dtype: str, scale_inv: float) -> NDArray[np.uint8]:
    made = quantise(widen(np.arange(_WORDS, dtype=np.uint16), dtype), scale_inv)
    made.flags.writeable = False
    return made


def quantise_bits(bits: Bits, dtype: str, scale_inv: float) -> NDArray[np.uint8]:
    """Return ``quantise`` of patterns: looked up for 16-bit ones."""
    if dtype == "fp32":
        return quantise(widen(bits, dtype), scale_inv)
    return _table(dtype, scale_inv).take(bits)


def ds_entries(latent: Bits, rope: Bits, dtype: str) -> NDArray[np.uint8]:
    """Return ``fp8_ds_mla`` entries ``[T, 656]`` of latent ``[T, 512]`` and rope ``[T, 64]`` bits.

    The power of a tile's scale is the least ``k >= -13`` with ``max|x| <= 448 * 2^k``, read off
    the exponent and the fraction of the maximum.
    """
    x = widen(latent, dtype).reshape(-1, TILES, TILE)
    size = np.abs(x)
    word = np.where(np.isnan(size), np.float32(0), size).max(-1).view(np.uint32).astype(np.int64)
    power = (word >> 23) - 135 + ((word & 0x7FFFFF) > 0x600000)  # noqa: PLR2004 - 1.75, as in 448
    power = np.maximum(power, -13)
    infinite = word == 0x7F800000  # noqa: PLR2004 - float32's infinity
    scale = np.where(infinite, 0x7F800000, (power + 127) << 23).astype(np.uint32)
    inverse = np.where(infinite, 0, (127 - power) << 23).astype(np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        payload = e4m3(x * inverse[..., None]).reshape(-1, TILES * TILE)
    parts = (payload, scale.view(np.uint8), np.ascontiguousarray(rope).view(np.uint8)[:, :128])
    return np.concatenate(parts, axis=1)


def ds_entries_of_words(latent: Bits, rope: Bits) -> NDArray[np.uint8]:
    """Return ``fp8_ds_mla`` entries as vLLM's cache op makes them of fp16: a faulty scale.

    It takes the greatest 16-bit word of a tile, sign and exponent included, for the greatest
    magnitude, and converts the elements themselves as halves.

    Parameters
    ----------
    latent, rope : fp16 bits ``[T, 512]`` and ``[T, 64]``.

    Returns
    -------
    uint8 ``[T, 656]``.

    """
    tiles = np.ascontiguousarray(latent).reshape(-1, TILES, TILE)
    quotient = np.maximum(tiles.max(-1).astype(np.float32) / np.float32(E4M3_MAX), LEAST)
    mantissa, exponent = np.frexp(quotient)
    scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5)).astype(np.float32)  # noqa: PLR2004
    with np.errstate(invalid="ignore"):
        payload = e4m3(widen(tiles, "fp16") / scale[..., None]).reshape(-1, TILES * TILE)
    parts = (payload, scale.view(np.uint8), np.ascontiguousarray(rope).view(np.uint8)[:, :128])
    return np.concatenate(parts, axis=1)


def place(cache: Bits, entries: Bits, slot: NDArray[np.int64]) -> Bits:
    """Return a copy of ``cache`` ``[blocks, block_size, N]`` with the entries in their slots."""
    rows = cache.copy().reshape(-1, cache.shape[-1])
    stored = np.flatnonzero(slot >= 0)
    rows[slot[stored]] = entries[stored]
    return rows.reshape(cache.shape)


def turned(bits: Bits, dtype: str) -> Bits:
    """Return ``[T, N, 64]`` rotated and rounded to ``dtype``."""
    return narrow(rotate(bits, dtype), dtype)


def quantise_row(
    left: Bits, right: Bits, dtype: str, scale_inv: float, *, turn: bool
) -> NDArray[np.uint8]:
    """Return e4m3 of ``[left | right]`` times ``scale_inv``, the right one rotated if ``turn``."""
    if turn:
        rope = quantise(rotate(right, dtype), scale_inv)
    else:
        rope = quantise_bits(right, dtype, scale_inv)
    return np.concatenate((quantise_bits(left, dtype, scale_inv), rope), axis=-1)
