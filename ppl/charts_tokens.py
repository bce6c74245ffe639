"""The charts that are made of tokens: difference against position, and the ULP histogram."""

from __future__ import annotations

import math
from typing import TypedDict

import altair as alt
import numpy as np

from ppl import thin
from ppl.chart import Chart, Rows, inline, kind_colour, spec_of
from ppl.compare import ulp_histogram, ulp_order
from ppl.evidence import PplEvidence
from ppl.runs import ACROSS, KINDS, kind, name, noise_pair
from ppl.store import Stored

POSITIONS = 12
"""Texts drawn against position: those with the largest differences."""
CUTS = 200
"""Cuts drawn in one chart; more would be a solid block."""
ULPS = 16
"""A histogram reaches to 2^16 at least, so that a few classes are no wall."""


class TokenCharts(TypedDict):
    """The charts of ``charts.Charts`` that are made of tokens."""

    position: list[Chart]
    position_caption: str
    ulp: list[Chart]


def token_charts(made: PplEvidence, found: Stored) -> TokenCharts:
    """Draw the tokens; one text's arrays are held at a time.

    Raises
    ------
    PplError : a stored result is damaged.

    """
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
    return {
        "position": charts,
        "position_caption": _position_caption(made, len(names), said),
        "ulp": [_ulp(ulps)],
    }


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
            alt.Chart(inline([{"row": 0, "to": min(record.exposed_from, record.rows - 1)}]))
            .mark_rect(style="unexposed")
            .encode(x, x2="to:Q"),
            alt.Chart(inline([{"row": c} for c in cuts[::step]])).mark_rule(style="cut").encode(x),
            alt.Chart(inline([{"low": 0.0}])).mark_rule(style="zero").encode(side("low")),
            alt.Chart(inline(bars))
            .mark_rule(style="envelope")
            .encode(x, side("from"), kind_colour(), y2="to:Q", tooltip=tips),
        ]
        if lines:
            outline = alt.Chart(inline(lines)).mark_line(style="outline", interpolate="step-after")
            layers += [outline.encode(x, side(s), kind_colour()) for s in ("from", "to")]
        note = f"One cut in {step} is drawn, of {len(cuts):,}." if step > 1 else ""
        same = "bit-identical" if not text.differing else f"{text.differing:,} differ"
        charts.append(
            Chart(
                text.text,
                f"{text.rows:,} rows, {text.exposed.tokens:,} exposed, {same}",
                spec_of(alt.layer(*layers), 150),
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
        alt.Chart(inline(rows))
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
            kind_colour(kinds),
            alt.XOffset("kind:N", sort=kinds),
            y2="n:Q",
            tooltip=tips,
        )
    )
    return Chart(
        "ULP histogram",
        "How many float32 values lie between the two log-probabilities of a token; 0 is bit-equal. "
        "The runs are those drawn against position; counts are on a logarithmic scale.",
        spec_of(chart, 220),
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
