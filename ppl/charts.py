"""The charts of ppl.html, as Vega-Lite without colours: the page has those, for light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt

from ppl.chart import Chart, Rows, inline, kind_colour, spec_of
from ppl.charts_tokens import token_charts
from ppl.evidence import PplEvidence, TextResult
from ppl.runs import KINDS, kind, name
from ppl.store import Stored

BARS = 30
"""Texts drawn in one chart: those with the largest mean differences."""
DOTS = 3_000
"""Marks of texts in the noise chart; beyond it each pair of runs keeps its largest."""
FEW_DECADES = 2
"""An axis of so few powers of ten has ticks between them."""
ROW = 24
"""Height of a text, in pixels."""


@dataclass(frozen=True)
class Charts:
    """All charts, by section; captions say what was left out."""

    noise: list[Chart] = field(default_factory=list)
    by_text: list[Chart] = field(default_factory=list)
    position: list[Chart] = field(default_factory=list)
    position_caption: str = ""
    ulp: list[Chart] = field(default_factory=list)


def draw(made: PplEvidence, found: Stored) -> Charts:
    """Draw what was compared; one text's arrays are held at a time.

    Raises
    ------
    PplError : a stored result is damaged.

    """
    if not made.texts:
        return Charts()
    return Charts(
        noise=[_noise(made)],
        by_text=[_by_text(made), _identical(made)],
        **token_charts(made, found),
    )


# -- A/A beside A/B -----------------------------------------------------------------


def _noise(made: PplEvidence) -> Chart:
    dots: Rows = []
    means: dict[tuple[int, int], list[float]] = {}
    for text in made.texts:
        for i, j, distance in text.run_distances:
            means.setdefault((i, j), []).append(distance)
            dots.append({"pair": (i, j), "text": text.text, "d": distance})
    thinned = len(dots) > DOTS
    if thinned:
        largest: dict[Any, dict[str, Any]] = {}
        for dot in dots:
            if dot["d"] >= largest.get(dot["pair"], dot)["d"]:
                largest[dot["pair"]] = dot
        dots = list(largest.values())
    every = [d["d"] for d in dots] + [math.fsum(m) / len(m) for m in means.values()]
    low, high, ticks, zero = _log_axis(every)
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    words = "format(datum.value, '.0e')"
    if zero is not None:
        words = f"datum.value <= {zero * 1.001!r} ? '0' : {words}"
    axis = alt.Axis(values=ticks, labelExpr=words, labelOverlap=True)
    x = alt.X("at:Q", scale=scale, axis=axis, title="mean exposed |difference|, nats")
    y_axis = alt.Axis(ticks=False, domain=False, labelLimit=0)
    y = alt.Y("kind:N", sort=list(KINDS), title=None, axis=y_axis)

    def rows(items: Rows) -> Rows:
        made_rows = []
        for item in items:
            one, other = (made.runs[k] for k in item["pair"])
            row = {"kind": kind(one, other), "pair": f"{name(one)}, {name(other)}", "d": item["d"]}
            made_rows.append({**row, "at": item["d"] or zero, "text": item["text"]})
        return made_rows

    pooled = rows(
        [{"pair": p, "d": math.fsum(m) / len(m), "text": "mean of texts"} for p, m in means.items()]
    )
    single = rows(dots)
    kinds = sorted({r["kind"] for r in pooled})
    tips = ["text:N", "pair:N", alt.Tooltip("d:Q", format=".3e", title="nats")]
    colour = kind_colour()
    chart = alt.layer(
        alt.Chart(inline(single))
        .mark_point(filled=True, style="dot")
        .encode(x, y, colour, tooltip=tips),
        alt.Chart(inline(pooled)).mark_tick(style="pooled").encode(x, y, colour, tooltip=tips),
    )
    edge = "" if zero is None else " Pairs that are bit-equal stand at the left edge, at 0."
    shown = (
        f"Of {len(made.texts):,} texts a dot shows the one with the largest distance for each pair."
        if thinned
        else "A dot is one text and one pair of runs."
    )
    lacking = [k for k in KINDS if k not in kinds]
    note = f"Not measured: {' and '.join(lacking)}." if lacking else ""
    return Chart(
        "Noise floor: A/A beside A/B",
        f"{shown} A bar is the mean of all texts for one pair.{edge} The route is noise only where "
        "its A/B bars lie no further right than the bars of A/A between launches.",
        spec_of(chart, 44 * len(kinds)),
        note,
    )


def _log_axis(values: Sequence[float]) -> tuple[float, float, list[float], float | None]:
    """Return both ends of a logarithmic axis, its ticks, and where 0 stands, if any value is 0."""
    real = [v for v in values if v > 0]
    if not real:
        return 0.8e-9, 1e-7, [1e-9, 1e-8, 1e-7], 1e-9
    bottom = math.floor(math.log10(min(real)))
    top = max(math.ceil(math.log10(max(real))), bottom + 1)
    step = max(1, (top - bottom) // 6)
    ticks = [10.0**k for k in range(bottom, top + 1, step)]
    if top - bottom <= FEW_DECADES:
        ticks = sorted({t * m for t in ticks for m in (1, 2, 5) if t * m <= 10.0**top})
    if len(real) == len(values):
        return 10.0**bottom, 10.0**top, ticks, None
    zero = 10.0**bottom / 3
    return zero * 0.8, 10.0**top, [zero, *ticks], zero


# -- by text ------------------------------------------------------------------------

ALL = "all texts"


def _by_text(made: PplEvidence) -> Chart:
    assert made.statistics is not None
    test = made.statistics.exposed
    texts = _most_different(made)
    bounded = all(math.isfinite(v) for v in (test.low, test.high))
    low, high = (test.low, test.high) if bounded else (test.mean, test.mean)
    rows: Rows = [
        {"text": ALL, "mean": test.mean, "low": low, "high": high},
        *({"text": t.text, **_differences(t)} for t in texts),
    ]
    most = max(*(max(abs(r["low"]), abs(r["high"])) for r in rows), test.margin) * 1.1
    order = [ALL, *(t.text for t in texts)]
    y = alt.Y("text:N", sort=order, title=None, axis=alt.Axis(ticks=False))
    scale = alt.Scale(domain=[-most, most], nice=False)
    axis = alt.Axis(format=".1e", tickCount=5, labelOverlap=True)
    title = "mean exposed difference, nats"
    x = alt.X("low:Q", scale=scale, axis=axis, title=title)
    tips = ["text:N", *(alt.Tooltip(f"{k}:Q", format=".3e") for k in ("mean", "low", "high"))]
    band = alt.Chart(inline([{"a": -test.margin, "b": test.margin}]))
    middle = alt.X("mean:Q", scale=scale, title=title)
    marks = []
    for style, part in (("text", rows[1:]), ("all", rows[:1])):
        bars = alt.Chart(inline(part))
        marks += [
            bars.mark_rule(style=f"{style}-interval").encode(x, y, x2="high:Q", tooltip=tips),
            bars.mark_point(filled=True, style=f"{style}-mean").encode(middle, y, tooltip=tips),
        ]
    chart = alt.layer(
        band.mark_rect(style="margin").encode(alt.X("a:Q", scale=scale, title=title), x2="b:Q"),
        alt.Chart(inline([{"a": 0.0}])).mark_rule(style="zero").encode(alt.X("a:Q", scale=scale)),
        *marks,
    )
    spec = spec_of(chart, ROW * len(order))
    fewer = (
        f" Drawn are the {len(texts)} texts with the largest differences, of {len(made.texts):,}."
        if len(texts) < len(made.texts)
        else ""
    )
    note = "" if bounded else "One text alone has no interval: nothing can be said of other texts."
    return Chart(
        "By text, against the margin",
        f"The shaded band is the margin, ±{test.margin:.3g} nats. {ALL.capitalize()}: mean and "
        "90 % interval over texts and launches, which decides. A text: its mean, and the range of "
        f"single launches. Tokens inside a text are correlated, so it has no interval.{fewer}",
        spec,
        note,
    )


def _most_different(made: PplEvidence) -> list[TextResult]:
    texts = sorted(made.texts, key=lambda t: -abs((t.difference_nats or (0.0,))[0]))[:BARS]
    return sorted(texts, key=lambda t: t.text)


def _identical(made: PplEvidence) -> Chart:
    texts = _most_different(made)
    whole = (ALL, sum(t.differing for t in made.texts), sum(t.rows for t in made.texts))
    rows: Rows = [
        {"text": t, "share": 1 - differ / of, "zero": 0, "said": f"{of - differ:,} of {of:,}"}
        for t, differ, of in (whole, *((t.text, t.differing, t.rows) for t in texts))
    ]
    axis = alt.Axis(values=[0, 0.25, 0.5, 0.75, 1], format=".0%")
    # Room for the counts to the right of a full bar.
    x = alt.X("share:Q", scale=alt.Scale(domain=[0, 1.6]), axis=axis, title="bit-identical tokens")
    order = [ALL, *(t.text for t in texts)]
    y = alt.Y(
        "text:N",
        sort=order,
        title=None,
        axis=alt.Axis(ticks=False),
        scale=alt.Scale(paddingInner=0.4),
    )
    bars = alt.Chart(inline(rows))
    chart = alt.layer(
        bars.mark_bar(style="share").encode(x, y, tooltip=["text:N", "said:N"]),
        bars.mark_text(style="label").encode(x, y, text="said:N"),
    )
    return Chart(
        "Bit-identical tokens",
        "Scored tokens whose log-probability has the same 32 bits in the first run of each arm.",
        spec_of(chart, ROW * len(order)),
    )


def _differences(text: TextResult) -> dict[str, float]:
    mean, low, high = text.difference_nats or (0.0, 0.0, 0.0)
    return {"mean": mean, "low": low, "high": high}
