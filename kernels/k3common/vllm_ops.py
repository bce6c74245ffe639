"""Loading of vLLM's K3 ops, all of one library file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvpack import vllm_op
from kvpack.spec import Unavailable


def load(device: str, library: str | None, *names: str) -> Callable[[str], Any]:
    """Register the ops and return a lookup by name.

    Raises
    ------
    Unavailable
        As ``kvpack.vllm_op.load``, or a library without one of the ops.

    """
    vllm_op.load(device, library)
    spaces = (torch.ops._C, torch.ops._C_cache_ops)  # noqa: SLF001 - vLLM's choice of names
    found = {n: getattr(s, n) for n in names for s in spaces if hasattr(s, n)}
    missing = [n for n in names if n not in found]
    if missing:
        raise Unavailable(f"the library has no op {missing[0]}: expected the file of vLLM 0.33")
    return found.__getitem__
