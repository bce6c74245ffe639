"""What ``perf.json`` says, for a terminal and as Markdown."""

from __future__ import annotations

import statistics

from equiv.document import Block, Exact, Facts, Heading, Items, Line, Table, counted
from equiv.perf.record import PerfEvidence, Ratio, Serving, ServingMetric, Tail


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


def _load(load: dict[str, int]) -> str:
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
                ("launches", ", ".join(serving.order)),
                ("load", _load(serving.load)),
                ("arguments", (" ".join(serving.arguments),)),
                ("packs by the routed kernel", _packs(serving)),
            )
        ),
    ]
    if serving.invalid:
        return [*found, Items(tuple(f"INVALID: {why}" for why in serving.invalid))]
    columns = ("metric", "unit", "better", "stock", "fused", "change", "noise", "told apart")
    rows = tuple(_metric(m) for m in serving.metrics)
    return [
        *found,
        Line(
            "Noise is the largest difference between two launches of one route. Routes are told "
            "apart only where every pair of them differs by more than five times the noise, which "
            "chance does once in a hundred metrics."
        ),
        Table(columns, rows, columns[3:7]),
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
