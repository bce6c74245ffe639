"""The arithmetic of the K3 epilogues, in torch statements: scale, rotate, narrow, tile scales.

Source: vLLM 0.33.0, ``csrc/fused_kimi_k3_mla_key_concat_kv_cache_kernel.cu``, whose comments say
what each step is meant to be. Every step here is one IEEE operation or an exact one, so that a CPU
and a GPU give the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3insert.stock import LATENT, ROPE

E4M3_MAX = 448.0
"""The largest finite ``float8_e4m3fn``."""
NAN_BYTE = 0x7F
"""What a NaN becomes in e4m3: the hardware's conversion knows this one only."""
NAN_WORD = 0x7FFF
"""Bits of a NaN that the rotation makes, in bf16 and fp16: the hardware's as well."""
TILE = 128
"""Latent columns that share a scale in an ``fp8_ds_mla`` entry."""
TILES = LATENT // TILE
LEAST = 1e-4
"""The least quotient of which the scale of a tile is made."""
DS_ENTRY = LATENT + 4 * TILES + 2 * ROPE
"""Bytes of an ``fp8_ds_mla`` entry: 512 e4m3, 4 float32 scales, 64 16-bit rope columns."""


def quantise(x: Tensor, scale_inv: Tensor) -> Tensor:
    """Return ``e4m3(clamp(float32(x) * scale_inv, -448, 448))``; a NaN gives ``7f``.

    Parameters
    ----------
    x : any shape, float32, bfloat16 or float16.
    scale_inv : float32 ``[1]``, the inverse of the scale.

    Returns
    -------
    float8_e4m3fn, the shape of ``x``.

    """
    y = (x.float() * scale_inv).clamp(-E4M3_MAX, E4M3_MAX)
    made = y.to(torch.float8_e4m3fn).view(torch.uint8)
    return made.masked_fill(y.isnan(), NAN_BYTE).view(torch.float8_e4m3fn)


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate neighbouring columns (GPT-J's pairing), in float32 and unrounded.

    ``out[2i] = x[2i] * cos[i] - x[2i+1] * sin[i]`` and
    ``out[2i+1] = x[2i] * sin[i] + x[2i+1] * cos[i]``.

    Parameters
    ----------
    x : ``[T, N, 64]``, float32, bfloat16 or float16.
    positions : int64 ``[T]``, rows of ``table``.
    table : float32 ``[P, 64]``: 32 cosines, then 32 sines.

    Returns
    -------
    float32 ``[T, N, 64]``.

    """
    cos, sin = table[positions][:, None].chunk(2, dim=-1)
    even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 to ``dtype``, to nearest even; every NaN is ``7fff`` (in float32: as it is)."""
    if dtype == torch.float32:
        return x
    made = x.to(dtype).view(torch.int16)
    return made.masked_fill(x.isnan(), NAN_WORD).view(dtype)


def turned(x: Tensor, positions: Tensor | None, table: Tensor | None) -> Tensor:
    """Return ``x`` rotated in float32, or ``x`` itself where there are no positions."""
    return x if positions is None or table is None else rotate(x, positions, table)


def turned_and_narrowed(x: Tensor, positions: Tensor | None, table: Tensor | None) -> Tensor:
    """Return ``x`` rotated and rounded to its dtype, or ``x`` itself without positions."""
    if positions is None or table is None:
        return x
    return narrow(rotate(x, positions, table), x.dtype)


def tile_scales(latent: Tensor) -> Tensor:
    """Return a power of two for each tile: ``2 ** ceil(log2(max(max|x| / 448, 1e-4)))``.

    A NaN isn't looked at; a tile with an infinity has the scale infinity.

    Parameters
    ----------
    latent : ``[T, 512]``, bfloat16 or float16 (float32 works).

    Returns
    -------
    float32 ``[T, 4]``.

    """
    x = latent.float().abs().unflatten(-1, (TILES, TILE))
    quotient = (x.masked_fill(x.isnan(), 0.0).amax(-1) / E4M3_MAX).clamp(min=LEAST)
    mantissa, exponent = torch.frexp(quotient)
    power = exponent.int() - (mantissa == 0.5).int()  # noqa: PLR2004 - a power of two itself
    made = ((power + 127) << 23).view(torch.float32)
    return made.masked_fill(quotient.isinf(), torch.inf)


def ds_entries(latent: Tensor, rope: Tensor) -> Tensor:
    """Return ``fp8_ds_mla`` entries: ``[e4m3(latent / scale) | scales | rope]`` as bytes.

    Parameters
    ----------
    latent : ``[T, 512]``, bfloat16 or float16.
    rope : ``[T, 64]``, the same dtype.

    Returns
    -------
    uint8 ``[T, 656]``.

    """
    scales = tile_scales(latent)
    quotient = latent.float().unflatten(-1, (TILES, TILE)) / scales[..., None]
    one = torch.ones(1, dtype=torch.float32, device=latent.device)
    payload = quantise(quotient, one).view(torch.uint8).flatten(-2)
    return torch.cat((payload, as_bytes(scales), as_bytes(rope)[:, : 2 * ROPE]), dim=-1)


def as_bytes(rows: Tensor) -> Tensor:
    """Return the bytes of ``[T, N]``, any strides, as uint8 ``[T, N * size]``."""
    width = rows.shape[1] * rows.element_size()
    if not len(rows):  # torch views no empty tensor whose last pitch is 0
        return torch.empty((0, width), dtype=torch.uint8, device=rows.device)
    return rows.reshape(-1).contiguous().view(torch.uint8).view(rows.shape[0], width)


def store(kv_cache: Tensor, entries: Tensor, slot_mapping: Tensor) -> None:
    """Store the entry of each token in its slot, in place; a negative slot is none.

    Parameters
    ----------
    kv_cache : ``[blocks, block_size, N]``, any strides; written.
    entries : ``[T, N]``, the same dtype.
    slot_mapping : int64 ``[T]``: ``block * block_size + position``, no two alike.

    """
    if kv_cache.element_size() == 1:
        kv_cache, entries = kv_cache.view(torch.uint8), entries.view(torch.uint8)
    # Into an extra row where there is no slot: no value is looked at on the host.
    slots = kv_cache.shape[0] * kv_cache.shape[1]
    rows = torch.cat([kv_cache.reshape(slots, -1), kv_cache.new_zeros(1, kv_cache.shape[-1])])
    rows[torch.where(slot_mapping < 0, slots, slot_mapping)] = entries
    kv_cache.copy_(rows[:-1].view(kv_cache.shape))
