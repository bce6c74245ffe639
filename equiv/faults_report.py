"""The part of a report that is about planted faults and false alarms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from equiv.document import Block, Exact, Facts, Heading, Items, Line, Table, counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from equiv.evidence import FaultsEvidence


def faults_blocks(made: FaultsEvidence) -> Iterator[Block]:
    """Make the blocks of a fault run that a terminal and Markdown share."""
    alarms: list[Mapping[str, Any]] = list(made.false_alarms.get("alarms", ()))
    clean: Mapping[str, int] = made.false_alarms.get("candidates", {})
    cases = made.false_alarms.get("cases", 0)
    count = {
        k: sum(r.outcome == k for r in made.faults) for k in ("caught", "missed", "not_covered")
    }
    yield Line(
        f"{made.pair} on {made.device}: {counted(count['caught'], 'fault')} caught, "
        f"{count['missed']} missed, {count['not_covered']} not covered; "
        f"{counted(len(alarms), 'false alarm')} in {cases:,} cases of clean kernels "
        f"(profile {made.profile}, seed {made.seed}, {made.seconds:,.0f} s)",
        made.verdict,
    )
    yield Heading("Planted faults")
    columns = ("id", "fault", "outcome", "lane", "cases", "as", "clean twin", "s")
    rows = tuple(
        (
            r.id,
            r.title,
            r.outcome.replace("_", " "),
            r.lane or "-",
            f"{r.cases:,}",
            r.kind or "-",
            r.twin or "-",
            f"{r.seconds:,.1f}",
        )
        for r in made.faults
    )
    yield Table(columns, rows, ("cases", "s"))
    if left := [r for r in made.faults if r.outcome != "caught"]:
        yield Heading("Not caught")
        yield Items(tuple(f"{r.id}, {r.outcome.replace('_', ' ')}: {r.detail}" for r in left))
    if smallest := [r for r in made.faults if r.smallest]:
        yield Heading("Smallest failing cases")
        yield Facts(tuple(x for r in smallest for x in ((r.id, (r.smallest,)), ("", r.detail))))
    if not cases:
        yield Line("No clean kernel was run (--clean-cases 0), so nothing is said of false alarms.")
    if clean:
        yield Heading("False alarms")
        flagged = [str(a.get("candidate")) for a in alarms]
        yield Table(
            ("clean kernel", "cases", "alarms"),
            tuple((name, f"{n:,}", f"{flagged.count(name)}") for name, n in clean.items()),
            ("cases", "alarms"),
        )
    for a in alarms:
        yield Line(f"{a.get('candidate')}, {a.get('kind')}: {a.get('detail')}")
        yield Exact((str(a.get("case")),))
