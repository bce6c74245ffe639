"""Tensors as a candidate leaves and returns them: what can be told of one without its values."""

from __future__ import annotations

from typing import Any

import torch


def facts_of(tensor: torch.Tensor) -> str:
    """Describe a tensor as its caller holds it."""
    grad = ", requires grad" if tensor.requires_grad else ""
    shape, strides = list(tensor.shape), list(tensor.stride())
    return f"{tensor.dtype} {shape} by {strides} from {tensor.storage_offset()}{grad}"


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has bytes to read: no sparse one, no view that negates, no fake."""
    if tensor.layout != torch.strided or tensor.is_neg() or tensor.is_conj():
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return tensor.device.type == "meta"  # that is a wrong device
    return True


def type_of(value: Any) -> str:
    """Name the type of what was returned."""
    kind = type(value).__name__
    return f"{kind} without bytes of its own" if odd(value) else kind


def odd(value: Any) -> bool:
    """Whether it is a tensor without bytes of its own to read."""
    return isinstance(value, torch.Tensor) and not _is_plain(value)
