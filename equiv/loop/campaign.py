"""Run the lanes of the loop: enumerated cases, hypothesis's draws, shrinking, least counts."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import find
from hypothesis.errors import Flaky, NoSuchExample

from equiv import evidence
from equiv.loop import lanes, shrink
from equiv.loop.case import LoopCase
from equiv.loop.result import EQUAL, REFUSED, Result
from equiv.loop.run import run
from equiv.pace import Pace
from equiv.profiles import Profile, settings_of
from equiv.stopping import Stop

MAX_SIGNATURES = 4
"""Different findings after which a lane stops."""
SAMPLES = 12
"""Cases recorded with their hashes, for each lane."""

PATIENCE = 5.0
"""Lane times more for kinds that lack cases: on a GPU the first cases wait for compilers."""

Progress = Callable[[str, str, int, int], None]


@dataclass(frozen=True)
class Options:
    """What a campaign runs, and how much.

    Attributes
    ----------
    pack : the callable under test; ``name`` is its spec, ``any_dims`` whether it takes small heads
        and float32, as the CPU's own does.
    patches : specs, for the repro command.
    share_gpu : whether ranks of the lane ``nccl`` share GPUs where there are too few.
    first_only : stop at the first finding.
    watch : is told every case before it runs, shrinking included.
    stop : ends the run when it is set; whoever waits for a process looks at it.

    """

    pack: Callable[..., Any]
    name: str
    device: str
    profile: Profile
    seed: int
    lanes: tuple[str, ...] = lanes.LANES
    patches: tuple[str, ...] = ()
    any_dims: bool = True
    share_gpu: bool = False
    first_only: bool = False
    draws: int | None = None
    shrink: bool = True
    watch: Callable[[LoopCase], None] | None = None
    stop: Stop = field(default_factory=Stop, compare=False)

    def run(self, case: LoopCase) -> Result:
        """Run one case."""
        if self.watch is not None:
            self.watch(case)
        return run(case, self.pack)


class LaneRun:
    """One lane, while it runs."""

    def __init__(self, plan: lanes.Plan, options: Options, progress: Progress) -> None:
        self.plan = plan
        self.options = options
        self.progress = progress
        self.statuses: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.ranges: dict[str, tuple[int, int]] = {}
        self.tokens: list[int] = []
        self.chunks = self.bytes = self.enumerated = self.drawn = 0
        self.worst = 0.0
        self.samples: list[evidence.Sample] = []
        self.found: dict[tuple[str, str], evidence.Finding] = {}
        self.occurrences: Counter[tuple[str, str]] = Counter()
        self.missing: list[str] = []
        self.start = time.monotonic()
        self.pace = Pace()
        default = plan.draws.get(options.profile.name, 0)
        asked = default if options.draws is None else options.draws
        self.draws = 0 if plan.drawn is None else asked
        self._random = Random(options.seed)

    def go(self) -> evidence.Lane:
        """Run the lane and return what it did."""
        for case in self.plan.explicit:
            self._case(case, drawn=False)
            if self._enough():
                break
        if not self._enough():
            self._draw()
        return self._report()

    def _case(self, case: LoopCase, *, drawn: bool) -> Result:
        result = self.options.run(case)
        if drawn:
            self.drawn += 1
        else:
            self.enumerated += 1
        self.statuses[result.status] += 1
        self.kinds.update(result.kinds)
        self.tokens.append(sum(case.contexts))
        self.chunks += result.chunks
        self.bytes += result.bytes_compared
        self.worst = max(self.worst, result.worst)
        measured = {
            "ranks": case.ranks,
            "heads": case.heads,
            "interleave": case.interleave,
            "page": case.page,
            "workspace": case.workspace,
            "requests": len(case.requests),
            "context": sum(case.contexts),
            "chunks": result.chunks,
        }
        for name, value in measured.items():
            low, high = self.ranges.get(name, (value, value))
            self.ranges[name] = (min(low, value), max(high, value))
        if result.failed:
            self.occurrences[result.signature] += 1
            if result.signature not in self.found:
                self._finding(case, result)
        elif result.input_hash:
            self._sample(case, result)
        done = self.enumerated + self.drawn
        if self.pace.due(done, -1):
            total = len(self.plan.explicit) + self.draws
            self.progress(self.options.name, self.plan.lane, done, max(total, done))
        return result

    def _draw(self) -> None:
        if self.plan.drawn is None or not self.draws:
            return
        end = time.monotonic() + self.options.profile.lane_seconds
        last = end + PATIENCE * self.options.profile.lane_seconds

        def over() -> bool:
            """Whether to stop: at the lane's time, later where a kind still lacks cases."""
            now = time.monotonic()
            return now > (last if self._lacking() else end) or self._enough()

        def see(case: LoopCase) -> bool:
            if self.drawn < self.draws and not over():
                self._case(case, drawn=True)
            return False  # nothing ends the draw: shrinking is ours, the case's own steps

        with contextlib.suppress(NoSuchExample, Flaky):
            find(
                self.plan.drawn,
                see,
                settings=settings_of(self.options.profile, self.draws),
                random=Random(self.options.seed),
            )

    def _lacking(self) -> list[str]:
        """Name the kinds below their least counts."""
        return [
            f"{kind}: {self.kinds[kind]} of {least} cases"
            for kind, least in self.plan.least.items()
            if self.kinds[kind] < least
        ]

    def _enough(self) -> bool:
        return len(self.found) >= (1 if self.options.first_only else MAX_SIGNATURES)

    def _finding(self, case: LoopCase, result: Result) -> None:
        after = self.enumerated + self.drawn
        best, best_result = case, result
        if self.options.shrink:
            results = {str(case): result}

            def fails(trial: LoopCase) -> bool:
                again = self.options.run(trial)
                results[str(trial)] = again
                return again.failed and again.signature == result.signature

            best = shrink.smallest(
                case,
                fails,
                self.options.profile.shrink_seconds,
                any_dims=self.options.any_dims,
            )
            best_result = results[str(best)]
        self.found[result.signature] = evidence.Finding(
            lane=self.plan.lane,
            kind=best_result.status,
            case=str(best),
            found=str(case),
            after_cases=after,
            detail=best_result.detail,
            voices="",
            raised_in=best_result.raised_in,
            repro=repro_command(best, self.options.patches),
            occurrences=0,
            set_elements=None,
        )

    def _sample(self, case: LoopCase, result: Result) -> None:
        sample = evidence.Sample(str(case), result.status, result.input_hash, result.output_hash)
        if len(self.samples) < SAMPLES:
            self.samples.append(sample)
            return
        at = self._random.randrange(self.enumerated + self.drawn)
        if at < SAMPLES:
            self.samples[at] = sample

    def _report(self) -> evidence.Lane:
        missing = list(self.missing)
        if not self.found:
            missing += self._lacking()
        checked = self.statuses[EQUAL]
        return lane_of(
            self.plan.lane,
            self.start,
            cases=self.enumerated + self.drawn,
            enumerated=self.enumerated,
            drawn=self.drawn,
            equal=checked,
            refused=self.statuses[REFUSED],
            oracle_checked=checked,
            guarded=self.enumerated + self.drawn,
            bytes_compared=self.bytes,
            kinds=dict(sorted(self.kinds.items())),
            least=dict(self.plan.least),
            ranges=dict(self.ranges),
            median_rows=int(statistics.median(self.tokens)) if self.tokens else 0,
            missing=missing,
            left_out=list(self.plan.left_out),
            bound=1 - 0.05 ** (1 / self.drawn) if self.drawn and not self.found else None,
            findings=[
                dataclasses.replace(finding, occurrences=self.occurrences[signature])
                for signature, finding in self.found.items()
            ],
            samples=self.samples,
        )


