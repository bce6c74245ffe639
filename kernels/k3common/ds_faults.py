"""Faulty ``fp8_ds_mla`` entries: each is ``arithmetic.ds_entries`` with one thing wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from k3common import arithmetic
from k3common.arithmetic import E4M3_MAX, LEAST, TILE, TILES
from k3insert.stock import LATENT

SCALES = slice(LATENT, LATENT + 4 * TILES)


def _with_scales(kv_c: Tensor, rope: Tensor, scales: Tensor) -> Tensor:
    quotient = kv_c.float().unflatten(-1, (TILES, TILE)) / scales[..., None]
    made = arithmetic.ds_entries(kv_c, rope)
    one = torch.ones(1, dtype=torch.float32, device=kv_c.device)
    made[:, :LATENT] = arithmetic.quantise(quotient, one).view(torch.uint8).flatten(-2)
    made[:, SCALES] = arithmetic.as_bytes(scales)
    return made


def exact_scale(kv_c: Tensor, rope: Tensor) -> Tensor:
    """Fault: the scale isn't rounded up to a power of two."""
    x = kv_c.float().abs().unflatten(-1, (TILES, TILE))
    most = x.masked_fill(x.isnan(), 0.0).amax(-1)
    return _with_scales(kv_c, rope, (most / E4M3_MAX).clamp(min=LEAST))


def scale_rounded_down(kv_c: Tensor, rope: Tensor) -> Tensor:
    """Fault: the power of two is the one below: the largest elements of a tile saturate."""
    return _with_scales(kv_c, rope, arithmetic.tile_scales(kv_c) / 2)


def scale_one_up(kv_c: Tensor, rope: Tensor) -> Tensor:
    """Fault: a quotient that is a power of two itself is rounded up as well."""
    x = kv_c.float().abs().unflatten(-1, (TILES, TILE))
    quotient = (x.masked_fill(x.isnan(), 0.0).amax(-1) / E4M3_MAX).clamp(min=LEAST)
    mantissa, _ = torch.frexp(quotient)
    scales = arithmetic.tile_scales(kv_c)
    return _with_scales(kv_c, rope, torch.where(mantissa == 0.5, scales * 2, scales))  # noqa: PLR2004


def first_tile_only(kv_c: Tensor, rope: Tensor) -> Tensor:
    """Fault: every tile has the scale of the first."""
    scales = arithmetic.tile_scales(kv_c)
    return _with_scales(kv_c, rope, scales[:, :1].expand(-1, TILES))


def scale_inverse(kv_c: Tensor, rope: Tensor) -> Tensor:
    """Fault: the inverse of a scale is stored; the payload is right."""
    made = arithmetic.ds_entries(kv_c, rope)
    inverse = arithmetic.tile_scales(kv_c).reciprocal()
    made[:, SCALES] = arithmetic.as_bytes(inverse)
    return made


def no_least(kv_c: Tensor, rope: Tensor) -> Tensor:
    """Fault: a tile of small numbers has a scale below 2^-13."""
    x = kv_c.float().abs().unflatten(-1, (TILES, TILE))
    most = x.masked_fill(x.isnan(), 0.0).amax(-1).clamp(min=2**-40)
    _, exponent = torch.frexp(most / E4M3_MAX)
    small = most / E4M3_MAX < LEAST
    scales = arithmetic.tile_scales(kv_c)
    lower = ((exponent.int() + 127) << 23).view(torch.float32)
    return _with_scales(kv_c, rope, torch.where(small, lower, scales))


def unconverted(kv_c: Tensor, rope: Tensor) -> Tensor:
    """Fault: no conversion to e4m3 for this type: a payload byte is the number itself, cut to int.

    So it was in vLLM once, where a type had no specialised conversion; scales and rope were right.
    """
    made = arithmetic.ds_entries(kv_c, rope)
    made[:, :LATENT] = kv_c.float().nan_to_num(0, 255, 0).clamp(0, 255).to(torch.uint8)
    return made


def rope_quantised(kv_c: Tensor, rope: Tensor) -> Tensor:
    """Fault: rotary columns pass through e4m3."""
    one = torch.ones(1, dtype=torch.float32, device=kv_c.device)
    return arithmetic.ds_entries(kv_c, arithmetic.quantise(rope, one).to(rope.dtype))


def rope_before_scales(kv_c: Tensor, rope: Tensor) -> Tensor:
    """Fault: rope at byte 512, scales at 640."""
    made = arithmetic.ds_entries(kv_c, rope)
    scales = made[:, SCALES]
    return torch.cat((made[:, :LATENT], made[:, SCALES.stop :], scales), dim=-1)
