"""Our own q, k and v quantisation with cache insert: ``k3common.triton_rows``, a launch a tensor.

Importing this module imports Triton, or raises ``Unavailable``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3common import triton_rows
from k3common.triton_rows import Rotation
from k3insert.stock import LATENT, NOPE, ROPE


def load(device: str, library: str | None) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return ``quantise_and_insert``.

    Raises
    ------
    Unavailable
        As ``k3common.triton_rows.require``.

    """
    triton_rows.require(device, library)
    return quantise_and_insert


def quantise_and_insert(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    kv_c: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    scales: tuple[Tensor, ...],
    positions: Tensor | None,
    table: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what ``stock.quantise_and_insert`` does, with four launches.

    Raises
    ------
    TypeError, ValueError
        As ``k3common.triton_rows.check``.

    """
    triton_rows.check({"q": q, "k_nope": k_nope, "k_pe": k_pe, "kv_c": kv_c, "v": v})
    rotation = Rotation(positions, table)
    tokens, heads, _ = q.shape
    made = [
        torch.empty((tokens, heads, columns), dtype=torch.float8_e4m3fn, device=q.device)
        for columns in (NOPE + ROPE, NOPE + ROPE, v.shape[2])
    ]
    if not tokens:
        return made[0], made[1], made[2]
    triton_rows.count()
    shared = k_pe.expand(-1, heads, -1)
    parts = ((q[..., :NOPE], q[..., NOPE:]), (k_nope, shared), (v, None))
    for (a, b), out, scale in zip(parts, made, scales, strict=False):
        triton_rows.rows(a, b, out, rotation, at=NOPE, scale_inv=scale)
    triton_rows.rows(
        kv_c[:, None],
        k_pe,
        kv_cache,
        rotation,
        at=LATENT,
        scale_inv=scales[3],
        slots=slot_mapping,
    )
    return made[0], made[1], made[2]
