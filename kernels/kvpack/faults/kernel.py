"""A working K/V pack in plain torch ops, in parts that a fault replaces one at a time.

It has the launch plan of vLLM's fused op: rows are (token, head) pairs, one grid pass holds SMs x
128 of them, and a loop covers the rest. Outputs come from ``torch.empty``; conversion is a
look-up. Speed on one CPU core is about 0.3 ms for 1,000 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvpack import stock
from kvpack.faults import tables

K_COLUMNS = stock.NOPE + stock.ROPE
KV_COLUMNS = stock.NOPE + stock.V
LANE = 8
"""Columns of one lane: the 16 bytes of a vector load of a 16-bit type."""
ROWS_PER_SM = 128
"""vLLM's op: at most 8 blocks of 16 rows on each SM, then a grid-stride loop."""
SMS_ON_CPU = 132
"""An H200 has so many multiprocessors; a CPU is taken for one."""
BLOCK_ROWS_CPU = 1024
"""Rows converted at a time on a CPU: their indices, 1 MiB, stay in its cache."""
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Block:
    """Consecutive rows that fill a rectangle of tokens and heads.

    ``rows`` is the same place counted in rows, ``token * H + head``.
    """

    tokens: slice
    heads: slice
    rows: slice


@dataclass(frozen=True)
class Job:
    """One call's tensors as integers: ``int16`` elements, or ``uint8`` where they are e4m3.

    Attributes
    ----------
    kv, pe : ``[T, H, 256]`` and ``[T, 1, 64]``, as they lie.
    k, v : ``[T, H, 192]`` and ``[T, H, 128]``.
    table : the conversion, uint8 ``[65536]`` on the operands' device; None in 16-bit mode.

    """

    kv: Tensor
    pe: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None


Table = Callable[[str, torch.device], Tensor]


def bits(x: Tensor) -> Tensor:
    """View a tensor's elements as integers of their size, strides unchanged."""
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int16)


