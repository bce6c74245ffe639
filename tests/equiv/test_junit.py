"""JUnit XML: well-formed whatever was found, and in agreement with the exit code."""

from __future__ import annotations

import dataclasses
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equiv import junit
from equiv.evidence import (
    Candidate,
    EquivEvidence,
    FaultRow,
    FaultsEvidence,
    Finding,
    Lane,
    LedgerUse,
)

CASE = "kvpack/inductor/cpu/shapes/T=1,H=1/-/zero.0/eager/kv_nope.0:1"


def finding(**changes: Any) -> Finding:
    base = Finding(
        "shapes", "divergence", CASE, CASE, 12, "k: 1 bytes", "voice", "", "run it", 3, 1
    )
    return dataclasses.replace(base, **changes)


def lane(name: str = "shapes", state: str = "passed", **changes: Any) -> Lane:
    base = Lane(
        *(name, state, 20, 8, 12, 20, 0, 0, 0, 20, 20, 1 << 20, 1.5),
        kinds={},
        least={},
        ranges={},
        median_rows=400,
        layouts_differ={},
        missing=[],
        left_out=[],
        bound=None,
        findings=[],
        samples=[],
    )
    return dataclasses.replace(base, **changes)


def candidate(name: str, state: str, *lanes: Lane, reason: str = "", **changes: Any) -> Candidate:
    base = Candidate(name, state, reason, "out", {}, list(lanes), [], 0, 0)
    return dataclasses.replace(base, **changes)


def made(verdict: str, code: int, *candidates: Candidate, **changes: Any) -> EquivEvidence:
    base = EquivEvidence(
        *(verdict, code, "kvpack", "dev", "cpu", 7, ["shapes"], list(candidates), [], []),
        distribution="draws",
        environment={},
        started="2026-11-30T03:45:30+00:00",
        seconds=12.5,
        command="bytegate equiv --seed 7",
    )
    return dataclasses.replace(base, **changes)


def faults(
    code: int, *rows: FaultRow, alarms: list[dict[str, str]] | None = None
) -> FaultsEvidence:
    return FaultsEvidence(
        *("PASS" if not code else "FAIL", code, "kvpack", "gate", "cpu", 0, list(rows)),
        false_alarms={"cases": 9, "alarms": alarms or [], "candidates": {"stock": 5, "twin": 4}},
        environment={},
        started="2026-11-30T03:45:30+00:00",
        seconds=1.0,
        command="bytegate equiv faults",
    )


def row(outcome: str) -> FaultRow:
    return FaultRow("K01", "halves", outcome, "shapes", 3, CASE, "", "what", "clean", 0.5, "a.b:c")


def results_of(text: str) -> dict[tuple[str, str], ET.Element | None]:
    """What each test case came to: by suite and name, its failure, error or skip."""
    root = ET.fromstring(text)  # noqa: S314 - it is our own
    assert root.tag == "testsuites"
    found: dict[tuple[str, str], ET.Element | None] = {}
    for suite in root:
        for case in suite.iter("testcase"):
            assert case.get("classname") == suite.get("name")
            key = (case.get("classname", ""), case.get("name", ""))
            assert key not in found
            found[key] = next(iter(case), None)
            assert len(case) <= 1
        check_counts(suite, list(suite.iter("testcase")))
    check_counts(root, list(root.iter("testcase")))
    return found


def check_counts(element: ET.Element, cases: list[ET.Element]) -> None:
    kinds = [child.tag for case in cases for child in case]
    assert element.get("tests") == str(len(cases))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert element.get(name) == str(kinds.count(tag))


def kind(element: ET.Element | None) -> str:
    return "passed" if element is None else element.tag


# -- a run --------------------------------------------------------------------------


def test_one_test_case_for_each_candidate_and_lane() -> None:
    a = candidate("inductor", "passed", lane("shapes"), lane("modes", seconds=2.25))
    b = candidate("triton", "passed", lane("shapes"))
    text = junit.of_equiv(made("PASS", 0, a, b))
    found = results_of(text)
    assert set(found) == {
        ("kvpack.inductor", "shapes"),
        ("kvpack.inductor", "modes"),
        ("kvpack.inductor", "ledger and proof"),
        ("kvpack.triton", "shapes"),
        ("kvpack.triton", "ledger and proof"),
    }
    assert set(map(kind, found.values())) == {"passed"}
    root = ET.fromstring(text)  # noqa: S314 - it is our own
    assert root[0].get("time") == "3.750"
    assert root[0].get("timestamp") == "2026-11-30T03:45:30+00:00"
    properties = {p.get("name"): p.get("value") for p in root[0].iter("property")}
    assert properties["seed"] == "7"
    assert properties["command"] == "bytegate equiv --seed 7"


def test_a_failed_lane_tells_every_finding() -> None:
    two = [finding(), finding(kind="raised", detail="ValueError: no", raised_in="a:b", voices="")]
    c = candidate("inductor", "failed", lane(state="failed", findings=two))
    failure = results_of(junit.of_equiv(made("FAIL", 1, c)))["kvpack.inductor", "shapes"]
    assert failure is not None
    assert failure.tag == "failure"
    assert failure.get("type") == "divergence"
    assert failure.get("message") == "divergence: k: 1 bytes"
    lines = (failure.text or "").splitlines()
    assert f"case: {CASE}" in lines
    assert "voice" in lines
    assert lines.count("run it") == 2
    assert "ValueError: no" in lines
    assert "raised in a:b" in lines


