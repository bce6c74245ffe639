"""Cases as one line, and what can't be a case."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from equiv.errors import UsageError
from equiv.loop import lanes, shrink
from equiv.loop.case import LoopCase, check, parse

BASE = LoopCase("ragged", 2, 0, 1, 16, 1, 32, ((1, 1),))
GOOD = str(BASE)


@pytest.mark.parametrize("lane", ["ragged", "fp8", "real", "strides"])
def test_what_is_drawn_can_be_and_reads_back(lane: str) -> None:
    plan = lanes.plan(lane, BASE, dims="small")
    assert plan.drawn is not None

    @settings(max_examples=60, deadline=None, database=None)
    @given(plan.drawn)
    def reads_back(case: LoopCase) -> None:
        check(case)
        assert parse(str(case)) == case
        assert not set(str(case)) & set(" '\"$&|;<>*?()[]{}\\!#~`\n")

    reads_back()


def test_what_is_enumerated_can_be() -> None:
    cases = lanes.plan("edges", BASE, dims="small").explicit
    for case in cases:
        check(case)
    assert len(set(cases)) == len(cases)
    assert {case.ranks for case in cases} == set(lanes.RANKS)


def test_the_edges_are_the_catalogues() -> None:
    case = BASE.with_(ranks=3, interleave=16, page=64, workspace=192)
    wanted = {0, 1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 191, 192, 193, 480}
    assert wanted <= set(lanes.edges(case))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "7 fields"),
        ("loop/fused/cpu/ragged", "7 fields"),
        (GOOD.replace("loop/", "kvpack/", 1), "7 fields"),
        (GOOD.replace("D=2", "D=two"), "invalid literal"),
        (GOOD.replace("D=2", "X=2"), "fields D, rank"),
        (GOOD.replace("D=2", "D=1"), "D must be above 1"),
        (GOOD.replace("D=2", "D=65"), "more than 64 ranks"),
        (GOOD.replace("D=2", "D=2,D=2"), "each once"),
        (GOOD.replace("page=16", "page=0"), "page must be positive"),
        (GOOD.replace("H=1", "H=100000000"), "more than 256 heads"),
        (GOOD.replace("kscale=1", "kscale=inf"), "k_scale inf"),
        (GOOD.replace("kscale=1", "kscale=1e-300"), "k_scale 1e-300"),
        (GOOD.replace("/ragged/", "/nonsense/"), "the lane must be one of"),
        (GOOD.replace("/1+1/0", "/1+1/-1"), "the seed must not be negative"),
        (GOOD.replace("/1+1/", "/99999999999+1/"), "query tokens"),
        (GOOD.replace("rank=0", "rank=2"), "rank must lie"),
        (GOOD.replace("I=1", "I=5"), "I must divide page"),
        (GOOD.replace("I=1", "I=0"), "I must divide page"),
        (GOOD.replace("ws=32", "ws=33"), "must divide ws"),
        (GOOD.replace("/1+1/", "/1-1/"), "query\\+context"),
        (GOOD.replace("/1+1/", "/1+0/"), "would not run"),
        (GOOD.replace("/1+1/", "/0+4/"), "needs query tokens"),
        (GOOD.replace("/1+1/", "/1+99999999/"), "more than"),
        (GOOD.replace("dtype=fp32", "dtype=fp64"), "expected one of"),
        (GOOD.replace("kscale=1", "kscale=-1"), "expected a number from"),
        (GOOD.replace("fp8=0", "fp8=1"), "16-bit model"),
    ],
)
def test_a_line_that_is_no_case_is_refused_in_one_line(line: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse(line)
    assert "\n" not in str(caught.value)


def test_shrinking_finds_the_smallest_case_of_a_known_fault() -> None:
    def fails(case: LoopCase) -> bool:
        return case.ranks >= 3 and any(context > 40 for context in case.contexts)

    start = BASE.with_(
        ranks=8,
        rank=5,
        heads=12,
        interleave=16,
        page=64,
        workspace=1024,
        dtype="bf16",
        requests=((7, 0), (3, 900), (2, 55)),
        seed=99,
    )
    small = shrink.smallest(start, fails, 10.0)
    assert fails(small)
    assert small.requests == ((1, 41),)
    assert (small.ranks, small.heads, small.page, small.seed) == (3, 1, 16, 0)


def test_shrinking_stays_where_the_pack_is_claimed_to_work() -> None:
    case = BASE.with_(dims="real", dtype="fp16", heads=12, requests=((3, 40), (1, 0)))
    kept = shrink.smallest(case, lambda _: True, 5.0, any_dims=False)
    assert (kept.dims, kept.dtype, kept.heads) == ("real", "fp16", 1)
    assert shrink.smallest(case, lambda _: True, 5.0).dims == "small"
