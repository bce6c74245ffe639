"""``bytegate equiv faults``: the tester is tested.

Every planted fault of the pair runs as a candidate, through the same door as anyone's kernel. It is
caught when a lane fails and the clean twin, which differs from it in one place, passes the very
case on which it failed; a crash or an exception also has to end in the faulty module. Beside it
runs the false-alarm campaign: the reference against itself, clean twins, harmless variants.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equiv import campaign, candidates, environment, evidence, ledger, parallel
from equiv.case import parse
from equiv.errors import DoesNotFit, ExitCode, UsageError
from equiv.lanes import LANES
from equiv.pairs import load_pair
from equiv.partial import UNFINISHED, Earlier
from equiv.pool import Worker
from equiv.profiles import profile_of, seed_of
from equiv.run import find_device, target_of
from equiv.stopping import ENDING, Stop, Stopped
from equiv.worker import spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from equiv.pairs import Fault

CLEAN_CASES = {"dev": 1_000, "gate": 10_000, "nightly": 100_000}
"""Cases of the false-alarm campaign, by profile."""

CLEAN_SHARES = {"shapes": 0.45, "strides": 0.45, "modes": 0.1}
"""How the false-alarm cases of one kernel are spread over the lanes that draw."""

NO_ALARMS: dict[str, Any] = {"cases": 0, "alarms": [], "candidates": {}}


@dataclass(frozen=True)
class FaultsRequest:
    """What was asked for on the command line."""

    pair: str = "kvpack"
    only: tuple[str, ...] = ()
    profile: str | None = None
    device: str | None = None
    seed: int | None = None
    out: Path = Path("out/faults")
    clean_cases: int | None = None
    command: str = "bytegate equiv faults"


def run_faults(
    request: FaultsRequest,
    progress: Callable[[str, str, int, int], None] = campaign.silent,
    stop: Stop | None = None,
) -> evidence.FaultsEvidence:
    """Run the faults and the false-alarm campaign; write ``faults.json`` and ``faults.xml``.

    They are written when the run begins and after each fault, as NOT COVERED, or FAIL where one was
    missed. ``stop``, and a signal, ends the run as ``equiv.run.run``'s.

    Raises
    ------
    UsageError : something that was asked for can't be used.

    """
    started, start = datetime.now(UTC), time.monotonic()
    pair = load_pair(request.pair)
    known = {f.id: f for f in pair.faults}
    unknown = [i for i in request.only if i not in known]
    if unknown:
        msg = (
            f"unknown fault {', '.join(unknown)}: pair {pair.name} has {', '.join(known) or 'none'}"
        )
        raise UsageError(msg)
    profile = profile_of(request.profile or "gate")
    device = find_device(request.device)
    evidence.check_folder(request.out)
    entries = ledger.load()
    options = campaign.Options(
        pair=pair,
        target=target_of(device),
        profile=profile,
        seed=seed_of(profile, request.seed),
        lanes=LANES,
        entries=entries,
        versions=environment.versions(),
        first_finding_only=True,
    )
    options = replace(options, stop=stop or options.stop)
    wanted = [known[i] for i in dict.fromkeys(request.only)] or list(pair.faults)
    at_once = parallel.at_once(options.target)
    cases = CLEAN_CASES[profile.name] if request.clean_cases is None else request.clean_cases
    done: dict[str, evidence.FaultRow] = {}
    lock = threading.Lock()

    at_first = environment.collect(device, None)

    def write(alarms: dict[str, Any], unfinished: str = "") -> evidence.FaultsEvidence:
        left = partial(_row, outcome="not_covered", detail=unfinished)
        rows = [done.get(f.id) or left(f) for f in wanted]
        bad = any(r.outcome == "missed" for r in rows) or bool(alarms["alarms"])
        caught = any(r.outcome == "caught" for r in rows) and not unfinished
        code = ExitCode.FAIL if bad else ExitCode.PASS if caught else ExitCode.INVALID
        made = evidence.FaultsEvidence(
            verdict="FAIL" if bad else "PASS" if caught else "NOT COVERED",
            exit_code=int(code),
            pair=pair.name,
            profile=profile.name,
            device=device,
            seed=options.seed,
            faults=rows,
            false_alarms=alarms,
            environment=at_first if unfinished else environment.collect(device, None),
            started=started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - start, 3),
            command=request.command,
        )
        from equiv import junit

        evidence.write(request.out / "faults.json", made)
        evidence.write_text(request.out / "faults.xml", junit.of_faults(made))
        return made

    def one(fault: Fault) -> None:
        row = fault_row(fault, options, progress)
        with lock:
            done[fault.id] = row
            write(NO_ALARMS, UNFINISHED)

    with options.stop.on(*ENDING):
        Earlier(request.out, "faults.json", "faults.xml")
        write(NO_ALARMS, UNFINISHED)
        parallel.each(wanted, one, at_once=at_once, stop=options.stop)
        alarms = false_alarms(options, cases, wanted, progress)
        return write(alarms, options.stop.reason if options.stop.is_set() else "")


def fault_row(
    fault: Fault, options: campaign.Options, progress: Callable[[str, str, int, int], None]
) -> evidence.FaultRow:
    """Run one fault until something fails, then its clean twin on the case that failed.

    A fault that the run's end left undecided is not covered.
    """
    start = time.monotonic()
    try:
        return _fault_row(fault, options, progress, start)
    except Stopped as e:
        return _row(fault, "not_covered", detail=str(e), start=start)


def _fault_row(
    fault: Fault,
    options: campaign.Options,
    progress: Callable[[str, str, int, int], None],
    start: float,
) -> evidence.FaultRow:
    reason = _not_here(fault, options)
    if reason:
        return _row(fault, "not_covered", detail=reason)
    lanes = (fault.lane, *[x for x in LANES if x != fault.lane])
    found, _ = campaign.run_candidate(fault.faulty, replace(options, lanes=lanes), progress)
    cases = sum(x.cases for x in found.lanes)
    failing = [f for x in found.lanes for f in x.findings]
    left_out = [m for x in found.lanes for m in x.left_out if "GiB" in m]
    if not failing:
        options.stop.check()
    if not failing and fault.needs in {"nightly", "large"} and left_out:
        return _row(fault, "not_covered", cases=cases, detail=left_out[0], start=start)
    if not failing:
        detail = found.reason or f"no lane failed in {cases:,} cases"
        return _row(fault, "missed", cases=cases, detail=detail, start=start)
    finding = failing[0]
    try:
        twin, status = _twin(fault, finding.case, options)
    except DoesNotFit as e:
        detail = f"caught, but nothing can be said of its twin: {e}"
        return _row(fault, "not_covered", cases=cases, detail=detail, start=start)
    outside = finding.kind in {"raised", "crash"} and not _inside(fault, finding.raised_in)
    outcome = "caught" if twin and not outside else "missed"
    note = "" if twin else f"; the clean twin fails the same case ({status})"
    note += f"; the exception came from {finding.raised_in}" if outside else ""
    return evidence.FaultRow(
        id=fault.id,
        title=fault.title,
        outcome=outcome,
        lane=finding.lane,
        cases=cases,
        smallest=finding.case,
        kind=finding.kind,
        detail=finding.detail + note,
        twin="clean" if twin else status,
        seconds=round(time.monotonic() - start, 3),
        candidate=fault.faulty,
    )


def _inside(fault: Fault, raised_in: str) -> bool:
    """Whether ``module:function`` lies in a fault's module or package; also where it is unknown."""
    module = fault.faulty.rpartition(":")[0]
    own = Path(module).stem if module.endswith(".py") else module
    package, _, name = own.rpartition(".")
    where = raised_in.partition(":")[0]
    return (
        not where
        or where.split(".")[-1] == name
        or (bool(package) and where.startswith(f"{package}."))
    )


