"""Where tokens go under context parallelism, against the rule spelled out one token at a time."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvroute.cpu.combine import make_correct_attn_out  # noqa: E402
from kvroute.cpu.decode import decode_with_lse  # noqa: E402
from kvroute.cpu.gather import rows_of  # noqa: E402
from kvroute.cpu.slots import make_slot_mapping, slots_of  # noqa: E402

PAD = -1


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("page", "interleave"), [(16, 1), (16, 16), (16, 4), (64, 16)])
def test_every_token_has_one_owner_and_a_slot_of_its_own(
    ranks: int, page: int, interleave: int
) -> None:
    tokens = 3 * page * ranks + 5
    blocks = torch.randperm(9)[None, :].expand(tokens, -1)
    positions = torch.arange(tokens)
    slots = torch.stack(
        [slots_of(positions, blocks, page, ranks, rank, interleave, PAD) for rank in range(ranks)],
    )
    for token in range(tokens):
        owner = token // interleave % ranks
        local = token // (interleave * ranks) * interleave + token % interleave
        expected = int(blocks[0, local // page]) * page + local % page
        assert slots[:, token].tolist() == [expected if r == owner else PAD for r in range(ranks)]


def test_the_kernels_stand_in_pads_what_no_token_has() -> None:
    mapping = torch.full((10,), 99, dtype=torch.int64)
    make_slot_mapping(None)(
        5,
        10,
        torch.tensor([0, 2, 5], dtype=torch.int32),
        torch.tensor([0, 1, 30, 31, 32]),
        torch.tensor([[4, 0], [7, 2]], dtype=torch.int32),
        2,
        mapping,
        16,
        TOTAL_CP_WORLD_SIZE=2,
        TOTAL_CP_RANK=0,
        CP_KV_CACHE_INTERLEAVE_SIZE=1,
        PAD_ID=PAD,
    )
    assert mapping.tolist() == [64, PAD, 7 * 16 + 15, PAD, 2 * 16, PAD, PAD, PAD, PAD, PAD]


def test_a_gather_may_start_inside_a_page() -> None:
    table = torch.tensor([[5, 1], [3, 8]], dtype=torch.int32)
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    rows = rows_of(table, cu, torch.tensor([14, 0], dtype=torch.int32), 16)
    assert rows.tolist() == [5 * 16 + 14, 5 * 16 + 15, 1 * 16, 3 * 16, 3 * 16 + 1]


def test_ranks_decodes_combine_to_attention_over_everything() -> None:
    torch.manual_seed(0)
    heads, rank, rope, page, ranks, length = 3, 8, 4, 4, 2, 11
    rows = torch.randn(length, rank + rope)
    query = torch.randn(1, heads, rank + rope)
    scale = 0.3
    parts = []
    for which in range(ranks):
        mine = rows[which::ranks]
        cache = torch.full((4, page, rank + rope), float("nan"))
        cache.view(-1, rank + rope)[page : page + len(mine)] = mine
        table = torch.tensor([[1, 2]], dtype=torch.int32)
        lengths = torch.tensor([len(mine)])
        parts.append(decode_with_lse(query, cache, table, lengths, scale=scale, rank=rank))
    lses = torch.stack([lse for _, lse in parts])
    correct = make_correct_attn_out(None)
    total = sum(correct(out.clone(), lses, which, None)[0] for which, (out, _) in enumerate(parts))
    scores = query[0] @ rows.T * scale
    torch.testing.assert_close(total[0], torch.softmax(scores, -1) @ rows[:, :rank])
    _, lse = correct(parts[0][0].clone(), lses, 0, None)
    torch.testing.assert_close(lse[0], torch.logsumexp(scores, -1))


def test_a_rank_without_rows_has_no_weight() -> None:
    empty = torch.tensor([0])
    table = torch.zeros(1, 1, dtype=torch.int32)
    out, lse = decode_with_lse(
        torch.ones(1, 2, 6), torch.full((1, 4, 6), float("nan")), table, empty, scale=1.0, rank=4
    )
    assert out.eq(0).all()
    assert lse.eq(float("-inf")).all()
    lses = torch.stack((lse, torch.zeros(1, 2)))
    corrected, _ = make_correct_attn_out(None)(torch.full((1, 2, 4), float("nan")), lses, 0, None)
    assert corrected.eq(0).all()
