"""K05: k_pe is written for head 0 alone.

Kind: a broadcast forgotten. The rotary key has one head that all heads share; a copy that takes
its head count from k_pe instead of k fills head 0 and leaves the others as they were.

Differs from its clean twin in ``put_rope``: rows of other heads are skipped.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvpack.faults import kernel
from kvpack.faults.kernel import CLEAN, Block, Job


def _put_rope(job: Job, at: Block, rope: Tensor) -> None:
    if at.heads.start == 0:
        kernel.put_rope(job, Block(at.tokens, slice(0, 1), at.rows), rope)


FAULTY = replace(CLEAN, put_rope=_put_rope)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, with the rope columns of heads above 0 unwritten."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
