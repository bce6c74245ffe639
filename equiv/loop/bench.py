"""How many loop cases a second run on one core, drawn by hypothesis, everything on."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from random import Random

from hypothesis import find
from hypothesis.errors import NoSuchExample

from equiv.loop import api, lanes
from equiv.loop.case import LoopCase
from equiv.loop.lanes import RANKS
from equiv.loop.run import run
from equiv.profiles import profile_of, settings_of


@dataclass(frozen=True)
class Rate:
    """The rate at one size of group.

    Attributes
    ----------
    ranks : D.
    cases : run; ``chunks`` and ``context`` are means of a case.
    wall_per_s, cpu_per_s : cases a second, by the clock and by this process's CPU time.

    """

    ranks: int
    cases: int
    chunks: float
    context: float
    wall_per_s: float
    cpu_per_s: float


def measure(cases: int = 300, seed: int = 0) -> list[Rate]:
    """Draw and run ``cases`` of the ragged lane for each D, with small heads, on one thread.

    Raises
    ------
    LoopUnavailable
        There is no vLLM here that the suite knows.

    """
    device, _ = api.prepare("cpu", ())
    pack, _ = api.load_pack("fused", device)
    run(LoopCase("ragged", 2, 0, 1, 16, 1, 32, ((1, 1),)), pack)  # imports aren't what is measured
    return [_rate(ranks, cases, seed, pack) for ranks in RANKS]


def _rate(ranks: int, cases: int, seed: int, pack: object) -> Rate:
    base = LoopCase("ragged", 2, 0, 1, 16, 1, 32, ((1, 1),))
    plan = lanes.plan("ragged", base, dims="small", ranks=(ranks,))
    chunks = context = count = 0
    wall, cpu = time.monotonic(), time.process_time()

    def see(case: LoopCase) -> bool:
        nonlocal chunks, context, count
        result = run(case, pack)  # type: ignore[arg-type]
        chunks += result.chunks
        context += sum(case.contexts)
        count += 1
        return False

    options = settings_of(profile_of("dev"), cases)
    with contextlib.suppress(NoSuchExample):
        find(plan.drawn, see, settings=options, random=Random(seed))  # type: ignore[arg-type]
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    return Rate(ranks, count, chunks / count, context / count, count / wall, count / cpu)


def report(cases: int = 300) -> str:
    """Measure, and return the rates in a line for each D."""
    return "".join(
        f"D={rate.ranks}: {rate.cpu_per_s:.0f} cases/s of CPU time, {rate.wall_per_s:.0f} by the "
        f"clock ({rate.cases} cases, {rate.chunks:.1f} chunks and {rate.context:.0f} context "
        "tokens a case)\n"
        for rate in measure(cases)
    )
