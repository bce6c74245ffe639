"""The reference: what the fused op says that it does, in torch statements.

Source: vLLM 0.33.0, ``vllm/models/kimi_k3/nvidia/ops/fused_mla_key_concat_kv_cache.py``
(``fused_mla_qkv_quant_kv_cache_fp8_insert``) and the comments of its kernel. The route without it
casts q, k and v and calls ``concat_and_cache_mla``; where that gives other bytes is in
docs/k3quant.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3common.arithmetic import quantise, store, turned
from k3insert.stock import NOPE


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
    """Return q, ``k = [k_nope | k_pe]`` and v in e4m3, and store ``[kv_c | k_pe]`` in the cache.

    Parameters
    ----------
    q : ``[T, H, 192]``, bfloat16 or float16; its last 64 columns are rotated with ``positions``.
    k_nope : ``[T, H, 128]``, the same dtype.
    k_pe : ``[T, 1, 64]``, the same dtype; rotated likewise.
    kv_c : ``[T, 512]``, the same dtype.
    v : ``[T, H, 128]``, the same dtype.
    kv_cache : float8_e4m3fn ``[blocks, block_size, 576]``; written.
    slot_mapping : int64 ``[T]``: ``block * block_size + position``, or negative for none.
    scales : float32 ``[1]`` each: inverse scales of q, k, v and the cache.
    positions, table : int64 ``[T]`` and float32 ``[P, 64]``, or two ``None`` for no rotation.

    Returns
    -------
    q, k, v : float8_e4m3fn ``[T, H, 192]``, ``[T, H, 192]``, ``[T, H, 128]``, contiguous.

    """
    q_inv, k_inv, v_inv, cache_inv = scales
    q_pe = turned(q[..., NOPE:], positions, table)
    rope = turned(k_pe, positions, table)
    heads = k_nope.shape[1]
    q8 = _concat(quantise(q[..., :NOPE], q_inv), quantise(q_pe, q_inv))
    k8 = _concat(quantise(k_nope, k_inv), quantise(rope, k_inv).expand(-1, heads, -1))
    store(
        kv_cache, _concat(quantise(kv_c, cache_inv), quantise(rope[:, 0], cache_inv)), slot_mapping
    )
    return q8, k8, quantise(v, v_inv).contiguous()


def _concat(left: Tensor, right: Tensor) -> Tensor:
    parts = (left.view(torch.uint8), right.view(torch.uint8))
    return torch.cat(parts, dim=-1).view(torch.float8_e4m3fn)
