"""The slower lane: real ranks on gloo, each a process, against the served ones byte for byte.

Serving the peers' shards inside the gather rests on one thing: that all ranks' metadata agree. Here
nothing rests on it. Every rank runs vLLM's loop with vLLM's own collective
(``torch.distributed.all_gather_into_tensor``), with and without the pack. Its bytes must be those
of its served run, which in turn is held against the dense reference.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from equiv import evidence
from equiv.loop import harmless, payload, world
from equiv.loop.campaign import Options, campaign_command, finding_of, lane_of
from equiv.loop.case import LoopCase, parse
from equiv.loop.result import EQUAL, Result
from equiv.loop.run import pack_keyword, run
from equiv.loop.spy import digest
from equiv.patience import stretched

CASES = {
    "dev": {2: 12, 3: 12, 4: 12},
    "gate": {2: 60, 3: 60, 4: 60, 8: 12},
    "nightly": {2: 600, 3: 600, 4: 600, 8: 100},
}
"""Cases of each size of group, by profile: eight processes mostly wait for their cores."""
ANSWER_S = 60.0
"""After so long without a rank's answer the group is given up: a collective hangs."""


class Group:
    """Real ranks, one process each, forked from a process that has imported vLLM."""

    def __init__(self, size: int, pack: Callable[..., Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve_rank, args=(rank, size, store, theirs, pack))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, case: LoopCase) -> Result:
        """Run one case on every rank; the first result that isn't equal, else rank 0's."""
        for end in self._ends:
            end.send(str(case))
        results: list[Result] = []
        for rank, end in enumerate(self._ends):
            limit = stretched(ANSWER_S)
            if not end.poll(limit):
                return Result("ranks", f"rank {rank} gave no answer in {limit:.0f} s")
            try:
                results.append(end.recv())
            except EOFError:
                return Result("ranks", f"rank {rank} died")
        return next((result for result in results if result.failed), results[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):  # a rank that died has closed its end
                end.send("")  # later ranks hold copies of earlier ends: closing ours says nothing
            end.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve_rank(
    rank: int, size: int, store: Path, end: Connection, pack: Callable[..., Any]
) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=ANSWER_S / 2),
    )
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch's, on vLLM's collective
    while line := end.recv():
        end.send(_one(parse(line).with_(rank=rank), pack))
    dist.destroy_process_group()


def _one(case: LoopCase, pack: Callable[..., Any]) -> Result:
    import torch.distributed as dist

    served = run(case, pack)
    if served.status != EQUAL:
        return served
    made = world.build(case, payload.make(case))
    context = made.metadata[case.rank].prefill.chunked_context
    context.dcp_manager._kv_gather = functools.partial(dist.all_gather_into_tensor, group=None)  # noqa: SLF001
    for keyword, chosen in ((None, None), (pack_keyword(), pack)):
        made.poison()
        found = digest(*made.call(keyword, chosen))
        if found != served.output_hash:
            route = "with the pack" if chosen else "without it"
            return replace(
                served,
                status="divergence",
                detail=f"rank {case.rank}, {route}: real ranks give other bytes than served ones",
            )
    return served


def lane(options: Options) -> evidence.Lane:
    """Run the lane ``gloo``: cases of the ragged lane on real ranks."""
    start = time.monotonic()
    counts = CASES[options.profile.name]
    statuses: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    findings: list[evidence.Finding] = []
    compared = 0
    for size, count in counts.items():
        cases = harmless.draw(options, count, ranks=(size,))
        with Group(size, options.pack) as group:
            for case in cases:
                placed = case.with_(lane="gloo", pack=options.name)
                result = group.run(placed)
                statuses[result.status] += 1
                kinds.update(result.kinds)
                compared += size * result.bytes_compared
                if result.failed:
                    findings.append(_finding(placed, result, statuses.total(), options))
                    break
    least = {f"D={size}": min(count, 8) for size, count in counts.items()}
    least |= {"continuation": 3, "no context": 3}
    missing = [
        f"{kind}: {kinds[kind]} of {needed} cases"
        for kind, needed in least.items()
        if kinds[kind] < needed and not findings
    ]
    cases_run = statuses.total()
    return lane_of(
        "gloo",
        start,
        cases=cases_run,
        drawn=cases_run,
        equal=statuses[EQUAL],
        oracle_checked=statuses[EQUAL],
        guarded=cases_run,
        bytes_compared=compared,
        kinds=dict(sorted(kinds.items())),
        least=least,
        missing=missing,
        left_out=[] if 8 in counts else ["D = 8 on real ranks (profile gate)"],  # noqa: PLR2004
        bound=1 - 0.05 ** (1 / cases_run) if cases_run and not findings else None,
        findings=findings,
    )


def _finding(case: LoopCase, result: Result, after: int, options: Options) -> evidence.Finding:
    return finding_of(
        "gloo",
        result.status,
        case=str(case),
        repro=campaign_command(options, ("gloo",)),  # one rank, served, may be right
        after_cases=after,
        detail=result.detail,
        raised_in=result.raised_in,
    )
