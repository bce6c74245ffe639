"""Small bad kernels, one for each kind of finding: candidates as anyone would give them.

``tests/equiv/bad_kernels.py:unwritten`` is what stands on the command line. Each is a working pack
with the fault that its docstring names. ``clean`` has none.
"""

# ruff: noqa: FBT001 - the signature is that of the op's callers

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpack.faults.kernel import CLEAN, bits

Pack = tuple[Tensor, Tensor]

_calls = itertools.count(1)
_kept: dict[Any, Pack] = {}
_first: list[int] = []


def clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    return CLEAN(kv_nope, k_pe, use_fp8)


# -- wrong bytes --------------------------------------------------------------------


def divergence(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Flip a bit of the last element of v."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if v.numel():
        bits(v)[-1, -1, -1] ^= 1
    return k, v


def unwritten(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Leave the last row of v as it was allocated."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    fresh = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if v.numel():
        bits(fresh).view(-1)[: -v.shape[-1]] = bits(v).view(-1)[: -v.shape[-1]]
    return k, fresh


def unstable(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Get the last element wrong in another way at every call."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if v.numel():
        bits(v)[-1, -1, -1] ^= 1 + next(_calls) % 7
    return k, v


def overwritten(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Return the same memory for every call of a shape."""
    result = CLEAN(kv_nope, k_pe, use_fp8)
    key = (kv_nope.shape, kv_nope.dtype, use_fp8)
    kept = _kept.setdefault(key, (result[0].clone(), result[1].clone()))
    for mine, new in zip(kept, result, strict=True):
        bits(mine).copy_(bits(new))
    return kept


# -- memory -------------------------------------------------------------------------


def input_changed(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Zero the rope after reading it."""
    result = CLEAN(kv_nope, k_pe, use_fp8)
    bits(k_pe).zero_()
    return result


def input_squeezed(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Take a dimension off the caller's own tensor."""
    result = CLEAN(kv_nope, k_pe, use_fp8)
    k_pe.squeeze_(1)
    return result


def out_of_bounds(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Write one element past the end of v."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    flat = bits(v)
    flat.as_strided((1,), (1,), flat.storage_offset() + v.numel()).fill_(3)
    return k, v


def beside_an_input(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Write one element before the start of kv_nope."""
    result = CLEAN(kv_nope, k_pe, use_fp8)
    flat = bits(kv_nope)
    flat.as_strided((1,), (1,), flat.storage_offset() - 1).fill_(3)
    return result


# -- results of another kind --------------------------------------------------------


def wrong_type(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Any:
    """Return k alone."""
    return CLEAN(kv_nope, k_pe, use_fp8)[0]


def negated_view(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Return a view whose bytes are those of other numbers."""
    k, v = CLEAN(kv_nope, k_pe, False)
    del use_fp8
    return k, torch._neg_view(v)


def wrong_shape(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Return v without the dimension of heads where there is one head."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    return k, v.squeeze(1)


def wrong_dtype(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Return v as plain integers."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    return k, bits(v)


def wrong_device(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Return v on a device without memory."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    return k, v.to("meta")


# -- conduct ------------------------------------------------------------------------


def raised(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Refuse what it claims to take."""
    if kv_nope.shape[0] > 1:
        message = "no kernel for this shape\nsecond line"
        raise RuntimeError(message)
    return CLEAN(kv_nope, k_pe, use_fp8)


def exits(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Ask the interpreter to end, which is an exception."""
    sys.exit(f"{CLEAN(kv_nope, k_pe, use_fp8)[0].shape}")


def crash(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Read address 1 where there are two heads."""
    if kv_nope.shape[1] == 2:
        ctypes.string_at(1)
    return CLEAN(kv_nope, k_pe, use_fp8)


def leaves(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """End the process at once where there are two heads."""
    if kv_nope.shape[1] == 2:
        os._exit(7)
    return CLEAN(kv_nope, k_pe, use_fp8)


def crash_then_leave(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Die with a traceback for two heads, and without one for three."""
    if kv_nope.shape[1] == 2:
        ctypes.string_at(1)
    if kv_nope.shape[1] == 3:
        os._exit(7)
    return CLEAN(kv_nope, k_pe, use_fp8)


def killed(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Do what the kernel does to a process that took too much memory."""
    if kv_nope.shape[1] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return CLEAN(kv_nope, k_pe, use_fp8)


def hang(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Never return for two tokens."""
    while kv_nope.shape[0] == 2:
        time.sleep(0.1)
    return CLEAN(kv_nope, k_pe, use_fp8)


def one_of_each(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Hang, die, raise and go wrong, each in cases of its own."""
    tokens, heads, _ = kv_nope.shape
    while (tokens, heads) == (2, 8) and use_fp8:
        time.sleep(0.1)
    if (tokens, heads) == (1, 8):
        os._exit(7)
    if (tokens, heads) == (2, 12):
        message = "twelve heads"
        raise ValueError(message)
    if tokens == 3 and heads > 15:
        return divergence(kv_nope, k_pe, use_fp8)
    return CLEAN(kv_nope, k_pe, use_fp8)


def global_state(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Leave gradients switched off."""
    torch.set_grad_enabled(False)
    return CLEAN(kv_nope, k_pe, use_fp8)


def lazy_state(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Set the thread count at the first call, and never again."""
    if not _first:
        _first.append(1)
        torch.set_num_threads(torch.get_num_threads() + 1)
    return CLEAN(kv_nope, k_pe, use_fp8)


def prints(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Talk a lot, which is no fault."""
    os.write(1, b"a kernel's own words\n")
    sys.stderr.write("and more of them\n")
    return CLEAN(kv_nope, k_pe, use_fp8)


# -- faults that start somewhere, for shrinking -------------------------------------


def from_37_and_5(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Go wrong from 37 tokens and 5 heads on."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if kv_nope.shape[0] >= 37 and kv_nope.shape[1] >= 5:
        bits(v)[36, 4, 0] ^= 1
    return k, v


def two_faults(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Refuse fewer than 20 tokens, and go wrong from 37 on."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if 0 < kv_nope.shape[0] < 20:
        message = "too few tokens"
        raise RuntimeError(message)
    if kv_nope.shape[0] >= 37:
        bits(v)[36, 0, 0] ^= 1
    return k, v


def one_pattern(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Get one bit pattern of the value wrong in fp8, wherever it stands."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if use_fp8:
        bits(v)[bits(kv_nope)[..., 128:] == 0x3D9A] ^= 1
    return k, v


def strided_only(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Go wrong where rows of kv_nope have a gap behind them."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if kv_nope.shape[0] > 1 and kv_nope.stride(1) > 256:
        bits(v)[1, 0, 0] ^= 1
    return k, v


def takes_two(kv_nope: Tensor, k_pe: Tensor) -> Pack:
    """Takes other arguments than the pair hands it."""
    return CLEAN(kv_nope, k_pe, False)


def calls_takes_two(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Takes what the pair hands it, and calls something else wrongly."""
    return takes_two(kv_nope, k_pe, use_fp8)  # type: ignore[call-arg]


def spends(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Play a case of 2 heads after which its process is of no more use."""
    from equiv.execute import Executor

    Executor.spent = kv_nope.shape[1] == 2
    return CLEAN(kv_nope, k_pe, use_fp8)


def spends_and_does_not_fit(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Play the same, where memory gives out outside of the call."""
    from equiv.execute import CaseRun

    def checked(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if kv_nope.shape[1] == 2:
        CaseRun.checked = checked  # type: ignore[method-assign, assignment]
    return spends(kv_nope, k_pe, use_fp8)


def out_of_memory(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Find no memory for more than 5 tokens."""
    if kv_nope.shape[0] > 5:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.50 GiB")
    return CLEAN(kv_nope, k_pe, use_fp8)


def wrong_until_out_of_memory(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Be wrong in the first process; in others find no memory outside of the call."""
    from equiv.execute import CaseRun

    def checked(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    first = Path("first-process")  # in the folder where the test runs
    if not first.exists():
        first.write_text(str(os.getpid()))
    if first.read_text() != str(os.getpid()):
        CaseRun.checked = checked  # type: ignore[method-assign, assignment]
    return divergence(kv_nope, k_pe, use_fp8)
