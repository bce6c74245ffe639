"""What a run adds to the comparison of its scores: its facts, its warnings, its concurrency arm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ppl import emulation, of_burst, sharing, verdict
from ppl.evidence import PplEvidence
from ppl.facts import Instance, RunFacts
from ppl.store import Stored

LOUD = ("NO CONTINUATION", "WITHOUT", emulation.MARK, sharing.MARK)
"""How warnings begin that a verdict may not be read without."""
WORST = ("INVALID", "DIFFERENT", "INCONCLUSIVE")
"""Words of the concurrency arm that become the run's, worst first; others are only told."""


def complete(
    made: PplEvidence,
    runs: Sequence[RunFacts],
    bursts: Sequence[Path],
    *,
    alone: Stored,
    used: set[tuple[str, int, int]],
    claim: verdict.Claim,
    margin: float | None,
) -> PplEvidence:
    """Return evidence with what its runs know; the first run's facts stand for all of them.

    Parameters
    ----------
    alone : the results of the run itself, one text at a time.
    used : arm, launch and number of every server process that a result is from.

    """
    facts = runs[0]
    late = [
        f"claim {claim}, margin {_margin(margin)}: stated after the run, which stated "
        f"{run.claim}, {_margin(run.margin_nats)} before it looked"
        for run in runs
        if (run.claim, run.margin_nats) != (claim, margin)
    ]
    said = emulation.warnings(asked=any(run.emulates_fp8 for run in runs))
    said += sharing.warnings(shared=any(run.shares_gpu for run in runs))
    said += [w for run in runs for w in (*run.warnings, *launches(run, used))]
    warnings = list(dict.fromkeys(said))
    warnings += list(dict.fromkeys(late))
    not_covered = list(dict.fromkeys(x for run in runs for x in run.not_covered))
    decided = made.decided
    burst = of_burst.judged(bursts, alone, claim=claim, margin=margin)
    if burst is not None:
        warnings += [f"in a burst of all texts: {x}" for x in burst.strays]
    if facts.asked.get("burst") and burst is None:
        not_covered.append("a burst of all texts at once: none was scored")
    if facts.asked.get("top1") and len(made.top1) < len(made.texts):
        there = f"{len(made.top1)} of {len(made.texts)} texts"
        not_covered.append(f"top-1 agreement: both arms gave arg-maxes of {there}")
    if burst is not None and burst.word in WORST and _rank(burst.word) < _rank(decided.word):
        reasons = tuple(f"in a burst of all texts: {r}" for r in burst.reasons)
        word = verdict.Verdict.model_validate({**decided.model_dump(), "word": burst.word}).word
        code = verdict.exit_code(word, claim)
        decided = decided.model_copy(update={"word": word, "exit_code": code, "reasons": reasons})
    loud = tuple(w for w in warnings if w.startswith(LOUD))
    decided = decided.model_copy(update={"reasons": (*decided.reasons, *loud)})
    return made.model_copy(
        update={
            "verdict": decided.word,
            "exit_code": decided.exit_code,
            "decided": decided,
            "warnings": [*warnings, *made.warnings],
            "not_covered": [*not_covered, *made.not_covered],
            "run": facts.model_copy(update={"burst": burst}),
        }
    )


def _margin(margin: float | None) -> str:
    return "by default" if margin is None else f"{margin:g} nats"


def _rank(word: str) -> int:
    return WORST.index(word) if word in WORST else len(WORST)


def launches(run: RunFacts, used: set[tuple[str, int, int]]) -> list[str]:
    """Warn where one launch's results are from several processes."""
    grouped: dict[tuple[str, int], list[Instance]] = {}
    for i in run.instances:
        if (i.arm, i.launch, i.number) in used:
            grouped.setdefault((i.arm, i.launch), []).append(i)
    return [
        f"{arm} launch {launch} is made of {len(mine)} server processes ("
        f"{'; '.join(i.why for i in mine[1:])}): its repeats hold noise between launches"
        for (arm, launch), mine in grouped.items()
        if len(mine) > 1
    ]
