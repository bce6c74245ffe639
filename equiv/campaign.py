"""Run every lane of one candidate, prove that it ran, and hold it against the ledger."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from equiv import evidence, partial
from equiv.lane_run import LaneRun, Options, silent
from equiv.lanes import Lanes
from equiv.ledger import Seen, applying
from equiv.pool import Unavailable, Worker
from equiv.stopping import Stopped
from equiv.worker import spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    if known is not None and target.device.partition(":")[0] not in known.devices:
        reason = f"{name} runs on {', '.join(known.devices)} alone, not on {target.device}"
        keep(_uncovered(name, reason), {})
        return _uncovered(name, reason), {}
    worker = Worker(pair, spec, options.stop)
    made = Lanes(pair, target, options.profile, name, options.seed)
    one = _Campaign(worker, made, options, entries, progress, keep)
    try:
        with worker:
            one.go()
    except Unavailable as e:
        keep(_uncovered(name, str(e)), one.seen)
        return _uncovered(name, str(e)), one.seen
    except Stopped as e:
        return one.told(*one.left(f"not begun: {e}"), whole=False), one.seen
    whole = not (options.stop.is_set() and any(x.missing for x in one.lanes))
    return one.told(whole=whole), one.seen


@dataclass
class _Campaign:
    """One candidate's lanes, while they run."""

    worker: Worker
    made: Lanes
    options: Options
    entries: Sequence[Entry]
    progress: Callable[[str, str, int, int], None]
    keep: partial.Keep
    seen: dict[str, Seen] = field(default_factory=lambda: defaultdict(Seen))
    lanes: list[evidence.Lane] = field(default_factory=list)
    proof: dict[str, Any] = field(default_factory=dict)

    def go(self) -> None:
        """Prove that the kernel runs, and run every lane."""
        options = self.options
        self._so_far()
        if not options.drawn_only:
            self.proof = _proof(self.worker, self.made, _fused_names(options.pair))
            if self.worker.spec.environment:
                self.proof["environment"] = dict(self.worker.spec.environment)
        for lane in options.lanes:
            options.stop.check()
            plan = self.made.plan(lane)
            if options.drawn_only:
                plan.explicit, plan.least = [], {}
            run = LaneRun(self.worker, plan, self.made, options, self.seen, self.progress)
            run.note = self._found
            self.lanes.append(run.go())
            if self.lanes[-1].findings and options.first_finding_only:
                break
            self._so_far()

    def left(self, why: str) -> list[evidence.Lane]:
        """Return the lanes that have not ended, as not covered."""
        return [partial.lane(x, why) for x in self.options.lanes[len(self.lanes) :]]

    def _so_far(self) -> None:
        self.keep(self.told(*self.left(partial.UNFINISHED), whole=False), self.seen)

    def _found(self, run: LaneRun) -> None:
        under_way = run.report(partial.UNFINISHED)
        rest = self.left(partial.UNFINISHED)[1:]
        self.keep(self.told(under_way, *rest, whole=False), self.seen)

    def told(self, *more: evidence.Lane, whole: bool) -> evidence.Candidate:
        """Return the candidate's evidence from what its lanes gave, and ``more`` lanes."""
        lanes, worker = [*self.lanes, *more], self.worker
        patterns_ran = any(x.lane == "patterns" and x.cases for x in lanes)
        uses = [
            ledger_use(e, self.seen[e.id], patterns_ran=patterns_ran, whole=whole)
            for e in self.entries
            if e.against == "reference"
        ]
        state, reason = state_of(lanes, uses, self.proof)
        return evidence.Candidate(
            name=worker.spec.candidate,
            state=state,
            reason=reason,
            guard=worker.guard or str(self.proof.get("guard", "")),
            proof=self.proof,
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