def _row(
    fault: Fault, outcome: str, *, cases: int = 0, detail: str = "", start: float | None = None
) -> evidence.FaultRow:
    seconds = 0.0 if start is None else round(time.monotonic() - start, 3)
    return evidence.FaultRow(
        fault.id, fault.title, outcome, "", cases, "", "", detail, "", seconds, fault.faulty
    )


def _not_here(fault: Fault, options: campaign.Options) -> str:
    if fault.needs == "cuda" and not options.target.cuda:
        return "needs a GPU"
    profile, cuda = options.profile, options.target.cuda
    in_full = profile.dense_sizes or (cuda and profile.largest_rows)
    if fault.needs == "nightly" and not in_full:
        return "needs the profile nightly (12 GB), or gate on a GPU"
    if fault.needs == "large" and not (cuda and in_full):
        return "needs the profile gate or nightly on a GPU"
    return ""


def _twin(fault: Fault, line: str, options: campaign.Options) -> tuple[bool, str]:
    """Run the clean twin on a case; whether it passes, and its status.

    Raises
    ------
    DoesNotFit : the device has no room for it.

    """
    case = parse(line).with_(candidate=fault.clean)
    candidates.check_name(options.pair, fault.clean)
    device = options.target.device
    entries = ledger.applying(
        options.entries, options.pair.name, fault.clean, device, options.versions
    )
    spec = spec_of(options.pair, fault.clean, device, library=options.library, entries=entries)
    with Worker(options.pair, spec, options.stop) as worker:
        result = worker.run(case)
    return not result.failed, result.status


def false_alarms(
    options: campaign.Options,
    cases: int,
    faults: Sequence[Fault],
    progress: Callable[[str, str, int, int], None],
) -> dict[str, Any]:
    """Run clean kernels: half of the cases the reference against itself, the rest shared out.

    Returns
    -------
    ``{"cases", "alarms": [{"candidate", "case", "kind", "detail"}], "candidates": {name: cases}}``.

    """
    if not cases:
        return NO_ALARMS
    twins = [f for f in faults if not _not_here(f, options)]
    others = [h.faulty for h in options.pair.harmless] + sorted({f.clean for f in twins})
    shares = {"stock": cases - cases // 2 if others else cases}
    for i, name in enumerate(others):
        shares[name] = cases // 2 // len(others) + (i < cases // 2 % len(others))
    counts: dict[str, int] = {}
    alarms = []

    def clean(name: str) -> evidence.Candidate:
        share = shares[name]
        draws = {lane: max(1, round(share * weight)) for lane, weight in CLEAN_SHARES.items()}
        quick = replace(
            options,
            profile=replace(options.profile, lane_seconds=600.0, draws=draws),
            lanes=tuple(draws),
            drawn_only=True,
        )
        return campaign.run_candidate(name, quick, progress)[0]

    at_once = parallel.at_once(options.target)
    for found in parallel.each(list(shares), clean, at_once=at_once, stop=options.stop):
        counts[found.name] = sum(x.cases for x in found.lanes)
        alarms += [
            {"candidate": found.name, "case": f.case, "kind": f.kind, "detail": f.detail}
            for x in found.lanes
            for f in x.findings
        ]
    return {"cases": sum(counts.values()), "alarms": alarms, "candidates": counts}
