"""Look-up tables of the fp8 conversion: the right one, and those that planted faults use.

Every table is the oracle's integer model with at most one change. What is right for overflow and
for the sign of a NaN is what torch's own cast does in the version and on the device at hand
(torch 2.11 gives NaN, 2.13 saturates on a CPU), found once by casting a few values.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from kvpack import oracle
from kvpack.classes import class_table
from kvpack.oracle import E4M3_MAX, E4M3_NAN, Bytes, Overflow, scale

SIGN = 0x80
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PATTERNS = np.arange(1 << 16, dtype=np.uint16)


@cache
def cast_habits(dtype: str, device_type: str) -> tuple[Overflow, int, int]:
    """Return what torch's cast makes of overflow, of a positive and of a negative NaN."""
    values = torch.tensor([1e4, float("nan")], dtype=TORCH_DTYPES[dtype])
    quiet_nan = int(values[1:].view(torch.int16).item()) & 0x7FFF
    patterns = torch.tensor([0, quiet_nan, quiet_nan - 0x8000], dtype=torch.int16)
    patterns[0] = values[0].view(torch.int16)
    there = patterns.view(TORCH_DTYPES[dtype]).to(device_type)
    big, positive, negative = there.to(torch.float8_e4m3fn).view(torch.uint8).cpu().tolist()
    return "nan" if big == E4M3_NAN else "saturate", positive, negative


@cache
def right_bytes(dtype: str, device_type: str) -> Bytes:
    """Return the stock cast's table, uint8 ``[65536]``, from the integer model."""
    overflow, positive, negative = cast_habits(dtype, device_type)
    table = oracle.e4m3_table(dtype, overflow=overflow).copy()
    table[class_table("positive_nan", dtype)] = positive
    table[class_table("negative_nan", dtype)] = negative
    return table


def on_device(table: Bytes, device: torch.device) -> Tensor:
    """Copy a table to a device."""
    return torch.from_numpy(table.copy()).to(device)


@cache
def right(dtype: str, device: torch.device) -> Tensor:
    """Return the stock cast's table on a device."""
    return on_device(right_bytes(dtype, device.type), device)


def value(bytes_: Bytes) -> Bytes:
    """Return the bytes without their sign."""
    magnitude: Bytes = bytes_ & np.uint8(SIGN - 1)
    return magnitude


@cache
def truncating(dtype: str, device: torch.device) -> Tensor:
    """Round towards zero instead of to nearest even."""
    table = right_bytes(dtype, device.type).copy()
    parts = scale(PATTERNS, dtype)
    odd = parts.kept & 1 == 1
    up = (parts.dropped > parts.half) | ((parts.dropped == parts.half) & odd)
    table[up & class_table("finite_rounded", dtype)] -= 1
    return on_device(table, device)


@cache
def ties_away(dtype: str, device: torch.device) -> Tensor:
    """Round ties away from zero instead of to even; 464, the last tie, then overflows."""
    overflow, _, _ = cast_habits(dtype, device.type)
    table = right_bytes(dtype, device.type).copy()
    largest = E4M3_NAN if overflow == "nan" else E4M3_MAX
    down = class_table("tie", dtype) & (scale(PATTERNS, dtype).kept & 1 == 0)
    table[down & (value(table) < largest)] += 1
    return on_device(table, device)


@cache
def other_overflow(dtype: str, device: torch.device) -> Tensor:
    """Give NaN where the stock cast saturates, and saturate where it gives NaN."""
    overflow, _, _ = cast_habits(dtype, device.type)
    table = right_bytes(dtype, device.type).copy()
    where = class_table("overflow", dtype)
    other = E4M3_MAX if overflow == "nan" else E4M3_NAN
    table[where] = (table[where] & SIGN) | other
    return on_device(table, device)


@cache
def nan_to_max(dtype: str, device: torch.device) -> Tensor:
    """Give 448 for NaN, as ``fmaxf(fminf(x, 448), -448)`` does, whatever its sign."""
    table = right_bytes(dtype, device.type).copy()
    table[class_table("nan", dtype)] = E4M3_MAX
    return on_device(table, device)


@cache
def unsigned_zero(dtype: str, device: torch.device) -> Tensor:
    """Give +0 for -0 itself, as ``x + 0.0f`` before the conversion does."""
    table = right_bytes(dtype, device.type).copy()
    table[class_table("negative_zero", dtype)] = 0
    return on_device(table, device)


@cache
def always_bf16(dtype: str, device: torch.device) -> Tensor:
    """Read every operand as bf16."""
    del dtype
    return right("bf16", device)


FNUZ_NAN = 0x80
"""e4m3fnuz: bias 8, no -0 and one NaN; ``7F`` is a number, 240, the largest."""
FNUZ_OVERFLOW = 248
"""Halfway between 240 and the 256 that would be next; it ties to that."""


@cache
def fnuz(dtype: str, device: torch.device) -> Tensor:
    """Convert to e4m3fnuz: a byte means half of what it means in e4m3fn, so encode twice the value.

    Overflow becomes 240 or NaN, as the stock cast saturates or doesn't.
    """
    overflow, _, _ = cast_habits(dtype, device.type)
    if dtype == "bf16":
        values = (PATTERNS.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = PATTERNS.view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        doubled = values * np.float32(2)
    table = oracle.encode_e4m3(doubled.view(np.uint32), "fp32", overflow="nan")
    table[table == SIGN] = 0
    no_number = np.isnan(values)
    if overflow == "nan":
        no_number |= np.abs(values) >= FNUZ_OVERFLOW
    table[no_number] = FNUZ_NAN
    return on_device(table, device)


@cache
def flushing(dtype: str, device: torch.device) -> Tensor:
    """Flush results that are subnormal to a zero of their sign."""
    table = right_bytes(dtype, device.type).copy()
    where = class_table("subnormal_result", dtype)
    table[where] &= SIGN
    return on_device(table, device)


ONE_PATTERN = 0x3C7F
"""The pattern that ``one_wrong`` gets wrong: 0.01556 in bf16, 1.124 in fp16."""


@cache
def one_wrong(dtype: str, device: torch.device) -> Tensor:
    """Flip the last bit of one pattern's byte."""
    table = right_bytes(dtype, device.type).copy()
    table[ONE_PATTERN] ^= 1
    return on_device(table, device)


@cache
def through_bf16(dtype: str, device: torch.device) -> Tensor:
    """Round to bf16 first, then to e4m3; bf16 itself is right."""
    patterns = torch.from_numpy(PATTERNS.view(np.int16).copy()).view(TORCH_DTYPES[dtype])
    narrowed = patterns.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    table: Bytes = right_bytes("bf16", device.type)[narrowed]
    if dtype == "fp16":
        nan = class_table("nan", dtype)
        table[nan] = right_bytes(dtype, device.type)[nan]
    return on_device(table, device)
