"""What the benchmark client's figures say: both routes, and what two launches of one differ by."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from equiv.perf.record import ServingMetric, ServingRun, is_tail
from ppl import stats
from ppl.load import Load

STOCK, FUSED = "stock", "fused"
BEYOND = 10
"""Samples above a percentile that it needs: with one, p99 of a hundred is their largest."""
METRICS = (
    ("request_throughput", "requests/s", "higher"),
    ("total_token_throughput", "tokens/s", "higher"),
    *(
        (f"{which}_{what}_ms", "ms", "lower")
        for what in ("ttft", "tpot", "itl", "e2el")
        for which in ("median", "p90", "p99")
    ),
)


def metrics(runs: Sequence[ServingRun], load: Load) -> list[ServingMetric]:
    """Return every metric that all runs of a level have."""
    return [
        _metric(name, unit, better, runs, load)
        for name, unit, better in METRICS
        if all(name in run.figures for run in runs)
    ]


def _metric(
    name: str, unit: str, better: str, runs: Sequence[ServingRun], load: Load
) -> ServingMetric:
    grouped: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        grouped.setdefault((run.route, run.launch), []).append(run.figures[name])
    means = {key: float(np.mean(values)) for key, values in grouped.items()}
    by_route = {arm: [v for (a, _), v in means.items() if a == arm] for arm in (STOCK, FUSED)}
    stock, fused = (float(np.mean(by_route[arm])) for arm in (STOCK, FUSED))
    levels = np.asarray([*by_route[STOCK], *by_route[FUSED]])
    arms = [0] * len(by_route[STOCK]) + [1] * len(by_route[FUSED])
    noise = stats.noise(np.abs(levels[:, None] - levels[None, :]), arms)
    why = _too_few(name, load)
    if not why and noise is None:
        why = "a route was launched once only"
    if not why and noise is not None and not noise.distinguishable:
        why = "within the noise of two launches"
    hidden = is_tail(name) and bool(why)
    spread = max(noise.within) if noise else None
    return ServingMetric(
        name=name,
        unit=unit,
        better=better,
        stock=None if hidden else stock,
        fused=None if hidden else fused,
        change=None if hidden or not stock else fused / stock - 1,
        noise=None if hidden or spread is None or not stock else spread / stock,
        launches={} if hidden else by_route,
        resolved=not why,
        why_not=why,
        concurrency=load.concurrency,
    )


def _too_few(name: str, load: Load) -> str:
    """Say why a percentile can't be read off so few samples; empty where it can."""
    found = re.match(r"p(\d+)_(\w+)_ms", name)
    if not found:
        return ""
    samples = load.requests * (max(1, load.output_tokens - 1) if found[2] == "itl" else 1)
    needed = BEYOND * 100 // (100 - int(found[1]))
    return "" if samples >= needed else f"needs {needed:,} samples in a run, has {samples:,}"
