"""A second conversion to e4m3, in integer operations of torch: nobody's cast."""

from __future__ import annotations

import torch
from torch import Tensor

from k3common.arithmetic import NAN_BYTE, TILE, TILES, as_bytes

INFINITY = 0x7F800000
_MAX = 0x43E00000  # 448
_LEAST_NORMAL = 0x3C800000  # 2^-6
_MAGIC = 16384.0  # its last place is 2^-9, e4m3's smallest number
_MAGIC_BITS = 0x46800000
_BIAS = 120 << 3
_QUARTERS = 0x600000  # the fraction of 1.75, and of 448


def quantise(x: Tensor, scale_inv: Tensor) -> Tensor:
    """Return what ``arithmetic.quantise`` does, rounded by integer arithmetic."""
    word = (x.float() * scale_inv).view(torch.int32)
    magnitude = word & 0x7FFFFFFF
    size = magnitude.clamp(max=_MAX)
    rounded = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - _BIAS
    small = (size.view(torch.float32) + _MAGIC).view(torch.int32) - _MAGIC_BITS
    code = torch.where(size < _LEAST_NORMAL, small, rounded) | ((word >> 24) & 0x80)
    code = torch.where(magnitude > INFINITY, NAN_BYTE, code)
    return code.to(torch.uint8).view(torch.float8_e4m3fn)


def ds_entries(latent: Tensor, rope: Tensor) -> Tensor:
    """Return what ``arithmetic.ds_entries`` does; the scale is read off the maximum's bits."""
    x = latent.float().unflatten(-1, (TILES, TILE))
    word = x.view(torch.int32) & 0x7FFFFFFF
    most = torch.where(word > INFINITY, 0, word).amax(-1)
    power = (most >> 23) - 135 + ((most & 0x7FFFFF) > _QUARTERS).int()
    power = power.clamp(min=-13)
    scales = torch.where(most == INFINITY, INFINITY, (power + 127) << 23)
    inverse = torch.where(most == INFINITY, 0, (127 - power) << 23)
    payload = quantise(x, inverse.int().view(torch.float32)[..., None]).view(torch.uint8)
    parts = (payload.flatten(-2), as_bytes(scales.int()), as_bytes(rope))
    return torch.cat(parts, dim=-1)
