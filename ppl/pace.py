"""Progress of a run: what is scored now, tokens a second, and the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Self, TextIO

from rich import progress

from equiv.document import console_for, printable

EVERY_S = 5.0
"""Seconds between two lines where the output is no terminal."""


def clock_words(seconds: float) -> str:
    """Return ``"42 s"``, ``"3 min 05 s"`` or ``"2 h 10 min"``."""
    whole = round(seconds)
    if whole < 60:  # noqa: PLR2004 - seconds of a minute
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:  # noqa: PLR2004 - minutes of an hour
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


class Pace:
    """Shows progress on standard error: a bar on a terminal, a line now and then elsewhere.

    Parameters
    ----------
    file, clock : for tests.

    """

    def __init__(
        self, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = file or sys.stderr
        self._clock = clock
        self._began = clock()
        self._said = -EVERY_S
        self._total = self._done = 0
        self._tokens = 0
        self._busy_s = 0.0
        self._left = 0
        self._live: progress.Progress | None = None
        self._bar: Any = None

    def __enter__(self) -> Self:
        """Start the bar, on a terminal."""
        if self._file.isatty():
            self._live = progress.Progress(
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                console=console_for(self._file),
                transient=True,
            )
            self._live.start()
            self._bar = self._live.add_task("starting", total=None)
        return self

    def __exit__(self, *exc: object) -> None:
        """Take the bar away."""
        if self._live is not None:
            self._live.stop()

    def expect(self, requests: int, tokens: int, done: int) -> None:
        """Say how many requests there are, how many are stored, and the tokens still to score."""
        self._total, self._done, self._left = requests, done, tokens
        if done:
            self.say(f"{done} of {requests} results are stored, and not asked for again")

    def say(self, words: str) -> None:
        """Print a line."""
        line = f"[{self._clock() - self._began:5.0f} s] {printable(words)}"
        if self._live is not None:
            self._live.console.print(line)
        else:
            self._file.write(line + "\n")
            self._file.flush()

    def scored(self, what: str, tokens: int, wall_s: float) -> None:
        """Take note of a request that is done."""
        self._done += 1
        self._tokens += tokens
        self._busy_s += wall_s
        self._left = max(self._left - tokens, 0)
        rate = self._tokens / self._busy_s if self._busy_s else 0.0
        left = f", {clock_words(self._left / rate)} left" if rate else ""
        words = f"{what}: {self._done} of {self._total}, {rate:,.0f} tokens/s{left}"
        if self._live is not None:
            self._live.update(
                self._bar, description=printable(words), completed=self._done, total=self._total
            )
            return
        now = self._clock()
        if now - self._said >= EVERY_S or self._done == self._total:
            self._said = now
            self.say(words)
