"""``bytegate equiv repro CASE``: run one case and print everything about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from equiv import candidates, environment, ledger
from equiv.case import parse
from equiv.domain import claim_of
from equiv.errors import ExitCode
from equiv.pairs import load_pair
from equiv.pool import Unavailable, Worker
from equiv.result import FINDINGS, Result
from equiv.run import check_library, find_device
from equiv.worker import spec_of

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Reproduced:
    """One case's result, and the lines that tell it."""

    result: Result | None
    lines: list[str]
    exit_code: ExitCode


def repro(line: str, *, library: str | None = None, ledger_path: Path | None = None) -> Reproduced:
    """Run one case in a worker of its own.

    Raises
    ------
    UsageError : the case can't be read, or something it names can't be had.

    """
    case = parse(line)
    pair = load_pair(case.pair)
    candidates.check_name(pair, case.candidate)
    claim = claim_of(pair, case)
    check_library(library)
    device = find_device(case.device)
    entries = ledger.load(ledger_path)
    ledger.check_names(entries, pair)
    versions = environment.versions(library)
    applying = ledger.applying(entries, pair.name, case.candidate, device, versions)
    spec = spec_of(pair, case.candidate, device, library=library, entries=applying)
    lines = [
        f"case      {case}",
        f"operands  {', '.join(f'{o.name} {list(o.shape)} {o.dtype}' for o in claim.operands)}",
        f"claim     {claim.outcome}{'' if claim.aligned else ' (off the alignment)'}",
    ]
    try:
        with Worker(pair, spec) as worker:
            result = worker.run(case)
    except Unavailable as e:
        return Reproduced(None, [*lines, f"result    NOT COVERED: {e}"], ExitCode.INVALID)
    lines.append(f"result    {result.status}: {FINDINGS.get(result.status, 'as claimed')}")
    if result.detail:
        lines.append(f"detail    {result.detail}")
    if result.voices:
        lines.append(f"oracle    {result.voices}")
    if result.raised_in:
        lines.append(f"raised in {result.raised_in}")
    lines += [f"ledger    {h.entry}: {h.elements:,} elements or events" for h in result.ledger]
    if result.input_hash:
        lines.append(f"hashes    inputs {result.input_hash}, outputs {result.output_hash}")
    return Reproduced(result, lines, ExitCode.FAIL if result.failed else ExitCode.PASS)
