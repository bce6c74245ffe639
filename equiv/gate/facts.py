"""What a reviewer asks of the evidence, as rows and sentences: for the block and for the page."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from equiv.document import counted
from equiv.environment import shortened
from equiv.gate.collect import LAYERS, Collected, Piece
from equiv.gate.record import Cell, GateEvidence
from equiv.report import environment_sentence

MOST_IDS = 6
"""Ids that a sentence names before it counts."""


def of_layer(found: Collected, *layers: str) -> list[Piece]:
    """Return the evidence of some layers."""
    return [p for p in found.pieces if p.layer in layers]


def gigabytes(count: int) -> str:
    """Write bytes as GB with two digits."""
    return f"{count / 1e9:,.2f} GB" if count >= 10_000_000 else f"{count / 1e6:,.1f} MB"  # noqa: PLR2004


# -- cells ---------------------------------------------------------------------------------


def cell_rows(made: GateEvidence, found: Collected) -> list[tuple[str, str, str, str, str]]:
    """Return a row for each cell: layer, device, state, required, what it rests on.

    Cells without evidence that nothing requires are one row for each device.
    """
    rows: list[tuple[str, str, str, str, str]] = []
    idle: dict[str, list[str]] = {}
    for c in made.cells:
        if c.state == "not covered" and not c.required and not c.files:
            idle.setdefault(c.device, []).append(LAYERS[c.layer])
            continue
        words = "; ".join(c.reasons) or figures(c, found)
        rows.append((LAYERS[c.layer], c.device, c.state, "yes" if c.required else "no", words))
    for device, names in idle.items():
        rows.append((", ".join(names), device, "not covered", "no", "no evidence"))
    return rows


def figures(cell: Cell, found: Collected) -> str:
    """Say in figures what a cell rests on."""
    mine = [p for p in found.pieces if p.name in cell.files]
    if cell.layer == "kernel":
        return "; ".join(_kernel_figures(p) for p in mine)
    if cell.layer == "loop":
        return "; ".join(_loop_figures(p) for p in mine)
    if cell.layer == "servers":
        return "; ".join(texts_sentence(p) for p in mine)
    return "; ".join(faults_sentence(p) for p in mine)


def _loop_figures(piece: Piece) -> str:
    made = piece.made
    gpus = counted(made.share_gpu, "GPU")
    shared = f"; ranks of lane nccl SHARED {gpus}, connected by sockets" if made.share_gpu else ""
    return (
        f"{sum(x.cases for x in made.lanes):,} batches with pack {made.pack}, "
        f"{gigabytes(sum(x.bytes_compared for x in made.lanes))} equal, at most "
        f"{made.worst_share:.0%} of the dense reference's bound used{shared}"
    )


def _kernel_figures(piece: Piece) -> str:
    ran = [c for c in piece.made.candidates if c.lanes]
    lanes = [x for c in ran for x in c.lanes]
    return (
        f"{', '.join(c.name for c in ran)}: {sum(x.cases for x in lanes):,} cases, "
        f"{gigabytes(sum(x.bytes_compared for x in lanes))} equal to stock's"
    )


# -- the kernel layer ----------------------------------------------------------------------


def identity_rows(found: Collected) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return lanes, and for each candidate and device its cases by lane, split by dtype."""
    lanes: list[str] = []
    rows = []
    for p in of_layer(found, "kernel"):
        for c in p.made.candidates:
            lanes += [x.lane for x in c.lanes if x.lane not in lanes]
    for p in of_layer(found, "kernel"):
        for c in p.made.candidates:
            if c.lanes:
                by = {x.lane: x for x in c.lanes}
                cells = tuple(_by_dtype(by[n]) if n in by else "-" for n in lanes)
                rows.append((f"{c.name}, {p.device}", *cells))
    return lanes, rows


def _by_dtype(lane: Any) -> str:
    dtypes = {k.removeprefix("dtype="): n for k, n in lane.kinds.items() if k.startswith("dtype=")}
    split = " / ".join(f"{name} {n:,}" for name, n in dtypes.items()) or f"{lane.cases:,}"
    passed = lane.equal + lane.refused + lane.declared + lane.undefined
    return split if passed == lane.cases else f"{split}, {lane.cases - passed:,} FAIL"


def domain_sentence(piece: Piece) -> str:
    """Say on which domain identity was shown: the ranges of its dimensions, and outcomes."""
    lanes = [x for c in piece.made.candidates for x in c.lanes]
    ranges: dict[str, tuple[int, int]] = {}
    for x in lanes:
        for name, (low, high) in x.ranges.items():
            a, b = ranges.get(name, (low, high))
            ranges[name] = (min(a, low), max(b, high))
    words = ", ".join(f"{n} {a:,} to {b:,}" for n, (a, b) in ranges.items())
    counts = {
        n: sum(getattr(x, n) for x in lanes) for n in ("equal", "refused", "declared", "undefined")
    }
    outcomes = ", ".join(f"{n:,} {name}" for name, n in counts.items() if n)
    bounds = [x.bound for x in lanes if x.bound is not None]
    bound = f"; less than {100 * max(bounds):.2g} % of what is drawn fails (95 %)" if bounds else ""
    return f"{piece.device}: {words}; cases: {outcomes}{bound}"


def declared(found: Collected) -> list[str]:
    """Name the declared differences that were met, with who met them and why."""
    met: dict[str, tuple[str, dict[str, None]]] = {}
    for p in of_layer(found, "kernel"):
        uses = [(c.name, u) for c in p.made.candidates for u in c.ledger]
        uses += [("stock against the model", u) for u in p.made.reference_ledger]
        for name, u in uses:
            if u.state == "seen":
                met.setdefault(u.id, (u.reason, {}))[1][f"{name} on {p.device}"] = None
    return [f"{i} ({', '.join(who)}): {reason}" for i, (reason, who) in met.items()]


