"""The reference: what the fused op says that it does, in torch statements.

Source: vLLM 0.33.0, ``vllm/models/kimi_k3/nvidia/ops/fused_mla_key_concat_kv_cache.py``
(``fused_mla_key_concat_ds_mla_insert``) and the comments of its kernel, which promise the bytes of
``concat_and_cache_mla`` with ``kv_cache_dtype="fp8_ds_mla"``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3common.arithmetic import ds_entries, store, turned_and_narrowed
from k3insert.stock import NOPE


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
    """Return ``k = [k_nope | k_pe]`` and store ``[kv_c | k_pe]`` as ``fp8_ds_mla`` entries.

    Parameters
    ----------
    q : ``[T, H, 192]``, bfloat16 or float16; with ``positions`` its last 64 columns are rotated,
        in place.
    k_nope : ``[T, H, 128]``, the same dtype.
    k_pe : ``[T, 1, 64]``, the same dtype; rotated likewise, but not in place.
    kv_c : ``[T, 512]``, the same dtype.
    kv_cache : uint8 ``[blocks, block_size, 656]``; written.
    slot_mapping : int64 ``[T]``: ``block * block_size + position``, or negative for none.
    positions, table : int64 ``[T]`` and float32 ``[P, 64]``, or two ``None`` for no rotation.

    Returns
    -------
    k : ``[T, H, 192]``, contiguous, the same dtype.

    """
    rope = turned_and_narrowed(k_pe, positions, table)
    if positions is not None:
        q[..., NOPE:] = turned_and_narrowed(q[..., NOPE:], positions, table)
    store(kv_cache, ds_entries(kv_c, rope[:, 0]), slot_mapping)
    return torch.cat((k_nope, rope.expand(-1, k_nope.shape[1], -1)), dim=-1)
