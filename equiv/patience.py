"""How long to wait for a process that may hang, on a machine that others use as well."""

from __future__ import annotations

import os

MOST = 8.0
"""A limit grows to so many times itself at the most."""


def stretched(limit_s: float) -> float:
    """Return a limit in seconds, longer by as much as the machine has more work than cores.

    ``limit_s * max(1, load / cores)``, with the load average of the last minute: where four
    processes share a core, each gets a quarter of it, and what took 10 s takes 40.
    """
    try:
        load = os.getloadavg()[0]
    except OSError:
        return limit_s
    cores = len(os.sched_getaffinity(0)) or 1
    return limit_s * min(MOST, max(1.0, load / cores))
