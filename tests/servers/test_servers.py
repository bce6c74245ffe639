"""Two real servers, one a route, side by side: same bits, other paths, and counters that say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
psutil = pytest.importorskip("psutil")

from kvroute import model, probe  # noqa: E402 - vLLM decides first whether to go on
from kvroute.chunks import Layout, predict  # noqa: E402
from kvroute.serve import ServeOptions  # noqa: E402

WORKSPACE = 1024
BUDGET = 512
LAYOUT = Layout(page=16, ranks=2, interleave=1, workspace=WORKSPACE)
pytestmark = pytest.mark.timeout(600)


def bits(values: Any) -> Any:
    return np.asarray(values, dtype=np.float32).view(np.uint32)


@pytest.fixture(scope="module")
def pair(
    servers: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("evidence")
    started = servers(
        *(
            ServeOptions(route=route, workspace=WORKSPACE, evidence=folder / route)
            for route in ("stock", "fused")
        )
    )
    return {"stock": started[0], "fused": started[1], "folder": folder}


@pytest.fixture(scope="module")
def answers(pair: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    return {route: probe.log_probs(pair[route].url, ids) for route in ("stock", "fused")}


def test_both_routes_give_the_same_bits(
    answers: dict[str, Any], pair: dict[str, Any], ids: list[int]
) -> None:
    assert len(answers["stock"]) == len(ids) - 1
    assert np.array_equal(bits(answers["stock"]), bits(answers["fused"]))
    again = probe.log_probs(pair["fused"].url, ids)
    assert np.array_equal(bits(again), bits(answers["fused"]))


def test_generated_tokens_agree_too(pair: dict[str, Any], ids: list[int]) -> None:
    stock, fused = (probe.generate(pair[route].url, ids[:700], 8) for route in ("stock", "fused"))
    assert stock == fused
    assert len(stock) == 8


@pytest.mark.parametrize("route", ["stock", "fused"])
def test_every_rank_counts_what_was_predicted(
    route: str,
    pair: dict[str, Any],
    ids: list[int],
) -> None:
    url = pair[route].url
    before = probe.ranks(url)
    probe.log_probs(url, ids)
    after = probe.ranks(url)
    expected = predict(len(ids), BUDGET, LAYOUT, model.LAYERS)
    assert expected.continuations > 0
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        assert (new["rank"], new["world"], new["dcp"]) == (rank, 2, 2)
        for name in ("calls", "chunks", "continuations", "context_tokens"):
            assert new[name] - old[name] == getattr(expected, name), name
        packs = new["packs"].get("bfloat16", 0) - old["packs"].get("bfloat16", 0)
        assert packs == (expected.chunks if route == "fused" else 0)
        assert set(new["packs"]) <= {"bfloat16"}
        assert new["route"] == route
        assert new["switch"] is None
        assert new["gather"].startswith("gloo")
        assert new["workspace_rows"] == WORKSPACE + WORKSPACE // 2
        assert new["layers"] == {route: model.LAYERS}


@pytest.mark.parametrize("route", ["stock", "fused"])
def test_the_loop_in_a_live_worker_is_the_wheels_own(route: str, pair: dict[str, Any]) -> None:
    for report in probe.untouched(pair[route].url):
        assert report["problems"] == []
        assert report["untouched"]
        assert list(report["shadowed"]) == ["CPUMLAImpl._context_parallel_compute_prefill_context"]


def test_the_metrics_tell_the_route_without_dev_mode(
    pair: dict[str, Any],
    answers: dict[str, Any],
) -> None:
    del answers
    stock, fused = (probe.metrics(pair[route].url) for route in ("stock", "fused"))

    def total(found: dict[str, float], name: str) -> float:
        return sum(value for label, value in found.items() if label.startswith(f"{name}_total{{"))

    assert total(stock, "bytegate_chunks") > 0
    assert total(stock, "bytegate_packs") == 0
    assert total(fused, "bytegate_packs") == total(fused, "bytegate_chunks") > 0
    for rank in (0, 1):
        assert any('route="fused"' in label and f'rank="{rank}"' in label for label in fused)


def test_the_logs_name_the_route_once_a_rank(pair: dict[str, Any]) -> None:
    for route in ("stock", "fused"):
        text = Path(pair[route].log).read_text(encoding="utf-8")
        assert text.count(f"bytegate: route={route}") == 2


def test_stopping_ends_every_process_and_leaves_the_evidence(
    pair: dict[str, Any], ids: list[int]
) -> None:
    del ids
    for route in ("stock", "fused"):
        server = pair[route]
        family = psutil.Process(server.pid).children(recursive=True)
        assert len(family) >= 3
        server.stop()
        assert not [process for process in family if process.is_running()]
        files = sorted((pair["folder"] / route).glob("route-*.json"))
        assert [path.name.split("-")[1] for path in files] == ["0", "1"]


@pytest.mark.nightly
def test_a_kill_switch_restores_the_stock_statements_in_a_live_server(
    answers: dict[str, Any],
    servers: Callable[..., list[Any]],
    ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_K3_DCP_FUSED_KV_PACK", "0")
    (server,) = servers(ServeOptions(route="fused", workspace=WORKSPACE))
    try:
        found, counted = probe.log_probs(server.url, ids), probe.ranks(server.url)
    finally:
        server.stop()
    assert np.array_equal(bits(found), bits(answers["stock"]))
    for rank in counted:
        assert (rank["requested"], rank["route"], rank["packs"]) == ("fused", "stock", {})
        assert rank["switch"] == "VLLM_K3_DCP_FUSED_KV_PACK=0"
    text = Path(server.log).read_text(encoding="utf-8")
    assert text.count("switch=VLLM_K3_DCP_FUSED_KV_PACK=0") == 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ("K01", "exposed"),
        ("K06", "exposed"),
        ("L10", "exposed"),
        ("L07", "merged"),
        ("L11", "merged"),
        ("L04", "some exposed"),
    ],
)
def test_a_faulty_server_differs_on_exposed_tokens_and_no_other(
    fault: str,
    first: str,
    answers: dict[str, Any],
    servers: Callable[..., list[Any]],
    ids: list[int],
) -> None:
    (server,) = servers(ServeOptions(route=f"fault:{fault}", workspace=WORKSPACE))
    try:
        found = probe.log_probs(server.url, ids)
    finally:
        server.stop()
    expected = predict(len(ids), BUDGET, LAYOUT, model.LAYERS)
    start = expected.first_merged if first == "merged" else expected.exposed
    assert start is not None
    differ = bits(found) != bits(answers["stock"])
    # Entry i is the target i + 1, scored by the hidden state at i.
    assert not differ[:start].any()
    assert differ[start:].any() if first.startswith("some") else differ[start:].all()
