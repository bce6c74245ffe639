"""Faults of the slots: where an entry goes, and whether it goes anywhere.

Each stands for a bug of paged caches: padding that wraps to the last slot, a block size taken for
granted, a tail that isn't reached, a mapping read at the wrong token. They differ from
``k3insert.faults.kernel.insert`` in ``stored`` or ``place``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3insert import stock
from k3insert.faults import kernel, storing
from k3insert.faults.kernel import Insert

SIXTEEN = 16
HALF = 1 << 31
"""What a signed offset of 32 bits counts to, in elements."""

padding_wraps = Insert(stored=storing.every_token)
"""I01: a slot of -1 isn't skipped, and its block and position count from the end."""


def _sixteen(slot: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    flat = (slot // SIXTEEN) * SIXTEEN + slot % SIXTEEN
    inside = flat % block_size
    return flat // block_size, torch.where(inside >= SIXTEEN, inside % SIXTEEN, inside)


sixteen = Insert(place=_sixteen)
"""I02: positions of a block count to 16, whatever its size."""

last_lost = Insert(stored=storing.all_but_last)
"""I03: the last token's entry isn't stored."""


stops_at_padding = Insert(stored=lambda slot_mapping: (slot_mapping < 0).cumsum(0) == 0)
"""I04: the first padding ends the insert."""


def _block_edge(slot: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    block, position = kernel.place(slot, block_size)
    return block, position.clamp(max=block_size - 2)


block_edge = Insert(place=_block_edge)
"""I05: the last position of a block is taken for the one before it."""


def _int32_offset(slot: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    return kernel.place(slot * stock.ENTRY % HALF // stock.ENTRY, block_size)


int32_offset = Insert(place=_int32_offset)
"""I11: offsets in the cache, in elements, have 31 bits: entries past that land on earlier ones."""


def marks_padding(
    q: Tensor, k_nope: Tensor, k_pe: Tensor, kv_c: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """I12: padding of the caller's mapping, which all layers share, is -2 afterwards."""
    k = kernel.CLEAN(q, k_nope, k_pe, kv_c, kv_cache, slot_mapping)
    slot_mapping.masked_fill_(slot_mapping < 0, -2)
    return k
