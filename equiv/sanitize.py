"""``bytegate equiv sanitize``: candidates under NVIDIA's compute-sanitizer.

========= ==========================================================================================
memcheck  reads and writes outside of allocations: each operand's ends with its last element
initcheck reads of device memory that nothing has written, such as an output's
racecheck hazards in shared memory
========= ==========================================================================================

Byte equality can't see these: a stray read whose value is dropped changes no byte. The reference
runs under each tool as well, as the control: what it is blamed for is the tool's, and then nothing
is said about candidates. A finding is confirmed by its case alone, in a fresh process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from equiv import environment, evidence, ledger, parallel
from equiv.case import Case
from equiv.domain import claim_of
from equiv.errors import ExitCode, UsageError
from equiv.evidence import SCHEMA_VERSION
from equiv.lanes import Lanes
from equiv.pairs import OpPair, load_pair
from equiv.pool import Worker
from equiv.profiles import profile_of
from equiv.result import EQUAL
from equiv.run import check_library, find_device, target_of
from equiv.sanitized import BEGIN, CANT_RUN, END, UNAVAILABLE
from equiv.stopping import Stop
from equiv.worker import spec_of

TOOLS = ("memcheck", "initcheck", "racecheck")
PROGRAM = "compute-sanitizer"
USUAL = Path("/usr/local/cuda/bin") / PROGRAM
CASES = 24
MAX_ROWS = 2_000
LIMIT_S = 240.0
"""Seconds that one process under a tool may take."""
SAID = 2
"""Lines of a tool's that are kept."""
AT_ONCE = 4
"""Processes under a tool at once."""
LANES_USED = ("shapes", "strides", "alignment")
CONTROL = "stock"

