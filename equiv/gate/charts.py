"""The charts of gate.html: coverage, the alignment lattice, faults, position, and texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from equiv.gate.collect import Collected, Piece
from equiv.gate.facts import of_layer
from equiv.gate.judge import Judged
from equiv.gate.svg import COLOURS, NARROW, Figure, figure

Rows = list[dict[str, Any]]

ROW = 20
"""Height of a row, in pixels."""
BINS = 160
"""Parts into which a text's tokens are divided."""
MOST_TEXTS = 16
"""Texts that are drawn: those with the largest differences."""
OUTCOMES = ("equal", "refused", "declared", "undefined", "failed")
TONES = {
    "equal": "good",
    "refused": "soft",
    "undefined": "line",
    "declared": "warn",
    "equal, or declared": "three",
    "several of these": "one",
    "failed": "bad",
}
"""Colours of outcomes; two that one place has are said in words."""
TITLE = 34
"""Characters of a fault's title beside its bar."""


def _data(rows: Rows) -> alt.InlineData:
    return alt.InlineData(values=rows)


def _scale(pairs: dict[str, str]) -> alt.Scale:
    return alt.Scale(domain=list(pairs), range=[COLOURS[c] for c in pairs.values()])


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


# -- coverage ------------------------------------------------------------------------------


def coverage(found: Collected) -> list[Figure]:
    """Draw which kinds of cases each lane ran, and how many rows they had, for each device."""
    made = []
    for p in of_layer(found, "kernel"):
        names = ", ".join(c.name for c in p.made.candidates if c.lanes)
        made.append(
            figure(
                f"Cases by kind and lane, {p.device}",
                f"Of {names} together. A cell is the number of cases; an empty one is none.",
                partial(_kinds, p),
            )
        )
        made.append(
            figure(
                f"Rows of a case, {p.device}",
                "From the least to the greatest, with the median as a dot. Rows are what a launch "
                "plan counts, tokens times heads here; the axis is logarithmic and 0 stands at 1.",
                partial(_ranges, p),
            )
        )
    return made


def _kinds(piece: Piece, width: int) -> alt.TopLevelMixin:
    counts: Counter[tuple[str, str]] = Counter()
    lanes: dict[str, None] = {}
    for c in piece.made.candidates:
        for x in c.lanes:
            lanes[x.lane] = None
            for kind, n in x.kinds.items():
                counts[kind, x.lane] += n
    kinds = sorted({k for k, _ in counts})
    rows: Rows = [
        {"kind": k, "lane": x, "n": n, "log": math.log10(n + 1)}
        for (k, x), n in counts.items()
        if n
    ]
    base = alt.Chart(_data(rows)).encode(
        alt.X(
            "lane:N",
            sort=list(lanes),
            title=None,
            axis=alt.Axis(orient="top", labelAngle=0)
            if width > NARROW
            else alt.Axis(orient="top", labelAngle=-60),
        ),
        alt.Y("kind:N", sort=kinds, title=None),
    )
    cells = base.mark_rect(color=COLOURS["one"]).encode(
        alt.Opacity("log:Q", scale=alt.Scale(domain=[0, 4], range=[0.08, 0.6]), legend=None)
    )
    words = base.mark_text(fontSize=10 if width > NARROW else 9).encode(
        alt.Text("n:Q", format=",d" if width > NARROW else ".2~s")
    )
    return alt.layer(cells, words).properties(width=width, height=ROW * len(kinds))


def _ranges(piece: Piece, width: int) -> alt.TopLevelMixin:
    rows: Rows = []
    for c in piece.made.candidates:
        for x in c.lanes:
            low, high = x.ranges.get("rows", (0, 0))
            rows.append(
                {
                    "who": f"{c.name}, {x.lane}",
                    "low": max(low, 1),
                    "high": max(high, 1),
                    "middle": max(x.median_rows, 1),
                }
            )
    y = alt.Y("who:N", sort=None, title=None)
    axis = alt.Axis(format="~s", values=[10**i for i in range(10)])
    scale = alt.Scale(type="log", nice=False)
    base = alt.Chart(_data(rows))
    bars = base.mark_bar(color=COLOURS["one"], opacity=0.5, height=7).encode(
        alt.X("low:Q", scale=scale, title="rows", axis=axis), y, x2="high:Q"
    )
    dots = base.mark_point(filled=True, color=COLOURS["ink"], size=34, opacity=1).encode(
        alt.X("middle:Q", scale=scale), y
    )
    return alt.layer(bars, dots).properties(width=width, height=ROW * len(rows))


# -- the alignment lattice -----------------------------------------------------------------


def lattice(found: Collected) -> list[Figure]:
    """Draw what became of each base offset and pitch of each operand."""
    made = []
    for p in of_layer(found, "kernel"):
        rows = _places(p)
        for what, title, unit in (
            ("base", "Base offsets", "bytes, mod 32"),
            ("pitch", "Pitches", "elements beyond the dense pitch"),
        ):
            mine = [r for r in rows if r["what"] == what]
            if mine:
                made.append(
                    figure(
                        f"{title}, {p.device}",
                        "What became of the cases in which an operand lay there: equal bytes, a "
                        "refusal that was claimed, a difference that the ledger declares.",
                        partial(_lattice, mine, unit),
                    )
                )
    return made


