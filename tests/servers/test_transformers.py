"""float32 servers in every arrangement against Hugging Face transformers on the same weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

FLOAT32 = ("--dtype", "float32")

ARRANGEMENTS = {
    "TP1": {"tp": 1, "dcp": 1},
    "TP2": {"tp": 2, "dcp": 1},
    "DCP2": {"tp": 2, "dcp": 2},
    "DCP4": {"tp": 4, "dcp": 4},
    "DCP2, interleave 16": {"tp": 2, "dcp": 2, "extra": ("--cp-kv-cache-interleave-size", "16")},
}


def test_the_bound_means_something(truth: Any) -> None:
    """One context row that attention doesn't see moves a log-probability far beyond it."""
    assert 0 < 20 * truth.bound < truth.dropped


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_a_float32_server_agrees_with_transformers(
    name: str,
    servers: Callable[..., list[Any]],
    ids: list[int],
    truth: Any,
) -> None:
    from kvroute import probe
    from kvroute.serve import ServeOptions

    chosen = dict(ARRANGEMENTS[name])
    extra = FLOAT32 + tuple(chosen.pop("extra", ()))
    options = ServeOptions(route="stock", workspace=1024, extra=extra, **chosen)
    (server,) = servers(options)
    try:
        found = probe.log_probs(server.url, ids).astype(np.float64)
    finally:
        server.stop()
    worst = float(np.abs(found - truth.log_probs).max())
    sys.stdout.write(f"{name}: worst {worst:.2e}, bound {truth.bound:.2e}\n")
    assert worst <= truth.bound
