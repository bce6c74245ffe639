"""How often a lane tells how far it is: each 16th case, and after some seconds without a word."""

from __future__ import annotations

import time
from collections.abc import Callable

EACH = 16
SECONDS = 2.0


class Pace:
    """Says when progress is due; ``clock`` in seconds, for tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said = clock()

    def due(self, done: int, total: int) -> bool:
        """Whether to tell that ``done`` of ``total`` cases ran; takes it that it is told then."""
        now = self._clock()
        if done % EACH and done != total and now - self._said < SECONDS:
            return False
        self._said = now
        return True
