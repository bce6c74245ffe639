"""Decode on a rank's share of the cache, with the log-sum-exp that the combine needs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kvroute.cpu.cache import from_fp8


def keep_ranks(original: Any) -> Any:
    """Wrap ``CPUMLAImpl.__init__``, which resets what ``AttentionImpl.__new__`` had found out."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from vllm.config import get_current_vllm_config

        parallel = get_current_vllm_config().parallel_config
        self.dcp_world_size = parallel.decode_context_parallel_size
        self.cp_kv_cache_interleave_size = parallel.cp_kv_cache_interleave_size

    return init


def allow_lse() -> None:
    """Set ``CPUMLAImpl.can_return_lse_for_decode``, now that it can."""
    from vllm.v1.attention.backends.mla import cpu_mla

    cpu_mla.CPUMLAImpl.can_return_lse_for_decode = True


def make_forward_mqa(original: Any) -> Any:
    """``CPUMLAImpl.forward_mqa`` with the log-sum-exp under DCP; otherwise the original."""

    @functools.wraps(original)
    def forward_mqa(
        self: Any,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if self.dcp_world_size == 1:
            result: tuple[Tensor, Tensor | None] = original(
                self,
                q,
                kv_c_and_k_pe_cache,
                attn_metadata,
                layer,
            )
            return result
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        decode = attn_metadata.decode
        return decode_with_lse(
            query,
            kv_c_and_k_pe_cache,
            decode.block_table,
            decode.seq_lens,
            scale=self.scale,
            rank=self.kv_lora_rank,
            cache_scale=layer._k_scale,  # noqa: SLF001 - where vLLM keeps it
        )

    return forward_mqa


def decode_with_lse(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    rank: int,
    cache_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one token a request over its local rows, in float32.

    ``s = scale * q . c``, ``out = softmax(s) @ c[:, :rank]``, ``lse = log(sum(exp(s)))``.

    Parameters
    ----------
    query : ``[B, H, rank + rope]``.
    cache : ``[blocks, page, rank + rope]``; of ``float8_e4m3fn``, its rows times ``cache_scale``.
    block_table, seq_lens : ``[B, blocks]`` and ``[B]``, this rank's.
    scale : softmax scale.
    rank : width of the latent, the value part of a row.

    Returns
    -------
    out ``[B, H, rank]`` in the query's dtype and lse ``[B, H]`` float32; a request without
    local rows gives 0 and ``-inf``.

    """
    batch, heads, _ = query.shape
    page = cache.shape[1]
    out = query.new_zeros(batch, heads, rank)
    lse = torch.full((batch, heads), float("-inf"), dtype=torch.float32)
    for index, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        blocks = block_table[index, : -(-length // page)].to(torch.int64)
        rows = _rows(cache, blocks, cache_scale)[:length]
        scores = query[index].float() @ rows.T * scale
        lse[index] = torch.logsumexp(scores, dim=-1)
        out[index] = (torch.softmax(scores, dim=-1) @ rows[:, :rank]).to(out.dtype)
    return out, lse


def _rows(cache: Tensor, blocks: Tensor, scale: Tensor | None) -> Tensor:
    """Return the rows of some blocks in float32."""
    if cache.dtype != torch.float8_e4m3fn:
        return cache[blocks].reshape(-1, cache.shape[-1]).float()
    rows = cache.view(torch.uint8)[blocks].reshape(-1, cache.shape[-1])
    return from_fp8(rows, torch.ones(()) if scale is None else scale)
