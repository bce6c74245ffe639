"""The served lanes in a process of their own: a pack that crashes or hangs is a finding.

The process says which case it is at before it runs it. When it dies, or gives no sign for long,
the lane has a finding of kind ``crash`` or ``hang`` with that case, and another process runs the
lanes that are left.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from equiv import apart, evidence
from equiv.errors import BytegateError
from equiv.loop import campaign
from equiv.loop.campaign import Options
from equiv.loop.case import LoopCase, parse
from equiv.loop.result import Result
from equiv.loop.run import run
from equiv.patience import stretched
from equiv.stopping import ENDING, SLICE_S, Stop

HANG_S = 90.0
"""Without a sign for so long a process hangs; the longest case takes some seconds."""
FRESH_S = 300.0
"""The same while a process that couldn't be forked imports vLLM."""
TOLD_S = 1.0
"""A signal that ended a process may have been sent to the command as well: so long it may come."""


def run_lanes(
    options: Options,
    progress: campaign.Progress = campaign.silent,
    keep: Callable[[evidence.Lane, float], None] = lambda *_: None,
) -> tuple[list[evidence.Lane], float]:
    """Run served lanes like ``campaign.run_lanes``, but in another process.

    ``keep`` is given each lane when it ends, and the largest share of its bound.

    Raises
    ------
    Stopped
        ``options.stop`` was set.

    """
    left = list(options.lanes)
    done: list[evidence.Lane] = []
    worst = 0.0
    while left:
        options.stop.check()
        child = _Child(dataclasses.replace(options, lanes=tuple(left)), progress, keep)
        try:
            found, worst_here = child.wait(left)
        finally:
            child.stop()
        done += found
        worst = max(worst, worst_here)
        left = left[len(found) :]
        if options.first_only and any(lane.findings for lane in found):
            break
    return done, worst


def run_one(case: LoopCase, pack: Callable[..., Any]) -> Result:
    """Run one case like ``equiv.loop.run.run``, but in a forked process."""
    context = multiprocessing.get_context("fork")
    end, theirs = context.Pipe(duplex=False)

    def work() -> None:
        apart.stay()
        theirs.send(run(case, pack))

    process = context.Process(target=work)
    process.start()
    theirs.close()
    try:
        if not end.poll(HANG_S) and not end.poll(stretched(HANG_S) - HANG_S):
            return Result("hang", f"no result in {stretched(HANG_S):.0f} s")
        result: Result = end.recv()
    except (EOFError, ConnectionResetError):
        process.join(5)
        return Result("crash", death(process.exitcode))
    finally:
        process.kill()
        process.join(10)
        end.close()
    return result


def death(code: int | None) -> str:
    """Say how a process ended, by its exit code."""
    with suppress(ValueError, TypeError):
        return f"the process died: {signal.Signals(-(code or 0)).name}"
    return f"the process died: exit code {code}"


def told(code: int | None, stop: Stop) -> None:
    """Tell a process that was ended with its run from one that died by itself.

    Raises
    ------
    Stopped
        The run is being stopped, or is told so just after a signal that ends runs ended the
        process: a batch system sends it to all processes at once.

    """
    until = time.monotonic() + (TOLD_S if -(code or 0) in ENDING else 0.0)
    stop.check()
    while time.monotonic() < until:
        time.sleep(SLICE_S / 4)
        stop.check()


