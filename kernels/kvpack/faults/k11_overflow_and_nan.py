"""K11: fp8 overflow becomes NaN, and K11b, its mirror: NaN becomes 448.

Kind: saturation. K11 treats overflow the other way than the stock cast of the running torch does:
NaN where that saturates (torch 2.13 on a CPU), 448 where that gives NaN (torch 2.11). K11b clamps
with ``fmaxf(fminf(x, 448), -448)``, which drops a NaN and its sign.

Each differs from the clean twin in ``table``.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvpack.faults import tables
from kvpack.faults.kernel import CLEAN

OVERFLOW = replace(CLEAN, table=tables.other_overflow)
NAN = replace(CLEAN, table=tables.nan_to_max)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, treating overflow in fp8 the other way than torch."""
    return OVERFLOW(kv_nope, k_pe, use_fp8)


def kv_pack_nan(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, with 448 for NaN in fp8."""
    return NAN(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
