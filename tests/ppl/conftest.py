"""This room needs more than a GPU host has: without the extra its tests are left out."""

from __future__ import annotations

import importlib.util

NEEDS = (
    *("altair", "httpx2", "jinja2", "numpy", "polars", "psutil"),
    *("pydantic", "scipy", "stamina", "vl_convert"),
)
LACKING = [name for name in NEEDS if importlib.util.find_spec(name) is None]

collect_ignore_glob = ["test_*.py"] if LACKING else []


def pytest_report_header() -> list[str]:
    return [f"tests/ppl left out: no {', '.join(LACKING)}; pip install '.[ppl]'"] if LACKING else []
