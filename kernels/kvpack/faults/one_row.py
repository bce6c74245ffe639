"""A pack that loses one token of each chunk: what a server's log-probs must be able to show.

Not one of the catalogue's: ``bytegate ppl run --route kvpack.faults.one_row:kv_pack`` tells whether
the model under test depends on its context at all. Its clean twin is stock.
"""

from __future__ import annotations

from torch import Tensor

from kvpack import stock


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack as stock does, and leave zeros where the middle token's key and value belong."""
    k, v = (x.clone() for x in stock.kv_pack(kv_nope, k_pe, use_fp8))
    if k.shape[0]:
        lost = k.shape[0] // 2
        k[lost].zero_()
        v[lost].zero_()
    return k, v
