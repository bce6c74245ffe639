"""From evidence to cells, one for each layer and device, and from cells to the verdict."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from equiv.document import counted
from equiv.gate import agree, servers
from equiv.gate.collect import LAYERS, Collected, Piece
from equiv.gate.policy import PROFILES, Policy
from equiv.gate.record import Cell, State

MOST_REASONS = 6
"""Reasons that a cell gives; the evidence has them all."""

KINDS = {"any": (), "cpu": ("cpu",), "gpu": ("gpu",), "both": ("cpu", "gpu"), "no": ()}
"""Kinds of device that a requirement names."""


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


@dataclass(frozen=True)
class Judged:
    """Cells, what keeps them from being one verdict, and the stores of the server layer."""

    cells: tuple[Cell, ...]
    problems: tuple[str, ...]
    arrays: Mapping[str, servers.Arrays]


def judge(
    found: Collected,
    policy: Policy,
    *,
    commit: str | None = None,
    absent: Mapping[str, str] | None = None,
) -> Judged:
    """Judge evidence under a policy.

    Parameters
    ----------
    commit : what the evidence's has to be, where that was asked for.
    absent : of layers that were run and left no evidence, why.

    """
    problems = [*found.problems, *agree.disagreements(found.pieces, policy, commit)]
    arrays = {p.name: servers.check(p, found.stores) for p in found.pieces if p.layer == "servers"}
    problems += [a.problem for a in arrays.values() if a.problem]
    problems += [
        f"{name} isn't what its arrays give: {'; '.join(a.differ[:3])}"
        for name, a in arrays.items()
        if a.differ
    ]
    if problems:
        return Judged((), tuple(dict.fromkeys(problems)), arrays)
    cells: list[Cell] = []
    for layer in LAYERS:
        mine = [p for p in found.pieces if p.layer == layer]
        made = [
            _cell(layer, device, [p for p in mine if p.device == device], policy, arrays)
            for device in dict.fromkeys(sorted(p.device for p in mine))
        ]
        cells += _required(layer, made, policy, (absent or {}).get(layer, ""))
    return Judged(tuple(cells), (), arrays)


def _cell(
    layer: str,
    device: str,
    pieces: Sequence[Piece],
    policy: Policy,
    arrays: Mapping[str, servers.Arrays],
) -> Cell:
    findings = Findings()
    if layer == "servers":
        for p in pieces:
            _servers(p, policy, arrays[p.name], findings)
    else:
        LOOK[layer](pieces, policy, findings)
    changed = [p.name for p in pieces if agree.dirty(p)]
    if changed:
        findings.remarks.append("made from a tree with uncommitted changes")
    state, reasons = findings.state()
    return Cell(
        layer=layer,
        device=device,
        state=state,
        required=False,
        reasons=tuple(_most(reasons)),
        remarks=tuple(dict.fromkeys(findings.remarks)),
        files=tuple(p.name for p in pieces),
    )


def _most(reasons: Sequence[str]) -> list[str]:
    distinct = list(dict.fromkeys(reasons))
    if len(distinct) <= MOST_REASONS:
        return distinct
    return [*distinct[:MOST_REASONS], f"and {len(distinct) - MOST_REASONS} more"]


def _required(layer: str, made: Sequence[Cell], policy: Policy, why: str) -> list[Cell]:
    """Mark the cells that the policy rests on, and make those that are missing."""
    asked = policy.requires(layer)
    kinds = KINDS[asked]
    passed = [c for c in made if c.state == "passed"]

    def rests(cell: Cell) -> bool:
        if asked == "any":
            return cell.state == "passed" or not passed
        return cell.device.split()[0] in kinds

    cells = [c.model_copy(update={"required": rests(c)}) for c in made]
    have = {c.device.split()[0] for c in made}
    lacking = [k for k in kinds if k not in have]
    if asked == "any" and not made:
        lacking = ["any device"]
    elif asked != "no" and "gpu" not in have and "gpu" not in lacking:
        cells.append(_absent(layer, "gpu", required=False, why=""))
    elif asked == "no" and not made:
        cells.append(_absent(layer, "any device", required=False, why=why))
    return [*cells, *[_absent(layer, k, required=True, why=why) for k in lacking]]


def _absent(layer: str, device: str, *, required: bool, why: str) -> Cell:
    reason = why or f"there is no evidence of {LAYERS[layer]} on {_article(device)}"
    return Cell(
        layer=layer, device=device, state="not covered", required=required, reasons=(reason,)
    )


def _article(device: str) -> str:
    return device if device.startswith("any") else f"a {device.upper()}"


# -- the layers ------------------------------------------------------------------------


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
            for x in c.lanes:
                findings.failed += [
                    f"{c.name}, lane {x.lane}: {f.kind}: {f.detail}" for f in x.findings
                ]
                if x.state == "passed" and p in enough:
                    covered.setdefault(c.name, set()).add(x.lane)
                findings.missing += [f"{c.name}, lane {x.lane}: {m}" for m in x.missing]
                findings.remarks += [f"{c.name}, {x.lane}: {m}" for m in x.left_out]
            if c.state == "failed" and c.reason:
                findings.failed.append(f"{c.name}: {c.reason}")
            if not c.lanes:
                findings.remarks.append(f"candidate {c.name}: {c.reason}")
            elif c.proof.get("candidate_ok") is None:
                findings.remarks.append(f"{c.name}: no kernel of a known name to look for")
            findings.failed += _ledger(c.name, c.ledger, asked.ledger)
        findings.failed += _ledger("the reference", p.made.reference_ledger, asked.ledger)
        if p.made.verdict == "FAIL" and not findings.failed:
            findings.failed.append(f"{p.name} says FAIL")
        if p.made.verdict == "NOT COVERED" and not findings.missing:
            findings.missing.append(f"{p.name} says NOT COVERED")
        if p.made.verdict == "INVALID":
            findings.invalid.append(f"{p.name} says INVALID")
    ran = {c.name for p in pieces for c in p.made.candidates if c.lanes}
    for name in dict.fromkeys([*asked.candidates, *sorted(ran)]):
        if name not in ran:
            findings.missing.append(f"candidate {name} wasn't run")
            continue
        lacking = [x for x in asked.lanes if x not in covered.get(name, set())]
        if lacking and enough:
            findings.missing.append(f"{name} didn't pass {_lanes(lacking)}")
    if not ran:
        findings.missing.append("no candidate was run")


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
    cases = 0
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
        if made.verdict == "FAIL" and not findings.failed:
            findings.failed.append(f"{p.name} says FAIL")
        cases += int(made.false_alarms.get("cases", 0))
        whole = whole or "--only" not in shlex.split(made.command)
    if not any(r.outcome == "caught" for p in pieces for r in p.made.faults):
        findings.missing.append("no planted fault was run")
    if not whole:
        findings.missing.append("only some of the planted faults were run (--only)")
    if cases < least:
        findings.missing.append(
            f"{counted(cases, 'case')} of clean kernels, and the policy asks for {least:,}"
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
            findings.invalid.append(
                f"vLLM was changed on purpose: --patch {', '.join(made.patches)}"
            )
        if not made.untouched.get("untouched"):
            problems = [str(x) for x in made.untouched.get("problems", ())]
            findings.invalid.append(f"the loop isn't vLLM's own: {'; '.join(problems[:2])}")
        if made.verdict == "FAIL" and not findings.failed:
            findings.failed.append(f"{p.name} says FAIL")
        if made.stand_ins:
            findings.remarks.append(f"stand-ins for CUDA ops: {', '.join(made.stand_ins)}")
        where = (*asked.lanes, *(asked.cpu_lanes if p.kind == "cpu" else ()))
    lacking = [x for x in where if x not in covered]
    if lacking and enough:
        findings.missing.append(f"the loop didn't pass {_lanes(lacking)}")


def _servers(piece: Piece, policy: Policy, arrays: servers.Arrays, findings: Findings) -> None:
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
            f"judged with a margin of {margin:.3g} nats, and the policy's is {asked.margin_nats:.3g}"
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
