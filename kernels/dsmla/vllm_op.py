"""vLLM's own op, and the cache op whose bytes it promises.

Source: vLLM 0.33.0, ``vllm/models/kimi_k3/nvidia/ops/fused_mla_key_concat_kv_cache.py``
(``fused_mla_key_concat_ds_mla_insert``), repeated statement for statement, and
``concat_and_cache_mla`` of ``vllm/_custom_ops.py``. The schemas:

    fused_kimi_k3_mla_key_concat_ds_mla_insert(
        Tensor! q, Tensor k_nope, Tensor k_pe, Tensor kv_c_normed, Tensor! k_out, Tensor! k_cache,
        Tensor slot_mapping, int cache_block_size, Tensor? position_ids=None,
        Tensor? cos_sin_cache=None) -> ()
    concat_and_cache_mla(
        Tensor kv_c, Tensor k_pe, Tensor! kv_cache, Tensor slot_mapping, str kv_cache_dtype,
        Tensor scale, bool skip_scale=False) -> ()
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3common import vllm_ops
from k3common.arithmetic import turned_and_narrowed
from k3insert.stock import NOPE

FUSED = "fused_kimi_k3_mla_key_concat_ds_mla_insert"
CACHE = "concat_and_cache_mla"


def load(device: str, library: str | None) -> Callable[..., Tensor]:
    """Register the op and return ``concat_and_insert``.

    Raises
    ------
    Unavailable
        As ``k3common.vllm_ops.load``.

    """
    op = vllm_ops.load(device, library, FUSED)(FUSED)

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
        k_pe = k_pe.reshape(k_pe.shape[0], -1)
        tp, num_heads, qk_nope_head_dim = k_nope.shape
        qk_head_dim = qk_nope_head_dim + k_pe.shape[1]
        k_out = torch.empty((tp, num_heads, qk_head_dim), dtype=k_nope.dtype, device=k_nope.device)
        if tp == 0:
            return k_out
        block_size = kv_cache.shape[1]
        op(q, k_nope, k_pe, kv_c, k_out, kv_cache, slot_mapping, block_size, positions, table)
        return k_out

    return concat_and_insert


def load_cache_op(device: str, library: str | None) -> Callable[..., Tensor]:
    """Register vLLM's stock cache op and return copies, a rotation in torch, and that op.

    Raises
    ------
    Unavailable
        As ``k3common.vllm_ops.load``.

    """
    op = vllm_ops.load(device, library, CACHE)(CACHE)

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
        rope = turned_and_narrowed(k_pe, positions, table)
        if positions is not None:
            q[..., NOPE:] = turned_and_narrowed(q[..., NOPE:], positions, table)
        shape = (*k_nope.shape[:-1], NOPE + k_pe.shape[-1])
        k = torch.empty(shape, dtype=k_nope.dtype, device=k_nope.device)
        k[..., :NOPE] = k_nope
        k[..., NOPE:] = rope
        if k.shape[0]:
            scale = torch.ones(1, dtype=torch.float32, device=k.device)
            op(kv_c, rope[:, 0], kv_cache, slot_mapping, "fp8_ds_mla", scale, False)
        return k

    return concat_and_insert
