"""How a candidate is called: once, often, its results held, beside a memory hog.

A mode yields ``(expected, actual)`` snapshots, each to be compared byte for byte. Modes that
need a GPU are in ``equiv.modes_cuda``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPEATS = 20
"""Calls of the modes that look for results that change from call to call."""


def eager(run: Any) -> Iterator[tuple[Any, Any]]:
    """One call."""
    outputs = run.call()
    actual = run.snapshot(outputs)
    run.intact()
    yield run.expected, actual


def inference(run: Any) -> Iterator[tuple[Any, Any]]:
    """One call under ``torch.inference_mode``, as vLLM's workers make it."""
    with torch.inference_mode():
        outputs = run.call()
        actual = run.snapshot(outputs)
    run.intact()
    yield run.expected, actual


def repeat(run: Any) -> Iterator[tuple[Any, Any]]:
    """Twenty calls on the same operands."""
    for _ in range(REPEATS):
        run.refresh()
        actual = run.snapshot(run.call())
        run.intact()
        yield run.expected, actual


def held(run: Any) -> Iterator[tuple[Any, Any]]:
    """Hold a result while a second call runs on other operands, then look at both."""
    from equiv.execute import Found
    from equiv.snapshots import integers

    first_storage, first_expected = run.storage, run.expected
    first = run.call()
    before = {n: t.clone() for n, t in run.snapshot(first).items()}
    run.intact()
    yield first_expected, before
    kept = {n: t for n, t in first.items() if not run.arena.holds(t)}
    served = run.out
    run.out = type(served)(str(served.device))  # the first call's memory stays as it is
    run.load(run.elements(run.case.fill.seed + 1))
    run.expected = run.reference()
    second_expected = run.expected
    actual = run.snapshot(run.call())
    run.intact()
    after = {n: integers(t) for n, t in kept.items()}
    yield second_expected, actual
    run.out = served
    run.expected = first_expected
    run.load(first_storage)
    for name, now in after.items():
        if not torch.equal(now, before[name]):
            msg = f"{name} of the first call changed during the second"
            raise Found("overwritten", msg)


def hog(run: Any) -> Iterator[tuple[Any, Any]]:
    """Five calls while a thread streams through memory."""
    stop = threading.Event()
    data = torch.zeros(1 << 24, dtype=torch.uint8)

    def churn() -> None:
        while not stop.is_set():
            data.add_(1)

    thread = threading.Thread(target=churn, daemon=True)
    thread.start()
    try:
        for _ in range(5):
            run.refresh()
            actual = run.snapshot(run.call())
            run.intact()
            yield run.expected, actual
    finally:
        stop.set()
        thread.join()


CPU_MODES = ("eager", "inference", "repeat", "held", "hog")
CUDA_MODES = ("stream", "graph", "producer", "gpu_hog", "second_device")


def _cuda(name: str) -> Callable[[Any], Iterator[tuple[Any, Any]]]:
    def run(state: Any) -> Iterator[tuple[Any, Any]]:
        from equiv import modes_cuda

        yield from getattr(modes_cuda, name)(state)

    return run


MODES: dict[str, Callable[[Any], Iterator[tuple[Any, Any]]]] = {
    "eager": eager,
    "inference": inference,
    "repeat": repeat,
    "held": held,
    "hog": hog,
    **{name: _cuda(name) for name in CUDA_MODES},
}
