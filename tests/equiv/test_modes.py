"""The ways in which a kernel is called: each finds what the others can't see."""

from __future__ import annotations

# ruff: noqa: FBT001 - the signature is that of the op's callers
import importlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from equiv import environment, ledger
from equiv.case import parse
from equiv.execute import CaseRun, Executor, Loaded, another_device
from equiv.modes import CPU_MODES, CUDA_MODES, MODES, REPEATS
from equiv.pairs import OpPair
from equiv.result import Result
from kvpack.faults.catalogue import MODES as OF_MODES
from kvpack.faults.kernel import CLEAN, bits

Line = Callable[..., str]
Pack = tuple[Tensor, Tensor]
Kernel = Callable[[Tensor, Tensor, bool], Pack]


@pytest.fixture
def statuses(pair: OpPair, line: Line) -> Callable[..., dict[str, str]]:
    """Run a kernel in every mode that a CPU has, each time afresh; return what came of it."""

    def run(make: Callable[[], Kernel], **changes: Any) -> dict[str, str]:
        found = {}
        for mode in CPU_MODES:
            executor = Executor(pair, Loaded("own", make(), "dispatch"), "cpu", ())
            found[mode] = executor.run(parse(line(mode=mode, **changes))).status
        return found

    return run


def test_every_mode_has_a_name_and_a_function() -> None:
    assert set(MODES) == {*CPU_MODES, *CUDA_MODES}
    assert all(MODES[m].__doc__ for m in CPU_MODES)


@pytest.mark.parametrize("fp8", [0, 1])
def test_a_clean_kernel_passes_them_all(fp8: int, statuses: Callable[..., dict[str, str]]) -> None:
    assert set(statuses(lambda: CLEAN, fp8=fp8).values()) == {"equal"}


CALLS = {"eager": 2, "inference": 2, "repeat": 2 * REPEATS, "held": 4, "hog": 10}
"""In both colours together."""


@pytest.mark.parametrize("mode", CPU_MODES)
def test_each_mode_makes_its_calls(mode: str, pair: OpPair, line: Line) -> None:
    executor = Executor(pair, Loaded("own", CLEAN, "dispatch"), "cpu", ())
    result = executor.run(parse(line(mode=mode)))
    assert executor.calls == CALLS[mode]
    assert result.bytes_compared == executor.calls * 3 * 2 * 320


def test_a_call_that_goes_wrong_now_and_then(statuses: Callable[..., dict[str, str]]) -> None:
    def make() -> Kernel:
        calls = itertools.count(1)

        def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
            k, v = CLEAN(kv_nope, k_pe, use_fp8)
            if next(calls) % 23 == 0:
                bits(v)[-1, -1, -1] ^= 1
            return k, v

        return kernel

    found = statuses(make)
    assert found["repeat"] == "unstable"
    assert found["eager"] == found["held"] == "equal"


def test_memory_that_a_later_call_overwrites(statuses: Callable[..., dict[str, str]]) -> None:
    def make() -> Kernel:
        kept: list[Pack] = []

        def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
            new = CLEAN(kv_nope, k_pe, use_fp8)
            kept[:] = kept or [(new[0].clone(), new[1].clone())]
            for mine, other in zip(kept[0], new, strict=True):
                bits(mine).copy_(bits(other))
            return kept[0]

        return kernel

    found = statuses(make)
    assert found.pop("held") == "overwritten"
    assert set(found.values()) == {"equal"}


def test_a_result_remembered_by_address(statuses: Callable[..., dict[str, str]]) -> None:
    def make() -> Kernel:
        known: dict[int, Pack] = {}

        def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
            where = kv_nope.data_ptr()
            if where not in known:
                known[where] = CLEAN(kv_nope, k_pe, use_fp8)
            return known[where][0].clone(), known[where][1].clone()

        return kernel

    found = statuses(make)
    assert found.pop("held") == "divergence"
    assert set(found.values()) == {"equal"}


def test_a_kernel_that_inference_mode_breaks(statuses: Callable[..., dict[str, str]]) -> None:
    def make() -> Kernel:
        def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
            result = CLEAN(kv_nope, k_pe, use_fp8)
            fresh = torch.empty(1)
            fresh.requires_grad_()  # refused for a tensor made in inference mode
            (fresh * 1).sum().backward()
            return result

        return kernel

    found = statuses(make)
    assert found.pop("inference") == "raised"
    assert set(found.values()) == {"equal"}


