"""vLLM's own op, and the route that it stands for.

Source: vLLM 0.33.0, ``vllm/models/kimi_k3/nvidia/ops/fused_mla_key_concat_kv_cache.py``
(``fused_mla_qkv_quant_kv_cache_fp8_insert``), repeated statement for statement. The schema:

    fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert(
        Tensor q, Tensor k_nope, Tensor k_pe, Tensor kv_c_normed, Tensor v, Tensor! q_fp8,
        Tensor! k_fp8, Tensor! v_fp8, Tensor! k_cache, Tensor slot_mapping, Tensor q_scale_inv,
        Tensor k_scale_inv, Tensor v_scale_inv, Tensor cache_scale_inv, int cache_block_size,
        Tensor? position_ids=None, Tensor? cos_sin_cache=None) -> ()
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3common import vllm_ops

FUSED = "fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert"


def load(device: str, library: str | None) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Register the op and return ``quantise_and_insert``.

    Raises
    ------
    Unavailable
        As ``k3common.vllm_ops.load``.

    """
    op = vllm_ops.load(device, library, FUSED)(FUSED)

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
        k_pe = k_pe.reshape(k_pe.shape[0], -1)
        tp, num_heads, _ = q.shape
        qk_head_dim = q.shape[2]
        v_head_dim = v.shape[2]
        fp8 = torch.float8_e4m3fn
        q_fp8 = torch.empty((tp, num_heads, qk_head_dim), dtype=fp8, device=q.device)
        k_fp8 = torch.empty((tp, num_heads, qk_head_dim), dtype=fp8, device=q.device)
        v_fp8 = torch.empty((tp, num_heads, v_head_dim), dtype=fp8, device=q.device)
        if tp == 0:
            return q_fp8, k_fp8, v_fp8
        op(
            q,
            k_nope,
            k_pe,
            kv_c,
            v,
            q_fp8,
            k_fp8,
            v_fp8,
            kv_cache,
            slot_mapping,
            *scales,
            kv_cache.shape[1],
            positions,
            table,
        )
        return q_fp8, k_fp8, v_fp8

    return quantise_and_insert
