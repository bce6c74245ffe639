"""Our own kernel for rows of the K3 epilogues, in Triton: ``[a | b]``, scaled, rotated, paged.

It converts with integers: Triton's interpreter converts to e4m3 and from bf16 by rules of its
own, and this way its bytes are exact on a CPU as well. Offsets are 64-bit.

Importing this module imports Triton, or raises ``Unavailable``.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpack.spec import Unavailable

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise Unavailable(f"Triton does not import ({error}): install triton 3.6 or later") from error

ROWS = 4
WARPS = 4
_INTERPRETED_ROWS = 256  # a program costs milliseconds in the interpreter, however small
_launches = 0


@triton.jit
def _widen(word, BF16: tl.constexpr):
    if BF16:
        value = (word.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = word.to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _e4m3(value):
    word = value.to(tl.int32, bitcast=True)
    size = tl.minimum(word & 0x7FFFFFFF, 0x43E00000)
    rounded = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, rounded) | ((word >> 24) & 0x80)
    return tl.where((word & 0x7FFFFFFF) > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def _narrow(value, BF16: tl.constexpr):
    word = value.to(tl.int32, bitcast=True)
    if BF16:
        made = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).to(tl.int16)
    else:
        made = value.to(tl.float16).to(tl.int16, bitcast=True)
    return tl.where((word & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, made).to(tl.int16)


@triton.jit
def _turn(x, y, token, inside, position_ptr, table_ptr):
    position = tl.load(position_ptr + token, mask=inside, other=0)
    pair = tl.arange(0, 32)[None, :]
    row = table_ptr + position[:, None] * 64
    cos = tl.load(row + pair, mask=inside[:, None], other=0.0)
    sin = tl.load(row + 32 + pair, mask=inside[:, None], other=0.0)
    return x * cos - y * sin, x * sin + y * cos


@triton.jit
def _target(token, head, inside, slot_ptr, out_token, out_head, block_size, SLOTS: tl.constexpr):
    if SLOTS:
        slot = tl.load(slot_ptr + token, mask=inside, other=-1)
        stored = slot >= 0
        block = slot // block_size
        offset = block * out_token + (slot - block * block_size) * out_head
    else:
        stored = inside
        offset = token * out_token + head * out_head
    return offset, stored


@triton.jit
def _k3_rows(
    a_ptr,
    b_ptr,
    out_ptr,
    slot_ptr,
    position_ptr,
    table_ptr,
    scale_ptr,
    rows,
    heads,
    a_token,
    a_head,
    b_token,
    b_head,
    out_token,
    out_head,
    block_size,
    A: tl.constexpr,
    B: tl.constexpr,
    AT: tl.constexpr,
    FP8: tl.constexpr,
    TURN: tl.constexpr,
    SLOTS: tl.constexpr,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    token = row // heads
    head = row - token * heads
    offset, inside = _target(token, head, inside, slot_ptr, out_token, out_head, block_size, SLOTS)
    out = out_ptr + offset[:, None]
    mask = inside[:, None]
    if A > 0:
        column = tl.arange(0, A)[None, :]
        source = a_ptr + (token * a_token + head * a_head)[:, None]
        word = tl.load(source + column, mask=mask, other=0)
        if FP8:
            tl.store(out + column, _e4m3(_widen(word, BF16) * tl.load(scale_ptr)), mask=mask)
        else:
            tl.store(out + column, word, mask=mask)
    if B:
        pair = 2 * tl.arange(0, 32)[None, :]
        source = b_ptr + (token * b_token + head * b_head)[:, None] + pair
        first = tl.load(source, mask=mask, other=0)
        second = tl.load(source + 1, mask=mask, other=0)
        if TURN or FP8:
            x = _widen(first, BF16)
            y = _widen(second, BF16)
            if TURN:
                x, y = _turn(x, y, token, inside, position_ptr, table_ptr)
            if FP8:
                scale = tl.load(scale_ptr)
                first = _e4m3(x * scale)
                second = _e4m3(y * scale)
            else:
                first = _narrow(x, BF16)
                second = _narrow(y, BF16)
        tl.store(out + AT + pair, first, mask=mask)
        tl.store(out + AT + pair + 1, second, mask=mask)


@triton.jit
def _store_word(at, word, mask):
    tl.store(at, (word & 0xFF).to(tl.uint8), mask=mask)
    tl.store(at + 1, ((word >> 8) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def _k3_ds_rows(
    a_ptr,
    b_ptr,
    out_ptr,
    slot_ptr,
    position_ptr,
    table_ptr,
    rows,
    a_token,
    b_token,
    out_block,
    out_entry,
    block_size,
    TURN: tl.constexpr,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offset, inside = _target(
        token, token, token < rows, slot_ptr, out_block, out_entry, block_size, True
    )
    out = out_ptr + offset[:, None]
    mask = inside[:, None]
    column = tl.arange(0, 128)[None, :]
    for tile in tl.static_range(4):
        source = a_ptr + (token * a_token)[:, None] + tile * 128
        value = _widen(tl.load(source + column, mask=mask, other=0), BF16)
        size = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        most = tl.max(tl.where(size > 0x7F800000, 0, size), axis=1)
        power = (most >> 23) - 135 + tl.where((most & 0x7FFFFF) > 0x600000, 1, 0)
        power = tl.maximum(power, -13)
        infinite = most == 0x7F800000
        scale = tl.where(infinite, 0x7F800000, (power + 127) << 23)
        inverse = tl.where(infinite, 0, (127 - power) << 23).to(tl.float32, bitcast=True)
        tl.store(out + tile * 128 + column, _e4m3(value * inverse[:, None]), mask=mask)
        at = out_ptr + offset + 512 + 4 * tile
        _store_word(at, scale, inside)
        _store_word(at + 2, scale >> 16, inside)
    pair = tl.arange(0, 32)[None, :]
    source = b_ptr + (token * b_token)[:, None] + 2 * pair
    first = tl.load(source, mask=mask, other=0)
    second = tl.load(source + 1, mask=mask, other=0)
    if TURN:
        x = _widen(first, BF16)
        y = _widen(second, BF16)
        x, y = _turn(x, y, token, inside, position_ptr, table_ptr)
        first = _narrow(x, BF16)
        second = _narrow(y, BF16)
    _store_word(out + 528 + 4 * pair, first.to(tl.int32), mask)
    _store_word(out + 530 + 4 * pair, second.to(tl.int32), mask)


@dataclass(frozen=True)
class Rotation:
    """Positions and table of a rotation, or two ``None``."""

    positions: Tensor | None
    table: Tensor | None


def require(device: str, library: str | None) -> None:
    """Check that the kernel can run.

    Raises
    ------
    Unavailable
        With a ``library``; on a CPU without the interpreter, on CUDA with it, or without a device.

    """
    if library is not None:
        raise Unavailable(f"triton takes no library, got {library}: leave the option out")
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu and not interpreted():
        raise Unavailable("triton on a CPU needs TRITON_INTERPRET=1 before it is imported")
    if not on_cpu and interpreted():
        raise Unavailable("triton is interpreted in this process: unset TRITON_INTERPRET for CUDA")
    if not on_cpu and not torch.cuda.is_available():
        raise Unavailable("triton on cuda needs a CUDA device, and torch sees none")


def interpreted() -> bool:
    """Tell whether kernels of this process are interpreted: decided when this was imported."""
    return not isinstance(_k3_rows, triton.JITFunction)


def launches() -> int:
    """Count the calls with tokens so far, in this process."""
    return _launches


def count() -> None:
    """Count a call."""
    global _launches  # noqa: PLW0603 - a process-wide count is what it is
    _launches += 1


def check(tensors: dict[str, Tensor]) -> None:
    """Check dtypes and last strides.

    Raises
    ------
    TypeError, ValueError
        For dtypes other than one of bf16 and fp16, or a last stride that isn't 1.

    """
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.bfloat16, torch.float16) or tensor.dtype != first.dtype:
            raise TypeError(f"{name} is {tensor.dtype}: expected bfloat16 or float16, all alike")
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has last stride {tensor.stride(-1)}: expected 1")


def _size(rows: int) -> int:
    return min(_INTERPRETED_ROWS, triton.next_power_of_2(rows)) if interpreted() else ROWS


def _words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16)


def _on(tensor: Tensor) -> Any:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def rows(
    a: Tensor | None,
    b: Tensor | None,
    out: Tensor,
    rotation: Rotation,
    *,
    at: int,
    scale_inv: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Write ``out[t, h] = [a[t, h] | b[t, h]]``, or with ``slots`` into slot ``slots[t]``.

    ``a`` goes to the first columns, ``b`` (64 columns, rotated where there are positions) to
    column ``at`` on; with ``scale_inv`` both are converted to e4m3.
    """
    given = a if a is not None else b
    assert given is not None
    tokens, heads, _ = given.shape
    count_ = tokens * heads
    if not count_:
        return
    size = _size(count_)
    first, second = (a if a is not None else given), (b if b is not None else given)
    with _on(out):
        _k3_rows[(triton.cdiv(count_, size),)](
            _words(first),
            _words(second),
            _words(out),
            slots,
            rotation.positions,
            rotation.table,
            scale_inv,
            count_,
            heads,
            first.stride(0),
            first.stride(1),
            second.stride(0),
            second.stride(1),
            out.stride(0),
            out.stride(1),
            out.shape[1] if slots is not None else 1,
            A=0 if a is None else a.shape[2],
            B=b is not None,
            AT=at,
            FP8=scale_inv is not None,
            TURN=rotation.positions is not None,
            SLOTS=slots is not None,
            BF16=given.dtype == torch.bfloat16,
            ROWS=size,
            num_warps=WARPS,
        )


def ds_rows(latent: Tensor, rope: Tensor, cache: Tensor, rotation: Rotation, slots: Tensor) -> None:
    """Store ``fp8_ds_mla`` entries of ``[T, 512]`` and ``[T, 64]`` in ``cache``."""
    tokens = latent.shape[0]
    if not tokens:
        return
    size = _size(tokens)
    with _on(cache):
        _k3_ds_rows[(triton.cdiv(tokens, size),)](
            _words(latent),
            _words(rope),
            cache,
            slots,
            rotation.positions,
            rotation.table,
            tokens,
            latent.stride(0),
            rope.stride(0),
            cache.stride(0),
            cache.stride(1),
            cache.shape[1],
            TURN=rotation.positions is not None,
            BF16=latent.dtype == torch.bfloat16,
            ROWS=size,
            num_warps=WARPS,
        )
