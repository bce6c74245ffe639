"""The pack that faults are planted in: what it refuses, and how it cuts its rows into blocks."""

from __future__ import annotations

import pytest
import torch

from kvpack.faults import kernel


@pytest.mark.parametrize(
    ("kv_nope", "k_pe"),
    [
        (torch.zeros(2, 2, 256), torch.zeros(2, 1, 64)),
        (torch.zeros(2, 2, 256).bfloat16(), torch.zeros(2, 1, 64).half()),
        (torch.zeros(2, 2, 256).bfloat16(), torch.zeros(2, 1, 32).bfloat16()),
        (torch.zeros(2, 2, 192).bfloat16(), torch.zeros(2, 1, 64).bfloat16()),
    ],
)
def test_twin_refuses_what_it_is_not_made_for(kv_nope: torch.Tensor, k_pe: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected"):
        kernel.kv_pack(kv_nope, k_pe, False)


@pytest.mark.parametrize("heads", [1, 3, 12, 128])
@pytest.mark.parametrize("limit", [1, 16, 1024])
def test_blocks_cover_each_row_once(heads: int, limit: int) -> None:
    for first, last in ((0, 5 * heads), (1, 4 * heads + 2), (heads - 1, heads), (7, 7)):
        seen: list[int] = []
        for at in kernel.blocks(first, last, heads, limit):
            token, head = divmod(at.rows.start, heads)
            width = at.heads.stop - at.heads.start
            assert (token, head) == (at.tokens.start, at.heads.start)
            assert (at.tokens.stop - token) * width == at.rows.stop - at.rows.start
            assert at.heads.stop <= heads
            seen += range(at.rows.start, at.rows.stop)
        assert seen == list(range(first, last))
