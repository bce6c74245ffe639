"""Errors that bytegate shows to people, and the exit codes.

    BytegateError
    ├── UsageError           exit 2: bad option, name, file or case
    ├── DoesNotFit          a case too large for the device: its lane isn't covered
    ├── NotCovered          exit 4: this machine can't run what was asked for
    ├── WorkerError         exit 4: the suite's own worker can't do its job
    └── Interrupted         exit 130: a signal ended a command whose results are kept

Every message is one line: what was wrong, what was expected, what to do.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit code means, for every command of the project."""

    PASS = 0
    FAIL = 1
    USAGE = 2
    INCONCLUSIVE = 3
    INVALID = 4


def worst(*codes: int) -> int:
    """Return the exit code of several commands together: a failure says the most.

    ``worst(0, 4)`` is 4, ``worst(4, 1)`` is 1.
    """
    order = (ExitCode.FAIL, ExitCode.USAGE, ExitCode.INVALID, ExitCode.INCONCLUSIVE, ExitCode.PASS)
    return int(min(codes, key=order.index))


class BytegateError(Exception):
    """Root of the errors shown as one line.

    ``spent``: a worker's process must serve no further case (``equiv.execute.Executor``).
    """

    exit_code: int = ExitCode.INVALID
    spent: bool = False


class UsageError(BytegateError):
    """An option, name, file or case that can't be used."""

    exit_code = ExitCode.USAGE


class DoesNotFit(BytegateError):
    """A case needs more memory than the device has left."""


class NotCovered(BytegateError):
    """What was asked for needs something that this machine doesn't have."""


class WorkerError(BytegateError):
    """A worker process of the suite itself failed; nothing can be said of the candidate."""


INTERRUPTED = 130
"""What a shell makes of a command that Ctrl-C ended: 128 + SIGINT."""


class Interrupted(BytegateError):
    """A signal ended a command whose results are kept: the same command goes on."""

    exit_code = INTERRUPTED
