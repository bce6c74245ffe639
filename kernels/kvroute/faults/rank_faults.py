"""A fault of the collective itself, for ``--patch``: served peers can't show it, real ranks must.

``rolled`` brings the last rank's gather in another rank order. Where the peers' shards are served
no collective runs, so every served lane passes with it; the lanes ``gloo`` and ``nccl`` must not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def rolled() -> None:
    """Give the last rank the gathered shards rolled by one rank."""
    _plant(lambda output, rows: output.copy_(output.roll(rows, 0)))


def rolled_clean() -> None:
    """Give the last rank the gathered shards as they are, by the same way."""
    _plant(lambda output, _rows: output.copy_(output.roll(0, 0)))


def _plant(change: Callable[[Any, int], Any]) -> None:
    dist: Any = importlib.import_module("torch.distributed")
    real = dist.all_gather_into_tensor

    def gather(output: Any, local: Any, *args: Any, **kwargs: Any) -> Any:
        done = real(output, local, *args, **kwargs)
        if dist.get_rank() == dist.get_world_size() - 1:
            change(output, local.shape[0])
        return done

    dist.all_gather_into_tensor = gather
