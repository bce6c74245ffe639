"""What the lane ``sizes`` plans for ops that write a paged cache, on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from equiv.arena import dense_pitches, span_elements
from equiv.case import Case
from equiv.domain import claim_of
from equiv.dtypes import DTYPES
from equiv.lanes import Lanes, Target
from equiv.pairs import OpPair, load_pair
from equiv.profiles import PROFILES

GPU = Target("cuda:0", multiprocessors=132, devices=2, memory_bytes=140 << 30)
PAIRS = ["k3insert", "k3quant", "k3decode", "dsmla"]


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> OpPair:
    return load_pair(request.param)


def plan(pair: OpPair, target: Target = GPU) -> tuple[list[Case], list[str]]:
    made = Lanes(pair, target, PROFILES["gate"], "stock", 0).plan("sizes")
    return [c for c in made.explicit if c.fill.kind == "tiled"], made.left_out


def input_bytes(pair: OpPair, case: Case) -> int:
    size = 0
    for o in pair.operands(dict(case.point)):
        view = dict(case.views).get(o.name)
        pitches = view.pitches if view else dense_pitches(o.shape)
        size += span_elements(o.shape, pitches) * DTYPES[o.dtype].itemsize
    return size


def output_bytes(pair: OpPair, case: Case) -> int:
    outputs = pair.outputs(dict(case.point))
    return sum(math.prod(o.shape) * DTYPES[o.dtype].itemsize for o in outputs)


def written_bytes(pair: OpPair, case: Case) -> int:
    written = [o for o in pair.operands(dict(case.point)) if o.mutable]
    return sum(math.prod(o.shape) * DTYPES[o.dtype].itemsize for o in written)


def test_each_point_has_an_output_past_2_to_the_31_elements_and_a_cache_as_large(
    pair: OpPair,
) -> None:
    cases, left_out = plan(pair)
    assert left_out == []
    met: dict[tuple[object, ...], set[str]] = {}
    for case in cases:
        point = dict(case.point)
        large = met.setdefault(tuple(point[a] for a in pair.axes), set())
        for o in pair.operands(point):
            if o.mutable and math.prod(o.shape) > 1 << 31:
                large.add(o.name)
        for made in pair.outputs(point):
            elements = math.prod(made.shape)
            if elements > 1 << 31 and elements * DTYPES[made.dtype].itemsize > 1 << 32:
                large.add("output")
    assert met
    for point_of, large in met.items():
        assert {"output", "kv_cache"} <= large, point_of


def test_all_of_them_are_cases_that_have_to_be_equal(pair: OpPair) -> None:
    assert {claim_of(pair, case).outcome for case in plan(pair)[0]} == {"equal"}


def test_none_of_them_needs_more_than_an_h200_has_beside_what_the_reference_takes(
    pair: OpPair,
) -> None:
    for case in plan(pair)[0]:
        assert input_bytes(pair, case) < 25 << 30, case
        compared = output_bytes(pair, case) + written_bytes(pair, case)
        assert 2 * input_bytes(pair, case) + 3 * compared < 80 << 30, case


def test_a_smaller_gpu_leaves_the_dense_one_of_k3quant_out_by_name() -> None:
    quant = load_pair("k3quant")
    cases, left_out = plan(quant, replace(GPU, memory_bytes=70 << 30))
    assert left_out == ["q8 past 2^32 bytes, dense (needs 73 GiB)"]
    assert len(cases) == len(plan(quant)[0]) - 1
