"""The plan of a request against vLLM's own builder and its own choice of a workspace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppl.errors import PplError
from ppl.plan import Configuration, request

mla = pytest.importorskip("vllm.model_executor.layers.attention.mla_attention")
torch = pytest.importorskip("torch")


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    page = draw(st.sampled_from([16, 32, 64]))
    return Configuration(
        budget=draw(st.integers(1, 900)),
        page=page,
        ranks=ranks,
        interleave=draw(st.sampled_from([1, 2, 16, page])) if ranks > 1 else 1,
        max_model_len=draw(st.integers(300, 6000)),
        max_num_seqs=draw(st.integers(1, 16)),
        workspace_rows=draw(st.one_of(st.none(), st.integers(1, 4000))),
    )


def workspace(c: Configuration) -> int:
    """Return the rows that vLLM takes, or makes of those that are forced."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=c.max_num_seqs),
        cache_config=SimpleNamespace(block_size=c.page),
        model_config=SimpleNamespace(max_model_len=c.max_model_len),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=c.ranks, cp_kv_cache_interleave_size=c.interleave
        ),
    )
    if c.workspace_rows is not None:
        return int(mla.align_mla_chunked_context_workspace_size(config, c.workspace_rows))
    builder = mla.MLACommonMetadataBuilder
    return int(builder.determine_chunked_prefill_workspace_size(config))


@settings(max_examples=150, deadline=None, database=None)
@given(configurations(), st.data())
def test_every_step_of_a_request_is_planned_as_vllm_builds_it(
    c: Configuration, data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(2, c.max_model_len - 1))
    rows = workspace(c)
    assert c.layout().workspace == rows
    try:
        made = request("t", tokens, c)
    except PplError as e:
        assert "holds no piece" in str(e)  # noqa: PT017 - refused, and for this reason only
        return
    for step in made.steps:
        if not step.context_chunks:
            assert step.context == 0 or step.tokens <= c.decode_tokens
            continue
        chunked = mla.build_mla_chunked_context_metadata(
            context_lens_cpu=torch.tensor([step.context], dtype=torch.int32),
            prefill_query_start_loc_cpu=torch.tensor([0, step.tokens], dtype=torch.int32),
            chunked_prefill_workspace=torch.empty(1),
            chunked_prefill_workspace_size=rows,
            block_size=c.page,
            align_chunk_to_block=True,
            device=torch.device("cpu"),
            dcp_world_size=c.ranks,
            dcp_local_block_size=c.interleave,
            dcp_virtual_block_size=c.interleave * c.ranks,
        )
        theirs = tuple(int(chunk.num_context_tokens) for chunk in chunked.chunks)
        assert step.context_chunks == theirs
        assert step.continuations == sum(chunk.is_continuation for chunk in chunked.chunks)
