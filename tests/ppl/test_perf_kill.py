"""``bytegate perf`` that is killed at any moment: no launch lost, none measured twice, no leak."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from equiv import evidence, seal, stopping
from equiv.gate.collect import collect
from equiv.perf.record import PerfEvidence, drift
from kvroute import serve
from ppl import serving_server

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ORDER = ["stock", "fused", "fused", "stock"]
FILES = [f"launch-{n}-{arm}.json" for n, arm in enumerate(ORDER, 1)]
WORDS = ("--part", "serving", "--device", "cpu", "--requests", "4", "--repeats", "2")
pytestmark = pytest.mark.timeout(300)


class Folder:
    """A folder of results, with the commands that fill it."""

    def __init__(self, place: Path) -> None:
        self.out = place / "out"
        self.serving = self.out / "serving"
        self._pids = place / "pids"

    def start(self, *words: str, **fake: Any) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / "perf_fakes.py"), *WORDS, "--out", str(self.out)]
        return subprocess.Popen(
            [*command, *words],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"))),
                "FAKE": json.dumps({"pids": str(self._pids), **fake}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, *words: str, code: int = 0, **fake: Any) -> str:
        """Run to the end, and return what was said on standard error."""
        with self.start(*words, **fake) as run:
            said, err = run.communicate(timeout=120)
        assert run.returncode == code, said + err
        return err

    def read(self) -> PerfEvidence:
        found: PerfEvidence = evidence.read(self.out / "perf.json", PerfEvidence)
        return found

    def stored(self) -> list[str]:
        return [name for name in FILES if (self.serving / name).exists()]

    def started(self, name: str) -> list[str]:
        """Return the processes that were started, by the beginning of their names."""
        if not self._pids.exists():
            return []
        lines = [line.split()[0] for line in self._pids.read_text("utf-8").splitlines()]
        return [line for line in lines if line.startswith(name)]

    def alive(self, tries: int = 100) -> list[str]:
        """Return the processes that are left, at once or after a moment."""
        for _ in range(tries + 1):
            found = []
            for line in self._pids.read_text("utf-8").splitlines():
                try:
                    if psutil.Process(int(line.split()[1])).status() != psutil.STATUS_ZOMBIE:
                        found.append(line)
                except psutil.NoSuchProcess:
                    continue
            if not found:
                return []
            time.sleep(0.05)
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return a folder that a command has filled, to copy from."""
    made = Folder(tmp_path_factory.mktemp("whole"))
    made.finish()
    return made


@pytest.fixture
def filled(folder: Folder, whole: Folder) -> Folder:
    """Return a folder with every launch in it, and nothing started."""
    shutil.copytree(whole.out, folder.out)
    return folder


def until(there: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not there():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_one_that_is_never_killed(folder: Folder) -> None:
    folder.finish()
    made = folder.read().serving
    assert made is not None
    assert folder.started("server") == [f"server-{arm}" for arm in ORDER]
    assert folder.stored() == FILES
    assert (made.sessions, drift(made), len(made.launched)) == ([1, 1, 1, 1], "", 4)
    assert folder.alive() == []
    assert "WARNING" not in (folder.out / "perf.md").read_text("utf-8")
    # Complete: no server is started, and the same comes out.
    said = folder.finish()
    assert "4 of 4 launches are stored" in said
    assert len(folder.started("server")) == 4
    assert folder.read().serving == made


@pytest.mark.parametrize(
    ("after", "number"),
    [
        pytest.param(after, number, marks=() if after == usual else pytest.mark.nightly)
        for usual, number in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGINT), 1)
        for after in (1, 2, 3)
    ],
)
def test_it_goes_on_after_any_launch(folder: Folder, after: int, number: signal.Signals) -> None:
    with folder.start(client_s=0.5) as run:
        until(lambda: len(folder.started("client")) > after)  # half of the next is measured
        run.send_signal(number)
        _, said = run.communicate(timeout=60)
    assert folder.stored() == FILES[:after]
    kept = [(folder.serving / name).read_bytes() for name in FILES[:after]]
    if number == signal.SIGKILL:
        assert run.returncode == -9
    else:
        assert run.returncode == 130
        line = f"bytegate: interrupted: {after} of 4 launches are stored in {folder.serving}"
        assert said.splitlines()[-1] == f"{line}, and the same command goes on from there"
        assert said.count("bytegate: ") == 1
        assert not (folder.serving / "server.json").exists()
    assert folder.alive() == []
    assert not (folder.out / "perf.json").exists()
    folder.finish()
    assert folder.started("server") == [
        *(f"server-{arm}" for arm in ORDER[: after + 1]),
        *(f"server-{arm}" for arm in ORDER[after:]),  # the half launch, from its start
    ]
    assert [(folder.serving / name).read_bytes() for name in FILES[:after]] == kept
    made = folder.read()
    assert made.serving is not None
    assert [(r.route, r.launch, r.repeat) for r in made.serving.runs] == [
        (arm, launch, repeat)
        for arm, launch in (("stock", 1), ("fused", 1), ("fused", 2), ("stock", 2))
        for repeat in (1, 2)
    ]
    assert made.serving.sessions == [1] * after + [2] * (4 - after)
    warning = "launches were made in 2 sessions (stock 1, fused "
    assert warning in (folder.out / "perf.md").read_text("utf-8")
    assert made.summary[0].startswith(f"serving: WARNING, {warning}")
    assert folder.alive() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_interrupted_while_a_server_starts(
    folder: Folder, number: signal.Signals, wait_s: float
) -> None:
    with folder.start(up_s=60, down_s=1) as run:
        until((folder.serving / "stock-1.log").exists)  # made just before the server
        time.sleep(wait_s)
        run.send_signal(number)
        _, said = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert "interrupted: 0 of 4 launches are stored" in said
    assert folder.stored() == []
    # One that nobody stopped takes its second, or notes itself only now.
    assert not wait_s or folder.alive(0) == []
    time.sleep(0.3)
    assert not folder.started("server") or folder.alive(0) == []


