"""Runs that are stopped or killed: what they leave, and that it is never a PASS."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from equiv import evidence, faults, partial, pool
from equiv.campaign import ledger_use, run_candidate
from equiv.errors import WorkerError
from equiv.evidence import Candidate, EquivEvidence
from equiv.lane_run import Options
from equiv.lanes import Target
from equiv.ledger import Seen, load
from equiv.pace import EACH, SECONDS, Pace
from equiv.pairs import OpPair
from equiv.pool import Worker
from equiv.profiles import PROFILES
from equiv.run import Request
from equiv.run import run as run_equiv
from equiv.stopping import Stop, Stopped, as_interrupt
from equiv.worker import spec_of

ROOT = Path(__file__).parents[2]
SLOW = Path(__file__).with_name("slow_kernels.py")
LANES = ("sizes", "alignment")
IN_THE_SECOND = 60
"""A call of the second lane: the first one has 32, with those of the proof."""
IN_THE_FIRST = 20
LIMIT_S = 60.0

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Start `python -m equiv` on slow kernels, each in a process group of its own."""
    started: list[subprocess.Popen[str]] = []

    def go(*names: str, slow_from: int = 1_000_000) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "equiv", "--device", "cpu", "--profile", "dev"]
        words += [w for name in names or ("slow",) for w in ("--candidate", f"{SLOW}:{name}")]
        words += [w for lane in LANES for w in ("--lane", lane)]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        environment = {**os.environ, "PYTHONPATH": paths, "SLOW_FROM": str(slow_from)}
        started.append(
            subprocess.Popen(
                words,
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield go
    for one in started:
        one.kill()
        one.communicate()


def wait(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + LIMIT_S
    while not (found := what()):
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)
    return found


def slow_worker(folder: Path) -> int:
    """Wait until a worker is in a slow call; its process."""
    mark = folder / "slow"
    return int(wait(lambda: mark.is_file() and mark.read_text(encoding="ascii").strip()))


def alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def left(folder: Path) -> EquivEvidence:
    out = folder / "out" / "equiv"
    assert sorted(p.name for p in out.iterdir()) == ["equiv.json", "equiv.xml"]
    made: EquivEvidence = evidence.read(out / "equiv.json")
    return made


def group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def lanes_of(made: Candidate) -> list[tuple[str, str]]:
    return [(x.lane, x.state) for x in made.lanes]


@pytest.mark.parametrize("how", ["TERM", "INT to the group", "TERM to the group"])
def test_a_run_that_is_stopped_leaves_what_ran(start: Start, folder: Path, how: str) -> None:
    run = start(slow_from=IN_THE_SECOND)
    worker = slow_worker(folder)
    name = f"SIG{how.partition(' ')[0]}"
    number = signal.Signals[name]
    stopped = time.monotonic()
    (os.killpg if "group" in how else os.kill)(run.pid, number)
    said, error = run.communicate(timeout=LIMIT_S)
    assert time.monotonic() - stopped < 20
    made = left(folder)
    assert (run.returncode, made.verdict, made.exit_code) == (4, "NOT COVERED", 4)
    (one,) = made.candidates
    assert lanes_of(one) == [("sizes", "passed"), ("alignment", "not covered")]
    under_way = one.lanes[1]
    assert 0 < under_way.cases < 100
    assert under_way.missing[0] == f"stopped by {name} after {under_way.cases} of 564 cases"
    assert (one.crashes, one.hangs) == (0, 0)
    assert any(under_way.missing[0] in line for line in made.not_covered)
    assert "NOT COVERED  exit code 4" in said
    where = Path("out") / "equiv" / "equiv.json"
    assert error.splitlines()[-1] == (
        f"bytegate: stopped by {name}; what ran until then is in {where}"
    )
    wait(lambda: not alive(worker))


def test_a_second_signal_changes_nothing(start: Start, folder: Path) -> None:
    run = start(slow_from=IN_THE_SECOND)
    slow_worker(folder)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        run.send_signal(number)
        time.sleep(0.1)
    run.communicate(timeout=LIMIT_S)
    made = left(folder)
    assert (run.returncode, made.verdict) == (4, "NOT COVERED")
    assert made.candidates[0].lanes[1].missing[0].startswith("stopped by SIGTERM after ")


def test_a_run_that_is_killed_leaves_its_finished_lanes(start: Start, folder: Path) -> None:
    run = start(slow_from=IN_THE_SECOND)
    worker = slow_worker(folder)
    run.kill()
    run.communicate()
    made = left(folder)
    assert (made.verdict, made.exit_code) == ("NOT COVERED", 4)
    assert lanes_of(made.candidates[0]) == [("sizes", "passed"), ("alignment", "not covered")]
    assert made.candidates[0].lanes[1].missing == [partial.UNFINISHED]
    assert made.environment["versions"]
    wait(lambda: not alive(worker))


def test_a_killed_run_takes_an_earlier_pass_with_it(start: Start, folder: Path) -> None:
    run = start()
    run.communicate(timeout=LIMIT_S)
    assert (run.returncode, left(folder).verdict) == (0, "PASS")
    assert 'errors="0"' in (folder / "out" / "equiv" / "equiv.xml").read_text(encoding="utf-8")
    run = start(slow_from=IN_THE_FIRST)
    slow_worker(folder)
    run.kill()
    run.communicate()
    made = left(folder)
    assert made.verdict == "NOT COVERED"
    assert [x for _, x in lanes_of(made.candidates[0])] == ["not covered"] * 2
    assert 'errors="2"' in (folder / "out" / "equiv" / "equiv.xml").read_text(encoding="utf-8")


@pytest.mark.parametrize("names", [("slow",), ("slow", "slow_and_wrong")])
def test_so_does_one_that_is_killed_while_it_loads(
    start: Start, folder: Path, names: tuple[str, ...]
) -> None:
    out = folder / "out" / "equiv"
    out.mkdir(parents=True)
    for name in ("equiv.json", "equiv.xml"):
        (out / name).write_text("an earlier PASS", encoding="utf-8")
    run = start(*names, slow_from=0)
    worker = slow_worker(folder)
    run.kill()
    run.communicate()
    made = left(folder)
    assert (made.verdict, len(made.candidates)) == ("NOT COVERED", len(names))
    assert "errors" in (out / "equiv.xml").read_text(encoding="utf-8")
    wait(lambda: not alive(worker))


def test_no_earlier_pass_stays_where_nothing_can_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "equiv.json").write_text("an earlier PASS", encoding="utf-8")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evidence, "write", full)
    request = Request(candidates=(f"{SLOW}:slow",), lanes=LANES, device="cpu", out=folder)
    with pytest.raises(OSError, match="No space"):
        run_equiv(request)
    assert not (folder / "equiv.json").exists()


