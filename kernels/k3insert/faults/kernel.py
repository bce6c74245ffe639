"""A working key concat with cache insert in torch ops, in parts that a fault replaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from k3insert import stock
from k3insert.faults import storing


def key(k: Tensor, k_nope: Tensor, k_pe: Tensor) -> None:
    """Write both parts of the key."""
    k[..., : stock.NOPE] = k_nope
    k[..., stock.NOPE :] = k_pe


def place(slot: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return block and position of slots."""
    return slot // block_size, slot % block_size


def entry(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """Return cache entries, ``[kv_c | k_pe]``."""
    return torch.cat([kv_c, k_pe], dim=-1)


@dataclass(frozen=True)
class Insert:
    """The insert with its parts: called as ``stock.insert`` is."""

    key: Callable[[Tensor, Tensor, Tensor], None] = key
    stored: Callable[[Tensor], Tensor] = storing.stored
    place: Callable[[Tensor, int], tuple[Tensor, Tensor]] = place
    entry: Callable[[Tensor, Tensor], Tensor] = entry
    columns: int = stock.ENTRY

    def __call__(
        self,
        q: Tensor,
        k_nope: Tensor,
        k_pe: Tensor,
        kv_c: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Return ``k`` and write the cache.

        Raises
        ------
        TypeError
            For other dtypes than bf16 and fp16.

        """
        del q
        if k_nope.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"k_nope is {k_nope.dtype}: expected bfloat16 or float16")
        shape = (*k_nope.shape[:-1], stock.NOPE + stock.ROPE)
        k = torch.empty(shape, dtype=k_nope.dtype, device=k_nope.device)
        self.key(k, k_nope, k_pe)
        entries = self.entry(kv_c, k_pe[:, 0])[:, : self.columns]
        place = self.place(slot_mapping, kv_cache.shape[1])
        storing.insert(kv_cache, place, entries, self.stored(slot_mapping))
        return k


CLEAN = Insert()


def insert(
    q: Tensor, k_nope: Tensor, k_pe: Tensor, kv_c: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Run the clean twin of all storing."""
    return CLEAN(q, k_nope, k_pe, kv_c, kv_cache, slot_mapping)
