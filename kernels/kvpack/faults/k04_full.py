"""K04-full: element offsets of k are computed in 32 bits.

Kind: as K04, for the output: the key passes 2^31 elements at 11,184,811 rows. Both halves of such
a row are stored where the wrapped offset points. That is before k; where it lies outside the
allocation the row is lost, as if it had landed in memory that nobody looks at.

Differs from its clean twin in where rows of the key are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from kvpack import stock
from kvpack.faults.kernel import CLEAN, K_COLUMNS, Block, Job

HALF = 1 << 31


def _runs(rows: slice) -> Iterator[tuple[slice, int]]:
    """Yield runs of rows between wraps, counted from the first, and the offset of each run."""
    row = rows.start
    while row < rows.stop:
        offset = (row * K_COLUMNS + HALF) % (2 * HALF) - HALF
        stop = min(rows.stop, row + -(-(HALF - offset) // K_COLUMNS))
        yield slice(row - rows.start, stop - rows.start), offset
        row = stop


def _put(job: Job, at: Block, columns: slice, data: Tensor) -> None:
    tokens, _, width = data.shape
    data = data.expand(tokens, at.heads.stop - at.heads.start, width).reshape(-1, width)
    room = job.k.untyped_storage().nbytes() // job.k.element_size()
    for run, offset in _runs(at.rows):
        count, first = run.stop - run.start, job.k.storage_offset() + offset
        if first >= 0 and first + count * K_COLUMNS <= room:
            rows = job.k.as_strided((count, K_COLUMNS), (K_COLUMNS, 1), first)
            rows[:, columns] = data[run]


def _put_nope(job: Job, at: Block, nope: Tensor) -> None:
    _put(job, at, slice(0, stock.NOPE), nope)


def _put_rope(job: Job, at: Block, rope: Tensor) -> None:
    _put(job, at, slice(stock.NOPE, K_COLUMNS), rope)


FAULTY = replace(CLEAN, put_nope=_put_nope, put_rope=_put_rope)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, with 32-bit offsets into the key."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