def _places(piece: Piece) -> Rows:
    rows: Rows = []
    for c in piece.made.candidates:
        for x in c.lanes:
            for place, outcomes in x.alignment.items():
                operand, what, value = place.rsplit(" ", 2)
                names = [o for o in OUTCOMES if outcomes.get(o)]
                outcome = names[0] if len(names) == 1 else "several of these"
                if names == ["equal", "declared"]:
                    outcome = "equal, or declared"
                outcome = "failed" if "failed" in names else outcome
                rows.append(
                    {
                        "who": f"{c.name}, {operand}",
                        "what": what,
                        "at": int(value),
                        "outcome": outcome,
                        "n": sum(outcomes.values()),
                    }
                )
    return rows


def _lattice(rows: Rows, unit: str, width: int) -> alt.TopLevelMixin:
    shown = {k: v for k, v in TONES.items() if any(r["outcome"] == k for r in rows)}
    who = list(dict.fromkeys(r["who"] for r in rows))
    made: alt.TopLevelMixin = (
        alt.Chart(_data(rows))
        .mark_rect(stroke=COLOURS["line"], strokeWidth=0.5, opacity=0.75)
        .encode(
            alt.X("at:O", title=unit, axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            alt.Y("who:N", sort=who, title=None),
            alt.Color("outcome:N", scale=_scale(shown)),
        )
        .properties(width=width, height=(ROW + 4) * len(who))
    )
    return made


# -- faults --------------------------------------------------------------------------------


def faults(found: Collected) -> list[Figure]:
    """Draw after how many cases each planted fault was caught, and by which lane."""
    made = []
    for p in of_layer(found, "kernel_faults", "loop_faults"):
        what = "kernel" if p.layer == "kernel_faults" else "vLLM's loop"
        made.append(
            figure(
                f"Planted faults, {what}, {p.device}",
                "Cases until it was caught, on a logarithmic axis, in the colour of the lane that "
                "caught it. A fault without a bar says why.",
                partial(_faults, p),
            )
        )
    return made


def _faults(piece: Piece, width: int) -> alt.TopLevelMixin:
    rows: Rows = []
    for r in piece.made.faults:
        caught = r.outcome == "caught"
        wide = width > NARROW
        rows.append(
            {
                "who": f"{r.id}  {_cut(r.title, TITLE)}" if wide else r.id,
                "cases": max(r.cases, 1),
                "lane": r.lane if caught else r.outcome.replace("_", " "),
                "caught": caught,
                "said": f"{r.cases:,}" if caught else r.outcome.replace("_", " "),
            }
        )
    used = list(dict.fromkeys(r["lane"] for r in rows))
    tones = ["one", "good", "two", "three", "warn", "soft", "ink"]
    lanes = [x for x in used if x not in {"missed", "not covered"}]
    colours = {lane: tones[i % len(tones)] for i, lane in enumerate(lanes)}
    colours |= {k: v for k, v in (("missed", "bad"), ("not covered", "line")) if k in used}
    who = [r["who"] for r in rows]
    y = alt.Y("who:N", sort=who, title=None, axis=alt.Axis(labelLimit=280))
    top = max([r["cases"] for r in rows], default=1)
    scale = alt.Scale(type="log", domain=[0.5, max(top, 10) * 3], nice=False)
    axis = alt.Axis(values=[1, 10, 100, 1000, 10_000, 100_000], format="~s")
    caught = alt.Chart(_data([{**r, "from": 0.5} for r in rows if r["caught"]]))
    bars = caught.mark_bar(height=11, opacity=0.8).encode(
        alt.X("from:Q", scale=scale, title="cases", axis=axis),
        y,
        alt.Color("lane:N", scale=_scale(colours)),
        x2="cases:Q",
    )
    words = (
        alt.Chart(_data([{**r, "end": r["cases"] if r["caught"] else 0.5} for r in rows]))
        .mark_text(align="left", dx=4, fontSize=10)
        .encode(alt.X("end:Q", scale=scale), y, alt.Text("said:N"))
    )
    return alt.layer(bars, words).properties(width=width, height=ROW * len(rows))


# -- servers -------------------------------------------------------------------------------


def servers(found: Collected, judged: Judged) -> list[Figure]:
    """Draw differences by text and against position."""
    made = []
    for p in of_layer(found, "servers"):
        if not p.made.texts:
            continue
        made.append(_texts(p))
        arrays = judged.arrays.get(p.name)
        made.append(_position(p, arrays.folders if arrays else ()))
    return made


def _shown_texts(piece: Piece) -> list[Any]:
    texts = sorted(piece.made.texts, key=lambda t: -abs(t.exposed.mean_nats or 0.0))[:MOST_TEXTS]
    names = {t.text for t in texts}
    return [t for t in piece.made.texts if t.text in names]


def _texts(piece: Piece) -> Figure:
    title = f"By text, {piece.device}"
    texts = _shown_texts(piece)
    equal = sum(t.bit_identical for t in piece.made.texts)
    margin = piece.made.statistics.exposed.margin if piece.made.statistics else 0.0
    left = len(piece.made.texts) - len(texts)
    caption = (
        "Mean difference of exposed tokens, fused minus stock, in nats: a dot a text, green "
        f"where every token is bit-identical ({equal} of {len(piece.made.texts)}). The band is the "
        f"margin, ±{margin:.2g}."
        + (f" {left} texts with smaller ones aren't drawn." if left else "")
    )

    def draw(width: int) -> alt.TopLevelMixin:
        rows: Rows = [
            {
                "text": _cut(t.text, 28 if width > NARROW else 14),
                "mean": t.exposed.mean_nats or 0.0,
                "kind": "bit-identical" if t.bit_identical else "differs",
            }
            for t in texts
        ]
        end = 1.1 * max([margin, *(abs(r["mean"]) for r in rows)]) or 1e-6
        scale = alt.Scale(domain=[-end, end], nice=False)
        axis = alt.Axis(format=".0e", tickCount=4 if width > NARROW else 3)
        band = (
            alt.Chart(_data([{"low": -margin, "high": margin}]))
            .mark_rect(color=COLOURS["good"], opacity=0.14)
            .encode(alt.X("low:Q", scale=scale, title="nats", axis=axis), x2="high:Q")
        )
        dots = (
            alt.Chart(_data(rows))
            .mark_point(size=60, opacity=1, filled=True)
            .encode(
                alt.X("mean:Q", scale=scale),
                alt.Y("text:N", sort=None, title=None),
                alt.Color("kind:N", scale=_scale({"bit-identical": "good", "differs": "two"})),
            )
        )
        return alt.layer(band, dots).properties(width=width, height=ROW * len(rows))

    return figure(title, caption, draw)


def _position(piece: Piece, folders: Sequence[Path]) -> Figure:
    title = f"Difference against position, {piece.device}"
    if not folders:
        return Figure(title, "", note="The stored arrays aren't here, so it can't be drawn.")
    rows, cuts = _envelope(piece, folders)
    if not any(r["d"] for r in rows):
        tokens = sum(t.rows for t in piece.made.texts)
        return Figure(
            title, "", note=f"All {tokens:,} tokens are bit-identical: there is nothing to draw."
        )
    caption = (
        f"The largest |difference| of the first run of each arm, in nats, in {BINS} equal parts of "
        "each text. Thin lines are the scheduler's cuts; tokens before the first can't be touched "
        "by the route. Parts without a difference aren't drawn."
    )
    return figure(title, caption, partial(_lines, rows, cuts))


def _envelope(piece: Piece, folders: Sequence[Path]) -> tuple[Rows, Rows]:
    from ppl.judge import gather

    held = gather(folders)
    rows: Rows = []
    cuts: Rows = []
    for t in _shown_texts(piece):
        runs = sorted(run for text, run in held if text == t.text)
        pair = [next(run for run in runs if run[0] == arm) for arm in ("stock", "fused")]
        (store, record), (other, second) = (held[t.text, run] for run in pair)
        d = np.abs(other.values(second).astype(np.float64) - store.values(record))
        starts = np.unique(np.linspace(0, len(d), min(BINS, len(d)), endpoint=False).astype(int))
        for at, most in zip(starts, np.maximum.reduceat(d, starts), strict=True):
            rows.append({"text": t.text, "at": int(at), "d": float(f"{most:.3g}")})
        cuts += [{"text": t.text, "at": c} for c in range(record.budget, len(d), record.budget)]
    return rows, cuts


def _lines(rows: Rows, cuts: Rows, width: int) -> alt.TopLevelMixin:
    columns = 2 if width > NARROW else 1
    texts = list(dict.fromkeys(r["text"] for r in rows))
    many = {t: sum(c["text"] == t for c in cuts) for t in texts}
    few = [c for c in cuts if many[c["text"]] <= BINS]
    charts = []
    for t in texts:
        mine = [r for r in rows if r["text"] == t and r["d"]]
        x = alt.X("at:Q", title=None, axis=alt.Axis(format=",d", tickCount=4, grid=False))
        y = alt.Y(
            "d:Q",
            title=None,
            scale=alt.Scale(type="log"),
            axis=alt.Axis(format=".0e", tickCount=3, grid=False),
        )
        rules = (
            alt.Chart(_data([c for c in few if c["text"] == t]))
            .mark_rule(color=COLOURS["line"], strokeWidth=0.7)
            .encode(x)
        )
        dots = (
            alt.Chart(_data(mine))
            .mark_circle(color=COLOURS["one"], size=9, opacity=0.8)
            .encode(x, y)
        )
        charts.append(
            alt.layer(rules, dots).properties(
                width=width / columns - (50 if columns > 1 else 20), height=70, title=_cut(t, 26)
            )
        )
    return alt.concat(*charts, columns=columns)
