"""K04: element offsets of the operands are computed in 32 bits.

Kind: an index that wraps at 2^31 elements (vLLM 53390, SGLang 12453). ``token * pitch + head *
pitch`` in ``int`` is right for every shape that a small test has, and needs no large operand to
go wrong: a token pitch of 2^28 elements over a sparse mapping does it at token 8.

Differs from its clean twin in ``read``. On a CPU the bytes come from the wrapped address,
whatever lies there: rows of other tokens, or a segmentation fault. On CUDA the index is relative
to the storage: elements counted from its end, or a device-side assertion.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from kvpack.faults import kernel
from kvpack.faults.kernel import CLEAN, Block

HALF = 1 << 31


def _int32(value: int) -> int:
    return (value + HALF) % (2 * HALF) - HALF


def _offsets(x: Tensor, at: Block) -> Tensor:
    """Return element offsets of a block's rows in int32, which wraps."""
    tokens = torch.arange(at.tokens.start, at.tokens.stop, dtype=torch.int32, device=x.device)
    heads = torch.arange(at.heads.start, at.heads.stop, dtype=torch.int32, device=x.device)
    by_token, by_head = (_int32(p) for p in x.stride()[:2])
    return (tokens * by_token)[:, None] + (heads * by_head)[None, :]


def _read(x: Tensor, at: Block) -> Tensor:
    by_token, by_head, by_column = x.stride()
    last = (at.tokens.stop - 1) * by_token + (at.heads.stop - 1) * by_head
    if last < HALF or by_column != 1:  # nothing wraps: these are the same addresses
        return kernel.read(x, at)
    offsets, columns = _offsets(x, at), x.shape[-1]
    if x.device.type == "cuda":
        storage = x.untyped_storage().nbytes() // x.element_size()
        index = offsets.to(torch.int64)[..., None] + torch.arange(columns, device=x.device)
        return x.as_strided((storage,), (1,), 0)[x.storage_offset() + index]
    size = x.element_size()
    rows = bytearray(offsets.numel() * columns * size)
    target = ctypes.addressof(ctypes.c_char.from_buffer(rows))
    for i, offset in enumerate(offsets.view(-1).tolist()):
        source = x.data_ptr() + offset * size
        ctypes.memmove(target + i * columns * size, source, columns * size)
    return torch.frombuffer(rows, dtype=x.dtype).view(*offsets.shape, columns)


FAULTY = replace(CLEAN, read=_read)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, with 32-bit offsets into the operands."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
