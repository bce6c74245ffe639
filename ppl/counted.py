"""What a server counted, as sums: the route's counters over ranks, the prefix cache's over engines.

A file of them lies beside each result of the benchmark client, from before and after that run.
"""

from __future__ import annotations

import json
from pathlib import Path

from ppl.errors import PplError
from ppl.observe import samples

ROUTE = ("calls", "chunks", "context_tokens", "packs", "pack_rows")
CACHE = {
    "vllm:prefix_cache_queries_total": "cache_queries",
    "vllm:prefix_cache_hits_total": "cache_hits",
}
"""Tokens that were looked for in the prefix cache, and those that were found."""


def counters(text: str) -> dict[str, int]:
    """Read ``/metrics``.

    Returns
    -------
    The sums of ``ROUTE``, 0 where there is none; and those of ``CACHE`` that vLLM tells.

    """
    found = dict.fromkeys(ROUTE, 0)
    for each in by_rank(text).values():
        for name, value in each.items():
            found[name] += value
    for sample in samples(text):
        if sample.name in CACHE:
            mine = CACHE[sample.name]
            found[mine] = found.get(mine, 0) + int(sample.value)
    return found


def by_rank(text: str) -> dict[str, dict[str, int]]:
    """Return the route's counters of every rank that ``/metrics`` has, by its label."""
    found: dict[str, dict[str, int]] = {}
    for sample in samples(text):
        name = sample.name.removeprefix("bytegate_").removesuffix("_total")
        if sample.name == f"bytegate_{name}_total" and name in ROUTE:
            mine = found.setdefault(sample.labels.get("rank", ""), dict.fromkeys(ROUTE, 0))
            mine[name] += int(sample.value)
    return found


def place(result: Path) -> Path:
    """Return where the counters of a result lie."""
    return result.with_suffix(".counters.json")


def write(result: Path, before: str, after: str) -> None:
    """Keep two answers of ``/metrics`` beside a result, as counters."""
    earlier = by_rank(before)
    ranks = {
        rank: {name: n - earlier.get(rank, {}).get(name, 0) for name, n in each.items()}
        for rank, each in by_rank(after).items()
    }
    both = {"before": counters(before), "after": counters(after), "ranks": ranks}
    place(result).write_text(json.dumps(both, indent=1) + "\n", encoding="utf-8")


def read(result: Path) -> dict[str, int]:
    """Return what was counted in a run, over all ranks.

    ``ranks`` are those on which the loop had chunks, ``packing_ranks`` those that packed.

    Raises
    ------
    PplError : missing, damaged, or a counter that fell.

    """
    path = place(result)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        before = {name: int(n) for name, n in raw["before"].items()}
        after = {name: int(n) for name, n in raw["after"].items()}
        ranks = sum(each["chunks"] > 0 for each in raw["ranks"].values())
        packing = sum(each["packs"] > 0 for each in raw["ranks"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise PplError(f"the counters of a run are missing in {path}: {e!r}") from None
    found = {name: n - before.get(name, 0) for name, n in after.items()}
    fell = [name for name, n in found.items() if n < 0]
    if fell:
        raise PplError(f"the counter {fell[0]} fell in a run: its server was started again; {path}")
    return {**found, "ranks": ranks, "packing_ranks": packing}
