"""One search by hypothesis: drawn cases until a new kind of failure, then its shrinking."""

from __future__ import annotations

import time
from random import Random
from typing import TYPE_CHECKING

from hypothesis import find
from hypothesis.errors import Flaky, NoSuchExample

from equiv.profiles import settings_of
from equiv.stopping import Stopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from equiv.case import Case
    from equiv.lane_run import LaneRun
    from equiv.result import Result


class Hunt:
    """The predicate of one ``hypothesis.find``; remembers what failed first, and what smaller.

    Parameters
    ----------
    lane : runs and counts the cases.
    over : whether the lane has drawn enough.

    """

    def __init__(self, lane: LaneRun, over: Callable[[], bool]) -> None:
        self.lane = lane
        self.over = over
        self.known = set(lane.found)
        self.first: tuple[Case, Result] | None = None
        self.signature: tuple[str, str] = ("", "")
        self.best: tuple[Case, Result] | None = None
        self._failing: dict[str, Result] = {}
        self._deadline = 0.0

    def search(self, round_: int) -> None:
        """Draw until something new fails, and shrink it; or until the lane is over.

        Raises
        ------
        Stopped : the run is being stopped, and nothing new failed before.

        """
        lane, options = self.lane, self.lane.options
        drawn = lane.plan.drawn
        assert drawn is not None
        minimal: Case | None = None
        try:
            minimal = find(
                drawn,
                self,
                settings=settings_of(options.profile, max(lane.draws - lane.drawn, 1)),
                random=Random(options.seed * 1_000 + round_),
            )
        except Stopped:
            if self.first is None:
                raise
        except (NoSuchExample, Flaky):
            pass
        self.best = self.first
        if minimal is not None and str(minimal) in self._failing:
            self.best = (minimal, self._failing[str(minimal)])

    def __call__(self, case: Case) -> bool:
        """Whether the case fails in a new way; while shrinking, in the way that was found."""
        line = str(case)
        if line in self._failing:
            return True
        result = self._shrinking(case) if self.first else self._drawing(case)
        if result is None or not result.failed or self.signature not in result.signatures:
            return False
        self._failing[line] = result
        return True

    def _shrinking(self, case: Case) -> Result | None:
        if time.monotonic() > self._deadline:
            return None
        return self.lane.rerun(case)

    def _drawing(self, case: Case) -> Result | None:
        if self.over() or self.lane.skip_declared(case):
            return None
        result = self.lane.run(case, drawn=True)
        new = [s for s in result.signatures if s not in self.known] if result.failed else []
        if new:
            self.first, self.signature = (case, result), new[0]
            seconds = 0.0 if self.lane.costly(result) else self.lane.shrink_seconds
            self._deadline = time.monotonic() + seconds
        return result
