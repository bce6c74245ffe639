"""vLLM serves a widened model on four ranks, and it computes what its source does.

The DeepSeek-V2 one alone: vLLM computes Kimi-K3's layers on CUDA only, so that one at TP8 x DCP8,
TP8 x DCP4 and TP4 x DCP4 is NOT COVERED here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("safetensors")

from kvroute import probe  # noqa: E402 - vLLM decides first whether to go on
from kvroute.chunks import Layout, predict  # noqa: E402
from kvroute.serve import ServeOptions  # noqa: E402
from ppl import model  # noqa: E402
from ppl.model import evaluate, network, widen  # noqa: E402

RANKS, HEADS, BYTES, BUDGET, WORKSPACE = 4, 8, 1500, 512, 512
MEAN, WORST = 0.03, 1.0
"""Nats that a bfloat16 server may lie from the reference: as in ``test_model``."""
MIXED = "kvpack.faults.two_heads:kv_pack"


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_four_ranks_serve_a_widened_model(
    servers: Callable[..., list[Any]], tmp_path: Path
) -> None:
    text = model.folder() / "README.md"
    widen.make(model.folder(), tmp_path / "wide", heads=HEADS, text=text, tokens=512)
    prompt = list(text.read_bytes()[:BYTES])
    exact = -evaluate.nats(
        network.load(model.folder(), dtype=torch.float64), np.array(prompt, np.uint8)
    )
    expected = predict(len(prompt), BUDGET, Layout(16, RANKS, 1, WORKSPACE), layers=3)
    assert expected.continuations > 0

    found, counted = {}, {}
    for route in ("stock", "fused", MIXED):  # one after the other: each has five processes
        (server,) = servers(
            ServeOptions(
                route=route,
                model=str(tmp_path / "wide"),
                tp=RANKS,
                dcp=RANKS,
                workspace=WORKSPACE,
                extra=("--max-num-batched-tokens", str(BUDGET), "--max-model-len", "2048"),
            )
        )
        try:
            before = probe.ranks(server.url)
            found[route] = probe.log_probs(server.url, prompt)
            counted[route] = list(zip(before, probe.ranks(server.url), strict=True))
        finally:
            server.stop()
        apart = np.abs(found[route].astype(np.float64) - exact)
        sys.stdout.write(f"{route}: worst {apart.max():.2e}, mean {apart.mean():.2e} nats\n")

    for route, ranks in counted.items():
        assert len(ranks) == RANKS
        for rank, (old, new) in enumerate(ranks):
            assert (new["rank"], new["world"], new["dcp"]) == (rank, RANKS, RANKS)
            for name in ("calls", "chunks", "continuations", "context_tokens"):
                assert new[name] - old[name] == getattr(expected, name), (route, rank, name)
            packs = new["packs"].get("bfloat16", 0) - old["packs"].get("bfloat16", 0)
            assert packs == (0 if route == "stock" else expected.chunks)

    apart = np.abs(found["stock"].astype(np.float64) - exact)
    assert apart.mean() <= MEAN
    assert apart.max() <= WORST
    bits = {route: values.view(np.uint32) for route, values in found.items()}
    assert np.array_equal(bits["stock"], bits["fused"])
    moved = bits["stock"] != bits[MIXED]
    sys.stdout.write(f"{MIXED}: {moved[expected.exposed :].mean():.4f} of the exposed moved\n")
    assert not moved[: expected.exposed].any()
    assert moved[expected.exposed :].mean() > 0.5
