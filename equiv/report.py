"""What a person reads of a run: the summary on a terminal, and the same as Markdown.

Both come from one list of blocks, so neither says more than the other, but for what Markdown adds
at its end: the coverage in counts, the proof's names, and the environment in full.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

from equiv import document
from equiv.document import Block, Exact, Facts, Heading, Items, Line, Table, counted
from equiv.domain import LANE_NAMES
from equiv.evidence import EquivEvidence, FaultsEvidence
from equiv.faults_report import faults_blocks
from equiv.progress import Progress
from equiv.result import FINDINGS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from equiv.evidence import Candidate, Finding, Lane, LedgerUse, LoopEvidence

    Evidence = EquivEvidence | FaultsEvidence | LoopEvidence

__all__ = ["Progress", "markdown", "show_equiv", "show_faults"]

CONFIDENCE = "95 %"
"""Of the bound in evidence, 1 - 0.05^(1/n)."""

GUARDS = {
    "dispatch": "its allocations come from guarded, poisoned memory",
    "out": "its outputs are given to it in guarded, poisoned memory",
    "malloc": "its outputs are poisoned through malloc; writes past their ends aren't seen",
}


def show_equiv(made: EquivEvidence, path: Path | None = None, file: TextIO | None = None) -> None:
    """Print the summary of a run, and where its evidence lies."""
    blocks = [*equiv_blocks(made), *closing(made, path)]
    document.show(blocks, file or sys.stdout)


def show_faults(made: FaultsEvidence, path: Path | None = None, file: TextIO | None = None) -> None:
    """Print the table of planted faults and false alarms, and where the evidence lies."""
    blocks = [*faults_blocks(made), *closing(made, path)]
    document.show(blocks, file or sys.stdout)


def markdown(made: EquivEvidence | FaultsEvidence) -> str:
    """Return the report as Markdown, environment included."""
    if isinstance(made, FaultsEvidence):
        title = f"bytegate equiv faults: {made.pair} on {made.device}"
        blocks = [*faults_blocks(made)]
    else:
        title = f"bytegate equiv: {made.pair} on {made.device}"
        blocks = [*equiv_blocks(made), *_coverage(made), *_proofs(made)]
    head = Heading(title, 1)
    return document.markdown([head, *blocks, *run_facts(made), *environment(made.environment)])


# -- a run --------------------------------------------------------------------------


def equiv_blocks(made: EquivEvidence) -> Iterator[Block]:
    """Make the blocks that a terminal and Markdown share."""
    yield Line(verdict_sentence(made), made.verdict)
    for c in made.candidates:
        yield from _candidate(c)
    if not_covered := _not_covered(made):
        yield Heading("NOT COVERED")
        yield Items(tuple(not_covered))
    yield from _ledger(made)
    yield from _bounds(made)
    yield from _findings(made)


def verdict_sentence(made: EquivEvidence) -> str:
    """Say what the verdict is about, in one line."""
    lanes = [x for c in made.candidates for x in c.lanes]
    ran = [_how(c) for c in made.candidates if c.lanes]
    findings = sum(len(x.findings) for x in lanes)
    amount = (
        f"{sum(x.cases for x in lanes):,} cases, {_gigabytes(lanes)} GB compared "
        f"(profile {made.profile}, seed {made.seed}, {made.seconds:,.0f} s)"
    )
    head = f"{made.pair} on {made.device}: "
    only = lanes_alone(made.lanes, LANE_NAMES)
    if made.verdict == "FAIL":
        failed = [c for c in made.candidates if c.state == "failed"]
        reasons = [f"{c.name}: {c.reason}" for c in failed if c.reason]
        reasons += [f"stock: {u.id} is gone" for u in made.reference_ledger if u.state == "gone"]
        names = ", ".join(c.name for c in failed) or "the reference"
        what = f"{counted(findings, 'finding')} in {names}"
        return f"{head}{'; '.join([what, *reasons])}; {amount}"
    if made.verdict == "NOT COVERED":
        missing = [f"{c.name}, {x.lane}" for c in made.candidates for x in c.lanes if x.missing]
        missing += [f"{c.name} ({c.reason})" for c in made.candidates if not c.lanes]
        return f"{head}no difference was found, and this lacks: {'; '.join(missing)}; {amount}"
    declared = [u.id for c in made.candidates for u in c.ledger if u.state == "seen"]
    but = f", but for {', '.join(dict.fromkeys(declared))} of the ledger" if declared else ""
    verb = "gives" if len(ran) == 1 else "give"
    return f"{head}{_and(ran)} {verb} the reference's bytes{but}{only}; {amount}"


def lanes_alone(ran: Sequence[str], every: Sequence[str]) -> str:
    """Say which lanes a headline speaks of, where they aren't all; empty where they are."""
    if set(every) <= set(ran):
        return ""
    word = "lane" if len(ran) == 1 else "lanes"
    return f" in the {word} {_and(list(ran))} alone, {len(set(ran))} of {len(every)}"


