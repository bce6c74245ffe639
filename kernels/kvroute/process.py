"""A server as a process with children: started, awaited, and stopped without leaving any."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

import psutil

from kvroute.errors import RouteError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType, TracebackType

GRACE_S = 20.0
"""Time that a server gets to stop by itself before its processes are killed."""


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What stops a server in the foreground: Ctrl-C, a supervisor, a terminal that closes."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port on which nobody listens now.

    Raises
    ------
    RouteError
        For a host that isn't an address of this machine.

    """
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise RouteError(
                f"host {host!r}: expected an IPv4 address of this machine ({error})"
            ) from None
        port: int = probe.getsockname()[1]
        return port


def session(leader: int) -> list[psutil.Process]:
    """Return the living processes of a session but for its leader."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != leader and os.getsid(process.pid) == leader:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue
    return found


def _shared_memory(family: Sequence[psutil.Process]) -> set[Path]:
    """Return the files that vLLM's CPU ranks share tensors by; it never removes them itself."""
    found = set()
    for process in family:
        with contextlib.suppress(psutil.Error, OSError):
            maps = process.memory_maps(grouped=True)
            found |= {Path(m.path) for m in maps if m.path.startswith("/dev/shm/")}  # noqa: S108
    return {path for path in found if path.name[:-1].endswith("cpushm_")}


class ServerProcess:
    """One server and everything it starts.

    Parameters
    ----------
    command, environment : how to start it.
    url : its address, without a path.
    log : file for its output; ``None`` passes it through.
    scratch : folder that goes when the server has stopped.

    Raises
    ------
    RouteError
        From ``wait_healthy``, when it ends or isn't healthy in time.

    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        url: str,
        log: Path | None = None,
        scratch: Path | None = None,
    ) -> None:
        self.url = url
        self._scratch = scratch
        self.log = log
        self._sink: IO[bytes] | None = log.open("wb") if log is not None else None
        self._process = subprocess.Popen(  # noqa: S603
            list(command),
            env=dict(environment),
            stdout=self._sink,
            stderr=subprocess.STDOUT if self._sink else None,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The server's own process id."""
        return self._process.pid

    def code(self) -> int | None:
        """Return the exit code of a server that has ended; None while it runs."""
        return self._process.poll()

    def wait_healthy(self, timeout_s: float = 180.0) -> None:
        """Wait until ``/health`` answers."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            code = self._process.poll()
            if code is not None:
                raise RouteError(f"the server ended with {code} before it was up{self._hint()}")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2):  # noqa: S310
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
        raise RouteError(f"the server wasn't healthy after {timeout_s:.0f} s{self._hint()}")

    def wait(self) -> int:
        """Wait until the server ends by itself; its exit code."""
        return self._process.wait()

    def stop(self, grace_s: float = GRACE_S) -> int:
        """Stop the server; what it started and left behind is killed. Returns its exit code."""
        family = self._descendants()
        shared = _shared_memory(family)
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                family += self._descendants()
                self._process.kill()
        _, alive = psutil.wait_procs(family, timeout=2)
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=5)
        code = self._process.wait()
        for path in shared:
            path.unlink(missing_ok=True)
        if self._sink is not None:
            self._sink.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        return code

    def run(self, pending: Sequence[int] = ()) -> int:
        """Stay in the foreground; each of ``STOP_SIGNALS`` stops the server with its children.

        Parameters
        ----------
        pending : signals that came while the server was being started.

        """

        def forward(number: int, _frame: FrameType | None) -> None:
            raise _Stop(number)

        previous = {s: signal.signal(s, forward) for s in STOP_SIGNALS}
        try:
            if pending:
                raise _Stop(pending[0])
            return self.wait()
        except _Stop:
            for number in previous:
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave children
            sys.stderr.write("bytegate: stopping the server\n")
            self.stop()
            return 0
        finally:
            self.stop()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _descendants(self) -> list[psutil.Process]:
        # By session: what it started stays in it when the server itself has been killed.
        return session(self.pid)

    def _hint(self) -> str:
        return f"; see {self.log}" if self.log is not None else ""


class _Stop(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
