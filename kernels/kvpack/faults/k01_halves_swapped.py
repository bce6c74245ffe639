"""K01: the halves of kv_nope are swapped for one head.

Kind: a wrong split. ``kv_b_proj`` gives each head its position-free key and then its value; a
kernel that takes the halves from two tables of head offsets gets one entry wrong.

Differs from its clean twin in ``split``: head ``H // 2`` has its value before its key.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvpack import stock
from kvpack.faults import kernel
from kvpack.faults.kernel import CLEAN, Block, Job


def _split(kv: Tensor, at: Block, job: Job) -> tuple[Tensor, Tensor]:
    head = job.k.shape[1] // 2
    if at.heads.start <= head < at.heads.stop:
        row = kv[:, head - at.heads.start]
        swapped = torch.cat([row[:, stock.NOPE :], row[:, : stock.NOPE]], dim=-1)
        kv = kv.clone(memory_format=torch.contiguous_format)
        kv[:, head - at.heads.start] = swapped
    return kernel.split(kv, at, job)


FAULTY = replace(CLEAN, split=_split)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, with the halves of one head swapped."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
