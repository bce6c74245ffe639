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
    """The tail itself, on a GPU: graph replays, L2 flushed, inputs rotated, arms in turn."""

    __pydantic_config__ = _STRICT
    pair: str
    device: str
    repetitions: int
    samples: int
    cells: list[TailCell]


@dataclass(frozen=True)
class ServingRun:
    """One run of vLLM's benchmark client: every figure that it gave."""

    __pydantic_config__ = _STRICT
    route: str
    launch: int
    repeat: int
    completed: int
    failed: int
    figures: dict[str, float]


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


@dataclass(frozen=True)
class Serving:
    """vLLM's benchmark client against a server of each route.

    Attributes
    ----------
    order : routes in the order of their launches.
    load : what the client sent: ``input_tokens``, ``output_tokens``, ``requests``, ``concurrency``.
    arguments : of both servers; they differ in the route alone.
    packs : for each launch, calls of the loop and packs by the routed kernel, as counted.
    invalid : why the figures can't be used; then there are no metrics.

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

    def contradictions(self) -> list[str]:
        """Say what can't be true together."""
        wrong = []
        if self.summary != summarised(self.tail, self.serving, self.not_covered):
            wrong.append("the summary isn't that of the figures")
        if (self.verdict, self.exit_code) != verdict_of(self.tail, self.serving):
            wrong.append(f"verdict {self.verdict!r} with exit_code {self.exit_code}")
        for metric in self.serving.metrics if self.serving else ():
            if metric.resolved == bool(metric.why_not):
                wrong.append(f"{metric.name}: resolved {metric.resolved}, {metric.why_not!r}")
            if metric.resolved and metric.change is None:
                wrong.append(f"{metric.name}: resolved without a figure")
            if is_tail(metric.name) and not metric.resolved and metric.fused is not None:
                wrong.append(f"{metric.name}: a tail that isn't resolved has a figure")
        if self.serving and self.serving.invalid and self.serving.metrics:
            wrong.append("serving: invalid, with metrics")
        for cell in self.tail.cells if self.tail else ():
            names = [arm.name for arm in cell.arms]
            if not {"stock", "stock again", "copy"} <= set(names):
                wrong.append(f"tail: arms {', '.join(names)}")
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


def summarised(tail: Tail | None, serving: Serving | None, not_covered: Sequence[str]) -> list[str]:
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
        for m in serving.metrics:
            if m.name in LEADING and m.change is not None and m.noise is not None:
                told = "told apart" if m.resolved else "not told apart"
                lines.append(
                    f"serving, {m.name}: fused {m.change:+.1%}, two launches of one route "
                    f"{m.noise:.1%}: {told}"
                )
    return [*lines, *(f"not covered: {what}" for what in not_covered)]


def _range(tail: Tail, name: str, ratio: str) -> str:
    """Return the least and the greatest median of an arm's ratio over the sizes."""
    found = [getattr(a, ratio).median for c in tail.cells for a in c.arms if a.name == name]
    return f"{min(found):.2f} to {max(found):.2f}"
