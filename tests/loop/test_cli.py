"""The loop's command line: what it refuses, what 0 cases mean, and who is told to be at fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from equiv import cli, document
from equiv.faults_report import faults_blocks


def bytegate(*words: str) -> int:
    return cli.run_app(cli.app, list(words), "bytegate")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("loop", "--pack", "x:y", "repro", "a case"), "--pack stands before repro"),
        (("loop", "--seed", "3", "faults"), "--seed stands before faults"),
        (("equiv", "--candidate", "x:y", "repro", "a case"), "--candidate stands before repro"),
        (("gate", "--require", "gpu", "policy"), "--require stands before policy"),
    ],
)
def test_an_option_that_a_subcommand_would_not_see_is_refused(
    words: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bytegate(*words) == 2
    said = capsys.readouterr().err
    assert option in said
    assert said.count("\n") == 1
    bare = [w for w in words if w in {"loop", "equiv", "gate", "repro", "policy", "a case"}]
    bytegate(*bare) if "faults" not in words else None
    assert "stands before" not in capsys.readouterr().err, "the twin without the option"


def test_no_clean_cases_are_none_and_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--clean-cases 0`` ran the default's."""
    pytest.importorskip("vllm")
    from equiv import evidence
    from equiv.loop import faults

    ran: list[Any] = []

    def child(work: Any, *_: Any, **__: Any) -> dict[str, Any]:
        ran.append(work)
        return {"alarms": [], "candidates": {"clean": 7}, "worst_share": 0.1}

    row = evidence.FaultRow("L07", "", "caught", "edges", 1, "", "plan", "", "clean", 0.1, "a:b")
    monkeypatch.setattr(faults, "in_child", child)
    monkeypatch.setattr(faults, "fault_row", lambda *_: row)
    for asked, cases in ((0, 0), (5, 7)):
        ran.clear()
        request = faults.LoopFaultsRequest(only=("L07",), out=tmp_path, clean_cases=asked)
        made = faults.run_faults(request)
        assert made.false_alarms["cases"] == cases
        assert bool(ran) == bool(cases)
        said = document.markdown(list(faults_blocks(made)))
        assert ("No clean kernel was run" in said) == (not cases)


@pytest.mark.parametrize(("draws", "drawn"), [(0, 0), (3, 3)])
def test_no_draws_are_none(draws: int, drawn: int) -> None:
    pytest.importorskip("vllm")
    from equiv.loop import api, campaign
    from equiv.profiles import profile_of

    api.prepare("cpu", ())
    pack, any_dims = api.load_pack("fused", "cpu")
    options = campaign.Options(
        pack, "fused", "cpu", profile_of("dev"), 0, ("ragged",), any_dims=any_dims, draws=draws
    )
    (lane,), _ = campaign.run_lanes(options)
    assert lane.drawn == drawn


def test_a_patch_that_was_written_for_another_vllm_is_the_patch_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    (tmp_path / "for_another.py").write_text(
        "from kvroute.errors import UnknownVLLM\n"
        "def change():\n    raise UnknownVLLM('it has no such function')\n"
        "def nothing():\n    pass\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    from equiv.errors import UsageError
    from equiv.loop import api

    with pytest.raises(UsageError, match=r"\A--patch: it has no such function\Z"):
        api.prepare("cpu", ("for_another:change",))
    api.prepare("cpu", ("for_another:nothing",))
    monkeypatch.setattr(api, "_stand_ins", lambda _: __import__("for_another").change())
    with pytest.raises(api.LoopUnavailable, match="can't run here: it has no such function"):
        api.prepare("cpu", ())


def test_a_headline_of_one_lane_says_so() -> None:
    pytest.importorskip("vllm")
    from equiv.loop import report
    from equiv.loop.lanes import LANES

    class Lane:
        findings: tuple[Any, ...] = ()
        cases = oracle_checked = 10

        def __init__(self, lane: str) -> None:
            self.lane = lane

    class Made:
        verdict, pack, device, profile, seed, seconds = "PASS", "fused", "cpu", "dev", 0, 1.0
        lanes: tuple[Lane, ...] = (Lane("edges"),)

    says = "inside the dense reference's bound, in the lane edges alone, 1 of 7; 10 cases"
    assert says in report.verdict_sentence(Made())  # type: ignore[arg-type]
    Made.lanes = tuple(map(Lane, LANES))
    assert "alone" not in report.verdict_sentence(Made())  # type: ignore[arg-type]
