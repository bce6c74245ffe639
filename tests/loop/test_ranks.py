"""Real ranks: the lanes ``gloo`` and ``nccl``, the latter on gloo where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from equiv.errors import UsageError  # noqa: E402
from equiv.loop import api, campaign, gloo, harmless, isolate, lanes, nccl, rank, ranks  # noqa: E402
from equiv.loop.campaign import Options  # noqa: E402
from equiv.loop.case import LoopCase  # noqa: E402
from equiv.loop.result import Result  # noqa: E402
from equiv.profiles import profile_of  # noqa: E402
from kvroute.packs import cat_pack  # noqa: E402
from kvroute.settings import resolve  # noqa: E402

OPTIONS = Options(cat_pack, "fused", "cpu", profile_of("dev"), 0, lanes=("gloo",))
ON_CPU = rank.Backend("nccl", "gloo")
CASE = LoopCase("gloo", 2, 0, 1, 16, 2, 96, ((3, 545), (1, 0), (2, 3), (5, 0)), seed=1)


@pytest.fixture(autouse=True)
def _ready(monkeypatch: pytest.MonkeyPatch) -> None:
    api.prepare("cpu", ())
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(dist, "all_gather_into_tensor", dist.all_gather_into_tensor)  # put back


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "DRAWS", {"dev": 2})
    monkeypatch.setattr(nccl, "BACKEND", ON_CPU)


def small_gloo(options: Options = OPTIONS) -> Any:
    cases = {2: harmless.draw(options, 4, ranks=(2,))}
    return ranks.run_lane(gloo.BACKEND, options, ranks.RanksPlan(cases, {2: 4}, {"D=2": 4}))[0]


def test_real_ranks_give_the_served_bytes() -> None:
    (lane,), worst = campaign.run_lanes(OPTIONS)
    assert 0 < worst < 1
    assert (lane.state, lane.findings, lane.missing) == ("passed", [], [])
    assert lane.equal == lane.cases == lane.drawn == 36


@pytest.mark.parametrize(
    ("patch", "state"),
    [("rolled", "failed"), ("rolled_clean", "passed")],
)
def test_a_gather_in_another_order_shows_on_real_ranks_and_not_where_peers_are_served(
    patch: str, state: str
) -> None:
    resolve(f"kvroute.faults.rank_faults:{patch}")()
    lane = small_gloo()
    assert lane.state == state
    if state == "failed":
        (found,) = lane.findings
        assert found.kind == "collective"
        assert found.detail == "rank 1, without it: real ranks give other bytes than served ones"
        assert found.repro == "bytegate loop --lane gloo --profile dev --seed 0"
    served, _ = campaign.run_lanes(replace(OPTIONS, lanes=("ragged", "fp8"), draws=30))
    assert [f for x in served for f in x.findings] == []


@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize("patch", ["", "rolled"])
def test_the_nccl_lane_runs_what_it_is_for_on_as_many_devices_as_there_are(
    patch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "devices", lambda: 5)
    if patch:
        resolve(f"kvroute.faults.rank_faults:{patch}")()
    said: list[tuple[str, int, int]] = []
    lane, _ = nccl.lane(OPTIONS, lambda _, name, done, total: said.append((name, done, total)))
    assert lane.left_out == ["D = 8 on NCCL ranks: the host has 5 devices", nccl.LEFT_OUT]
    if patch:
        assert (lane.state, len(lane.findings)) == ("failed", 2)
        assert all("other bytes than served" in f.detail for f in lane.findings)
        assert lane.findings[0].repro.startswith("bytegate loop --lane nccl ")
        return
    assert (lane.state, lane.findings, lane.missing) == ("passed", [], [])
    assert lane.kinds["D=2 at real sizes and H=12"] >= 8
    assert lane.kinds["D=4 at real sizes and H=12"] >= 8
    assert "D=8" not in lane.kinds
    assert lane.least.keys() > {"fp8 cache", "fp8 prefill", "continuation", "no context", "H=12"}
    assert (lane.cases, lane.enumerated, lane.drawn) == (24, 16, 8)
    assert said[-1] == ("nccl", 24, 24)


@pytest.mark.usefixtures("_few")
def test_a_lane_that_did_not_reach_12_heads_is_not_covered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "devices", lambda: 2)
    monkeypatch.setattr(nccl, "known", lambda *_: iter(()))
    plan = nccl.plan(OPTIONS)
    whole = {f"D=2 at real sizes and H={nccl.HEADS}": 8}
    lane, _ = ranks.run_lane(ON_CPU, OPTIONS, replace(plan, least={**plan.least, **whole}))
    assert lane.state == "not covered"
    assert "D=2 at real sizes and H=12: 0 of 8 cases" in lane.missing


@pytest.mark.parametrize(
    ("have", "why"),
    [
        (0, "needs 2 CUDA devices, and the host has 0 devices"),
        (1, f"needs 2 CUDA devices, and the host has 1 device; {nccl.WAY_OUT}"),
    ],
)
def test_a_host_without_enough_devices_is_not_covered_by_name(
    have: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "devices", lambda: have)
    lane, _ = nccl.lane(OPTIONS)
    assert (lane.state, lane.cases, lane.missing) == ("not covered", 0, [why])
    assert "nccl" not in api.default_lanes("cuda:0", have)
    assert f"nccl: {why}" in api.not_covered([], "cuda:0")


def test_which_lanes_a_device_runs() -> None:
    served = ("edges", "ragged", "fp8", "real", "strides")
    assert api.default_lanes("cpu") == (*served, "gloo", "engine")
    assert api.default_lanes("cpu", 8) == (*served, "gloo", "engine")
    assert api.default_lanes("cuda:0", 1) == served
    assert api.default_lanes("cuda:0", 2) == (*served, "nccl")
    assert any(line == "lanes not run: nccl" for line in api.not_covered(_lanes("cpu"), "cpu"))


def _lanes(device: str) -> list[Any]:
    start = campaign.lane_of("x", 0.0)
    return [replace(start, lane=name) for name in api.default_lanes(device)]


@pytest.mark.parametrize(
    ("lane", "device", "says"),
    [
        ("nccl", "cpu", "lane 'nccl' runs on CUDA devices alone: give --device cuda there"),
        ("gloo", "cuda", "lane 'gloo' runs on the CPU alone: leave --device out"),
    ],
)
def test_a_lane_that_the_device_lacks_is_refused(
    lane: str, device: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        api.run_loop(api.LoopRequest(lanes=(lane,), device=device, out=tmp_path))


@pytest.mark.parametrize(
    ("patch", "kind", "says"),
    [
        ("dies", "ranks", "rank 1: the process died: SIGKILL"),
        ("sleeps", "ranks", "ranks 0, 1 gave no answer in 4 s"),
        ("raises", "ranks", "rank 1, on real ranks: RuntimeError: the wire is cut"),
        ("stays", "equal", ""),
    ],
)
def test_a_rank_that_is_lost_in_a_collective_is_a_finding(
    patch: str, kind: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from equiv import patience

    monkeypatch.setattr(patience, "MOST", 1.0)
    resolve(f"rank_patches:{patch}")()
    with ranks.Group(2, gloo.BACKEND, OPTIONS) as group:
        group._limit = 4.0 if patch == "sleeps" else 60.0
        result = group.run(CASE)
    assert (result.status, result.detail) == (kind, says)
    assert not any(p.is_alive() for p in group._processes)


def test_a_pack_that_fails_on_one_rank_is_told_by_its_own_finding_not_by_its_peer_s() -> None:
    def wrong(kv_nope: Any, k_pe: Any, use_fp8: bool) -> Any:  # noqa: FBT001
        k, v = cat_pack(kv_nope, k_pe, use_fp8)
        if dist.get_rank() == 1:
            k = k + 1
        return k, v

    with ranks.Group(2, gloo.BACKEND, replace(OPTIONS, pack=wrong)) as group:
        result = group.run(CASE)
    assert result.status == "divergence"


def test_a_loop_that_takes_another_gather_is_not_taken_for_real_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.attention.ops.dcp import MLADCPManager

    def another(self: Any, gathered: Any, local: Any) -> None:
        gathered.view(2, *local.shape).copy_(local.expand(2, *local.shape))

    plain: Callable[..., Any] = MLADCPManager.kv_gather
    seen: list[int] = []

    def once(self: Any, gathered: Any, local: Any) -> Any:  # the served runs as they are
        seen.append(1)
        return (another if self._kv_gather.__name__ == "counted" else plain)(self, gathered, local)

    monkeypatch.setattr(MLADCPManager, "kv_gather", once)
    with ranks.Group(2, gloo.BACKEND, OPTIONS) as group:
        result = group.run(CASE)
    assert result.status == "not_run"
    assert result.detail.startswith("rank 0, without it: 0 collectives for ")


def test_spawned_ranks_are_the_same_as_forked_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(OPTIONS, patches=("kvroute.faults.rank_faults:rolled",))
    monkeypatch.setattr(isolate, "cuda_in_use", lambda: True)
    with ranks.Group(2, gloo.BACKEND, options) as group:
        result = group.run(CASE)
    assert result.detail == "rank 1, without it: real ranks give other bytes than served ones"
    with ranks.Group(2, gloo.BACKEND, OPTIONS) as group:
        assert group.run(CASE).status == "equal"


def test_a_group_that_does_not_come_up_is_not_covered_with_the_reason() -> None:
    backend = rank.Backend("nccl", "nccl", cuda=True)
    if torch.cuda.is_available():
        pytest.skip("needs a machine on which it can't")
    cases = {2: [CASE]}
    lane, _ = ranks.run_lane(backend, OPTIONS, ranks.RanksPlan(cases, {}, {"D=2": 1}))
    assert (lane.state, lane.cases) == ("not covered", 0)
    assert lane.missing[0].startswith("D = 2: the group didn't come up: rank 0: ")


def test_the_cases_of_a_cuda_lane_name_the_rank_s_own_device() -> None:
    backend = rank.Backend("nccl", "nccl", cuda=True)
    assert [backend.device(r) for r in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert gloo.BACKEND.device(2) == "cpu"
    assert set(lanes.APART) == {"gloo", "engine", "nccl"}
    assert not Result("equal").failed


@pytest.mark.parametrize("cuda", [True, False])
def test_a_rank_takes_its_device_before_it_meets_the_others(
    cuda: bool,  # noqa: FBT001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order that NCCL needs, said to a recorder: device, then group with that device."""
    said: list[tuple[str, Any]] = []
    ones = torch.ones
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: said.append(("device", device)))
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: said.append((a[0], k)))
    monkeypatch.setattr(dist, "all_reduce", lambda count: count.mul_(4))
    monkeypatch.setattr(torch, "ones", lambda n, device: said.append(("ones", device)) or ones(n))
    backend = rank.Backend("nccl", "nccl", cuda=True) if cuda else gloo.BACKEND
    me = rank.Rank(3, 4, tmp_path / "store", backend, OPTIONS, forked=True)
    assert rank.meet(me) is cat_pack
    device = torch.device("cuda:3" if cuda else "cpu")
    if cuda:
        assert said.pop(0) == ("device", device)
    (name, given), (_, where) = said
    assert (name, where) == (backend.name, device)
    assert given.get("device_id") == (device if cuda else None)
    assert (given["rank"], given["world_size"]) == (3, 4)
    assert given["init_method"] == f"file://{tmp_path}/store"
