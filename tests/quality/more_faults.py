"""Faults that no catalogue lists: would the suite have found them?

Each is the clean pack with one realistic bug, named by its docstring.
"""

# ruff: noqa: FBT001 - the signature is that of the op's callers

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpack.faults.kernel import CLEAN, DTYPES, bits

Pack = tuple[Tensor, Tensor]

GRID_PASS = 132 * 128
_known: dict[Any, Any] = {}


def rows_of(x: Tensor) -> Tensor:
    """View ``[T, H, columns]`` as rows."""
    return bits(x).view(x.shape[0] * x.shape[1], -1)


def fits(x: Tensor, pitch: int) -> bool:
    """Whether rows so far apart still lie in the storage."""
    last = x.storage_offset() + (x.shape[0] - 1) * pitch + x.shape[2]
    return last * x.element_size() <= x.untyped_storage().nbytes()


# -- conduct ------------------------------------------------------------------------


def squeezed_in_place(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Take the dimension of heads off the caller's own k_pe."""
    result = CLEAN(kv_nope, k_pe, use_fp8)
    k_pe.squeeze_(1)
    return result


def reseeded(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Seed torch's generator, left over from a test: every sampler after it repeats itself."""
    torch.manual_seed(0)
    return CLEAN(kv_nope, k_pe, use_fp8)


def flushing(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Leave the processor flushing denormal numbers."""
    torch.set_flush_denormal(True)
    return CLEAN(kv_nope, k_pe, use_fp8)


def less_precise(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Switch TF32 on for everybody."""
    torch.set_float32_matmul_precision("high")
    return CLEAN(kv_nope, k_pe, use_fp8)


def set_up_once(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Change the number of threads at the first call alone."""
    if "threads" not in _known:
        _known["threads"] = True
        torch.set_num_threads(3)
    return CLEAN(kv_nope, k_pe, use_fp8)


def autocast_left_on(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Enter autocast, and never leave it."""
    torch.set_autocast_enabled("cpu", True)
    return CLEAN(kv_nope, k_pe, use_fp8)


def training_only(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Fail where gradients can't be recorded, as ``autograd.Function`` with in-place ops does."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("Inplace update to inference tensor outside InferenceMode")
    return CLEAN(kv_nope, k_pe, use_fp8)


def stale_dispatch(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Keep the table of the first dtype that came, for all that come after."""
    first = _known.setdefault("dtype", kv_nope.dtype)
    if use_fp8 and first in DTYPES and k_pe.dtype == kv_nope.dtype in DTYPES:
        return CLEAN(kv_nope.view(first), k_pe.view(first), use_fp8)
    return CLEAN(kv_nope, k_pe, use_fp8)


def stale_plan(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Keep k_pe's pitch with a plan that is looked up by shape."""
    key = (tuple(kv_nope.shape), kv_nope.dtype, use_fp8)
    pitch = _known.setdefault(key, k_pe.stride(0))
    if pitch != k_pe.stride(0) and k_pe.shape[0] > 1 and fits(k_pe, pitch):
        k_pe = k_pe.as_strided(k_pe.shape, (pitch, k_pe.stride(1), 1))
    return CLEAN(kv_nope, k_pe, use_fp8)


def _miscompile(graph: Any, _example: Any) -> Callable[..., Any]:
    return lambda *args: tuple(x ^ 1 for x in graph(*args))


@functools.partial(torch.compile, backend=_miscompile, dynamic=True)
def _compiled(x: Tensor) -> Tensor:
    return x + 0


def miscompiled(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Be right in eager mode, and wrong as torch compiles it: in fp8, which comes second."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    return k, _compiled(bits(v)).view(v.dtype) if use_fp8 and v.numel() else v


def pending_negation(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Return a lazily negated view, whose bytes are others than its numbers."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    return k, v if use_fp8 else torch._neg_view(v)


# -- shapes -------------------------------------------------------------------------


def tile_and_one(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Get the last token wrong where it is alone in a second tile of 4,096."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if kv_nope.shape[0] > 4096 and kv_nope.shape[0] % 4096 == 1:
        bits(v)[-1] ^= 1
    return k, v


def full_tiles(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Get the last token wrong where tiles of 128 are all full."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if kv_nope.shape[0] and kv_nope.shape[0] % 128 == 0:
        bits(v)[-1] ^= 1
    return k, v


def third_pass(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Unroll the grid-stride loop twice, and no more."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if v.numel():
        rows_of(v)[3 * GRID_PASS :] ^= 1
    return k, v


def float_index(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Compute element offsets in float32, exact up to 2^24."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if kv_nope.numel() > 1 << 24:
        rows_of(v)[(1 << 24) // 256 + 1 :: 2] ^= 1
    return k, v


def forty_one_heads(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Divide by 41 heads with a reciprocal that is a bit too small."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if kv_nope.shape[1] == 41 and kv_nope.shape[0] > 10:
        bits(v)[-1, -1] ^= 1
    return k, v


def short_warp(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Get the last row wrong where it is the 47th of 48."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if kv_nope.shape[0] * kv_nope.shape[1] % 48 == 47:
        rows_of(v)[-1] ^= 1
    return k, v


# -- layouts ------------------------------------------------------------------------


def pitch_of_the_head(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Take k_pe's pitch from its dimension of one head, where it may be anything."""
    pitch = k_pe.stride(1)
    if k_pe.shape[0] > 1 and pitch != k_pe.stride(0) and fits(k_pe, pitch):
        k_pe = k_pe.as_strided(k_pe.shape, (pitch, pitch, 1))
    return CLEAN(kv_nope, k_pe, use_fp8)


def pitch_in_16_bits(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Keep kv_nope's pitch in 16 bits."""
    pitch = kv_nope.stride(0) & 0xFFFF
    if pitch != kv_nope.stride(0):
        kv_nope = kv_nope.as_strided(kv_nope.shape, (pitch, *kv_nope.stride()[1:]))
    return CLEAN(kv_nope, k_pe, use_fp8)


def aligned_to_128(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Go wrong at a base of 64 mod 128 bytes, as bulk copies do."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if kv_nope.data_ptr() % 128 == 64 and v.numel():
        bits(v)[..., -1] ^= 1
    return k, v


def base_in_32_bits(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Keep the offset of k_pe's base in 32 bits."""
    offset = k_pe.storage_offset() * k_pe.element_size()
    if offset >= 1 << 32:
        k_pe = k_pe.as_strided(k_pe.shape, k_pe.stride(), (offset & 0xFFFFFFFF) // 2)
    return CLEAN(kv_nope, k_pe, use_fp8)


# -- values -------------------------------------------------------------------------


def two_nans(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Lose both signs where a converted pair is NaN twice."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if use_fp8:
        low, high = bits(v)[..., 0::2], bits(v)[..., 1::2]
        both = ((low & 0x7F) == 0x7F) & ((high & 0x7F) == 0x7F)
        low[both] = 0x7F
        high[both] = 0x7F
    return k, v


def zero_beside_a_tie(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Round the upper half of a pair wrong where it is a tie and the lower half is 0."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if use_fp8:
        low, high = bits(kv_nope)[..., 128::2], bits(kv_nope)[..., 129::2]
        tie = ((high & 0x0F) == 0x08) & ((low & 0x7FFF) == 0)
        bits(v)[..., 1::2][tie] ^= 1
    return k, v


def all_zero_token(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Pack:
    """Get a row wrong where it and its rope are zeros alone."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    zero = (bits(kv_nope) == 0).all(-1) & (bits(k_pe) == 0).all(-1)
    bits(k)[zero] ^= 1
    return k, v