def test_a_worker_that_holds_the_interpreter_s_lock_ends_with_its_command(
    start: Start, folder: Path
) -> None:
    run = start("slow_with_the_lock", slow_from=IN_THE_FIRST)
    worker = slow_worker(folder)
    run.kill()
    run.communicate()
    wait(lambda: not alive(worker))


def test_a_worker_that_is_ended_beside_its_command_in_a_proof_fails_nothing(
    start: Start, folder: Path
) -> None:
    run = start(slow_from=1)
    os.kill(slow_worker(folder), signal.SIGTERM)
    time.sleep(0.02)
    run.terminate()
    _, error = run.communicate(timeout=LIMIT_S)
    made = left(folder)
    assert (run.returncode, made.verdict) == (4, "NOT COVERED"), error
    assert "stopped by SIGTERM" in error


def test_the_fork_server_is_not_in_its_command_s_group(start: Start, folder: Path) -> None:
    run = start(slow_from=IN_THE_FIRST)
    slow_worker(folder)
    beside = [
        words
        for p in psutil.process_iter(["pid"])
        if p.pid != run.pid and group_of(p.pid) == run.pid and (words := " ".join(p.cmdline()))
    ]
    assert not any("forkserver" in words for words in beside)
    assert any("forkserver" in " ".join(p.cmdline()) for p in psutil.Process(run.pid).children())


