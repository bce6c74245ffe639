"""The reference: what the fused decode ops say that they do, in torch statements.

Source: vLLM 0.33.0, ``vllm/models/kimi_k3/nvidia/ops/fused_mla_key_concat_kv_cache.py``
(``fused_mla_decode_q_concat_kv_cache_insert``) and the comments of its kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3common.arithmetic import ds_entries, quantise, store, turned, turned_and_narrowed

FORMATS = ("auto", "fp8", "ds_mla")
"""Formats of the cache: the model's dtype, e4m3 with one scale, and 656 bytes an entry."""


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
    """Return ``mqa_q = [ql_nope | q_pe]`` and store ``[kv_c | k_pe]`` in the cache.

    Parameters
    ----------
    ql_nope : ``[T, H, 512]``, bfloat16 or float16: the absorbed query.
    q_pe : ``[T, H, 64]``, the same dtype; rotated with ``positions``.
    kv_c : ``[T, 512]``, the same dtype.
    k_pe : ``[T, 1, 64]``, the same dtype; rotated likewise.
    kv_cache : ``[blocks, block_size, N]``; written. ``"auto"``: N = 576 of the same dtype,
        ``"fp8"``: 576 of float8_e4m3fn, ``"ds_mla"``: 656 of uint8.
    slot_mapping : int64 ``[T]``: ``block * block_size + position``, or negative for none.
    kind : one of ``FORMATS``.
    scales : float32 ``[1]`` each; the first is the query's inverse scale, the last the cache's.
        Only ``"fp8"`` uses them.
    positions, table : int64 ``[T]`` and float32 ``[P, 64]``, or two ``None`` for no rotation.

    Returns
    -------
    mqa_q : ``[T, H, 576]``, contiguous, float8_e4m3fn for ``"fp8"``, else the inputs' dtype.

    """
    if kind == "fp8":
        q_rope, rope = turned(q_pe, positions, table), turned(k_pe, positions, table)
        left, right = quantise(ql_nope, scales[0]), quantise(q_rope, scales[0])
        entry = quantise(kv_c, scales[-1]), quantise(rope[:, 0], scales[-1])
        store(kv_cache, _joined(*entry), slot_mapping)
        return _joined(left, right)
    rope = turned_and_narrowed(k_pe, positions, table)[:, 0]
    q_rope = turned_and_narrowed(q_pe, positions, table)
    entries = ds_entries(kv_c, rope) if kind == "ds_mla" else torch.cat((kv_c, rope), dim=-1)
    store(kv_cache, entries, slot_mapping)
    return torch.cat((ql_nope, q_rope), dim=-1)


def _joined(left: Tensor, right: Tensor) -> Tensor:
    parts = (left.view(torch.uint8), right.view(torch.uint8))
    return torch.cat(parts, dim=-1).view(torch.float8_e4m3fn)
