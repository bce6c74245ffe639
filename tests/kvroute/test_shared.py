"""Ranks that share GPUs: where each goes, what NCCL is told, and what a server is started with."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from kvroute import plugin, serve, shared, tally
from kvroute.errors import RouteError
from kvroute.serve import ServeOptions, parse, plan
from kvroute.settings import Settings

HOST, NAME = "NCCL_HOSTID", "BYTEGATE_SHARE_GPU"


def config(tp: int = 2, **facts: Any) -> Any:
    """Return a class that places ranks as vLLM's ``ParallelConfig`` does."""

    class Config:
        local_world_size = tp
        data_parallel_size_local = 1
        nnodes = 1
        distributed_executor_backend = "mp"

        def get_local_gpu_index(self, local_rank: int, dp_local_rank: int | None = None) -> int:
            return local_rank + (dp_local_rank or 0) * self.local_world_size

    for name, value in facts.items():
        setattr(Config, name, value)
    return Config


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "TALLY", tally.Tally())
    for name in (HOST, NAME, *shared.NCCL):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is taken back
        monkeypatch.delenv(name)


# -- in a rank ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "gpus", "places"),
    [(2, 1, [0, 0]), (4, 1, [0, 0, 0, 0]), (4, 2, [0, 1, 0, 1]), (3, 2, [0, 1, 0])],
)
def test_ranks_take_turns_on_the_gpus_and_are_hosts_of_their_own(
    tp: int, gpus: int, places: list[int]
) -> None:
    made = config(tp)
    assert shared.install(made, lambda: gpus) == ["share_gpu"]
    seen = [(made().get_local_gpu_index(rank), os.environ[HOST]) for rank in range(tp)]
    assert [place for place, _ in seen] == places
    assert len({host for _, host in seen}) == tp
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_IB_DISABLE"] == "1"
    assert tally.TALLY.snapshot()["share_gpu"] == {"ranks": tp, "gpus": gpus}


@pytest.mark.parametrize("gpus", [2, 8])
def test_ranks_with_a_gpu_each_keep_it_and_nothing_is_told(gpus: int) -> None:
    made = config(2, nnodes=2, distributed_executor_backend="ray")  # it isn't asked either
    shared.install(made, lambda: gpus)
    assert [made().get_local_gpu_index(rank) for rank in range(2)] == [0, 1]
    assert not {HOST, *shared.NCCL} & set(os.environ)
    assert "share_gpu" not in tally.TALLY.snapshot()


def test_ranks_of_data_parallel_groups_count() -> None:
    made = config(1, data_parallel_size_local=2)
    shared.install(made, lambda: 1)
    seen = [(made().get_local_gpu_index(0, dp), os.environ[HOST]) for dp in range(2)]
    assert [place for place, _ in seen] == [0, 0]
    assert seen[0][1] != seen[1][1]
    assert tally.TALLY.snapshot()["share_gpu"] == {"ranks": 2, "gpus": 1}


def test_the_callers_nccl_wins_but_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv(HOST, "mine")  # one for all ranks: NCCL would refuse them
    made = config()
    shared.install(made, lambda: 1)
    made().get_local_gpu_index(1)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
    assert os.environ["NCCL_IB_DISABLE"] == "1"
    assert os.environ[HOST] == "bytegate-rank-1"


def test_twice_installed_is_once() -> None:
    made = config(4)
    assert shared.install(made, lambda: 2) == ["share_gpu"]
    once = made.get_local_gpu_index
    assert shared.install(made, lambda: 2) == []
    assert made.get_local_gpu_index is once


@pytest.mark.parametrize(
    ("facts", "gpus", "says"),
    [
        ({}, 0, "there is none"),
        ({"nnodes": 2}, 1, "2 nodes, backend mp; expected one node, backend mp"),
        ({"distributed_executor_backend": "ray"}, 1, "1 nodes, backend ray; expected one node"),
    ],
)
def test_ranks_that_can_not_share_stop_the_server(
    facts: dict[str, Any], gpus: int, says: str
) -> None:
    made = config(**facts)
    shared.install(made, lambda: gpus)
    with pytest.raises(RouteError, match=rf"\Aranks can't share a GPU: {says}[^\n]*\Z"):
        made().get_local_gpu_index(0)
    assert HOST not in os.environ


