"""Run several campaigns at once: each has a worker process, so threads are enough."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from equiv.lanes import Target
    from equiv.stopping import Stop

Item = TypeVar("Item")
Made = TypeVar("Made")


def cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


GPU_BYTES = 60 << 30
"""GPU memory that one campaign may need in its sizes lane."""


def at_once(target: Target) -> int:
    """Return how many campaigns may run side by side: one a core, or as the GPU's memory allows."""
    if not target.cuda:
        return cores()
    return max(1, min(cores() // 4, target.memory_bytes // GPU_BYTES))


def each(
    items: Sequence[Item], work: Callable[[Item], Made], *, at_once: int, stop: Stop
) -> list[Made]:
    """Return ``work`` of each item, in order, so many at once.

    An exception, Ctrl-C included, sets ``stop``, by which the others end, and is raised.
    """
    if at_once < 2 or len(items) < 2:  # noqa: PLR2004
        return [work(i) for i in items]
    with ThreadPoolExecutor(min(at_once, len(items))) as pool:
        futures = [pool.submit(work, i) for i in items]
        try:
            return [f.result() for f in futures]
        except BaseException:
            stop.set()
            for f in futures:
                f.cancel()
            raise
