"""Progress while a campaign runs: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Self, TextIO

from rich import progress

from equiv.document import console_for, printable

if TYPE_CHECKING:
    from collections.abc import Callable

EVERY_S = 5.0
"""Seconds between two lines at the least."""

SHARE = 20
"""A lane that goes on is mentioned after a twentieth of the time so far: a log stays short."""


class Progress:
    """Shows which lane of which candidate is at which case; is itself the campaign's callback.

    Parameters
    ----------
    file : where to; standard error by default, so that a report can be piped.
    clock : seconds, for tests.

    """

    def __init__(
        self, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = file or sys.stderr
        self._clock = clock
        self._start = self._said = clock()
        self._spoke = False
        self._now: tuple[str, str] | None = None
        self._count = (0, 0)
        self._finished: list[str] = []
        self._live: progress.Progress | None = None
        self._task: Any = None

    def __enter__(self) -> Self:
        """Start the bar, on a terminal."""
        if self._file.isatty():
            self._live = progress.Progress(
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                console=console_for(self._file),
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Take the bar away, or say what is still unsaid."""
        if self._live is not None:
            self._live.stop()
            return
        if self._now is not None:
            self._finish()
            self._say(self._clock(), "")

    def __call__(self, candidate: str, lane: str, done: int, total: int) -> None:
        """Take note of ``done`` of ``total`` cases."""
        changed = (candidate, lane) != self._now
        if changed and self._now is not None:
            self._finish()
        self._now = (candidate, lane)
        self._count = (done, total)
        if self._live is not None:
            self._bar(self._live, changed=changed)
            return
        now = self._clock()
        quiet = EVERY_S if self._finished else max(EVERY_S, (now - self._start) / SHARE)
        if not self._spoke or now - self._said >= quiet:
            self._say(now, f"{candidate}, {lane}: {done:,} of {total:,} cases")

    def _bar(self, live: progress.Progress, *, changed: bool) -> None:
        done, total = self._count
        if changed:
            assert self._now is not None
            if self._task is not None:
                live.remove_task(self._task)
            self._task = live.add_task(printable(", ".join(self._now)), total=total or None)
        live.update(self._task, completed=done, total=total or None)

    def _finish(self) -> None:
        assert self._now is not None
        self._finished.append(f"{', '.join(self._now)}: {self._count[0]:,} cases, done")

    def _say(self, now: float, current: str) -> None:
        words = "; ".join([*self._finished, *([current] if current else [])])
        self._finished = []
        self._said, self._spoke = now, True
        self._file.write(f"[{now - self._start:5.0f} s] {printable(words)}\n")
        self._file.flush()
