"""Campaigns in worker processes: findings, least counts, the ledger both ways, no alarms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from equiv import lane_run, ledger, pool
from equiv.campaign import Options, combined, ledger_use, run_candidate, state_of
from equiv.case import parse
from equiv.evidence import Candidate, Finding, Lane
from equiv.lanes import LANES, Target
from equiv.ledger import Entry, Seen
from equiv.pairs import OpPair
from equiv.profiles import PROFILES
from equiv.result import FINDINGS

Campaign = Callable[..., Candidate]
Bad = Callable[[str], str]

ELSEWHERE = {
    "hang": "below, with a shorter limit",
    "last_error": "CUDA alone keeps an error for whoever asks next",
    "not_run": "a kernel that counts its runs",
    "reference": "the reference's own fault",
    "reference_raised": "likewise",
}
"""Kinds with a test of their own, here or beside ``Executor``."""


def findings(made: Candidate) -> list[Finding]:
    return [f for x in made.lanes for f in x.findings]


# -- findings -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in FINDINGS if k not in ELSEWHERE])
def test_a_bad_kernel_of_each_kind_fails(kind: str, campaign: Campaign, bad: Bad) -> None:
    lane = "modes" if kind == "overwritten" else "shapes"
    made = campaign(bad(kind), lane, first_finding_only=True)
    assert made.state == "failed"
    assert [f.kind for f in findings(made)] == [kind]
    (found,) = findings(made)
    assert parse(found.case).candidate == bad(kind)
    assert found.occurrences >= 1
    assert found.detail
    assert found.repro.startswith("bytegate equiv repro ")
    assert (made.crashes > 0) == (kind == "crash")


def test_a_finding_that_no_longer_fits_stays_one(campaign: Campaign, bad: Bad) -> None:
    made = campaign(bad("wrong_until_out_of_memory"), "shapes", shrink=True)
    (found,) = findings(made)
    assert found.kind == "divergence"
    assert lane_run.NO_ROOM in found.detail
    assert lane_run.NOT_ALONE not in found.detail
    (lane,) = made.lanes
    assert any("doesn't fit on the device" in m for m in lane.missing)


def test_a_clean_kernel_gives_none(campaign: Campaign, bad: Bad) -> None:
    made = campaign(bad("clean"), "shapes", "strides", "modes")
    assert findings(made) == []
    assert [x.undefined for x in made.lanes] == [0, 0, 0]
    for lane in made.lanes:
        assert lane.equal + lane.refused == lane.cases == lane.enumerated + lane.drawn
        assert lane.oracle_checked >= lane.equal
        assert lane.bound == pytest.approx(1 - 0.05 ** (1 / lane.drawn))
        assert lane.samples
    assert (made.crashes, made.hangs, made.guard) == (0, 0, "dispatch")


def test_a_campaign_outlives_what_its_kernel_does(
    campaign: Campaign, bad: Bad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "HANG_S", 2.0)
    profile = replace(PROFILES["gate"], draws={}, max_rows=400, largest_rows=0)
    made = campaign(bad("one_of_each"), "shapes", "alignment", profile=profile)
    kinds = [f.kind for f in findings(made)]
    assert sorted(kinds) == ["crash", "divergence", "hang", "raised"]
    shapes, alignment = made.lanes
    assert (shapes.state, alignment.state) == ("failed", "passed")
    assert (made.crashes, made.hangs) == (1, 1)
    assert "stopped" not in "".join(shapes.missing)
    assert shapes.cases == shapes.equal + shapes.refused + sum(
        f.occurrences for f in shapes.findings
    )


def test_a_lane_ends_after_so_many_lost_workers(
    campaign: Campaign, bad: Bad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_run, "LOST_WORKERS", {"cpu": 3})
    (lane,) = campaign(bad("leaves"), "modes").lanes
    assert lane.state == "passed"  # three heads all through, and it leaves for two
    (lane,) = campaign(bad("leaves"), "sizes").lanes  # two heads
    assert lane.state == "failed"
    assert "stopped after 4 lost workers" in lane.missing


def test_a_kernel_that_always_hangs_is_told_in_time(
    campaign: Campaign, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import time\ndef kernel(*operands):\n    while True: time.sleep(1)\n"
    (folder / "mine.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(pool, "FIRST_S", 3.0)
    monkeypatch.setattr(pool, "HANG_S", 0.2)
    made = campaign("mine.py:kernel", "shapes")
    assert [f.kind for f in findings(made)] == ["hang"]
    assert made.lanes[0].cases == 3
    assert made.hangs == 4  # and once while it was profiled
    assert "died or hung" in made.proof["error"]


def test_a_lane_ends_after_so_many_different_findings(
    campaign: Campaign, bad: Bad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_run, "MAX_SIGNATURES", 1)
    (lane,) = campaign(bad("divergence"), "shapes").lanes
    assert lane.missing[0] == "stopped after 1 different findings"
    assert lane.cases < 30


def test_a_failure_that_needs_an_earlier_case_is_told_as_such(
    campaign: Campaign, folder: Path
) -> None:
    source = """
