"""Whether the collective of a sharded decode step runs: told where known, and never an error."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvroute import extension, tally
from kvroute.pynccl import pynccl

CUDA, CPU = SimpleNamespace(type="cuda"), SimpleNamespace(type="cpu")
ON, OFF = SimpleNamespace(disabled=False), SimpleNamespace(disabled=True)


def state(communicator: Any, world: int = 2) -> Any:
    """Stand in for ``vllm.distributed.parallel_state``."""
    group = SimpleNamespace(world_size=world, device_communicator=communicator)
    return SimpleNamespace(get_dcp_group=lambda: group)


def of(mine: Any, device: Any = CUDA) -> Any:
    return SimpleNamespace(pynccl_comm=mine, device=device)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (state(of(ON)), True),
        (state(of(OFF)), False),
        (state(of(None)), False),
        (state(of(OFF), world=1), None),
        (state(of(OFF, CPU)), None),
        (state(SimpleNamespace(device=CPU)), None),
        (state(None), None),
        (state(of(SimpleNamespace())), None),
        (state(SimpleNamespace(pynccl_comm=OFF)), None),
        (SimpleNamespace(), None),
        (SimpleNamespace(get_dcp_group=lambda: None), None),
    ],
)
def test_what_a_communicator_tells(made: Any, told: bool | None) -> None:  # noqa: FBT001
    assert pynccl(made) is told


def test_no_group_is_not_known() -> None:
    def unready() -> None:
        raise AssertionError("decode context model parallel group is not initialized")

    assert pynccl(SimpleNamespace(get_dcp_group=unready)) is None


def test_a_rank_that_is_asked_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "TALLY", tally.Tally())
    for mine, told in ((OFF, False), (ON, True)):
        monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state(of(mine)))
        assert extension.RouteExtension().bytegate_route()["pynccl"] is told