def test_a_vllm_that_places_ranks_in_another_way_stops_the_server() -> None:
    with pytest.raises(RouteError, match="this vLLM has no get_local_gpu_index"):
        shared.install(type("Config", (), {}), lambda: 1)


@pytest.mark.parametrize(("value", "asked"), [("1", True), ("0", False), ("", False)])
def test_the_variable_asks_for_it(
    value: str,
    asked: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings.read({NAME: value})
    assert settings.share_gpu == asked
    calls: list[str] = []
    monkeypatch.setattr(shared, "install", lambda: calls.append("shared") or ["share_gpu"])
    pytest.importorskip("torch")
    monkeypatch.setattr("kvroute.switch.install", lambda _: None)
    assert ("share_gpu" in plugin.apply(settings)) == bool(calls) == asked
    with pytest.raises(RouteError, match=r"\ABYTEGATE_SHARE_GPU='yes': expected 0 or 1\Z"):
        Settings.read({NAME: "yes"})


# -- what a server is started with ----------------------------------------------------


@pytest.fixture
def _plugin_there(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = type("Entry", (), {"name": "bytegate"})()
    monkeypatch.setattr(serve.importlib.metadata, "entry_points", lambda **_: [entry])


@pytest.fixture
def planned(_plugin_there: None) -> Callable[..., serve.Launch]:
    def make(environ: dict[str, str] | None = None, **facts: Any) -> serve.Launch:
        return plan(ServeOptions(model="somewhere", **facts), environ or {}, "cuda")

    return make


def test_a_server_gets_what_it_takes(planned: Callable[..., serve.Launch]) -> None:
    launch = planned({"VLLM_ALLREDUCE_USE_SYMM_MEM": "1"}, share_gpu=True)
    assert launch.environment[NAME] == "1"
    assert {launch.environment[name] for name in shared.ENVIRONMENT} == {"0"}
    words = " ".join(launch.command)
    assert "--disable-custom-all-reduce --distributed-executor-backend mp" in words
    assert HOST not in launch.environment  # each rank's own


def test_arguments_that_are_given_win(planned: Callable[..., serve.Launch]) -> None:
    extra = ("--distributed-executor-backend=ray", "--disable-custom-all-reduce")
    words = planned(share_gpu=True, extra=extra).command
    assert "--distributed-executor-backend" not in words
    assert words.count("--disable-custom-all-reduce") == 1


def test_a_server_without_it_gets_none_of_it_whatever_the_caller_has(
    planned: Callable[..., serve.Launch],
) -> None:
    mine = {NAME: "1", "NCCL_SOCKET_IFNAME": "eth7", "VLLM_USE_DIRECT_DCP_A2A": "1"}
    launch = planned(mine)
    assert NAME not in launch.environment
    assert launch.environment["NCCL_SOCKET_IFNAME"] == "eth7"
    assert launch.environment["VLLM_USE_DIRECT_DCP_A2A"] == "1"
    mentioned = set(shared.ENVIRONMENT) - {"VLLM_USE_DIRECT_DCP_A2A", *serve.GPU_ENVIRONMENT}
    assert not mentioned & set(launch.environment)
    assert not set(shared.ARGUMENTS) & set(launch.command)


def test_the_command_line_asks_for_it() -> None:
    assert parse(["--share-gpu"]).share_gpu
    assert not parse([]).share_gpu


def test_on_a_cpu_it_is_one_line_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(serve, "detect_device", lambda: "cpu")
    monkeypatch.setattr(serve, "ServerProcess", lambda *a: started.append(a))
    assert serve.main(["--share-gpu"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "bytegate: --share-gpu: there is no GPU here; ranks on a CPU need nothing of it\n"
    )
    assert started == []
