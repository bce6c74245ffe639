"""Paged gathers of a rank's share of the context, by ``index_select``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rows_of(
    block_table: Tensor,
    cu_seq_lens: Tensor,
    seq_starts: Tensor | None,
    page: int,
) -> Tensor:
    """Row numbers in the flattened pool for each gathered row, int64 ``[cu_seq_lens[-1]]``.

    ``row = block_table[b, p // page] * page + p % page`` with ``p = start_b + j``. A start may
    fall inside a page: under DCP local starts are multiples of the interleave, not of the page.
    """
    first = cu_seq_lens[:-1]
    lengths = cu_seq_lens[1:] - first
    shift = -first if seq_starts is None else seq_starts - first
    row = torch.arange(lengths.numel()) * block_table.shape[1]
    shift, row = torch.stack((shift.to(torch.int64), row)).repeat_interleave(lengths, dim=1)
    position = torch.arange(shift.numel()) + shift
    index = position // page
    block: Tensor = block_table.reshape(-1).index_select(0, row + index)
    rows: Tensor = (block - index) * page + position
    return rows


def make_cp_gather_cache(_original: Any) -> Any:
    """``vllm._custom_ops.cp_gather_cache`` for the CPU: copies rows, in the cache's dtype."""

    def cp_gather_cache(
        src_cache: Tensor,
        dst: Tensor,
        block_table: Tensor,
        cu_seq_lens: Tensor,
        batch_size: int,
        seq_starts: Tensor | None = None,
    ) -> None:
        rows = rows_of(
            block_table[:batch_size],
            cu_seq_lens[: batch_size + 1],
            None if seq_starts is None else seq_starts[:batch_size],
            src_cache.shape[1],
        )
        pool = src_cache.reshape(-1, src_cache.shape[-1])
        dst[: rows.numel()].copy_(pool.index_select(0, rows))

    return cp_gather_cache


def make_gather_and_maybe_dequant_cache(_original: Any) -> Any:
    """``vllm._custom_ops.gather_and_maybe_dequant_cache`` for the CPU.

    An fp8 pool is widened to float32, multiplied by ``scale`` and rounded once to the dtype of
    ``dst``, as the CUDA kernel does; any other pool is copied. The loop layer needs that, and a
    server that emulates fp8 prefill (``kvroute.fp8``): vLLM's CPU backend takes no fp8 cache.
    """

    def gather_and_maybe_dequant_cache(  # noqa: PLR0913, PLR0917
        src_cache: Tensor,
        dst: Tensor,
        block_table: Tensor,
        cu_seq_lens: Tensor,
        token_to_seq: Tensor,
        num_tokens: int,
        kv_cache_dtype: str,
        scale: Tensor,
        seq_starts: Tensor | None = None,
    ) -> None:
        # As the CUDA kernel: a row's request is what token_to_seq says, not what the lengths give.
        request = token_to_seq[:num_tokens].to(torch.int64)
        position = torch.arange(num_tokens) - cu_seq_lens.to(torch.int64)[request]
        if seq_starts is not None:
            position = position + seq_starts.to(torch.int64)[request]
        page = src_cache.shape[1]
        block = block_table.to(torch.int64)[request, position // page]
        rows = block * page + position % page
        gathered = src_cache.reshape(-1, src_cache.shape[-1]).index_select(0, rows)
        if kv_cache_dtype not in ("auto", "bfloat16", "float16"):
            widened = gathered.view(torch.float8_e4m3fn).to(torch.float32)
            gathered = (widened * scale.to(torch.float32)).to(dst.dtype)
        dst[: gathered.shape[0]].copy_(gathered)

    return gather_and_maybe_dequant_cache
