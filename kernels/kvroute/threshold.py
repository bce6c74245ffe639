"""Up to how many tokens of a request a worker's MLA layers run as decode, past the loop."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any


def decode_tokens(worker: Any = None) -> int | None:
    """Return ``reorder_batch_threshold`` of a worker's MLA metadata builders, the largest.

    A step of at most so many tokens runs as decode: 1 with most backends under decode context
    parallelism, 512 with FLASH_ATTN_MLA. ``None`` where there is no builder, or it says nothing.

    Parameters
    ----------
    worker : vLLM's, whose model runner has the builders. Without it, or where that runner is of
        another form, they are looked for among the objects that the garbage collector lists: none
        once vLLM has frozen its heap.

    """
    mla = sys.modules.get("vllm.model_executor.layers.attention.mla_attention")
    base = getattr(mla, "MLACommonMetadataBuilder", None)
    if base is None:
        return None
    told = _largest(b for b in _builders(worker) if isinstance(b, base))
    if told is not None:
        return told
    # By type: asking a proxy whose object is gone for its class raises.
    return _largest(o for o in gc.get_objects() if issubclass(type(o), base))


def _builders(worker: Any) -> Iterator[Any]:
    """Yield the builders of every group of attention layers, in either model runner of vLLM."""
    groups = getattr(getattr(worker, "model_runner", None), "attn_groups", None)
    for of_cache in groups if isinstance(groups, list) else ():
        for group in of_cache if isinstance(of_cache, list) else (of_cache,):
            yield from getattr(group, "metadata_builders", None) or ()


def _largest(builders: Iterable[Any]) -> int | None:
    found = [getattr(b, "reorder_batch_threshold", None) for b in builders]
    return max((int(n) for n in found if n is not None), default=None)
