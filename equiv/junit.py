"""JUnit XML of a run, for CI systems: a test case for each candidate and lane, or planted fault.

The form is the one that Jenkins, GitLab and GitHub's reporters read: ``testsuites``,
``testsuite``, ``testcase`` with at most one of ``failure``, ``error`` and ``skipped``. It agrees
with the exit code: where that isn't 0, at least one test case fails.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from xml.etree import ElementTree as ET

from equiv.errors import ExitCode
from equiv.result import FINDINGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equiv.evidence import (
        Candidate,
        EquivEvidence,
        FaultsEvidence,
        Finding,
        Lane,
        LedgerUse,
        LoopEvidence,
    )

_ILLEGAL = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Test:
    """One test case; ``kind`` is ``""`` or the name of the element that says why it didn't pass."""

    suite: str
    name: str
    seconds: float = 0.0
    kind: str = ""
    type: str = ""
    message: str = ""
    text: str = ""


def of_equiv(made: EquivEvidence) -> str:
    """Return a run's test cases: each candidate and lane, and what was declared and proved.

    A lane that isn't covered is an error where the verdict is NOT COVERED, and skipped elsewhere;
    a candidate that can't run here likewise, unless a lane explains that verdict already.
    """
    tests = []
    required = made.exit_code == ExitCode.INVALID
    lanes_explain = any(x.state == "not covered" for c in made.candidates for x in c.lanes)
    for c in made.candidates:
        suite = f"{made.pair}.{c.name}"
        if not c.lanes:
            kind = "error" if required and not lanes_explain else "skipped"
            tests.append(Test(suite, "candidate", 0.0, kind, "not covered", c.reason))
            continue
        tests += [_lane(suite, x, required=required) for x in c.lanes]
        tests.append(_declared(suite, c))
    if made.reference_ledger:
        gone = _gone(made.reference_ledger)
        kind = "failure" if gone else ""
        tests.append(Test(f"{made.pair}.stock", "ledger", 0.0, kind, "gone", "; ".join(gone)))
    return xml(f"bytegate equiv {made.pair} on {made.device}", made, tests)


def of_loop(made: LoopEvidence) -> str:
    """Return a loop run's test cases: each lane, and whether the loop was vLLM's own."""
    required = made.exit_code == ExitCode.INVALID
    tests = [_lane("loop", x, required=required) for x in made.lanes]
    problems = made.untouched.get("problems", [])
    kind = "failure" if problems and not made.patches else ""
    text = "\n".join(problems)
    tests.append(Test("loop", "untouched", 0.0, kind, "changed", f"{len(problems)} changes", text))
    return xml(f"bytegate loop on {made.device}", made, tests)


def of_faults(made: FaultsEvidence) -> str:
    """Return a fault run's test cases: each planted fault, and each clean kernel."""
    suite = f"{made.pair}.faults"
    tests = []
    for r in made.faults:
        kind = {"caught": "", "not_covered": "skipped"}.get(r.outcome, "failure")
        tests.append(
            Test(suite, f"{r.id} {r.title}", r.seconds, kind, r.outcome, r.detail, r.smallest)
        )
    alarms: dict[str, list[dict[str, Any]]] = {}
    for a in made.false_alarms.get("alarms", ()):
        alarms.setdefault(str(a.get("candidate", "?")), []).append(a)
    for name in dict.fromkeys([*made.false_alarms.get("candidates", ()), *alarms]):
        found = alarms.get(name, [])
        lines = [f"{a.get('kind')}: {a.get('case')}\n{a.get('detail')}" for a in found]
        kind = "failure" if found else ""
        message = f"{len(found)} false alarms" if found else ""
        tests.append(
            Test(f"{made.pair}.clean", name, 0.0, kind, "false alarm", message, "\n".join(lines))
        )
    return xml(f"bytegate equiv faults {made.pair} on {made.device}", made, tests)


def _lane(suite: str, lane: Lane, *, required: bool) -> Test:
    if lane.state == "failed":
        findings = lane.findings
        first = f"{findings[0].kind}: {findings[0].detail}" if findings else "; ".join(lane.missing)
        kind = findings[0].kind if findings else lane.state
        text = "\n\n".join(_finding(f) for f in findings)
        return Test(suite, lane.lane, lane.seconds, "failure", kind, first, text)
    if lane.state == "not covered":
        message = "NOT COVERED: " + ("; ".join(lane.missing) or "no case ran")
        kind = "error" if required else "skipped"
        return Test(suite, lane.lane, lane.seconds, kind, "not covered", message)
    return Test(suite, lane.lane, lane.seconds)


