"""Real ranks, each a process, against the served ones byte for byte: what ``gloo`` and ``nccl`` do.

Serving the peers' shards inside the gather rests on one thing: that all ranks' metadata agree. Here
nothing rests on it. Every rank runs vLLM's loop with vLLM's own collective
(``torch.distributed.all_gather_into_tensor``), with and without the pack. Its bytes must be those
of its served run, which in turn is held against the dense reference.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from equiv import evidence
from equiv.loop import campaign, isolate
from equiv.loop.campaign import Options, campaign_command, finding_of, lane_of
from equiv.loop.case import LoopCase
from equiv.loop.rank import START_S, Backend, Rank, serve
from equiv.loop.result import EQUAL, Result
from equiv.patience import stretched
from equiv.stopping import SLICE_S

ANSWER_S = 60.0
"""After so long without a rank's answer the group is given up: a collective hangs."""
GRACE_S = 2.0
"""How long the others may still answer once one rank has a finding."""
END_S = 10.0
"""How long ranks have to end by themselves."""


@dataclass(frozen=True)
class RanksPlan:
    """One such lane's cases.

    Attributes
    ----------
    cases : by size of group.
    drawn : how many of each size's cases, its last ones, were drawn.
    least : cases needed of each kind; below, the lane is NOT COVERED.
    kinds : names what a case exercises beside ``kinds_of``.
    missing : what the lane needs and lacks, before it begins.
    left_out : what it doesn't reach here.

    """

    cases: Mapping[int, Sequence[LoopCase]]
    drawn: Mapping[int, int]
    least: Mapping[str, int]
    kinds: Callable[[LoopCase], tuple[str, ...]] = lambda _: ()
    missing: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class GroupError(Exception):
    """A group of ranks didn't come up."""


class Group:
    """Real ranks, one process each.

    They are forked from a process that has imported vLLM; where that has CUDA in use, which a
    forked process can't take over, they are spawned and import it themselves.

    Raises
    ------
    GroupError
        On entering, when a rank doesn't come up.

    """

    def __init__(self, size: int, backend: Backend, options: Options) -> None:
        forked = not isolate.cuda_in_use()
        context: Any = multiprocessing.get_context("fork" if forked else "spawn")
        sent = options if forked else isolate.parcel(options)
        self._folder = tempfile.TemporaryDirectory()
        place = Path(self._folder.name) / "store"
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        self._limit = START_S
        self._first = START_S if backend.cuda or not forked else ANSWER_S
        self._lost = False
        self._stop = options.stop
        for rank in range(size):
            ours, theirs = context.Pipe()
            # A forked rank has the ends of those before it, and must let go of them: they would
            # not see this process die.
            given = [*self._ends, ours] if forked else []
            rank_ = Rank(rank, size, place, backend, sent, forked)
            process = context.Process(target=serve, args=(rank_, theirs, given))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, case: LoopCase) -> Result:
        """Run one case on every rank; the first result that isn't equal, else rank 0's.

        A rank that dies, raises in a collective, or gives no answer is a result of kind ``ranks``.
        """
        for end in self._ends:
            with contextlib.suppress(OSError):  # one that died is seen when it is listened to
                end.send(str(case))
        found = self._answers(GRACE_S)
        self._limit = ANSWER_S
        failed = [(result, rank) for rank, result in sorted(found.items()) if result.failed]
        if not failed:
            first: Result = found[0]
            return first
        self._lost = True
        # What broke by itself before what broke because a peer was gone.
        worst: Result = min(failed, key=lambda x: (x[0].status == "ranks", not x[0].raised_in))[0]
        return worst

    def _answers(self, grace: float) -> dict[int, Any]:
        """Return what each rank said; once one has a finding, the others have ``grace`` seconds."""
        found: dict[int, Any] = {}
        left: dict[Any, int] = {end: rank for rank, end in enumerate(self._ends)}
        limit = stretched(self._limit)
        until = time.monotonic() + limit
        bad = False
        while left:
            self._stop.check()
            rest = max(0.0, until - time.monotonic())
            ready: list[Any] = wait(list(left), min(rest, SLICE_S))
            if not ready and rest > SLICE_S:
                continue
            if not ready:
                silent = ", ".join(str(rank) for rank in left.values())
                word = "rank" if len(left) == 1 else "ranks"
                if not bad:
                    told = Result("ranks", f"{word} {silent} gave no answer in {limit:.0f} s")
                    found[min(left.values())] = told
                break
            for end in ready:
                rank = left.pop(end)
                try:
                    found[rank] = end.recv()
                except (EOFError, ConnectionResetError):
                    process = self._processes[rank]
                    process.join(5)
                    isolate.told(process.exitcode, self._stop)
                    died = isolate.death(process.exitcode)
                    found[rank] = Result("ranks", f"rank {rank}: {died}", raised_in=DIED)
                if found[rank].failed and not bad:
                    bad = True
                    until = min(until, time.monotonic() + grace)
        return found

    def __enter__(self) -> Self:
        """Wait until every rank has met the others."""
        try:
            found = self._answers(0.0)
            self._limit = self._first
        except BaseException:
            self._end(0.0)
            raise
        problems = [result.detail for _, result in sorted(found.items()) if result.failed]
        if problems:
            self._end(0.0)
            raise GroupError(problems[0])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tell the ranks to end; those that don't are ended."""
        self._end(0.0 if self._lost or kind is not None else END_S)

    def _end(self, limit: float) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):  # a rank that died has closed its end
                end.send("")
            end.close()
        until = time.monotonic() + limit
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


