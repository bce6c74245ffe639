"""Variants of the pack that must not be flagged: equal bytes by other means.

Each differs from ``kvpack.faults.kernel.kv_pack`` in layout, allocation, order or scratch memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvpack import stock
from kvpack.faults import kernel
from kvpack.faults.kernel import CLEAN, K_COLUMNS, KV_COLUMNS, LANE, Block, Job

ALIGN_BYTES = 256
"""Start of v in a shared allocation: what a caching allocator would give it."""
ROWS_OF_PASS = 256


def _padded(tokens: int, heads: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    k = torch.empty((tokens, heads, KV_COLUMNS), dtype=dtype, device=device)
    return [k[..., :K_COLUMNS], kernel.allocate(tokens, heads, dtype, device)[1]]


def _head_major(tokens: int, heads: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    k, v = kernel.allocate(heads, tokens, dtype, device)
    return [k.transpose(0, 1), v.transpose(0, 1)]


def _one_buffer(tokens: int, heads: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    sizes = [tokens * heads * columns for columns in (K_COLUMNS, stock.V)]
    second = -(-sizes[0] // ALIGN_BYTES) * ALIGN_BYTES
    both = torch.empty(second + sizes[1], dtype=dtype, device=device)
    k = both[: sizes[0]].view(tokens, heads, K_COLUMNS)
    return [k, both[second:].view(tokens, heads, stock.V)]


def _one_row(tokens: int, heads: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    both = torch.empty((tokens, heads, K_COLUMNS + stock.V), dtype=dtype, device=device)
    return [both[..., :K_COLUMNS], both[..., K_COLUMNS:]]


def _with_room(tokens: int, heads: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [x[1:-1] for x in kernel.allocate(tokens + 2, heads, dtype, device)]


def _zeros(tokens: int, heads: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    shapes = [(tokens, heads, columns) for columns in (K_COLUMNS, stock.V)]
    size = dtype.itemsize
    return [
        torch.zeros((*s[:2], s[2] * size), dtype=torch.uint8, device=device).view(dtype)
        for s in shapes
    ]


def _backwards(rows: int, per_pass: int) -> Iterator[tuple[int, int]]:
    yield from reversed(list(kernel.passes(rows, min(per_pass, ROWS_OF_PASS))))


def _scribbled(x: Tensor, table: Tensor) -> Tensor:
    scratch = torch.empty(LANE * KV_COLUMNS, dtype=torch.int16, device=x.device)
    scratch.fill_(0x5AA5)
    return kernel.convert(x, table)


def _twice(job: Job, at: Block, nope: Tensor) -> None:
    job.k[at.tokens, at.heads] = 0x55
    kernel.put_nope(job, at, nope)


PADDED = replace(CLEAN, allocate=_padded)
HEAD_MAJOR = replace(CLEAN, allocate=_head_major)
ONE_BUFFER = replace(CLEAN, allocate=_one_buffer)
ONE_ROW = replace(CLEAN, allocate=_one_row)
WITH_ROOM = replace(CLEAN, allocate=_with_room)
ZEROS = replace(CLEAN, allocate=_zeros)
BACKWARDS = replace(CLEAN, passes=_backwards)
SCRIBBLED = replace(CLEAN, convert=_scribbled)
TWICE = replace(CLEAN, put_nope=_twice)


def padded_key(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return k with rows 256 columns apart."""
    return PADDED(kv_nope, k_pe, use_fp8)


def head_major(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return k and v as views of ``[H, T, columns]``."""
    return HEAD_MAJOR(kv_nope, k_pe, use_fp8)


def one_buffer(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return k and v from one allocation, one behind the other."""
    return ONE_BUFFER(kv_nope, k_pe, use_fp8)


def one_row(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return k and v interleaved row by row in one allocation."""
    return ONE_ROW(kv_nope, k_pe, use_fp8)


def with_room(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return k and v from allocations a token longer at both ends, which stay unwritten."""
    return WITH_ROOM(kv_nope, k_pe, use_fp8)


def zeros(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return k and v from memory that was zeroed first."""
    return ZEROS(kv_nope, k_pe, use_fp8)


def backwards(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Write the last rows first, 256 at a time."""
    return BACKWARDS(kv_nope, k_pe, use_fp8)


def scribbled(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Allocate scratch memory, and leave garbage in it."""
    return SCRIBBLED(kv_nope, k_pe, use_fp8)


def twice(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Write garbage into k, then what belongs there."""
    return TWICE(kv_nope, k_pe, use_fp8)


def views(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return v as stock does in 16-bit mode: a view of the operand."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    return k, v if use_fp8 else kv_nope[..., stock.NOPE :]


def copies(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return copies of what stock returns, both contiguous."""
    k, v = stock.kv_pack(kv_nope, k_pe, use_fp8)
    return k.clone(), v.clone(memory_format=torch.contiguous_format)


def concatenated(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Make k with ``torch.cat`` of bytes, out of sight of any served allocation."""
    kernel.check(kv_nope, k_pe, use_fp8)
    if use_fp8:
        kv_nope, k_pe = kv_nope.to(torch.float8_e4m3fn), k_pe.to(torch.float8_e4m3fn)
    dtype = kv_nope.dtype
    rope = kernel.bits(k_pe).expand(-1, kv_nope.shape[1], -1)
    k = torch.cat([kernel.bits(kv_nope)[..., : stock.NOPE], rope], dim=-1)
    return k.view(dtype), kv_nope[..., stock.NOPE :]


def other_threads(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Check the operands under another thread count, and put it back before the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        kernel.check(kv_nope, k_pe, use_fp8)
    finally:
        torch.set_num_threads(threads)
    return CLEAN(kv_nope, k_pe, use_fp8)


def other_default_dtype(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Work under another default dtype, and put it back."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return CLEAN(kv_nope, k_pe, use_fp8)
    finally:
        torch.set_default_dtype(dtype)
