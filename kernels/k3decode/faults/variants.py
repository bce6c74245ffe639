"""The faulty kernels of the catalogue: the clean one with a part replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3common import ds_faults, faults
from k3decode.faults.kernel import Decode, clean, entries

padding_stored = Decode(stored=faults.every_token)
last_lost = Decode(stored=faults.all_but_last)
block_edge = Decode(place=faults.block_edge)
next_block = Decode(place=faults.next_block)
int32_offset = Decode(place=faults.int32_offset)
cache_by_q_scale = Decode(scales=(0, 0))
q_by_cache_scale = Decode(scales=(3, 3))
times_the_scale = Decode(quantise=faults.divided)
nan_saturates = Decode(quantise=faults.nan_saturates)
truncates = Decode(quantise=faults.truncates)
neox = Decode(turned=faults.neox)
by_index = Decode(turned=faults.by_index)
rounded_early = Decode(turned=faults.rounded_early)
q_unturned = Decode(turned_q=lambda x, positions, table: x)  # noqa: ARG005 - named as they are
rope_first = Decode(swapped=True)
split_ends = Decode(tokens=64)


def _ds(kv_c: Tensor, rope: Tensor, kind: str) -> Tensor:
    return ds_faults.exact_scale(kv_c, rope) if kind == "ds_mla" else entries(kv_c, rope, kind)


exact_scale = Decode(entries=_ds)


def whole_cache(
    ql_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, *rest: Any
) -> Tensor:
    """Not a fault: the cache is copied, changed and put back."""
    copy = torch.clone(kv_cache)
    made = clean(ql_nope, q_pe, kv_c, k_pe, copy, *rest)
    kv_cache.copy_(copy)
    return made
