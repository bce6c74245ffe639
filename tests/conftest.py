"""Nightly tests are skipped, by name, unless ``-m`` speaks of them."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "nightly" in config.option.markexpr:
        return
    later = pytest.mark.skip(reason="nightly: more time than a pre-merge run has (-m nightly)")
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(later)
