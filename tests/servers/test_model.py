"""vLLM serves the small model and computes what its reference forward pass does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("safetensors")

from kvroute import probe
from kvroute.serve import ServeOptions
from ppl import model
from ppl.model import evaluate, network

BYTES = 3000
ARRANGEMENTS = {
    "float32, TP1": ("float32", 1, 1),
    "float32, TP2, DCP2": ("float32", 2, 2),
    "bfloat16, TP2, DCP2": ("bfloat16", 2, 2),
}
WORST = {"float32": 1e-3, "bfloat16": 1.0}
MEAN = {"float32": 1e-4, "bfloat16": 0.03}
"""Nats a byte that a server may differ: at the worst, and on average."""


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return list((model.folder() / "README.md").read_bytes()[:BYTES])


@pytest.fixture(scope="module")
def exact(prompt: list[int]) -> Any:
    import torch

    net = network.load(model.folder(), dtype=torch.float64)
    return -evaluate.nats(net, np.array(prompt, np.uint8))


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_a_server_agrees_with_the_reference(
    name: str, servers: Callable[..., list[Any]], prompt: list[int], exact: Any
) -> None:
    dtype, tp, dcp = ARRANGEMENTS[name]
    options = ServeOptions(
        model=str(model.folder()), tp=tp, dcp=dcp, workspace=1024, extra=("--dtype", dtype)
    )
    (server,) = servers(options)
    try:
        found = probe.log_probs(server.url, prompt).astype(np.float64)
    finally:
        server.stop()
    apart = np.abs(found - exact)
    sys.stdout.write(f"{name}: worst {apart.max():.2e}, mean {apart.mean():.2e} nats\n")
    assert apart.max() <= WORST[dtype]
    assert apart.mean() <= MEAN[dtype]
