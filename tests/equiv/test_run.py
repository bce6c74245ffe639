"""A run from its request to its verdict and its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from equiv import evidence, run
from equiv.errors import ExitCode, UsageError
from equiv.evidence import Candidate, Lane, LedgerUse
from equiv.ledger import Seen
from equiv.profiles import PROFILES, default_name, seed_of
from equiv.run import Request, check_lanes, find_device, judge, merge, prepare

Bad = Callable[[str], str]


def lane(name: str = "shapes", state: str = "passed", **changes: Any) -> Lane:
    counts = dict.fromkeys(
        ("enumerated", "drawn", "equal", "refused", "declared", "undefined", "oracle_checked"), 0
    )
    made = Lane(
        lane=name,
        state=state,
        cases=1,
        **counts,
        guarded=0,
        bytes_compared=0,
        seconds=0.0,
        kinds={},
        least={},
        ranges={},
        median_rows=0,
        layouts_differ={},
        missing=[],
        left_out=[],
        bound=None,
        findings=[],
        samples=[],
    )
    return replace(made, **changes)


def candidate(name: str, state: str, *lanes: Lane, reason: str = "") -> Candidate:
    return Candidate(name, state, reason, "dispatch", {}, list(lanes), [], 0, 0)


PASSED = candidate("a", "passed", lane())
FAILED = candidate("b", "failed", lane(state="failed"))
SHORT = candidate("c", "not covered", lane(state="not covered"), reason="lane shapes: few")
ABSENT = candidate("d", "not covered", reason="no GPU")
GONE = LedgerUse("D9", "gone", 0, 5, 0, {}, "because", "here")
SEEN = replace(GONE, state="seen", cases=5)

VERDICTS: list[tuple[list[Candidate], tuple[str, ...], list[LedgerUse], str, int]] = [
    ([PASSED], (), [], "PASS", 0),
    ([PASSED, ABSENT], (), [SEEN], "PASS", 0),
    ([PASSED, ABSENT], ("d",), [], "NOT COVERED", 4),
    ([PASSED, SHORT], (), [], "NOT COVERED", 4),
    ([ABSENT], (), [], "NOT COVERED", 4),
    ([], (), [], "NOT COVERED", 4),
    ([PASSED, FAILED], (), [], "FAIL", 1),
    ([FAILED, SHORT, ABSENT], ("d",), [], "FAIL", 1),
    ([PASSED], (), [GONE], "FAIL", 1),
]


@pytest.mark.parametrize(("found", "asked", "reference", "verdict", "code"), VERDICTS)
def test_the_verdict_of_candidates(
    found: list[Candidate],
    asked: tuple[str, ...],
    reference: list[LedgerUse],
    verdict: str,
    code: int,
) -> None:
    assert judge(found, asked, reference) == (verdict, ExitCode(code))


def test_devices_are_found_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert find_device(None) == find_device("cpu") == "cpu"
    with pytest.raises(UsageError, match="sees 0 GPUs; run on a GPU host, or leave --device out"):
        find_device("cuda")
    for name in ("tpu", "cuda:x", "cuda:-1", ""):
        with pytest.raises(UsageError, match="unknown device"):
            find_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (find_device(None), find_device("cuda"), find_device("cuda:1")) == (
        "cuda:0",
        "cuda:0",
        "cuda:1",
    )
    with pytest.raises(UsageError, match="sees 2 GPUs"):
        find_device("cuda:2")


def test_lanes_are_those_asked_for_once() -> None:
    assert check_lanes(()) == run.LANES
    assert check_lanes(("modes", "shapes", "modes")) == ("modes", "shapes")
    with pytest.raises(UsageError, match="unknown lane 'fast': expected one of patterns, shapes"):
        check_lanes(("shapes", "fast"))


def test_seeds_and_profiles_have_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seed_of(PROFILES["dev"], None) == seed_of(PROFILES["gate"], None) == 0
    assert seed_of(PROFILES["nightly"], 7) == 7
    assert seed_of(PROFILES["nightly"], None) != seed_of(PROFILES["nightly"], None)
    monkeypatch.setenv("CI", "true")
    assert default_name() == "gate"
    monkeypatch.delenv("CI")
    assert default_name() == "dev"


def test_nothing_is_made_before_everything_is_checked(folder: Path) -> None:
    for wrong in (
        {"pair": "nope"},
        {"candidates": ("nope",)},
        {"lanes": ("nope",)},
        {"profile": "nope"},
        {"device": "nope"},
        {"ledger": Path("nope.toml")},
        {"library": "nope.so"},
        {"candidates": ("vllm",), "device": "cpu"},
    ):
        with pytest.raises(UsageError):
            prepare(Request(out=folder / "out", **wrong))  # type: ignore[arg-type]
    assert list(folder.iterdir()) == []


def test_a_ledger_s_counts_of_several_candidates_are_one() -> None:
    into = Seen(elements=1, cases=2, eligible_cases=3, patterns={"bf16 k": {1}})
    merge(into, Seen(10, 20, 30, {"bf16 k": {1, 2}, "fp16 v": {3}}))
    assert into == Seen(11, 22, 33, {"bf16 k": {1, 2}, "fp16 v": {3}})


def test_what_isn_t_covered_is_named_once(folder: Path) -> None:
    _, options = prepare(Request(out=folder, lanes=("shapes", "modes"), device="cpu"))
    found = [
        candidate("a", "passed", lane(missing=["empty: 0 of 1"], left_out=["large ones"])),
        candidate("a", "passed", lane(missing=["empty: 0 of 1"])),
        ABSENT,
    ]
    lines = run.not_covered(found, options)
    assert lines[0].startswith("no GPU: the pair on CUDA, and the modes stream, graph, ")
    assert lines[1:] == [
        "a, shapes: empty: 0 of 1",
        "a, shapes: large ones",
        "candidate d: no GPU",
        "lanes not asked for: patterns, strides, alignment, sizes",
    ]


def test_the_distribution_of_draws_is_told(folder: Path) -> None:
    _, options = prepare(Request(out=folder, seed=12, profile="gate", device="cpu"))
    text = run.distribution(options)
    assert "at seed 12: T 0..66048, H 1..128" in text
    assert "dtype in {bf16, fp16}; fp8" in text.replace(", fp8 in", "; fp8 in")
    assert "up to 68,000 rows" in text


# -- whole runs ---------------------------------------------------------------------


@pytest.fixture
def finished(folder: Path) -> Callable[..., evidence.EquivEvidence]:
    def go(*names: str, **changes: Any) -> evidence.EquivEvidence:
        fields = {"lanes": ("alignment",), "profile": "dev", "device": "cpu"} | changes
        return run.run(Request(candidates=names, out=folder / "out", **fields))  # type: ignore[arg-type]

    return go


def test_a_run_leaves_what_it_returns(
    finished: Callable[..., evidence.EquivEvidence], bad: Bad, folder: Path
) -> None:
    made = finished(bad("clean"), command="bytegate equiv and so on", seed=3)
    assert (made.verdict, made.exit_code) == ("PASS", 0)
    assert sorted(p.name for p in (folder / "out").iterdir()) == ["equiv.json", "equiv.xml"]
    read = evidence.read(folder / "out" / "equiv.json")
    assert replace(read, validated=False, content_sha256="") == made
    assert (read.command, read.seed, read.lanes) == ("bytegate equiv and so on", 3, ["alignment"])
    assert "<testsuites" in (folder / "out" / "equiv.xml").read_text(encoding="utf-8")


def test_several_candidates_are_judged_together(
    finished: Callable[..., evidence.EquivEvidence], bad: Bad
) -> None:
    made = finished(bad("clean"), bad("divergence"))
    assert (made.verdict, made.exit_code) == ("FAIL", 1)
    assert [(c.name.partition(":")[2], c.state) for c in made.candidates] == [
        ("clean", "passed"),
        ("divergence", "failed"),
    ]


def test_a_candidate_that_doesn_t_load_is_told_before_others_run(
    finished: Callable[..., evidence.EquivEvidence],
    bad: Bad,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(run.campaign, "run_candidate", lambda name, *_: ran.append(name))
    with pytest.raises(UsageError, match=r"there is no file absent\.py"):
        finished(bad("clean"), "absent.py:kernel")
    assert ran == []
    assert list((folder / "out").iterdir()) == []


def test_a_reference_that_departs_as_declared_is_counted_and_gone_if_not(
    finished: Callable[..., evidence.EquivEvidence], bad: Bad, folder: Path
) -> None:
    path = folder / "mine.toml"
    path.write_text(
        """
[[divergence]]
id = "S1"
pair = "kvpack"
candidates = ["stock"]
devices = ["cpu"]
against = "oracle"
kind = "bytes"
element = "nan"
expected = ["7f", "ff"]
actual = ["00"]
reason = "it never was"
reference = "nowhere"
""",
        encoding="utf-8",
    )
    made = finished(bad("clean"), ledger=path)
    assert [(u.id, u.state) for u in made.reference_ledger] == [("S1", "gone")]
    assert (made.verdict, made.exit_code) == ("FAIL", 1)
    assert made.candidates[0].state == "passed"
    told = json.loads((folder / "out" / "equiv.json").read_text(encoding="utf-8"))
    assert told["reference_ledger"][0]["state"] == "gone"
