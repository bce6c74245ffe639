"""From what was asked for to ``perf.json``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equiv import candidates, document, evidence
from equiv.environment import collect
from equiv.errors import NotCovered
from equiv.pairs import load_pair
from equiv.perf import kept, report, share, tail
from equiv.perf.record import PerfEvidence, Serving, Share, Tail, summarised, verdict_of

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What ``bytegate perf`` was asked for.

    Attributes
    ----------
    only : for some dimensions of the pair, the values to time.
    serving : measures serving and returns it; None where it wasn't asked for.

    """

    pair: str
    candidates: Sequence[str]
    device: str
    library: str | None
    out: Path
    command: str
    tail: bool = True
    only: Mapping[str, Sequence[int]] = field(default_factory=dict)
    serving: Callable[[Progress], Serving] | None = None


def run(asked: Asked, progress: Progress) -> PerfEvidence:
    """Measure, and write ``perf.json`` and ``perf.md``; a part that can't run is not covered.

    What is measured survives a kill: the tail is written before serving begins, and serving keeps
    each launch as it ends (``ppl.kept``). The same command then goes on. An earlier command's
    report doesn't stay beside what this one has half measured.

    Raises
    ------
    UsageError : bad names, or a folder that can't be written.

    """
    evidence.check_folder(asked.out)
    began = time.perf_counter()
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    pair = load_pair(asked.pair)
    not_covered: list[str] = []
    measured: Tail | None = None
    served: Serving | None = None
    for name in asked.candidates:
        candidates.check_name(pair, name)
    tail.points(pair, asked.only)
    if asked.tail:
        try:
            measured, missing = _tail(asked, pair, progress)
            not_covered += missing
        except NotCovered as e:
            not_covered.append(f"the tail: {str(e).removeprefix('not covered: ')}")
    if asked.serving is not None:
        if measured is not None or (asked.out / "perf.json").exists():
            unfinished = [
                *not_covered,
                "serving: cut off before its last launch; the same command goes on",
            ]
            _write(asked, measured, None, unfinished, [], started, began)
        try:
            served = asked.serving(progress)
        except NotCovered as e:
            not_covered.append(f"serving: {str(e).removeprefix('not covered: ')}")
    shares: list[Share] = []
    if served is not None and not served.invalid:
        shares, missing = share.estimate(asked.pair, measured, served)
        not_covered += [*served.not_covered, *missing]
    return _write(asked, measured, served, not_covered, shares, started, began)


def _tail(asked: Asked, pair: Any, progress: Progress) -> tuple[Tail, list[str]]:
    """Measure the tail, or take that of the same command which serving was cut off from."""
    names = asked.candidates or list(pair.candidates)
    question: dict[str, Any] = {}
    if asked.serving is not None:
        question = kept.question(asked.pair, names, asked.device, asked.library, asked.only)
        found = kept.take(asked.out, question, progress)
        if found is not None:
            return found
    made, missing = tail.run(
        pair, names, asked.device, asked.library, asked.only, progress=progress
    )
    if question:
        kept.put(asked.out, question, made, missing)
    return made, missing


def _write(
    asked: Asked,
    measured: Tail | None,
    served: Serving | None,
    not_covered: list[str],
    shares: list[Share],
    started: str,
    began: float,
) -> PerfEvidence:
    word, code = verdict_of(measured, served)
    made = PerfEvidence(
        verdict=word,
        exit_code=code,
        tail=measured,
        serving=served,
        not_covered=not_covered,
        environment=collect(asked.device, asked.library),
        started=started,
        seconds=round(time.perf_counter() - began, 1),
        command=asked.command,
        summary=summarised(measured, served, not_covered, shares),
        shares=shares,
    )
    with kept.writing(asked.out):
        evidence.write(asked.out / "perf.json", made)
        evidence.write_text(asked.out / "perf.md", document.markdown(report.blocks(made)))
    return made
