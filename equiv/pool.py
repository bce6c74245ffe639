"""The parent's side of workers: start them, time them, bury them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from equiv import worker
from equiv.domain import claim_of
from equiv.errors import BytegateError, UsageError, WorkerError
from equiv.patience import stretched
from equiv.result import DECLARED, LedgerHit, Result
from equiv.stopping import Stop, Stopped

if TYPE_CHECKING:
    from equiv.case import Case
    from equiv.pairs import OpPair

_STARTING = threading.Lock()
"""Held while a process starts: what ``_without_main`` changes belongs to the whole process."""

START_S = 180.0
"""Seconds that a worker may take to load its candidate."""

FIRST_S = 300.0
"""Seconds for the first case of a combination of axes in a worker's life: compilers run then."""

HANG_S = 20.0
"""Seconds for any other case, beyond what its rows take."""

SLOWEST_ROWS_PER_S = 20_000.0
"""A candidate slower than this on a large case is reported as hanging."""


TOGETHER_S = 0.1
"""Seconds that a signal to a worker may reach it before it reaches the command."""


class Unavailable(Exception):
    """A candidate that can't run on this machine."""


@dataclass
class Toll:
    """What the campaign cost: workers lost."""

    crashes: int = 0
    hangs: int = 0


class Worker:
    """One worker process, restarted as often as it dies.

    Parameters
    ----------
    pair : the pair, as loaded in this process.
    spec : what the worker is for.
    stop : when it is set, the process is ended, and what was asked of it ends by ``Stopped``.

    """

    def __init__(self, pair: OpPair, spec: worker.WorkerSpec, stop: Stop | None = None) -> None:
        self.pair = pair
        self.stop = stop or Stop()
        handle, log = tempfile.mkstemp(prefix="bytegate-worker-", suffix=".log")
        os.close(handle)
        self.log = Path(log)
        self.spec = replace(spec, log=log)
        self.toll = Toll()
        self.guard = ""
        self.source = ""
        self._mark = 0
        self._process: Any = None
        self._pipe: Any = None
        self._seen: set[tuple[Any, ...]] = set()
        self._warm: set[tuple[Any, ...]] = set()

    def __enter__(self) -> Self:
        """Start the process."""
        try:
            self.start()
        except Stopped:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop the process."""
        self.close()

    def start(self) -> None:
        """Start the process and load the candidate.

        Raises
        ------
        UsageError : the candidate can't be imported.
        Unavailable : it can't run on this machine.
        WorkerError : the process died while it loaded.

        """
        self._go_on()
        self._mark = self.log.stat().st_size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(worker.PRELOAD))
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=worker.main, args=(theirs, self.spec), daemon=True)
        try:
            with _STARTING, _without_main():
                self._process.start()
        except (EOFError, OSError) as e:  # of the fork server, which a signal may have ended
            self._process = None
            self._ended()
            raise WorkerError(f"no worker can be started: {type(e).__name__}: {e}") from e
        finally:
            theirs.close()
        self._warm = set()
        if not self._answer(START_S) and not self._answer(stretched(START_S) - START_S):
            self._kill()
            raise UsageError(
                f"candidate {self.spec.candidate!r} didn't load within {START_S:.0f} s; "
                f"look at {self.log}"
            )
        try:
            hello = self._pipe.recv()
        except EOFError:
            self._process.join(5)
            self._ended()
            where = self._trace()[0] or f"look at {self.log}"
            raise UsageError(
                f"candidate {self.spec.candidate!r} ended its process while it was loaded "
                f"({self._death()}); {where}"
            ) from None
        self.source = hello.source
        if not hello.ready:
            self.close()
        if hello.usage:
            raise UsageError(hello.usage)
        if hello.unavailable:
            raise Unavailable(hello.unavailable)

    def restart(self) -> None:
        """Start a fresh process, which knows of no case before."""
        self._stop()
        self.start()

    def run(self, case: Case) -> Result:
        """Run a case; a worker that dies or hangs is a result, and is replaced."""
        self._go_on()
        claim = claim_of(self.pair, case)
        if self._process is None:
            self.start()
        axes = tuple(claim.point[a] for a in self.pair.axes)
        limit = HANG_S + 3 * self.pair.rows(claim.point) / SLOWEST_ROWS_PER_S
        if axes not in self._warm:
            limit = max(limit, self._first_s if axes not in self._seen else 2 * HANG_S)
        start = time.perf_counter()
        result: Any
        try:
            self._pipe.send(case)
            if self._answer(limit) or self._answer(extra := stretched(limit) - limit):
                result = self._pipe.recv()
            else:
                self._kill()
                self.toll.hangs += 1
                result = Result("hang", f"no result within {limit + extra:.0f} s")
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(5)
            self._ended()
            detail, where = self._trace()
            self.toll.crashes += 1
            text = f"the process died: {self._death()}" + (f"; {detail}" if detail else "")
            result = Result("crash", text, raised_in=where)
            self._process = None
        if isinstance(result, BaseException):
            self._raise(result)
        self.guard = result.guard or self.guard
        self._warm.add(axes)
        self._seen.add(axes)
        if result.status == "crash" and self._process is not None:
            self.toll.crashes += 1
            self._kill()
        if result.spent:
            self._kill()  # no loss of the campaign's: it was told in time, and by itself
        if result.status in {"crash", "hang", "last_error"}:
            result = self._declared(result, case)
        done: Result = replace(result, seconds=time.perf_counter() - start)
        return done

    def prove(self, case: Case, forbidden: tuple[str, ...]) -> dict[str, Any]:
        """Ask for a profile of one call; what went wrong is in the answer, under ``"error"``."""
        if self._process is None:
            self.start()
        try:
            self._pipe.send(worker.ProofRequest(case, forbidden))
            if self._answer(stretched(self._first_s)):
                answer: Any = self._pipe.recv()
                if isinstance(answer, dict):
                    return answer
                return {"error": str(getattr(answer, "detail", answer)), "candidate_ok": None}
            self.toll.hangs += 1
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(5)
            self._ended()
            self.toll.crashes += 1
        self._kill()
        return {"error": "the worker died or hung while it was profiled", "candidate_ok": None}

    @property
    def _first_s(self) -> float:
        """How long compilers may take; a candidate that hung before gets no such time again."""
        return 2 * HANG_S if self.toll.hangs else FIRST_S

    def _answer(self, seconds: float) -> bool:
        """Wait for an answer for so long; whether there is one."""
        try:
            return self.stop.answered(self._pipe, seconds)
        except Stopped:
            self._kill()
            raise

    def _go_on(self) -> None:
        """End the process by ``Stopped`` where the run is being stopped."""
        if self.stop.is_set():
            self._kill()
            self.stop.check()

    def _ended(self) -> None:
        """Tell a process that ended by itself from one that was ended with the run: ``Stopped``.

        A signal to both may reach the process first.
        """
        for _ in range(10):
            self._go_on()
            time.sleep(TOGETHER_S / 10)

    def _raise(self, error: BaseException) -> NoReturn:
        """Raise what a case ended in instead of a result."""
        if not isinstance(error, BytegateError):
            raise WorkerError(str(error))
        if error.spent:
            self._kill()
        raise error

    def _declared(self, result: Result, case: Case) -> Result:
        claim = claim_of(self.pair, case)
        eligible = tuple(
            e.id
            for e in self.spec.entries
            if e.covers_case(claim.point, aligned=claim.aligned, mode=case.mode)
        )
        for e in self.spec.entries:
            if e.kind == result.status and e.id in eligible:
                hit = (LedgerHit(e.id, 1),)
                return replace(result, status=DECLARED, ledger=hit, eligible=eligible)
        return replace(result, eligible=eligible)

    def _death(self) -> str:
        code = self._process.exitcode
        if code is None:
            return "no exit code"
        if code < 0:
            with suppress(ValueError):
                return signal.Signals(-code).name
        return f"exit code {code}"

    def _trace(self) -> tuple[str, str]:
        """Return where this worker crashed, by faulthandler: in words, and as file:function.

        That is the innermost frame of the candidate's own file, else of any but torch's and ours.
        """
        try:
            text = self.log.read_bytes()[self._mark :].decode(errors="replace")
        except OSError:
            return "", ""
        _, found, rest = text.rpartition("most recent call first")
        frames = []
        for entry in rest.splitlines()[1:] if found else ():
            if not entry.startswith("  File "):
                break
            path, _, place = entry.strip().removeprefix('File "').partition('", line ')
            frames.append((Path(path), place.partition(" in ")[2]))
        own = Path(self.spec.candidate.rpartition(":")[0].removesuffix(".py").replace(".", "/"))
        ours = Path(worker.__file__).parent
        for likely in (
            [f for f in frames if f[0].stem == own.name],
            [f for f in frames if "torch" not in f[0].parts and f[0].parent != ours],
        ):
            if likely:
                innermost, function = likely[0]
                return f"in {innermost.stem}.{function}", f"{innermost.stem}:{function}"
        return "", ""

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join(10)
        self._process = None

    def close(self) -> None:
        """Stop the process and remove its log."""
        self._stop()
        with suppress(OSError):
            self.log.unlink()

    def _stop(self) -> None:
        if self._process is not None:
            with suppress(OSError, ValueError):
                self._pipe.send(None)
            self._process.join(5)
            self._kill()


class _without_main:  # noqa: N801 - used as a context manager
    """Keep multiprocessing from importing the parent's ``__main__`` again in each worker."""

    def __enter__(self) -> None:
        main = sys.modules["__main__"]
        self._saved = (getattr(main, "__spec__", None), getattr(main, "__file__", None))
        main.__spec__ = None
        if hasattr(main, "__file__"):
            del main.__file__

    def __exit__(self, *exc: object) -> None:
        main = sys.modules["__main__"]
        main.__spec__ = self._saved[0]
        if self._saved[1] is not None:
            main.__file__ = self._saved[1]
