"""K12: -0 becomes +0 in fp8.

Kind: a lost sign. ``x + 0.0f``, or a comparison with 0, before the conversion. It is one pattern,
and any comparison of values takes the two for equal.

Differs from its clean twin in ``table``; small negative values still become -0.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvpack.faults import tables
from kvpack.faults.kernel import CLEAN

FAULTY = replace(CLEAN, table=tables.unsigned_zero)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, losing the sign of -0 in fp8."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
