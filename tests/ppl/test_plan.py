"""The plan of a request, against the figures of real servers and a plain reading of the rules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppl.errors import PplError
from ppl.plan import Configuration, plan, request

H200 = Configuration(
    budget=16384, ranks=2, max_model_len=131072, max_num_seqs=256, page=16, interleave=1
)


def test_texts_of_30_to_36_thousand_tokens_never_continue() -> None:
    for tokens in (33_000, 36_000):
        made = request("t", tokens, H200)
        assert [len(s.context_chunks) for s in made.steps] == [0, 1, 1]
        assert made.continuations == 0
        assert made.merged_from == made.rows
        assert made.exposed_from == 16384
        assert made.exposed == tokens - 1 - 16384


def test_a_hundred_thousand_tokens_do() -> None:
    made = request("t", 100_000, H200)
    assert [len(s.context_chunks) for s in made.steps] == [0, 1, 1, 1, 1, 2, 2]
    assert made.steps[-1].context_chunks == (65536, 32768)
    assert made.steps[-2].context_chunks == (65536, 16384)
    assert made.merged_from == 81_920
    assert made.cuts == (16384, 32768, 49152, 65536, 81920, 98304)


def test_a_cpu_server_with_a_small_workspace() -> None:
    cpu = Configuration(budget=512, ranks=2, max_model_len=4096, workspace_rows=1024)
    made = request("t", 2000, cpu)
    assert [s.tokens for s in made.steps] == [512, 512, 512, 464]
    assert made.exposed == 1487
    assert made.rows - made.merged_from == 463


@settings(deadline=None)
@given(
    tokens=st.integers(2, 4000),
    budget=st.integers(1, 700),
    ranks=st.sampled_from([1, 2, 3, 4]),
    interleave=st.sampled_from([1, 16]),
    decode=st.integers(0, 3),
    workspace=st.one_of(st.none(), st.integers(1, 3000)),
)
def test_a_plan_adds_up(
    tokens: int, budget: int, ranks: int, interleave: int, decode: int, workspace: int | None
) -> None:
    configuration = Configuration(
        budget=budget,
        ranks=ranks,
        interleave=interleave if ranks > 1 else 1,
        max_model_len=4096,
        decode_tokens=decode,
        workspace_rows=workspace,
    )
    made = request("t", tokens, configuration)
    assert sum(s.tokens for s in made.steps) == tokens
    assert 0 <= made.exposed <= made.rows == tokens - 1
    assert made.merged_from >= made.exposed_from
    for step in made.steps:
        runs = step.context > 0 and step.tokens > decode
        assert sum(step.context_chunks) == (step.context if runs else 0)
        assert step.continuations == max(0, len(step.context_chunks) - 1)


def test_a_last_token_that_decodes_exposes_nothing() -> None:
    assert request("t", 16385, H200).exposed == 0
    assert request("t", 16386, H200).exposed == 1


def test_a_set_without_a_continuation_is_warned_about() -> None:
    assert "NO CONTINUATION" in plan({"a": 36_000}, H200).warnings[0]
    assert plan({"a": 36_000, "b": 100_000}, H200).warnings == ()


def test_texts_that_reach_nothing_are_refused() -> None:
    with pytest.raises(PplError, match=r"never reaches the path under test: a \(900 tokens\)"):
        plan({"a": 900, "b": 100_000}, H200)
    with pytest.raises(PplError, match="no texts"):
        plan({}, H200)
    with pytest.raises(PplError, match="this server takes 2 to 131,071"):
        plan({"a": 131_072}, H200)
