"""The faulty kernels of the catalogue: the clean one with a part replaced."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dsmla.faults.kernel import Insert, clean
from k3common import ds_faults, faults

padding_stored = Insert(stored=faults.every_token)
last_lost = Insert(stored=faults.all_but_last)
block_edge = Insert(place=faults.block_edge)
next_block = Insert(place=faults.next_block)
int32_offset = Insert(place=faults.int32_offset)
exact_scale = Insert(entries=ds_faults.exact_scale)
scale_rounded_down = Insert(entries=ds_faults.scale_rounded_down)
scale_one_up = Insert(entries=ds_faults.scale_one_up)
first_tile_only = Insert(entries=ds_faults.first_tile_only)
scale_inverse = Insert(entries=ds_faults.scale_inverse)
no_least = Insert(entries=ds_faults.no_least)
unconverted = Insert(entries=ds_faults.unconverted)
rope_quantised = Insert(entries=ds_faults.rope_quantised)
rope_before_scales = Insert(entries=ds_faults.rope_before_scales)
neox = Insert(turned=faults.neox)
by_index = Insert(turned=faults.by_index)
backwards = Insert(turned=faults.backwards)
q_unturned = Insert(rotates_q=False)
head_zero = Insert(heads=1)


def whole_cache(
    q: Tensor, k_nope: Tensor, k_pe: Tensor, kv_c: Tensor, kv_cache: Tensor, *rest: Any
) -> Tensor:
    """Not a fault: the cache is copied, changed and put back."""
    copy = kv_cache.clone()
    made = clean(q, k_nope, k_pe, kv_c, copy, *rest)
    kv_cache.copy_(copy)
    return made
