"""``perf.json``: how fast the routes are, beside what two runs of the same route differ by.

Nothing here decides: the gate shows it. A figure that the noise can't resolve says so, and a tail
that it can't resolve has no figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from equiv.evidence import SCHEMA_VERSION

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class Ratio:
    """A ratio over the runs: the median, the least and the greatest."""

    __pydantic_config__ = _STRICT
    median: float
    least: float
    most: float


@dataclass(frozen=True)
class TailArm:
    """One way to do the tail, on one point.

    Attributes
    ----------
    name : ``"stock"``, ``"stock again"``, ``"copy"``, or a candidate's name.
    launch_s : device seconds of a launch, a figure a run.
    time_to_stock : this arm's time over the stock arm's of the same run; below 1 is faster.
    share_of_copy : bytes a second over those of a copy of as many bytes, in the same run.
    resolved : whether its ratios to stock lie outside those of stock to itself, all of them.
    identical : whether it wrote the stock arm's bytes; None for a copy.

    """

    __pydantic_config__ = _STRICT
    name: str
    launch_s: list[float]
    time_to_stock: Ratio
    share_of_copy: Ratio
    resolved: bool
    identical: bool | None


@dataclass(frozen=True)
class TailCell:
    """The arms side by side on one point; ``bytes_moved`` are the fewest that the work needs."""

    __pydantic_config__ = _STRICT
    point: dict[str, int | str]
    bytes_moved: int
    input_sets: int
    arms: list[TailArm]


@dataclass(frozen=True)
class Tail:
    """The tail itself, on a GPU: graph replays, L2 flushed, inputs rotated, arms in turn.

    Attributes
    ----------
    measured : when it began, in UTC; empty in files from before tails were kept.

    """

    __pydantic_config__ = _STRICT
    pair: str
    device: str
    repetitions: int
    samples: int
    cells: list[TailCell]
    measured: str = ""


@dataclass(frozen=True)
class ServingRun:
    """One run of vLLM's benchmark client: every figure that it gave.

    Attributes
    ----------
    concurrency : requests at a time; 0 in files from before levels.
    wall_s : the client's seconds from the first request to the last answer.
    counters : what the server counted in this run alone, as ``ppl.counted`` reads it: the route's
        counters over all ``ranks``, of which ``packing_ranks`` packed; ``cache_queries`` and
        ``cache_hits`` in tokens.

    """

    __pydantic_config__ = _STRICT
    route: str
    launch: int
    repeat: int
    completed: int
    failed: int
    figures: dict[str, float]
    concurrency: int = 0
    wall_s: float | None = None
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ServingMetric:
    """One figure, both routes.

    Attributes
    ----------
    stock, fused : means over launches, each the mean of its repeats; None where it isn't reported.
    change : fused over stock, minus 1.
    noise : the largest difference between two launches of one route, over the stock mean.
    launches : of each route, the mean of each launch.
    resolved : whether the routes stand apart by the rule of ``ppl.stats.noise``.
    why_not : why there is no figure, or why it isn't resolved; empty where it is.
    concurrency : the level; 0 in files from before levels.

    """

    __pydantic_config__ = _STRICT
    name: str
    unit: str
    better: str
    stock: float | None
    fused: float | None
    change: float | None
    noise: float | None
    launches: dict[str, list[float]]
    resolved: bool
    why_not: str
    concurrency: int = 0


@dataclass(frozen=True)
class Serving:
    """vLLM's benchmark client against a server of each route.

    Attributes
    ----------
    order : routes in the order of their launches.
    load : what the client sent at the lowest level, as of ``ppl.load.Load``.
    arguments : of both servers; they differ in the route alone.
    packs : for each launch, calls of the loop and packs by the routed kernel, as counted.
    invalid : why the figures can't be used; then there are no metrics.
    loads : what the client sent at each level of concurrency, rising.
    prefix_caching : whether it was on, as it is for sessions; None in files from before levels.
    not_covered : what of serving couldn't be seen.
    heads : of a rank, by the model's configuration; None where no folder tells it.
    kinds : what fused packs converted, such as ``bfloat16`` or ``bfloat16>float8_e4m3fn``.
    sessions : for each launch, which start of the command made it, counted from 1.
    launched : for each launch, when it began, in UTC. Both are empty in files from before launches
        were kept.

    """

    __pydantic_config__ = _STRICT
    routes: dict[str, str]
    model: str
    arguments: list[str]
    versions: dict[str, str]
    load: dict[str, int]
    order: list[str]
    packs: list[dict[str, int]]
    runs: list[ServingRun]
    metrics: list[ServingMetric]
    invalid: list[str]
    loads: list[dict[str, int]] = field(default_factory=list)
    prefix_caching: bool | None = None
    not_covered: list[str] = field(default_factory=list)
    heads: int | None = None
    kinds: list[str] = field(default_factory=list)
    sessions: list[int] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Share:
    """An estimate of how much of serving's time the pack takes: ``equiv.perf.share``.

    Attributes
    ----------
    arm : the tail's, whose time is taken.
    packs, rows : of all runs and ranks.
    pack_s : estimated device seconds of one pack of ``rows / packs`` rows.
    share : the mean over ``launches``, of device time over the ranks' wall time.

    """

    __pydantic_config__ = _STRICT
    concurrency: int
    route: str
    arm: str
    packs: int
    rows: int
    pack_s: float
    share: float
    launches: list[float]


@dataclass(frozen=True)
class PerfEvidence:
    """``perf.json``.

    Attributes
    ----------
    verdict : ``"MEASURED"``, ``"NOT COVERED"`` or ``"INVALID"``.
    summary : the lines that a gate shows, by ``summarised``.

    """

    __pydantic_config__ = _STRICT
    verdict: str
    exit_code: int
    tail: Tail | None
    serving: Serving | None
    not_covered: list[str]
    environment: dict[str, Any]
    started: str
    seconds: float
    command: str
    summary: list[str] = field(default_factory=list)
    schema: str = "bytegate.perf"
    schema_version: int = SCHEMA_VERSION
    validated: bool = field(default=False)
    content_sha256: str = ""
    shares: list[Share] = field(default_factory=list)

    def contradictions(self) -> list[str]:
        """Say what can't be true together."""
        wrong = [*_wrong_serving(self.serving), *_wrong_shares(self.serving, self.shares)]
        told = summarised(self.tail, self.serving, self.not_covered, self.shares)
        if self.summary != told:
            wrong.append("the summary isn't that of the figures")
        if (self.verdict, self.exit_code) != verdict_of(self.tail, self.serving):
            wrong.append(f"verdict {self.verdict!r} with exit_code {self.exit_code}")
        for cell in self.tail.cells if self.tail else ():
            names = [arm.name for arm in cell.arms]
            if not {"stock", "stock again", "copy"} <= set(names):
                wrong.append(f"tail: arms {', '.join(names)}")
        return wrong


