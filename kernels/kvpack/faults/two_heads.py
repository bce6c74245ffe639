"""A pack that mixes up two heads of a rank: what a model with many heads must be able to show.

Not one of the catalogue's: ``bytegate ppl run --route kvpack.faults.two_heads:kv_pack`` tells
whether the model under test notices. Its clean twin is stock.
"""

from __future__ import annotations

from torch import Tensor

from kvpack import stock


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack as stock does, and swap the last two heads' keys and values in the chunk's first half.

    A rank of one head is packed as stock does.
    """
    k, v = (x.clone() for x in stock.kv_pack(kv_nope, k_pe, use_fp8))
    if k.shape[1] > 1:
        rows = slice(0, -(-k.shape[0] // 2))
        for x in (k, v):
            x[rows, -2:] = x[rows, -2:].flip(1)
    return k, v
