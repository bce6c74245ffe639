"""Faults of index arithmetic that the catalogue doesn't list, to test that the kinds are found.

Each function is ``kvpack.faults.kernel.kv_pack`` with the fault that its docstring names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvpack import stock
from kvpack.faults import kernel
from kvpack.faults.kernel import CLEAN, KV_COLUMNS, LANE, Block, Job

TWELVE_HEADS = 12
MAGIC, MAGIC_SHIFT = 5462, 16
"""``row * 5462 >> 16`` is ``row // 12`` up to row 8,194."""
TOKENS_OF_TILE = 4096
TOKENS_OF_INT16 = 1 << 15
ROWS_OF_BLOCK = 16


def _three_bit_head(job: Job, at: Block, nope: Tensor) -> None:
    kernel.put_nope(job, at, nope)
    last = TWELVE_HEADS - 1
    if job.k.shape[1] == TWELVE_HEADS and at.heads.start == 0 and at.heads.stop > last:
        job.k[at.tokens, last, : stock.NOPE] = nope[:, last & 7]


def _magic_division(job: Job, at: Block, rope: Tensor) -> None:
    if job.k.shape[1] == TWELVE_HEADS:
        rows = torch.arange(at.rows.start, at.rows.stop, device=job.k.device)
        tokens = (rows * MAGIC >> MAGIC_SHIFT).clamp(max=job.kv.shape[0] - 1)
        rope = job.pe[tokens]
        if job.table is not None and rope.dtype != torch.uint8:
            rope = kernel.convert(rope, job.table)
        rope = rope.view(at.tokens.stop - at.tokens.start, -1, stock.ROPE)
    kernel.put_rope(job, at, rope)


def _token_in_tile(x: Tensor, at: Block) -> Tensor:
    if x.shape[-1] != stock.ROPE or x.shape[0] <= TOKENS_OF_TILE:
        return kernel.read(x, at)
    tokens = torch.arange(at.tokens.start, at.tokens.stop, device=x.device)
    return x[tokens % TOKENS_OF_TILE, at.heads]


def _int16_token(job: Job, at: Block, value: Tensor) -> None:
    stop = min(at.tokens.stop, TOKENS_OF_INT16)
    if stop > at.tokens.start:
        part = value[: stop - at.tokens.start]
        kernel.put_value(job, replace(at, tokens=slice(at.tokens.start, stop)), part)


