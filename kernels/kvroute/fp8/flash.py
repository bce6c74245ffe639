"""The upcasting backend of a GPU server: on Hopper vLLM has no other prefill backend."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.prefill.flash_attn import FlashAttnPrefillBackend

from kvroute.fp8.upcast import Upcast


class UpcastFlashAttn(Upcast, FlashAttnPrefillBackend):  # type: ignore[misc]
    """``FLASH_ATTN`` for fp8 q, k and v."""