_ERROR = re.compile(
    r"^=+ +(Invalid .*|Uninitialized .*|Error: .*|.*[Rr]ace reported .*|Program hit .*|"
    r"Warning: .*[Hh]azard.*)$"
)
_SUMMARY = re.compile(r"^=+ +(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class Report:
    """One candidate under one tool.

    Attributes
    ----------
    state : ``"passed"``, ``"failed"`` or ``"not covered"``.
    cases : calls that came to their end.
    case : the one to which the first report belongs; confirmed alone, else empty.
    said : the tool's first lines on it.
    reason : why it isn't covered.

    """

    __pydantic_config__ = _STRICT
    candidate: str
    tool: str
    state: str
    cases: int
    errors: int = 0
    case: str = ""
    said: list[str] = field(default_factory=list)
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class PlantedRow:
    """A planted fault under its tool: ``"caught"``, ``"missed"`` or ``"not covered"``.

    It is caught when its tool reports it, not its clean twin, and every byte was right.
    """

    __pydantic_config__ = _STRICT
    id: str
    title: str
    tool: str
    outcome: str
    detail: str
    case: str = ""


@dataclass(frozen=True)
class SanitizeEvidence:
    """``sanitize.json``."""

    __pydantic_config__ = _STRICT
    verdict: str
    exit_code: int
    pair: str
    device: str
    reports: list[Report]
    faults: list[PlantedRow]
    not_covered: list[str]
    cases: list[str]
    environment: dict[str, Any]
    started: str
    seconds: float
    command: str
    schema: str = "bytegate.sanitize"
    schema_version: int = SCHEMA_VERSION
    validated: bool = field(default=False)
    content_sha256: str = ""

    def contradictions(self) -> list[str]:
        """Say what can't be true together."""
        states = {r.state for r in self.reports if r.candidate != CONTROL}
        outcomes = {r.outcome for r in self.faults}
        bad = {"failed", "not covered"} & states or {"missed", "not covered"} & outcomes
        if self.verdict == "PASS" and (bad or not (states or outcomes)):
            return ["verdict PASS with something that didn't pass"]
        return []


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line."""

    pair: str = "kvpack"
    candidates: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    device: str | None = None
    library: str | None = None
    cases: int = CASES
    faults: bool = False
    out: Path = Path("out/sanitize")
    command: str = "bytegate equiv sanitize"


def program() -> str | None:
    """Return where compute-sanitizer is, or None."""
    return shutil.which(PROGRAM) or (str(USUAL) if USUAL.is_file() else None)


def chosen(pair: OpPair, device: str, candidate: str, count: int) -> list[Case]:
    """Return about ``count`` small cases that claim equal bytes, spread over lanes and axes."""
    lanes = Lanes(pair, target_of(device), profile_of("dev"), candidate, seed=0)
    found: dict[Case, None] = {}
    for lane in LANES_USED:
        fitting = [
            c
            for c in lanes.plan(lane).explicit
            if c.mode == "eager"
            and 0 < pair.rows(dict(c.point)) <= MAX_ROWS
            and claim_of(pair, c).outcome == EQUAL
        ]
        wanted = max(1, count // len(LANES_USED))
        step = max(1, len(fitting) // wanted)
        found.update(dict.fromkeys(fitting[::step][:wanted]))
    return list(found)


def read(text: str) -> tuple[int, str, list[str], int]:
    """Read a tool's output: errors, the case of the first, its lines, and calls that ended."""
    case, first, ended, errors, summed = "", "", 0, 0, 0
    said: list[str] = []
    for line in text.splitlines():
        if line.startswith(BEGIN):
            case = line.removeprefix(BEGIN).strip()
        elif line.startswith(END):
            ended += 1
        elif found := _SUMMARY.match(line):
            summed += int(found[1])
        elif found := _ERROR.match(line):
            errors += 1
            first = first or case
            if len(said) < SAID:
                said.append(environment.shortened(found[1].strip()))
        elif len(said) == 1 and (at := re.match(r"^=+ +at (.*)$", line)):
            said.append(environment.shortened("at " + at[1].strip()))
    return max(errors, summed), first, said, ended


def under(
    tool: str, pair: str, candidate: str, device: str, library: str | None, cases: Sequence[Case]
) -> Report:
    """Run cases of a candidate under a tool, in a process of its own."""
    start = time.monotonic()
    path = program()
    if path is None:
        return Report(candidate, tool, "not covered", 0, reason=f"there is no {PROGRAM} here")
    lines = [str(c.with_(candidate=candidate, device=device)) for c in cases]
    command = [path, "--tool", tool, "--print-limit", "20", "--error-exitcode", "86"]
    command += [sys.executable, "-m", "equiv.sanitized", pair, candidate, device, library or "-"]
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # each allocation is CUDA's own, to the byte
    }
    try:
        done = subprocess.run(  # noqa: S603 - our own command
            [*command, *lines],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
        )
        text, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as e:
        text, code = (e.stdout or b"").decode(errors="replace"), None
    took = round(time.monotonic() - start, 1)
    errors, case, said, ended = read(text)
    if errors and case:
        return Report(candidate, tool, "failed", ended, errors, case, said, seconds=took)
    reason = ""
    if code == CANT_RUN:
        reason = text.rsplit(UNAVAILABLE, 1)[-1].strip().splitlines()[0]
    elif code is None:
        reason = f"no end within {LIMIT_S:.0f} s, after {ended} of {len(lines)} calls"
    elif ended < len(lines) or code != 0 or errors:
        last = next((x for x in reversed(text.strip().splitlines()) if x.strip()), "nothing")
        reason = (
            f"ended with code {code} after {ended} of {len(lines)} calls, and said "
            f"{environment.shortened(last.strip())!r}"
        )
    state = "not covered" if reason else "passed"
    return Report(candidate, tool, state, ended, errors, said=said, reason=reason, seconds=took)


def confirmed(
    report: Report, pair: str, device: str, library: str | None, cases: Sequence[Case]
) -> Report:
    """Run the blamed case alone: reports and calls needn't be printed in order."""
    blamed = [
        c for c in cases if str(c.with_(candidate=report.candidate, device=device)) == report.case
    ]
    again = under(report.tool, pair, report.candidate, device, library, blamed)
    if again.state == "failed":
        return again
    return Report(
        **{**report.__dict__, "case": "", "said": [*report.said, "by one of the cases together"]}
    )


