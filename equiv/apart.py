"""Keep a worker out of the way of signals that are meant for its command, and end it with it.

Ctrl-C on a terminal, and ``timeout``, signal a whole process group; a worker that died of that
would look like a kernel that crashed. A command that is killed can stop no worker itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import signal
import threading

COMMAND = "BYTEGATE_COMMAND"
"""In the environment of a process that is to end with its command: the command's process."""

_PR_SET_PDEATHSIG = 1


def with_command() -> dict[str, str]:
    """Return what a process that ``tie`` ties to this one needs in its environment.

    Linux ends it with the thread that started it, so nothing is tied to another than the main one.
    """
    main = threading.current_thread() is threading.main_thread()
    return {COMMAND: str(os.getpid())} if main else {}


def tie() -> None:
    """End this process when the command that started it has ended, SIGKILL included, on Linux."""
    command = os.environ.pop(COMMAND, "")
    if not command:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(command):
        os._exit(1)


def stay() -> None:
    """Leave the command's process group, and end this process when the command has ended."""
    command = multiprocessing.parent_process()
    if command is None:
        return
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    with contextlib.suppress(OSError, AttributeError):  # Linux: whoever holds the lock
        fcntl.fcntl(command.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(command.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(command.sentinel, fcntl.F_GETFL)
        fcntl.fcntl(command.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)

    def end_with_it() -> None:
        command.join()
        os._exit(1)

    threading.Thread(target=end_with_it, daemon=True).start()