def _wrong_serving(serving: Serving | None) -> list[str]:
    wrong = []
    for metric in serving.metrics if serving else ():
        if metric.resolved == bool(metric.why_not):
            wrong.append(f"{metric.name}: resolved {metric.resolved}, {metric.why_not!r}")
        if metric.resolved and metric.change is None:
            wrong.append(f"{metric.name}: resolved without a figure")
        if is_tail(metric.name) and not metric.resolved and metric.fused is not None:
            wrong.append(f"{metric.name}: a tail that isn't resolved has a figure")
    if serving and serving.invalid and serving.metrics:
        wrong.append("serving: invalid, with metrics")
    if serving and any(
        x and len(x) != len(serving.order) for x in (serving.sessions, serving.launched)
    ):
        wrong.append("serving: sessions that aren't those of its launches")
    return wrong


def drift(serving: Serving) -> str:
    """Say that launches are of several sessions; empty where they are of one, or nobody told."""
    count = len(set(serving.sessions))
    if count < 2:  # noqa: PLR2004 - several
        return ""
    which = ", ".join(f"{a} {n}" for a, n in zip(serving.order, serving.sessions, strict=True))
    return (
        f"launches were made in {count} sessions ({which}): what drifted between them falls on the "
        "routes unevenly, and the noise doesn't show it all"
    )