class _Child:
    """A process that runs lanes, and what it said last."""

    def __init__(
        self,
        options: Options,
        progress: campaign.Progress,
        keep: Callable[[evidence.Lane, float], None],
    ) -> None:
        self.options = options
        self.keep = keep
        self.progress = progress
        self.start = time.monotonic()
        self.at = ""
        self.cases = 0
        # CUDA doesn't survive a fork; elsewhere a fork saves the import of vLLM and keeps patches.
        self.forked = not cuda_in_use()
        context: Any = multiprocessing.get_context("fork" if self.forked else "spawn")
        self.end, theirs = context.Pipe()
        sent = options if self.forked else parcel(options)
        self.process: Any = context.Process(target=_work, args=(theirs, sent, self.forked))
        self.process.start()
        theirs.close()

    def wait(self, lanes: Sequence[str]) -> tuple[list[evidence.Lane], float]:
        """Return the lanes that ended, the last one with a finding where the process was lost.

        Raises
        ------
        BytegateError
            What the process raised that isn't a finding.
        Stopped
            The run is being stopped.

        """
        found: list[evidence.Lane] = []
        worst = 0.0
        limit = HANG_S if self.forked else FRESH_S
        stop = self.options.stop
        while len(found) < len(lanes):
            stop.check()
            try:
                if not stop.answered(self.end, limit) and not stop.answered(
                    self.end, stretched(limit) - limit
                ):
                    why = f"no sign in {stretched(limit):.0f} s"
                    found.append(self._lost(lanes[len(found)], "hang", why))
                    return found, worst
                kind, value = self.end.recv()
            except (EOFError, ConnectionResetError):
                self.process.join(5)
                told(self.process.exitcode, stop)
                found.append(self._lost(lanes[len(found)], "crash", death(self.process.exitcode)))
                return found, worst
            if kind == "case":
                self.at, self.cases, limit = value, self.cases + 1, HANG_S
            elif kind == "progress":
                self.progress(*value)
            elif kind == "lane":
                lane, share = value
                found.append(lane)
                self.keep(lane, share)
                worst = max(worst, share)
                self.at, self.cases, self.start = "", 0, time.monotonic()
                if self.options.first_only and lane.findings:
                    return found, worst
            else:
                raise value
        return found, worst

    def _lost(self, lane: str, kind: str, detail: str) -> evidence.Lane:
        """Return a lane that ended with its process, and keep it."""
        repro = campaign.campaign_command(self.options, (lane,))
        if self.at:
            repro = campaign.repro_command(parse(self.at), self.options.patches)
        else:
            detail += ", before its first case"
        cases = max(1, self.cases)
        at = self.at or f"the start of lane {lane}"
        finding = campaign.finding_of(
            lane, kind, case=at, repro=repro, after_cases=cases, detail=detail
        )
        lost = campaign.lane_of(
            lane,
            self.start,
            cases=cases,
            enumerated=cases,
            equal=cases - 1,
            oracle_checked=cases - 1,
            guarded=cases - 1,
            left_out=["what comes after the case that took the process with it"],
            findings=[finding],
        )
        self.keep(lost, 0.0)
        return lost

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join(10)
        self.end.close()


def cuda_in_use() -> bool:
    """Whether this process has started CUDA, which a forked one can't take over."""
    import torch

    return bool(torch.cuda.is_initialized())


def _nothing(*_: Any) -> Any:
    raise NotImplementedError


def _work(end: Connection, options: Options, forked: bool) -> None:  # noqa: FBT001 - by position
    """Run lanes; say every case before it runs, and each lane when it is done."""
    apart.stay()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends this process
    try:
        if not forked:
            options = again(options)
        options = dataclasses.replace(options, watch=lambda case: end.send(("case", str(case))))
        for lane in options.lanes:
            one = dataclasses.replace(options, lanes=(lane,))
            lanes, worst = campaign.run_lanes(one, lambda *said: end.send(("progress", said)))
            end.send(("lane", (lanes[0], worst)))
            if options.first_only and lanes[0].findings:
                break
    except BrokenPipeError:
        return  # nobody listens any more
    except BytegateError as error:
        end.send(("error", error))
    except BaseException as error:  # noqa: BLE001 - told to the parent, which raises it
        end.send(("error", BytegateError(f"the loop layer failed: {error!r}")))


def parcel(options: Options) -> Options:
    """Return options that can be sent to a process that wasn't forked: ``again`` opens them."""
    return dataclasses.replace(options, pack=_nothing, watch=None)


def again(options: Options) -> Options:
    """Make this process able to run the loop as the one that sent the options, patches included."""
    from equiv.loop import api
    from equiv.pairs import add_checkout_paths

    add_checkout_paths()
    api.prepare(options.device, options.patches)
    return dataclasses.replace(options, pack=api.load_pack(options.name, options.device)[0])
