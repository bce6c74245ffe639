"""What ``perf.json`` says, for a terminal and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from equiv.document import Block, Exact, Facts, Heading, Items, Line, Table, counted
from equiv.perf.record import PerfEvidence, Ratio, Serving, ServingMetric, Share, Tail, drift


def blocks(made: PerfEvidence) -> list[Block]:
    """Return the report."""
    found: list[Block] = [
        Heading("bytegate perf", 1, made.verdict),
        Line("Speed never decides a gate. Two runs of the same route stand beside every figure."),
    ]
    if made.not_covered:
        found.append(Items(tuple(f"NOT COVERED: {what}" for what in made.not_covered)))
    if made.tail is not None:
        found += _tail(made.tail)
    if made.serving is not None:
        found += _serving(made.serving)
    if made.shares:
        found += _shares(made.shares)
    return [*found, Heading("Repeat it"), Exact((made.command,))]


def _ratio(x: Ratio) -> str:
    return f"{x.median:.3f} ({x.least:.3f} to {x.most:.3f})"


def _tail(tail: Tail) -> list[Block]:
    varied = [
        name
        for name in (tail.cells[0].point if tail.cells else ())
        if len({cell.point[name] for cell in tail.cells}) > 1
    ]
    columns = (*varied, "arm", "us", "GB/s", "time to stock", "share of copy", "told", "bytes")
    rows = []
    for cell in tail.cells:
        for arm in cell.arms:
            launch_s = statistics.median(arm.launch_s)
            told = "-" if arm.name.startswith(("stock", "copy")) else _told(arm.resolved)
            same = {None: "-", True: "same", False: "WRONG"}[arm.identical]
            rows.append(
                (
                    *(str(cell.point[name]) for name in varied),
                    arm.name,
                    f"{launch_s * 1e6:.2f}",
                    f"{cell.bytes_moved / launch_s / 1e9:,.0f}",
                    _ratio(arm.time_to_stock),
                    _ratio(arm.share_of_copy),
                    told,
                    same,
                )
            )
    return [
        Heading(f"The tail of {tail.pair} on {tail.device}"),
        *([Line(f"Measured {tail.measured}.")] if tail.measured else []),
        Line(
            f"Device time of a launch: {counted(tail.repetitions, 'run')} of {tail.samples} "
            "samples, graph replays, L2 flushed, inputs rotated, arms in turn. Ratios are formed "
            "inside a run: median (least to most). Below 1 is faster than stock; 'stock again' is "
            "chance."
        ),
        Table(columns, tuple(rows), (*varied, *columns[-6:-2])),
    ]


def _told(resolved: bool) -> str:  # noqa: FBT001 - a word for it
    return "yes" if resolved else "no"


def _packs(serving: Serving) -> str:
    pairs = zip(serving.order, serving.packs, strict=True)
    return ", ".join(f"{arm} {p['packs']:,} of {p['chunks']:,} chunks" for arm, p in pairs)


def _launches(serving: Serving) -> str:
    times = serving.launched or [""] * len(serving.order)
    pairs = zip(serving.order, times, strict=True)
    return ", ".join(f"{arm} {when}".rstrip() for arm, when in pairs)


def _load(load: dict[str, int]) -> str:
    if load.get("sessions"):
        return (
            f"{load['concurrency']} at a time: {load['sessions']} sessions of {load['turns']} "
            f"turns, {load['shared_tokens']:,} tokens shared + {load['turn_tokens']:,} a turn + "
            f"{load['output_tokens']:,} out, {load['repeats']} times a launch"
        )
    return (
        f"{load['requests']} requests of {load['input_tokens']:,} + {load['output_tokens']:,} "
        f"tokens, {load['concurrency']} at a time, {load['repeats']} times a launch"
    )


def _serving(serving: Serving) -> list[Block]:
    found: list[Block] = [
        Heading("Serving"),
        Facts(
            (
                ("model", serving.model),
                ("versions", ", ".join(f"{k} {v}" for k, v in serving.versions.items())),
                ("routes", ", ".join(f"{arm}: {route}" for arm, route in serving.routes.items())),
                ("launches", _launches(serving)),
                *(("load", _load(load)) for load in serving.loads or [serving.load]),
                ("arguments", (" ".join(serving.arguments),)),
                ("packs by the routed kernel", _packs(serving)),
                *((("prefix cache", _hits(serving)),) if serving.prefix_caching else ()),
            )
        ),
    ]
    if why := drift(serving):
        found.append(Items((f"WARNING: {why}",)))
    if serving.invalid:
        return [*found, Items(tuple(f"INVALID: {why}" for why in serving.invalid))]
    columns = ("metric", "unit", "better", "stock", "fused", "change", "noise", "told apart")
    found.append(
        Line(
            "Noise is the largest difference between two launches of one route. Routes are told "
            "apart only where every pair of them differs by more than five times the noise, which "
            "chance does once in a hundred metrics."
        )
    )
    for level in sorted({m.concurrency for m in serving.metrics}):
        if level:
            found.append(Heading(f"{level} at a time", 3))
        rows = tuple(_metric(m) for m in serving.metrics if m.concurrency == level)
        found.append(Table(columns, rows, columns[3:7]))
    return found


def _hits(serving: Serving) -> str:
    """Say for every level what part of the prompts' tokens the cache gave, over its runs."""
    told = []
    for level in dict.fromkeys(run.concurrency for run in serving.runs):
        counted = [
            run.counters
            for run in serving.runs
            if run.concurrency == level and run.counters.get("cache_queries")
        ]
        rates = [c.get("cache_hits", 0) / c["cache_queries"] for c in counted]
        if rates:
            told.append(f"at {level} {min(rates):.1%} to {max(rates):.1%}")
    return f"on; of the prompts' tokens {', '.join(told) or 'nobody tells how many'} were there"


def _shares(shares: Sequence[Share]) -> list[Block]:
    columns = ("at a time", "route", "time of", "packs", "rows a pack", "us a pack", "share")
    rows = tuple(
        (
            str(s.concurrency),
            s.route,
            s.arm,
            f"{s.packs:,}",
            f"{s.rows / s.packs:,.0f}",
            f"{s.pack_s * 1e6:.2f}",
            f"{s.share:.2%} ({' '.join(f'{x:.2%}' for x in s.launches)})",
        )
        for s in shares
    )
    return [
        Heading("The pack's share of the time, an estimate"),
        Line(
            "Packs as the server counted them, times the tail's device time at their mean rows, "
            "over the client's seconds times ranks; of each launch in brackets. The tail is timed "
            "alone and with cold caches, and a server overlaps it with other work."
        ),
        Table(columns, rows, (columns[0], *columns[3:])),
    ]


def _metric(m: ServingMetric) -> tuple[str, ...]:
    if m.stock is None or m.fused is None or m.change is None or m.noise is None:
        return (m.name, m.unit, m.better, "-", "-", "-", "-", m.why_not)
    return (
        m.name,
        m.unit,
        m.better,
        f"{m.stock:,.4g}",
        f"{m.fused:,.4g}",
        f"{m.change:+.2%}",
        f"{m.noise:.2%}",
        "yes" if m.resolved else f"no: {m.why_not}",
    )
