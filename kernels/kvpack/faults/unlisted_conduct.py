"""Faults of conduct that the catalogue doesn't list, to test that the kinds are found.

Each function is ``kvpack.faults.kernel.kv_pack`` with the fault that its docstring names: the
bytes may be right, and the call still can't stand in for the stock ops.
"""

from __future__ import annotations

import itertools
import os
import time

import torch
from torch import Tensor

from kvpack.faults.kernel import CLEAN, bits

SEVENTH = 7
HANGING_TOKENS = 13
DYING_HEADS = 3
LATE_CYCLES = 20_000_000
EXIT_STATUS = 3

_calls = itertools.count(1)
_kept: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
_memo: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}


def input_written(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Scale k_pe by 2 in place and back, which makes infinities of its largest values."""
    result = CLEAN(kv_nope, k_pe, use_fp8)
    if k_pe.dtype == kv_nope.dtype:
        k_pe.mul_(2).mul_(0.5)
    return result


def cached_buffer(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return the same memory for each call of a shape, which the next call overwrites."""
    result = CLEAN(kv_nope, k_pe, use_fp8)
    key = (kv_nope.shape, kv_nope.dtype, use_fp8, kv_nope.device)
    if key not in _kept:
        _kept[key] = (result[0].clone(), result[1].clone())
    for mine, new in zip(_kept[key], result, strict=True):
        bits(mine).copy_(bits(new))
    return _kept[key]


def memoised(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return the earlier result where operands lie where they lay before, whatever they hold."""
    key = (kv_nope.data_ptr(), k_pe.data_ptr(), kv_nope.shape, kv_nope.dtype, use_fp8)
    if key not in _memo:
        _memo.clear()
        _memo[key] = CLEAN(kv_nope, k_pe, use_fp8)
    return tuple(x.clone() for x in _memo[key])  # type: ignore[return-value]


def seventh_call(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Get the last row of v wrong in every seventh call, as a race does."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if next(_calls) % SEVENTH == 0 and v.numel():
        bits(v)[-1, -1] ^= 1
    return k, v


def hangs(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Never return for 13 tokens."""
    while kv_nope.shape[0] == HANGING_TOKENS:
        time.sleep(1)
    return CLEAN(kv_nope, k_pe, use_fp8)


def exits(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """End the process for 3 heads."""
    if kv_nope.shape[1] == DYING_HEADS:
        os._exit(EXIT_STATUS)
    return CLEAN(kv_nope, k_pe, use_fp8)


def empty_raises(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Fail without tokens, as ``reshape(T, -1)`` does."""
    kv_nope.reshape(kv_nope.shape[0], -1)
    return CLEAN(kv_nope, k_pe, use_fp8)


def bytes_returned(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return v as uint8 in fp8."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    return k, v.view(torch.uint8) if use_fp8 else v


def squeezed(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return v as ``[T, 128]`` where there is one head."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    return k, v.squeeze(1)


def meta(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return v on the meta device where there are two heads."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    return k, v.to("meta") if kv_nope.shape[1] == 2 else v  # noqa: PLR2004


def default_dtype(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Leave another default dtype behind."""
    torch.set_default_dtype(torch.float64)
    return CLEAN(kv_nope, k_pe, use_fp8)


def grad_mode(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Leave gradients switched off."""
    torch.set_grad_enabled(False)
    return CLEAN(kv_nope, k_pe, use_fp8)


def default_stream(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Work on the default stream instead of the caller's."""
    if kv_nope.device.type != "cuda":
        return CLEAN(kv_nope, k_pe, use_fp8)
    with torch.cuda.stream(torch.cuda.default_stream(kv_nope.device)):
        return CLEAN(kv_nope, k_pe, use_fp8)


def looks_at_data(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Ask the host whether k_pe is all zero: a copy that no graph can capture."""
    if k_pe.numel() and not bool((bits(k_pe) != 0).any()):
        return CLEAN(kv_nope, k_pe, use_fp8)
    return CLEAN(kv_nope, k_pe, use_fp8)


def leaves_work(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Finish the last row of v some milliseconds later on a stream that nobody waits for."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if v.device.type != "cuda" or not v.numel():
        return k, v
    bits(v)[-1].bitwise_xor_(1)
    side = torch.cuda.Stream(v.device)
    side.wait_stream(torch.cuda.current_stream(v.device))
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATE_CYCLES)  # noqa: SLF001 - torch's own tests use it
        bits(v)[-1].bitwise_xor_(1)
    v.record_stream(side)
    return k, v
