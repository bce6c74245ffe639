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
