"""The plans of the lanes: what each enumerates, draws, needs and leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.errors import NoSuchExample

from equiv.arena import span_elements
from equiv.case import Case, parse
from equiv.domain import claim_of
from equiv.dtypes import DTYPES
from equiv.fills import fill
from equiv.lanes import DEFAULT_SMS, LANES, Lanes, Plan, Target, kinds_of
from equiv.modes import CPU_MODES, CUDA_MODES
from equiv.pairs import OpPair
from equiv.profiles import PROFILES

GPU = Target("cuda:0", 132, 8, 150 << 30)
MARK = DEFAULT_SMS * 128

Make = Callable[..., Lanes]


@pytest.fixture(scope="session")
def lanes(pair: OpPair) -> Make:
    def make(profile: str = "dev", target: Target | None = None, **changes: Any) -> Lanes:
        chosen = replace(PROFILES[profile], **changes)
        return Lanes(pair, target or Target("cpu"), chosen, "stock", 0)

    return make


def drawn(plan: Plan, count: int) -> list[Case]:
    met: list[Case] = []

    def never(case: Case) -> bool:
        met.append(case)
        return False

    options = settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    if plan.drawn is not None:
        with pytest.raises(NoSuchExample):
            hypothesis.find(plan.drawn, never, settings=options, random=Random(0))
    return met


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_enumerated_case_can_be_written_down_and_claims_something(
    profile: str, lane: str, lanes: Make, pair: OpPair
) -> None:
    made = lanes(profile)
    plan = made.plan(lane)
    assert plan.explicit
    assert len(set(plan.explicit)) == len(plan.explicit)
    for case in plan.explicit:
        assert (case.lane, case.device, case.candidate) == (lane, "cpu", "stock")
        assert parse(str(case)) == case
        assert claim_of(pair, case).outcome in {"equal", "refused"}


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("target", [Target("cpu"), GPU], ids=["cpu", "gpu"])
def test_a_lane_can_meet_what_it_needs(
    target: Target, lane: str, lanes: Make, pair: OpPair
) -> None:
    made = lanes("dev", target)
    plan = made.plan(lane)
    assert plan.least
    draws = drawn(plan, PROFILES["dev"].draws[lane]) if plan.drawn is not None else []
    counts: Counter[str] = Counter()
    for case in (*plan.explicit, *draws):
        counts.update(kinds_of(pair, case, made.marks))
    assert {k: (counts[k], n) for k, n in plan.least.items() if counts[k] < n} == {}


@pytest.mark.parametrize("lane", LANES)
def test_a_pair_of_another_shape_can_meet_what_it_needs(lane: str, second_pair: Any) -> None:
    pair = second_pair.PAIR
    made = Lanes(pair, Target("cpu"), PROFILES["dev"], "fused", 0)
    plan = made.plan(lane)
    draws = drawn(plan, PROFILES["dev"].draws[lane]) if plan.drawn is not None else []
    counts: Counter[str] = Counter()
    for case in (*plan.explicit, *draws):
        assert claim_of(pair, case).outcome == "equal"
        counts.update(kinds_of(pair, case, made.marks))
    assert {k: (counts[k], n) for k, n in plan.least.items() if counts[k] < n} == {}


def test_operands_offsets_are_combined_by_two(second_pair: Any) -> None:
    made = Lanes(second_pair.PAIR, Target("cpu"), PROFILES["gate"], "fused", 0)
    plan = made.plan("alignment")
    assert len(plan.explicit) < 2_000  # not every combination of four operands
    assert max(len(case.views) for case in plan.explicit) == 2


def test_kinds_tell_what_a_case_is_for(pair: OpPair, line: Callable[..., str]) -> None:
    def kinds(**changes: Any) -> set[str]:
        return set(kinds_of(pair, parse(line(**changes)), (16, MARK)))

    plain = {"dtype=bf16", "fp8=1", "pe=same", "rope=64", "mode=eager", "fill=bits"}
    assert kinds() == plain
    assert kinds(T=0) == plain | {"empty"}
    assert kinds(T=MARK, H=1) == plain
    assert kinds(T=MARK + 1, H=1) == plain | {"beyond one grid pass"}
    assert kinds(views="k_pe=576.64.1+1024") == plain | {"k_pe strided"}
    assert kinds(views="k_pe=64.64.1+16") == plain | {"k_pe offset"}
    assert kinds(views="k_pe=0.64.1+16") == plain | {"k_pe repeated", "k_pe offset"}


# -- patterns -----------------------------------------------------------------------


def test_every_pattern_goes_through_every_column(lanes: Make, pair: OpPair) -> None:
    cases = lanes("dev").plan("patterns").explicit
    inside = [c for c in cases if claim_of(pair, c).outcome == "equal"]
    assert {(c["dtype"], c["fp8"]) for c in inside} == {
        (d, f) for d in ("bf16", "fp16") for f in (0, 1)
    }
    for case in inside[:1]:
        for i, o in enumerate(pair.operands(dict(case.point))):
            bits = fill(case.fill.kind, o.shape, DTYPES[o.dtype], case.fill.seed, i)
            columns = bits.reshape(-1, o.shape[-1])
            assert columns.shape[0] == 1 << 16
            for column in range(o.shape[-1]):
                assert len(np.unique(columns[:, column])) == 1 << 16


def test_all_bytes_of_fp8_go_through_the_rope(lanes: Make, pair: OpPair) -> None:
    (case,) = {
        c
        for c in lanes("dev").plan("patterns").explicit
        if c["pe"] == "e4m3" and c["dtype"] == "bf16" and c["rope"] == 64
    }
    o = pair.operands(dict(case.point))[1]
    bits = fill(case.fill.kind, o.shape, DTYPES[o.dtype], case.fill.seed, 1)
    assert all(len(np.unique(bits[:, 0, c])) == 256 for c in range(64))


def test_a_slow_kernel_sweeps_groups_of_columns_and_says_so(lanes: Make) -> None:
    plan = lanes("dev", Target("cpu", rows_per_second=20_000.0)).plan("patterns")
    assert {c.fill.kind for c in plan.explicit} == {"sweep8"}
    assert {int(c["T"]) for c in plan.explicit} == {1 << 13}
    assert any("groups of 8 columns" in text for text in plan.left_out)


def test_more_seeds_give_other_neighbours(lanes: Make) -> None:
    seeds = Counter(c.fill.seed for c in lanes("gate").plan("patterns").explicit)
    assert set(seeds) == {0, 1}


# -- shapes -------------------------------------------------------------------------


def test_shapes_stand_on_both_sides_of_a_grid_pass(lanes: Make, pair: OpPair) -> None:
    rows = {pair.rows(dict(c.point)) for c in lanes("gate").plan("shapes").explicit}
    assert {MARK - 1, MARK, MARK + 1, MARK + 2, 15, 16, 17} <= rows


def test_shapes_stand_around_powers_of_two(lanes: Make) -> None:
    tokens = {(int(c["T"]), int(c["H"])) for c in lanes("gate").plan("shapes").explicit}
    for k in range(2, 17):
        assert {(2**k - 1, 1), (2**k, 1), (2**k + 1, 1)} <= tokens
    assert (4_097, 3) in tokens
    assert {(t, h) for t in range(1, 131) for h in (1, 3)} <= tokens


def test_a_quick_profile_says_how_many_shapes_it_leaves_out(lanes: Make, pair: OpPair) -> None:
    made = lanes("dev")
    plan = made.plan("shapes")
    (text,) = [t for t in plan.left_out if "enumerated shapes" in t]
    assert int(text.split()[0]) > 300
    beyond = [c for c in plan.explicit if pair.rows(dict(c.point)) > MARK]
    assert len(beyond) >= plan.least["beyond one grid pass"]  # without any luck of the draw


@pytest.mark.parametrize("lane", LANES)
def test_small_cases_come_first(lane: str, lanes: Make, pair: OpPair) -> None:
    rows = [pair.rows(dict(c.point)) for c in lanes("gate").plan(lane).explicit]
    assert rows == sorted(rows)


@pytest.mark.parametrize(("profile", "rows"), [("dev", 3), ("gate", 1_000)])
def test_shapes_have_every_head_count(profile: str, rows: int, lanes: Make, pair: OpPair) -> None:
    heads: dict[int, int] = {}
    for case in lanes(profile).plan("shapes").explicit:
        n = pair.rows(dict(case.point))
        heads[int(case["H"])] = max(n, heads.get(int(case["H"]), 0))
    assert set(heads) >= set(range(1, 129))
    assert min(heads[h] for h in range(1, 129)) >= rows


def test_shapes_of_production_are_run_or_left_out_by_name(lanes: Make, pair: OpPair) -> None:
    made = lanes("gate")
    plan = made.plan("shapes")
    shapes = {(int(c["T"]), int(c["H"])) for c in plan.explicit}
    absent = [
        t * h
        for t in pair.dims["T"].production
        for h in pair.dims["H"].production
        if (t, h) not in shapes
    ]
    assert min(absent) > made.max_rows
    (text,) = plan.left_out
    assert text.endswith(f"above 140,000 rows (largest {max(absent):,})")
    rows = [pair.rows(dict(c.point)) for c in plan.explicit]
    assert sum(n > made.max_rows for n in rows) == 1  # one large one all the same
    assert max(rows) <= made.largest_rows


def test_empty_shapes_come_with_every_combination_of_axes(lanes: Make, pair: OpPair) -> None:
    shapes = [c for c in lanes("dev").plan("shapes").explicit if not pair.rows(dict(c.point))]
    axes = [(d, f) for d in ("bf16", "fp16") for f in (0, 1)]
    met = {(c["dtype"], c["fp8"], c["H"]) for c in shapes if c["T"] == 0}
    assert met >= {(d, f, h) for d, f in axes for h in (1, 12)}
    assert {(c["dtype"], c["fp8"]) for c in shapes if c["H"] == 0} == set(axes)


def test_every_axis_outside_the_domain_has_a_case(lanes: Make, pair: OpPair) -> None:
    refused = [
        c for c in lanes("dev").plan("shapes").explicit if claim_of(pair, c).outcome == "refused"
    ]
    assert {c["dtype"] for c in refused} >= {"fp32"}
    assert {c["pe"] for c in refused} >= {"e4m3"}
    assert {c["rope"] for c in refused} >= {32}


def test_a_gpu_runs_every_shape_of_production_it_has_room_for(lanes: Make, pair: OpPair) -> None:
    made = lanes("gate", GPU)
    shapes = {(int(c["T"]), int(c["H"])) for c in made.plan("shapes").explicit}
    for t in pair.dims["T"].production:
        for h in pair.dims["H"].production:
            assert ((t, h) in shapes) == (t * h <= made.max_rows)
    assert made.max_rows == 800_000


def test_marks_follow_the_device(lanes: Make) -> None:
    assert lanes("dev", Target("cuda:0", 78, 1, 1 << 34)).marks == (16, 78 * 128)


# -- strides, alignment, sizes, modes -----------------------------------------------


def test_strides_have_each_layout_of_each_operand(lanes: Make, pair: OpPair) -> None:
    plan = lanes("dev").plan("strides")
    views = {(c["dtype"], c["fp8"], c.views) for c in plan.explicit}
    for dtype in ("bf16", "fp16"):
        for fp8 in (0, 1):
            own = [v for d, f, v in views if (d, f) == (dtype, fp8)]
            assert any(n == "k_pe" and v.pitches[0] == 576 for ((n, v),) in own)
            assert any(n == "kv_nope" and 0 in v.pitches for ((n, v),) in own)
    assert all(claim_of(pair, c).outcome == "equal" for c in plan.explicit)


def test_alignment_has_every_offset_mod_32_of_every_operand(lanes: Make, pair: OpPair) -> None:
    plan = lanes("dev").plan("alignment")
    for dtype in ("bf16", "fp16"):
        for fp8 in (0, 1):
            own = [c for c in plan.explicit if (c["dtype"], c["fp8"]) == (dtype, fp8)]
            for name in ("kv_nope", "k_pe"):
                offsets = {v.offset_bytes for c in own for n, v in c.views if n == name}
                assert offsets >= set(range(2, 32, 2)), (dtype, fp8, name)
    outcomes = Counter(claim_of(pair, c).outcome for c in plan.explicit)
    assert outcomes["equal"] > 20
    assert outcomes["refused"] > 100
    assert "combinations of two operands' offsets (each alone was run)" in plan.left_out


def test_gate_has_every_combination_of_two_offsets(lanes: Make) -> None:
    plan = lanes("gate").plan("alignment")
    both = {
        tuple(v.offset_bytes for _, v in c.views)
        for c in plan.explicit
        if len(c.views) == 2 and (c["dtype"], c["fp8"], c["pe"]) == ("bf16", 1, "same")
    }
    assert both == {(a, b) for a in range(2, 32, 2) for b in range(2, 32, 2)}
    assert plan.left_out == []


def test_sizes_reach_past_2_to_the_32_elements(lanes: Make, pair: OpPair) -> None:
    spans: dict[str, int] = {}
    for case in lanes("dev").plan("sizes").explicit:
        for o in pair.operands(dict(case.point)):
            view = dict(case.views).get(o.name)
            if view:
                span = span_elements(o.shape, view.pitches)
                spans[o.name] = max(spans.get(o.name, 0), span)
    assert min(spans["kv_nope"], spans["k_pe"]) > 1 << 32


def test_outputs_past_2_to_the_31_are_nightly_s_or_a_gpu_s(lanes: Make, pair: OpPair) -> None:
    def largest(made: Lanes) -> tuple[int, int]:
        most = max(
            (o for c in made.plan("sizes").explicit for o in pair.outputs(dict(c.point))),
            key=lambda o: int(np.prod(o.shape, dtype=np.int64)) * DTYPES[o.dtype].itemsize,
        )
        elements = int(np.prod(most.shape, dtype=np.int64))
        return elements, elements * DTYPES[most.dtype].itemsize

    assert largest(lanes("dev"))[0] < 1 << 20
    assert any("outputs past 2^31" in t for t in lanes("dev").plan("sizes").left_out)
    assert largest(lanes("nightly"))[0] > 1 << 31
    elements, size = largest(lanes("gate", GPU))
    assert elements > 1 << 31
    assert size > 1 << 32
    tiled = [c for c in lanes("gate", GPU).plan("sizes").explicit if c.fill.kind == "tiled"]
    overlapping = [c for c in tiled if c.views]
    assert len(overlapping) == len(tiled) - 1
    for case in overlapping:  # inputs whose rows overlap are light, so all is tokens
        assert case["H"] == 1
        k = pair.outputs(dict(case.point))[0]
        assert int(np.prod(k.shape, dtype=np.int64)) * DTYPES[k.dtype].itemsize > 1 << 32


@pytest.mark.parametrize("production", [True, False])
@pytest.mark.parametrize("target", [GPU, Target("cpu")])
def test_so_are_those_whose_columns_are_a_dimension_of_the_pair(
    target: Target, *, production: bool, second_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = second_pair.ScaleAdd()
    if not production:
        bare = {n: replace(d, production=()) for n, d in which.dims.items()}
        monkeypatch.setattr(which, "dims", bare, raising=False)
    made = Lanes(which, replace(target, memory_bytes=1 << 40), PROFILES["nightly"], "stock", 0)
    plan = made.plan("sizes")
    cases = [dict(c.point) for c in plan.explicit if c.fill.kind == "tiled"]
    assert plan.left_out == []
    for dtype in which.axes["dtype"]:
        sizes = [p["N"] * p["C"] for p in cases if p["dtype"] == dtype]
        assert max(sizes) > 1 << 31
    if target.cuda:  # the dense one, of 4 bytes an element
        assert min(p["N"] * p["C"] for p in cases) > 1 << 30


def test_what_is_written_counts_for_its_copies_as_well(second_pair: Any) -> None:
    made = Lanes(second_pair.PAIR, Target("cpu"), PROFILES["nightly"], "stock", 0)
    case = next(c for c in made.plan("sizes").explicit if c.fill.kind == "tiled")
    point = dict(case.point)
    total = point["N"] * point["C"] * 4
    # The buffer, its pristine copy, and snapshots: expected, the colour before's, this one's.
    target = Target("cpu", memory_bytes=3 * total + 5 * total)
    plan = Lanes(second_pair.PAIR, target, PROFILES["nightly"], "stock", 0).plan("sizes")
    assert any(t.startswith("out past 2^31 elements (needs") for t in plan.left_out)
    assert case not in plan.explicit


def test_a_small_gpu_leaves_what_does_not_fit_out_by_name(lanes: Make) -> None:
    plan = lanes("gate", Target("cuda:0", 132, 1, 8 << 30)).plan("sizes")
    for text in ("kv_nope by a pitch of 2^28", "k past 2^31 elements", "k past 2^32 bytes, dense"):
        assert any(f"{text} (needs" in t for t in plan.left_out), text
    assert plan.explicit == []


def test_modes_are_the_device_s(lanes: Make) -> None:
    cpu = {m for m in CPU_MODES if m != "eager"}
    plan = lanes("dev").plan("modes")
    assert {c.mode for c in plan.explicit} == cpu
    assert any(f"modes {', '.join(CUDA_MODES)} (no GPU)" in t for t in plan.left_out)
    assert set(lanes("dev", GPU).plan("modes").least) == {f"mode={m}" for m in (*cpu, *CUDA_MODES)}
    alone = lanes("dev", Target("cuda:0", 132, 1, 1 << 37)).plan("modes")
    assert "mode=second_device" not in alone.least
    assert "modes second_device (one GPU alone)" in alone.left_out


# -- slow candidates, and what the profiles promise ---------------------------------


@pytest.mark.parametrize("profile", ["dev", "gate"])
@pytest.mark.parametrize("lane", LANES)
def test_a_slow_candidate_gets_what_it_has_time_for(
    profile: str, lane: str, lanes: Make, pair: OpPair
) -> None:
    rate = 20_000.0
    plan = lanes(profile, Target("cpu", rows_per_second=rate)).plan(lane)
    rows = sum(pair.rows(dict(c.point)) for c in plan.explicit)
    assert rows <= 1.5 * rate * PROFILES[profile].lane_seconds
    assert plan.explicit
    if lane == "shapes":
        assert any(pair.rows(dict(c.point)) > MARK for c in plan.explicit)


def test_a_larger_profile_covers_no_less(lanes: Make) -> None:
    for lane in LANES:
        small, large = (lanes(p).plan(lane) for p in ("dev", "gate"))
        assert len(large.explicit) >= len(small.explicit)
        assert len(large.left_out) <= len(small.left_out)


def test_the_simplest_cases_stand_for_each_combination_of_axes(lanes: Make, pair: OpPair) -> None:
    cases = lanes("dev").simplest()
    assert [(c["dtype"], c["fp8"]) for c in cases] == [
        (d, f) for d in ("bf16", "fp16") for f in (0, 1)
    ]
    assert all(claim_of(pair, c).outcome == "equal" for c in cases)
