"""What each layer's evidence says under a policy: what failed, what is invalid, what is missing."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from equiv.document import counted
from equiv.gate import servers
from equiv.gate.agree import without_folder
from equiv.gate.collect import Piece
from equiv.gate.policy import PROFILES, Policy
from equiv.gate.record import State


@dataclass
class Findings:
    """What was found amiss in the evidence of one cell, by how much it says."""

    failed: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    inconclusive: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def state(self) -> tuple[State, list[str]]:
        """Return the state, and the reasons for it."""
        for state, reasons in (
            ("failed", self.failed),
            ("invalid", self.invalid),
            ("inconclusive", self.inconclusive),
            ("not covered", self.missing),
        ):
            if reasons:
                return state, reasons  # type: ignore[return-value]
        return "passed", []


def _profile(pieces: Iterable[Piece], least: str, findings: Findings) -> list[Piece]:
    """Return what was run with at least a profile; say so where nothing was."""
    pieces = list(pieces)
    enough = [p for p in pieces if PROFILES.index(p.made.profile) >= PROFILES.index(least)]
    if not enough:
        findings.missing.append(
            f"profile {', '.join(sorted({p.made.profile for p in pieces}))}, and the policy asks "
            f"for {least}"
        )
    return enough


def _kernel(pieces: Sequence[Piece], policy: Policy, findings: Findings) -> None:
    asked = policy.kernel
    covered: dict[str, set[str]] = {}
    enough = _profile(pieces, asked.profile, findings)
    for p in pieces:
        for c in p.made.candidates:
            _candidate(c, asked.ledger, findings)
            if c.lanes:
                lanes = covered.setdefault(without_folder(c.name), set())
                lanes.update(x.lane for x in c.lanes if x.state == "passed" and p in enough)
        findings.failed += _ledger("the reference", p.made.reference_ledger, asked.ledger)
        _word(p, findings)
    wanted = map(without_folder, asked.candidates)
    for name in dict.fromkeys([*wanted, *sorted(covered)]):
        if name not in covered:
            findings.missing.append(f"candidate {name} wasn't run")
            continue
        lacking = [x for x in asked.lanes if x not in covered[name]]
        if lacking and enough:
            findings.missing.append(f"{name} didn't pass {_lanes(lacking)}")
    if not covered:
        findings.missing.append("no candidate was run")


def _candidate(c: Any, allowed: Sequence[str], findings: Findings) -> None:
    for x in c.lanes:
        findings.failed += [f"{c.name}, lane {x.lane}: {f.kind}: {f.detail}" for f in x.findings]
        findings.missing += [f"{c.name}, lane {x.lane}: {m}" for m in x.missing]
        findings.remarks += [f"{c.name}, {x.lane}: {m}" for m in x.left_out]
    if c.state == "failed" and c.reason:
        findings.failed.append(f"{c.name}: {c.reason}")
    if not c.lanes:
        findings.remarks.append(f"candidate {c.name}: {c.reason}")
    elif c.proof.get("candidate_ok") is None:
        findings.remarks.append(f"{c.name}: no kernel of a known name to look for")
    findings.failed += _ledger(c.name, c.ledger, allowed)


def _word(piece: Piece, findings: Findings) -> None:
    """Take a file's own word where nothing in it says as much."""
    word = piece.made.verdict
    by_word = {
        "FAIL": findings.failed,
        "INVALID": findings.invalid,
        "NOT COVERED": findings.missing,
    }
    reasons = by_word.get(word)
    if reasons is not None and not reasons:
        reasons.append(f"{piece.name} says {word}")


def _lanes(names: Sequence[str]) -> str:
    return f"lane {names[0]}" if len(names) == 1 else f"lanes {', '.join(names)}"


def _ledger(who: str, uses: Iterable[object], allowed: Sequence[str]) -> list[str]:
    return [
        f"{who}: the declared difference {u.id} was met, which the policy doesn't accept"  # type: ignore[attr-defined]
        for u in uses
        if u.state == "seen" and u.id not in allowed  # type: ignore[attr-defined]
    ]


