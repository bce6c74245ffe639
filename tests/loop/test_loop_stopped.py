"""A loop run that is stopped or killed: what it leaves, and that it is never a PASS."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from equiv import evidence
from equiv.evidence import LoopEvidence
from equiv.partial import UNFINISHED

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
