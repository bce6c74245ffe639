"""Ranks of the lane ``nccl`` that share GPUs: who takes which, what NCCL hears, what is said.

The ranks that run here do so on gloo, where there is no GPU.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from equiv import cli, document, evidence  # noqa: E402
from equiv.errors import UsageError  # noqa: E402
from equiv.loop import api, campaign, isolate, nccl, rank, report  # noqa: E402
from equiv.loop.campaign import Options  # noqa: E402
from equiv.profiles import profile_of  # noqa: E402
from kvroute import shared  # noqa: E402
from kvroute.packs import cat_pack  # noqa: E402

ALONE = Options(cat_pack, "fused", "cuda:0", profile_of("dev"), 0, lanes=("nccl",))
SHARED = replace(ALONE, share_gpu=True)


@pytest.fixture
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the environment as it was, whatever is set in it meanwhile."""
    for name in (shared.HOST, *shared.NCCL):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "devices", lambda: count)


def bytegate(*words: str) -> int:
    return cli.run_app(cli.app, list(words), "bytegate")


@pytest.mark.parametrize(
    ("have", "size", "placed"),
    [
        (1, 2, [0, 0]),
        (1, 4, [0, 0, 0, 0]),
        (2, 2, [0, 1]),
        (2, 4, [0, 1, 0, 1]),
        (3, 8, [0, 1, 2, 0, 1, 2, 0, 1]),
        (8, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_ranks_take_the_devices_in_turn_where_there_are_too_few(
    have: int, size: int, placed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(have, monkeypatch)
    backend = nccl.backend(SHARED)
    assert [backend.device(r) for r in range(size)] == [f"cuda:{n}" for n in placed]
    assert backend.shares(size) == (have < size)
    assert (size in nccl.sharing(SHARED)) == (have < size)


def test_without_the_flag_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    for have in (1, 2, 8):
        gpus(have, monkeypatch)
        assert nccl.backend(ALONE) == nccl.BACKEND
        assert nccl.sharing(ALONE) == []
        assert not any(nccl.BACKEND.shares(size) for size in nccl.SIZES)
    assert nccl.BACKEND.device(3) == "cuda:3"


@pytest.mark.usefixtures("_clean_environment")
@pytest.mark.parametrize(
    ("devices", "size", "told"),
    [(1, 4, "bytegate-rank-3"), (2, 4, "bytegate-rank-3"), (4, 4, None), (0, 4, None)],
)
def test_nccl_is_told_of_a_host_for_each_rank_before_it_starts_and_only_where_they_share(
    devices: int, size: int, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    ones = torch.ones

    def see(name: str, **given: Any) -> None:
        seen.append((name, given["device_id"], {x: os.environ.get(x) for x in at_all}))

    at_all = (shared.HOST, *shared.NCCL)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", see)
    monkeypatch.setattr(dist, "all_reduce", lambda count: count.mul_(size))
    monkeypatch.setattr(torch, "ones", lambda n, device: ones(n))
    backend = replace(nccl.BACKEND, shared=devices)
    rank.meet(rank.Rank(3, size, tmp_path / "store", backend, SHARED, forked=True))
    ((name, device, environ),) = seen
    assert (name, device) == ("nccl", torch.device(f"cuda:{3 % devices if devices else 3}"))
    want = {shared.HOST: told, **shared.NCCL} if told else dict.fromkeys(at_all)
    assert environ == want


def test_the_plan_holds_all_sizes_and_says_which_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(size: int, what: str) -> str:
        return (
            f"D = {size}, ranks with a device each (NVLink, peer memory): {size} ranks shared "
            f"{what}, connected by sockets"
        )

    for have, left_out in (
        (1, [line(2, "1 GPU"), line(4, "1 GPU"), line(8, "1 GPU")]),
        (2, [line(4, "2 GPUs"), line(8, "2 GPUs")]),
        (8, []),
    ):
        gpus(have, monkeypatch)
        monkeypatch.setattr(nccl, "DRAWS", {"dev": 1})
        plan = nccl.plan(SHARED)
        assert tuple(plan.cases) == nccl.SIZES
        assert {f"D={size}" for size in nccl.SIZES} < plan.least.keys()
        assert (plan.missing, plan.left_out) == ([], [*left_out, nccl.LEFT_OUT])
    gpus(1, monkeypatch)
    twin = nccl.plan(ALONE)
    assert (list(twin.cases), len(twin.missing)) == ([], 1)
    assert not any("shared" in line for line in twin.left_out)


def test_a_finding_s_command_carries_the_flag_only_beside_the_lane_that_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = campaign.campaign_command(SHARED, ("nccl",))
    assert command == (
        "bytegate loop --lane nccl --profile dev --seed 0 --device cuda:0 --share-gpu"
    )
    asked: list[Any] = []

    def ask(request: api.LoopRequest, *_: Any) -> None:
        asked.append(request)
        raise UsageError("enough")

    monkeypatch.setattr(api, "run_loop", ask)
    assert bytegate(*shlex.split(command)[1:]) == 2
    assert (asked[0].share_gpu, asked[0].lanes) == (True, ("nccl",))
    assert "--share-gpu" not in campaign.campaign_command(SHARED, ("edges", "ragged"))
    assert "--share-gpu" not in campaign.campaign_command(ALONE, ("nccl",))
    assert isolate.parcel(SHARED).share_gpu


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--device", "cpu"), "--share-gpu: there is no GPU to share on the CPU"),
        (("--lane", "edges"), "--share-gpu is for the lane nccl alone: add --lane nccl"),
        (("--lane", "gloo"), "--share-gpu is for the lane nccl alone: add --lane nccl"),
        (("--device", "cpu", "--lane", "nccl"), "lane 'nccl' runs on CUDA devices alone"),
    ],
)
def test_the_flag_where_it_can_mean_nothing_is_bad_usage(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bytegate("loop", *words, "--share-gpu", "--out", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_host_without_a_gpu_refuses_the_flag_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a host without one")
    assert bytegate("loop", "--share-gpu", "--out", str(tmp_path)) == 2
    assert "there is no GPU to share on the CPU" in capsys.readouterr().err


def test_the_flag_stands_after_no_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert bytegate("loop", "--share-gpu", "faults") == 2
    assert "--share-gpu stands before faults" in capsys.readouterr().err


def test_which_hosts_run_the_lane_by_default() -> None:
    assert "nccl" in api.default_lanes("cuda:0", 1, share=True)
    assert "nccl" not in api.default_lanes("cuda:0", 1)
    assert "nccl" not in api.default_lanes("cuda:0", 0, share=True)


def test_a_host_without_a_device_lacks_the_one_that_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(0, monkeypatch)
    assert nccl.lacking(share=True) == "needs 1 CUDA device, and the host has 0 devices"
    assert nccl.lacking() == "needs 2 CUDA devices, and the host has 0 devices"
    gpus(1, monkeypatch)
    assert nccl.lacking(share=True) == ""


@pytest.mark.parametrize(("share", "have", "told"), [(True, 1, 1), (True, 8, 0), (False, 2, 0)])
def test_evidence_and_report_say_that_ranks_shared(
    share: bool,  # noqa: FBT001
    have: int,
    told: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole run, with the lane's ranks on gloo and few cases."""
    gpus(have, monkeypatch)
    monkeypatch.setattr(nccl, "SIZES", (2,))
    monkeypatch.setattr(nccl, "DRAWS", {"dev": 1})
    monkeypatch.setattr(nccl, "BACKEND", rank.Backend("nccl", "gloo"))
    monkeypatch.setattr(rank, "as_a_host", lambda _: None)  # gloo hears nothing of it
    monkeypatch.setattr(api, "_check_device", lambda *_: None)
    monkeypatch.setattr(api, "_check_share", lambda *_: None)
    command = f"bytegate loop --lane nccl{' --share-gpu' if share else ''}"
    request = api.LoopRequest(
        lanes=("nccl",), device="cpu", profile="dev", out=tmp_path, share_gpu=share, command=command
    )
    made = api.run_loop(request)
    assert made.verdict == "PASS"
    again = evidence.read(tmp_path / "loop.json", evidence.LoopEvidence)
    assert (again.share_gpu, again.command) == (told, command)
    text = document.markdown(list(report.loop_blocks(made)))
    line = "nccl: D = 2, ranks with a device each (NVLink, peer memory): 2 ranks shared 1 GPU"
    assert (line in text) == bool(told)
    assert ("nccl: larger groups shared 1 GPU, connected by sockets" in text) == bool(told)
    assert ("shared" in text) == bool(told)
