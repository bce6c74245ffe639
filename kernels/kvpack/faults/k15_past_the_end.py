"""K15: one 16-byte vector is written past the end of k.

Kind: out of bounds; it lands in a neighbour, and k itself is right.

Differs from its clean twin in ``finish``, which stores the last row's last vector once more, one
vector further. It does so where k is a part of a larger allocation, such as a guarded arena or a
caching allocator's block seen through its storage. Where k ends with its storage it doesn't:
nobody could see it there, and on a heap it would kill the process at some later time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvpack.faults.kernel import CLEAN, Job

VECTOR_BYTES = 16


def _finish(job: Job) -> None:
    if job.k.numel() == 0:
        return
    flat = job.k.view(-1).view(torch.uint8)
    end = flat.storage_offset() + flat.numel()
    if flat.untyped_storage().nbytes() >= end + VECTOR_BYTES:
        beyond = flat.as_strided((VECTOR_BYTES,), (1,), end)
        beyond.copy_(flat[-VECTOR_BYTES:])


FAULTY = replace(CLEAN, finish=_finish)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, and write one vector too many."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
