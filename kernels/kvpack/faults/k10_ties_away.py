"""K10: fp8 with ties away from zero.

Kind: conversion. Adding half a step and truncating (``roundf``, or Triton's interpreter) is right
but for exact ties with an even neighbour below: 126 patterns of either dtype, 128 where overflow
gives NaN.

Differs from its clean twin in ``table``.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvpack.faults import tables
from kvpack.faults.kernel import CLEAN

FAULTY = replace(CLEAN, table=tables.ties_away)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, rounding ties away from zero in fp8."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
