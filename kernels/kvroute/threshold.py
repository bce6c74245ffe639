"""Up to how many tokens of a request this process's MLA layers run as decode, past the loop."""

from __future__ import annotations

import gc
import sys


def decode_tokens() -> int | None:
    """Return ``reorder_batch_threshold`` of the process's MLA metadata builders, the largest.

    A step of at most so many tokens runs as decode: 1 with most backends under decode context
    parallelism, 512 with FLASH_ATTN_MLA. ``None`` where there is no builder, or it says nothing.
    """
    mla = sys.modules.get("vllm.model_executor.layers.attention.mla_attention")
    base = getattr(mla, "MLACommonMetadataBuilder", None)
    if base is None:
        return None
    # By type: asking a proxy whose object is gone for its class raises.
    builders = [o for o in gc.get_objects() if issubclass(type(o), base)]
    found = [getattr(b, "reorder_batch_threshold", None) for b in builders]
    return max((int(n) for n in found if n is not None), default=None)
