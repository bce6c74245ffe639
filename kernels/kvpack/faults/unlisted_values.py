"""Faults of single values that the catalogue doesn't list, to test that the kinds are found.

Each function is ``kvpack.faults.kernel.kv_pack`` with the fault that its docstring names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvpack.faults import kernel, tables
from kvpack.faults.kernel import CLEAN, Block, Job

E4M3_NAN, E4M3_NEGATIVE_NAN = 0x7F, 0xFF


def _magnitude(x: Tensor) -> Tensor:
    return x.to(torch.int32) & 0x7FFF


def _canonical_nan(infinity: int, quiet: int) -> Callable[[Job, Block, Tensor], None]:
    def put(job: Job, at: Block, value: Tensor) -> None:
        if job.table is None:
            value = torch.where(_magnitude(value) > infinity, quiet, value)
        kernel.put_value(job, at, value)

    return put


def _flushed(smallest_normal: int) -> Callable[[Job, Block, Tensor], None]:
    def put(job: Job, at: Block, nope: Tensor) -> None:
        if job.table is None:
            nope = torch.where(_magnitude(nope) < smallest_normal, 0, nope)
        kernel.put_nope(job, at, nope)

    return put


def _odd_nan(job: Job, at: Block, value: Tensor) -> None:
    if job.table is not None:
        value = value.clone()
        odd = value[..., 1::2]
        odd[odd == E4M3_NEGATIVE_NAN] = E4M3_NAN
    kernel.put_value(job, at, value)


ONE_PATTERN = replace(CLEAN, table=tables.one_wrong)
FLUSHED_RESULTS = replace(CLEAN, table=tables.flushing)
ROPE_TRUNCATES = replace(CLEAN, pe_table=tables.truncating)
THROUGH_BF16 = replace(CLEAN, table=tables.through_bf16)
ODD_NAN = replace(CLEAN, put_value=_odd_nan)
CANONICAL_NAN = {
    torch.bfloat16: replace(CLEAN, put_value=_canonical_nan(0x7F80, 0x7FC0)),
    torch.float16: replace(CLEAN, put_value=_canonical_nan(0x7C00, 0x7E00)),
}
FLUSHED_INPUTS = {
    torch.bfloat16: replace(CLEAN, put_nope=_flushed(0x0080)),
    torch.float16: replace(CLEAN, put_nope=_flushed(0x0400)),
}


def one_pattern(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Flip the last bit of one pattern's byte, 3C7F, in fp8."""
    return ONE_PATTERN(kv_nope, k_pe, use_fp8)


def flushed_results(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Flush subnormal results to zero in fp8."""
    return FLUSHED_RESULTS(kv_nope, k_pe, use_fp8)


def rope_truncates(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Round the rope towards zero in fp8, and all else to nearest."""
    return ROPE_TRUNCATES(kv_nope, k_pe, use_fp8)


def through_bf16(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Convert fp16 through bf16 in fp8, which rounds twice."""
    return THROUGH_BF16(kv_nope, k_pe, use_fp8)


def odd_nan(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Lose the sign of a NaN in odd columns of v in fp8: the upper half of a pair."""
    return ODD_NAN(kv_nope, k_pe, use_fp8)


def canonical_nan(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Copy v through arithmetic in 16-bit mode, which makes one NaN of all NaNs."""
    return CANONICAL_NAN.get(kv_nope.dtype, CLEAN)(kv_nope, k_pe, use_fp8)


def flushed_inputs(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Copy the key through arithmetic that flushes subnormals in 16-bit mode."""
    return FLUSHED_INPUTS.get(kv_nope.dtype, CLEAN)(kv_nope, k_pe, use_fp8)
