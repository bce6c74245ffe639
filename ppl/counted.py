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
    The sums of ``ROUTE``, 0 where there is none; ``ranks``, how many the route's are of; and those
    of ``CACHE`` that vLLM tells.

    """
    found = dict.fromkeys(ROUTE, 0)
    ranks = set()
    for sample in samples(text):
        name = sample.name.removeprefix("bytegate_").removesuffix("_total")
        if sample.name == f"bytegate_{name}_total" and name in ROUTE:
            found[name] += int(sample.value)
            ranks.add(sample.labels.get("rank", ""))
        elif sample.name in CACHE:
            mine = CACHE[sample.name]
            found[mine] = found.get(mine, 0) + int(sample.value)
    return {**found, "ranks": len(ranks)}


def place(result: Path) -> Path:
    """Return where the counters of a result lie."""
    return result.with_suffix(".counters.json")


def write(result: Path, before: str, after: str) -> None:
    """Keep two answers of ``/metrics`` beside a result, as counters."""
    both = {"before": counters(before), "after": counters(after)}
    place(result).write_text(json.dumps(both, indent=1) + "\n", encoding="utf-8")


def read(result: Path) -> dict[str, int]:
    """Return what was counted in a run; ``ranks`` as they were after it.

    Raises
    ------
    PplError : missing, damaged, or a counter that fell.

    """
    path = place(result)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        before = {name: int(n) for name, n in raw["before"].items()}
        after = {name: int(n) for name, n in raw["after"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise PplError(f"the counters of a run are missing in {path}: {e!r}") from None
    ranks = after.pop("ranks", 0)
    found = {name: n - before.get(name, 0) for name, n in after.items()}
    fell = [name for name, n in found.items() if n < 0]
    if fell:
        raise PplError(f"the counter {fell[0]} fell in a run: its server was started again; {path}")
    return {**found, "ranks": ranks}
