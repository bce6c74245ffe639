"""Altair charts as SVG that takes its colours from the page, for light and dark alike.

A chart is drawn with stand-in colours, each of which becomes a CSS variable of the page. Nothing of
it is a script, and nothing is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import altair as alt
import vl_convert

COLOURS = {
    name: f"#0{i:x}0{i:x}0{i:x}"
    for i, name in enumerate(
        ("ink", "soft", "line", "grid", "good", "bad", "warn", "one", "two", "three", "shade"), 1
    )
}
"""Names of the page's colours, and what stands in for each while a chart is drawn."""

WIDE, NARROW = 520, 250
"""Widths of a chart's plot, in pixels: the page shows one or the other."""

Draw = Callable[[int], alt.TopLevelMixin]


@dataclass(frozen=True)
class Figure:
    """A chart in both widths, and what stands above it; a note where there is nothing to draw."""

    title: str
    caption: str
    wide: str = ""
    narrow: str = ""
    note: str = ""


def figure(title: str, caption: str, draw: Draw) -> Figure:
    """Draw a chart in both widths."""
    return Figure(title, caption, svg(draw(WIDE)), svg(draw(NARROW)))


def config() -> dict[str, Any]:
    """Return what all charts look like."""
    c = COLOURS
    axis = {
        "labelColor": c["soft"],
        "titleColor": c["soft"],
        "gridColor": c["grid"],
        "domainColor": c["line"],
        "tickColor": c["line"],
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "labelLimit": 190,
    }
    return {
        "background": None,
        "font": "sans-serif",
        "view": {"stroke": None},
        "axis": axis,
        "header": {"labelColor": c["ink"], "titleColor": c["soft"], "labelFontSize": 12},
        "legend": {
            "labelColor": c["ink"],
            "titleColor": c["soft"],
            "orient": "top",
            "labelFontSize": 11,
            "columns": 4,
            "title": None,
        },
        "text": {"color": c["ink"], "fontSize": 11},
        "title": {"color": c["ink"], "fontSize": 12},
    }


def svg(chart: alt.TopLevelMixin) -> str:
    """Return a chart as SVG with the page's colours."""
    spec = chart.to_dict()
    spec["config"] = config()
    version = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    text = vl_convert.vegalite_to_svg(spec, vl_version=version)
    for name, stand_in in COLOURS.items():
        text = re.sub(rf"{stand_in}\b", f"var(--{name})", text)
    return re.sub(r"<\?xml[^>]*>|<!DOCTYPE[^>]*>", "", text)
