"""What a case claims, and that a case which claims nonsense is bad usage in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from equiv.case import Case, Fill, View, parse
from equiv.domain import claim_of
from equiv.errors import ExitCode, UsageError
from equiv.pairs import OpPair

Line = Callable[..., str]


def test_a_claim_holds_the_point_and_the_operands(pair: OpPair, line: Line) -> None:
    claim = claim_of(pair, parse(line(T=7)))
    assert claim.point == {"T": 7, "H": 2, "dtype": "bf16", "fp8": 1, "pe": "same", "rope": 64}
    assert [o.name for o in claim.operands] == ["kv_nope", "k_pe"]
    assert (claim.aligned, claim.outcome) == (True, "equal")


@pytest.mark.parametrize(
    ("changes", "aligned", "outcome"),
    [
        ({}, True, "equal"),
        ({"dtype": "fp32", "fp8": 0}, True, "refused"),
        ({"pe": "e4m3"}, True, "refused"),
        ({"rope": 32}, True, "refused"),
        ({"H": 0}, True, "refused"),
        ({"T": 0}, True, "equal"),
        ({"views": "kv_nope=512.256.1+16"}, True, "equal"),
        ({"views": "kv_nope=512.256.1+8"}, False, "refused"),
        ({"views": "kv_nope=513.256.1+0"}, False, "refused"),
        ({"views": "k_pe=576.64.1+1024"}, True, "equal"),
    ],
)
def test_each_cell_has_a_declared_outcome(
    changes: dict[str, Any], *, aligned: bool, outcome: str, pair: OpPair, line: Line
) -> None:
    claim = claim_of(pair, parse(line(**changes)))
    assert (claim.aligned, claim.outcome) == (aligned, outcome)


NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "an axis's value": ({"dtype": "bf8"}, "dtype is 'bf8', expected one of bf16, fp16, fp32"),
    "an axis's type": ({"fp8": "yes"}, "fp8 is 'yes', expected one of 0, 1"),
    "a dimension": ({"T": "many"}, "T is 'many', expected an integer from 0 up"),
    "a combination": ({"pe": "e4m3", "fp8": 0}, "no such combination of axes"),
    "another axis": ({"fp4": 1}, "the point has T, H, dtype, fp8, pe, rope, fp4; pair kvpack"),
    "a mode": ({"mode": "backwards"}, "mode 'backwards' is unknown; known: eager, "),
    "a mode of a GPU": ({"mode": "graph"}, "mode 'graph' needs a GPU"),
    "a lane": ({"lane": "fast"}, "unknown lane 'fast'; known: patterns, "),
    "a fill": ({"fill": "ones.0"}, "unknown fill 'ones'; known: zero, one, "),
    "an operand": ({"views": "q=1.1.1+0"}, "view of 'q' doesn't fit; operands are kv_nope[3, 2"),
    "a rank": ({"views": "k_pe=64.1+0"}, "view of 'k_pe' doesn't fit"),
    "half an element": ({"views": "k_pe=64.64.1+1"}, "offset 1 of k_pe isn't a multiple of its"),
    "far off": ({"views": f"k_pe=64.64.1+{1 << 40}"}, "the offset of k_pe is more than 2^30"),
    "wide": ({"views": f"k_pe={1 << 60}.64.1+0"}, "the view of k_pe spans more than 2^46"),
    "large": ({"T": 1 << 60}, "an operand or output has more than 2^40 elements"),
    "an element": ({"set": "kv_nope.1536:1"}, "can't set element 1536 of 'kv_nope' to 1"),
    "an element of nothing": ({"set": "q.0:1"}, "can't set element 0 of 'q' to 1"),
    "too many bits": ({"set": "k_pe.0:10000"}, "can't set element 0 of 'k_pe' to 10000"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_bad_usage(what: str, pair: OpPair, line: Line) -> None:
    changes, message = NONSENSE[what]
    case = line(**changes)
    with pytest.raises(UsageError) as e:
        claim_of(pair, parse(case))
    assert message in str(e.value)
    assert case in str(e.value)
    assert len(str(e.value).splitlines()) == 1
    assert e.value.exit_code == ExitCode.USAGE


def test_what_is_set_fits_exactly(pair: OpPair, line: Line) -> None:
    assert claim_of(pair, parse(line(set="kv_nope.1535:ffff,k_pe.191:1"))).outcome == "equal"
    assert claim_of(pair, parse(line(pe="e4m3", set="k_pe.0:ff"))).outcome == "refused"
    with pytest.raises(UsageError, match="can't set element 0 of 'k_pe' to 100"):
        claim_of(pair, parse(line(pe="e4m3", set="k_pe.0:100")))


def test_an_empty_operand_has_no_elements(pair: OpPair, line: Line) -> None:
    with pytest.raises(UsageError, match="can't set element 0"):
        claim_of(pair, parse(line(T=0, set="k_pe.0:1")))


def test_what_is_written_can_t_overlap(second_pair: Any) -> None:
    point = (("N", 4), ("C", 2), ("dtype", "i32"))
    for name, fine in (("a", True), ("total", False)):
        case = Case("scale_add", "strides", point, ((name, View((0, 1))),), Fill("bits"))
        if fine:
            assert claim_of(second_pair.PAIR, case).outcome == "equal"
        else:
            with pytest.raises(UsageError, match="total is written, so its elements can't overlap"):
                claim_of(second_pair.PAIR, case)