# -- faults --------------------------------------------------------------------------------


def faults_sentence(piece: Piece) -> str:
    """Say which planted faults this build of the suite catches, and how many false alarms."""
    made = piece.made
    by = {
        k: [r.id for r in made.faults if r.outcome == k]
        for k in ("caught", "missed", "not_covered")
    }
    alarms = len(made.false_alarms.get("alarms", ()))
    words = [f"{len(by['caught'])} of {len(made.faults)} caught ({span(by['caught'])})"]
    words += [f"MISSED {span(by['missed'])}"] if by["missed"] else []
    words += [f"not covered {span(by['not_covered'])}"] if by["not_covered"] else []
    cases = made.false_alarms.get("cases", 0)
    return f"{', '.join(words)}; {counted(alarms, 'false alarm')} in {cases:,} clean cases"


def span(ids: Sequence[str]) -> str:
    """Write ``K01, K02, K03, K07`` as ``K01-K03, K07``."""
    groups: list[list[str]] = []
    for i in ids:
        if groups and _follows(groups[-1][-1], i):
            groups[-1].append(i)
        else:
            groups.append([i])
    return ", ".join(f"{g[0]}-{g[-1]}" if len(g) > 2 else ", ".join(g) for g in groups)  # noqa: PLR2004


def _follows(a: str, b: str) -> bool:
    return a[:1] == b[:1] and a[1:].isdigit() and b[1:].isdigit() and int(b[1:]) == int(a[1:]) + 1


# -- servers -------------------------------------------------------------------------------


def texts_sentence(piece: Piece) -> str:
    """Say how many texts and tokens are bit-identical."""
    i = piece.made.identity
    if i is None:
        return str(piece.made.verdict)
    what = "".join(f"{'fp8 prefill ' if m == 'EMULATED' else ''}{m}, " for m in piece.made.marks)
    return (
        f"{what}{piece.made.verdict}: {i.identical_texts:,} of {counted(i.texts, 'text')} and "
        f"{i.identical_tokens:,} of {i.tokens:,} tokens bit-identical"
    )


def strata_sentence(piece: Piece) -> str:
    """Compare tokens that the route can touch with those that it can't."""
    words = []
    for name in ("exposed", "unexposed"):
        strata = [getattr(t, name) for t in piece.made.texts]
        tokens, differing = sum(s.tokens for s in strata), sum(s.differing for s in strata)
        total = sum((s.mean_nats or 0.0) * s.tokens for s in strata)
        mean = f", mean difference {total / tokens:.2g} nats" if tokens else ""
        words.append(f"{name} {tokens:,} tokens, {differing:,} differ{mean}")
    return "; ".join(words)


def noise_sentence(piece: Piece) -> str:
    """Say what the run could have seen: the noise floor, the margin, the detectable shift."""
    s = piece.made.statistics
    if s is None:
        return "no statistics"
    floor = "not measured: no server was launched again"
    if s.noise is not None:
        floor = (
            f"between launches of one arm at most {max(s.noise.within):.2g} nats a token, between "
            f"the arms at least {min(s.noise.across):.2g}"
        )
    shift = "-" if s.detectable_nats is None else f"{s.detectable_nats:.2g}"
    e = s.exposed
    return (
        f"{floor}; mean exposed difference {e.mean:.2g}, 90 % [{e.low:.2g}, {e.high:.2g}] in "
        f"±{e.margin:.2g}; minimum detectable shift {shift} nats"
    )


# -- where, and again ------------------------------------------------------------------------


def environments(found: Collected) -> list[str]:
    """Describe where the evidence was made, in a line for each different place."""
    lines: dict[str, list[str]] = {}
    for p in found.pieces:
        if p.environment:
            lines.setdefault(environment_sentence(p.environment), []).append(p.layer)
        elif p.versions:
            words = ", ".join(f"{k} {v}" for k, v in p.versions.items())
            lines.setdefault(words, []).append(p.layer)
    return [
        f"{', '.join(LAYERS[x] for x in dict.fromkeys(layers))}: {line}"
        for line, layers in lines.items()
    ]


def commands(made: GateEvidence, found: Collected) -> list[str]:
    """Return the commands that repeat it, without where one machine keeps its files."""
    lines = [_plain(p.made.command) for p in found.pieces if getattr(p.made, "command", "")]
    runs = [getattr(p.made, "run", None) for p in found.pieces]
    lines += [_plain(run.command) for run in runs if run is not None and run.command]
    lines += [_plain(text) for text, _ in made.ran if text.startswith("bytegate ppl")]
    return list(dict.fromkeys([*lines, _plain(made.command)]))


def _plain(command: str) -> str:
    """Leave ``--out`` out, and cut absolute paths."""
    kept = []
    words = iter(shlex.split(command))
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            kept.append(shortened(word))
    return shlex.join(kept)


def perf_lines(found: Collected) -> Iterator[str]:
    """Yield what a speed measurement says of itself; it is shown, and never decides."""
    for p in found.perf:
        yield from p.made.summary or [f"{p.made.verdict}; see {p.name}"]


def first(items: Sequence[str], most: int) -> list[str]:
    """Return the first items, and how many more there are."""
    if len(items) <= most:
        return list(items)
    return [*items[: max(most - 1, 0)], f"and {len(items) - max(most - 1, 0)} more in gate.json"]


def kinds_of(found: Collected) -> Counter[str]:
    """Count cases by kind over the whole kernel layer."""
    total: Counter[str] = Counter()
    for p in of_layer(found, "kernel"):
        for c in p.made.candidates:
            for x in c.lanes:
                total.update(x.kinds)
    return total
