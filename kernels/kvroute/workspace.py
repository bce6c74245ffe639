"""A chunked-prefill workspace of a chosen size, so that short texts cross many context chunks."""

from __future__ import annotations

from typing import Any

TARGET = "MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size"


def force_rows(rows: int) -> None:
    """Replace ``MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size``.

    vLLM's own rule gives ``min(max(8 * max_model_len, 4 * max_num_seqs * page), 65536)``, which
    a prompt of a few thousand tokens never fills. ``rows`` is aligned as vLLM aligns its own
    figure: up to a multiple of the page and of ``D * I``; under DCP ``rows / D`` of them hold a
    rank's share of a chunk.
    """
    from vllm.model_executor.layers.attention import mla_attention as mla

    def determine(vllm_config: Any) -> int:
        aligned: int = mla.align_mla_chunked_context_workspace_size(vllm_config, rows)
        return aligned

    mla.MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size = staticmethod(determine)
