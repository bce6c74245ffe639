"""How much of serving's time the pack takes: an estimate from counters and the tail's own times.

For a level of concurrency and a route, over the runs of one launch,

    share = packs * t(rows / packs) / (wall_s * ranks)

``packs`` and ``rows`` are what the server counted in the runs, summed over its ranks; ``wall_s``
are the client's seconds. ``t(n)`` is the tail's device time of a launch of ``n`` rows at the heads
of one rank, on a straight line between the two sizes beside ``n`` that this same run timed, so the
sum over packs is that of their mean wherever ``t`` is straight. Stock packs nothing by the routed
kernel: there the loop's chunks and the rows of their contexts stand for ``packs`` and ``rows``, and
the tail's stock arm for its time.

It is an estimate: the tail is timed with cold caches and by itself, and a server overlaps it with
other work or waits around it. A share that would need a size outside of those timed is not given.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from equiv.perf.record import Serving, ServingRun, Share, Tail, TailCell

PAIR = "kvpack"
WHAT = "the pack's share of the time"
ARMS = {"stock": "stock", "fused": "vllm"}
"""The tail's arm of a route; a route that is a function is the candidate of that name."""
KINDS = {
    "bfloat16": ("bf16", 0),
    "bfloat16>float8_e4m3fn": ("bf16", 1),
    "float16": ("fp16", 0),
    "float16>float8_e4m3fn": ("fp16", 1),
}
"""A tally's kind of a pack as the tail's axes ``dtype`` and ``fp8``."""
COUNTED = {"stock": ("chunks", "context_tokens"), "fused": ("packs", "pack_rows")}


def estimate(pair: str, tail: Tail | None, serving: Serving) -> tuple[list[Share], list[str]]:
    """Return the share for each level and route, and what couldn't be estimated.

    Parameters
    ----------
    pair : whose tail was timed.
    serving : without ``invalid``.

    """
    if tail is None or not tail.cells:
        return [], [f"{WHAT}: the tail wasn't measured, which takes a GPU and --part tail"]
    if pair != PAIR:
        return [], [f"{WHAT}: the tail is that of {pair}, and servers pack by {PAIR}"]
    if serving.heads is None:
        return [], [f"{WHAT}: no configuration in a folder tells the heads of a rank"]
    if len(serving.kinds) != 1 or serving.kinds[0] not in KINDS:
        return [], [f"{WHAT}: packs of kinds {serving.kinds}, expected one that the tail has"]
    dtype, fp8 = KINDS[serving.kinds[0]]
    wanted = {"H": serving.heads, "dtype": dtype, "fp8": fp8}
    cells = [c for c in tail.cells if all(c.point.get(k) == v for k, v in wanted.items())]
    if not cells:
        return [], [f"{WHAT}: the tail wasn't timed at {wanted}: --size H={serving.heads}"]
    shares, missing = [], []
    for level in dict.fromkeys(run.concurrency for run in serving.runs):
        for route in COUNTED:
            runs = [r for r in serving.runs if (r.concurrency, r.route) == (level, route)]
            found = _share(level, route, _arm(serving, route), runs, cells)
            if isinstance(found, Share):
                shares.append(found)
            else:
                missing.append(f"{WHAT} at {level}, {route}: {found}")
    return shares, missing


def _arm(serving: Serving, route: str) -> str:
    name = serving.routes.get(route, route)
    return ARMS.get(name, name)


def _share(
    level: int, route: str, arm: str, runs: Sequence[ServingRun], cells: Sequence[TailCell]
) -> Share | str:
    """Return the share, or why there is none."""
    times = times_of(arm, cells)
    if not times:
        return f"the tail has no arm {arm}"
    if not runs:
        return "there is no run"
    count, height = COUNTED[route]
    launches: dict[int, list[tuple[int, int, float]]] = {}
    for run in runs:
        packs, rows = run.counters.get(count, 0), run.counters.get(height, 0)
        ranks = run.counters.get("ranks", 0)
        if not packs or not rows or not ranks or not run.wall_s:
            return f"launch {run.launch} run {run.repeat} lacks counters or its time"
        launches.setdefault(run.launch, []).append((packs, rows, run.wall_s * ranks))
    found = []
    for each in launches.values():
        packs, rows, spent_s = map(sum, zip(*each, strict=True))
        pack_s = interpolated(rows / packs, times)
        if pack_s is None:
            return (
                f"packs of {rows / packs:,.0f} rows, and the tail was timed from {min(times):,} to "
                f"{max(times):,}: --size T=..."
            )
        found.append((packs, rows, pack_s, packs * pack_s / spent_s))
    packs, rows = sum(x[0] for x in found), sum(x[1] for x in found)
    shares = [x[3] for x in found]
    pack_s = sum(x[0] * x[2] for x in found) / packs
    return Share(level, route, arm, packs, rows, pack_s, statistics.fmean(shares), shares)


def times_of(arm: str, cells: Sequence[TailCell]) -> dict[int, float]:
    """Return an arm's median device seconds by rows."""
    return {
        int(cell.point["T"]): statistics.median(found.launch_s)
        for cell in cells
        for found in cell.arms
        if found.name == arm
    }


def interpolated(rows: float, times: dict[int, float]) -> float | None:
    """Return the time of so many rows on a line between its neighbours; None outside of them."""
    below = max((n for n in times if n <= rows), default=None)
    above = min((n for n in times if n >= rows), default=None)
    if below is None or above is None:
        return None
    if below == above:
        return times[below]
    return times[below] + (times[above] - times[below]) * (rows - below) / (above - below)
