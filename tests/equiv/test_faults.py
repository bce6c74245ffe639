"""The tester tested: a fault is caught, missed or not covered, and clean kernels raise none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from equiv import evidence, faults
from equiv.campaign import Options
from equiv.case import parse
from equiv.errors import UsageError
from equiv.evidence import FaultRow, FaultsEvidence
from equiv.faults import CLEAN_CASES, CLEAN_SHARES, FaultsRequest, run_faults
from equiv.lanes import Lanes, Target
from equiv.pairs import OpPair
from equiv.profiles import PROFILES
from kvpack.spec import Fault

Bad = Callable[[str], str]
CLEAN = "kvpack.faults.kernel:kv_pack"

QUICK = replace(
    PROFILES["dev"],
    draws={"shapes": 10, "strides": 10, "modes": 5},
    max_rows=300,
    drawn_rows=300,
    shrink_seconds=5.0,
)


@dataclass
class Other:
    """The pair with other faults and harmless variants."""

    pair: OpPair
    faults: tuple[Fault, ...] = ()
    harmless: tuple[Fault, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pair, name)


@pytest.fixture
def ran(pair: OpPair, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run faults of one's own, quickly."""

    def go(
        *own: Fault, harmless: tuple[Fault, ...] = (), clean_cases: int = 0, **changes: Any
    ) -> FaultsEvidence:
        monkeypatch.setattr(faults, "load_pair", lambda _: Other(pair, own, harmless))
        monkeypatch.setattr(faults, "profile_of", lambda _: QUICK)
        fields = {"device": "cpu", "out": folder / "out", "clean_cases": clean_cases} | changes
        return run_faults(FaultsRequest(**fields))  # type: ignore[arg-type]

    return go


def fault(faulty: str, clean: str = CLEAN, lane: str = "shapes", needs: str = "") -> Fault:
    return Fault("Z1", "something", faulty, clean, lane, needs)


def only(made: FaultsEvidence) -> FaultRow:
    (row,) = made.faults
    return row


@pytest.mark.parametrize("name", ["divergence", "unwritten", "raised", "crash", "input_changed"])
def test_a_fault_is_caught_on_a_case_that_its_twin_passes(
    name: str, ran: Callable[..., FaultsEvidence], bad: Bad, folder: Path
) -> None:
    made = ran(fault(bad(name)))
    row = only(made)
    assert (row.outcome, row.kind, row.lane, row.twin) == ("caught", name, "shapes", "clean")
    assert parse(row.smallest).candidate == bad(name)
    assert row.cases > 0
    assert (made.verdict, made.exit_code) == ("PASS", 0)
    assert sorted(p.name for p in (folder / "out").iterdir()) == ["faults.json", "faults.xml"]
    again = evidence.read_any(folder / "out/faults.json")
    assert again.content_sha256
    assert replace(again, validated=False, content_sha256="") == made


def test_a_fault_that_nothing_shows_is_missed(ran: Callable[..., FaultsEvidence]) -> None:
    made = ran(fault(CLEAN))
    row = only(made)
    assert (row.outcome, row.smallest) == ("missed", "")
    assert row.detail == f"no lane failed in {row.cases:,} cases"
    assert row.cases > 500  # every lane was tried
    assert (made.verdict, made.exit_code) == ("FAIL", 1)


def test_a_fault_whose_twin_fails_as_well_is_no_catch(
    ran: Callable[..., FaultsEvidence], bad: Bad
) -> None:
    row = only(ran(fault(bad("divergence"), clean=bad("divergence"))))
    assert (row.outcome, row.twin) == ("missed", "divergence")
    assert "the clean twin fails the same case (divergence)" in row.detail


def test_a_fault_whose_twin_does_not_fit_is_not_covered(
    ran: Callable[..., FaultsEvidence], bad: Bad
) -> None:
    name = bad("wrong_until_out_of_memory")  # that the twin's process isn't the first is enough
    made = ran(fault(name, clean=name))
    row = only(made)
    assert row.outcome == "not_covered"
    assert "nothing can be said of its twin" in row.detail
    assert "doesn't fit on the device" in row.detail
    assert (made.verdict, made.exit_code) == ("NOT COVERED", 4)


RUNS = {
    "": {"cpu dev", "cpu gate", "cpu nightly", "cuda:0 dev", "cuda:0 gate", "cuda:0 nightly"},
    "cuda": {"cuda:0 dev", "cuda:0 gate", "cuda:0 nightly"},
    "nightly": {"cpu nightly", "cuda:0 gate", "cuda:0 nightly"},
    "large": {"cuda:0 gate", "cuda:0 nightly"},
}


