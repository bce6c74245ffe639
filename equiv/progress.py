"""Progress while campaigns run: live bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
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

BARS = 4
"""Bars on a terminal: those of the candidates that were heard of last."""


class Progress:
    """Shows which lane of which candidate is at which case; is itself the campaign's callback.

    Campaigns may call it from several threads at once.

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
        self._lock = threading.Lock()
        self._start = clock()
        self._said: float | None = None
        self._mentioned: set[tuple[str, str]] = set()
        self._news: dict[tuple[str, str], tuple[int, int]] = {}
        self._live: progress.Progress | None = None
        self._bars: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """Start the bars, on a terminal."""
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
        """Take the bars away, or say what is still unsaid."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
            elif self._news:
                self._say(self._clock())

    def __call__(self, candidate: str, lane: str, done: int, total: int) -> None:
        """Take note of ``done`` of ``total`` cases."""
        with self._lock:
            if self._live is not None:
                self._bar(self._live, candidate, lane, done, total)
                return
            self._news[candidate, lane] = (done, total)
            now = self._clock()
            quiet = EVERY_S
            if not self._news.keys() - self._mentioned:
                quiet = max(EVERY_S, (now - self._start) / SHARE)
            if self._said is None or now - self._said >= quiet:
                self._say(now)

    def _bar(
        self, live: progress.Progress, candidate: str, lane: str, done: int, total: int
    ) -> None:
        name = printable(f"{candidate}, {lane}")
        bar = self._bars.pop(candidate, None)
        if bar is None:
            bar = live.add_task(name, total=None)
            while len(self._bars) >= BARS:
                live.remove_task(self._bars.pop(next(iter(self._bars))))
        self._bars[candidate] = bar  # the last one in the dictionary is the latest
        live.update(bar, description=name, completed=done, total=total or None)

    def _say(self, now: float) -> None:
        words = "; ".join(
            f"{candidate}, {lane}: {done:,} of {total:,} cases"
            for (candidate, lane), (done, total) in self._news.items()
        )
        self._mentioned |= self._news.keys()
        self._news = {}
        self._said = now
        self._file.write(f"[{now - self._start:5.0f} s] {printable(words)}\n")
        self._file.flush()
