"""K14: e4m3fnuz instead of e4m3fn.

Kind: the other vendor's fp8. Its bias is 8 instead of 7, ``7F`` is a number, ``80`` the only NaN.

Differs from its clean twin in ``table``.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvpack.faults import tables
from kvpack.faults.kernel import CLEAN

FAULTY = replace(CLEAN, table=tables.fnuz)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, converting to e4m3fnuz in fp8."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
