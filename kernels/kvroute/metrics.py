"""The tally as Prometheus counters: the channel for servers that others start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import prometheus_client

if TYPE_CHECKING:
    from collections.abc import Mapping

_HELP = {
    "calls": "Calls of vLLM's context-parallel prefill loop",
    "chunks": "Context chunks in those calls",
    "continuations": "Context chunks that start inside a context",
    "context_tokens": "Rows of context in those chunks: what a pack would see",
    "packs": "K/V packs by the routed kernel; stays 0 on the stock route",
    "pack_rows": "Tokens packed by the routed kernel",
}


class Metrics:
    """Counters ``bytegate_<name>_total`` with the labels ``rank``, ``route`` and ``switch``.

    Parameters
    ----------
    facts : the tally's facts, from which the labels are taken.

    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        found = {name: facts.get(name) for name in ("rank", "route", "switch")}
        labels = {name: "" if value is None else str(value) for name, value in found.items()}
        self._counters = {
            name: prometheus_client.Counter(f"bytegate_{name}", text, list(labels)).labels(**labels)
            for name, text in _HELP.items()
        }

    def add(self, amounts: Mapping[str, int]) -> None:
        """Add to the counters named in ``amounts``."""
        for name, amount in amounts.items():
            self._counters[name].inc(amount)
