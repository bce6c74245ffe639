"""The reference: what the fused op claims to equal, in torch statements.

Source: vLLM 0.33.0. The key is ``_concat_k_nope_k_pe`` of
``vllm/model_executor/layers/attention/mla_attention.py`` with its direct copies. The insert is what
``torch.ops._C_cache_ops.concat_and_cache_mla`` does with ``kv_cache_dtype="auto"``: the entry of
token t, ``[kv_c | k_pe]``, goes to slot ``slot_mapping[t]``, and nowhere if that is negative. That
op has no CPU kernel, so it is a candidate of the pair rather than the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOPE = 128
"""Columns of the position-free key of a head (``qk_nope_head_dim``)."""
V = 128
"""Columns of the value of a head (``v_head_dim``), the other half of ``kv_b_proj``'s output."""
ROPE = 64
"""Columns of the rotary key, shared by all heads of a token (``qk_rope_head_dim``)."""
LATENT = 512
"""Columns of the latent (``kv_lora_rank``)."""
ENTRY = LATENT + ROPE
"""Columns of a cache entry."""


def insert(
    q: Tensor, k_nope: Tensor, k_pe: Tensor, kv_c: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Return ``k = [k_nope | k_pe]`` and store ``[kv_c | k_pe]`` in the paged cache, in place.

    Parameters
    ----------
    q : ``[T, H, 192]``; neither read nor written: rotary embedding is off in K3's layers.
    k_nope : ``[T, H, 128]``, bfloat16 or float16, any strides.
    k_pe : ``[T, 1, 64]``, the same dtype.
    kv_c : ``[T, 512]``, the same dtype.
    kv_cache : ``[blocks, block_size, 576]``, the same dtype; written.
    slot_mapping : int64 ``[T]``: ``block * block_size + position``, or negative for none.

    Returns
    -------
    k : ``[T, H, 192]``, contiguous.

    """
    del q
    k = torch.empty(
        (*k_nope.shape[:-1], NOPE + k_pe.shape[-1]), dtype=k_nope.dtype, device=k_nope.device
    )
    k[..., :NOPE] = k_nope
    k[..., NOPE:] = k_pe
    # Into an extra row where there is no slot: no value is looked at on the host.
    slots = kv_cache.shape[0] * kv_cache.shape[1]
    entries = torch.cat([kv_cache.reshape(slots, -1), kv_cache.new_zeros(1, kv_cache.shape[-1])])
    where = torch.where(slot_mapping < 0, slots, slot_mapping)
    entries[where] = torch.cat([kv_c, k_pe[:, 0]], dim=-1)
    kv_cache.copy_(entries[:-1].view(kv_cache.shape))
    return k
