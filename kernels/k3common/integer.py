"""A second conversion to e4m3, in integer operations of torch: nobody's cast."""

from __future__ import annotations

import torch
from torch import Tensor

from k3common.arithmetic import NAN_BYTE

INFINITY = 0x7F800000
_MAX = 0x43E00000  # 448
_LEAST_NORMAL = 0x3C800000  # 2^-6
_MAGIC = 16384.0  # its last place is 2^-9, e4m3's smallest number
_MAGIC_BITS = 0x46800000
_BIAS = 120 << 3


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