def run(asked: Asked, progress: Callable[[str], None] = lambda _: None) -> SanitizeEvidence:
    """Run candidates, or the planted faults, and write ``sanitize.json``.

    Raises
    ------
    UsageError : something that was asked for can't be used, or there is no GPU.

    """
    started, start = datetime.now(UTC), time.monotonic()
    pair = load_pair(asked.pair)
    unknown = [t for t in asked.tools if t not in TOOLS]
    if unknown:
        raise UsageError(f"unknown tool {unknown[0]!r}: expected {', '.join(TOOLS)}")
    device = find_device(asked.device)
    if not device.startswith("cuda"):
        raise UsageError("compute-sanitizer watches CUDA kernels: run on a GPU host")
    check_library(asked.library)
    evidence.check_folder(asked.out)
    tools = asked.tools or TOOLS
    cases = chosen(pair, device, CONTROL, asked.cases)
    at_once = max(1, min(AT_ONCE, parallel.cores() // 2))

    def one(job: tuple[str, str]) -> Report:
        candidate, tool = job
        library = asked.library if takes_library(pair, candidate) else None
        made = under(tool, pair.name, candidate, device, library, cases)
        if made.state == "failed" and candidate != CONTROL:
            made = confirmed(made, pair.name, device, library, cases)
        progress(f"{candidate}, {tool}: {made.state}, {made.cases} calls, {made.seconds} s")
        return made

    names = (
        ()
        if asked.faults
        else asked.candidates
        or tuple(n for n, c in pair.candidates.items() if n != CONTROL and "cuda" in c.devices)
    )
    jobs = [(n, t) for n in (CONTROL, *names) for t in tools]
    reports = parallel.each(jobs, one, at_once=at_once, stop=Stop())
    noisy = {r.tool: r for r in reports if r.candidate == CONTROL and r.state != "passed"}
    reports = [
        r
        if r.tool not in noisy or r.candidate == CONTROL
        else Report(r.candidate, r.tool, "not covered", r.cases, reason=_noise(noisy[r.tool]))
        for r in reports
    ]
    rows = []
    if asked.faults:
        planted = [f for f in getattr(pair, "sanitizer_faults", ()) if f.lane in tools]
        rows = parallel.each(
            planted,
            lambda f: planted_row(pair, f, device, cases, noisy, progress),
            at_once=at_once,
            stop=Stop(),
        )
    lines = [f"{r.candidate}, {r.tool}: {r.reason}" for r in reports if r.state == "not covered"]
    lines += [f"{r.id}: {r.detail}" for r in rows if r.outcome == "not covered"]
    lines += [f"{t}: not asked for" for t in TOOLS if t not in tools]
    verdict, code = judged([r for r in reports if r.candidate != CONTROL], rows)
    made = SanitizeEvidence(
        verdict=verdict,
        exit_code=int(code),
        pair=pair.name,
        device=device,
        reports=reports,
        faults=rows,
        not_covered=lines,
        cases=[str(c) for c in cases],
        environment=environment.collect(device, asked.library),
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - start, 3),
        command=asked.command,
    )
    evidence.write(asked.out / "sanitize.json", made)
    return made


def takes_library(pair: OpPair, candidate: str) -> bool:
    """Whether a library that was given is for this candidate."""
    known = pair.candidates.get(candidate)
    return known is not None and known.takes_library


def _noise(control: Report) -> str:
    why = control.reason or "; ".join(control.said)
    return f"the reference doesn't pass under {control.tool} either: {why}"


def judged(reports: Sequence[Report], rows: Sequence[PlantedRow]) -> tuple[str, ExitCode]:
    """Return the verdict and exit code."""
    states = {r.state for r in reports} | {r.outcome for r in rows}
    if states & {"failed", "missed"}:
        return "FAIL", ExitCode.FAIL
    if "not covered" in states or not states:
        return "NOT COVERED", ExitCode.INVALID
    return "PASS", ExitCode.PASS


def planted_row(
    pair: OpPair,
    fault: Any,
    device: str,
    cases: Sequence[Case],
    noisy: dict[str, Report],
    progress: Callable[[str], None],
) -> PlantedRow:
    """Run a planted fault and its twin under its tool, and its cases without one."""
    row = (fault.id, fault.title, fault.lane)
    if fault.lane in noisy:
        return PlantedRow(*row, "not covered", _noise(noisy[fault.lane]))
    faulty = under(fault.lane, pair.name, fault.faulty, device, None, cases)
    clean = under(fault.lane, pair.name, fault.clean, device, None, cases)
    progress(f"{fault.id}, {fault.lane}: {faulty.state}, its twin {clean.state}")
    for made in (faulty, clean):
        if made.state == "not covered":
            return PlantedRow(*row, "not covered", f"{made.candidate}: {made.reason}")
    if faulty.state != "failed":
        return PlantedRow(*row, "missed", f"{fault.lane} said nothing in {faulty.cases} calls")
    if clean.state == "failed":
        return PlantedRow(*row, "missed", f"the clean twin is blamed too: {clean.said[0]}")
    versions = environment.versions()
    entries = ledger.applying(ledger.load(), pair.name, fault.faulty, device, versions)
    with Worker(pair, spec_of(pair, fault.faulty, device, entries=entries)) as worker:
        others = [r for c in cases if (r := worker.run(c.with_(candidate=fault.faulty))).failed]
    if others:
        return PlantedRow(*row, "missed", f"not by this tool alone: {others[0].detail}")
    return PlantedRow(*row, "caught", "; ".join(faulty.said), faulty.case)