def test_a_signal_just_after_a_start_leaves_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []

    class Started:
        pid = 2**22 + 1

        def stop(self) -> None:
            stopped.append("it")

    def start(*_: Any, **__: Any) -> Started:
        signal.raise_signal(signal.SIGTERM)  # it runs, and nobody has its name yet
        return Started()

    def reached() -> None:
        with serving_server.running(serve.ServeOptions(), tmp_path, "stock", 1):
            stopped.append("unreachable")

    monkeypatch.setattr(serve, "start", start)
    with stopping.as_interrupt(signal.SIGTERM), pytest.raises(KeyboardInterrupt):
        reached()
    assert stopped == ["it"]


def test_a_second_signal_leaves_no_server(folder: Folder) -> None:
    with folder.start(client_s=60, down_s=1.5) as run:
        until(lambda: len(folder.started("client")) > 0)
        for _ in range(5):  # the first stops the server, which takes longer than all of them
            run.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        run.communicate(timeout=60)
    assert run.returncode == 130
    assert folder.alive() == []


def test_a_server_that_a_killed_command_left_is_ended(folder: Folder) -> None:
    """What outlives its tether, such as a rank whose server died first, is found by the note."""
    with folder.start(client_s=60) as run:
        until(lambda: len(folder.started("client")) > 0)
        note = json.loads((folder.serving / "server.json").read_text("utf-8"))
        assert collect([folder.out]).problems == []
        os.kill(note["pid"], signal.SIGKILL)
        run.kill()
        run.communicate(timeout=60)
    left = folder.alive()
    assert [line.split()[0] for line in left] == ["rank"]
    assert "ended 1 processes of a server that a killed command had left" in folder.finish()
    assert folder.alive() == []


def test_what_is_kept_is_no_problem_of_a_gate(whole: Folder) -> None:
    assert whole.stored() == FILES
    found = collect([whole.out])
    assert (found.problems, found.pieces, len(found.perf)) == ([], [], 1)


def test_two_at_a_time_are_refused(folder: Folder) -> None:
    with folder.start(client_s=60) as run:
        until(lambda: len(folder.started("client")) > 0)
        report = folder.out / "perf.json"
        report.write_text("of before", encoding="utf-8")
        assert "another run writes to" in folder.finish(code=2)
        assert report.read_text("utf-8") == "of before"  # refused before anything is measured
        run.terminate()
        run.communicate(timeout=60)
    assert len(folder.started("server")) == 1


@pytest.mark.parametrize(
    ("words", "fake", "says"),
    [
        (("--requests", "5"), {}, "requests at 2 (stored 4, asked 5)"),
        (("--repeats", "3"), {}, "repeats at 2 (stored 2, asked 3)"),
        (("--concurrency", "3"), {}, "concurrency (stored [2], asked [3])"),
        (("--route", "fault:K01"), {}, "route (stored fused, asked fault:K01)"),
        (("--seed", "1"), {}, "arguments (stored [], asked ['--seed', '1'])"),
        ((), {"version of torch": "3"}, "version of torch (stored 2, asked 3)"),
        ((), {"device": "another"}, "device (stored None, asked another)"),
    ],
)
def test_another_question_is_refused_before_anything_starts(
    filled: Folder, words: tuple[str, ...], fake: dict[str, str], says: str
) -> None:
    for name in FILES[1:]:
        (filled.serving / name).unlink()
    said = filled.finish(*words, code=2, question=fake)
    assert says in said
    assert said.count("\n") == 1
    assert said.startswith(f"bytegate: {filled.serving} holds launches of another question: ")
    assert said.endswith("give --out another folder\n")
    assert filled.started("") == []


def edit(path: Path, change: Callable[[dict[str, Any]], None], *, sealed: bool) -> None:
    raw = json.loads(path.read_text("utf-8"))
    change(raw)
    text = json.dumps(raw)
    path.write_text(seal.sealed(text) if sealed else text, encoding="utf-8")


