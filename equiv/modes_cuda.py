"""Modes that need a GPU: streams, graphs, early-triggering producers, a busy or a second device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

REPEATS = 20
DELAY_NS = 4_000_000
"""How long the slow producer waits before it writes: far longer than a launch from Python takes."""

SPIN_CYCLES = 4_000_000
"""The same for a side stream, in clock cycles of ``torch.cuda._sleep``."""


def _scramble(run: Any) -> None:
    """Put wrong elements where the operands are: the complement of every byte."""
    used = run.arena.used
    torch.bitwise_not(run.arena.pristine[:used], out=run.arena.buffer[:used])


def stream(run: Any) -> Iterator[tuple[Any, Any]]:
    """One call on a side stream, whose operands are written late on that stream.

    A candidate that launches on another stream reads what was there before.
    """
    run.call()  # whatever is compiled or loaded on first use
    _scramble(run)
    torch.cuda.synchronize()
    side = torch.cuda.Stream(run.arena.buffer.device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN_CYCLES)  # noqa: SLF001 - torch's own tests use it
        used = run.arena.used
        run.arena.buffer[:used].copy_(run.arena.pristine[:used])
        actual = run.snapshot(run.call())
    side.synchronize()
    torch.cuda.synchronize()
    run.intact()
    yield run.expected, actual


def graph(run: Any) -> Iterator[tuple[Any, Any]]:
    """Capture one call in a CUDA graph; replay it on three sets of operands."""
    first_storage, first_expected = run.storage, run.expected
    warm = torch.cuda.Stream(run.arena.buffer.device)
    with torch.cuda.stream(warm):
        run.call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        outputs = run.call()
    for step in range(3):
        if step:
            run.load(run.elements(run.case.fill.seed + step))
            run.expected = run.reference()
        else:
            run.refresh()
        captured.replay()
        actual = run.snapshot(outputs)
        torch.cuda.synchronize()
        run.intact()
        yield run.expected, actual
    run.expected = first_expected
    run.load(first_storage)


def producer(run: Any) -> Iterator[tuple[Any, Any]]:
    """Call right after a kernel that lets its dependents start early and writes the operands late.

    A candidate launched with programmatic stream serialization has to wait before it reads. The
    consumer, a copy of the outputs, follows at once.
    """
    from equiv.producer import launch

    run.call()
    used = run.arena.used
    source, target = run.arena.pristine[:used], run.arena.buffer[:used]
    launch(source, target, delay_ns=0)
    for _ in range(3):
        _scramble(run)
        run.before_call = lambda: launch(source, target, delay_ns=DELAY_NS)
        try:
            torch.cuda.synchronize()
            actual = run.snapshot(run.call())
        finally:
            run.before_call = None
        torch.cuda.synchronize()
        run.intact()
        yield run.expected, actual


def gpu_hog(run: Any) -> Iterator[tuple[Any, Any]]:
    """Twenty calls beside copies on another stream that keep the memory busy."""
    device = run.arena.buffer.device
    side = torch.cuda.Stream(device)
    a = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    for _ in range(REPEATS):
        with torch.cuda.stream(side):
            for _ in range(4):
                b.copy_(a)
        run.refresh()
        actual = run.snapshot(run.call())
        run.intact()
        yield run.expected, actual
    side.synchronize()


def second_device(run: Any) -> Iterator[tuple[Any, Any]]:
    """One call on operands of another GPU than the current one."""
    actual = run.snapshot(run.call())
    torch.cuda.synchronize(run.arena.buffer.device)
    run.intact()
    yield run.expected, actual
