"""Device timing: its arithmetic anywhere, and on a GPU that what it says is so."""

from __future__ import annotations

import pytest
import torch

from equiv.errors import ExitCode, NotCovered, UsageError
from equiv.perf.timing import (
    MOST_SETS,
    MOVED_BYTES,
    Arm,
    Timing,
    copy_arm,
    input_sets,
    measure,
    require_cuda,
    speedup,
    spread,
)

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_spread_is_the_median_and_both_ends() -> None:
    found = spread([3.0, 1.0, 2.0, 9.0])
    assert (found.median, found.least, found.most) == (2.5, 1.0, 9.0)


def test_a_speedup_is_formed_run_by_run() -> None:
    # Both arms of the second run were slowed down alike: the ratio doesn't show it.
    found = speedup(Timing("ours", (1.0, 5.0)), Timing("theirs", (2.0, 10.0)))
    assert (found.median, found.least, found.most) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("moved", "sets"),
    [(1, MOST_SETS), (MOVED_BYTES // 4, 4), (MOVED_BYTES // 4 + 1, 4), (8 << 30, 2)],
)
def test_sets_fill_a_replay(moved: int, sets: int) -> None:
    assert input_sets(moved) == sets


def test_without_a_gpu_nothing_is_covered() -> None:
    with pytest.raises(NotCovered, match="device time needs a GPU") as caught:
        require_cuda("cpu")
    assert caught.value.exit_code == ExitCode.INVALID


def test_no_device_is_bad_usage() -> None:
    with pytest.raises(UsageError, match="expected cuda or cuda:N"):
        require_cuda("toaster")


@pytest.mark.parametrize("arms", [[], [Arm("a", int), Arm("a", int)]])
def test_arms_have_names_of_their_own(arms: list[Arm]) -> None:
    with pytest.raises(ValueError, match="different names"):
        measure(arms, 1, torch.device("cpu"))


@pytest.mark.gpu
@on_gpu
def test_twice_the_work_takes_twice_the_time() -> None:
    device = require_cuda("cuda")
    moved = 1 << 28
    sets = input_sets(moved)
    once = copy_arm(moved, sets, device)
    again = copy_arm(moved, sets, device)
    twice = Arm("twice", lambda i: (once.work(i), again.work(i)))
    timings = measure([once, twice], sets, device)
    assert len(timings["copy"].runs_s) == 5
    assert 1.8 < speedup(timings["copy"], timings["twice"]).median < 2.2
    for written in timings["twice"].outputs:
        assert all(torch.any(part).item() for part in written)
