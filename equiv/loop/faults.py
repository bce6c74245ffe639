"""``bytegate loop faults``: each planted fault must be caught, nothing clean or harmless flagged.

Every fault runs in a process of its own, forked from one that has imported vLLM and nothing else
yet, and enters as ``--patch`` would have it. Its clean twin then runs the case that failed, and a
campaign of its own.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from equiv import environment, evidence
from equiv.errors import ExitCode, UsageError
from equiv.loop import api, campaign, case, harmless
from equiv.loop.children import in_child, side_by_side
from equiv.loop.kept import ALARMS, Kept, key_of
from equiv.loop.run import run
from equiv.profiles import profile_of, seed_of
from equiv.stopping import as_interrupt

LANES = ("edges", "ragged", "fp8", "strides")
"""Lanes that a fault is looked for in, in this order."""
DRAWS = 400
"""Cases drawn in each, for one fault."""
TWIN_CASES = 60
"""Cases drawn in each lane for a clean twin."""
CLEAN_CASES = {"dev": 200, "gate": 1_700, "nightly": 20_000}
"""Cases of the false-alarm run drawn in each of ``ragged`` and ``fp8``; ``edges`` come on top."""

NO_ALARMS: dict[str, Any] = {"alarms": [], "candidates": {}, "worst_share": 0.0}
"""What a run without clean cases has of them."""


@dataclass(frozen=True)
class LoopFaultsRequest:
    """What was asked for on the command line; ``jobs`` is how many faults run side by side."""

    only: tuple[str, ...] = ()
    profile: str | None = None
    device: str | None = None
    seed: int | None = None
    out: Path = Path("out/loop-faults")
    clean_cases: int | None = None
    jobs: int = 1
    command: str = "bytegate loop faults"


def run_faults(
    request: LoopFaultsRequest,
    progress: campaign.Progress = campaign.silent,
) -> evidence.FaultsEvidence:
    """Run the faults and the false alarms; write ``faults.json`` and ``faults.xml``.

    What is done is kept in ``faults.partial.json`` meanwhile; a run that is started again goes on
    from there.

    Raises
    ------
    UsageError
        An unknown fault, profile, or folder.
    LoopUnavailable
        There is no vLLM here that the suite knows.

    """
    from kvroute.faults import LOOP_TITLES

    started, start = datetime.now(UTC), time.monotonic()
    unknown = [number for number in request.only if number not in LOOP_TITLES]
    if unknown:
        raise UsageError(
            f"unknown fault {', '.join(unknown)}: the loop has {', '.join(LOOP_TITLES)}",
        )
    profile = profile_of(request.profile or "gate")
    evidence.check_folder(request.out)
    device, stand_ins = api.prepare(request.device, ())
    pack, any_dims = api.load_pack("fused", device)
    options = campaign.Options(
        pack=pack,
        name="fused",
        device=device,
        profile=profile,
        seed=seed_of(profile, request.seed),
        lanes=LANES,
        any_dims=any_dims,
        first_only=True,
        draws=DRAWS,
    )
    wanted = tuple(dict.fromkeys(request.only)) or tuple(LOOP_TITLES)
    cases = CLEAN_CASES[profile.name] if request.clean_cases is None else request.clean_cases
    kept = Kept(request.out, key_of(options, clean=cases, twin=TWIN_CASES, draws=DRAWS))
    jobs: dict[str, Callable[[], Any]] = {
        number: partial(fault_row, number, LOOP_TITLES[number], options) for number in wanted
    }
    if cases:
        alone = {ALARMS: partial(in_child, _false_alarms, options, cases)}
        jobs = {**alone, **jobs} if request.jobs > 1 else {**jobs, **alone}  # the longest first
    total = len(jobs)
    jobs = {name: work for name, work in jobs.items() if name not in kept}
    ended = total - len(jobs)

    def begun(name: str) -> None:
        progress(name, "faults", ended, total)

    def done(name: str, result: Any) -> None:
        nonlocal ended
        kept.add(name, result)
        ended += 1
        progress(name, "faults", ended, total)

    with as_interrupt(signal.SIGTERM, signal.SIGHUP):
        side_by_side(jobs, request.jobs, begun=begun, done=done)
    rows = [kept.row(number) for number in wanted]
    alarms = NO_ALARMS | (kept.alarms() if cases else {})
    alarms["stand_ins"] = stand_ins
    alarms["cases"] = sum(alarms["candidates"].values())
    bad = any(row.outcome != "caught" for row in rows) or bool(alarms["alarms"])
    code = ExitCode.FAIL if bad else ExitCode.PASS
    made = evidence.FaultsEvidence(
        verdict="FAIL" if bad else "PASS",
        exit_code=int(code),
        pair="loop",
        profile=profile.name,
        device=device,
        seed=options.seed,
        faults=rows,
        false_alarms=alarms,
        environment=environment.collect(device, None),
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - start, 3),
        command=request.command,
        resumed=[name for name in kept.before if name in {*wanted, ALARMS}],
    )
    from equiv import junit

    evidence.write(request.out / "faults.json", made)
    evidence.write_text(request.out / "faults.xml", junit.of_faults(made))
    kept.forget()
    return made


def fault_row(number: str, title: str, options: campaign.Options) -> evidence.FaultRow:
    """Run one fault until a lane fails, and its clean twin on the case that failed."""
    from kvroute.faults import clean_of, patch_of
    from kvroute.faults.loop_faults import STAND_INS

    start = time.monotonic()
    faulty, clean = patch_of(number) or "", clean_of(number)
    done = in_child(_search, faulty, options)
    finding, cases = done["finding"], done["cases"]
    twin = in_child(_twin, clean, finding, options)
    caught = finding is not None and twin["problem"] == "" and not _foreign(finding)
    detail = finding["detail"] if finding else "no lane failed"
    if options.device == "cpu" and number in STAND_INS:
        detail += f" [{STAND_INS[number]}]"
    return evidence.FaultRow(
        id=number,
        title=title,
        outcome="caught" if caught else "missed",
        lane=finding["lane"] if finding else "",
        cases=cases,
        smallest=finding["case"] if finding else "",
        kind=finding["kind"] if finding else "",
        detail=detail,
        twin=twin["problem"] or "clean",
        seconds=round(time.monotonic() - start, 3),
        candidate=faulty,
    )


def _foreign(finding: dict[str, Any]) -> bool:
    """Whether an exception came from elsewhere than vLLM: then it isn't the fault that was seen."""
    return finding["kind"] == "raised" and not finding["raised_in"].startswith("vllm.")


