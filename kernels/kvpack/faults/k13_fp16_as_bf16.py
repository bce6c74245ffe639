"""K13: fp16 operands are read as bf16.

Kind: dtype dispatch. Both are 16 bits wide, so every copy is right and only the fp8 conversion
shows it.

Differs from its clean twin in ``table``: it is bf16's, whatever the operands are.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvpack.faults import tables
from kvpack.faults.kernel import CLEAN

FAULTY = replace(CLEAN, table=tables.always_bf16)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, converting every operand as bf16."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
