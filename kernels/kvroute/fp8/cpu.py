"""The upcasting backend of a CPU server."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

from kvroute.fp8.upcast import Upcast


class UpcastCPUSDPA(Upcast, CPUSDPAMLAPrefillBackend):  # type: ignore[misc]
    """``CPU_SDPA_MLA`` for fp8 q, k and v."""
