"""What starts several engines one after the other is left to a nightly run, by name."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "nightly" in config.option.markexpr:
        return
    later = pytest.mark.skip(reason="nightly: starts engines one after the other (-m nightly)")
    for item in items:
        if item.get_closest_marker("nightly") and "loop" in item.path.parts:
            item.add_marker(later)