def _sliced_rope(x: Tensor, at: Block) -> Tensor:
    found = kernel.read(x, at)
    if x.shape[-1] == stock.ROPE and x.stride(0) > stock.ROPE:
        return found.roll(stock.ROPE // 2, dims=-1)
    return found


def _dense_heads(x: Tensor, at: Block) -> Tensor:
    pitches = (x.stride(0), x.shape[-1], 1)
    return kernel.read(x.as_strided(x.shape, pitches, x.storage_offset()), at)


def _half_aligned(job: Job, at: Block, value: Tensor) -> None:
    columns = stock.V - (LANE if job.kv.data_ptr() % 32 == 16 else 0)  # noqa: PLR2004
    job.v[at.tokens, at.heads, :columns] = value[..., :columns]


def _beyond(x: Tensor, at: Block) -> Tensor | None:
    """Return the element after each row of a block, or None where the storage ends before."""
    end = x.storage_offset() + x.shape[-1]
    end += (at.tokens.stop - 1) * x.stride(0) + (at.heads.stop - 1) * x.stride(1)
    if (end + 1) * x.element_size() > x.untyped_storage().nbytes():
        return None
    after = x.as_strided(x.shape[:2], x.stride()[:2], x.storage_offset() + x.shape[-1])
    return after[at.tokens, at.heads]


def _gap(x: Tensor, at: Block) -> Tensor:
    found, after = kernel.read(x, at), None
    if x.shape[-1] == KV_COLUMNS and x.stride(1) > KV_COLUMNS:
        after = _beyond(x, at)
    if after is None:
        return found
    found = found.clone()
    found[..., -1] ^= after & 1
    return found


def _nan_leak(infinity: int, quiet_nan: int) -> Callable[[Tensor, Block], Tensor]:
    def read(x: Tensor, at: Block) -> Tensor:
        found = kernel.read(x, at)
        after = _beyond(x, at) if x.shape[-1] == KV_COLUMNS else None
        if after is None:
            return found
        found = found.clone()
        leaks = (after.to(torch.int32) & 0x7FFF) >= infinity
        found[..., -1] = torch.where(leaks, quiet_nan, found[..., -1])
        return found

    return read


def _block_tail(job: Job, at: Block, rope: Tensor) -> None:
    rows = job.k.shape[0] * job.k.shape[1]
    if rows % ROWS_OF_BLOCK == 1 and at.rows.stop == rows and at.heads.start < at.heads.stop - 1:
        kernel.put_rope(job, replace(at, heads=slice(at.heads.start, at.heads.stop - 1)), rope)
    else:
        kernel.put_rope(job, at, rope)


def _six_bit_head(job: Job, at: Block, value: Tensor) -> None:
    kernel.put_value(job, at, value)
    if at.heads.start == 0 and at.heads.stop > 64:  # noqa: PLR2004
        job.v[at.tokens, 64 : at.heads.stop] = value[:, : at.heads.stop - 64]


def _before_v(job: Job) -> None:
    flat = job.v.view(-1).view(torch.uint8)
    if flat.numel() and flat.storage_offset():
        flat.as_strided((1,), (1,), flat.storage_offset() - 1).fill_(0)


def _zero_rows_skipped(job: Job, at: Block, value: Tensor) -> None:
    nonzero = (value != 0).any(dim=-1, keepdim=True)
    place = job.v[at.tokens, at.heads]
    place.copy_(torch.where(nonzero, value, place))


THREE_BIT_HEAD = replace(CLEAN, put_nope=_three_bit_head)
MAGIC_DIVISION = replace(CLEAN, put_rope=_magic_division)
TOKEN_IN_TILE = replace(CLEAN, read=_token_in_tile)
SLICED_ROPE = replace(CLEAN, read=_sliced_rope)
DENSE_HEADS = replace(CLEAN, read=_dense_heads)
HALF_ALIGNED = replace(CLEAN, put_value=_half_aligned)
GAP_READ = replace(CLEAN, read=_gap)
NAN_LEAK = {
    torch.bfloat16: replace(CLEAN, read=_nan_leak(0x7F80, 0x7FC0)),
    torch.float16: replace(CLEAN, read=_nan_leak(0x7C00, 0x7E00)),
}
BLOCK_TAIL = replace(CLEAN, put_rope=_block_tail)
SIX_BIT_HEAD = replace(CLEAN, put_value=_six_bit_head)
BEFORE_V = replace(CLEAN, finish=_before_v)
ZERO_ROWS_SKIPPED = replace(CLEAN, put_value=_zero_rows_skipped)
INT16_TOKEN = replace(CLEAN, put_value=_int16_token)


def three_bit_head(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Read head 11 of 12 as head 3: a mask that is right for powers of two up to 8."""
    return THREE_BIT_HEAD(kv_nope, k_pe, use_fp8)


def magic_division(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Divide rows by 12 heads with a multiplier that is one bit short: wrong past row 8,194."""
    return MAGIC_DIVISION(kv_nope, k_pe, use_fp8)


def token_in_tile(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Read k_pe of token ``t % 4096``, where there are more than 4,096."""
    return TOKEN_IN_TILE(kv_nope, k_pe, use_fp8)


def sliced_rope(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Swap the rope's halves where k_pe is a slice of wider rows."""
    return SLICED_ROPE(kv_nope, k_pe, use_fp8)


def dense_heads(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Take heads for adjacent, whatever the head pitch is."""
    return DENSE_HEADS(kv_nope, k_pe, use_fp8)


def half_aligned(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Leave the last lane of v unwritten where kv_nope's base is 16 mod 32 bytes."""
    return HALF_ALIGNED(kv_nope, k_pe, use_fp8)


def gap_read(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Let the element after a padded row decide the last bit of its last column."""
    return GAP_READ(kv_nope, k_pe, use_fp8)


def nan_leak(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Let a NaN or inf after the end of a row into its last column, as ``x + 0 * next`` does."""
    return NAN_LEAK.get(kv_nope.dtype, CLEAN)(kv_nope, k_pe, use_fp8)


def block_tail(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Leave the last row's rope unwritten where it is alone in a block of 16 rows."""
    return BLOCK_TAIL(kv_nope, k_pe, use_fp8)


def six_bit_head(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Take v of heads from 64 up from head - 64."""
    return SIX_BIT_HEAD(kv_nope, k_pe, use_fp8)


def before_v(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Write one byte before the start of v."""
    return BEFORE_V(kv_nope, k_pe, use_fp8)


def zero_rows_skipped(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Leave rows of v that are all zero bits unwritten."""
    return ZERO_ROWS_SKIPPED(kv_nope, k_pe, use_fp8)


def int16_token(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Index tokens of v in 16 bits, in fp16 with fp8 alone: rows from 32,768 on are lost."""
    wrong = use_fp8 and kv_nope.dtype == torch.float16
    return (INT16_TOKEN if wrong else CLEAN)(kv_nope, k_pe, use_fp8)
