"""K09: fp8 by truncation instead of rounding to nearest even.

Kind: conversion. A cast made of shifts and masks drops the low bits; half of all values are one
step too small, which no tolerance of a few percent sees.

Differs from its clean twin in ``table``. 2,402 patterns of bf16 and 20,098 of fp16 are wrong.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvpack.faults import tables
from kvpack.faults.kernel import CLEAN

FAULTY = replace(CLEAN, table=tables.truncating)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, rounding towards zero in fp8."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
