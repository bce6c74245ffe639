"""What the pairs of Kimi-K3's epilogues have in common as pairs: domain, rows, refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from k3insert.stock import ROPE
from kvpack.spec import Point

QKV_COLUMNS = 2112
"""Columns of K3's fused projection (1,536 of q, 512 latent, 64 rope), of which k_pe is a slice."""

PROJECTION = ((QKV_COLUMNS, ROPE, 1), (QKV_COLUMNS - ROPE) * 2)
"""Pitches and offset in bytes of k_pe as that slice."""


class RowPair:
    """A pair whose rows are tokens times heads, over 16-bit operands.

    Attributes
    ----------
    combinations : values of the axes that go together; empty: every combination does.

    """

    axes: Mapping[str, Sequence[int | str]]
    domain_axes: Mapping[str, Sequence[int | str]]
    combinations: Sequence[tuple[str, ...]] = ()
    models: Mapping[str, Callable[..., Any]] = {}
    classes: Mapping[str, Callable[..., Any]] = {}

    def valid(self, point: Point) -> bool:
        """Accept the combinations."""
        return not self.combinations or tuple(point[a] for a in self.axes) in self.combinations

    def rows(self, point: Point) -> int:
        """Return T * H."""
        return int(point["T"] * point["H"])

    def outcome(self, point: Point, aligned: bool) -> str:  # noqa: FBT001
        """Return ``"equal"`` in the domain, ``"refused"`` where a kernel may refuse."""
        standard = all(point[a] in values for a, values in self.domain_axes.items())
        degenerate = point["H"] == 0 and point["T"] > 0
        return "equal" if standard and aligned and not degenerate else "refused"
