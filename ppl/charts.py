"""The charts of ppl.html, as Vega-Lite without colours: the page has those, for light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import numpy as np

from ppl import thin
from ppl.compare import ulp_histogram, ulp_order
from ppl.evidence import PplEvidence, TextResult
from ppl.runs import ACROSS, KINDS, kind, name, noise_pair
from ppl.store import Stored

Spec = dict[str, Any]
Rows = list[dict[str, Any]]

POSITIONS = 12
"""Texts drawn against position: those with the largest differences."""
BARS = 30
"""Texts drawn in one chart: those with the largest mean differences."""
DOTS = 3_000
"""Marks of texts in the noise chart; beyond it each pair of runs keeps its largest."""
FEW_DECADES = 2
"""An axis of so few powers of ten has ticks between them."""
ULPS = 16
"""A histogram reaches to 2^16 at least, so that a few classes are no wall."""
ROW = 24
"""Height of a text, in pixels."""
CUTS = 200
"""Cuts drawn in one chart; more would be a solid block."""


@dataclass(frozen=True)
class Chart:
    """A chart, what stands above and below it, and what a screen reader says of it."""

    title: str
    caption: str
    spec: Spec
    note: str = ""


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
    position, caption, ulp = _of_arrays(made, found)
    return Charts(
        noise=[_noise(made)],
        by_text=[_by_text(made), _identical(made)],
        position=position,
        position_caption=caption,
        ulp=[ulp],
    )


def _spec(chart: alt.LayerChart | alt.FacetChart | alt.Chart, height: int) -> Spec:
    spec: Spec = chart.properties(width="container", height=height).to_dict()
    for key in ("$schema", "config"):  # the page's
        spec.pop(key, None)
    return spec


def _data(rows: Rows) -> alt.InlineData:
    return alt.InlineData(values=[{k: _short(v) for k, v in row.items()} for row in rows])


def _short(value: Any) -> Any:
    """Round to what a screen shows: a page of a long run stays small."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _kind_colour(kinds: Sequence[str] = ()) -> alt.Color:
    """Return the colour of a kind of pair, with a legend of these kinds."""
    shown = [k for k in KINDS if k in kinds]
    legend = alt.Legend(title=None, values=shown) if shown else None
    return alt.Color("kind:N", scale=alt.Scale(domain=list(KINDS)), legend=legend)


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
    colour = _kind_colour()
    chart = alt.layer(
        alt.Chart(_data(single))
        .mark_point(filled=True, style="dot")
        .encode(x, y, colour, tooltip=tips),
        alt.Chart(_data(pooled)).mark_tick(style="pooled").encode(x, y, colour, tooltip=tips),
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
        _spec(chart, 44 * len(kinds)),
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
    band = alt.Chart(_data([{"a": -test.margin, "b": test.margin}]))
    middle = alt.X("mean:Q", scale=scale, title=title)
    marks = []
    for style, part in (("text", rows[1:]), ("all", rows[:1])):
        bars = alt.Chart(_data(part))
        marks += [
            bars.mark_rule(style=f"{style}-interval").encode(x, y, x2="high:Q", tooltip=tips),
            bars.mark_point(filled=True, style=f"{style}-mean").encode(middle, y, tooltip=tips),
        ]
    chart = alt.layer(
        band.mark_rect(style="margin").encode(alt.X("a:Q", scale=scale, title=title), x2="b:Q"),
        alt.Chart(_data([{"a": 0.0}])).mark_rule(style="zero").encode(alt.X("a:Q", scale=scale)),
        *marks,
    )
    spec = _spec(chart, ROW * len(order))
    fewer = (
        f" Drawn are the {len(texts)} texts with the largest differences, of {len(made.texts):,}."
        if len(texts) < len(made.texts)
        else ""
    )
    note = "" if bounded else "One text alone has no interval: nothing can be said of other texts."
    return Chart(
        "By text, against the margin",
        f"The shaded band is the margin, ±{test.margin:.3g} nats. {ALL.capitalize()}: mean and "
        "90 % interval over texts, which decides. A text: its mean over launches, and the range of "
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
    bars = alt.Chart(_data(rows))
    chart = alt.layer(
        bars.mark_bar(style="share").encode(x, y, tooltip=["text:N", "said:N"]),
        bars.mark_text(style="label").encode(x, y, text="said:N"),
    )
    return Chart(
        "Bit-identical tokens",
        "Scored tokens whose log-probability has the same 32 bits in the first run of each arm.",
        _spec(chart, ROW * len(order)),
    )


def _differences(text: TextResult) -> dict[str, float]:
    mean, low, high = text.difference_nats or (0.0, 0.0, 0.0)
    return {"mean": mean, "low": low, "high": high}


# -- against position, and ULPs ------------------------------------------------------


def _of_arrays(made: PplEvidence, found: Stored) -> tuple[list[Chart], str, Chart]:
    stock, fused = (next(r for r in made.runs if r[0] == arm) for arm in ("stock", "fused"))
    pairs = [(stock, fused)]
    again = noise_pair(made.runs)
    if again is not None:
        pairs.append(again)
    drawn = sorted(made.texts, key=lambda t: -abs(t.largest.d_nats) if t.largest else 0.0)
    names = {t.text for t in drawn[:POSITIONS]}
    envelopes: dict[str, list[tuple[str, list[thin.Bin]]]] = {}
    ulps: dict[str, dict[str, int]] = {}
    for text in made.texts:
        arrays = {}
        for run in {r for pair in pairs for r in pair}:
            store, record = found[text.text, run]
            arrays[run] = store.values(record)
        for one, other in pairs:
            a, b, which = arrays[one], arrays[other], kind(one, other)
            counted = ulps.setdefault(which, {})
            for step, n in ulp_histogram(a, b).items():
                counted[step] = counted.get(step, 0) + n
            if text.text in names:
                bins = thin.envelope(b.astype(np.float64) - a)
                envelopes.setdefault(text.text, []).append((which, bins))
    charts = _positions(made, found, envelopes)
    said = "; ".join(
        f"{kind(a, b)} ({'bars' if a[0] != b[0] else 'outline'}): {name(b)} minus {name(a)}"
        for a, b in pairs
    )
    if again is None:
        said += "; no arm ran twice, so there is no A/A"
    return charts, _position_caption(made, len(names), said), _ulp(ulps)


def _position_caption(made: PplEvidence, drawn: int, said: str) -> str:
    longest = max(t.rows for t in made.texts)
    parts = [f"{said}."]
    if longest > thin.BINS:
        parts.append(
            f"Thinned: the rows of a text stand in {thin.BINS} bins, of at most "
            f"{math.ceil(longest / thin.BINS):,} rows, and each bin is drawn from its least to its "
            "greatest difference, and to 0: no larger one is hidden."
        )
    parts.append(
        "Broken lines are the cuts between scheduler chunks; the rows before the first, shaded, "
        "are not exposed to the route. The scale is logarithmic on both sides of a linear middle."
    )
    if drawn < len(made.texts):
        parts.append(
            f"Drawn are the {drawn} texts with the largest differences, of {len(made.texts):,}."
        )
    return " ".join(parts)


def _positions(
    made: PplEvidence,
    found: Stored,
    envelopes: dict[str, list[tuple[str, list[thin.Bin]]]],
) -> list[Chart]:
    every = [v for e in envelopes.values() for _, bins in e for b in bins for v in (b.low, b.high)]
    linear, end, ticks = thin.signed_axis(every)
    scale = alt.Scale(type="symlog", constant=linear, domain=[-end, end], nice=False)
    axis = alt.Axis(
        values=[t for t in ticks if abs(t) <= end],
        labelExpr="datum.value == 0 ? '0' : format(datum.value, '.0e')",
        labelOverlap=True,
    )

    def side(field: str) -> alt.Y:
        return alt.Y(f"{field}:Q", scale=scale, axis=axis, title="nats")

    first = next(r for r in made.runs if r[0] == "stock")
    charts = []
    for text in (t for t in made.texts if t.text in envelopes):
        record = found[text.text, first][1]
        rows: Rows = [
            {
                "kind": which,
                "row": b.first,
                "last": b.last,
                "low": b.low,
                "high": b.high,
                "from": min(b.low, 0.0),
                "to": max(b.high, 0.0),
                "at": b.row,
            }
            for which, bins in envelopes[text.text]
            for b in bins
        ]
        bars = [r for r in rows if r["kind"] == ACROSS and (r["low"] or r["high"])]
        lines = [r for r in rows if r["kind"] != ACROSS]
        cuts = list(range(record.budget, record.rows, record.budget))
        step = math.ceil(len(cuts) / CUTS) if cuts else 1
        x_scale = alt.Scale(domain=[0, record.rows - 1], nice=False)
        x_axis = alt.Axis(format=",d", tickCount=6, labelOverlap=True, grid=False)
        x = alt.X("row:Q", scale=x_scale, axis=x_axis, title="row")
        tips = [
            "kind:N",
            alt.Tooltip("row:Q", format=",d", title="from row"),
            alt.Tooltip("last:Q", format=",d", title="to row"),
            alt.Tooltip("low:Q", format=".3e", title="least"),
            alt.Tooltip("high:Q", format=".3e", title="greatest"),
            alt.Tooltip("at:Q", format=",d", title="largest at"),
        ]
        layers = [
            alt.Chart(_data([{"row": 0, "to": min(record.exposed_from, record.rows - 1)}]))
            .mark_rect(style="unexposed")
            .encode(x, x2="to:Q"),
            alt.Chart(_data([{"row": c} for c in cuts[::step]])).mark_rule(style="cut").encode(x),
            alt.Chart(_data([{"low": 0.0}])).mark_rule(style="zero").encode(side("low")),
            alt.Chart(_data(bars))
            .mark_rule(style="envelope")
            .encode(x, side("from"), _kind_colour(), y2="to:Q", tooltip=tips),
        ]
        if lines:
            outline = alt.Chart(_data(lines)).mark_line(style="outline", interpolate="step-after")
            layers += [outline.encode(x, side(s), _kind_colour()) for s in ("from", "to")]
        note = f"One cut in {step} is drawn, of {len(cuts):,}." if step > 1 else ""
        same = "bit-identical" if not text.differing else f"{text.differing:,} differ"
        charts.append(
            Chart(
                text.text,
                f"{text.rows:,} rows, {text.exposed.tokens:,} exposed, {same}",
                _spec(alt.layer(*layers), 150),
                note,
            )
        )
    return charts


def _ulp(counts: dict[str, dict[str, int]]) -> Chart:
    rows: Rows = []
    for which, steps in counts.items():
        whole = sum(steps.values())
        rows += [
            {"kind": which, "step": s, "label": _label(s), "n": n, "share": n / whole, "base": 0.5}
            for s, n in steps.items()
        ]
    lows = [ulp_order(r["step"]) for r in rows]
    order = ["0", *(["signed zero"] if 0 in lows else [])]
    # Every class is on the axis, also those without a token.
    order += [_power(k) for k in range(max(ULPS, max(lows).bit_length() - 1) + 1)]
    most = 10 ** math.ceil(math.log10(max(r["n"] for r in rows)) + 1e-9)
    scale = alt.Scale(type="log", domain=[0.5, most], nice=False)
    powers = [10**k for k in range(round(math.log10(most)) + 1)]
    kinds = [k for k in KINDS if k in counts]
    y = alt.Y("base:Q", scale=scale, axis=alt.Axis(values=powers, format="~s"), title="tokens")
    tips = [
        "kind:N",
        alt.Tooltip("step:N", title="ULPs"),
        alt.Tooltip("n:Q", format=",d", title="tokens"),
        alt.Tooltip("share:Q", format=".3%"),
    ]
    chart = (
        alt.Chart(_data(rows))
        .mark_bar(style="count")
        .encode(
            alt.X(
                "label:N",
                sort=order,
                scale=alt.Scale(domain=order),
                title="ULPs apart, at least",
                axis=alt.Axis(labelOverlap=True, labelAngle=0, labelSeparation=3),
            ),
            y,
            _kind_colour(kinds),
            alt.XOffset("kind:N", sort=kinds),
            y2="n:Q",
            tooltip=tips,
        )
    )
    return Chart(
        "ULP histogram",
        "How many float32 values lie between the two log-probabilities of a token; 0 is bit-equal. "
        "The runs are those drawn against position; counts are on a logarithmic scale.",
        _spec(chart, 220),
    )


SMALL = 3
"""Powers of two that are written out, up to 8."""


def _label(step: str) -> str:
    low = ulp_order(step)
    return step if low < 1 else _power(low.bit_length() - 1)


def _power(power: int) -> str:
    """Return the low end of a class of ULP distances, as a power of two from 16 on."""
    superscripts = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
    return str(2**power) if power <= SMALL else f"2{str(power).translate(superscripts)}"
