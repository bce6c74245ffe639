"""A kernel that is slow from some call on, and says so: for runs that are stopped on the way."""

# ruff: noqa: FBT001 - the signature is that of the op's callers

from __future__ import annotations

import ctypes
import itertools
import os
import time
from pathlib import Path

from torch import Tensor

from kvpack.faults.kernel import CLEAN, bits

_calls = itertools.count(1)


def _wait() -> None:
    Path("slow").write_text(f"{os.getpid()}\n", encoding="ascii")
    time.sleep(60)


if os.environ.get("SLOW_FROM") == "0":  # while it is loaded
    _wait()


def slow(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
    """Take a minute from call ``SLOW_FROM`` on, and leave the process's id in ``slow``."""
    if next(_calls) >= int(os.environ.get("SLOW_FROM", "1000000")):
        _wait()
    return CLEAN(kv_nope, k_pe, use_fp8)


def slow_with_the_lock(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
    """Be slow as a kernel is that lets no other Python run."""
    if next(_calls) >= int(os.environ.get("SLOW_FROM", "1000000")):
        Path("slow").write_text(f"{os.getpid()}\n", encoding="ascii")
        ctypes.PyDLL(None).sleep(600)
    return CLEAN(kv_nope, k_pe, use_fp8)


def slow_and_wrong(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
    """Do the same, and flip a bit of the last element of v."""
    k, v = slow(kv_nope, k_pe, use_fp8)
    if v.numel():
        bits(v)[-1, -1, -1] ^= 1
    return k, v
