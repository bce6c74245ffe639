"""Device time of short GPU work, arms side by side: graph replays between CUDA events.

An *arm* is a way to do the same work on input set 0, 1, 2 ... Its launches on all the sets are
captured in one CUDA graph, one after the other. A *sample* is one replay between two events, and
its figure is the device time of one launch:

    launch_s = (end - start) / sets

- **Cold**: before each sample a buffer of several times the L2 cache is read (not written: dirty
  lines would be written back at the arm's expense), and within a replay no two launches share an
  operand or a result. The read also keeps the device busy while the host submits, so that no idle
  time lies between the events.
- **Side by side**: the arms take turns, and each round begins with another one.
- **Runs**: a run is the median of some samples of each arm. Ratios are formed within a run, and the
  spread is that of the runs.
- **Alone or in a stream**: launches of one arm follow each other, and may overlap as far as the
  kernel lets them (programmatic dependent launch). With ``alone`` a one-element kernel of the plain
  kind stands between any two, and its own time is measured as one more arm and subtracted: what
  remains is a launch that begins when everything before it is done.
- Results are allocated while a graph is captured and kept as long as it lives: a replay allocates
  nothing.

How to use it::

    device = require_cuda("cuda")
    sets = input_sets(bytes_moved)
    operands = [make(i) for i in range(sets)]
    arms = [
        Arm("ours", lambda i: ours(*operands[i])),
        Arm("theirs", lambda i: theirs(*operands[i])),
        copy_arm(bytes_moved, sets, device),  # the bandwidth to compare with
    ]
    timings = measure(arms, sets, device)
    speedup(timings["ours"], timings["theirs"])  # Spread(median, least, most)

``work(i)`` may only enqueue work on the current stream: it is captured, so it must not synchronise
or look at data on the host.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from equiv.errors import NotCovered, UsageError

REPETITIONS = 5
"""Runs, over which a spread is given."""
SAMPLES = 5
"""Samples of a run: the median of five passes over two that something else disturbed."""
MOST_SETS = 64
"""Launches of a replay: with this many the start of a graph, 5 us or so, is below 0.1 us each."""
MOVED_BYTES = 1 << 30
"""Bytes that one replay moves at least, unless ``MOST_SETS`` comes first: 0.25 ms on an H200."""
COPY_PIECE_BYTES = 384 << 20
"""Most bytes of one memory copy: on an H200 one of 0.5 GB runs at 4.3 TB/s, and a captured one of
0.7 GB at 2.8."""
FLUSH_L2S = 4
"""Size of the flush buffer in L2 caches; an LRU cache would need one."""


@dataclass(frozen=True)
class Arm:
    """One way to do the work.

    Attributes
    ----------
    name : unique among the arms of a measurement.
    work : ``work(i)`` enqueues the launch on input set ``i`` and returns what it wrote to, which is
        kept until the measurement is over.

    """

    name: str
    work: Callable[[int], Any]


@dataclass(frozen=True)
class Spread:
    """A figure over the runs: the median, and how far the runs lie apart."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Timing:
    """Device seconds of one launch of an arm, a figure a run.

    Attributes
    ----------
    runs_s : for each run, the median of its samples.
    outputs : what ``work`` returned at capture for each set: its contents are those of the last
        replay.

    """

    name: str
    runs_s: tuple[float, ...]
    outputs: tuple[Any, ...] = field(default=(), repr=False, compare=False)

    @property
    def launch_s(self) -> Spread:
        """Seconds of a launch."""
        return spread(self.runs_s)


def spread(figures: Sequence[float]) -> Spread:
    """Return the median, least and greatest of some figures."""
    return Spread(statistics.median(figures), min(figures), max(figures))


def speedup(ours: Timing, theirs: Timing) -> Spread:
    """Return theirs over ours, in time, run by run: above 1 ours is faster."""
    pairs = zip(ours.runs_s, theirs.runs_s, strict=True)
    return spread([t / o for o, t in pairs])


