"""What a person reads of a loop run, in the blocks of ``equiv.report``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from equiv import document, report
from equiv.document import Block, Facts, Heading, Items, Line, Table, counted
from equiv.evidence import FaultsEvidence, LoopEvidence
from equiv.faults_report import faults_blocks
from equiv.loop.api import default_lanes
from equiv.loop.result import FINDINGS


def show_loop(made: LoopEvidence, path: Path | None = None, file: TextIO | None = None) -> None:
    """Print the summary of a run, and where its evidence lies."""
    document.show([*loop_blocks(made), *report.closing(made, path)], file or sys.stdout)


def show_loop_faults(
    made: FaultsEvidence, path: Path | None = None, file: TextIO | None = None
) -> None:
    """Print the table of planted faults and false alarms, and where the evidence lies."""
    document.show([*faults_blocks(made), *report.closing(made, path)], file or sys.stdout)


def markdown(made: LoopEvidence) -> str:
    """Return the report as Markdown, environment included."""
    head = Heading(f"bytegate loop: {made.pack} on {made.device}", 1)
    ends = [*report.run_facts(made), *report.environment(made.environment)]
    return document.markdown([head, *loop_blocks(made), *_kinds(made), *ends])


def loop_blocks(made: LoopEvidence) -> Iterator[Block]:
    """Make the blocks that a terminal and Markdown share."""
    yield Line(verdict_sentence(made), made.verdict)
    yield _lanes(made)
    facts: list[tuple[str, str | tuple[str]]] = [("vLLM", untouched_sentence(made.untouched))]
    if made.patches:
        facts.append(("patched by", ", ".join(made.patches)))
    if made.share_gpu:
        gpus = document.counted(made.share_gpu, "GPU")
        facts.append(("ranks", f"nccl: larger groups shared {gpus}, connected by sockets"))
    if made.stand_ins:
        facts.append(("stand-ins", "; ".join(made.stand_ins)))
    if n := _checked(made):
        used = f"at most {made.worst_share:.1%} of a bound was used in {counted(n, 'case')}"
        facts.append(("dense reference", used))
    yield Facts(tuple(facts))
    if problems := made.untouched.get("problems"):
        yield Items(tuple(problems))
    if made.not_covered:
        yield Heading("NOT COVERED")
        yield Items(tuple(made.not_covered))
    found = [f for lane in made.lanes for f in lane.findings]
    for i, f in enumerate(found):
        yield Heading(f"Finding {i + 1} of {len(found)}: lane {f.lane}")
        yield from report.finding_blocks(f, FINDINGS)


def verdict_sentence(made: LoopEvidence) -> str:
    """Say what the verdict is about, in one line."""
    cases = sum(lane.cases for lane in made.lanes)
    run = f"(profile {made.profile}, seed {made.seed}, {made.seconds:,.0f} s)"
    amount = f"{counted(cases, 'case')} {run}"
    head = f"vLLM's loop with pack {made.pack} on {made.device}: "
    findings = sum(len(lane.findings) for lane in made.lanes)
    if made.verdict == "INVALID":
        return f"{head}the loop isn't vLLM's own, so nothing is shown; {amount}"
    if made.verdict == "FAIL":
        return f"{head}{counted(findings, 'finding')}; {amount}"
    if made.verdict == "NOT COVERED":
        lacking = ", ".join(x.lane for x in made.lanes if x.state == "not covered") or "every lane"
        return f"{head}no difference was found, and {lacking} lacks cases; {amount}"
    dense = ", and both inside the dense reference's bound" if _checked(made) else ""
    ran = [x.lane for x in made.lanes]
    every = dict.fromkeys((*default_lanes(made.device), *ran))
    only = report.lanes_alone(ran, list(every))
    return f"{head}the bytes of the loop without it{dense}{only and f',{only}'}; {amount}"


def _checked(made: LoopEvidence) -> int:
    """Count the cases that were held against the dense reference."""
    return sum(lane.oracle_checked for lane in made.lanes)


def untouched_sentence(found: Mapping[str, Any]) -> str:
    """Say whose loop ran."""
    whose = "the wheel's own" if found["untouched"] else "CHANGED"
    return (
        f"loop, reorg, metadata builder, manager and merge are {whose}: {len(found['subjects'])} "
        f"functions of {found['distribution']} and {found['globals']:,} names that they read"
    )


def _lanes(made: LoopEvidence) -> Table:
    columns = ("lane", "state", "cases", "refused", "MB", "bound", "s", "cases/s")
    rows = tuple(
        (
            x.lane,
            x.state,
            f"{x.cases:,}",
            f"{x.refused:,}",
            f"{x.bytes_compared / 1e6:,.1f}",
            report.percent(x.bound),
            f"{x.seconds:,.1f}",
            f"{x.cases / x.seconds:,.0f}" if x.seconds else "-",
        )
        for x in made.lanes
    )
    return Table(columns, rows, columns[2:])


def _kinds(made: LoopEvidence) -> Iterator[Block]:
    yield Heading("Cases by kind")
    yield Items(
        tuple(
            f"{x.lane}: "
            + ", ".join(
                f"{kind} {count:,}" + (f" (at least {x.least[kind]:,})" if kind in x.least else "")
                for kind, count in x.kinds.items()
            )
            for x in made.lanes
        )
    )
    yield Line(f"Drawn from: {made.distribution}.")
