"""Being told to stop: whoever started processes stops them on the way out."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def as_interrupt(*numbers: signal.Signals) -> Iterator[None]:
    """End on these signals as on Ctrl-C, by ``KeyboardInterrupt`` with the signal's name.

    Python lets the main thread alone handle signals; in any other nothing changes.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Hold these signals back until the block ends; then the first that came does its work.

    For moments in which a process is started or stopped: between its start and the note of it
    nobody could stop it. Children are born with handlers of their own, so nothing is held back in
    them. In a thread other than the main one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    previous = {number: signal.getsignal(number) for number in numbers}
    for number, handler in previous.items():
        if handler not in (signal.SIG_IGN, None):  # what is ignored stays so, in children as well
            signal.signal(number, lambda n, _frame: came.append(n))
    try:
        yield
    finally:
        for number, handler in previous.items():
            if handler is not None:
                signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
