"""Rotary embedding on the CPU, past an op that misreads strided views."""

from __future__ import annotations

from typing import Any


def make_forward_cpu(_original: Any) -> Any:
    """``RotaryEmbedding.forward_cpu`` by ``forward_native``.

    MLA hands the op 3-D views of a wider tensor, whose token stride isn't heads x head size. The
    CPU op rotates other elements than it should; see ``docs/upstream/cpu-rope`` for the
    reproduction. Both routes would agree on the wrong result.
    """

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        return self.forward_native(positions, query, key)

    return forward_cpu
