"""Where a token's latent goes in a rank's pages under context parallelism."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def slots_of(
    positions: Tensor,
    table: Tensor,
    page: int,
    ranks: int,
    rank: int,
    interleave: int,
    pad: int,
) -> Tensor:
    """Slots of one token each, int64; ``pad`` where another rank owns the token.

    With ``v = page * ranks``, ``o = p % v``: token ``p`` lives on rank
    ``(o // interleave) % ranks``, in block ``table[.., p // v]``, at
    ``o // (ranks * interleave) * interleave + o % interleave``. For a page that is a multiple of
    the interleave this owner is ``(p // interleave) % ranks``.

    Parameters
    ----------
    positions : int64 ``[N]``.
    table : ``[N, blocks]``, the row of each token's request.

    """
    span = page * ranks
    inside = positions % span
    owner = (inside // interleave) % ranks
    local = inside // (ranks * interleave) * interleave + inside % interleave
    block = table.to(torch.int64).gather(1, (positions // span).unsqueeze(1)).squeeze(1)
    return torch.where(owner == rank, block * page + local, pad)


def make_slot_mapping(original: Any) -> Any:
    """``cpu_triton_utils._compute_slot_mapping_kernel_impl`` for any context-parallel size.

    Must be in place before ``register_triton_kernel_overrides`` reads the name; plugins are
    loaded before that. With a size of 1 the original runs.
    """

    @functools.wraps(original)
    def compute_slot_mapping(  # noqa: PLR0913, PLR0917
        num_tokens: int,
        max_num_tokens: int,
        query_start_loc: Tensor,
        positions: Tensor,
        block_table: Tensor,
        block_table_stride: int,
        slot_mapping: Tensor,
        KV_CACHE_BLOCK_SIZE: int,  # noqa: N803
        TOTAL_CP_WORLD_SIZE: int = 1,  # noqa: N803
        TOTAL_CP_RANK: int = 0,  # noqa: N803
        CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,  # noqa: N803
        PAD_ID: int = -1,  # noqa: N803
        BLOCK_SIZE: int = 1024,  # noqa: N803
    ) -> None:
        if TOTAL_CP_WORLD_SIZE == 1:
            original(
                num_tokens,
                max_num_tokens,
                query_start_loc,
                positions,
                block_table,
                block_table_stride,
                slot_mapping,
                KV_CACHE_BLOCK_SIZE,
                BLOCK_SIZE=BLOCK_SIZE,
            )
            return
        lengths = (query_start_loc[1:] - query_start_loc[:-1]).to(torch.int64)
        request = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
        count = request.numel()
        slot_mapping[:count] = slots_of(
            positions[:count],
            block_table[request],
            KV_CACHE_BLOCK_SIZE,
            TOTAL_CP_WORLD_SIZE,
            TOTAL_CP_RANK,
            CP_KV_CACHE_INTERLEAVE_SIZE,
            PAD_ID,
        )
        slot_mapping[num_tokens:max_num_tokens] = PAD_ID

    return compute_slot_mapping
