"""Faults of what is stored, and of the key beside it.

They stand for a layout with its parts swapped, columns left as they were, a broadcast forgotten
and an operand that is written in place. They differ from ``k3insert.faults.kernel.insert`` in
``entry``, ``key`` or ``columns``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3insert import stock
from k3insert.faults import kernel
from k3insert.faults.kernel import CLEAN, Insert

rope_first = Insert(entry=lambda kv_c, k_pe: torch.cat([k_pe, kv_c], dim=-1))
"""I06: an entry is ``[k_pe | kv_c]``."""

rope_stale = Insert(columns=stock.LATENT)
"""I07: the rope columns of an entry keep what they had."""

one_lane = Insert(columns=stock.ENTRY - 8)
"""I08: the last 16 bytes of an entry keep what they had."""


def _head_zero(k: Tensor, k_nope: Tensor, k_pe: Tensor) -> None:
    k[..., : stock.NOPE] = k_nope
    k[:, :1, stock.NOPE :] = k_pe


head_zero = Insert(key=_head_zero)
"""I09: k_pe is written for head 0 alone."""


def q_written(
    q: Tensor, k_nope: Tensor, k_pe: Tensor, kv_c: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """I10: q is rotated by nothing, in place: its zeros lose their sign."""
    q += 0
    return CLEAN(q, k_nope, k_pe, kv_c, kv_cache, slot_mapping)


def whole_blocks(
    q: Tensor, k_nope: Tensor, k_pe: Tensor, kv_c: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Not a fault: the cache is copied, changed and put back."""
    copy = kv_cache.clone()
    k = kernel.insert(q, k_nope, k_pe, kv_c, copy, slot_mapping)
    kv_cache.copy_(copy)
    return k
