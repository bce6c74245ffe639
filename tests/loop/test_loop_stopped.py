"""A loop run that is stopped or killed: what it leaves, and that it is never a PASS."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from equiv import evidence, stopping
from equiv.evidence import LoopEvidence
from equiv.loop import api, isolate
from equiv.partial import UNFINISHED
from equiv.stopping import Stop, Stopped

pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_loop_that_is_ended_leaves_its_finished_lanes(tmp_path: Path, how: str) -> None:
    file = tmp_path / "out" / "loop" / "loop.json"
    file.parent.mkdir(parents=True)
    file.write_text("an earlier PASS", encoding="utf-8")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    words = ["--device", "cpu", "--profile", "gate", "--lane", "strides", "--lane", "ragged"]
    run = subprocess.Popen(
        [sys.executable, "-m", "equiv.loop", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + LIMIT_S
        while '"passed"' not in file.read_text(encoding="utf-8"):
            assert run.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        run.terminate() if how == "SIGTERM" else run.kill()
        error = run.communicate(timeout=LIMIT_S)[1]
    finally:
        run.kill()
        run.wait()
    made: LoopEvidence = evidence.read(file, LoopEvidence)
    assert (made.verdict, made.exit_code) == ("NOT COVERED", 4)
    why = "stopped by SIGTERM" if how == "SIGTERM" else UNFINISHED
    states = [(x.lane, x.state, x.missing) for x in made.lanes]
    assert states == [("strides", "passed", []), ("ragged", "not covered", [why])]
    if how == "SIGTERM":
        assert run.returncode == 4
        assert error.splitlines()[-1].startswith("bytegate: stopped by SIGTERM; what ran until ")


FORKS = {"signal": False}
"""Whether the next fork meets a signal: what is registered at forks stays so."""


def _signal_at_a_fork() -> None:
    if FORKS["signal"]:
        FORKS["signal"] = False
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_at_a_fork_is_not_lost(tmp_path: Path) -> None:
    # What a handler raises there is printed and forgotten by Python.
    os.register_at_fork(before=_signal_at_a_fork)
    FORKS["signal"] = True
    stop = Stop()
    request = api.LoopRequest(lanes=("strides",), out=tmp_path, device="cpu", profile="dev")
    made = api.run_loop(request, stop=stop)
    assert not FORKS["signal"]
    assert (made.verdict, stop.signal) == ("NOT COVERED", "SIGTERM")
    assert [x.missing for x in made.lanes] == [["stopped by SIGTERM"]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dropped_interrupt_is_noted() -> None:
    class Dropping:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    with stopping.as_interrupt(signal.SIGTERM) as came:
        Dropping()
        assert (came.is_set(), came.signal) == (True, "SIGTERM")


def test_a_process_that_ends_with_its_run_is_no_crash() -> None:
    stop = Stop()
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    isolate.told(-signal.SIGSEGV, stop)  # nobody sends that to end a run
    with pytest.raises(Stopped):
        isolate.told(-signal.SIGTERM, stop)
    timer.join()
    with pytest.raises(Stopped):
        isolate.told(-signal.SIGSEGV, stop)
    isolate.told(-signal.SIGTERM, Stop())  # somebody ended the process alone


def _dies(*_: object) -> None:
    os._exit(7)


def test_a_lane_that_ended_with_its_process_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "loop.json"
    before: list[LoopEvidence] = []

    def stopped(*_: object) -> None:
        before.append(evidence.read(file, LoopEvidence))  # what a kill would leave here
        raise Stopped("stopped")

    monkeypatch.setattr(api, "load_pack", lambda *_: (_dies, True))
    monkeypatch.setattr(api, "confirm", stopped)
    made = api.run_loop(
        api.LoopRequest(lanes=("strides",), out=tmp_path, device="cpu", profile="dev")
    )
    for one in (*before, made):
        assert (one.verdict, one.exit_code) == ("FAIL", 1)
        assert [x.kind for lane in one.lanes for x in lane.findings] == ["crash"]
    assert len(before) == 1
