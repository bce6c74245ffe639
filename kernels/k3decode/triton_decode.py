"""Our own decode query concat with cache insert: ``k3common.triton_rows``, two launches.

Importing this module imports Triton, or raises ``Unavailable``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3common import triton_rows
from k3common.triton_rows import Rotation
from k3insert.stock import ENTRY, LATENT


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
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kind: str,
    scales: tuple[Tensor, ...],
    positions: Tensor | None,
    table: Tensor | None,
) -> Tensor:
    """Do what ``stock.concat_and_insert`` does.

    Raises
    ------
    TypeError, ValueError
        As ``k3common.triton_rows.check``.

    """
    triton_rows.check({"ql_nope": ql_nope, "q_pe": q_pe, "kv_c": kv_c, "k_pe": k_pe})
    rotation = Rotation(positions, table)
    tokens, heads, _ = ql_nope.shape
    fp8 = kind == "fp8"
    dtype = torch.float8_e4m3fn if fp8 else ql_nope.dtype
    mqa_q = torch.empty((tokens, heads, ENTRY), dtype=dtype, device=ql_nope.device)
    if not tokens:
        return mqa_q
    triton_rows.count()
    scale = scales[0] if fp8 else None
    triton_rows.rows(ql_nope, q_pe, mqa_q, rotation, at=LATENT, scale_inv=scale)
    if kind == "ds_mla":
        triton_rows.ds_rows(kv_c, k_pe[:, 0], kv_cache, rotation, slot_mapping)
        return mqa_q
    scale = scales[-1] if fp8 else None
    triton_rows.rows(
        kv_c[:, None], k_pe, kv_cache, rotation, at=LATENT, scale_inv=scale, slots=slot_mapping
    )
    return mqa_q
