"""Run one lane of one candidate: enumerated cases, hypothesis's draws, findings shrunk."""

from __future__ import annotations

import dataclasses
import random
import shlex
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from equiv import evidence, shrink
from equiv.case import parse
from equiv.domain import claim_of
from equiv.errors import DoesNotFit, UsageError
from equiv.hunt import Hunt
from equiv.lanes import Lanes, Plan, Target, kinds_of, places_of
from equiv.pace import Pace
from equiv.profiles import Profile, examples, settings_of
from equiv.result import DECLARED, EQUAL, NOT_ALONE, PASSING, REFUSED, UNDEFINED, Result
from equiv.stopping import Stop, Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from equiv.case import Case
    from equiv.ledger import Entry, Seen
    from equiv.pairs import OpPair
    from equiv.pool import Worker

MAX_SIGNATURES = 6
"""Different findings after which a lane stops: one kernel rarely has more bugs to tell apart."""

LOST_WORKERS = {"cpu": 40, "cuda": 8}
"""Workers lost to undeclared crashes and hangs after which a lane stops."""

LOSS = {"crash": 1, "hang": 14}
"""What counts as how many of them: three hangs take a minute, and end a lane."""

SAMPLES = 12
"""Cases recorded with their hashes, for each lane."""

NO_ROOM = "alone it couldn't be run again: the device had no room for it"

NOT_FIRST = "not asked: it is asked of a case's first difference alone"
"""Instead of the oracle's word on another category of difference in the same case."""

LEAST_DRAWS = 40
"""Draws that a lane makes even where its time is over, on a slow or busy machine."""

CONFIRMATIONS = 3
"""Cases of a declared crash that are launched to see that it is still there."""


