"""Recorded batches of the loop, run again: their hashes, findings and planted faults."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

from equiv import environment
from equiv.errors import BytegateError
from equiv.gate import rerun
from equiv.gate.collect import Piece
from equiv.gate.rerun import Again, Tally, Told

ONE_BY_ONE = ("edges", "ragged", "fp8", "real", "strides")
"""Lanes whose cases run by themselves."""


def loop(piece: Piece, pick: random.Random, count: int) -> Iterator[Told]:
    """Run recorded batches of ``loop.json`` and the cases of its findings again."""
    made = piece.made
    yield from rerun.sources([(made.pack, made.pack_sha256)])
    if made.patches:
        yield "recorded cases", "not covered", f"vLLM was changed by {', '.join(made.patches)}"
        return
    if why := _unable(piece):
        yield "recorded cases", "not covered", why
        return
    samples = [s for x in made.lanes if x.lane in ONE_BY_ONE for s in x.samples]
    yield from _samples(piece, rerun.some(samples, pick, count))
    found = [f for x in made.lanes for f in x.findings]
    yield from _findings(piece, rerun.some(found, pick, count))


def _unable(piece: Piece) -> str:
    """Make this process able to run the loop, or say why it can't."""
    from equiv.loop import api

    if why := rerun.other_device(piece):
        return why
    try:
        api.prepare(rerun.device_here(piece.made.device), ())
    except BytegateError as e:
        return str(e)
    return ""


def _run(one: Any, pack: Any) -> Any:
    """Run a case where a pack that dies takes nothing with it; CUDA doesn't survive a fork."""
    from equiv.loop import isolate, run

    return (isolate.run_one if one.device == "cpu" else run.run)(one, pack)


def _samples(piece: Piece, samples: list[Any]) -> Iterator[Told]:
    from equiv.loop import api, case

    if not samples:
        yield "recorded cases", "not covered", "none has a hash"
        return
    device = rerun.device_here(piece.made.device)
    tally = Tally(rerun.elsewhere(piece.environment, device, ("torch", "vllm")))
    here = environment.collect(device, None)
    models = [str((e.get("cpu") or {}).get("model")) for e in (piece.environment, here)]
    if not tally.elsewhere and device == "cpu" and models[0] != models[1]:
        tally.elsewhere = f"made on {models[0]}, and this is {models[1]}"  # sums in another order
    start = time.monotonic()
    for s in samples:
        if time.monotonic() - start > rerun.SECONDS:
            tally.left.append(f"{s.case}: not started after {rerun.SECONDS:.0f} s")
            continue
        try:
            one = case.parse(s.case)
            pack, _ = api.load_pack(one.pack, device)
        except BytegateError as e:
            tally.left.append(f"{s.case}: {e}")
            continue
        tally.add(s, _run(one, pack), outputs=True, passes=True)
    yield from tally.told()


def _findings(piece: Piece, rows: list[Any]) -> Iterator[Told]:
    from equiv.loop import api, case
    from equiv.loop.confirm import NOT_ALONE

    again = Again()
    for f in rows:
        if again.late(f.case) or again.not_alone(f, NOT_ALONE):
            continue
        if f.lane not in ONE_BY_ONE:
            again.left.append(f"{f.case}: the lane {f.lane} runs as a whole: {f.repro}")
            continue
        try:
            one = case.parse(f.case)
            pack, _ = api.load_pack(one.pack, rerun.device_here(piece.made.device))
        except BytegateError as e:
            again.left.append(f"{f.case}: {e}")
            continue
        if _run(one, pack).failed:
            again.failed += 1
        else:
            again.wrong.append(f.case)
    yield from again.told("findings", "a finding", "its case passes")


def faults(piece: Piece, pick: random.Random, count: int) -> Iterator[Told]:
    """Plant recorded faults again, each in a process of its own, and run their smallest cases."""
    from equiv.loop import faults as planting

    rows = [r for r in piece.made.faults if r.outcome == "caught" and r.smallest]
    if why := _unable(piece):
        yield rerun.FAULTS, "not covered", why
        return
    again = Again()
    for r in rerun.some(rows, pick, count):
        if again.late(r.smallest):
            continue
        try:
            failed = planting.fails_again(r.candidate, r.smallest)
        except (BytegateError, RuntimeError) as e:  # a process that died, or can't be forked
            again.left.append(f"fault {r.id}: {e}")
            continue
        if failed:
            again.failed += 1
        else:
            again.wrong.append(f"fault {r.id}, {r.smallest}")
    yield from again.told(rerun.FAULTS, "a planted fault", "its smallest case passes")