def lane_of(lane: str, start: float, **facts: Any) -> evidence.Lane:
    """Return a lane's evidence from what it has to say; ``start`` is by the monotonic clock.

    Whatever isn't said is 0, empty or None. Findings make the state, else what is missing does.
    """
    said: dict[str, Any] = {
        **dict.fromkeys(("cases", "enumerated", "drawn", "equal", "refused", "declared"), 0),
        **dict.fromkeys(("undefined", "oracle_checked", "guarded", "bytes_compared"), 0),
        **{name: {} for name in ("kinds", "least", "ranges", "layouts_differ")},
        **{name: [] for name in ("missing", "left_out", "findings", "samples")},
        "median_rows": 0,
        "bound": None,
        **facts,
    }
    state = "failed" if said["findings"] else "not covered" if said["missing"] else "passed"
    seconds = round(time.monotonic() - start, 3)
    return evidence.Lane(lane=lane, state=state, seconds=seconds, **said)


def finding_of(lane: str, kind: str, *, case: str, repro: str, **facts: Any) -> evidence.Finding:
    """Return a finding that was not shrunk from a larger one; what isn't said is empty."""
    said: dict[str, Any] = {
        "found": case,
        "after_cases": 0,
        "detail": "",
        "voices": "",
        "raised_in": "",
        "occurrences": 1,
        "set_elements": None,
        **facts,
    }
    return evidence.Finding(lane=lane, kind=kind, case=case, repro=repro, **said)


