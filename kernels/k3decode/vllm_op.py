"""vLLM's own ops, one for each format of the cache.

Source: vLLM 0.33.0, ``vllm/models/kimi_k3/nvidia/ops/fused_mla_key_concat_kv_cache.py``
(``fused_mla_decode_q_concat_kv_cache_insert``), repeated statement for statement. The schemas:

    fused_kimi_k3_mla_decode_q_concat_kv_cache_insert(
        Tensor ql_nope, Tensor q_pe, Tensor kv_c_normed, Tensor k_pe, Tensor! mqa_q,
        Tensor! k_cache, Tensor slot_mapping, int cache_block_size, Tensor? position_ids=None,
        Tensor? cos_sin_cache=None) -> ()
    fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert(
        ... Tensor slot_mapping, Tensor q_scale_inv, Tensor cache_scale_inv,
        int cache_block_size, ...) -> ()
    fused_kimi_k3_mla_decode_q_concat_ds_mla_insert(as the first) -> ()
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3common import vllm_ops

OPS = {
    "auto": "fused_kimi_k3_mla_decode_q_concat_kv_cache_insert",
    "fp8": "fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert",
    "ds_mla": "fused_kimi_k3_mla_decode_q_concat_ds_mla_insert",
}


def load(device: str, library: str | None) -> Callable[..., Tensor]:
    """Register the ops and return ``concat_and_insert``.

    Raises
    ------
    Unavailable
        As ``k3common.vllm_ops.load``.

    """
    op = vllm_ops.load(device, library, *OPS.values())

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
        k_pe = k_pe.reshape(k_pe.shape[0], -1)
        b, num_heads, kv_lora_rank = ql_nope.shape
        entry = kv_lora_rank + q_pe.shape[-1]
        fp8_q = kind == "fp8"
        out_dtype = torch.float8_e4m3fn if fp8_q else ql_nope.dtype
        mqa_q = torch.empty((b, num_heads, entry), dtype=out_dtype, device=ql_nope.device)
        if b == 0:
            return mqa_q
        inverses = (scales[0], scales[-1]) if fp8_q else ()
        op(OPS[kind])(
            ql_nope,
            q_pe,
            kv_c,
            k_pe,
            mqa_q,
            kv_cache,
            slot_mapping,
            *inverses,
            kv_cache.shape[1],
            positions,
            table,
        )
        return mqa_q

    return concat_and_insert
