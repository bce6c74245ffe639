"""``ppl.html``: one page that needs no network, for light and dark, wide and narrow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import altair as alt
import jinja2
import vl_convert
from markupsafe import Markup

from equiv.errors import ExitCode
from ppl import report
from ppl.chart import Spec
from ppl.charts import Charts
from ppl.evidence import PplEvidence
from ppl.runs import ACROSS, KINDS, kind, noise_pair

TEMPLATES = Path(__file__).parent / "templates"
TONES = {ExitCode.PASS: "good", ExitCode.FAIL: "bad", ExitCode.INVALID: "bad"}
"""How the verdict looks; anything else is a warning. Its word is always there as well."""
KEYS = ("across", "between", "within")
"""The page's colours for ``runs.KINDS``."""


class _Specs:
    """Collects the charts in the order of the page."""

    def __init__(self) -> None:
        self.all: list[Spec] = []

    def add(self, spec: Spec) -> int:
        self.all.append(spec)
        return len(self.all) - 1


def bundle() -> str:
    """Return the JavaScript that draws charts, as the one global name ``vegaEmbed``."""
    version = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    made = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
    return made.replace("</script", "<\\/script")


def html(made: PplEvidence, charts: Charts, command: str = "") -> str:
    """Return the page.

    Parameters
    ----------
    command : how to make it again.

    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.policies["json.dumps_function"] = _compact
    again = noise_pair(made.runs)
    kinds = {ACROSS} if again is None else {ACROSS, kind(*again)}
    return environment.get_template("ppl.html.j2").render(
        made=made,
        charts=charts,
        command=command,
        specs=_Specs(),
        bundle=Markup(bundle()) if charts.position else "",  # noqa: S704 - a library's own code
        tone=TONES.get(ExitCode(made.exit_code), "warn"),
        attention=[
            *(("WARNING", w) for w in made.warnings),
            *(("NOT COVERED", n) for n in made.not_covered),
        ],
        tiles=report.tiles(made),
        strata=report.strata(made),
        tables=report.tables(made),
        facts=[(k, v if isinstance(v, str) else v[0]) for k, v in report.facts(made)],
        keys=[(c, k) for c, k in zip(KEYS, KINDS, strict=True) if k in kinds],
    )


def _compact(value: Any, **_options: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