@pytest.mark.parametrize(
    ("place", "change", "sealed", "says"),
    [
        (1, None, False, "is damaged: "),
        (2, lambda raw: raw["runs"][0]["figures"].update(x=1.0), False, "is damaged: its content"),
        (2, lambda raw: raw.pop("content_sha256"), False, "is damaged: it has no content_sha256"),
        (2, lambda raw: raw.update(content_sha256=""), False, "it has no content_sha256"),
        (2, lambda raw: raw["runs"].pop(), True, "it has 1 runs, which aren't the 2 asked for"),
        (2, lambda raw: raw["counters"].pop("chunks"), True, "it has no counter of chunks"),
        (2, lambda raw: raw.update(place=3), True, "it holds launch 3 (fused)"),
        (2, lambda raw: raw.update(more=1), True, "is damaged: more: Extra"),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    filled: Folder, place: int, change: Any, *, sealed: bool, says: str
) -> None:
    path = filled.serving / FILES[place - 1]
    if change is None:
        path.write_bytes(path.read_bytes()[:100])
    else:
        edit(path, change, sealed=sealed)
    said = filled.finish(code=2)
    assert said.startswith(f"bytegate: {path} is damaged: ")
    assert says in said
    assert said.count("\n") == 1
    assert filled.started("") == []


def test_launches_go_in_their_order_alone(filled: Folder) -> None:
    edit(filled.serving / FILES[0], lambda raw: raw.update(seconds=1.0), sealed=True)
    (filled.serving / FILES[1]).unlink()
    said = filled.finish(code=2)
    assert f"{filled.serving / FILES[1]} is missing, and {FILES[2]} is there" in said
    assert filled.started("") == []
    for name in FILES[2:]:
        (filled.serving / name).unlink()
    assert "1 of 4 launches are stored" in filled.finish()  # sealed again, it is whole
    assert filled.started("server") == [f"server-{arm}" for arm in ORDER[1:]]


def test_results_of_a_half_launch_are_not_taken(folder: Folder) -> None:
    with folder.start(client_s=60) as run:
        until((folder.serving / "stock-1-at-2-1.counters.json").exists)
        run.kill()
        run.communicate(timeout=60)
    assert folder.alive() == []  # the client goes with its command as well
    for kind in ("json", "counters.json"):  # both runs, as of one that was cut off at its end
        text = (folder.serving / f"stock-1-at-2-1.{kind}").read_text("utf-8")
        (folder.serving / f"stock-1-at-2-2.{kind}").write_text(text, encoding="utf-8")
    said = folder.finish(code=2, silent=True)
    assert "vLLM's benchmark client left no result" in said
    assert folder.stored() == []


@pytest.mark.parametrize(
    ("route", "says"),
    [
        ("nosuch", "route 'nosuch': expected stock, fused"),
        ("fault:NOPE", "fault:NOPE: no such fault; known are"),
        ("nomodule:function", "nomodule:function: can't import nomodule"),
        ("json:nofunction", "json:nofunction: json has no callable"),
    ],
)
def test_a_route_that_is_none_is_refused_before_anything_starts(
    folder: Folder, route: str, says: str
) -> None:
    said = folder.finish("--route", route, code=2)
    assert says in said
    assert said.count("\n") == 1
    assert folder.started("") == []
    assert not folder.out.exists()


@pytest.mark.parametrize("name", ["serving/stock-1.log", "serving/requests-2.jsonl", "perf.md"])
def test_what_cannot_be_written_is_one_line(folder: Folder, name: str) -> None:
    (folder.out / name).mkdir(parents=True)
    said = folder.finish(code=2).splitlines()[-1]
    assert said.startswith("bytegate: ")
    assert said.endswith(f"{folder.out / name}: Is a directory")


def test_an_older_report_does_not_stay_beside_half_of_a_newer(
    folder: Folder, whole: Folder
) -> None:
    folder.out.mkdir()
    shutil.copy(whole.out / "perf.json", folder.out)
    folder.finish(code=2, silent=True)  # its client leaves nothing
    made = folder.read()
    assert (made.verdict, made.serving) == ("NOT COVERED", None)
    assert "the same command goes on" in made.not_covered[0]
    folder.finish()
    assert folder.read().verdict == "MEASURED"


def test_a_route_that_changes_meanwhile_is_not_stored(folder: Folder, tmp_path: Path) -> None:
    own = tmp_path / "mine_alone.py"
    own.write_text("def pack(*a):\n    return a\n", encoding="utf-8")
    words = ("--route", "mine_alone:pack")
    with folder.start(*words, client_s=2, path=str(tmp_path)) as run:
        until(lambda: len(folder.stored()) == 1 and len(folder.started("client")) == 2)
        own.write_text("def pack(*a):\n    return None\n", encoding="utf-8")
        _, said = run.communicate(timeout=60)
    assert run.returncode == 2
    assert "the source of the route changed while it was measured" in said
    assert folder.stored() == FILES[:1]
    assert folder.alive() == []
    assert "source of the route (stored " in folder.finish(*words, code=2, path=str(tmp_path))