@dataclass(frozen=True)
class Options:
    """What a campaign runs, on what, and how much."""

    pair: OpPair
    target: Target
    profile: Profile
    seed: int
    lanes: tuple[str, ...]
    entries: tuple[Entry, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    library: str | None = None
    ledger: str | None = None
    threads: int = 1
    first_finding_only: bool = False
    shrink: bool = True
    drawn_only: bool = False
    stop: Stop = field(default_factory=Stop)


def silent(candidate: str, lane: str, done: int, total: int) -> None:
    """Show no progress."""
    del candidate, lane, done, total


def repro_command(case: Case, options: Options) -> str:
    """Return the one command that repeats a case."""
    words = ["bytegate", "equiv", "repro", str(case)]
    if options.ledger:
        words += ["--ledger", options.ledger]
    if options.library:
        words += ["--library", options.library]
    return shlex.join(words)


class _Stop(Exception):
    """A lane has seen enough."""


class LaneRun:
    """One lane of one candidate, while it runs."""

    def __init__(
        self,
        worker: Worker,
        plan: Plan,
        lanes: Lanes,
        options: Options,
        seen: dict[str, Seen],
        progress: Callable[[str, str, int, int], None],
    ) -> None:
        self.worker = worker
        self.plan = plan
        self.lanes = lanes
        self.options = options
        self.seen = seen
        self.progress = progress
        self.statuses: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.layouts: Counter[str] = Counter()
        self.places: dict[str, Counter[str]] = {}
        self.rows: list[int] = []
        self.ranges: dict[str, tuple[int, int]] = {}
        self.enumerated = self.drawn = self.skipped = 0
        self.oracle_checked = self.guarded = self.bytes_compared = 0
        self.samples: list[evidence.Sample] = []
        self.found: dict[tuple[str, str], tuple[Case, Result, int]] = {}
        self.occurrences: Counter[tuple[str, str]] = Counter()
        self.findings: list[evidence.Finding] = []
        self.missing: list[str] = []
        self.start = time.monotonic()
        self.pace = Pace()
        self.cut = False
        self.note: Callable[[LaneRun], None] = lambda _: None
        self.lost: Counter[str] = Counter()
        draws = options.profile.draws.get(plan.lane, 0)
        self.draws = draws if plan.drawn is not None else 0
        self.total = len(plan.explicit) + self.draws
        self._random = random.Random(options.seed)

    # -- one case ---------------------------------------------------------------------

    def run(self, case: Case, *, drawn: bool) -> Result:
        """Run a case and count it."""
        try:
            result = self.worker.run(case)
        except DoesNotFit as e:
            self.missing.append(str(e))
            return Result(UNDEFINED)
        self.drawn += drawn
        self.enumerated += not drawn
        self._count(case, result)
        self._tell(case)
        return result

    def _tell(self, case: Case) -> None:
        done = self.enumerated + self.drawn
        if self.pace.due(done, self.total):
            self.progress(case.candidate, self.plan.lane, done, self.total)

    def _count(self, case: Case, result: Result) -> None:
        """Add one result to what the lane reports."""
        point = dict(case.point)
        rows = self.options.pair.rows(point)
        self.rows.append(rows)
        for name, value in (*[(n, int(point[n])) for n in self.options.pair.dims], ("rows", rows)):
            low, high = self.ranges.get(name, (value, value))
            self.ranges[name] = (min(low, value), max(high, value))
        self.kinds.update(kinds_of(self.options.pair, case, self.lanes.marks))
        self.layouts.update(result.layouts)
        self.statuses[result.status] += 1
        self.oracle_checked += result.oracle_checked
        self.guarded += result.outputs_guarded
        self.bytes_compared += result.bytes_compared
        account(self.seen, result)
        if self.plan.lane == "alignment":
            outcome = result.status if result.status in PASSING else "failed"
            for place in places_of(self.options.pair, case):
                self.places.setdefault(place, Counter())[outcome] += 1
        self._sample(case, result)
        if result.failed:
            self.occurrences.update(result.signatures)
            self.lost[result.status] += result.status in LOSS

    def _sample(self, case: Case, result: Result) -> None:
        if result.failed or not result.input_hash:
            return
        sample = evidence.Sample(str(case), result.status, result.input_hash, result.output_hash)
        count = self.enumerated + self.drawn
        if len(self.samples) < SAMPLES:
            self.samples.append(sample)
        else:
            at = self._random.randrange(count)
            if at < SAMPLES:
                self.samples[at] = sample

    # -- the lane ---------------------------------------------------------------------

    def go(self) -> evidence.Lane:
        """Run the lane."""
        try:
            self._remembered()
            self._explicit()
            self._drawn()
        except _Stop as stop:
            self.missing.append(str(stop))
        except Stopped as stop:
            cases, self.cut = self.enumerated + self.drawn, True
            self.missing.append(f"{stop} after {cases:,} of {max(cases, self.total):,} cases")
        return self.report()

    def _key(self) -> bytes:
        who = f"{self.options.pair.name}/{self.lanes.base.candidate}/{self.plan.lane}"
        return f"{who}/{self.options.target.device}".encode()

    def _remembered(self) -> None:
        """Run what failed in an earlier run first; forget what no longer fails or means nothing."""
        if self.options.drawn_only:
            return
        database = examples()
        for saved in sorted(database.fetch(self._key())):
            try:
                case = parse(saved.decode())
                claim_of(self.options.pair, case)
            except (UsageError, UnicodeDecodeError):
                database.delete(self._key(), saved)
                continue
            result = self.run(case, drawn=False)
            if not result.failed:
                database.delete(self._key(), saved)
            for signature in result.signatures if result.failed else ():
                if signature not in self.found:
                    self._finding(case, result, signature)
            self._enough()

    def _explicit(self) -> None:
        limit = 20 * self.options.profile.lane_seconds
        for case in self.plan.explicit:
            if self.skip_declared(case):
                continue
            if time.monotonic() - self.start > limit:
                left = len(self.plan.explicit) - self.enumerated - self.skipped
                self.missing.append(f"{left} enumerated cases after {limit:.0f} s")
                return
            result = self.run(case, drawn=False)
            for signature in result.signatures if result.failed else ():
                if signature not in self.found:
                    self._finding(case, result, signature)
                    if self.options.first_finding_only:
                        break
            self._enough()

    def _declared_crash(self, case: Case) -> bool:
        """Whether a ledger entry says that this case kills its process, and that was confirmed."""
        for e in self.worker.spec.entries:
            if e.kind in {"crash", "hang"} and self.seen[e.id].cases >= CONFIRMATIONS:
                claim = claim_of(self.options.pair, case)
                if e.covers_case(claim.point, aligned=claim.aligned, mode=case.mode):
                    return True
        return False

    def _drawn(self) -> None:
        if self.plan.drawn is None or not self.draws:
            return
        profile = self.options.profile
        end = time.monotonic() + profile.lane_seconds
        last = time.monotonic() + 6 * profile.lane_seconds
        few = min(self.draws, LEAST_DRAWS)

        def over() -> bool:
            """Whether to stop: at the lane's time, and later only for the sake of a few draws."""
            now = time.monotonic()
            return self.drawn >= self.draws or now > (end if self.drawn >= few else last)

        round_ = 0
        while not over():
            hunt = Hunt(self, over)
            hunt.search(round_)
            round_ += 1
            if hunt.first is None:
                break
            case, result = hunt.first
            self._finding(case, result, hunt.signature, best=hunt.best)
            self._enough()

    def rerun(self, case: Case) -> Result:
        """Run a case once more, or a smaller one, without counting it."""
        try:
            result = self.worker.run(case)
        except DoesNotFit:  # any more: others may use the device too
            return Result(UNDEFINED)
        self.lost[result.status] += result.status in LOSS
        self._tell(case)
        return result

    def skip_declared(self, case: Case) -> bool:
        """Whether a case is left out because the ledger declares its crash; counts it."""
        if self._declared_crash(case):
            self.skipped += 1
            return True
        return False

    def costly(self, result: Result) -> bool:
        """Whether running into this failure again and again takes too long to shrink it."""
        lost_device = result.status == "crash" and self.options.target.cuda
        return result.status == "hang" or lost_device

    @property
    def shrink_seconds(self) -> float:
        """Seconds for shrinking one finding."""
        return self.options.profile.shrink_seconds if self.options.shrink else 0.0

    def _enough(self) -> None:
        if self.found and self.options.first_finding_only:
            msg = "stopped at the first finding, as asked"
            raise _Stop(msg)
        if len(self.found) >= MAX_SIGNATURES:
            msg = f"stopped after {MAX_SIGNATURES} different findings"
            raise _Stop(msg)
        cost = sum(LOSS[status] * n for status, n in self.lost.items() if n)
        if cost > LOST_WORKERS["cuda" if self.options.target.cuda else "cpu"]:
            msg = f"stopped after {self.lost.total()} lost workers"
            raise _Stop(msg)

    # -- findings ---------------------------------------------------------------------

    def _finding(
        self,
        case: Case,
        result: Result,
        signature: tuple[str, str],
        *,
        best: tuple[Case, Result] | None = None,
    ) -> None:
        """Shrink a failure and record it."""
        smallest, smallest_result = best or (case, result)
        self.found[signature] = (case, result, self.enumerated + self.drawn)
        results: dict[str, Result] = {str(smallest): smallest_result}

        def fails(c: Case) -> bool:
            again = self.rerun(c)
            if not (again.failed and signature in again.signatures):
                return False  # what was told of it before stays: a race need not repeat
            results[str(c)] = again
            return True

        set_elements: int | None = None
        stopped = ""
        if self.options.shrink and not self.costly(result):
            pair, seconds = self.options.pair, self.options.profile.shrink_seconds
            options = settings_of(self.options.profile, 60)
            try:
                smallest = shrink.structure(pair, smallest, fails, seconds, options)
                d = results[str(smallest)].of(signature) if str(smallest) in results else None
                at = (d.output, d.index) if d else None
                if shrink.affordable(pair, smallest):
                    smallest = shrink.bytes_(pair, smallest, fails, seconds, at)
            except Stopped as stop:
                stopped = str(stop)
            if smallest.fill.kind == "zero":
                set_elements = len(smallest.overrides)
        told = results.get(str(smallest), smallest_result)
        if not self.options.drawn_only:
            examples().save(self._key(), str(smallest).encode())
        d = told.of(signature)
        detail = d.sentence() if d else told.detail
        if self.options.shrink and not self.costly(result):
            try:
                detail += self._alone(smallest, signature)
            except Stopped as stop:
                stopped = str(stop)
        self.findings.append(
            evidence.Finding(
                lane=self.plan.lane,
                kind=told.status,
                case=str(smallest),
                found=str(case),
                after_cases=self.enumerated + self.drawn,
                detail=detail,
                voices=told.voices if d is told.difference else NOT_FIRST,
                raised_in=told.raised_in,
                repro=repro_command(smallest, self.options),
                occurrences=0,
                set_elements=set_elements,
                not_shrunk=stopped or self._not_shrunk(result, smallest, set_elements),
            )
        )
        self.note(self)

    def _alone(self, case: Case, signature: tuple[str, str]) -> str:
        """Say how a case ends that is the first of a fresh process; empty where it fails again."""
        self.worker.restart()
        again = self.rerun(case)
        if again.status == UNDEFINED:
            return f"; {NO_ROOM}"
        return "" if again.failed and signature in again.signatures else f"; {NOT_ALONE}"

    def _not_shrunk(self, result: Result, smallest: Case, set_elements: int | None) -> str:
        """Say why a finding's case is no smaller; empty where it is zeros but for some elements."""
        if not self.options.shrink:
            return "nothing was to be shrunk"
        if self.costly(result):
            return f"a {result.status} takes too long to run into it again and again"
        return shrink.kept(self.options.pair, smallest) if set_elements is None else ""

    def report(self, unfinished: str = "") -> evidence.Lane:
        """Return what the lane did, and why it isn't finished where it isn't."""
        findings = [
            dataclasses.replace(f, occurrences=self.occurrences[s])
            for f, s in zip(self.findings, self.found, strict=True)
        ]
        cases = self.enumerated + self.drawn
        missing = [*self.missing, *([unfinished] if unfinished else [])]
        for kind, least in self.plan.least.items():
            if self.kinds[kind] < least and not self.cut and not unfinished:
                missing.append(f"{kind}: {self.kinds[kind]} of {least}")
        state = "failed" if findings else "not covered" if missing or not cases else "passed"
        clean = self.drawn and not findings
        left_out = list(self.plan.left_out)
        if self.skipped:
            left_out.append(
                f"{self.skipped} cases whose crash the ledger declares, not launched again"
            )
        return evidence.Lane(
            lane=self.plan.lane,
            state=state,
            cases=cases,
            enumerated=self.enumerated,
            drawn=self.drawn,
            equal=self.statuses[EQUAL],
            refused=self.statuses[REFUSED],
            declared=self.statuses[DECLARED],
            undefined=self.statuses[UNDEFINED],
            oracle_checked=self.oracle_checked,
            guarded=self.guarded,
            bytes_compared=self.bytes_compared,
            seconds=round(time.monotonic() - self.start, 3),
            kinds=dict(sorted(self.kinds.items())),
            least=dict(self.plan.least),
            ranges=dict(self.ranges),
            median_rows=int(statistics.median(self.rows)) if self.rows else 0,
            layouts_differ=dict(self.layouts),
            missing=missing,
            left_out=left_out,
            bound=1 - 0.05 ** (1 / self.drawn) if clean else None,
            findings=findings,
            samples=self.samples,
            alignment={place: dict(sorted(n.items())) for place, n in sorted(self.places.items())},
        )


def account(seen: dict[str, Seen], result: Result) -> None:
    """Add one result's ledger hits."""
    for name in result.eligible:
        seen[name].eligible_cases += 1
    for name in {h.entry for h in result.ledger}:
        seen[name].cases += 1
    for hit in result.ledger:
        seen[hit.entry].elements += hit.elements
        for key, patterns in hit.patterns.items():
            seen[hit.entry].patterns.setdefault(key, set()).update(patterns)