def _how(c: Candidate) -> str:
    """Name a candidate, with the environment that makes another kernel of it on this device."""
    set_ = [f"{k}={v}" for k, v in c.proof.get("environment", {}).items()]
    return f"{c.name} (under {', '.join(set_)})" if set_ else c.name


def _candidate(c: Candidate) -> Iterator[Block]:
    yield Heading(_how(c), 2, c.state)
    facts: list[tuple[str, str | tuple[str]]] = []
    if c.reason:
        facts.append(("why", c.reason))
    if c.lanes:
        facts += [("guard", GUARDS.get(c.guard, c.guard)), ("proof", proof_sentence(c.proof))]
        if c.crashes or c.hangs:
            facts.append(("workers lost", f"{c.crashes} to crashes, {c.hangs} to hangs"))
        if layouts := _layouts(c.lanes):
            facts.append(("layout", layouts))
    if facts:
        yield Facts(tuple(facts))
    if c.lanes:
        yield _lanes(c.lanes)


def _lanes(lanes: Sequence[Lane]) -> Table:
    columns = {
        "lane": [x.lane for x in lanes],
        "state": [x.state for x in lanes],
        "cases": [f"{x.cases:,}" for x in lanes],
        "drawn": [f"{x.drawn:,}" for x in lanes],
        "GB": [_gigabytes([x]) for x in lanes],
        "equal": [f"{x.equal:,}" for x in lanes],
        "refused": [f"{x.refused:,}" for x in lanes],
        "declared": [f"{x.declared:,}" for x in lanes],
        "undefined": [f"{x.undefined:,}" for x in lanes],
        "failing": [f"{_failing(x):,}" for x in lanes],
        "median rows": [f"{x.median_rows:,}" for x in lanes],
        "bound": [percent(x.bound) for x in lanes],
        "s": [f"{x.seconds:,.1f}" for x in lanes],
    }
    for name in ("undefined", "failing"):  # rare, and most terminals are narrow
        if set(columns[name]) == {"0"}:
            del columns[name]
    rows = tuple(zip(*columns.values(), strict=True))
    return Table(tuple(columns), rows, tuple(columns)[2:])


def _failing(lane: Lane) -> int:
    return lane.cases - lane.equal - lane.refused - lane.declared - lane.undefined


def proof_sentence(proof: Mapping[str, Any]) -> str:
    """Say what shows that the named kernel ran, and that no fused one did in the reference."""
    if proof.get("error"):
        return f"none: {proof['error']}"
    runs = proof.get("executions")
    counted = f", counted {runs:,} times by itself" if isinstance(runs, int) else ""
    own = {
        True: f"its own kernel ran{counted}",
        False: "its own kernel does NOT show",
        None: "no kernel of a known name to look for",
    }[proof.get("candidate_ok")]
    other = {
        True: "no fused kernel ran in the reference",
        False: "a fused kernel ran in the REFERENCE",
        None: "the reference wasn't profiled",
    }[proof.get("reference_ok")]
    return f"{own}; {other}"


