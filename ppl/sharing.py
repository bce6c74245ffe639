"""Servers whose ranks share GPUs (``kvroute.shared``), and what a run on them doesn't show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ppl.facts import SHARED, ServerFacts

FLAG = "--share-gpu"
MARK = "SHARED GPU"
WARNING = (
    f"{MARK}: a server's ranks took turns on fewer GPUs than it has ranks, connected by sockets: "
    "this is evidence for the bytes of every rank's loop and pack, and for no time and no "
    "transport between GPUs"
)
"""Stands among a run's warnings, and among the reasons of its verdict."""


def of(facts: Mapping[str, Any]) -> str:
    """Return how a server's ranks share GPUs, such as ``2 ranks on 1 GPU``; empty: they don't."""
    told = facts.get(SHARED)
    if not isinstance(told, dict):
        return ""
    ranks, gpus = told.get("ranks"), told.get("gpus")
    return f"{ranks} ranks on {gpus} GPU{'' if gpus == 1 else 's'}"


def warnings(*, shared: bool) -> list[str]:
    """Return what a run says of itself."""
    return [WARNING] if shared else []


def open_(who: str, facts: Mapping[str, Any]) -> list[str]:
    """Return what such a server leaves open; nothing of one that doesn't share."""
    how = of(facts)
    return [f"{who}: collectives between GPUs: {how}, connected by sockets"] if how else []


def between(stock: ServerFacts, fused: ServerFacts) -> list[str]:
    """Say that two servers' ranks share GPUs differently."""
    a, b = (of(f.facts) or "a GPU for each rank" for f in (stock, fused))
    return [] if a == b else [f"the arms' configurations differ: {a} in stock, {b} in fused"]


def line(servers: Iterable[ServerFacts]) -> str:
    """Return the line of a report on servers that share."""
    seen = sorted({of(s.facts) for s in servers} - {""})
    return f"{MARK}: {', '.join(seen)}, connected by sockets"
