"""Emulated fp8 prefill on real servers: the fp8 pack in a served model, and a fault of it alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
for name in ("httpx2", "scipy", "stamina"):
    pytest.importorskip(name)

sys.path.insert(0, str(Path(__file__).parent))

from test_ppl import few, run  # noqa: E402 - vLLM decides first

from kvroute import probe  # noqa: E402
from kvroute.serve import ServeOptions, detect_device, start  # noqa: E402
from ppl import emulation  # noqa: E402
from ppl.options import default_model  # noqa: E402
from ppl.store import Store  # noqa: E402

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]
CLEAN = "kvpack.faults.k10_ties_away:kv_pack_clean"
FP8 = "bfloat16>float8_e4m3fn"


@pytest.mark.parametrize("route", ["fused", CLEAN])
def test_the_fp8_pack_is_reached_and_identical(route: str, tmp_path: Path) -> None:
    made = run(tmp_path, "--emulate-fp8-prefill", "--route", route, *few())
    assert made.verdict == "IDENTICAL"
    assert emulation.WARNING in made.decided.reasons
    assert made.run is not None
    assert all(f.untouched for f in made.run.servers)
    assert all(f.settings["cache_dtype"] == "fp8" for f in made.run.servers)
    assert {f.arm: f.facts["kinds"] for f in made.run.servers} == {"stock": [], "fused": [FP8]}
    for record in Store(tmp_path).records():
        seen = record.observed.counters or {}
        assert seen == record.observed.planned
        assert seen["fp8_calls"] == seen["calls"] > (0, 0)
        assert (seen["fp8_packs"] == seen["packs"] > (0, 0)) == (record.arm == "fused")
    for page in ("ppl.json", "ppl.md", "ppl.html"):
        assert "EMULATED: fp8 prefill" in (tmp_path / page).read_text(encoding="utf-8")


def test_a_fault_of_the_fp8_branch_shows_in_fp8(tmp_path: Path) -> None:
    """K10 rounds ties away from zero: nothing in bf16, where a run of servers can't see it."""
    made = run(tmp_path / "fp8", "--emulate-fp8-prefill", "--route", "fault:K10", *few(), code=None)
    assert made.verdict in {"DIFFERENT", "INCONCLUSIVE"}
    assert made.exit_code != 0
    assert made.identity is not None
    assert made.identity.identical_texts == 0
    assert all(t.unexposed.differing == 0 for t in made.texts)
    blind = run(tmp_path / "bf16", "--route", "fault:K10", *few())
    assert blind.verdict == "IDENTICAL"
    (line,) = [x for x in blind.not_covered if "fp8" in x]
    assert "packs converted bfloat16 alone" in line


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A stock server and a fused one that emulate, and a fused one with an fp8 cache alone."""
    if detect_device() != "cpu":
        pytest.skip("servers of these tests are CPU servers")
    folder = tmp_path_factory.mktemp("trio")
    common: dict[str, Any] = {"model": str(default_model()), "workspace": 1024}
    words = ("--max-num-batched-tokens", "512")
    asked = {
        "stock": ServeOptions(route="stock", emulate_fp8=True, extra=words, **common),
        "fused": ServeOptions(route="fused", emulate_fp8=True, extra=words, **common),
        "plain": ServeOptions(route="fused", extra=(*words, "--kv-cache-dtype", "fp8"), **common),
    }
    begun = {}
    try:
        for name, options in asked.items():
            begun[name] = start(options, log=folder / f"{name}.log")
            begun[name].wait_healthy(300)
        yield begun
    finally:
        for server in begun.values():
            server.stop()


@pytest.mark.parametrize(
    ("fused", "flag", "code", "says"),
    [
        ("fused", True, 0, "EMULATED"),
        ("plain", True, 4, "only the stock server emulates fp8 prefill"),
        ("fused", False, 4, "which wasn't asked for"),
    ],
)
def test_one_server_that_emulates_is_not_enough(
    fused: str,
    flag: bool,  # noqa: FBT001
    code: int,
    says: str,
    trio: dict[str, Any],
    tmp_path: Path,
) -> None:
    addresses = ["--stock", trio["stock"].url, "--fused", trio[fused].url]
    words = ["--emulate-fp8-prefill"] if flag else []
    made = run(tmp_path, *addresses, *words, *few(), code=code)
    assert made.verdict == ("INVALID" if code else "IDENTICAL")
    assert any(says in r for r in made.decided.reasons), made.decided.reasons


def test_decode_runs_on_an_fp8_cache_too(trio: dict[str, Any]) -> None:
    ids = [3 + i % 200 for i in range(700)]
    stock, fused = (probe.generate(trio[name].url, ids, 8) for name in ("stock", "fused"))
    assert stock == fused
    assert len(stock) == 8


def test_what_is_replaced_is_listed(trio: dict[str, Any]) -> None:
    for name, emulates in (("stock", True), ("fused", True), ("plain", False)):
        for report in probe.untouched(trio[name].url):
            assert report["untouched"], report["problems"]
            mine = [x for x in report["allowed"] if "MLAPrefillBackendEnum.CPU" in x]
            assert bool(mine) == emulates
