"""Being told to stop: whoever started processes stops them on the way out."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which a person, a batch system or a lost connection ends a command."""

SLICE_S = 0.2
"""After so long whoever waits for a process looks whether the run is being stopped."""


class Stopped(BaseException):
    """The run is being stopped: no error, so nobody takes it for a kernel's, hypothesis neither."""


class Stop:
    """Whether a run is being stopped, and why: set by a signal, or by whoever shares it.

    A signal sets it and raises nothing: whoever runs a case looks at it, and what was found so far
    is written in peace. It takes no lock, as a handler may run at any place.
    """

    def __init__(self) -> None:
        self.reason = "stopped, as another campaign was"
        self.signal = ""
        self._set = False

    def set(self) -> None:
        """Stop the run."""
        self._set = True

    def is_set(self) -> bool:
        """Whether the run is being stopped."""
        return self._set

    def check(self) -> None:
        """Raise ``Stopped`` where the run is being stopped."""
        if self._set:
            raise Stopped(self.reason)

    def answered(self, pipe: Connection, seconds: float) -> bool:
        """Wait so long for something in a pipe; whether there is, or ``Stopped``."""
        end = time.monotonic() + seconds
        while not pipe.poll(max(0.0, min(SLICE_S, end - time.monotonic()))):
            self.check()
            if time.monotonic() >= end:
                return False
        return True

    @contextlib.contextmanager
    def on(self, *numbers: signal.Signals) -> Iterator[None]:
        """Let these signals stop the run, the first one by its name; the next change nothing.

        What is ignored stays so (``nohup``). In a thread other than the main one nothing changes.
        """

        def stop(number: int, _frame: FrameType | None) -> None:
            if not self._set:
                self.signal = signal.Signals(number).name
                self.reason = f"stopped by {self.signal}"
                self._set = True

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [n for n in numbers if signal.getsignal(n) not in (signal.SIG_IGN, None)]
        previous = {number: signal.signal(number, stop) for number in heard}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def ignore(*numbers: signal.Signals) -> None:
    """Ignore these signals from now on: for a command that ends already, and says how."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def as_interrupt(*numbers: signal.Signals) -> Iterator[Stop]:
    """End on these signals as on Ctrl-C, by ``KeyboardInterrupt`` with the signal's name.

    Python drops what a handler raises at a fork or in a finaliser: what the block is given is set
    then as well, for whoever waits to look at. What is ignored stays so (``nohup``). Python lets
    the main thread alone handle signals; in any other nothing changes.
    """
    came = Stop()

    def stop(number: int, _frame: FrameType | None) -> None:
        came.signal = signal.Signals(number).name
        came.reason = f"stopped by {came.signal}"
        came.set()
        raise KeyboardInterrupt(came.signal)

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    heard = [n for n in numbers if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    previous = {number: signal.signal(number, stop) for number in heard}
    try:
        yield came
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