def _layouts(lanes: Sequence[Lane]) -> str:
    found: dict[str, int] = {}
    for x in lanes:
        for name, count in x.layouts_differ.items():
            found[name] = found.get(name, 0) + count
    words = ", ".join(f"{name} in {count:,} cases" for name, count in found.items())
    return f"other pitches than the reference's, with equal bytes: {words}" if words else ""


def _not_covered(made: EquivEvidence) -> list[str]:
    """List what evidence names, and whatever a lane names that isn't said there."""
    lines = list(made.not_covered)
    for c in made.candidates:
        for x in c.lanes:
            for text in (*x.missing, *x.left_out):
                if not any(text in line for line in lines):
                    lines.append(f"{c.name}, {x.lane}: {text}")
    return lines


def _ledger(made: EquivEvidence) -> Iterator[Block]:
    uses = [(c.name, u) for c in made.candidates for u in c.ledger]
    uses += [("stock", u) for u in made.reference_ledger]
    if not uses:
        return
    yield Heading("Declared divergences")
    columns = ("candidate", "id", "state", "cases", "of", "elements", "patterns by dtype and place")
    rows = tuple(
        (
            name,
            u.id,
            u.state,
            f"{u.cases:,}",
            f"{u.eligible_cases:,}",
            f"{u.elements:,}",
            ", ".join(f"{place} {count:,}" for place, count in u.patterns.items()) or "-",
        )
        for name, u in uses
    )
    yield Table(columns, rows, ("cases", "of", "elements"))
    by_id: dict[str, LedgerUse] = {u.id: u for _, u in uses}
    yield Items(tuple(f"{u.id}: {u.reason} ({u.reference})" for u in by_id.values()))


def _bounds(made: EquivEvidence) -> Iterator[Block]:
    bounded = [(c, x) for c in made.candidates for x in c.lanes if x.bound is not None]
    if not bounded:
        return
    yield Heading("What the bound means")
    yield Line(
        f"Had more than this share of what a lane draws from failed, {CONFIDENCE} of runs would "
        "have met it: 1 - 0.05^(1/n) for n drawn cases without a failure. It doesn't speak of the "
        "enumerated cases, nor of what production sends."
    )
    yield Items(
        tuple(
            f"{c.name}, {x.lane}: {percent(x.bound)} after {x.drawn:,} draws; {_ranges(x)}"
            for c, x in bounded
        )
    )
    yield Line(f"Drawn from: {made.distribution}.")


def _ranges(lane: Lane) -> str:
    return ", ".join(f"{name} {low:,} to {high:,}" for name, (low, high) in lane.ranges.items())


def _findings(made: EquivEvidence) -> Iterator[Block]:
    found = [(c.name, f) for c in made.candidates for x in c.lanes for f in x.findings]
    for i, (name, f) in enumerate(found):
        yield Heading(f"Finding {i + 1} of {len(found)}: {name}, lane {f.lane}")
        yield from finding_blocks(f)


def finding_blocks(f: Finding, kinds: Mapping[str, str] = FINDINGS) -> Iterator[Block]:
    """Make the blocks of one finding; the command that repeats it is a line of its own."""
    facts: list[tuple[str, str | tuple[str]]] = [
        ("kind", f"{f.kind}: {kinds.get(f.kind, 'unknown')}"),
        ("case", (f.case,)),
        ("detail", f.detail or "none"),
    ]
    if f.voices:
        facts.append(("oracle", f.voices))
    if f.raised_in:
        facts.append(("raised in", f.raised_in))
    times = f"in {counted(f.occurrences, 'case')} of the lane"
    facts.append(("met", f"first after {counted(f.after_cases, 'case')}, {times}"))
    if f.found != f.case:
        facts.append(("first as", (f.found,)))
    if f.set_elements is not None:
        set_ = f", with {counted(f.set_elements, 'element')} set" if f.set_elements else " alone"
        facts.append(("inputs", f"zeros{set_}"))
    elif f.not_shrunk:
        facts.append(("not shrunk", f.not_shrunk))
    yield Facts(tuple(facts))
    yield Line("Repeat it with")
    yield Exact((f.repro,))


