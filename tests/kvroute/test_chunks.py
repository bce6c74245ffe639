"""The planner's integers against vLLM's own planner, builder and workspace rule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.chunks import Layout, Piece, plan, predict, steps, workspace_rows


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    page = draw(st.sampled_from([16, 32, 64]))
    interleave = draw(st.sampled_from([1, 2, 16, page])) if ranks > 1 else 1
    base = Layout(page, ranks, interleave, 1)
    return Layout(page, ranks, interleave, base.split * draw(st.integers(1, 5)))


@settings(max_examples=300, deadline=None, database=None)
@given(layouts(), st.lists(st.integers(0, 3000), min_size=1, max_size=6))
def test_the_plan_is_vllms(layout: Layout, contexts: list[int]) -> None:
    mla = pytest.importorskip("vllm.model_executor.layers.attention.mla_attention")
    torch = pytest.importorskip("torch")
    if not any(contexts):
        assert plan(contexts, layout) == []
        return
    chunked = mla.build_mla_chunked_context_metadata(
        context_lens_cpu=torch.tensor(contexts, dtype=torch.int32),
        prefill_query_start_loc_cpu=torch.arange(len(contexts) + 1, dtype=torch.int32),
        chunked_prefill_workspace=torch.empty(1),
        chunked_prefill_workspace_size=layout.workspace,
        block_size=layout.page,
        align_chunk_to_block=True,
        device=torch.device("cpu"),
        dcp_world_size=layout.ranks,
        dcp_local_block_size=layout.interleave,
        dcp_virtual_block_size=layout.interleave * layout.ranks,
    )
    ours = plan(contexts, layout)
    assert [[p.length for p in chunk] for chunk in ours] == [
        c.seq_lens.tolist() for c in chunked.chunks
    ]
    assert [chunk[0].request for chunk in ours] == [c.request_slice.start for c in chunked.chunks]
    assert [chunk[0].start > 0 for chunk in ours] == [c.is_continuation for c in chunked.chunks]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("length", "seqs"), [(2048, 8), (9216, 256), (131072, 1024), (100, 1)])
def test_the_workspace_is_vllms(ranks: int, length: int, seqs: int) -> None:
    mla = pytest.importorskip("vllm.model_executor.layers.attention.mla_attention")
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=seqs),
        cache_config=SimpleNamespace(block_size=16),
        model_config=SimpleNamespace(max_model_len=length),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=ranks,
            cp_kv_cache_interleave_size=16,
        ),
    )
    ours = workspace_rows(
        page=16,
        ranks=ranks,
        interleave=16,
        max_model_len=length,
        max_num_seqs=seqs,
    )
    assert ours == mla.MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(config)


def test_a_long_context_continues_where_it_was_cut() -> None:
    layout = Layout(page=16, ranks=2, interleave=1, workspace=96)
    assert plan([200, 0, 5], layout) == [
        [Piece(0, 0, 96)],
        [Piece(0, 96, 96)],
        [Piece(0, 192, 8)],
        [Piece(2, 0, 5)],
    ]


def test_the_design_figures() -> None:
    """30,000 to 36,000 tokens at B = 16,384 never continue; 100,000 end with two chunks."""
    layout = Layout(
        64,
        2,
        1,
        workspace_rows(page=64, ranks=2, interleave=1, max_model_len=131072, max_num_seqs=256),
    )
    assert layout.workspace == 65536
    for tokens in (30_000, 34_000, 36_000):
        counts = [len(plan([context], layout)) for context, _ in steps(tokens, 16_384)]
        assert counts == [0, 1, 1][: len(counts)]
        assert predict(tokens, 16_384, layout, 1).first_merged is None
    assert [len(plan([c], layout)) for c, _ in steps(100_000, 16_384)] == [0, 1, 1, 1, 1, 2, 2]
    assert predict(100_000, 16_384, layout, 4).first_merged == 81_920


def test_a_tail_that_decodes_does_not_count() -> None:
    layout = Layout(16, 2, 1, 1024)
    assert predict(1025, 512, layout, 2).calls == 2
    assert predict(1026, 512, layout, 2).calls == 4


def test_a_workspace_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no piece"):
        plan([5], Layout(16, 2, 16, 16))