def test_a_start_that_fails_with_the_run_s_end_is_that_end(
    pair: OpPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> None:
        raise EOFError

    monkeypatch.setattr(pool.multiprocessing.get_context("forkserver").Process, "start", fails)
    stop = Stop()
    worker = Worker(pair, spec_of(pair, "stock", "cpu"), stop)
    with pytest.raises(WorkerError, match="no worker can be started: EOFError"):
        worker.start()
    threading.Timer(0.02, stop.set).start()
    with pytest.raises(Stopped):
        worker.start()
    worker.close()


def test_a_finding_before_the_end_decides(start: Start, folder: Path) -> None:
    run = start("slow_and_wrong", slow_from=IN_THE_FIRST)  # while the first finding is shrunk
    slow_worker(folder)
    run.terminate()
    run.communicate(timeout=LIMIT_S)
    made = left(folder)
    assert (run.returncode, made.verdict, made.exit_code) == (1, "FAIL", 1)
    (one,) = made.candidates
    assert lanes_of(one) == [("sizes", "failed"), ("alignment", "not covered")]
    (finding,) = one.lanes[0].findings
    assert (finding.kind, finding.not_shrunk) == ("divergence", "stopped by SIGTERM")
    assert one.lanes[0].missing[0].startswith("stopped by SIGTERM after ")
    assert one.lanes[1].missing == ["not begun: stopped by SIGTERM"]


def test_candidates_side_by_side_are_all_stopped(start: Start, folder: Path) -> None:
    run = start("slow", "slow_and_wrong", slow_from=IN_THE_FIRST)
    slow_worker(folder)
    run.terminate()
    run.communicate(timeout=LIMIT_S)
    made = left(folder)
    names = [c.name.partition(":")[2] for c in made.candidates]
    assert names == ["slow", "slow_and_wrong"]
    assert all(x.missing for c in made.candidates for x in c.lanes)
    assert made.candidates[0].state == "not covered"


def test_what_can_t_be_used_leaves_an_earlier_run_alone(folder: Path) -> None:
    out = folder / "out" / "equiv"
    out.mkdir(parents=True)
    (out / "equiv.json").write_text("earlier", encoding="utf-8")
    (folder / "broken.py").write_text("def kernel(:\n", encoding="utf-8")
    words = [sys.executable, "-m", "equiv", "--device", "cpu", "--candidate", "broken.py:kernel"]
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 2
    assert (out / "equiv.json").read_text(encoding="utf-8") == "earlier"


STARTS = """
import os, subprocess, sys
from equiv import apart
own = apart.with_command() if sys.argv[1] == "tied" else {}
code = "from equiv.apart import tie; tie(); import os, sys, time; "
code += "open('slow', 'w').write(str(os.getpid()) + chr(10)); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **own}, process_group=0).wait()
"""


@pytest.mark.parametrize("how", ["tied", "free"])
@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with its parent")
def test_a_process_that_is_tied_to_its_command_ends_with_it(folder: Path, how: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, "-c", STARTS, how], cwd=folder, env=environment)
    other = slow_worker(folder)
    run.kill()
    run.wait()
    if how == "tied":
        wait(lambda: not alive(other))
    else:
        time.sleep(0.3)
        assert alive(other)
        os.kill(other, signal.SIGKILL)


# -- in this process ----------------------------------------------------------------


@pytest.fixture
def options(pair: OpPair, folder: Path) -> Options:
    del folder
    profile = replace(PROFILES["dev"], draws={"modes": 40}, max_rows=200, drawn_rows=200)
    return Options(pair, Target("cpu"), profile, 0, ("modes", "alignment"), shrink=False)


