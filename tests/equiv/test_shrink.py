"""Shrinking reaches the least case: of shapes, of layouts, and of set elements."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from equiv import shrink
from equiv.case import Case, Fill, View, parse
from equiv.domain import claim_of
from equiv.errors import UsageError
from equiv.evidence import Candidate
from equiv.lanes import LANES
from equiv.pairs import OpPair
from equiv.profiles import PROFILES, settings_of
from equiv.shrink import Deadline

Fails = Callable[[Case], bool]
Line = Callable[..., str]

OPTIONS = settings_of(PROFILES["dev"], 60)
LARGE = {"T": 900, "H": 24, "views": "kv_nope=6528.272.1+32,k_pe=576.64.1+1024", "mode": "held"}
WRONG = 0x3D9A


def counted(fails: Fails) -> tuple[Fails, list[Case]]:
    tried: list[Case] = []

    def wrapped(case: Case) -> bool:
        tried.append(case)
        return fails(case)

    return wrapped, tried


def values(pair: OpPair, case: Case) -> Mapping[str, np.ndarray[Any, Any]]:
    """Return what a kernel would see, flat."""
    claim_of(pair, case)  # as a worker does first: a smaller case may lack the element
    return {name: flat for name, (flat, _) in shrink.contents(pair, case).items()}


# -- structure ----------------------------------------------------------------------

STRUCTURES: dict[str, tuple[Fails, tuple[int, int], tuple[str, ...], str]] = {
    "always": (lambda _: True, (0, 1), (), "eager"),
    "some tokens": (lambda c: int(c["T"]) >= 37, (37, 1), (), "eager"),
    "tokens and heads": (
        lambda c: int(c["T"]) >= 37 and int(c["H"]) >= 5,
        (37, 5),
        (),
        "eager",
    ),
    "many tokens": (lambda c: int(c["T"]) > 640 and int(c["H"]) > 17, (641, 18), (), "eager"),
    "one head count": (lambda c: c["H"] == 24 and int(c["T"]) > 1, (2, 24), (), "eager"),
    "nearly everything": (
        lambda c: int(c["T"]) > 880 and c["H"] == 24 and c.mode == "held" and len(c.views) == 2,
        (881, 24),
        ("kv_nope", "k_pe"),
        "held",
    ),
    "a view": (
        lambda c: "kv_nope" in dict(c.views) and int(c["T"]) > 2,
        (3, 1),
        ("kv_nope",),
        "eager",
    ),
    "a mode": (lambda c: c.mode == "held" and int(c["T"]) > 0, (1, 1), (), "held"),
}


@pytest.mark.parametrize("what", STRUCTURES)
def test_structure_shrinks_to_the_edge(what: str, pair: OpPair, line: Line) -> None:
    fails, shape, views, mode = STRUCTURES[what]
    small = shrink.structure(pair, parse(line(**LARGE)), fails, 30, OPTIONS)
    assert fails(small)
    assert (small["T"], small["H"]) == shape
    assert (tuple(n for n, _ in small.views), small.mode) == (views, mode)


def test_a_view_shrinks_to_its_offset_where_that_is_enough(pair: OpPair, line: Line) -> None:
    def fails(case: Case) -> bool:
        view = dict(case.views).get("kv_nope")
        return view is not None and view.offset_bytes == 32 and int(case["T"]) >= 2

    small = shrink.structure(pair, parse(line(**LARGE)), fails, 30, OPTIONS)
    assert small.views == (("kv_nope", View((256, 256, 1), 32)),)


def test_a_case_that_can_t_get_smaller_stays(pair: OpPair, line: Line) -> None:
    case = parse(line(**LARGE))
    assert shrink.structure(pair, case, lambda c: c == case, 30, OPTIONS) == case


def test_time_is_kept(pair: OpPair, line: Line) -> None:
    def slow(_case: Case) -> bool:
        time.sleep(0.05)
        return True

    fails, tried = counted(slow)
    start = time.monotonic()
    shrink.structure(pair, parse(line(**LARGE)), fails, 0.2, OPTIONS)
    assert time.monotonic() - start < 5
    assert len(tried) <= 6


def test_a_deadline_asks_once_and_then_no_more(line: Line) -> None:
    case = parse(line())
    fails, tried = counted(lambda _: True)
    once = Deadline(fails, 60, tries=1)
    assert [once(case), once(case), once(case.with_(mode="held"))] == [True, True, False]
    assert tried == [case]
    late = Deadline(fails, -1)
    assert not late(case)


def test_a_smaller_case_that_claims_nonsense_is_passed_over(pair: OpPair, line: Line) -> None:
    def fails(case: Case) -> bool:
        if int(case["T"]) < 10:
            raise UsageError("no such element")
        return True

    small = shrink.structure(pair, parse(line(T=40)), fails, 30, OPTIONS)
    assert small["T"] == 10


# -- bytes --------------------------------------------------------------------------


def test_one_wrong_pattern_shrinks_to_one_element(pair: OpPair, line: Line) -> None:
    case = parse(line(T=50, H=8, fill="bits.3"))
    fails: Fails = lambda c: bool((values(pair, c)["kv_nope"] == WRONG).any())  # noqa: E731
    case = case.with_(overrides=(("kv_nope", 256 * 200 + 130, WRONG),))
    fails, tried = counted(fails)
    small = shrink.bytes_(pair, case, fails, 60, ("v", (25, 0, 2)))
    assert small.fill == Fill("zero", 0)
    assert small.overrides == (("kv_nope", 130, WRONG),)
    assert (small["T"], small["H"]) == (1, 1)
    assert len(tried) < 80


def test_an_element_gets_as_plain_as_it_still_fails(pair: OpPair, line: Line) -> None:
    def fails(case: Case) -> bool:
        return bool((values(pair, case)["kv_nope"] & 0x0041 == 0x0041).any())

    case = parse(line(T=2, H=2, fill="bits.3"))
    at = int(np.flatnonzero(values(pair, case)["kv_nope"] & 0x0041 == 0x0041)[0])
    index = tuple(int(i) for i in np.unravel_index(at, (2, 2, 256)))
    output = ("k", index) if index[2] < 128 else ("v", (*index[:2], index[2] - 128))
    small = shrink.bytes_(pair, case, fails, 60, output)
    ((name, element, bits),) = small.overrides
    assert (name, element, bits) == ("kv_nope", index[2], 0x0041)


def test_one_point_zero_is_plainest(pair: OpPair, line: Line) -> None:
    fails: Fails = lambda c: bool(values(pair, c)["k_pe"].any())  # noqa: E731
    small = shrink.bytes_(pair, parse(line(T=2)), fails, 60, ("k", (1, 0, 140)))
    assert small.overrides == (("k_pe", 12, 0x3F80),)


def test_two_elements_that_fail_together_stay_two(pair: OpPair, line: Line) -> None:
    def fails(case: Case) -> bool:
        flat = values(pair, case)["kv_nope"]
        return bool(flat[3] and flat[300])

    case = parse(line(T=2, H=1, fill="one.0"))
    small = shrink.bytes_(pair, case, fails, 60, ("k", (0, 0, 3)))
    assert {(n, i) for n, i, _ in small.overrides} == {("kv_nope", 3), ("kv_nope", 300)}


def test_what_fails_on_zeros_needs_no_element(pair: OpPair, line: Line) -> None:
    small = shrink.bytes_(pair, parse(line(T=2, fill="near.9")), lambda _: True, 60, None)
    assert (small.fill, small.overrides) == (Fill("zero", 0), ())


def test_what_needs_its_fill_keeps_it(pair: OpPair, line: Line) -> None:
    case = parse(line(T=2, fill="near.9"))
    assert shrink.bytes_(pair, case, lambda c: c.fill.kind == "near", 60, None) == case


def test_an_operand_that_repeats_is_seen_as_the_kernel_sees_it(pair: OpPair, line: Line) -> None:
    case = parse(line(T=3, views="k_pe=0.64.1+0", set="k_pe.5:1234"))
    flat = values(pair, case)["k_pe"].reshape(3, 64)
    assert (flat[0] == flat[1]).sum() >= 63
    assert flat[0][5] == 0x1234


@pytest.mark.parametrize("lane", LANES)
def test_cases_are_ordered_by_size(lane: str, pair: OpPair, line: Line) -> None:
    small, large = parse(line(lane=lane)), parse(line(lane=lane, **LARGE))
    assert shrink.weight(pair, small) < shrink.weight(pair, large)
    assert shrink.weight(pair, small) < shrink.weight(pair, small.with_(mode="held"))
    assert shrink.weight(pair, parse(line(T=6, H=1))) > shrink.weight(pair, parse(line(T=3, H=2)))


def test_the_largest_cases_keep_their_bytes(pair: OpPair, line: Line) -> None:
    assert shrink.affordable(pair, parse(line()))
    assert not shrink.affordable(pair, parse(line(T=8_400_000, H=1)))


# -- through a campaign -------------------------------------------------------------


def finding(made: Candidate) -> tuple[Case, int | None]:
    (found,) = [f for x in made.lanes for f in x.findings]
    case = parse(found.case)
    assert found.repro == f"bytegate equiv repro {found.case}"
    return case, found.set_elements


@pytest.mark.parametrize("drawn_only", [False, True], ids=["enumerated", "drawn"])
def test_a_fault_from_some_size_on_is_found_at_its_edge(
    drawn_only: bool,  # noqa: FBT001 - a parameter
    campaign: Callable[..., Candidate],
    bad: Callable[[str], str],
) -> None:
    made = campaign(
        bad("from_37_and_5"), "shapes", shrink=True, first_finding_only=True, drawn_only=drawn_only
    )
    case, elements = finding(made)
    assert (case["T"], case["H"]) == (37, 5)
    assert (case.views, case.mode, elements) == ((), "eager", 0)


def test_a_fault_of_one_pattern_is_found_as_one_element(
    campaign: Callable[..., Candidate], bad: Callable[[str], str]
) -> None:
    made = campaign(bad("one_pattern"), "patterns", shrink=True, first_finding_only=True)
    case, elements = finding(made)
    assert (case["T"], case["H"], case["fp8"]) == (1, 1, 1)
    ((name, index, bits),) = case.overrides
    assert (name, bits, elements) == ("kv_nope", WRONG, 1)
    assert 128 <= index < 256


@pytest.mark.parametrize("drawn_only", [False, True], ids=["enumerated", "drawn"])
def test_a_fault_of_a_layout_is_found_with_that_layout_alone(
    drawn_only: bool,  # noqa: FBT001 - a parameter
    campaign: Callable[..., Candidate],
    bad: Callable[[str], str],
) -> None:
    made = campaign(
        bad("strided_only"), "strides", shrink=True, first_finding_only=True, drawn_only=drawn_only
    )
    case, elements = finding(made)
    assert (case["T"], case["H"], elements) == (2, 1, 0)
    assert [n for n, _ in case.views] == ["kv_nope"]


def test_a_fault_doesn_t_shrink_into_another(
    campaign: Callable[..., Candidate], bad: Callable[[str], str]
) -> None:
    (lane,) = campaign(bad("two_faults"), "shapes", shrink=True, drawn_only=True).lanes
    smallest = {f.kind: parse(f.case) for f in lane.findings}
    assert set(smallest) == {"raised", "divergence"}
    assert (smallest["divergence"]["T"], smallest["raised"]["T"]) == (37, 1)


def test_a_finding_that_isn_t_shrunk_is_told_as_it_was_met(
    campaign: Callable[..., Candidate], bad: Callable[[str], str]
) -> None:
    made = campaign(bad("from_37_and_5"), "shapes", first_finding_only=True)
    (found,) = [f for x in made.lanes for f in x.findings]
    assert found.case == found.found
    assert found.set_elements is None
    assert replace(found, case="").found