# -- what Markdown adds, and the end ------------------------------------------------


def _coverage(made: EquivEvidence) -> Iterator[Block]:
    lines = [
        f"{c.name}, {x.lane}: {_ranges(x)}; "
        + ", ".join(
            f"{kind} {count:,}" + (f" (at least {x.least[kind]:,})" if kind in x.least else "")
            for kind, count in x.kinds.items()
        )
        for c in made.candidates
        for x in c.lanes
    ]
    if lines:
        yield Heading("Cases by kind")
        yield Items(tuple(lines))


def _proofs(made: EquivEvidence) -> Iterator[Block]:
    lines = [
        f"{c.name}: {proof_sentence(c.proof)}; seen in a call of the candidate: "
        f"{', '.join(c.proof.get('candidate') or ['nothing'])}; of the reference: "
        f"{', '.join(c.proof.get('reference') or ['nothing'])}"
        for c in made.candidates
        if c.proof
    ]
    if lines:
        yield Heading("Proof that the kernels ran")
        yield Items(tuple(lines))


def run_facts(made: Evidence) -> Iterator[Block]:
    """Say how a run was started, and where it ended."""
    yield Heading("Run")
    yield Facts(
        (
            ("command", (made.command,)),
            ("started", f"{made.started}, took {made.seconds:,.0f} s"),
            ("profile and seed", f"{made.profile}, {made.seed}"),
            ("verdict", f"{made.verdict}, exit code {made.exit_code}"),
            ("evidence", f"{made.schema} version {made.schema_version}"),
        )
    )


def environment(found: Mapping[str, Any]) -> Iterator[Block]:
    """Make a table of the environment."""
    yield Heading("Environment")
    yield Table(("what", "value"), tuple(_flat(found)))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Walk nested values: one row for each leaf, and for each list of plain values."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}, {key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(x, dict) for x in value):
        for i, inner in enumerate(value):
            yield from _flat(inner, f"{name} {i + 1}")
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value)) or "none"
    else:
        yield name, "none" if value is None else str(value)


def closing(made: Evidence, path: Path | None) -> Iterator[Block]:
    """End with what one looks for first: where it ran, the verdict, the file."""
    yield Heading("Environment")
    yield Line(environment_sentence(made.environment))
    yield Line("")
    end = f"exit code {made.exit_code}"
    yield Line(f"{end}; evidence in {path}" if path else end, made.verdict)


def environment_sentence(found: Mapping[str, Any]) -> str:
    """Name versions, device and commit in one line, those that could be found."""

    def part(*names: str) -> str:
        value: Any = found
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return "" if value is None or str(value).startswith("failed") else str(value)

    named = ("torch", "triton", "vllm", "numpy", "nvidia_driver")
    words = [f"Python {part('versions', 'python')}"]
    words += [f"{n} {part('versions', n)}" for n in named if part("versions", n)]
    gpu = part("device", "model")
    words.append(gpu or f"{part('cpu', 'model')} ({part('cpu', 'torch_capability')})")
    commit, suite = part("suite", "commit"), part("suite", "distribution")
    dirty = " with changes" if part("suite", "dirty") == "True" else ""
    words.append(f"commit {commit[:12]}{dirty}" if commit else suite or "no commit known")
    return ", ".join(w for w in words if w)


def _gigabytes(lanes: Sequence[Lane]) -> str:
    amount = sum(x.bytes_compared for x in lanes) / 1e9
    return f"{amount:,.2f}" if amount >= 0.01 or not amount else "<0.01"  # noqa: PLR2004 - 2 places


def percent(share: float | None) -> str:
    """Write a share with two digits; a dash for none."""
    return "-" if share is None else f"{100 * share:.2g} %"


def _and(names: Sequence[str]) -> str:
    *most, last = names or ["nothing"]
    return f"{', '.join(most)} and {last}" if most else last