def test_what_there_is_is_kept_as_lanes_end_and_find(
    options: Options, bad: Callable[[str], str]
) -> None:
    kept: list[Candidate] = []
    made, _ = run_candidate(bad("divergence"), options, keep=lambda c, _: kept.append(c))
    assert lanes_of(made) == [("modes", "failed"), ("alignment", "failed")]
    assert [x for _, x in lanes_of(kept[0])] == ["not covered", "not covered"]
    assert kept[0].state == "not covered"
    found = next(c for c in kept if c.state == "failed")
    assert lanes_of(found) == [("modes", "failed"), ("alignment", "not covered")]
    assert partial.UNFINISHED in found.lanes[0].missing
    assert kept[-1] == made
    assert all(c.state != "passed" for c in kept[:-1])


@pytest.mark.parametrize("cases", [16, 32])
def test_draws_that_are_stopped_count_as_far_as_they_went(
    cases: int, options: Options, bad: Callable[[str], str]
) -> None:
    def progress(_candidate: str, lane: str, done: int, _total: int) -> None:
        if lane == "modes" and done >= cases:
            options.stop.set()

    made, _ = run_candidate(bad("clean"), options, progress)
    first, second = made.lanes
    assert (first.cases, first.drawn, first.state) == (cases, cases - 16, "not covered")
    assert first.missing == [f"stopped, as another campaign was after {cases} of 56 cases"]
    assert (second.cases, second.state) == (0, "not covered")
    assert made.state == "not covered"


def test_a_candidate_that_was_never_begun_is_not_covered(
    options: Options, bad: Callable[[str], str]
) -> None:
    options.stop.set()
    made, _ = run_candidate(bad("clean"), options)
    assert lanes_of(made) == [("modes", "not covered"), ("alignment", "not covered")]
    assert "not begun" in made.reason


def test_faults_that_are_stopped_are_not_covered_nor_missed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Stop()
    out = folder / "out"
    out.mkdir()
    (out / "faults.json").write_text("an earlier PASS", encoding="utf-8")
    begun: list[evidence.FaultsEvidence] = []

    def stopped(*args: Any) -> Any:
        begun.append(evidence.read(out / "faults.json", evidence.FaultsEvidence))
        stop.set()
        return run_candidate(*args)

    monkeypatch.setattr(faults.campaign, "run_candidate", stopped)
    request = faults.FaultsRequest(only=("K01", "K02"), device="cpu", out=out, clean_cases=0)
    made = faults.run_faults(request, stop=stop)
    assert begun[0].verdict == "NOT COVERED"
    assert [r.detail for r in begun[0].faults] == [partial.UNFINISHED] * 2
    assert (made.verdict, made.exit_code) == ("NOT COVERED", 4)
    assert [r.outcome for r in made.faults] == ["not_covered"] * 2
    assert evidence.read(out / "faults.json", evidence.FaultsEvidence).verdict == "NOT COVERED"


def test_nothing_is_gone_of_a_run_that_was_stopped() -> None:
    entry = next(e for e in load() if e.kind == "bytes")
    seen = Seen(eligible_cases=100)
    assert ledger_use(entry, seen, patterns_ran=True).state == "gone"
    assert ledger_use(entry, seen, patterns_ran=True, whole=False).state == "not exercised"


def test_a_signal_stops_by_its_name_and_what_is_ignored_stays_so() -> None:
    stop = Stop()
    before = signal.getsignal(signal.SIGTERM)
    hup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop.on(signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_set()
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, hup)
    assert signal.getsignal(signal.SIGTERM) is before
    assert (stop.signal, stop.reason) == ("SIGTERM", "stopped by SIGTERM")


def test_a_signal_that_is_ignored_interrupts_nothing() -> None:
    hup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with as_interrupt(signal.SIGTERM, signal.SIGHUP) as came:
            signal.raise_signal(signal.SIGHUP)
            assert not came.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"), as_interrupt(signal.SIGTERM):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, hup)


def test_progress_is_due_each_so_many_cases_and_after_some_seconds() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert [n for n in range(1, 41) if pace.due(n, 40)] == [EACH, 2 * EACH, 40]
    now[0] += SECONDS / 2
    assert not pace.due(41, 100)
    now[0] += SECONDS / 2
    assert pace.due(42, 100)
    assert not pace.due(43, 100)
