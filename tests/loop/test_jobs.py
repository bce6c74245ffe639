"""The faults side by side: the same evidence as one by one, and what a kill leaves."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("torch")

from equiv import evidence
from equiv.loop import faults, kept
from equiv.loop.children import in_child, side_by_side

ONLY = ("L07", "L01")


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "TWIN_CASES", 4)
    monkeypatch.setattr(faults, "DRAWS", 10)  # else a lane may end by its time, at another case
    monkeypatch.setattr(faults.harmless, "CHANGES", {})


def made(folder: Path, **asked: Any) -> Any:
    request = faults.LoopFaultsRequest(
        only=ONLY, profile="dev", out=folder, clean_cases=3, device="cpu"
    )
    return faults.run_faults(dataclasses.replace(request, **asked))


def plain(run: Any) -> dict[str, Any]:
    """Evidence without what time it took, and when."""
    found = dataclasses.asdict(run)
    for name in ("seconds", "started", "environment", "validated", "content_sha256"):
        found.pop(name)
    for row in found["faults"]:
        row.pop("seconds")
    return found


def test_two_jobs_give_the_evidence_of_one_and_go_on_from_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(tmp_path / "one")
    said: list[tuple[str, int, int]] = []
    request = faults.LoopFaultsRequest(
        only=ONLY, profile="dev", out=tmp_path / "two", clean_cases=3, device="cpu", jobs=2
    )
    two = faults.run_faults(request, lambda name, _, done, total: said.append((name, done, total)))
    assert plain(two) == plain(one)
    assert [row.id for row in two.faults] == list(ONLY)
    assert all(row.outcome == "caught" for row in two.faults)
    assert two.false_alarms["cases"] > 0
    assert {name for name, _, _ in said} == {*ONLY, kept.ALARMS}
    assert said[0] == (kept.ALARMS, 0, 3)
    assert said[-1][1:] == (3, 3)
    assert not (tmp_path / "two" / "faults.partial.json").exists()

    def forbidden(number: str, *_: Any) -> Any:
        assert number == "L01", "it was done before"
        return row

    row = one.faults[-1]
    folder = tmp_path / "three"
    monkeypatch.setattr(kept.Kept, "forget", lambda _: None)
    made(folder, only=ONLY[:1])
    monkeypatch.setattr(faults, "fault_row", forbidden)
    three = made(folder)
    assert three.resumed == ["L07", kept.ALARMS]
    assert plain(dataclasses.replace(three, resumed=[])) == plain(one)
    assert evidence.read(folder / "faults.json", evidence.FaultsEvidence).resumed == three.resumed


def test_what_was_made_of_other_things_is_not_used_again(tmp_path: Path) -> None:
    row = evidence.FaultRow("L07", "", "caught", "edges", 1, "", "plan", "", "clean", 0.1, "a:b")
    kept.Kept(tmp_path, {"seed": 1}).add("L07", row)
    assert kept.Kept(tmp_path, {"seed": 1}).row("L07") == row
    assert "L07" not in kept.Kept(tmp_path, {"seed": 2})
    path = tmp_path / "faults.partial.json"
    path.write_text(path.read_text(encoding="utf-8").replace("caught", "missed"), encoding="utf-8")
    assert "L07" not in kept.Kept(tmp_path, {"seed": 1}), "its digest doesn't hold"
    path.write_text("no JSON", encoding="utf-8")
    assert "L07" not in kept.Kept(tmp_path, {"seed": 1})


SLOW = """
import sys, time
from pathlib import Path
from equiv.loop import faults
from equiv import evidence
def row(number, title, options):
    if number != "L01":
        time.sleep(1000)
    return evidence.FaultRow(number, title, "caught", "edges", 1, "", "plan", "", "clean", 0.1, "")
faults.fault_row = row
request = faults.LoopFaultsRequest(
    only=("L01", "L02"), profile="dev", out=Path(sys.argv[1]), clean_cases=0, device="cpu", jobs=2
)
faults.run_faults(request)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_kill_keeps_the_rows_that_are_done(number: signal.Signals, tmp_path: Path) -> None:
    path = os.pathsep.join(entry or "." for entry in sys.path)
    running = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(tmp_path)], env={**os.environ, "PYTHONPATH": path}
    )
    partial = tmp_path / "faults.partial.json"
    until = time.monotonic() + 300
    while not partial.exists() and running.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    children = _children(running.pid)
    running.send_signal(number)
    running.wait(60)
    try:
        assert list(json.loads(partial.read_text(encoding="utf-8"))["done"]) == ["L01"]
        if number == signal.SIGTERM:
            assert not any(_alive(child) for child in children), "its jobs end with it"
    finally:
        for child in children:
            if _alive(child):
                os.kill(child, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(x) for x in found.read_text(encoding="utf-8").split()] if found.exists() else []


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_job_that_fails_or_dies_ends_the_others_and_what_they_started(tmp_path: Path) -> None:
    def fails() -> None:
        _until((tmp_path / "pid").exists)
        raise ValueError("no")

    def dies() -> None:
        _until((tmp_path / "pid").exists)
        os.kill(os.getpid(), signal.SIGKILL)

    def grandchild() -> dict[str, Any]:
        (tmp_path / "part").write_text(str(os.getpid()), encoding="utf-8")
        (tmp_path / "part").rename(tmp_path / "pid")
        time.sleep(1000)
        return {}

    for bad, says in ((fails, "bad: ValueError: no"), (dies, "bad: the process died")):
        (tmp_path / "pid").unlink(missing_ok=True)
        jobs = {"long": lambda: in_child(grandchild), "bad": bad, "never": grandchild}
        with pytest.raises(RuntimeError, match=says):
            side_by_side(jobs, 2, begun=lambda _: None, done=lambda *_: None)
        left = int((tmp_path / "pid").read_text(encoding="utf-8"))
        _until(lambda pid=left: not _alive(pid))


def _until(holds: Any) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_jobs_run_side_by_side_and_no_more_than_asked_for(tmp_path: Path) -> None:
    def job(name: str) -> int:
        mine = tmp_path / name
        mine.touch()
        count = len(list(tmp_path.iterdir()))
        time.sleep(0.3)
        mine.unlink()
        return count

    found: dict[str, int] = {}
    jobs = {str(i): (lambda i=i: job(str(i))) for i in range(6)}
    side_by_side(jobs, 3, begun=lambda _: None, done=found.__setitem__)
    assert found.keys() == jobs.keys()
    assert max(found.values()) in {2, 3}
