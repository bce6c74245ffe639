"""Which tokens are stored, and how their entries are written: right, and with a fault."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Place: TypeAlias = tuple[Tensor, Tensor]


def stored(slot_mapping: Tensor) -> Tensor:
    """Return which tokens have a slot, bool ``[T]``."""
    return slot_mapping >= 0


def every_token(slot_mapping: Tensor) -> Tensor:
    """Fault: -1 isn't skipped; its block and position count from the end."""
    return torch.ones_like(slot_mapping, dtype=torch.bool)


def all_but_last(slot_mapping: Tensor) -> Tensor:
    """Fault: the last token isn't reached."""
    kept = stored(slot_mapping)
    kept[-1:] = False
    return kept


def insert(cache: Tensor, place: Place, entries: Tensor, kept: Tensor) -> None:
    """Write the entries of the tokens in ``kept``, and no other byte of the cache.

    Nothing is looked at on the host, so that a graph can capture it: a token that isn't kept writes
    what the first one that is writes, to the same place, and where there is none, what stands at
    the cache's first place already.

    Parameters
    ----------
    cache : ``[blocks, block_size, N]``; written.
    place : block and position of each token, int64 ``[T]`` each.
    entries : ``[T, n]``, ``n <= N``: the first columns that are written.
    kept : bool ``[T]``.

    """
    if not len(kept):
        return
    if cache.element_size() == 1:
        cache, entries = cache.view(torch.uint8), entries.view(torch.uint8)
    columns = entries.shape[-1]
    first, some = kept.int().argmax()[None], kept.any()
    block, position = (
        torch.where(kept, x, torch.where(some, x.index_select(0, first), 0)) for x in place
    )
    spare = torch.where(some, entries.index_select(0, first), cache[0, :1, :columns])
    cache[block, position, :columns] = torch.where(kept[:, None], entries, spare)