def test_what_a_lane_lacks_is_skipped_unless_it_decides() -> None:
    lacking = lane(state="not covered", missing=["empty: 0 of 1"])
    c = candidate("inductor", "not covered", lacking)
    key = ("kvpack.inductor", "shapes")
    decides = results_of(junit.of_equiv(made("NOT COVERED", 4, c)))[key]
    beside = results_of(junit.of_equiv(made("FAIL", 1, c)))[key]
    for found, tag in ((decides, "error"), (beside, "skipped")):
        assert found is not None
        assert found.tag == tag
        assert found.get("message") == "NOT COVERED: empty: 0 of 1"


def test_a_candidate_that_cannot_run_is_skipped_with_the_reason() -> None:
    absent = candidate("vllm", "not covered", reason="runs on cuda alone")
    for others in ([], [candidate("inductor", "passed", lane())]):
        found = results_of(junit.of_equiv(made("PASS", 0, absent, *others)))[
            "kvpack.vllm", "candidate"
        ]
        assert found is not None
        assert found.tag == "skipped"
        assert found.get("message") == "runs on cuda alone"


def test_a_candidate_that_decides_by_its_absence_is_an_error() -> None:
    absent = candidate("vllm", "not covered", reason="runs on cuda alone")
    found = results_of(junit.of_equiv(made("NOT COVERED", 4, absent)))["kvpack.vllm", "candidate"]
    assert kind(found) == "error"


def test_a_failure_that_no_lane_has_is_told() -> None:
    gone = LedgerUse("D1", "gone", 0, 25, 0, {}, "why", "where")
    c = candidate(
        "triton", "failed", lane(), reason="declared divergence D1 is gone", ledger=[gone]
    )
    found = results_of(junit.of_equiv(made("FAIL", 1, c)))
    assert kind(found["kvpack.triton", "shapes"]) == "passed"
    failure = found["kvpack.triton", "ledger and proof"]
    assert failure is not None
    assert failure.get("message") == "declared divergence D1 is gone"
    assert "not met in 25 eligible cases" in (failure.text or "")


def test_a_divergence_of_the_reference_that_is_gone_is_told() -> None:
    gone = LedgerUse("D1-stock", "gone", 0, 25, 0, {}, "why", "where")
    seen = dataclasses.replace(gone, state="seen")
    c = candidate("inductor", "passed", lane())
    key = ("kvpack.stock", "ledger")
    assert (
        kind(results_of(junit.of_equiv(made("FAIL", 1, c, reference_ledger=[gone])))[key])
        == "failure"
    )
    assert (
        kind(results_of(junit.of_equiv(made("PASS", 0, c, reference_ledger=[seen])))[key])
        == "passed"
    )


states = st.sampled_from(["passed", "failed", "not covered"])


@given(
    st.lists(st.tuples(states, st.lists(states, max_size=2)), max_size=3),
    st.sampled_from([("PASS", 0), ("FAIL", 1), ("INCONCLUSIVE", 3), ("NOT COVERED", 4)]),
)
def test_a_bad_exit_code_is_never_green(
    candidates: list[tuple[str, list[str]]], verdict: tuple[str, int]
) -> None:
    parts = [
        candidate(f"c{i}", state, *(lane(f"l{j}", s) for j, s in enumerate(lanes)), reason="r")
        for i, (state, lanes) in enumerate(candidates)
    ]
    found = results_of(junit.of_equiv(made(*verdict, *parts)))
    assert verdict[1] == 0 or {"failure", "error"} & set(map(kind, found.values()))


@given(st.text(st.characters(), max_size=30), st.text(max_size=9))
def test_any_text_makes_well_formed_xml(detail: str, name: str) -> None:
    c = candidate(name, "failed", lane(state="failed", findings=[finding(detail=detail)]))
    text = junit.of_equiv(made("FAIL", 1, c, command=detail))
    text.encode()
    results_of(text)


@pytest.mark.parametrize(
    ("raw", "legal"),
    [("\x1b[31mred", "\\x1b[31mred"), ("\0", "\\x00"), ("\ud800", "\\ud800"), ("a\tb\n", "a\tb\n")],
)
def test_what_xml_cannot_hold_is_written_out(raw: str, legal: str) -> None:
    assert junit.legal(raw) == legal


# -- planted faults -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "code", "tag"),
    [("caught", 0, "passed"), ("missed", 1, "failure"), ("not_covered", 0, "skipped")],
)
def test_a_fault_is_a_test_case(outcome: str, code: int, tag: str) -> None:
    found = results_of(junit.of_faults(faults(code, row(outcome))))
    element = found["kvpack.faults", "K01 halves"]
    assert kind(element) == tag
    assert element is None or element.get("message") == "what"


def test_a_false_alarm_fails_its_clean_kernel() -> None:
    alarm = {"candidate": "twin", "case": CASE, "kind": "divergence", "detail": "k: 1 bytes"}
    found = results_of(junit.of_faults(faults(1, row("caught"), alarms=[alarm, alarm])))
    assert kind(found["kvpack.clean", "stock"]) == "passed"
    failure = found["kvpack.clean", "twin"]
    assert failure is not None
    assert failure.get("message") == "2 false alarms"
    assert CASE in (failure.text or "")


def test_no_fault_caught_is_never_green() -> None:
    nothing = dataclasses.replace(faults(4, row("not_covered")), verdict="NOT COVERED")
    found = results_of(junit.of_faults(nothing))
    assert kind(found["kvpack.verdict", "verdict"]) == "error"
