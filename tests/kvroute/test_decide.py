"""The route is decided once, by four facts, and the log and the evidence say which."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvroute import decide, switch
from kvroute.decide import Decision
from kvroute.errors import RouteError
from kvroute.settings import Settings, check_route, resolve
from kvroute.switch import LOOP, LoopGate, gate_layer
from kvroute.tally import Tally

PRESENT = "fused_mla_kv_concat_fn"


def loop_now(
    q: Any, attn_metadata: Any, dcp_world_size: int, fused_mla_kv_concat_fn: Any = None
) -> Any:
    return fused_mla_kv_concat_fn


def loop_then(q: Any, attn_metadata: Any, dcp_world_size: int, kv_pack: Any = None) -> Any:
    return kv_pack


def loop_without(q: Any, attn_metadata: Any, dcp_world_size: int) -> Any:
    return None


@pytest.mark.parametrize(
    ("loop", "name"),
    [(loop_now, PRESENT), (loop_then, "kv_pack"), (loop_without, None)],
)
def test_the_pack_argument_is_found_by_signature_under_both_names(
    loop: Any, name: str | None
) -> None:
    assert decide.pack_keyword(loop) == name


@pytest.mark.parametrize(
    ("requested", "dcp", "keyword", "environ", "route", "switch_"),
    [
        (None, 2, PRESENT, {}, "untouched", None),
        ("fused", 1, PRESENT, {}, "untouched", None),
        ("fused", 2, PRESENT, {}, "fused", None),
        ("stock", 2, PRESENT, {}, "stock", None),
        ("some.module:pack", 2, "kv_pack", {}, "some.module:pack", None),
        ("fused", 2, None, {}, "stock", None),
        (
            "fused",
            2,
            PRESENT,
            {"VLLM_K3_DCP_FUSED_KV_PACK": "0"},
            "stock",
            "VLLM_K3_DCP_FUSED_KV_PACK=0",
        ),
        ("fused", 2, PRESENT, {"VLLM_K3_DCP_FUSED_KV_PACK": "1"}, "fused", None),
        (
            "fused",
            2,
            PRESENT,
            {"VLLM_K3_DCP_FUSED_KV_PACK_DISABLE": "1"},
            "stock",
            "VLLM_K3_DCP_FUSED_KV_PACK_DISABLE=1",
        ),
        ("fused", 2, PRESENT, {"VLLM_K3_DCP_FUSED_KV_PACK_DISABLE": "0"}, "fused", None),
        (
            None,
            2,
            PRESENT,
            {"VLLM_K3_DCP_FUSED_KV_PACK": "0"},
            "stock",
            "VLLM_K3_DCP_FUSED_KV_PACK=0",
        ),
        (None, 1, PRESENT, {"VLLM_K3_DCP_FUSED_KV_PACK": "0"}, "untouched", None),
    ],
)
def test_decision(
    requested: str | None,
    dcp: int,
    keyword: str | None,
    environ: dict[str, str],
    route: str,
    switch_: str | None,
) -> None:
    made = decide.decide(requested, dcp_size=dcp, keyword=keyword, environ=environ)
    assert (made.route, made.switch) == (route, switch_)
    assert made.reason


class Impl:
    """An implementation whose loop tells which pack it got."""

    dcp_world_size = 2

    def _context_parallel_compute_prefill_context(
        self,
        q: Any,
        attn_metadata: Any,
        dcp_world_size: int,
        fused_mla_kv_concat_fn: Any = None,
    ) -> Any:
        return fused_mla_kv_concat_fn


def layer_of(impl: Any) -> Any:
    weight = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    return SimpleNamespace(impl=impl, kv_b_proj=SimpleNamespace(parameters=lambda: iter([weight])))


def metadata() -> Any:
    chunks = [
        SimpleNamespace(is_continuation=False, num_context_tokens=5),
        SimpleNamespace(is_continuation=True, num_context_tokens=3),
    ]
    context = SimpleNamespace(
        chunks=chunks,
        empty_token_slices=[slice(0, 1)],
        dcp_manager=None,
        workspace=SimpleNamespace(shape=(96, 576), dtype="torch.bfloat16"),
    )
    return SimpleNamespace(prefill=SimpleNamespace(chunked_context=context, prefill_backend=None))


def gated(route: str | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Tally]:
    monkeypatch.setattr(switch, "_place", lambda: {"rank": 0, "world": 2})
    tally = Tally()
    layer = layer_of(Impl())
    gate_layer(layer, Settings(route=route), tally)
    return layer, tally


def call(layer: Any, **extra: Any) -> Any:
    return getattr(layer.impl, LOOP)("q", attn_metadata=metadata(), dcp_world_size=2, **extra)


def test_without_a_request_a_layer_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, tally = gated(None, monkeypatch)
    assert LOOP not in vars(layer.impl)
    assert tally.layers == {"untouched": 1}


def test_stock_takes_away_the_pack_that_a_layer_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, tally = gated("stock", monkeypatch)
    assert call(layer, fused_mla_kv_concat_fn=lambda *_: None) is None
    assert (tally.calls, tally.chunks, tally.continuations, tally.empty) == (1, 2, 1, 1)
    assert tally.context_tokens == 8


def test_fused_keeps_the_pack_that_a_layer_brings_and_counts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, tally = gated("fused", monkeypatch)
    tensor = SimpleNamespace(dtype="torch.bfloat16", shape=(7, 2, 256))
    pack = call(layer, fused_mla_kv_concat_fn=lambda kv, pe, fp8: (kv, pe))
    assert pack(tensor, tensor, False) == (tensor, tensor)
    assert (dict(tally.packs), tally.pack_rows) == ({"bfloat16": 1}, 7)


def test_fused_gives_the_generic_loop_a_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = gated("fused", monkeypatch)
    assert callable(call(layer))


@pytest.mark.parametrize("wrong", [False, True])
def test_both_runs_twice_and_compares(
    wrong: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")

    class Numbers(Impl):
        def _context_parallel_compute_prefill_context(
            self,
            q: Any,
            attn_metadata: Any,
            dcp_world_size: int,
            fused_mla_kv_concat_fn: Any = None,
        ) -> Any:
            moved = wrong and fused_mla_kv_concat_fn is not None
            return torch.tensor([1.0 + moved]), torch.tensor([float("nan")])

    monkeypatch.setattr(switch, "_place", lambda: {"rank": 0})
    tally = Tally()
    layer = layer_of(Numbers())
    gate_layer(layer, Settings(route="both"), tally)
    out, _ = call(layer)
    assert out.item() == 1.0
    assert (tally.calls, tally.compared, tally.unequal) == (1, 1, int(wrong))


def test_gating_twice_is_gating_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, tally = gated("fused", monkeypatch)
    gate = getattr(layer.impl, LOOP)
    assert gate_layer(layer, Settings(route="fused"), tally) is None
    assert getattr(layer.impl, LOOP) is gate
    assert isinstance(gate, LoopGate)


def test_each_route_logs_its_marker_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(switch, "_place", lambda: {"rank": 0})
    for route in ("stock", "fused"):
        caplog.clear()
        tally = Tally()
        with caplog.at_level(logging.INFO, logger="vllm.bytegate"):
            for _ in range(3):
                gate_layer(layer_of(Impl()), Settings(route=route), tally)
        assert [f"route={route}" in message for message in caplog.messages] == [True]


def test_a_fired_switch_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("VLLM_K3_DCP_FUSED_KV_PACK_DISABLE", "1")
    with caplog.at_level(logging.INFO, logger="vllm.bytegate"):
        layer, tally = gated("fused", monkeypatch)
    assert "switch=VLLM_K3_DCP_FUSED_KV_PACK_DISABLE=1" in caplog.text
    assert call(layer, fused_mla_kv_concat_fn=lambda *_: None) is None
    assert tally.snapshot()["switch"] == "VLLM_K3_DCP_FUSED_KV_PACK_DISABLE=1"


@pytest.mark.parametrize("route", ["fast", "fault:", "a:b:c", "a b:c", ""])
def test_a_route_that_is_none_is_refused_in_one_line(route: str) -> None:
    with pytest.raises(RouteError, match=r"\A[^\n]+\Z"):
        check_route(route)


@pytest.mark.parametrize("spec", ["no.such.module:f", "os.path:no_such_name", "os:sep"])
def test_a_pack_that_is_not_there_is_refused_in_one_line(spec: str) -> None:
    with pytest.raises(RouteError, match=r"\A[^\n]+\Z"):
        resolve(spec)


@pytest.mark.parametrize(
    "environ",
    [
        {"BYTEGATE_WORKSPACE_ROWS": "many"},
        {"BYTEGATE_WORKSPACE_ROWS": "0"},
        {"BYTEGATE_CPU_DCP": "yes"},
        {"BYTEGATE_ROUTE": "fast"},
        {"BYTEGATE_PATCH": "nothing"},
    ],
)
def test_a_setting_that_means_nothing_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(RouteError, match=r"\A[^\n]+\Z"):
        Settings.read(environ)


def test_an_empty_environment_asks_for_nothing() -> None:
    assert Settings.read({}) == Settings()


def test_a_decision_knows_whether_it_packs() -> None:
    assert not Decision("stock", PRESENT, None, "").packs
    assert Decision("fault:K05", PRESENT, None, "").packs


def test_a_layer_is_hooked_when_its_module_is_imported_later(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Kimi-K3's module is imported by the worker long after the plugin ran, or never."""
    monkeypatch.setattr(switch, "_place", lambda: {"rank": 0})
    (tmp_path / "late_layers.py").write_text(
        "class Layer:\n    def __init__(self, impl, kv_b_proj):\n"
        "        self.impl, self.kv_b_proj = impl, kv_b_proj\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(switch, "LAYERS", (("late_layers", "Layer"),))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(switch, "TALLY", Tally())
    switch.install(Settings(route="stock"))
    assert "late_layers" not in sys.modules
    import late_layers

    built = late_layers.Layer(Impl(), layer_of(None).kv_b_proj)
    assert isinstance(getattr(built.impl, LOOP), LoopGate)
    switch.install(Settings(route="stock"))  # a second time hooks nothing twice
    assert late_layers.Layer.__init__.__wrapped__.__name__ == "__init__"
    assert not hasattr(late_layers.Layer.__init__.__wrapped__, "__wrapped__")
    monkeypatch.delitem(sys.modules, "late_layers")


def test_both_takes_a_pack_of_ones_own() -> None:
    settings = Settings.read({"BYTEGATE_ROUTE": "both:kvroute.packs:cat_pack"})
    assert settings.route == "both:kvroute.packs:cat_pack"
    made = decide.decide(settings.route, dcp_size=2, keyword="kv_pack", environ={})
    assert (made.both, made.packs) == (True, True)
    assert not decide.decide("both2:x", dcp_size=2, keyword="kv_pack", environ={}).both
    with pytest.raises(RouteError, match="module:function"):
        Settings.read({"BYTEGATE_ROUTE": "both:"})


@pytest.mark.parametrize(
    ("name", "value", "fires"),
    [
        ("VLLM_K3_DCP_FUSED_KV_PACK", "false", True),
        ("VLLM_K3_DCP_FUSED_KV_PACK", " 0 ", True),
        ("VLLM_K3_DCP_FUSED_KV_PACK", "True", False),
        ("VLLM_K3_DCP_FUSED_KV_PACK", "", False),
        ("VLLM_K3_DCP_FUSED_KV_PACK_DISABLE", "true", True),
        ("VLLM_K3_DCP_FUSED_KV_PACK_DISABLE", "off", False),
    ],
)
def test_a_kill_switch_fires_however_it_is_spelt(name: str, value: str, fires: bool) -> None:  # noqa: FBT001
    assert (decide.fired_switch({name: value}) is not None) == fires


def test_a_kill_switch_that_means_nothing_is_refused() -> None:
    with pytest.raises(RouteError, match=r"DISABLE='maybe': expected 0 or 1"):
        decide.fired_switch({"VLLM_K3_DCP_FUSED_KV_PACK_DISABLE": "maybe"})
