"""Writing latents to an fp8 cache, which vLLM's CPU backend doesn't do."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def to_fp8(values: Tensor, scale: Tensor) -> Tensor:
    """``e4m3(values / scale)`` as uint8 of the same shape: what ``concat_and_cache_mla`` stores."""
    scaled = values.to(torch.float32) / scale.to(torch.float32)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def from_fp8(rows: Tensor, scale: Tensor) -> Tensor:
    """``scale * rows`` in float32, for ``rows`` of bytes or e4m3."""
    return rows.view(torch.float8_e4m3fn).to(torch.float32) * scale.to(torch.float32)


def make_do_kv_cache_update(original: Any) -> Any:
    """``CPUMLAImpl.do_kv_cache_update`` for an fp8 cache; the original for any other.

    Rows ``[kv_c | k_pe]`` go to ``slot_mapping``; negative slots are skipped.
    """

    @functools.wraps(original)
    def do_kv_cache_update(
        self: Any,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        if not kv_cache_dtype.startswith("fp8") or not kv_cache.numel():
            original(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)
            return
        slots = slot_mapping.flatten().to(torch.int64)
        kept = slots >= 0
        rows = torch.cat((kv_c_normed, k_pe.flatten(1)), dim=-1)[: slots.numel()]
        pool = kv_cache.view(torch.uint8).view(-1, rows.shape[-1])
        pool[slots[kept]] = to_fp8(rows[kept], k_scale)

    return do_kv_cache_update
