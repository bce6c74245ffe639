"""Run every lane of one candidate, prove that it ran, and hold it against the ledger."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from equiv import evidence, partial
from equiv.lane_run import LaneRun, Options, silent
from equiv.lanes import Lanes
from equiv.ledger import Seen, applying
from equiv.pool import Unavailable, Worker
from equiv.stopping import Stopped
from equiv.worker import spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from equiv.ledger import Entry
    from equiv.pairs import OpPair

__all__ = ["Options", "ledger_use", "run_candidate", "silent"]

GONE_AFTER = 20
"""Eligible cases after which a declared divergence that was never met is gone."""


def ledger_use(
    entry: Entry, seen: Seen, *, patterns_ran: bool, whole: bool = True
) -> evidence.LedgerUse:
    """Say whether a declared divergence was seen, is gone, or wasn't exercised.

    Nothing is gone before the run is ``whole``: the cases that meet it may be still to come.
    """
    enough = 1 if entry.kind != "bytes" or patterns_ran else GONE_AFTER
    state = "not exercised"
    if seen.cases:
        state = "seen"
    elif whole and seen.eligible_cases >= enough:
        state = "gone"
    return evidence.LedgerUse(
        id=entry.id,
        state=state,
        cases=seen.cases,
        eligible_cases=seen.eligible_cases,
        elements=seen.elements,
        patterns={k: len(v) for k, v in sorted(seen.patterns.items())},
        reason=entry.reason,
        reference=entry.reference,
    )


def run_candidate(
    name: str,
    options: Options,
    progress: Callable[[str, str, int, int], None] = silent,
    keep: partial.Keep = partial.forget,
) -> tuple[evidence.Candidate, dict[str, Seen]]:
    """Run every lane for one candidate.

    Parameters
    ----------
    keep : is given what there is so far, when the candidate is loaded and whenever a lane ends or
        finds something.

    Returns
    -------
    Its evidence, and the ledger entries met, those of the reference against the oracle included.
    Where ``options.stop`` was set meanwhile, the lanes that it ended are not covered.

    Raises
    ------
    UsageError : the candidate can't be imported.

    """
    pair, target = options.pair, options.target
    entries = applying(options.entries, pair.name, name, target.device, options.versions)
    known = pair.candidates.get(name)
    if known is not None and not target.cuda:
        target = replace(target, rows_per_second=known.rows_per_second)
    spec = spec_of(
        pair,
        name,
        target.device,
        library=options.library,
        entries=entries,
        threads=options.threads,
    )
    seen: dict[str, Seen] = defaultdict(Seen)
    if known is not None and target.device.partition(":")[0] not in known.devices:
        reason = f"{name} runs on {', '.join(known.devices)} alone, not on {target.device}"
        keep(_uncovered(name, reason), seen)
        return _uncovered(name, reason), seen
    made = Lanes(pair, target, options.profile, name, options.seed)
    worker = Worker(pair, spec, options.stop)
    lanes: list[evidence.Lane] = []
    proof: dict[str, Any] = {}

    def told(*more: evidence.Lane, whole: bool = True) -> evidence.Candidate:
        return _told(worker, [*lanes, *more], proof, entries, seen, whole=whole)

    def left(why: str) -> list[evidence.Lane]:
        return [partial.lane(x, why) for x in options.lanes[len(lanes) :]]

    def so_far() -> None:
        keep(told(*left(partial.UNFINISHED), whole=False), seen)

    def found(run: LaneRun) -> None:
        under_way = run.report(partial.UNFINISHED)
        keep(told(under_way, *left(partial.UNFINISHED)[1:], whole=False), seen)

    try:
        with worker:
            so_far()
            if not options.drawn_only:
                proof.update(_proof(worker, made, _fused_names(pair)))
                if spec.environment:
                    proof["environment"] = dict(spec.environment)
            for lane in options.lanes:
                options.stop.check()
                plan = made.plan(lane)
                if options.drawn_only:
                    plan.explicit, plan.least = [], {}
                one = LaneRun(worker, plan, made, options, seen, progress)
                one.note = found
                lanes.append(one.go())
                if lanes[-1].findings and options.first_finding_only:
                    break
                so_far()
    except Unavailable as e:
        keep(_uncovered(name, str(e)), seen)
        return _uncovered(name, str(e)), seen
    except Stopped as e:
        return told(*left(f"not begun: {e}"), whole=False), seen
    whole = not (options.stop.is_set() and any(x.missing for x in lanes))
    return told(whole=whole), seen


def _told(
    worker: Worker,
    lanes: list[evidence.Lane],
    proof: dict[str, Any],
    entries: Iterable[Entry],
    seen: dict[str, Seen],
    *,
    whole: bool,
) -> evidence.Candidate:
    """Return a candidate's evidence from what its lanes gave."""
    patterns_ran = any(x.lane == "patterns" and x.cases for x in lanes)
    uses = [
        ledger_use(e, seen[e.id], patterns_ran=patterns_ran, whole=whole)
        for e in entries
        if e.against == "reference"
    ]
    state, reason = state_of(lanes, uses, proof)
    return evidence.Candidate(
        name=worker.spec.candidate,
        state=state,
        reason=reason,
        guard=worker.guard or str(proof.get("guard", "")),
        proof=dict(proof),
        lanes=lanes,
        ledger=uses,
        crashes=worker.toll.crashes,
        hangs=worker.toll.hangs,
        source_sha256=worker.source,
    )