def _search(faulty: str, options: campaign.Options) -> dict[str, Any]:
    from kvroute.settings import resolve

    resolve(faulty)()
    lanes, _ = campaign.run_lanes(options)
    found = next((f for lane in lanes for f in lane.findings), None)
    return {
        "finding": vars(found) if found else None,
        "cases": sum(lane.cases for lane in lanes),
    }


def _twin(clean: str, finding: dict[str, Any] | None, options: campaign.Options) -> dict[str, Any]:
    import dataclasses

    from kvroute.settings import resolve

    resolve(clean)()
    for line in (finding["case"], finding["found"]) if finding else ():
        result = run(case.parse(line), options.pack)
        if result.failed:
            return {"problem": f"the clean twin fails too on {line}: {result.detail}"}
    shorter = dataclasses.replace(options, draws=TWIN_CASES)
    lanes, _ = campaign.run_lanes(shorter)
    found = next((f for lane in lanes for f in lane.findings), None)
    return {"problem": f"the clean twin fails on {found.case}" if found else ""}


def _false_alarms(options: campaign.Options, cases: int) -> dict[str, Any]:
    import dataclasses

    wide = dataclasses.replace(options, draws=cases, first_only=False, lanes=LANES[:3])
    lanes, worst = campaign.run_lanes(wide)
    alarms = [
        {"candidate": "clean", "case": f.case, "kind": f.kind, "detail": f.detail}
        for lane in lanes
        for f in lane.findings
    ]
    counts: dict[str, int] = {"clean": sum(lane.cases for lane in lanes)}
    for name, change in harmless.CHANGES.items():
        counts[name], problems = change(options)
        alarms += [
            {"candidate": name, "case": line, "kind": kind, "detail": ""} for kind, line in problems
        ]
    return {
        "cases": sum(counts.values()),
        "alarms": alarms,
        "candidates": counts,
        "worst_share": worst,
    }


def fails_again(faulty: str, line: str) -> bool:
    """Plant a fault in a process of its own, and tell whether a case fails with it.

    Raises
    ------
    UsageError : the fault, the case or its pack isn't known here.

    """
    from kvroute.faults import LOOP_TITLES, patch_of

    one = case.parse(line)
    pack, _ = api.load_pack(one.pack, one.device)
    known = [patch_of(number) for number in LOOP_TITLES]
    if faulty not in known:
        raise UsageError(f"{faulty or 'no patch'} is none of the loop's faults")
    return bool(in_child(_planted, faulty, one, pack)["failed"])


def _planted(faulty: str, one: case.LoopCase, pack: Callable[..., Any]) -> dict[str, Any]:
    from kvroute.settings import resolve

    resolve(faulty)()
    return {"failed": run(one, pack).failed}
