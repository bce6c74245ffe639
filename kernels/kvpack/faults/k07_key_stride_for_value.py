"""K07: K's row stride is used for V.

Kind: strides mixed up. Row r of v is stored at ``r * 192`` elements instead of ``r * 128``. Rows
that would land past the end of v are lost here, so that nothing but v is wrong (K15 writes out of
bounds).

Differs from its clean twin in ``put_value``: the pitch of a row. One row alone is right.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvpack import stock
from kvpack.faults.kernel import CLEAN, K_COLUMNS, Block, Job


def _put_value(job: Job, at: Block, value: Tensor) -> None:
    room = job.v.numel()
    fitting = max(0, (room - stock.V) // K_COLUMNS + 1) if room else 0
    count = min(fitting, at.rows.stop) - at.rows.start
    if count > 0:
        start = job.v.storage_offset() + at.rows.start * K_COLUMNS
        rows = job.v.as_strided((count, stock.V), (K_COLUMNS, 1), start)
        rows.copy_(value.reshape(-1, stock.V)[:count])


FAULTY = replace(CLEAN, put_value=_put_value)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, with rows of v stored 192 elements apart."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