DIED = "a process"
"""Where a dead rank's finding says that it was raised."""


def run_lane(
    backend: Backend,
    options: Options,
    plan: RanksPlan,
    progress: campaign.Progress = campaign.silent,
) -> tuple[evidence.Lane, float]:
    """Run a lane on real ranks, one size of group after another.

    Returns
    -------
    What it did, and the largest share of its bound that any result used.

    """
    start = time.monotonic()
    statuses: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    findings: list[evidence.Finding] = []
    missing = list(plan.missing)
    compared = drawn = 0
    worst = 0.0
    total = sum(map(len, plan.cases.values()))
    for size, cases in plan.cases.items():
        enumerated = len(cases) - plan.drawn.get(size, 0)
        try:
            with Group(size, backend, options) as group:
                for number, case in enumerate(cases):
                    placed = case.with_(lane=backend.lane, pack=options.name)
                    result = group.run(placed)
                    statuses[result.status] += 1
                    drawn += number >= enumerated
                    kinds.update({*result.kinds, *plan.kinds(placed)})
                    compared += size * result.bytes_compared
                    worst = max(worst, result.worst)
                    progress(options.name, backend.lane, statuses.total(), total)
                    if result.failed:
                        after = statuses.total()
                        findings.append(_finding(placed, result, after, options, backend))
                        break
        except GroupError as error:
            missing.append(f"D = {size}: the group didn't come up: {error}")
    if not findings:
        missing += [
            f"{kind}: {kinds[kind]} of {needed} cases"
            for kind, needed in plan.least.items()
            if kinds[kind] < needed
        ]
    cases_run = statuses.total()
    lane = lane_of(
        backend.lane,
        start,
        cases=cases_run,
        enumerated=cases_run - drawn,
        drawn=drawn,
        equal=statuses[EQUAL],
        oracle_checked=statuses[EQUAL],
        guarded=cases_run,
        bytes_compared=compared,
        kinds=dict(sorted(kinds.items())),
        least=dict(plan.least),
        missing=missing,
        left_out=plan.left_out,
        bound=1 - 0.05 ** (1 / drawn) if drawn and not findings else None,
        findings=findings,
    )
    return lane, worst


def _finding(
    case: LoopCase, result: Result, after: int, options: Options, backend: Backend
) -> evidence.Finding:
    return finding_of(
        backend.lane,
        result.status,
        case=str(case),
        repro=campaign_command(options, (backend.lane,)),  # one rank, served, may be right
        after_cases=after,
        detail=result.detail,
        raised_in="" if result.raised_in == DIED else result.raised_in,
    )
