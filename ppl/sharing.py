"""Servers whose ranks share GPUs (``kvroute.shared``), and what a run on them doesn't show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ppl.facts import SHARED, ServerFacts
from ppl.observe import Snapshot

FLAG = "--share-gpu"
MARK = "SHARED GPU"
WARNING = (
    f"{MARK}: a server's ranks took turns on fewer GPUs than it has ranks, connected by sockets: "
    "this is evidence for the bytes of every rank's loop and pack, and for no time and no "
    "transport between GPUs"
)
"""Stands among a run's warnings, and among the reasons of its verdict."""
NONE = "a GPU for each rank"


def of(facts: Mapping[str, Any]) -> str:
    """Return how a server's ranks share GPUs, such as ``2 ranks on 1 GPU``; empty: they don't.

    Where the ranks differ, what each of them tells.
    """
    told = facts.get(SHARED)
    if isinstance(told, list):
        return "; ".join(f"rank {n}: {_one(x)}" for n, x in enumerate(told))
    return _one(told) if told else ""


def _one(told: Any) -> str:
    if not told:
        return NONE
    if not isinstance(told, dict):
        return f"shared, as {told}"
    ranks, gpus = told.get("ranks"), told.get("gpus")
    return f"{ranks} ranks on {gpus} GPU{'' if gpus == 1 else 's'}"


def warnings(*, shared: bool) -> list[str]:
    """Return what a run says of itself."""
    return [WARNING] if shared else []


def amiss(snapshot: Snapshot) -> list[str]:
    """Say that a server's ranks don't tell the same of the GPUs that they share."""
    differ = isinstance(snapshot.facts.get(SHARED), list)
    return [f"its ranks differ in sharing GPUs: {of(snapshot.facts)}"] if differ else []


def open_(who: str, facts: Mapping[str, Any], *, asked: bool = False) -> list[str]:
    """Return what such a server leaves open; nothing of one that doesn't share.

    Parameters
    ----------
    asked : whether it was started with ``--share-gpu``, which switches more off than it may need.

    """
    how = of(facts)
    if how:
        return [f"{who}: collectives between GPUs: {how}, connected by sockets"]
    off = f"{FLAG} switches them off, and its ranks have a GPU each"
    return [f"{who}: vLLM's collectives by peers' memory: {off}"] if asked else []


def between(one: ServerFacts, other: ServerFacts, names: Iterable[str] = ()) -> list[str]:
    """Say that two servers' ranks share GPUs differently, where both tell it.

    Parameters
    ----------
    names : what the servers are called; by default their arms.

    """
    a, b = (of(f.facts) or NONE for f in (one, other))
    if a == b or not (tells(one) and tells(other)):
        return []
    x, y = tuple(names) or (one.arm, other.arm)
    return [f"the servers share GPUs differently: {a} in {x}, {b} in {y}"]


def tells(server: ServerFacts) -> bool:
    """Whether a server can tell how its ranks share GPUs: ``/metrics`` can't."""
    return server.channel == "collective_rpc"


def line(servers: Iterable[Mapping[str, Any]]) -> str:
    """Return a report's line on the facts of servers that share."""
    seen = sorted({of(facts) for facts in servers} - {""})
    return f"{MARK}: {', '.join(seen)}, connected by sockets"