def _faults(pieces: Sequence[Piece], policy: Policy, findings: Findings) -> None:
    least = policy.faults.clean_cases
    cases: dict[int, int] = {}
    whole = False
    for p in pieces:
        made = p.made
        for r in made.faults:
            if r.outcome == "missed":
                findings.failed.append(f"planted fault {r.id} ({r.title}) was missed: {r.detail}")
            if r.outcome == "not_covered":
                findings.remarks.append(f"fault {r.id}: {r.detail}")
        findings.failed += [
            f"false alarm on {a.get('candidate')}: {a.get('kind')} on {a.get('case')}"
            for a in made.false_alarms.get("alarms", ())
        ]
        _word(p, findings)
        ran = int(made.false_alarms.get("cases", 0))
        cases[made.seed] = max(ran, cases.get(made.seed, 0))  # a seed's cases are the same cases
        whole = whole or "--only" not in shlex.split(made.command)
    if not any(r.outcome == "caught" for p in pieces for r in p.made.faults):
        findings.missing.append("no planted fault was run")
    if not whole:
        findings.missing.append("only some of the planted faults were run (--only)")
    if (ran := sum(cases.values())) < least:
        findings.missing.append(
            f"{counted(ran, 'case')} of clean kernels, and the policy asks for {least:,}"
        )


def _loop(pieces: Sequence[Piece], policy: Policy, findings: Findings) -> None:
    asked = policy.loop
    enough = _profile(pieces, asked.profile, findings)
    covered: set[str] = set()
    for p in pieces:
        made = p.made
        for x in made.lanes:
            findings.failed += [f"lane {x.lane}: {f.kind}: {f.detail}" for f in x.findings]
            findings.missing += [f"lane {x.lane}: {m}" for m in x.missing]
            findings.remarks += [f"{x.lane}: {m}" for m in x.left_out]
            if x.state == "passed" and p in enough:
                covered.add(x.lane)
        if made.patches:
            findings.invalid.append(f"vLLM was changed by --patch {', '.join(made.patches)}")
        if not made.untouched.get("untouched"):
            problems = [str(x) for x in made.untouched.get("problems", ())]
            findings.invalid.append(f"the loop isn't vLLM's own: {'; '.join(problems[:2])}")
        _word(p, findings)
        if made.stand_ins:
            findings.remarks.append("stand-ins for CUDA ops: " + ", ".join(made.stand_ins))
        where = (*asked.lanes, *(asked.cpu_lanes if p.kind == "cpu" else ()))
    lacking = [x for x in where if x not in covered]
    if lacking and enough:
        findings.missing.append(f"the loop didn't pass {_lanes(lacking)}")


def look_at_servers(
    piece: Piece, policy: Policy, arrays: servers.Arrays, findings: Findings
) -> None:
    """Hold one comparison of two servers against the policy."""
    asked, made = policy.servers, piece.made
    reasons = [f"{made.verdict}: {r}" for r in made.decided.reasons] or [made.verdict]
    if made.verdict == "INVALID":
        findings.invalid += reasons
        return
    if made.claim != asked.claim:
        findings.missing.append(
            f"judged under the claim {made.claim!r}, and the policy's is {asked.claim!r}: run "
            f"bytegate ppl compare --claim {asked.claim} on its arrays"
        )
    by_code = {1: findings.failed, 3: findings.inconclusive}
    by_code.get(made.exit_code, []).extend(reasons)
    margin = made.statistics.exposed.margin if made.statistics else None
    if margin is not None and margin > asked.margin_nats:
        findings.missing.append(
            f"judged by a margin of {margin:.3g} nats, and the policy's is {asked.margin_nats:.3g}"
        )
    if len(made.texts) < asked.texts:
        findings.missing.append(f"{counted(len(made.texts), 'text')} of {asked.texts}")
    exposed = made.identity.exposed_tokens if made.identity else 0
    if exposed < asked.exposed_tokens:
        findings.missing.append(
            f"{counted(exposed, 'exposed token')}, and the policy asks for {asked.exposed_tokens:,}"
        )
    for line in made.not_covered:
        needed = any(line.startswith(name) for name in asked.observed)
        (findings.missing if needed else findings.remarks).append(line)
    findings.remarks += made.warnings
    if not arrays.folders:
        text = "its arrays aren't here, so its figures couldn't be derived again"
        (findings.missing if asked.arrays else findings.remarks).append(text)


LOOK: dict[str, Callable[[Sequence[Piece], Policy, Findings], None]] = {
    "kernel": _kernel,
    "kernel_faults": _faults,
    "loop": _loop,
    "loop_faults": _faults,
}
"""What holds a layer's files, of one device, against the policy."""
