"""vLLM's own ops: the fused key concat with cache insert, and the two that it stands for.

Source: vLLM 0.33.0, ``vllm/models/kimi_k3/nvidia/ops/fused_mla_key_concat_kv_cache.py``
(``fused_mla_key_concat_kv_cache_insert``), repeated statement for statement, and
``concat_and_cache_mla`` of ``vllm/_custom_ops.py``. Both live in ``_C_stable_libtorch.abi3.so``:

    fused_kimi_k3_mla_key_concat_kv_cache_insert(
        Tensor! q, Tensor k_nope, Tensor k_pe, Tensor kv_c_normed, Tensor! k_out, Tensor! k_cache,
        Tensor slot_mapping, int cache_block_size, Tensor? position_ids=None,
        Tensor? cos_sin_cache=None) -> ()

By its own messages the fused op takes ``kv_c`` and ``k_cache`` contiguous, ``k_nope`` with a last
stride of 1, bf16 and fp16. Its rotary embedding is left off here: it rotates in float32, and stock
by another op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k3insert import stock
from kvpack import vllm_op
from kvpack.spec import Unavailable

FUSED = "fused_kimi_k3_mla_key_concat_kv_cache_insert"
CACHE = "concat_and_cache_mla"


def load(device: str, library: str | None) -> Callable[..., Tensor]:
    """Register the ops and return ``insert``.

    Raises
    ------
    Unavailable
        As ``kvpack.vllm_op.load``, or a library without the op.

    """
    vllm_op.load(device, library)
    if not hasattr(torch.ops._C, FUSED):  # noqa: SLF001 - vLLM's choice of a name
        raise Unavailable(f"the library has no op _C.{FUSED}: expected the file of vLLM 0.33")
    return insert


def load_cache_op(device: str, library: str | None) -> Callable[..., Tensor]:
    """Register the ops and return ``insert_by_cache_op``.

    Raises
    ------
    Unavailable
        As ``load``.

    """
    vllm_op.load(device, library)
    if not hasattr(torch.ops._C_cache_ops, CACHE):  # noqa: SLF001 - likewise
        raise Unavailable(f"the library has no op _C_cache_ops.{CACHE}")
    return insert_by_cache_op


def insert(
    q: Tensor, k_nope: Tensor, k_pe: Tensor, kv_c: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Do what ``stock.insert`` does with the fused op."""
    k_pe = k_pe.reshape(k_pe.shape[0], -1)
    tp, num_heads, qk_nope_head_dim = k_nope.shape
    qk_head_dim = qk_nope_head_dim + k_pe.shape[1]
    k_out = torch.empty((tp, num_heads, qk_head_dim), dtype=k_nope.dtype, device=k_nope.device)
    if tp == 0:
        return k_out
    ops: Any = torch.ops._C  # noqa: SLF001 - vLLM's choice of a name
    ops.fused_kimi_k3_mla_key_concat_kv_cache_insert(
        q, k_nope, k_pe, kv_c, k_out, kv_cache, slot_mapping, kv_cache.shape[1], None, None
    )
    return k_out


def insert_by_cache_op(
    q: Tensor, k_nope: Tensor, k_pe: Tensor, kv_c: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Do what ``stock.insert`` does with two copies and vLLM's stock cache op."""
    del q
    k = torch.empty(
        (*k_nope.shape[:-1], stock.NOPE + k_pe.shape[-1]), dtype=k_nope.dtype, device=k_nope.device
    )
    k[..., : stock.NOPE] = k_nope
    k[..., stock.NOPE :] = k_pe
    if k.shape[0]:
        scale = torch.ones((), dtype=torch.float32, device=k.device)
        ops: Any = torch.ops._C_cache_ops  # noqa: SLF001 - likewise
        ops.concat_and_cache_mla(kv_c, k_pe[:, 0], kv_cache, slot_mapping, "auto", scale, False)
    return k
