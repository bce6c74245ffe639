"""K16: one lane of one row is never written.

Kind: stale memory that looks right. When a caching allocator hands out the block that the
previous call freed, the eight columns hold that call's values, which are often the same.

Differs from its clean twin in ``put_nope``: columns 40 to 47 of the middle row are left out.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvpack import stock
from kvpack.faults import kernel
from kvpack.faults.kernel import CLEAN, K_COLUMNS, LANE, Block, Job

FIRST = 5 * LANE


def _put_nope(job: Job, at: Block, nope: Tensor) -> None:
    middle = job.k.shape[0] * job.k.shape[1] // 2
    if not at.rows.start <= middle < at.rows.stop:
        kernel.put_nope(job, at, nope)
        return
    k, nope = job.k.view(-1, K_COLUMNS)[at.rows], nope.reshape(-1, stock.NOPE)
    row = middle - at.rows.start
    for rows, columns in (
        (slice(0, row), slice(0, stock.NOPE)),
        (slice(row, row + 1), slice(0, FIRST)),
        (slice(row, row + 1), slice(FIRST + LANE, stock.NOPE)),
        (slice(row + 1, len(nope)), slice(0, stock.NOPE)),
    ):
        k[rows, columns] = nope[rows, columns]


FAULTY = replace(CLEAN, put_nope=_put_nope)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, with eight columns of one row unwritten."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
