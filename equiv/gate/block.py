"""``gate.md``: the block for a pull request, which stands alone in at most 40 lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from equiv import document
from equiv.document import Block, Exact, Facts, Heading, Line, Table
from equiv.gate import facts
from equiv.gate.collect import Collected
from equiv.gate.record import GateEvidence

Fact = tuple[str, str | tuple[str]]

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
    for most in range(10, 0, -1):
        text = document.markdown(blocks(made, found, most)).rstrip("\n") + "\n"
        if len(text.splitlines()) <= MOST_LINES:
            break
    return text


def blocks(made: GateEvidence, found: Collected, most: int = 10) -> list[Block]:
    """Return the block's parts; ``most`` says how long lists may be."""
    head = SAYS[made.verdict]
    if made.reasons:
        head += " " + "; ".join(_cut(r) for r in facts.first(made.reasons, 4))
    parts: list[Block] = [Heading("bytegate gate", 2, made.verdict), Line(head)]
    if rows := facts.cell_rows(made, found):
        names = ("layer", "device", "state", "required", "on what")
        # What decides comes first where not all of them have room.
        rows.sort(key=lambda r: (r[3] != "yes" and r[2] == "not covered", r[2] == "passed"))
        parts.append(_table(names, [(*r[:4], _cut(r[4])) for r in rows], most + 2))
    if not made.problems:
        lanes, identity = facts.identity_rows(found)
        if identity:
            columns = ("equal bytes, cases by dtype", *lanes)
            parts.append(_table(columns, identity, max(most - 4, 1)))
    parts.append(Facts(tuple(_facts(made, found, most))))
    again = [*facts.commands(made, found), "bytegate verify gate.json"]
    room = max(most, 3)
    if len(again) > room:
        left = f"# and {len(again) - room + 1} more, each in its evidence under command"
        again = [*again[: room - 3], left, *again[-2:]]
    parts.append(Exact(tuple(again)))
    return parts


def _facts(made: GateEvidence, found: Collected, most: int) -> list[Fact]:
    lines: list[Fact] = []

    def joined(label: str, said: Iterable[str]) -> None:
        kept = facts.first(list(said), max(most // 2, 1))
        if kept:
            lines.append((label, " — ".join(_cut(x) for x in kept)))

    if not made.problems:
        kernel, servers = (facts.of_layer(found, x) for x in ("kernel", "servers"))
        joined("domain", (facts.domain_sentence(p) for p in kernel))
        joined("declared differences met", facts.declared(found))
        joined("strata", (facts.strata_sentence(p) for p in servers))
        joined("noise floor", (facts.noise_sentence(p) for p in servers))
        joined("speed, doesn't decide", facts.perf_lines(found))
    quiet = [x for x in made.not_covered if x not in made.reasons]
    lines += [("not covered", _cut(x)) for x in facts.first(quiet, min(most, 4))]
    lines += [("note", _cut(x)) for x in facts.first(made.notes, 2)]
    lines += [("environment", x) for x in facts.first(facts.environments(found), min(most, 3))]
    commit = made.commit or "unknown"
    changes = " with uncommitted changes" if made.dirty else ""
    digests = f"{len(made.files)} files, their SHA-256 in gate.json"
    lines.append(("evidence", f"commit {commit}{changes}; {digests}; judged {made.started}"))
    return lines


def _table(columns: Sequence[str], rows: Sequence[tuple[str, ...]], most: int) -> Table:
    """Return a table of the first rows; its head says so where that isn't all of them."""
    some = f"{columns[0]} (first {most} of {len(rows)})" if len(rows) > most else columns[0]
    return Table((some, *columns[1:]), tuple(rows[:most]))


def _cut(text: str) -> str:
    return text if len(text) <= CUT else f"{text[: CUT - 3]}..."
