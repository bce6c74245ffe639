"""K06: the rope columns are shifted by 8.

Kind: the boundary between nope and rope is one lane off (SGLang 15522): lane l of the rope columns
gets the eight columns of lane l - 1, the first one those of the last.

Differs from its clean twin in ``put_rope``: it rolls the columns first.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvpack.faults import kernel
from kvpack.faults.kernel import CLEAN, LANE, Block, Job


def _put_rope(job: Job, at: Block, rope: Tensor) -> None:
    kernel.put_rope(job, at, rope.roll(LANE, dims=-1))


FAULTY = replace(CLEAN, put_rope=_put_rope)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, with the rope columns rolled by one lane."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
