"""What can't be true together in evidence of the engine's layers, beyond its verdict and counts.

These are fields that the judging reads: lists in which something stands twice would be counted
twice, and words that nobody knows would be taken for nothing amiss.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from equiv.evidence import FaultsEvidence, LoopEvidence
from equiv.gate.policy import PROFILES

OUTCOMES = ("caught", "missed", "not_covered")


def contradictions(made: Any) -> list[str]:
    """Say what in evidence of a layer is doubled, unknown or impossible; empty where nothing is."""
    return list(_contradictions(made))


def _contradictions(made: Any) -> Iterator[str]:
    if made.profile not in PROFILES:
        yield f"there is no profile {made.profile!r}"
    if not (math.isfinite(made.seconds) and made.seconds >= 0):
        yield f"it took {made.seconds} seconds"
    try:
        shlex.split(made.command)
    except ValueError as e:
        yield f"its command is none: {e}"
    if isinstance(made, FaultsEvidence):
        yield from _doubled("planted fault", (r.id for r in made.faults))
        yield from (
            f"{r.id}: outcome {r.outcome!r}" for r in made.faults if r.outcome not in OUTCOMES
        )
        yield from _false_alarms(made.false_alarms)
    elif isinstance(made, LoopEvidence):
        yield from _doubled("lane", (x.lane for x in made.lanes))
    else:
        yield from _doubled("candidate", (c.name for c in made.candidates))
        for c in made.candidates:
            yield from _doubled(f"{c.name}: lane", (x.lane for x in c.lanes))


def _doubled(what: str, names: Iterable[str]) -> Iterator[str]:
    yield from (f"{what} {name} stands in it twice" for name, n in Counter(names).items() if n > 1)


def _false_alarms(found: dict[str, Any]) -> Iterator[str]:
    cases, alarms = found.get("cases", 0), found.get("alarms", [])
    if type(cases) is not int or cases < 0:
        yield f"false_alarms.cases {cases!r}"
    if not isinstance(alarms, list) or not all(isinstance(a, dict) for a in alarms):
        yield "false_alarms.alarms is no list of objects"
