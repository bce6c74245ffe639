"""Faults that one calling mode of a GPU alone can catch, each beside a twin with one thing right.

M01  stream: works on the default stream, but for a capture. Twin: on the caller's.
M02  graph: U34 of ``unlisted_conduct``, which lets the host look at data. Twin: doesn't.
M04  gpu_hog: waits for a side stream of high priority by time, measured once while nothing else
     ran, not by an event. Twin: by the event.
M05  second_device: makes its outputs on the current device. Twin: on that of the operands.

M03, of the mode ``producer``, is K17. On a CPU all of them are right.
"""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import Tensor

from kvpack.faults.kernel import CLEAN, bits

Pack = tuple[Tensor, Tensor]
SCRATCH_BYTES = 1 << 31
"""Copied on the side stream before a row is written: its time is the memory's, not the launch's."""
PATIENCE = 1.3
"""Times the time that the side stream took alone."""


def _on_a_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda"


def default_stream(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:  # noqa: FBT001
    """M01: work on the default stream wherever that isn't an error at once."""
    if not _on_a_gpu(kv_nope) or torch.cuda.is_current_stream_capturing():
        return CLEAN(kv_nope, k_pe, use_fp8)
    with torch.cuda.stream(torch.cuda.default_stream(kv_nope.device)):
        return CLEAN(kv_nope, k_pe, use_fp8)


def callers_stream(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:  # noqa: FBT001
    """Be M01's twin: name the caller's stream, and work on it."""
    if not _on_a_gpu(kv_nope) or torch.cuda.is_current_stream_capturing():
        return CLEAN(kv_nope, k_pe, use_fp8)
    with torch.cuda.stream(torch.cuda.current_stream(kv_nope.device)):
        return CLEAN(kv_nope, k_pe, use_fp8)


def looks_at_nothing(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:  # noqa: FBT001
    """Be M02's twin: leave the answer on the device."""
    if k_pe.numel():
        (bits(k_pe) != 0).any()
    return CLEAN(kv_nope, k_pe, use_fp8)


@cache
def _scratch(device: torch.device) -> tuple[torch.cuda.Stream, Tensor, Tensor]:
    one = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
    return torch.cuda.Stream(device, priority=-1), one, torch.empty_like(one)


@cache
def _alone_s(device: torch.device) -> float:
    """Return how long the side stream's copy takes while the device has nothing else to do."""
    side, one, other = _scratch(device)
    for _ in range(2):  # the first brings the kernel in
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        with torch.cuda.stream(side):
            other.copy_(one)
        torch.cuda.synchronize(device)
        taken = time.perf_counter() - start
    return taken


def _last_row_aside(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool, *, by_time: bool) -> Pack:  # noqa: FBT001
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if not _on_a_gpu(v) or not v.numel() or torch.cuda.is_current_stream_capturing():
        return k, v
    device = v.device
    patience = PATIENCE * _alone_s(device)
    side, one, other = _scratch(device)
    right = bits(v)[-1].clone()
    bits(v)[-1] ^= 1
    torch.cuda.current_stream(device).synchronize()
    with torch.cuda.stream(side):
        other.copy_(one)
        bits(v)[-1] = right
        done = side.record_event()
    for x in (v, right):
        x.record_stream(side)
    if by_time:
        time.sleep(patience)
    else:
        torch.cuda.current_stream(device).wait_event(done)
    return k, v


def waits_by_time(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:  # noqa: FBT001
    """M04: write the last row of v on a side stream, and wait for that by the clock."""
    return _last_row_aside(kv_nope, k_pe, use_fp8, by_time=True)


def waits_by_event(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:  # noqa: FBT001
    """Be M04's twin: wait for it by its event."""
    return _last_row_aside(kv_nope, k_pe, use_fp8, by_time=False)


def current_device(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:  # noqa: FBT001
    """M05: return outputs on the device that is current."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    return (k.to("cuda"), v.to("cuda")) if _on_a_gpu(k) else (k, v)


def operands_device(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:  # noqa: FBT001
    """Be M05's twin: return them where the operands are."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    return k.to(kv_nope.device), v.to(kv_nope.device)
