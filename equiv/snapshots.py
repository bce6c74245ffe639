"""Snapshots: outputs as contiguous integers, which is how they are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

Snapshot = dict[str, torch.Tensor]
"""Each output's elements as integers of their size."""


def integers(tensor: torch.Tensor, *, copy: bool = True) -> torch.Tensor:
    """Return a tensor's elements as contiguous integers of their size, a view where it may be."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    view = tensor.detach().view(kind)
    if copy:
        return view.clone(memory_format=torch.contiguous_format)
    return view.contiguous()


def unsigned(snapshot: torch.Tensor) -> NDArray[Any]:
    """Return a snapshot as an array of unsigned integers on the CPU."""
    array: NDArray[Any] = snapshot.cpu().numpy()
    return array.view(f"u{array.itemsize}")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's bytes, flat."""
    return tensor.reshape(-1).view(torch.uint8)