from kvpack.faults.kernel import CLEAN, bits
first = []
def kernel(kv_nope, k_pe, use_fp8):
    first[:] = first or [use_fp8]
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if use_fp8 != first[0] and v.numel():
        bits(v)[-1, -1, -1] ^= 1
    return k, v
"""
    (folder / "mine.py").write_text(source, encoding="utf-8")
    made = campaign("mine.py:kernel", "shapes", shrink=True, first_finding_only=True)
    (found, *_) = findings(made)
    assert found.kind == "divergence"
    assert found.detail.endswith("only after other cases in the same process: alone it passes")


def test_a_failure_that_never_comes_again_is_told_as_it_was(
    campaign: Campaign, folder: Path
) -> None:
    source = """
from kvpack.faults.kernel import CLEAN, bits
calls = []
def kernel(kv_nope, k_pe, use_fp8):
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    calls.append(v.numel() > 0)
    if sum(calls) == 20 and v.numel():
        bits(v)[-1, -1, -1] ^= 1
    return k, v
"""
    (folder / "mine.py").write_text(source, encoding="utf-8")
    made = campaign("mine.py:kernel", "shapes", shrink=True, first_finding_only=True)
    (found, *_) = findings(made)
    assert found.kind == "unstable"
    assert found.detail.startswith("v: 1 bytes in 1 of ")
    assert found.detail.endswith("only after other cases in the same process: alone it passes")


def test_a_plain_failure_fails_alone(campaign: Campaign, bad: Bad) -> None:
    (found,) = findings(campaign(bad("divergence"), "shapes", shrink=True, first_finding_only=True))
    assert "alone it passes" not in found.detail
    case = parse(found.case)
    assert (case["T"], case["H"], found.set_elements) == (1, 1, 0)
    assert found.voices.endswith("the candidate is wrong")


def test_a_kernel_that_torch_compiles_is_guarded_otherwise(
    campaign: Campaign, folder: Path
) -> None:
    source = """
import functools, torch
from kvpack.faults.kernel import CLEAN, bits
@functools.partial(torch.compile, backend="eager", dynamic=True)
def part(x):
    return x + 0
def kernel(kv_nope, k_pe, use_fp8):
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    return k, part(bits(v)).view(v.dtype)
"""
    (folder / "mine.py").write_text(source, encoding="utf-8")
    made = campaign("mine.py:kernel", "alignment")
    assert made.guard == "malloc"
    assert findings(made) == []
    (lane,) = made.lanes
    assert (lane.guarded, lane.state) == (0, "passed")
    assert lane.oracle_checked == lane.equal


def test_the_compiled_tail_is_never_eager_in_silence(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch, pair: OpPair
) -> None:
    class Switched:
        """The pair, whose compiled candidate runs where torch's compiler is switched off."""

        def __getattr__(self, name: str) -> Any:
            return getattr(pair, name)

    known = dict(pair.candidates)
    known["inductor"] = replace(  # type: ignore[type-var]
        known["inductor"], cpu_environment={"TORCHDYNAMO_DISABLE": "1"}
    )
    off = Switched()
    off.candidates = known  # type: ignore[attr-defined]
    del monkeypatch
    made = campaign("inductor", "alignment", first_finding_only=True, pair=off)
    assert made.state == "failed"
    (found,) = findings(made)
    assert found.kind == "raised"
    assert "no compiled code ran" in found.detail


# -- what a lane needs --------------------------------------------------------------


def test_below_a_least_count_a_lane_is_not_covered(campaign: Campaign, bad: Bad) -> None:
    profile = replace(PROFILES["dev"], draws={}, max_rows=100)
    made = campaign(bad("clean"), "shapes", profile=profile)
    assert made.state == "not covered"
    (lane,) = made.lanes
    assert lane.state == "not covered"
    assert "beyond one grid pass: 0 of 5" in lane.missing
    assert made.reason == f"lane shapes: {'; '.join(lane.missing)}"
    for text in lane.missing:
        kind, _, counts = text.rpartition(": ")
        have, _, need = counts.partition(" of ")
        assert (lane.kinds.get(kind, 0), lane.least[kind]) == (int(have), int(need))
        assert int(have) < int(need)