def state_of(
    lanes: list[evidence.Lane], uses: list[evidence.LedgerUse], proof: Mapping[str, Any]
) -> tuple[str, str]:
    """Return a candidate's state and the reason for it, empty where a lane's findings tell it."""
    reasons = [f"declared divergence {u.id} is gone" for u in uses if u.state == "gone"]
    if proof.get("error") and not any(x.findings for x in lanes):
        reasons.append(f"no proof that its kernel ran: {proof['error']}")
    if proof.get("candidate_ok") is False:
        reasons.append("its kernel doesn't show in a profile of a call")
    if proof.get("reference_ok") is False:
        reasons.append("a fused kernel shows in a profile of the reference")
    if reasons or any(x.state == "failed" for x in lanes):
        return "failed", "; ".join(reasons)
    missing = [f"lane {x.lane}: {'; '.join(x.missing)}" for x in lanes if x.state == "not covered"]
    return ("not covered" if missing else "passed"), "; ".join(missing)


def _uncovered(name: str, reason: str) -> evidence.Candidate:
    return evidence.Candidate(name, "not covered", reason, "", {}, [], [], 0, 0)


def _fused_names(pair: OpPair) -> tuple[str, ...]:
    return tuple(sorted({e for c in pair.candidates.values() for e in c.evidence}))


def _proof(worker: Worker, made: Lanes, forbidden: tuple[str, ...]) -> dict[str, Any]:
    """Profile a call on each combination of the axes, up to one that fails."""
    proofs: list[dict[str, Any]] = []
    for case in made.simplest():
        proofs.append(worker.prove(case, forbidden))
        if "error" in proofs[-1]:
            break
    return combined(proofs)


def combined(proofs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the proofs of several cases as one: it holds if each of them does."""

    def every(name: str) -> bool | None:
        said = [p[name] for p in proofs if p.get(name) is not None]
        return all(said) if said else None

    proof: dict[str, Any] = {
        "cases": [p["case"] for p in proofs if "case" in p],
        "candidate_ok": every("candidate_ok"),
        "reference_ok": every("reference_ok"),
        "executions": next((p["executions"] for p in reversed(proofs) if "executions" in p), None),
        "candidate": sorted({n for p in proofs for n in p.get("candidate", ())}),
        "reference": sorted({n for p in proofs for n in p.get("reference", ())}),
    }
    errors = [p["error"] for p in proofs if "error" in p]
    return {**proof, "error": errors[0]} if errors else proof
