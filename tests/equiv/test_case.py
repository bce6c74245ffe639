"""Cases and their one-line form."""

from __future__ import annotations

import shlex
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equiv.case import Case, Fill, View, parse
from equiv.domain import claim_of
from equiv.errors import ExitCode, UsageError
from equiv.pairs import load_pair

PAIR = load_pair("kvpack")
LINE = (
    "kvpack/inductor/cpu/strides/T=3,H=2,dtype=bf16,fp8=1,pe=same,rope=64/"
    "kv_nope=528.264.1+32/bits.17/eager/kv_nope.5:7f80,k_pe.0:1"
)

words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
counts = st.integers(0, 2**40)
views = st.builds(View, st.lists(counts, min_size=1, max_size=4).map(tuple), counts)
candidates = st.one_of(
    words,
    st.builds("{}.{}:{}".format, words, words, words),
    st.builds("some/folder/{}.py:{}".format, words, words),
)
cases = st.builds(
    Case,
    pair=words,
    lane=words,
    point=st.lists(
        st.tuples(words, st.one_of(counts, words)), max_size=5, unique_by=lambda p: p[0]
    ).map(tuple),
    views=st.lists(st.tuples(words, views), max_size=3, unique_by=lambda v: v[0]).map(tuple),
    fill=st.builds(Fill, words, counts),
    mode=words,
    overrides=st.lists(st.tuples(words, counts, st.integers(0, 2**64 - 1)), max_size=4).map(tuple),
    candidate=candidates,
    device=st.sampled_from(["cpu", "cuda", "cuda:0", "cuda:1"]),
)


@given(cases)
def test_a_case_survives_its_line(case: Case) -> None:
    line = str(case)
    assert parse(line) == case
    assert str(parse(line)) == line


@given(cases)
def test_a_shell_leaves_the_line_alone(case: Case) -> None:
    assert shlex.quote(str(case)) == str(case)
    assert set(str(case)) <= set(string.ascii_letters + string.digits + "/=,.+:-_")


def test_the_line_of_the_docstring() -> None:
    case = parse(LINE)
    assert case["T"] == 3
    assert case["dtype"] == "bf16"
    assert dict(case.views) == {"kv_nope": View((528, 264, 1), 32)}
    assert case.fill == Fill("bits", 17)
    assert case.overrides == (("kv_nope", 5, 0x7F80), ("k_pe", 0, 1))
    assert str(case) == LINE
    assert parse(f"  {LINE}\n") == case


def test_equal_values_are_equal_cases() -> None:
    assert parse(LINE) == parse(LINE)
    assert hash(parse(LINE)) == hash(parse(LINE))
    assert parse(LINE).with_(mode="held") != parse(LINE)


def swap(field: int, text: str) -> str:
    fields = LINE.split("/")
    fields[field] = text
    return "/".join(fields)


MALFORMED = {
    "empty": "",
    "a word": "kvpack",
    "a field too few": LINE.rpartition("/")[0],
    "no value": swap(4, "T"),
    "two values": swap(4, "T=3=4"),
    "no offset": swap(5, "kv_nope=528.264.1"),
    "pitches that aren't numbers": swap(5, "kv_nope=a.b+0"),
    "no seed": swap(6, "bits"),
    "a seed that isn't a number": swap(6, "bits.x"),
    "no bits": swap(8, "kv_nope.5"),
    "bits that aren't hex": swap(8, "kv_nope.5:zz"),
    "no index": swap(8, "kv_nope:7f"),
    "a mode that isn't a word": swap(7, "ea ger"),
    "a device that isn't a word": swap(2, "c pu"),
    "no lane": swap(3, ""),
}


@pytest.mark.parametrize("line", MALFORMED.values(), ids=MALFORMED)
def test_what_cannot_be_read_is_one_clear_line(line: str) -> None:
    with pytest.raises(UsageError) as e:
        parse(line)
    message = str(e.value)
    assert "\n" not in message
    assert message.startswith(f"can't read the case {line!r}: ")
    assert "copy the line that a report printed" in message
    assert e.value.exit_code == ExitCode.USAGE


@given(st.text(max_size=60))
def test_any_text_is_a_case_or_a_usage_error(text: str) -> None:
    try:
        case = parse(text)
    except UsageError as e:
        assert len(str(e).splitlines()) == 1  # noqa: PT017 - both ends are allowed
    else:
        assert str(case)


@given(st.data())
def test_a_damaged_line_is_a_case_or_a_usage_error(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(LINE) - 1))
    line = LINE[:at] + data.draw(st.sampled_from("/=,.+:-x0 ~")) + LINE[at + 1 :]
    try:
        claim_of(PAIR, parse(line))
    except UsageError as e:
        assert len(str(e).splitlines()) == 1  # noqa: PT017 - both ends are allowed


OUTSIDE = {
    "a dimension missing": swap(4, "T=3,dtype=bf16,fp8=1,pe=same,rope=64"),
    "an unknown axis": swap(4, "T=3,H=2,dtype=bf16,fp8=1,pe=same,rope=64,x=1"),
    "a value that no axis has": swap(4, "T=3,H=2,dtype=fp64,fp8=1,pe=same,rope=64"),
    "a word for a dimension": swap(4, "T=many,H=2,dtype=bf16,fp8=1,pe=same,rope=64"),
    "axes that don't go together": swap(4, "T=3,H=2,dtype=bf16,fp8=0,pe=e4m3,rope=64"),
    "a view of nothing": swap(5, "q=1.1.1+0"),
    "too few pitches": swap(5, "kv_nope=264.1+0"),
    "half an element": swap(5, "kv_nope=528.264.1+33"),
    "a span beyond memory": swap(5, "kv_nope=99999999999999.264.1+0"),
    "an unknown fill": swap(6, "noise.1"),
    "an element beyond the operand": swap(8, "kv_nope.1536:0"),
    "bits beyond the element": swap(8, "kv_nope.0:10000"),
}


@pytest.mark.parametrize("line", OUTSIDE.values(), ids=OUTSIDE)
def test_what_the_pair_lacks_is_one_clear_line(line: str) -> None:
    with pytest.raises(UsageError) as e:
        claim_of(PAIR, parse(line))
    assert str(e.value).startswith(f"case {line}: ")
    assert "\n" not in str(e.value)


# Each of these reaches the worker, or is read as something else than what is written.
SLIPS = {
    "a negative seed": swap(6, "bits.-1"),
    "a seed beyond the generator's key": swap(6, f"bits.{1 << 112}"),
    "a negative pitch": swap(5, "kv_nope=-528.264.1+0"),
    "a negative offset": swap(5, "kv_nope=528.264.1+-32"),
    "an offset beyond memory": swap(5, "kv_nope=528.264.1+99999999999998"),
    "a negative index": swap(8, "kv_nope.-1:7f"),
    "a dimension given twice": swap(4, "T=3,T=4,H=2,dtype=bf16,fp8=1,pe=same,rope=64"),
    "an unknown mode": swap(7, "backwards"),
}


@pytest.mark.parametrize("line", SLIPS.values(), ids=SLIPS)
def test_what_no_case_means_is_refused(line: str) -> None:
    with pytest.raises(UsageError):
        claim_of(PAIR, parse(line))
