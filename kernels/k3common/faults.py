"""Parts of working kernels in torch ops, and faulty versions of them, for the pairs' catalogues.

Slots: which tokens are stored, and where. Bytes: how a float becomes e4m3. Rotation: which columns
make a pair, and which row of the table turns them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from k3common import arithmetic
from k3common.arithmetic import E4M3_MAX
from k3insert.faults.storing import Place, all_but_last, every_token, insert, stored

Turn: TypeAlias = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
__all__ = ["Place", "all_but_last", "every_token", "insert", "stored"]
HALF = 1 << 31


def place(slot: Tensor, cache: Tensor) -> Place:
    """Return block and position of slots."""
    return slot // cache.shape[1], slot % cache.shape[1]


def block_edge(slot: Tensor, cache: Tensor) -> Place:
    """Fault: the last position of a block is taken for the one before it."""
    block, position = place(slot, cache)
    return block, position.clamp(max=cache.shape[1] - 2)


def next_block(slot: Tensor, cache: Tensor) -> Place:
    """Fault: a block ends one position early: its last entry goes to the next block's start."""
    block, position = place(slot, cache)
    late = position == cache.shape[1] - 1
    return (block + late) % cache.shape[0], torch.where(late, 0, position)


def int32_offset(slot: Tensor, cache: Tensor) -> Place:
    """Fault: byte offsets keep 31 bits. What lies past 2^31 bytes goes to an earlier block."""
    block, position = place(slot, cache)
    pitch = cache.stride(0) * cache.element_size()
    return (block * pitch) % HALF // max(pitch, 1), position


quantise = arithmetic.quantise


def nan_saturates(x: Tensor, scale_inv: Tensor) -> Tensor:
    """Fault: the clamp takes a NaN for less than -448, as C's ``fmaxf`` does."""
    y = (x.float() * scale_inv).nan_to_num(-E4M3_MAX, E4M3_MAX, -E4M3_MAX)
    return y.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def overflow_is_nan(x: Tensor, scale_inv: Tensor) -> Tensor:
    """Fault: nothing saturates; what rounds to more than 448 is a NaN."""
    y = x.float() * scale_inv
    made = quantise(x, scale_inv).view(torch.uint8)
    return made.masked_fill(y.abs() > 464, 0x7F).view(torch.float8_e4m3fn)  # noqa: PLR2004


def truncates(x: Tensor, scale_inv: Tensor) -> Tensor:
    """Fault: the fraction is cut off, not rounded."""
    y = (x.float() * scale_inv).clamp(-E4M3_MAX, E4M3_MAX)
    cut = (y.view(torch.int32) & ~0xFFFFF).view(torch.float32)
    return quantise(torch.where(y.abs() < 2**-6, y, cut), torch.ones_like(scale_inv))


def multiplies_narrow(x: Tensor, scale_inv: Tensor) -> Tensor:
    """Fault: the product with the scale is rounded to bf16 before it is converted."""
    y = (x.float() * scale_inv).bfloat16()
    return quantise(y, torch.ones_like(scale_inv))


def unscaled(x: Tensor, scale_inv: Tensor) -> Tensor:
    """Fault: the scale is forgotten."""
    return quantise(x, torch.ones_like(scale_inv))


def divided(x: Tensor, scale_inv: Tensor) -> Tensor:
    """Fault: multiplied by the scale, not by its inverse."""
    return quantise(x, scale_inv.reciprocal())


turned = arithmetic.turned


def neox(x: Tensor, positions: Tensor | None, table: Tensor | None) -> Tensor:
    """Fault: column i is paired with column i + 32, as in GPT-NeoX."""
    if positions is None or table is None:
        return x
    mixed = x.unflatten(-1, (2, 32)).transpose(-1, -2).flatten(-2)
    made = arithmetic.rotate(mixed, positions, table)
    apart: Tensor = made.unflatten(-1, (32, 2)).transpose(-1, -2)
    return apart.flatten(-2)


def by_index(x: Tensor, positions: Tensor | None, table: Tensor | None) -> Tensor:
    """Fault: a token is turned by its place in the batch, not by its position."""
    if positions is None or table is None:
        return x
    index = torch.arange(len(positions), device=positions.device) % len(table)
    return arithmetic.rotate(x, index, table)


def backwards(x: Tensor, positions: Tensor | None, table: Tensor | None) -> Tensor:
    """Fault: sines have the other sign."""
    if positions is None or table is None:
        return x
    cos, sin = table.chunk(2, dim=-1)
    return arithmetic.rotate(x, positions, torch.cat((cos, -sin), dim=-1))


def rounded_early(x: Tensor, positions: Tensor | None, table: Tensor | None) -> Tensor:
    """Fault: the rotated value is rounded to its 16-bit dtype before it is quantised."""
    return arithmetic.turned_and_narrowed(x, positions, table)