@pytest.mark.parametrize("needs", RUNS)
def test_where_a_fault_runs(needs: str, pair: OpPair) -> None:
    runs = set()
    for device, profile in itertools.product(("cpu", "cuda:0"), PROFILES):
        target = Target(device, memory_bytes=140 << 30)
        options = Options(pair, target, PROFILES[profile], 0, ("sizes",))
        if not faults._not_here(fault("own", needs=needs), options):
            runs.add(f"{device} {profile}")
            if needs in {"nightly", "large"}:  # then there are outputs past 2^31 elements
                assert not Lanes(pair, target, PROFILES[profile], "own", 0).plan("sizes").left_out
    assert runs == RUNS[needs]


@pytest.mark.parametrize(
    ("where", "outcome"),
    [
        ("bad_kernels:raised", "caught"),
        ("kvpack.stock:kv_pack", "missed"),
        ("torch._ops:__call__", "missed"),
        ("", "caught"),
    ],
)
def test_an_exception_counts_where_it_ends_in_the_faulty_module(
    where: str,
    outcome: str,
    ran: Callable[..., FaultsEvidence],
    bad: Bad,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_candidate = faults.campaign.run_candidate

    def moved(*args: Any) -> Any:
        made, seen = run_candidate(*args)
        for lane in made.lanes:
            lane.findings[:] = [replace(f, raised_in=where) for f in lane.findings]
        return made, seen

    monkeypatch.setattr(faults.campaign, "run_candidate", moved)
    row = only(ran(fault(bad("raised"))))
    assert row.outcome == outcome
    assert (f"the exception came from {where}" in row.detail) == (outcome == "missed")


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        ("cuda", "needs a GPU"),
        ("nightly", "needs the profile nightly"),
        ("large", "needs the profile gate or nightly on a GPU"),
    ],
)
def test_what_can_t_run_here_is_not_covered(
    needs: str, reason: str, ran: Callable[..., FaultsEvidence], bad: Bad
) -> None:
    made = ran(fault(bad("divergence"), needs=needs))
    row = only(made)
    assert (row.outcome, row.cases) == ("not_covered", 0)
    assert row.detail.startswith(reason)
    assert (made.verdict, made.exit_code) == ("NOT COVERED", 4)


def test_the_fault_s_own_lane_goes_first(ran: Callable[..., FaultsEvidence], bad: Bad) -> None:
    assert only(ran(fault(bad("divergence"), lane="modes"))).lane == "modes"
    assert only(ran(fault(bad("strided_only"), lane="shapes"))).lane == "strides"


def test_unknown_faults_are_bad_usage(ran: Callable[..., FaultsEvidence], bad: Bad) -> None:
    with pytest.raises(UsageError, match="unknown fault K1, K2: pair kvpack has Z1"):
        ran(fault(bad("divergence")), only=("K1", "Z1", "K2"))


# -- false alarms -------------------------------------------------------------------


def test_clean_kernels_share_the_cases(ran: Callable[..., FaultsEvidence], bad: Bad) -> None:
    harmless = (Fault("N1", "another", bad("clean"), "", "shapes"),)
    made = ran(fault(bad("divergence")), harmless=harmless, clean_cases=80)
    told = made.false_alarms
    assert told["alarms"] == []
    assert set(told["candidates"]) == {"stock", CLEAN, bad("clean")}
    assert told["cases"] == sum(told["candidates"].values()) >= 78
    assert told["candidates"]["stock"] >= 40
    assert made.exit_code == 0


def test_an_alarm_of_a_clean_kernel_fails_the_run(
    ran: Callable[..., FaultsEvidence], bad: Bad
) -> None:
    harmless = (Fault("N1", "not so harmless", bad("divergence"), "", "shapes"),)
    made = ran(fault(bad("divergence")), harmless=harmless, clean_cases=40)
    assert only(made).outcome == "caught"
    (name,) = {alarm["candidate"] for alarm in made.false_alarms["alarms"]}
    assert name == bad("divergence")
    assert (made.verdict, made.exit_code) == ("FAIL", 1)


def test_the_shares_are_whole() -> None:
    assert sum(CLEAN_SHARES.values()) == pytest.approx(1)
    assert CLEAN_CASES["gate"] == 10_000
    assert set(CLEAN_CASES) == set(PROFILES)
