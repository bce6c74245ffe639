"""Packs for the engine lane: one wrong past a row that short chunks don't have, one that raises."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from kvroute.packs import cat_pack


def late(kv_nope: Any, k_pe: Any, use_fp8: bool) -> tuple[Any, Any]:  # noqa: FBT001
    k, v = cat_pack(kv_nope, k_pe, use_fp8)
    if k.shape[0] > 40:
        k[40, 0, 130] = 0
    return k, v


def raises(kv_nope: Any, k_pe: Any, use_fp8: bool) -> tuple[Any, Any]:  # noqa: FBT001
    raise ValueError("this pack gives up")


def stock(kv_nope: Any, k_pe: Any, use_fp8: bool) -> tuple[Any, Any]:  # noqa: FBT001
    return cat_pack(kv_nope, k_pe, use_fp8)


def dies(kv_nope: Any, k_pe: Any, use_fp8: bool) -> tuple[Any, Any]:  # noqa: FBT001
    if kv_nope.shape[0] > 100:
        os.kill(os.getpid(), signal.SIGSEGV)
    return cat_pack(kv_nope, k_pe, use_fp8)


def sleeps(kv_nope: Any, k_pe: Any, use_fp8: bool) -> tuple[Any, Any]:  # noqa: FBT001
    if kv_nope.shape[0] > 100:
        time.sleep(1000)
    return cat_pack(kv_nope, k_pe, use_fp8)