def _wrong_shares(serving: Serving | None, shares: Sequence[Share]) -> list[str]:
    wrong = [
        f"the pack's share at {share.concurrency}: no mean of its launches"
        for share in shares
        if not share.launches or not min(share.launches) <= share.share <= max(share.launches)
    ]
    if shares and (serving is None or serving.invalid):
        wrong.append("the pack's share without serving that is valid")
    return wrong


def is_tail(name: str) -> bool:
    """Whether a metric is a percentile above the median."""
    return name.startswith(("p9", "p8", "p7"))


def verdict_of(tail: Tail | None, serving: Serving | None) -> tuple[str, int]:
    """Return the word and the exit code: 0 where something was measured, 4 elsewhere."""
    if serving is not None and serving.invalid:
        return "INVALID", 4
    if (tail is None or not tail.cells) and serving is None:
        return "NOT COVERED", 4
    return "MEASURED", 0


LEADING = ("total_token_throughput", "median_ttft_ms", "median_tpot_ms")
"""Serving metrics of the summary; tails are in the report where they can be told."""


def summarised(
    tail: Tail | None,
    serving: Serving | None,
    not_covered: Sequence[str],
    shares: Sequence[Share] = (),
) -> list[str]:
    """Return the figures in a few lines, each with what chance does to it."""
    lines = []
    if tail is not None and tail.cells:
        chance = _range(tail, "stock again", "time_to_stock")
        names = dict.fromkeys(arm.name for cell in tail.cells for arm in cell.arms)
        for name in names:
            if name in {"stock", "stock again", "copy"}:
                continue
            arms = [arm for cell in tail.cells for arm in cell.arms if arm.name == name]
            apart = sum(arm.resolved for arm in arms)
            wrong = sum(arm.identical is False for arm in arms)
            lines.append(
                f"tail, {name} on {tail.device}: {_range(tail, name, 'time_to_stock')} of stock's "
                f"time (stock itself {chance}), {_range(tail, name, 'share_of_copy')} of a copy's "
                f"bandwidth; told apart in {apart} of {len(arms)} sizes"
                + (f"; WRONG BYTES in {wrong}" if wrong else "")
            )
    if serving is not None:
        lines += [f"serving: INVALID, {why}" for why in serving.invalid[:1]]
        lines += [f"serving: WARNING, {why}" for why in (drift(serving),) if why]
        for m in serving.metrics:
            if m.name in LEADING and m.change is not None and m.noise is not None:
                told = "told apart" if m.resolved else "not told apart"
                lines.append(
                    f"serving{at(m.concurrency)}, {m.name}: fused {m.change:+.1%}, "
                    f"two launches of one route {m.noise:.1%}: {told}"
                )
    lines += [
        f"the pack's share{at(s.concurrency)}, {s.route}: {s.share:.2%} of the time, an estimate"
        for s in shares
    ]
    return [*lines, *(f"not covered: {what}" for what in not_covered)]


def at(concurrency: int) -> str:
    """Name a level; empty in files from before levels."""
    return f" at {concurrency}" if concurrency else ""


def _range(tail: Tail, name: str, ratio: str) -> str:
    """Return the least and the greatest median of an arm's ratio over the sizes."""
    found = [getattr(a, ratio).median for c in tail.cells for a in c.arms if a.name == name]
    return f"{min(found):.2f} to {max(found):.2f}"
