"""Where tokens go in the paged cache: slot mappings as pure functions of a case's point.

A slot is ``block * block_size + position``; -1 is a token of padding, which isn't stored. No two
tokens share a slot: vLLM never maps them so, and which of two writers wins is undefined.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray

PADDING = -1
BLOCK_SIZES = {"in_order": 16, "scattered": 64, "padded": 64}
"""The kinds of mapping, and the block size of each: vLLM's least, and one that is common."""
ONE_A_BLOCK = 64
"""Up to so many tokens ``scattered`` puts each into a block of its own."""


def blocks(tokens: int, kind: str) -> int:
    """Return how many blocks the cache has: those that the mapping needs, and one at least."""
    block_size = BLOCK_SIZES[kind]
    if kind == "scattered":
        return max(1, tokens) if tokens <= ONE_A_BLOCK else -(-tokens // block_size) + 1
    first = block_size // 2 if kind == "in_order" else 0
    return max(1, -(-(tokens + first) // block_size))


def mapping(tokens: int, kind: str) -> NDArray[np.int64]:
    """Return int64 ``[tokens]``.

    - ``in_order``: consecutive, from the middle of block 0 on, over every edge between blocks.
    - ``scattered``: few tokens one a block, the last first; many over all slots, by steps of about
      0.618 of the cache.
    - ``padded``: every third token is padding; the others fill the cache from its end.
    """
    block_size = BLOCK_SIZES[kind]
    token = np.arange(tokens, dtype=np.int64)
    if kind == "in_order":
        return token + block_size // 2
    if kind == "padded":
        slot = blocks(tokens, kind) * block_size - 1 - token
        return np.where(token % 3 == 2, PADDING, slot)  # noqa: PLR2004 - every third
    if tokens <= ONE_A_BLOCK:
        return (tokens - 1 - token) * block_size + (5 * token + 3) % block_size
    slots = blocks(tokens, kind) * block_size
    step = int(0.618 * slots)
    while gcd(step, slots) > 1:
        step -= 1
    return (token * step + 1) % slots


@lru_cache(maxsize=64)
def kept(tokens: int, kind: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mapping on a device, and a copy that no call is given.

    It is kept, so that a call being captured, or one whose allocations are watched, makes none:
    the reference, which runs first, has made it.
    """
    made = torch.from_numpy(mapping(tokens, kind)).to(device)
    return made, made.clone()


def tensor(tokens: int, kind: str, device: torch.device) -> torch.Tensor:
    """Return the mapping on a device, the same tensor for all calls."""
    return kept(tokens, kind, device)[0]
