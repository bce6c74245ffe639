"""K03: rows beyond the first grid pass are never written.

Kind: the grid-stride loop is missing. The grid is capped at SMs x 8 blocks of 16 rows, so
everything up to SMs x 128 rows (16,896 on an H200) is right and no small test sees it.

Differs from its clean twin in ``passes``: it ends after the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from torch import Tensor

from kvpack.faults import kernel
from kvpack.faults.kernel import CLEAN


def _passes(rows: int, per_pass: int) -> Iterator[tuple[int, int]]:
    return islice(kernel.passes(rows, per_pass), 1)


FAULTY = replace(CLEAN, passes=_passes)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack the rows of the first grid pass."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
