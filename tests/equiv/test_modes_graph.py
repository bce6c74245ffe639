"""A capture that fails: whose error it is, and what the process is like after it."""

from __future__ import annotations

# ruff: noqa: FBT001 - the signature is that of the op's callers
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from equiv import cuda_runtime, environment, guards, ledger, modes_cuda
from equiv.arena import OutputArena
from equiv.case import Case, parse
from equiv.execute import CaseRun, Executor, Found, Loaded
from equiv.modes_cuda import ended_once
from equiv.pairs import OpPair
from kvpack.faults.kernel import CLEAN, bits

Line = Callable[..., str]
Pack = tuple[Tensor, Tensor]

INVALID = "CUDA error: operation failed due to a previous error during capture"
OWN = "CUDA error: operation not permitted when stream is capturing"


def case_of(line: str) -> Case:
    return parse(line.replace("/cpu/", "/cuda:0/"))


# -- whose error it is ----------------------------------------------------------------


@contextmanager
def played(*, begins: bool = True, ends: bool = True) -> Iterator[None]:
    if not begins:
        raise RuntimeError("no beginning")
    try:
        yield
    finally:
        if not ends:
            raise RuntimeError(f"{INVALID}\nmore")


@pytest.mark.parametrize("own", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("ends", [True, False])
def test_what_was_raised_inside_a_capture_comes_first(ends: bool, own: type[BaseException]) -> None:
    mended: list[int] = []
    error = own("mine")
    with pytest.raises(own) as found, ended_once(played(ends=ends), lambda: mended.append(1)):
        raise error
    assert found.value is error
    assert mended == ([] if ends else [1])


def test_a_capture_that_only_its_end_shows_to_have_failed_is_a_finding() -> None:
    mended: list[int] = []
    with (
        pytest.raises(Found) as found,
        ended_once(played(ends=False), lambda: mended.append(1)),
    ):
        pass
    assert (found.value.kind, found.value.returned, mended) == ("raised", True, [1])
    said = "the call returned, but its capture in a CUDA graph can't be ended"
    assert found.value.detail == f"{said}: RuntimeError: {INVALID}"


def test_a_capture_that_can_t_begin_is_not_the_candidate_s_fault() -> None:
    mended: list[int] = []
    with (
        pytest.raises(RuntimeError, match="no beginning"),
        ended_once(played(begins=False), lambda: mended.append(1)),
    ):
        raise AssertionError
    assert mended == [1]


def test_a_capture_that_ends_well_is_left_alone() -> None:
    mended: list[int] = []
    with ended_once(played(), lambda: mended.append(1)):
        pass
    assert mended == []


# -- the whole mode, with a GPU played ------------------------------------------------


class PlayedGpu:
    """What ``modes_cuda.graph`` asks of torch, in the order of torch 2.11."""

    def __init__(self) -> None:
        self.current = "caller's"
        self.capturing = self.fails_at_end = self.ends_first = False
        self.pools: list[str] = []
        self.released: list[str] = []
        self.again: Callable[[], None] = lambda: None
        self.torch = SimpleNamespace(
            cuda=self,
            _C=SimpleNamespace(
                _cuda_endAllocateToPool=self.end_pool,
                _cuda_releasePool=lambda index, pool: self.released.append(f"{index} {pool}"),
            ),
        )

    def end_pool(self, index: int, pool: str) -> None:
        assert index == 0
        if pool not in self.pools:
            raise RuntimeError("not currently recording to mempool_id")
        self.pools.remove(pool)

    def Stream(self, device: object) -> str:  # noqa: N802 - torch's name
        del device
        return "warm"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def CUDAGraph(self) -> Any:  # noqa: N802 - torch's name
        return SimpleNamespace(replay=self.replay, capture_end=self.end)

    def replay(self) -> None:
        self.again()

    def end(self) -> None:
        self.capturing = False
        self.pools.remove("pool")

    def graph(self, captured: Any, pool: str) -> Any:
        class Capture:
            capture_stream = "capture"

            def __enter__(_) -> None:  # noqa: N805
                self.current, self.capturing = "capture", True
                self.pools.append(pool)

            def __exit__(_, *error: object) -> None:  # noqa: N805
                if self.current != "capture":
                    raise RuntimeError("Capture must end on the same stream it began on.")
                if self.fails_at_end:
                    self.capturing = False
                    if self.ends_first:
                        self.pools.remove(pool)
                    raise RuntimeError(INVALID)
                captured.capture_end()
                self.current = "caller's"

        return Capture()

    def graph_pool_handle(self) -> str:
        return "pool"

    def current_stream(self) -> str:
        return self.current

    def set_stream(self, stream: str) -> None:
        self.current = stream

    def is_current_stream_capturing(self) -> bool:
        return self.capturing and self.current == "capture"

    def synchronize(self) -> None:
        assert not self.capturing


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PlayedGpu:
    made = PlayedGpu()
    monkeypatch.setattr(modes_cuda, "torch", made.torch)
    return made


def replayed(gpu: PlayedGpu, within: Callable[[], None] = lambda: None) -> Callable[..., Pack]:
    """Return a kernel that the played graph can repeat; ``within`` runs in each capture."""

    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
        made = CLEAN(kv_nope, k_pe, use_fp8)

        def again() -> None:
            for mine, new in zip(made, CLEAN(kv_nope, k_pe, use_fp8), strict=True):
                bits(mine).copy_(bits(new))

        gpu.again = again
        if gpu.capturing:
            within()
        return made

    return kernel


def test_a_clean_kernel_is_captured(gpu: PlayedGpu, pair: OpPair, line: Line) -> None:
    executor = Executor(pair, Loaded("own", replayed(gpu), "dispatch"), "cpu", ())
    result = executor.run(case_of(line(mode="graph")))
    assert (result.status, result.spent, gpu.current) == ("equal", False, "caller's")
    assert result.bytes_compared == 6 * 3 * 2 * 320
    assert (gpu.pools, gpu.released) == ([], [])


def test_a_graph_with_its_operands_baked_in_is_found(
    gpu: PlayedGpu, pair: OpPair, line: Line
) -> None:
    executor = Executor(pair, Loaded("own", CLEAN, "dispatch"), "cpu", ())  # a replay does nothing
    result = executor.run(case_of(line(mode="graph")))
    assert (result.status, gpu.current) == ("divergence", "caller's")


def left_well(gpu: PlayedGpu) -> bool:
    return (gpu.current, gpu.capturing, gpu.pools) == ("caller's", False, [])


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_kernel_that_breaks_its_capture_is_told_by_its_own_error(
    ends_first: bool, gpu: PlayedGpu, pair: OpPair, line: Line
) -> None:
    def breaks() -> None:
        gpu.fails_at_end, gpu.ends_first = True, ends_first
        raise RuntimeError(f"{OWN}\nmore")

    executor = Executor(pair, Loaded("own", replayed(gpu, breaks), "dispatch"), "cpu", ())
    result = executor.run(case_of(line(mode="graph")))
    assert (result.status, result.detail) == ("raised", f"RuntimeError: {OWN}")
    assert result.spent
    assert left_well(gpu)
    assert gpu.released == ([] if ends_first else ["0 pool"])


def test_a_kernel_that_says_nothing_of_a_broken_capture_is_a_finding(
    gpu: PlayedGpu, pair: OpPair, line: Line
) -> None:
    def breaks() -> None:
        gpu.fails_at_end = True

    executor = Executor(pair, Loaded("own", replayed(gpu, breaks), "dispatch"), "cpu", ())
    result = executor.run(case_of(line(mode="graph")))
    assert result.status == "raised"
    assert "the call returned, but its capture in a CUDA graph can't be ended" in result.detail
    assert result.spent
    assert left_well(gpu)


def test_a_kernel_that_leaves_the_capture_s_stream_is_a_finding_and_the_capture_ends(
    gpu: PlayedGpu, pair: OpPair, line: Line
) -> None:
    def leaves() -> None:
        gpu.current = "another"

    executor = Executor(pair, Loaded("own", replayed(gpu, leaves), "dispatch"), "cpu", ())
    result = executor.run(case_of(line(mode="graph")))
    assert result.status == "raised"
    assert result.detail.endswith("Capture must end on the same stream it began on.")
    assert left_well(gpu)


def test_where_a_refusal_is_claimed_a_call_that_returned_is_none(
    gpu: PlayedGpu, pair: OpPair, line: Line
) -> None:
    def leaves() -> None:
        gpu.current = "another"  # torch's error says nothing of CUDA then

    executor = Executor(pair, Loaded("own", replayed(gpu, leaves), "dispatch"), "cpu", ())
    views = "kv_nope=512.256.1+2"
    case = case_of(line(mode="graph", views=views, lane="alignment"))
    assert executor.run(case).status == "raised"


def test_a_refusal_during_a_capture_is_one(gpu: PlayedGpu, pair: OpPair, line: Line) -> None:
    def refuses() -> None:
        raise ValueError("misaligned")

    executor = Executor(pair, Loaded("own", replayed(gpu, refuses), "dispatch"), "cpu", ())
    case = case_of(line(mode="graph", views="kv_nope=512.256.1+2", lane="alignment"))
    result = executor.run(case)
    assert (result.status, result.spent) == ("refused", False)
    assert left_well(gpu)


# -- side streams ---------------------------------------------------------------------


class SideStream:
    """All side streams: whether anything on them was waited for, and what was entered."""

    priorities = (0, -3)

    def __init__(self) -> None:
        self.pending = 0
        self.entered: list[int] = []

    def of(self, device: object, priority: int = 0) -> SimpleNamespace:
        """Return one of a priority, as what enters it."""
        del device

        @contextmanager
        def enter() -> Iterator[None]:
            self.pending += 1
            self.entered.append(priority)
            yield

        return SimpleNamespace(
            enter=enter,
            synchronize=self.synchronize,
            wait_stream=self.wait_stream,
            priority_range=lambda: self.priorities,
        )

    def synchronize(self) -> None:
        self.pending = 0

    def wait_stream(self, other: object) -> None:
        del other


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> SideStream:
    made = SideStream()
    cuda = SimpleNamespace(
        Stream=made.of,
        stream=lambda stream: stream.enter(),
        current_stream=lambda device: None,
        synchronize=lambda: None,
        _sleep=lambda cycles: None,
    )
    played_torch = SimpleNamespace(
        cuda=cuda,
        bitwise_not=torch.bitwise_not,
        empty=lambda size, **kw: torch.empty(8, **kw),
        empty_like=torch.empty_like,
        uint8=torch.uint8,
    )
    monkeypatch.setattr(modes_cuda, "torch", played_torch)
    return made


def at_call(number: int, error: type[BaseException], pair: OpPair) -> Executor:
    """Return what runs a clean kernel that raises in one of its calls."""
    calls = itertools.count(1)

    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
        if next(calls) == number:
            raise error
        return CLEAN(kv_nope, k_pe, use_fp8)

    return Executor(pair, Loaded("own", kernel, "dispatch"), "cpu", ())


@pytest.mark.parametrize("mode", ["stream", "gpu_hog"])
@pytest.mark.parametrize(("call", "wanted"), [(0, "equal"), (2, "raised")])
def test_nothing_of_a_case_is_left_to_run_beside_the_next(
    call: int, wanted: str, mode: str, beside: SideStream, pair: OpPair, line: Line
) -> None:
    executor = at_call(call, ValueError, pair)
    assert executor.run(case_of(line(mode=mode))).status == wanted
    assert beside.pending == 0


def test_the_hog_s_copies_start_after_all_that_is_put_back(
    beside: SideStream, pair: OpPair, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending: list[int] = []
    refresh, begin = CaseRun.refresh, OutputArena.begin

    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
        pending.append(beside.pending)
        return CLEAN(kv_nope, k_pe, use_fp8)

    def before(*args: Any) -> None:
        assert beside.pending == 0
        (refresh if isinstance(args[0], CaseRun) else begin)(*args)

    monkeypatch.setattr(CaseRun, "refresh", before)
    monkeypatch.setattr(OutputArena, "begin", before)
    executor = Executor(pair, Loaded("own", kernel, "dispatch"), "cpu", ())
    assert executor.run(case_of(line(mode="gpu_hog"))).status == "equal"
    assert pending == [1] * (2 * modes_cuda.REPEATS)
    assert beside.entered == [*beside.priorities] * modes_cuda.REPEATS


def test_nor_after_a_difference(beside: SideStream, pair: OpPair, line: Line) -> None:
    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
        k, v = CLEAN(kv_nope, k_pe, use_fp8)
        bits(v)[0, 0, 0] ^= 1
        return k, v

    executor = Executor(pair, Loaded("own", kernel, "dispatch"), "cpu", ())
    assert executor.run(case_of(line(mode="gpu_hog"))).status == "divergence"
    assert beside.pending == 0


# -- on a GPU -------------------------------------------------------------------------


def looks(k_pe: Tensor) -> bool:
    return bool((bits(k_pe) != 0).any())


def looks_and_says_nothing(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    made = CLEAN(kv_nope, k_pe, use_fp8)
    with suppress(RuntimeError):
        looks(k_pe)
    return made


SIDE: list[Any] = []
"""A stream of the kernels' own, which outlives them."""


def side(device: torch.device) -> Any:
    SIDE[:] = SIDE or [torch.cuda.Stream(device)]
    return SIDE[0]


def leaves_work_unjoined(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    made = CLEAN(kv_nope, k_pe, use_fp8)
    own = side(k_pe.device)
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        bits(made[1]).bitwise_xor_(0)
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().wait_stream(own)
    return made


def leaves_another_stream(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    made = CLEAN(kv_nope, k_pe, use_fp8)
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.set_stream(side(k_pe.device))
    return made


def gpu_executor(pair: OpPair, kernel: Callable[..., Pack]) -> Executor:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.zeros(1, device="cuda:0")
    entries = ledger.applying(ledger.load(), pair.name, "own", "cuda:0", environment.versions())
    return Executor(pair, Loaded("own", kernel, "dispatch"), "cuda:0", entries)


def as_before() -> None:
    """Check what a failed capture takes along: stream, last error, allocator."""
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    assert cuda_runtime.take_last_error() == ""
    torch.cuda.empty_cache()  # refused while the allocator believes in a capture
    assert int(torch.ones(1 << 20, device="cuda").sum()) == 1 << 20


@pytest.mark.gpu
def test_one_failed_capture_is_one_finding(pair: OpPair, line: Line) -> None:
    failed = []

    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
        if torch.cuda.is_current_stream_capturing() and not failed:
            failed.append(1)
            looks(k_pe)
        return CLEAN(kv_nope, k_pe, use_fp8)

    executor = gpu_executor(pair, kernel)
    found = []
    for mode in ("graph", "eager", "graph", "stream"):
        found.append(executor.run(case_of(line(mode=mode))))
        as_before()
    assert [f.status for f in found] == ["raised", "equal", "equal", "equal"], found
    assert found[0].spent
    assert "not permitted when stream is capturing" in found[0].detail


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kernel", [looks_and_says_nothing, leaves_work_unjoined, leaves_another_stream]
)
def test_a_capture_that_fails_in_silence_is_a_finding(
    kernel: Callable[..., Pack], pair: OpPair, line: Line
) -> None:
    executor = gpu_executor(pair, kernel)
    graph, eager = (case_of(line(mode=mode)) for mode in ("graph", "eager"))
    found = executor.run(graph)
    assert (found.status, found.spent) == ("raised", True), found
    assert "its capture in a CUDA graph can't be ended" in found.detail
    as_before()
    assert executor.run(eager).status == "equal"
    assert gpu_executor(pair, CLEAN).run(graph).status == "equal"
    as_before()


@pytest.mark.gpu
def test_a_stream_that_a_kernel_leaves_is_told_once(pair: OpPair, line: Line) -> None:
    calls: list[int] = []

    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
        made = CLEAN(kv_nope, k_pe, use_fp8)
        calls.append(1)
        if len(calls) <= 2:  # the two colours of the first case
            torch.cuda.set_stream(side(k_pe.device))
        torch.cuda.synchronize()
        return made

    executor = gpu_executor(pair, kernel)
    case = case_of(line())
    first, second = executor.run(case), executor.run(case)
    assert (first.status, first.detail) == ("global_state", "changed CUDA stream")
    assert second.status == "equal", second
    assert guards.global_state()["CUDA stream"] == executor.state["CUDA stream"]