def check(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> str:  # noqa: FBT001
    """Refuse what the pack isn't made for; return ``"bf16"`` or ``"fp16"``.

    Raises
    ------
    ValueError
        For other dtypes than bf16 and fp16 (and e4m3 k_pe with fp8), or other shapes than
        ``[T, H, 256]`` and ``[T, 1, 64]``.

    """
    if kv_nope.dtype not in DTYPES:
        raise ValueError(f"kv_nope is {kv_nope.dtype}: expected bfloat16 or float16")
    if k_pe.dtype != kv_nope.dtype and not (use_fp8 and k_pe.dtype == torch.float8_e4m3fn):
        raise ValueError(f"k_pe is {k_pe.dtype}: expected {kv_nope.dtype}, or e4m3 with use_fp8")
    shape = (kv_nope.shape[0], kv_nope.shape[1], KV_COLUMNS)
    if kv_nope.shape != shape or k_pe.shape != (shape[0], 1, stock.ROPE):
        raise ValueError(
            f"shapes {list(kv_nope.shape)} and {list(k_pe.shape)}: "
            f"expected [T, H, {KV_COLUMNS}] and [T, 1, {stock.ROPE}]"
        )
    return DTYPES[kv_nope.dtype]


# -- the parts ------------------------------------------------------------------------


def allocate(tokens: int, heads: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return k and v, unwritten and contiguous."""
    return [
        torch.empty((tokens, heads, columns), dtype=dtype, device=device)
        for columns in (K_COLUMNS, stock.V)
    ]


def read(x: Tensor, at: Block) -> Tensor:
    """Return an operand's elements in a block."""
    return x[at.tokens, at.heads]


def convert(x: Tensor, table: Tensor) -> Tensor:
    """Look 16-bit patterns up; the result is contiguous and of the same shape."""
    index = x.view(torch.uint16).to(torch.int32, memory_format=torch.contiguous_format)
    return torch.index_select(table, 0, index.view(-1)).view(x.shape)


def split(kv: Tensor, at: Block, job: Job) -> tuple[Tensor, Tensor]:
    """Return the key's part of a block's rows, and the value."""
    del at, job
    return kv[..., : stock.NOPE], kv[..., stock.NOPE :]


def put_nope(job: Job, at: Block, nope: Tensor) -> None:
    """Write a block's ``[t, h, 128]`` into the key."""
    job.k[at.tokens, at.heads, : stock.NOPE] = nope


def put_rope(job: Job, at: Block, rope: Tensor) -> None:
    """Write a block's ``[t, 1, 64]`` into the key of each head."""
    job.k[at.tokens, at.heads, stock.NOPE :] = rope


def put_value(job: Job, at: Block, value: Tensor) -> None:
    """Write a block's ``[t, h, 128]`` into v."""
    job.v[at.tokens, at.heads] = value


def passes(rows: int, per_pass: int) -> Iterator[tuple[int, int]]:
    """Yield first and last row (exclusive) of each pass of the grid-stride loop."""
    for first in range(0, rows, per_pass):
        yield first, min(first + per_pass, rows)


def finish(job: Job) -> None:
    """Do nothing: what a kernel does after its rows."""
    del job


@dataclass(frozen=True)
class Pack:
    """``k = [f(kv_nope[..., :128]) | f(k_pe)]``, ``v = f(kv_nope[..., 128:])``, by these parts.

    In fp8 ``f`` is ``table``; e4m3 k_pe passes through. Each part does what the function of
    this module with its name says, unless a fault replaced it.
    """

    table: Table = tables.right
    pe_table: Table | None = None
    """The rope's conversion, where it isn't ``table``."""
    allocate: Callable[[int, int, torch.dtype, torch.device], list[Tensor]] = allocate
    passes: Callable[[int, int], Iterable[tuple[int, int]]] = passes
    read: Callable[[Tensor, Block], Tensor] = read
    convert: Callable[[Tensor, Tensor], Tensor] = convert
    split: Callable[[Tensor, Block, Job], tuple[Tensor, Tensor]] = split
    put_nope: Callable[[Job, Block, Tensor], None] = put_nope
    put_rope: Callable[[Job, Block, Tensor], None] = put_rope
    put_value: Callable[[Job, Block, Tensor], None] = put_value
    finish: Callable[[Job], None] = finish

    def __call__(
        self,
        kv_nope: Tensor,
        k_pe: Tensor,
        use_fp8: bool,  # noqa: FBT001
    ) -> tuple[Tensor, Tensor]:
        """Pack; arguments and results are those of ``stock.kv_pack``, but v is contiguous."""
        dtype = check(kv_nope, k_pe, use_fp8)
        device = kv_nope.device
        tokens, heads, _ = kv_nope.shape
        wanted = torch.float8_e4m3fn if use_fp8 else kv_nope.dtype
        k, v = self.allocate(tokens, heads, wanted, device)
        table = self.table(dtype, device) if use_fp8 else None
        pe_table = table
        if self.pe_table is not None and use_fp8:
            pe_table = self.pe_table(dtype, device)
        job = Job(bits(kv_nope), bits(k_pe), bits(k), bits(v), table)
        per_pass = rows_per_pass(device)
        limit = per_pass if device.type == "cuda" else BLOCK_ROWS_CPU
        for first, last in self.passes(tokens * heads, per_pass):
            for at in blocks(first, last, heads, limit):
                self._block(job, at, pe_table)
        self.finish(job)
        return k, v

    def _block(self, job: Job, at: Block, pe_table: Tensor | None) -> None:
        kv = self.read(job.kv, at)
        rope = self.read(job.pe, Block(at.tokens, slice(0, 1), at.tokens))
        if job.table is not None:
            kv = self.convert(kv, job.table)
        if pe_table is not None and rope.dtype != torch.uint8:
            rope = self.convert(rope, pe_table)
        nope, value = self.split(kv, at, job)
        self.put_nope(job, at, nope)
        self.put_rope(job, at, rope)
        self.put_value(job, at, value)


def blocks(first: int, last: int, heads: int, limit: int) -> Iterator[Block]:
    """Cut a run of rows into rectangles: the rest of a token, whole tokens, part of a token.

    Parameters
    ----------
    first, last : the rows, ``last`` excluded.
    heads : H.
    limit : most rows of a rectangle, where a token has no more.

    """
    row = first
    while row < last:
        token, head = divmod(row, heads)
        count = min(last - row, heads - head)
        step = 1
        if head == 0 and last - row >= heads:
            step = min((last - row) // heads, max(1, limit // heads))
            count = step * heads
        stop = heads if step > 1 else head + count
        yield Block(slice(token, token + step), slice(head, stop), slice(row, row + count))
        row += count


@cache
def rows_per_pass(device: torch.device) -> int:
    """Return SMs x 128 rows, with the device's SMs or, on a CPU, an H200's."""
    if device.type != "cuda":
        return SMS_ON_CPU * ROWS_PER_SM
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return int(sms) * ROWS_PER_SM


CLEAN = Pack()
"""The pack without a fault."""


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the pack without a fault; see ``Pack``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
