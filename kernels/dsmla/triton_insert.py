"""Our own key concat with ``fp8_ds_mla`` insert: ``k3common.triton_rows``, two or three launches.

Importing this module imports Triton, or raises ``Unavailable``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3common import triton_rows
from k3common.triton_rows import Rotation
from k3insert.stock import NOPE, ROPE


def load(device: str, library: str | None) -> Callable[..., Tensor]:
    """Return ``concat_and_insert``.

    Raises
    ------
    Unavailable
        As ``k3common.triton_rows.require``.

    """
    triton_rows.require(device, library)
    return concat_and_insert


def concat_and_insert(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    kv_c: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None,
    table: Tensor | None,
) -> Tensor:
    """Do what ``stock.concat_and_insert`` does.

    Raises
    ------
    TypeError, ValueError
        As ``k3common.triton_rows.check``.

    """
    triton_rows.check({"q": q, "k_nope": k_nope, "k_pe": k_pe, "kv_c": kv_c})
    rotation = Rotation(positions, table)
    tokens, heads, _ = k_nope.shape
    k = torch.empty((tokens, heads, NOPE + ROPE), dtype=k_nope.dtype, device=k_nope.device)
    if not tokens:
        return k
    triton_rows.count()
    triton_rows.rows(k_nope, k_pe.expand(-1, heads, -1), k, rotation, at=NOPE)
    if positions is not None:
        triton_rows.rows(None, q[..., NOPE:], q[..., NOPE:], rotation, at=0)
    triton_rows.ds_rows(kv_c, k_pe[:, 0], kv_cache, rotation, slot_mapping)
    return k
