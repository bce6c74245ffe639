"""What the charts of ppl.html share: a value with its words, rows of data, colours by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from ppl.runs import KINDS

Spec = dict[str, Any]
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Chart:
    """A chart, what stands above and below it, and what a screen reader says of it."""

    title: str
    caption: str
    spec: Spec
    note: str = ""


def spec_of(chart: alt.LayerChart | alt.FacetChart | alt.Chart, height: int) -> Spec:
    """Return a chart as wide as its place, without what the page decides."""
    made: Spec = chart.properties(width="container", height=height).to_dict()
    for key in ("$schema", "config"):  # the page's
        made.pop(key, None)
    return made


def inline(rows: Rows) -> alt.InlineData:
    """Return rows as a chart's own data."""
    return alt.InlineData(values=[{k: _short(v) for k, v in row.items()} for row in rows])


def _short(value: Any) -> Any:
    """Round to what a screen shows: a page of a long run stays small."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def kind_colour(kinds: Sequence[str] = ()) -> alt.Color:
    """Return the colour of a kind of pair, with a legend of these kinds."""
    shown = [k for k in KINDS if k in kinds]
    legend = alt.Legend(title=None, values=shown) if shown else None
    return alt.Color("kind:N", scale=alt.Scale(domain=list(KINDS)), legend=legend)