@pytest.mark.parametrize("mode", CPU_MODES)
def test_what_arrives_after_the_call_is_too_late(
    mode: str, pair: OpPair, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[threading.Thread] = []
    returned = threading.Event()

    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
        k, v = CLEAN(kv_nope, k_pe, use_fp8)
        last = bits(v)[-1]
        last ^= 1
        returned.clear()

        @torch.inference_mode()  # in one mode v is a tensor of such
        def finish() -> None:
            returned.wait()
            last.bitwise_xor_(1)

        late.append(threading.Thread(target=finish))
        late[-1].start()
        return k, v

    intact = CaseRun.intact

    def after_a_while(run: CaseRun) -> None:  # the caller has what it took by now
        returned.set()
        late[-1].join()
        intact(run)

    monkeypatch.setattr(CaseRun, "intact", after_a_while)
    executor = Executor(pair, Loaded("own", kernel, "dispatch"), "cpu", ())
    found = executor.run(parse(line(mode=mode)))
    returned.set()
    assert found.status == "divergence", found


def test_memory_is_churned_beside_the_call(statuses: Callable[..., dict[str, str]]) -> None:
    threads = []

    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
        threads.append(threading.active_count())
        return CLEAN(kv_nope, k_pe, use_fp8)

    before = threading.active_count()
    assert statuses(lambda: kernel)["hog"] == "equal"
    assert threads == [before] * (sum(CALLS.values()) - 10) + [before + 1] * 10
    assert threading.active_count() == before


def test_the_hog_goes_whatever_the_kernel_does(pair: OpPair, line: Line) -> None:
    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
        raise RuntimeError(str((kv_nope.shape, k_pe.shape, use_fp8)))

    before = threading.active_count()
    executor = Executor(pair, Loaded("own", kernel, "dispatch"), "cpu", ())
    result: Result = executor.run(parse(line(mode="hog")))
    assert result.status == "raised"
    assert threading.active_count() == before


def test_inference_mode_ends_with_the_call(pair: OpPair, line: Line) -> None:
    inside = []

    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
        inside.append(torch.is_inference_mode_enabled())
        return CLEAN(kv_nope, k_pe, use_fp8)

    executor = Executor(pair, Loaded("own", kernel, "dispatch"), "cpu", ())
    for mode in ("inference", "eager"):
        assert executor.run(parse(line(mode=mode))).status == "equal"
    assert inside == [True, True, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [m for m in CUDA_MODES if m != "second_device"])
def test_a_clean_kernel_passes_the_modes_of_a_gpu(mode: str, pair: OpPair, line: Line) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = on_a_gpu("kvpack.faults.kernel:CLEAN", pair).run(
        parse(line(mode=mode).replace("/cpu/", "/cuda:0/"))
    )
    assert found.status == "equal", found


def kernel_of(name: str) -> Kernel:
    module, _, function = name.partition(":")
    found: Kernel = getattr(importlib.import_module(module), function)
    return found


def on_a_gpu(name: str, pair: OpPair) -> Executor:
    """Return what runs a kernel on the first GPU, with the ledger that a run applies."""
    torch.zeros(1, device="cuda:0")  # as a worker does: the state before has a device then
    entries = ledger.applying(ledger.load(), pair.name, name, "cuda:0", environment.versions())
    return Executor(pair, Loaded("own", kernel_of(name), "dispatch"), "cuda:0", entries)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", *(m for m in CUDA_MODES if m != "second_device")])
def test_work_that_a_call_leaves_behind_is_seen(mode: str, pair: OpPair, line: Line) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    case = parse(line(mode=mode).replace("/cpu/", "/cuda:0/"))
    found = on_a_gpu("kvpack.faults.unlisted_conduct:leaves_work", pair).run(case)
    torch.cuda.synchronize()
    assert found.status in {"divergence", "unstable", "raised"}, found


def test_the_second_device_is_not_the_current_one() -> None:
    found = [another_device(x) for x in ("cuda:0", "cuda:1", "cuda:3", "cuda")]
    assert found == ["cuda:1", "cuda:0", "cuda:0", "cuda:1"]


def test_each_mode_of_a_gpu_has_a_fault_of_its_own() -> None:
    assert tuple(mode for mode, _ in OF_MODES) == CUDA_MODES


@pytest.mark.parametrize("name", [n for _, f in OF_MODES for n in (f.faulty, f.clean)])
def test_on_a_cpu_a_fault_of_a_mode_does_not_show(name: str, pair: OpPair, line: Line) -> None:
    if "k17" in name:
        pytest.skip("a CUDA kernel of Triton's")
    executor = Executor(pair, Loaded("own", kernel_of(name), "dispatch"), "cpu", ())
    assert executor.run(parse(line(mode="repeat"))).status == "equal"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", CUDA_MODES)
@pytest.mark.parametrize("own", [mode for mode, _ in OF_MODES])
def test_its_own_mode_alone_catches_a_fault(own: str, mode: str, pair: OpPair, line: Line) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if mode == "second_device" and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    fault = dict(OF_MODES)[own]
    case = parse(line(mode=mode).replace("/cpu/", "/cuda:0/"))
    for name, right in ((fault.faulty, mode != own), (fault.clean, True)):
        found = on_a_gpu(name, pair).run(case)
        assert (found.status == "equal") == right, (name, found)
        assert found.status != "reference", found  # that is no finding of the kernel's
