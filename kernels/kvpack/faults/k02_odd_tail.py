"""K02: the last row of an odd row count is never written.

Kind: a tail that a half-warp forgets. 16 lanes serve a row, so a warp serves two; a grid counted
in whole warps, ``rows / 2`` without rounding up, leaves a single last row out.

Differs from its clean twin in ``passes``: it covers an even count of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from kvpack.faults import kernel
from kvpack.faults.kernel import CLEAN

ROWS_PER_WARP = 2


def _passes(rows: int, per_pass: int) -> Iterator[tuple[int, int]]:
    return kernel.passes(rows // ROWS_PER_WARP * ROWS_PER_WARP, per_pass)


FAULTY = replace(CLEAN, passes=_passes)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack all rows but the last of an odd count."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
