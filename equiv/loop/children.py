"""Work in forked processes: what it changes ends with it, and several may run side by side.

All are forked by the main thread of a process that hasn't started CUDA, which a forked one could
not take over.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from typing import Any

Said = Callable[[str], None]
Done = Callable[[str, Any], None]


def in_child(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Run ``work`` in a forked process, so that what it changes ends with it.

    Raises
    ------
    RuntimeError
        When the process dies or the work raises.

    """

    def checked() -> dict[str, Any]:
        import torch

        if torch.cuda._is_in_bad_fork():  # noqa: SLF001 - there is no public way to ask
            raise RuntimeError("CUDA was in use before the fork, so it can't be used after it")
        return work(*arguments)

    process, end = _start(checked)
    try:
        found: dict[str, Any] = _result(process, end, getattr(work, "__name__", "work"))
    finally:
        process.kill()
        process.join()
        end.close()
    return found


def side_by_side(
    jobs: Mapping[str, Callable[[], Any]], at_once: int, *, begun: Said, done: Done
) -> None:
    """Run jobs, so many at once, each then in a process of its own; alone, they run in this one.

    Parameters
    ----------
    begun : is told each job's name as it begins.
    done : is told name and result of each as it ends, in the order in which they end.

    Raises
    ------
    RuntimeError
        When a job's process dies or raises; the others are ended with the processes they started.

    """
    if at_once < 2:  # noqa: PLR2004
        for name, work in jobs.items():
            begun(name)
            done(name, work())
        return
    left = list(jobs)
    running: dict[Any, tuple[str, Any]] = {}
    try:
        while left or running:
            while left and len(running) < at_once:
                name = left.pop(0)
                begun(name)
                process, end = _start(jobs[name], leads=True)
                running[end] = name, process
            listened = {end: end for end in running}
            listened |= {process.sentinel: end for end, (_, process) in running.items()}
            ready: list[Any] = wait(list(listened))
            for end in dict.fromkeys(listened[one] for one in ready):
                name, process = running[end]
                result = _result(process, end, name)
                del running[end]
                process.join()
                end.close()
                done(name, result)
    finally:
        for _, process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads those that it started
            process.kill()
            process.join()


def _start(work: Callable[[], Any], *, leads: bool = False) -> tuple[Any, Any]:
    """Fork a process that sends what ``work`` returns; it may lead a group of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def body() -> None:
        if leads:
            os.setpgid(0, 0)
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
        try:
            theirs.send(("done", work()))
        except BaseException as error:  # noqa: BLE001 - told to the parent, which raises it
            theirs.send(("failed", f"{type(error).__name__}: {error}"))

    process = context.Process(target=body)
    process.start()
    theirs.close()
    return process, ours


def _result(process: Any, end: Any, name: str) -> Any:
    wait([end, process.sentinel])  # what it started may hold its pipe open when it is gone
    try:
        state, value = end.recv() if end.poll() else ("failed", "the process died")
    except EOFError:
        state, value = "failed", "the process died"
    if state == "failed":
        raise RuntimeError(f"{name}: {value}")
    process.join()
    return value
