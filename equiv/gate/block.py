"""``gate.md``: the block for a pull request, which stands alone in at most 40 lines."""

from __future__ import annotations

import itertools

from equiv import document
from equiv.document import Block, Exact, Facts, Heading, Line, Table
from equiv.gate import facts
from equiv.gate.collect import Collected
from equiv.gate.record import GateEvidence

MOST_LINES = 40

CUT = 300
"""Characters of a reason in a table; gate.json has the whole."""

SAYS = {
    "PASS": "everything that the policy requires passed, and nothing that ran failed.",
    "FAIL": "something differs from stock, or a planted fault was missed:",
    "INCONCLUSIVE": "the servers' difference couldn't be told from none:",
    "NOT COVERED": "nothing that ran failed, and this is required and wasn't covered:",
    "INVALID": "the evidence can't be judged:",
}


def markdown(made: GateEvidence, found: Collected) -> str:
    """Return the block, its lists shortened until it fits."""
    text = ""
    for most in itertools.chain(range(9, 1, -1), [1]):
        text = document.markdown(blocks(made, found, most)).rstrip("\n") + "\n"
        if len(text.splitlines()) <= MOST_LINES:
            break
    return "\n".join(text.splitlines()[:MOST_LINES]) + "\n"


def blocks(made: GateEvidence, found: Collected, most: int = 9) -> list[Block]:
    """Return the block's parts, no list of them longer than ``most``."""
    head = SAYS[made.verdict]
    if made.reasons:
        head += " " + "; ".join(_cut(r) for r in facts.first(made.reasons, min(most, 4)))
    parts: list[Block] = [Heading("bytegate gate", 2, made.verdict), Line(head)]
    if rows := facts.cell_rows(made, found):
        names = ("layer", "device", "state", "required", "on what")
        kept = rows if len(rows) <= most + 2 else rows[: most + 2]
        parts.append(Table(names, tuple((*r[:4], _cut(r[4])) for r in kept)))
    if not made.problems:
        lanes, identity = facts.identity_rows(found)
        if identity:
            columns = ("equal bytes, cases by dtype", *lanes)
            parts.append(Table(columns, tuple(identity[:most])))
    parts.append(Facts(tuple(_facts(made, found, most))))
    again = facts.commands(made, found)
    kept = [*again[: max(most - 2, 1) - 1], again[-1]] if len(again) > max(most - 2, 1) else again
    parts.append(Exact((*kept, "bytegate verify gate.json")))
    return parts


def _facts(made: GateEvidence, found: Collected, most: int) -> list[tuple[str, str | tuple[str]]]:
    lines: list[tuple[str, str | tuple[str]]] = []
    if not made.problems:
        kernel = facts.of_layer(found, "kernel")
        lines += [("domain", facts.domain_sentence(p)) for p in kernel]
        if met := facts.declared(found):
            lines.append(("declared differences met", _cut("; ".join(met))))
        for p in facts.of_layer(found, "kernel_faults", "loop_faults"):
            what = "kernel" if p.layer == "kernel_faults" else "vLLM's loop"
            words = f"{what}, {p.device}: {facts.faults_sentence(p)}"
            lines.append(("faults that this build catches", words))
        for p in facts.of_layer(found, "servers"):
            lines.append(("texts", facts.texts_sentence(p)))
            lines.append(("strata", facts.strata_sentence(p)))
            lines.append(("noise floor", facts.noise_sentence(p)))
        lines += [("speed, doesn't decide", x) for x in facts.first([*facts.perf_lines(found)], 2)]
    quiet = [x for x in made.not_covered if x not in made.reasons]
    lines += [("not covered", _cut(x)) for x in facts.first(quiet, min(most, 4))]
    lines += [("note", x) for x in facts.first(made.notes, 2)]
    lines += [("environment", x) for x in facts.first(facts.environments(found), min(most, 3))]
    commit = made.commit or "unknown"
    changes = " with uncommitted changes" if made.dirty else ""
    digests = f"{len(made.files)} files, their SHA-256 in gate.json"
    lines.append(("evidence", f"commit {commit}{changes}; {digests}; {made.started}"))
    return lines


def _cut(text: str) -> str:
    return text if len(text) <= CUT else f"{text[: CUT - 3]}..."