def repro_command(case: LoopCase, patches: tuple[str, ...]) -> str:
    """Return the one command that repeats a case."""
    words = ["bytegate", "loop", "repro", str(case)]
    for patch in patches:
        words += ["--patch", patch]
    return shlex.join(words)


def campaign_command(options: Options, names: tuple[str, ...]) -> str:
    """Return the one command that runs these lanes again, in this order, on the same draws."""
    words = ["bytegate", "loop", *(word for name in names for word in ("--lane", name))]
    words += ["--profile", options.profile.name, "--seed", str(options.seed)]
    if options.name != "fused":
        words += ["--pack", options.name]
    if options.device != "cpu":
        words += ["--device", options.device]
    if options.share_gpu and "nccl" in names:  # without that lane it is refused
        words += ["--share-gpu"]
    for patch in options.patches:
        words += ["--patch", patch]
    return shlex.join(words)


def silent(candidate: str, lane: str, done: int, total: int) -> None:
    """Report no progress."""
    del candidate, lane, done, total


def _apart(lane: str, options: Options, progress: Progress) -> tuple[evidence.Lane, float]:
    """Run a lane that starts processes of its own."""
    from equiv.loop import engine, gloo, nccl

    if lane == "engine":
        return engine.lane(options), 0.0
    return {"gloo": gloo.lane, "nccl": nccl.lane}[lane](options, progress)


def run_lanes(options: Options, progress: Progress = silent) -> tuple[list[evidence.Lane], float]:
    """Run every lane.

    Returns
    -------
    What each did, and the largest share of its bound that any result used.

    """
    base = LoopCase(
        lane="",
        ranks=2,
        rank=0,
        interleave=1,
        page=16,
        heads=1,
        workspace=32,
        requests=((1, 1),),
        pack=options.name,
        device=options.device,
        dtype="fp32" if options.any_dims else "bf16",
    )
    found, worst = [], 0.0
    dims = "small" if options.any_dims else "real"
    for lane in options.lanes:
        if lane in lanes.APART:
            done, share = _apart(lane, options, progress)
            found.append(done)
            worst = max(worst, share)
            continue
        one = LaneRun(lanes.plan(lane, base, dims=dims), options, progress)
        found.append(one.go())
        worst = max(worst, one.worst)
        if found[-1].findings and options.first_only:
            break
    return found, worst