def _finding(f: Finding) -> str:
    lines = [
        f"lane {f.lane}: {f.kind}, {FINDINGS.get(f.kind, f.kind)}",
        f"case: {f.case}",
        f.detail,
        f.voices,
        f"raised in {f.raised_in}" if f.raised_in else "",
        f"first met after {f.after_cases:,} cases, in {f.occurrences:,} of the lane: {f.found}",
        "repeat it with:",
        f.repro,
    ]
    return "\n".join(x for x in lines if x)


def _gone(uses: Sequence[LedgerUse]) -> list[str]:
    return [
        f"declared divergence {u.id} is gone: not met in {u.eligible_cases:,} eligible cases"
        for u in uses
        if u.state == "gone"
    ]


def _declared(suite: str, c: Candidate) -> Test:
    """Whether the candidate failed for a reason that no lane has: the ledger, or the proof."""
    failed = c.state == "failed" and (bool(c.reason) or all(x.state != "failed" for x in c.lanes))
    message = c.reason or "failed"
    text = "\n".join(_gone(c.ledger))
    return Test(
        suite, "ledger and proof", 0.0, "failure" if failed else "", "ledger", message, text
    )


def legal(text: str) -> str:
    r"""Write characters that XML can't hold as ``\x1b`` or ``\ud800``."""

    def written(match: re.Match[str]) -> str:
        code = ord(match.group())
        return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"  # noqa: PLR2004 - two digits

    return _ILLEGAL.sub(written, text)


def _legal(words: dict[str, str]) -> dict[str, str]:
    return {name: legal(value) for name, value in words.items()}


class Told(Protocol):
    """What any run's verdict has."""

    @property
    def verdict(self) -> str: ...  # noqa: D102 - described by the protocol
    @property
    def exit_code(self) -> int: ...  # noqa: D102
    @property
    def started(self) -> str: ...  # noqa: D102
    @property
    def seconds(self) -> float: ...  # noqa: D102


def xml(title: str, made: Told, tests: list[Test]) -> str:
    """Return test cases as JUnit XML; where the exit code isn't 0 at least one of them fails."""
    if made.exit_code != ExitCode.PASS and not any(t.kind in {"failure", "error"} for t in tests):
        message = f"{made.verdict}, exit code {made.exit_code}"
        tests = [
            *tests,
            Test(
                f"{getattr(made, 'pair', 'loop')}.verdict",
                "verdict",
                0.0,
                "error",
                made.verdict,
                message,
            ),
        ]
    whole = {"name": title, "time": f"{made.seconds:.3f}"}
    root = ET.Element("testsuites", _legal({**whole, **_counts(tests)}))
    for suite in dict.fromkeys(t.suite for t in tests):
        own = [t for t in tests if t.suite == suite]
        seconds = f"{sum(t.seconds for t in own):.3f}"
        head = {"name": suite, "timestamp": made.started, "time": seconds}
        element = ET.SubElement(root, "testsuite", _legal({**head, **_counts(own)}))
        properties = ET.SubElement(element, "properties")
        for name in ("profile", "device", "seed", "command", "verdict"):
            if not hasattr(made, name):  # a gate's verdict has no device of its own
                continue
            words = {"name": name, "value": str(getattr(made, name))}
            ET.SubElement(properties, "property", _legal(words))
        for t in own:
            words = {"classname": suite, "name": t.name, "time": f"{t.seconds:.3f}"}
            case = ET.SubElement(element, "testcase", _legal(words))
            if t.kind:
                words = {"message": " ".join(t.message.split())}
                words |= {} if t.kind == "skipped" else {"type": t.type}
                ET.SubElement(case, t.kind, _legal(words)).text = legal(t.text) or None
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _counts(tests: Sequence[Test]) -> dict[str, str]:
    kinds = [t.kind for t in tests]
    return {
        "tests": str(len(tests)),
        "failures": str(kinds.count("failure")),
        "errors": str(kinds.count("error")),
        "skipped": str(kinds.count("skipped")),
    }