def require_cuda(device: str) -> Any:
    """Return the ``torch.device`` of a GPU, with its index.

    Raises
    ------
    UsageError : not the name of a device.
    NotCovered : no GPU: exit code 4.

    """
    import torch

    try:
        found = torch.device(device)
    except RuntimeError as e:
        raise UsageError(f"device {device!r}: expected cuda or cuda:N") from e
    if found.type != "cuda" or not torch.cuda.device_count():
        raise NotCovered(
            f"not covered: device time needs a GPU, and this is {device} with "
            f"{torch.cuda.device_count()} CUDA devices: run it on a GPU host"
        )
    index = found.index if ":" in device else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise UsageError(f"device {device!r}: there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def input_sets(bytes_moved: int, *, least: int = 2) -> int:
    """Return how many input sets a replay should rotate over.

    Parameters
    ----------
    bytes_moved : by one launch, read and written.
    least : of them, whatever they take: with one, a result would be written twice in a row.

    """
    return max(least, min(MOST_SETS, -(-MOVED_BYTES // max(bytes_moved, 1))))


def copy_arm(bytes_moved: int, sets: int, device: Any, *, by_kernel: bool = False) -> Arm:
    """Return an arm that copies within the device: half of the bytes are read, half are written.

    Parameters
    ----------
    bytes_moved : rounded up to 32.
    by_kernel : an element-wise kernel (a sign is changed), named ``"copy_kernel"``; else
        ``Tensor.copy_`` between contiguous tensors, in pieces of ``COPY_PIECE_BYTES`` at most,
        named ``"copy"``. Captured memory copies of some sizes take half as long again, at 1,409
        tokens of 128 heads for one; the faster of the two is what a device can do.

    """
    import torch

    half = max(16, -(-bytes_moved // 32) * 16)
    sources = [
        torch.randint(0, 256, (half,), dtype=torch.uint8, device=device) for _ in range(sets)
    ]
    targets = [torch.empty_like(source) for source in sources]

    def by_copy(i: int) -> Any:
        pieces = (tensor.split(COPY_PIECE_BYTES) for tensor in (targets[i], sources[i]))
        for target, source in zip(*pieces, strict=True):
            target.copy_(source)
        return targets[i]

    def negated(i: int) -> Any:
        return torch.neg(sources[i].view(torch.int32), out=targets[i].view(torch.int32))

    return Arm("copy_kernel", negated) if by_kernel else Arm("copy", by_copy)


def measure(
    arms: Sequence[Arm],
    sets: int,
    device: Any,
    *,
    repetitions: int = REPETITIONS,
    samples: int = SAMPLES,
    alone: bool = False,
) -> dict[str, Timing]:
    """Measure the arms side by side.

    Parameters
    ----------
    arms : with different names.
    sets : each arm's ``work`` is called for 0 ... ``sets - 1``, once to warm up and once captured.
    device : a CUDA ``torch.device`` with an index, as ``require_cuda`` returns it.
    repetitions, samples : runs, and samples of a run.
    alone : keep the launches of an arm apart.

    Returns
    -------
    One ``Timing`` for each arm, by name, in the order given.

    """
    import torch

    if len({arm.name for arm in arms}) != len(arms) or not arms or sets < 1 or repetitions < 1:
        raise ValueError("expected arms with different names, a set and a repetition at least")
    with torch.cuda.device(device):
        flush = _Flush(device)
        every = _apart(arms, device) if alone else arms
        captured = [_capture(arm, sets) for arm in every]
        figures: list[list[float]] = [[] for _ in every]
        for repetition in range(repetitions):
            events: list[list[tuple[Any, Any]]] = [[] for _ in every]
            for sample in range(samples):
                for turn in range(len(every)):
                    which = (turn + sample + repetition) % len(every)
                    events[which].append(_sample(captured[which][0], flush))
            torch.cuda.synchronize(device)
            for mine, pairs in zip(figures, events, strict=True):
                times_ms = [start.elapsed_time(end) for start, end in pairs]
                mine.append(statistics.median(times_ms) / 1e3 / sets)
    if alone:
        spacer = figures.pop()
        figures = [[t - s for t, s in zip(mine, spacer, strict=True)] for mine in figures]
    return {
        arm.name: Timing(arm.name, tuple(mine), outputs)
        for arm, mine, (_, outputs) in zip(arms, figures, captured[: len(arms)], strict=True)
    }


class _Flush:
    """Reads a buffer of several times the L2 cache."""

    def __init__(self, device: Any) -> None:
        import torch

        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.ones(FLUSH_L2S * l2_bytes // 4, dtype=torch.int32, device=device)
        self._sum = torch.empty((), dtype=torch.int64, device=device)

    def run(self) -> None:
        import torch

        torch.sum(self._buffer, dim=0, out=self._sum)


def _apart(arms: Sequence[Arm], device: Any) -> list[Arm]:
    """Return the arms with a plain kernel after each launch, and last that kernel by itself."""
    import torch

    one = torch.zeros(1, device=device)

    def spaced(arm: Arm) -> Arm:
        def work(i: int) -> Any:
            written = arm.work(i)
            one.add_(1)
            return written

        return Arm(arm.name, work)

    return [*map(spaced, arms), Arm("spacer", lambda _: one.add_(1))]


def _capture(arm: Arm, sets: int) -> tuple[Any, tuple[Any, ...]]:
    """Capture an arm's launches on all sets in one graph, and replay it once."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(sets):
            arm.work(i)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = tuple(arm.work(i) for i in range(sets))
    graph.replay()
    torch.cuda.synchronize()
    return graph, outputs


def _sample(graph: Any, flush: _Flush) -> tuple[Any, Any]:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.run()
    start.record()
    graph.replay()
    end.record()
    return start, end