def test_with_its_least_counts_it_passes(campaign: Campaign, bad: Bad) -> None:
    made = campaign(bad("clean"), "strides", profile=replace(PROFILES["dev"], max_rows=4_000))
    assert (made.state, made.reason) == ("passed", "")


def test_enumerated_cases_that_find_no_time_are_named(
    campaign: Campaign, bad: Bad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_run, "LEAST_DRAWS", 0)
    profile = replace(PROFILES["dev"], lane_seconds=0.001)
    (lane,) = campaign(bad("clean"), "alignment", profile=profile).lanes
    assert lane.state == "not covered"
    assert any("enumerated cases after 0 s" in text for text in lane.missing)


def test_drawn_cases_alone(campaign: Campaign, bad: Bad) -> None:
    made = campaign(bad("clean"), "shapes", drawn_only=True)
    (lane,) = made.lanes
    assert (lane.enumerated, lane.drawn, lane.least) == (0, 24, {})
    assert made.proof == {}


def test_a_candidate_that_can_t_run_here_is_not_covered(campaign: Campaign) -> None:
    made = campaign("vllm", "shapes")
    assert (made.state, made.lanes) == ("not covered", [])
    assert made.reason == "vllm runs on cuda alone, not on cpu"


# -- the ledger ---------------------------------------------------------------------

WRONG_NAN = """
from kvpack.faults.kernel import CLEAN, bits
def kernel(kv_nope, k_pe, use_fp8):
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if use_fp8:
        bits(v)[bits(v) == 0x7F] = 0x7E
        bits(v)[bits(v) == 0xFF] = 0xFE
    return k, v
"""
CLEAN_ONE = "from kvpack.faults.kernel import kv_pack as kernel\n"
DECLARED = {
    "id": '"M1"',
    "pair": '"kvpack"',
    "candidates": '["mine.py:kernel"]',
    "devices": '["cpu"]',
    "kind": '"bytes"',
    "case": "{ fp8 = [1] }",
    "element": '"nan"',
    "expected": '["7f", "ff"]',
    "actual": '["7e", "fe"]',
    "reason": '"NaN becomes 448"',
    "reference": '"an issue"',
}


@pytest.fixture
def declared(folder: Path) -> Callable[..., tuple[Entry, ...]]:
    """Write the kernel and a ledger, and read it as a run does."""

    def make(source: str, **changes: str | None) -> tuple[Entry, ...]:
        (folder / "mine.py").write_text(source, encoding="utf-8")
        fields = {k: v for k, v in {**DECLARED, **changes}.items() if v is not None}
        lines = "".join(f"{k} = {v}\n" for k, v in fields.items())
        path = folder / "ledger.toml"
        path.write_text(f"[[divergence]]\n{lines}", encoding="utf-8")
        return ledger.load(path)

    return make


def test_an_undeclared_difference_fails(
    campaign: Campaign, declared: Callable[..., tuple[Entry, ...]]
) -> None:
    declared(WRONG_NAN)
    made = campaign("mine.py:kernel", "patterns", first_finding_only=True)
    assert (made.state, [f.kind for f in findings(made)]) == ("failed", ["divergence"])


def test_a_declared_difference_that_is_there_passes_and_is_counted(
    campaign: Campaign, declared: Callable[..., tuple[Entry, ...]]
) -> None:
    made = campaign("mine.py:kernel", "patterns", entries=declared(WRONG_NAN))
    assert (made.state, made.reason) == ("passed", "")
    (use,) = made.ledger
    assert (use.id, use.state, use.cases) == ("M1", "seen", use.cases)
    assert use.cases >= 2
    assert use.patterns == {"bf16 v": 254, "fp16 v": 2_046}
    assert use.elements > 0
    (lane,) = made.lanes
    assert lane.declared == use.cases


def test_a_declared_difference_that_is_gone_fails(
    campaign: Campaign, declared: Callable[..., tuple[Entry, ...]]
) -> None:
    made = campaign("mine.py:kernel", "patterns", entries=declared(CLEAN_ONE))
    assert (made.state, made.reason) == ("failed", "declared divergence M1 is gone")
    assert findings(made) == []
    assert [u.state for u in made.ledger] == ["gone"]


