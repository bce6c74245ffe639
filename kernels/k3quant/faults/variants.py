"""The faulty kernels of the catalogue: the clean one with a part replaced."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from k3common import faults
from k3insert.stock import LATENT
from k3quant.faults.kernel import Quant, clean

padding_stored = Quant(stored=faults.every_token)
last_lost = Quant(stored=faults.all_but_last)
block_edge = Quant(place=faults.block_edge)
next_block = Quant(place=faults.next_block)
int32_offset = Quant(place=faults.int32_offset)
cache_by_k_scale = Quant(scales=(0, 1, 2, 1))
v_by_k_scale = Quant(scales=(0, 1, 1, 3))
times_the_scale = Quant(quantise=faults.divided)
rope_unscaled = Quant(rope=faults.unscaled)
narrow_product = Quant(quantise=faults.multiplies_narrow)
nan_saturates = Quant(quantise=faults.nan_saturates)
overflow_is_nan = Quant(quantise=faults.overflow_is_nan)
truncates = Quant(quantise=faults.truncates)
neox = Quant(turned=faults.neox)
by_index = Quant(turned=faults.by_index)
rounded_early = Quant(turned=faults.rounded_early)
q_unturned = Quant(turned_q=lambda x, positions, table: x)  # noqa: ARG005 - named as they are
rope_stale = Quant(columns=LATENT)


def whole_cache(
    q: Tensor, k_nope: Tensor, k_pe: Tensor, kv_c: Tensor, v: Tensor, kv_cache: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Not a fault: the cache is copied, changed and put back."""
    copy = kv_cache.clone()
    made = clean(q, k_nope, k_pe, kv_c, v, copy, *rest)
    kv_cache.copy_(copy)
    return made
