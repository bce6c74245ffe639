"""Modes that need a GPU: streams, graphs, early-triggering producers, a busy or a second device."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from equiv.blame import line_of
from equiv.cuda_runtime import take_last_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

REPEATS = 20
DELAY_NS = 4_000_000
"""How long the slow producer waits before it writes: far longer than a launch from Python takes."""

HOG_COPIES = 32
"""Copies of 256 MiB before each call: some milliseconds, longer than a call from Python takes."""

SPIN_CYCLES = 4_000_000
"""The same for a side stream, in clock cycles of ``torch.cuda._sleep``."""

_FAILED: list[Any] = []
"""Graphs whose capture failed, which torch's allocators may go on asking: they have to stay."""


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
    try:
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN_CYCLES)  # noqa: SLF001 - torch's own tests use it
            used = run.arena.used
            run.arena.buffer[:used].copy_(run.arena.pristine[:used])
            actual = run.snapshot(run.call())
    finally:  # however the call ended: the late copy must not land in another case's operands
        side.synchronize()
    torch.cuda.synchronize()
    run.intact()
    yield run.expected, actual


@contextmanager
def ended_once(capture: AbstractContextManager[Any], mend: Callable[[], None]) -> Iterator[None]:
    """Enter a capture, and call ``mend`` where it can't be begun or ended.

    Raises
    ------
    What was raised inside, whatever the capture's end raises after it; ``Found`` of kind
    ``raised`` where nothing was, and the end fails; what its beginning raised.

    """
    from equiv.execute import Found

    own: BaseException | None = None
    begun = False
    try:
        with capture:
            begun = True
            try:
                yield
            except BaseException as e:
                own = e
                raise
    except BaseException as e:
        if e is own:
            raise
        mend()
        if own is not None:
            raise own from None
        if not begun or not isinstance(e, Exception):
            raise
        said = f"{type(e).__name__}: {line_of(e)}"
        detail = f"the call returned, but its capture in a CUDA graph can't be ended: {said}"
        raise Found("raised", detail, returned=True) from None


def _mend(run: Any, captured: Any, stream: Any, pool: Any, before: Any) -> None:
    """Leave a capture that failed, as far as that can be done from here.

    Where ``cudaStreamEndCapture`` fails, torch (2.11) raises before it takes its allocator out of
    the capture's pool and its current stream off the capture's. Its allocator of pinned memory and
    its random generators are out of reach: a worker serves no further case (``Executor.spent``).
    """
    run.x.spent = True
    _FAILED.append(captured)
    index = run.arena.buffer.device.index or 0
    with suppress(RuntimeError), torch.cuda.stream(stream):
        if torch.cuda.is_current_stream_capturing():  # the call left another stream current
            captured.capture_end()
    torch.cuda.set_stream(before)
    with suppress(RuntimeError, AttributeError):  # torch has done it, or has other names for it
        torch._C._cuda_endAllocateToPool(index, pool)  # noqa: SLF001
        torch._C._cuda_releasePool(index, pool)  # noqa: SLF001
    take_last_error()


def graph(run: Any) -> Iterator[tuple[Any, Any]]:
    """Capture one call in a CUDA graph; replay it on three sets of operands."""
    first_storage, first_expected = run.storage, run.expected
    torch.cuda.synchronize()
    warm = torch.cuda.Stream(run.arena.buffer.device)
    try:
        with torch.cuda.stream(warm):
            run.call()
    finally:
        torch.cuda.synchronize()
    captured, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    capture = torch.cuda.graph(captured, pool=pool)
    before = torch.cuda.current_stream()
    with ended_once(capture, lambda: _mend(run, captured, capture.capture_stream, pool, before)):
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
    """Twenty calls beside copies on another stream that keep the memory busy.

    Every other time that stream has the highest priority: on an H200 a copy of 2 GiB by a stream
    of the call's takes 1.2 times its time beside an equal, and over 3 times beside a higher one.
    """
    device = run.arena.buffer.device
    equal = torch.cuda.Stream(device)
    _, highest = equal.priority_range()
    sides = (equal, torch.cuda.Stream(device, priority=highest))
    a = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    for side in sides:  # what lay there before may be in use
        side.wait_stream(torch.cuda.current_stream(device))

    def copies(side: torch.cuda.Stream) -> None:
        with torch.cuda.stream(side):
            for _ in range(HOG_COPIES):
                b.copy_(a)

    try:
        for turn in range(REPEATS):
            for side in sides:  # what is left of equals holds the call up till all copies are over
                side.synchronize()
            run.refresh()  # on the stream of the call, before any copy starts
            run.before_call = partial(copies, sides[turn % 2])
            actual = run.snapshot(run.call())
            run.intact()
            yield run.expected, actual
    finally:  # also at a finding: the memory goes back to torch, and may be another case's next
        run.before_call = None
        for side in sides:
            side.synchronize()


def second_device(run: Any) -> Iterator[tuple[Any, Any]]:
    """One call on operands of another GPU than the current one."""
    actual = run.snapshot(run.call())
    torch.cuda.synchronize(run.arena.buffer.device)
    run.intact()
    yield run.expected, actual
