"""A working K/V pack in Triton, for the two faults that only a GPU shows.

A program packs four rows. Conversion is a look-up in the right table rather than a cast, because
what a cast makes of overflow differs from one version of torch to the next, and Triton always
saturates.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpack.faults import tables
from kvpack.faults.kernel import K_COLUMNS, allocate, bits, check

ROWS = 4
"""Rows of a program: with one warp, about where a Triton pack is fastest."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def faulty_pack_rows(
    kv,
    pe,
    table,
    k,
    v,
    rows,
    heads,
    kv_token,
    kv_head,
    pe_token,
    FP8: tl.constexpr,
    PE_FP8: tl.constexpr,
    ROWS: tl.constexpr,
    WAIT: tl.constexpr,
    PROMISE: tl.constexpr,
):
    """Pack the rows of one program; ``WAIT`` and ``PROMISE`` are what K17 and K18 are about."""
    if WAIT:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    token = row // heads
    head = row % heads
    half = tl.arange(0, 128)[None, :]
    column = tl.arange(0, 64)[None, :]
    kv_row = kv + (token * kv_token + head * kv_head)[:, None] + half
    pe_row = pe + (token * pe_token)[:, None] + column
    if PROMISE:
        kv_row = tl.multiple_of(kv_row, [1, 16])
        pe_row = tl.multiple_of(pe_row, [1, 16])
    nope = tl.load(kv_row, mask=inside)
    value = tl.load(kv_row + 128, mask=inside)
    rope = tl.load(pe_row, mask=inside)
    if FP8:
        nope = tl.load(table + (nope.to(tl.int32) & 0xFFFF), mask=inside)
        value = tl.load(table + (value.to(tl.int32) & 0xFFFF), mask=inside)
        if not PE_FP8:
            rope = tl.load(table + (rope.to(tl.int32) & 0xFFFF), mask=inside)
    tl.store(k + row[:, None] * 192 + half, nope, mask=inside)
    tl.store(k + row[:, None] * 192 + 128 + column, rope, mask=inside)
    tl.store(v + row[:, None] * 128 + half, value, mask=inside)


def launch(
    kv_nope: Tensor,
    k_pe: Tensor,
    use_fp8: bool,  # noqa: FBT001
    *,
    dependent: bool = False,
    wait: bool = False,
    promise_alignment: bool = False,
) -> tuple[Tensor, Tensor]:
    """Pack; arguments and results are those of ``stock.kv_pack``, but v is contiguous.

    Parameters
    ----------
    kv_nope, k_pe, use_fp8 : the operands, with a last stride of 1.
    dependent : launch with programmatic stream serialization.
    wait : wait for the predecessor before the first load.
    promise_alignment : tell the compiler that rows start on 16 bytes, true or not.

    Raises
    ------
    ValueError
        For operands other than these.

    """
    dtype = check(kv_nope, k_pe, use_fp8)
    if any(x.shape[-1] > 1 and x.stride(-1) != 1 for x in (kv_nope, k_pe)):
        raise ValueError("columns aren't adjacent: expected a last stride of 1")
    tokens, heads, _ = kv_nope.shape
    device = kv_nope.device
    table = tables.right(dtype, device)
    wanted = torch.float8_e4m3fn if use_fp8 else kv_nope.dtype
    k, v = allocate(tokens, heads, wanted, device)
    rows = k.numel() // K_COLUMNS
    if rows == 0:
        return k, v
    on_gpu = device.type == "cuda"  # elsewhere Triton's interpreter runs it, which has no launch
    with torch.cuda.device(device) if on_gpu else nullcontext():
        faulty_pack_rows[(triton.cdiv(rows, ROWS),)](
            bits(kv_nope),
            bits(k_pe),
            table,
            bits(k),
            bits(v),
            rows,
            heads,
            kv_nope.stride(0),
            kv_nope.stride(1),
            k_pe.stride(0),
            FP8=use_fp8,
            PE_FP8=k_pe.element_size() == 1,
            ROWS=ROWS,
            WAIT=wait and on_gpu,
            PROMISE=promise_alignment,
            num_warps=1,
            **({"launch_pdl": True} if dependent and on_gpu else {}),
        )
    return k, v