def test_a_declared_difference_elsewhere_covers_nothing(
    campaign: Campaign, declared: Callable[..., tuple[Entry, ...]]
) -> None:
    entries = declared(WRONG_NAN, case="{ dtype = ['fp16'] }")
    made = campaign("mine.py:kernel", "patterns", entries=entries, first_finding_only=True)
    (found,) = findings(made)
    assert parse(found.case)["dtype"] == "bf16"


def test_another_version_s_entry_is_no_matter(
    campaign: Campaign, declared: Callable[..., tuple[Entry, ...]]
) -> None:
    entries = declared(CLEAN_ONE, versions='{ torch = "<1.0" }')
    made = campaign("mine.py:kernel", "patterns", entries=entries, versions={"torch": "2.13.0"})
    assert (made.state, made.ledger) == ("passed", [])


def test_a_declared_crash_is_confirmed_and_then_not_launched(
    campaign: Campaign, declared: Callable[..., tuple[Entry, ...]]
) -> None:
    source = "import os\nfrom kvpack.faults.kernel import CLEAN\n"
    source += "def kernel(kv_nope, k_pe, use_fp8):\n"
    source += "    if kv_nope.data_ptr() % 16:\n        os._exit(3)\n"
    source += "    return CLEAN(kv_nope, k_pe, use_fp8)\n"
    without: dict[str, str | None] = dict.fromkeys(("element", "expected", "actual", "case"))
    entries = declared(source, kind='"crash"', alignment='"misaligned"', **without)
    made = campaign("mine.py:kernel", "alignment", entries=entries)
    (lane,) = made.lanes
    assert (made.state, made.crashes) == ("passed", 3)
    assert lane.declared == 3
    assert any("whose crash the ledger declares, not launched again" in t for t in lane.left_out)
    assert [u.state for u in made.ledger] == ["seen"]


@pytest.mark.parametrize(
    ("seen", "patterns_ran", "state"),
    [
        (Seen(), True, "not exercised"),
        (Seen(eligible_cases=1), True, "gone"),
        (Seen(eligible_cases=1), False, "not exercised"),
        (Seen(eligible_cases=20), False, "gone"),
        (Seen(eligible_cases=1, cases=1, elements=5), True, "seen"),
    ],
)
def test_when_an_entry_is_seen_gone_or_not_exercised(
    seen: Seen, *, patterns_ran: bool, state: str, declared: Callable[..., tuple[Entry, ...]]
) -> None:
    (entry,) = declared(CLEAN_ONE)
    assert ledger_use(entry, seen, patterns_ran=patterns_ran).state == state


# -- what a candidate comes to ------------------------------------------------------


def test_proofs_hold_together_or_not_at_all() -> None:
    good = {"case": "a", "candidate_ok": True, "reference_ok": True, "candidate": ["x"]}
    assert combined([good, {**good, "case": "b", "candidate": ["y"]}])["candidate"] == ["x", "y"]
    assert combined([good, {**good, "candidate_ok": False}])["candidate_ok"] is False
    assert combined([good, {**good, "candidate_ok": None}])["candidate_ok"] is True
    assert combined([{"error": "died"}])["candidate_ok"] is None
    assert combined([good, {"error": "died"}])["error"] == "died"


def test_a_kernel_that_doesn_t_show_in_a_profile_fails() -> None:
    assert state_of([], [], {"candidate_ok": False}) == (
        "failed",
        "its kernel doesn't show in a profile of a call",
    )
    assert state_of([], [], {"reference_ok": False}) == (
        "failed",
        "a fused kernel shows in a profile of the reference",
    )
    assert state_of([], [], {"candidate_ok": None}) == ("passed", "")


def test_every_lane_runs_and_is_told(pair: OpPair, bad: Bad, folder: Path) -> None:
    told: list[tuple[str, str, int, int]] = []
    profile = replace(PROFILES["dev"], draws=dict.fromkeys(("shapes", "strides", "modes"), 3))
    options = Options(pair, Target("cpu"), replace(profile, max_rows=200, drawn_rows=200), 0, LANES)
    made, _ = run_candidate(bad("clean"), options, lambda *what: told.append(what))
    assert folder.is_dir()
    assert [x.lane for x in made.lanes] == list(LANES)
    assert findings(made) == []
    last = {lane: (done, total) for _, lane, done, total in told}
    assert all(last[x.lane] == (x.cases, x.cases) for x in made.lanes)
    lanes: list[Lane] = made.lanes
    assert sum(x.cases for x in lanes) > 500
