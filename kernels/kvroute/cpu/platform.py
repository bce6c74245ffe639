"""Chunked prefill for MLA on the CPU platform."""

from __future__ import annotations

import functools
from typing import Any


def keep_chunked_prefill(original: Any) -> Any:
    """Wrap ``CpuPlatform.check_and_update_config`` so that three settings survive it under DCP.

    The platform switches ``enable_chunked_prefill`` and ``enable_prefix_caching`` off and raises
    ``max_num_batched_tokens`` to the model's length: then no prompt has a context, and the loop
    never runs. Everything else that the platform does stays.
    """
    function = original.__func__

    @functools.wraps(function)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = (
            scheduler.enable_chunked_prefill,
            cache.enable_prefix_caching,
            scheduler.max_num_batched_tokens,
        )
        function(cls, vllm_config)
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            (
                scheduler.enable_chunked_prefill,
                cache.enable_prefix_caching,
                scheduler.max_num_batched_tokens,
            ) = kept

    return classmethod(check_and_update_config)
