"""What ``sanitize.json`` says, for a terminal and as Markdown."""

from __future__ import annotations

from equiv.document import Block, Exact, Heading, Items, Line, Table
from equiv.sanitize import SanitizeEvidence


def blocks(made: SanitizeEvidence) -> list[Block]:
    """Return the report."""
    found: list[Block] = [
        Heading("bytegate equiv sanitize", 1, made.verdict),
        Line(
            f"Pair {made.pair} on {made.device}: {len(made.cases)} cases under each tool, each "
            "operand in an allocation that ends with its last element."
        ),
        Table(
            ("candidate", "tool", "state", "calls", "errors", "what it said"),
            tuple(
                (r.candidate, r.tool, r.state, str(r.cases), str(r.errors), "; ".join(r.said))
                for r in made.reports
            ),
            ("calls", "errors"),
        ),
    ]
    if made.faults:
        found += [
            Heading("Planted faults"),
            Line("Caught: reported by the tool, not in the clean twin, and no byte was wrong."),
            Table(
                ("fault", "what", "tool", "outcome", "detail"),
                tuple((r.id, r.title, r.tool, r.outcome, r.detail) for r in made.faults),
            ),
        ]
    failing = [r for r in made.reports if r.state == "failed" and r.case]
    if failing:
        found += [Heading("First case of each report"), Exact(tuple(r.case for r in failing))]
    if made.not_covered:
        found += [Heading("NOT COVERED"), Items(tuple(made.not_covered))]
    return [*found, Heading("Repeat it"), Exact((made.command,))]
