"""The tail that is kept while serving is measured, and what tells of several sessions."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equiv import document, environment, evidence, stopping
from equiv.errors import NotCovered, UsageError
from equiv.perf import kept, record, report, run

ARMS = [
    record.TailArm(
        name, [1.0], record.Ratio(1.0, 1.0, 1.0), record.Ratio(1.0, 1.0, 1.0), False, None
    )
    for name in ("stock", "stock again", "copy")
]
TAIL = record.Tail("kvpack", "a GPU", 5, 3, [record.TailCell({"T": 8}, 64, 2, ARMS)], "2026")
ORDER = ["stock", "fused", "fused", "stock"]
PACKS = [{"packs": 0, "chunks": 8}] * 4


LOAD = {"requests": 4, "input_tokens": 2, "output_tokens": 2, "concurrency": 2, "repeats": 1}


def served(sessions: list[int]) -> record.Serving:
    return record.Serving({}, "m", [], {}, LOAD, ORDER, PACKS, [], [], [], sessions=sessions)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Measure nothing, and note how often."""
    made: list[Any] = []

    def tail_run(*words: Any, **_: Any) -> tuple[record.Tail, list[str]]:
        made.append(words)
        return dataclasses.replace(TAIL, measured=f"time {len(made)}"), ["the tail of x: y"]

    monkeypatch.setattr(run.tail, "run", tail_run)
    monkeypatch.setattr(kept, "here", lambda: {"version of torch": "2"})
    return made


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., tuple[record.PerfEvidence | None, list[str]]]:
    """Run ``perf``; serving is cut off where it isn't given."""

    def made(
        serving: record.Serving | None = None, *, alone: bool = False, **words: Any
    ) -> tuple[record.PerfEvidence | None, list[str]]:
        def serve(_: run.Progress) -> record.Serving:
            if serving is None:
                raise KeyboardInterrupt
            return serving

        said: list[str] = []
        asked = run.Asked(
            "kvpack", [], "cpu", None, tmp_path, "perf", serving=None if alone else serve, **words
        )
        found = None
        with contextlib.suppress(KeyboardInterrupt):
            found = run.run(asked, said.append)
        return found, said

    return made


def test_the_same_command_takes_the_tail_from_before(
    times: list[Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    command()
    assert len(times) == 1
    made, said = command(served([1, 1, 1, 1]))
    assert len(times) == 1
    assert said == [f"the tail is stored in {tmp_path / 'tail.json'}, and not measured again"]
    assert made.tail.measured == "time 1"
    assert "the tail of x: y" in made.not_covered
    assert "Measured time 1." in (tmp_path / "perf.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("torch", "only", "name"),
    [("3", {}, "version of torch"), ("2", {"T": [8]}, "sizes")],
)
def test_another_question_has_it_measured_again_and_says_so(
    torch: str,
    only: dict[str, list[int]],
    name: str,
    times: list[Any],
    command: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command()
    monkeypatch.setattr(kept, "here", lambda: {"version of torch": torch})
    made, said = command(served([1, 1, 1, 1]), only=only)
    assert said[0].startswith("the tail is measured again: ")
    assert said[0].endswith(f"answers another question ({name})")
    assert made.tail.measured == "time 2"
    again, _ = command(served([1, 1, 1, 1]), only=only)
    assert again.tail.measured == "time 2"
    assert len(times) == 2


def test_a_tail_alone_is_measured_every_time(
    times: list[Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    for _ in range(2):
        command(alone=True)
    assert len(times) == 2
    assert not (tmp_path / "tail.json").exists()


def test_a_tail_that_is_not_covered_is_not_kept(
    times: list[Any],
    command: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_gpu(*_: object, **__: object) -> None:
        raise NotCovered("device time needs a GPU")

    monkeypatch.setattr(run.tail, "run", no_gpu)
    command()
    assert times == []
    assert not (tmp_path / "tail.json").exists()


@pytest.mark.parametrize("how", ["cut", "edited", "unsealed"])
def test_a_damaged_tail_is_refused_by_name(
    how: str, times: list[Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    command()
    path = tmp_path / "tail.json"
    text = path.read_text("utf-8")
    raw = json.loads(text)
    if how == "edited":
        raw["tail"]["cells"][0]["arms"][0]["launch_s"] = [0.5]
    else:
        del raw["content_sha256"]
    path.write_text(text[:80] if how == "cut" else json.dumps(raw), encoding="utf-8")
    with pytest.raises(UsageError, match=rf"evidence {path}"):
        command(served([1, 1, 1, 1]))
    assert len(times) == 1
    path.write_text(text, encoding="utf-8")
    command(served([1, 1, 1, 1]))


def test_a_question_has_what_times_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SOMETHING", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    found = kept.here()
    assert found["variable VLLM_SOMETHING"] == "1"
    assert "variable CUDA_VISIBLE_DEVICES" not in found
    assert {"device", "version of torch", "sources of ppl", "sources of kvpack"} <= found.keys()
    monkeypatch.setattr(environment, "machine", lambda: {"cpu": "c", "gpus": ["B", "A", "B"]})
    assert kept.here()["device"] == "A, B"


# -- launches of several sessions ----------------------------------------------------------


@pytest.mark.parametrize("sessions", [[], [1, 1, 1, 1]])
def test_one_session_is_nothing_to_tell(sessions: list[int]) -> None:
    made = served(sessions)
    assert record.drift(made) == ""
    assert record.summarised(None, made, []) == []


def test_several_sessions_are_a_warning_in_report_and_summary(tmp_path: Path) -> None:
    made = served([1, 2, 2, 3])
    said = "launches were made in 3 sessions (stock 1, fused 2, fused 2, stock 3): what drifted"
    assert record.summarised(None, made, [])[0].startswith(f"serving: WARNING, {said}")
    perf = record.PerfEvidence(
        "MEASURED", 0, None, made, [], {}, "", 1.0, "perf", record.summarised(None, made, [])
    )
    assert f"WARNING: {said}" in document.markdown(report.blocks(perf))
    evidence.write(tmp_path / "perf.json", perf)
    quiet = dataclasses.replace(perf, summary=[])
    assert quiet.contradictions() == ["the summary isn't that of the figures"]
    short = dataclasses.replace(perf, serving=dataclasses.replace(made, launched=["2026"]))
    assert "serving: sessions that aren't those of its launches" in short.contradictions()


# -- signals ------------------------------------------------------------------------------


def test_signals_are_held_back_and_then_do_their_work() -> None:
    done: list[str] = []

    def both() -> None:
        with stopping.held_back(signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("started")
        done.append("unreachable")

    with stopping.as_interrupt(signal.SIGTERM):
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            both()
        with stopping.held_back(signal.SIGINT, signal.SIGTERM):
            done.append("no signal")
    assert done == ["started", "no signal"]


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stopping.held_back(signal.SIGTERM):
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
