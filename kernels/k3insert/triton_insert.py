"""Our own key concat with cache insert, a Triton kernel: one launch, no conversion.

The first programs pack ``ROWS`` (token, head) rows of the key each, the others store the entries of
``ROWS`` tokens. Offsets are 64-bit. Under Triton's interpreter, on a CPU, its bytes are exact too:
elements are only moved.

Importing this module imports Triton, or raises ``Unavailable``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from k3insert import stock
from kvpack.spec import Unavailable

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise Unavailable(f"Triton does not import ({error}): install triton 3.6 or later") from error

ROWS = 16
WARPS = 8
_INTERPRETED_ROWS = 256  # a program costs milliseconds in the interpreter, however small
_launches = 0


@triton.jit
def _insert(
    nope_ptr,
    pe_ptr,
    latent_ptr,
    k_ptr,
    cache_ptr,
    slot_ptr,
    rows,
    tokens,
    heads,
    key_programs,
    nope_token,
    nope_head,
    pe_token,
    latent_token,
    block_size,
    cache_block,
    cache_entry,
    ROWS: tl.constexpr,
):
    rope = tl.arange(0, 64)[None, :]
    program = tl.program_id(0)
    if program < key_programs:
        row = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None]
        token = row // heads
        head = row - token * heads
        half = tl.arange(0, 128)[None, :]
        source = nope_ptr + (token * nope_token + head * nope_head)[:, None]
        k_nope = tl.load(source + half, mask=inside)
        k_pe = tl.load(pe_ptr + (token * pe_token)[:, None] + rope, mask=inside)
        key = k_ptr + row[:, None] * 192
        tl.store(key + half, k_nope, mask=inside)
        tl.store(key + 128 + rope, k_pe, mask=inside)
    else:
        token = (program - key_programs).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        slot = tl.load(slot_ptr + token, mask=token < tokens, other=-1)
        stored = (slot >= 0)[:, None]
        block = slot // block_size
        entry = (
            cache_ptr + (block * cache_block + (slot - block * block_size) * cache_entry)[:, None]
        )
        latent = tl.arange(0, 512)[None, :]
        kv_c = tl.load(latent_ptr + (token * latent_token)[:, None] + latent, mask=stored)
        k_pe = tl.load(pe_ptr + (token * pe_token)[:, None] + rope, mask=stored)
        tl.store(entry + latent, kv_c, mask=stored)
        tl.store(entry + 512 + rope, k_pe, mask=stored)


def load(device: str, library: str | None) -> Callable[..., Tensor]:
    """Return ``insert``.

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
    return insert


def interpreted() -> bool:
    """Tell whether kernels of this process are interpreted: decided when this was imported."""
    return not isinstance(_insert, triton.JITFunction)


def launches() -> int:
    """Count the launches so far, in this process; a case without tokens has none."""
    return _launches


def insert(
    q: Tensor, k_nope: Tensor, k_pe: Tensor, kv_c: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Do what ``stock.insert`` does, with one kernel.

    Raises
    ------
    TypeError, ValueError
        Before anything is launched: dtypes other than one of bf16 and fp16, other shapes, a last
        stride that isn't 1.

    """
    global _launches  # noqa: PLW0603 - a process-wide count is what it is
    del q
    _check(k_nope, k_pe, kv_c, kv_cache)
    tokens, heads, _ = k_nope.shape
    k = torch.empty((tokens, heads, 192), dtype=k_nope.dtype, device=k_nope.device)
    if not tokens:
        return k
    rows = tokens * heads
    block = ROWS
    if interpreted():
        block = min(_INTERPRETED_ROWS, triton.next_power_of_2(max(rows, tokens)))
    key_programs = triton.cdiv(rows, block)
    on_device = torch.cuda.device(k_nope.device) if k_nope.is_cuda else contextlib.nullcontext()
    with on_device:
        _insert[(key_programs + triton.cdiv(tokens, block),)](
            k_nope,
            k_pe,
            kv_c,
            k,
            kv_cache,
            slot_mapping,
            rows,
            tokens,
            heads,
            key_programs,
            k_nope.stride(0),
            k_nope.stride(1),
            k_pe.stride(0),
            kv_c.stride(0),
            kv_cache.shape[1],
            kv_cache.stride(0),
            kv_cache.stride(1),
            ROWS=block,
            num_warps=WARPS,
        )
    _launches += 1
    return k


def _check(k_nope: Tensor, k_pe: Tensor, kv_c: Tensor, kv_cache: Tensor) -> None:
    named = {"k_nope": k_nope, "k_pe": k_pe, "kv_c": kv_c, "kv_cache": kv_cache}
    for name, tensor in named.items():
        if tensor.dtype not in (torch.bfloat16, torch.float16) or tensor.dtype != k_nope.dtype:
            raise TypeError(f"{name} is {tensor.dtype}: expected bfloat16 or float16, all alike")
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has last stride {tensor.stride(-1)}: expected 1")
    tokens = k_nope.shape[0]
    shapes = (
        (k_nope, stock.NOPE),
        (k_pe, stock.ROPE),
        (kv_c, stock.LATENT),
        (kv_cache, stock.ENTRY),
    )
    if any(tensor.shape[-1] != columns for tensor, columns in shapes):
        raise ValueError("expected 128, 64, 512 and 576 columns of k_nope, k_pe, kv_c and kv_cache")
    if k_pe.shape[:-1] != (tokens, 1) or kv_c.shape[:-1] != (tokens,):
        raise ValueError(f"expected k_pe [{tokens}, 1, 64] and kv_c [{tokens}, 512]")
