"""How often a Triton kernel of ours ran: asked without importing Triton where it isn't needed."""

from __future__ import annotations


def launches() -> int:
    """Return how often a kernel of ``triton_rows`` ran in this process."""
    from k3common import triton_rows

    return triton_rows.launches()
