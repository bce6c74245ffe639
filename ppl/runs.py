"""Pairs of runs: what they are called, and which of them tell noise from a route."""

from __future__ import annotations

from collections.abc import Sequence

Run = tuple[str, int, int]
"""Arm, launch, repeat."""

ACROSS, BETWEEN, WITHIN = "A/B", "A/A between launches", "A/A within a launch"
KINDS = (ACROSS, BETWEEN, WITHIN)


def name(run: Run) -> str:
    """Return ``"stock 1.2"``: launch 1, repeat 2."""
    return f"{run[0]} {run[1]}.{run[2]}"


def kind(one: Run, other: Run) -> str:
    """Return which of ``KINDS`` a pair of runs is."""
    if one[0] != other[0]:
        return ACROSS
    return BETWEEN if one[1] != other[1] else WITHIN


def noise_pair(runs: Sequence[Run]) -> tuple[Run, Run] | None:
    """Return two runs of one arm to draw beside the two arms: launches before repeats.

    A relaunch of the stock arm, else of the fused one, else a repeat in a launch; None where no arm
    ran twice.
    """
    for wanted in (BETWEEN, WITHIN):
        for arm in ("stock", "fused"):
            mine = [r for r in runs if r[0] == arm]
            later = [r for r in mine[1:] if kind(mine[0], r) == wanted]
            if later:
                return mine[0], later[0]
    return None
