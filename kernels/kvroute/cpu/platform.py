"""Chunked prefill for MLA on the CPU platform."""

from __future__ import annotations

import functools
from typing import Any


def keep_chunked_prefill(original: Any) -> Any:
    """Wrap ``CpuPlatform.check_and_update_config`` so that three settings of MLA survive it.

    The platform switches ``enable_chunked_prefill`` and ``enable_prefix_caching`` off and raises
    ``max_num_batched_tokens`` to the model's length: then no prompt has a context, and the loop
    never runs, nor what stands in its place without decode context parallelism, against which it
    is compared. Everything else that the platform does stays.
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
        model = vllm_config.model_config
        if model is not None and model.use_mla:
            (
                scheduler.enable_chunked_prefill,
                cache.enable_prefix_caching,
                scheduler.max_num_batched_tokens,
            ) = kept

    return classmethod(check_and_update_config)
