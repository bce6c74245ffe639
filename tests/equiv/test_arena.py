"""The guards themselves: a byte written where it shouldn't be is seen, and at the right place."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from equiv.arena import (
    BAND,
    BASE,
    COLOURS,
    Arena,
    OutputArena,
    Placed,
    dense_pitches,
    has_gaps,
    is_aligned,
    overlaps,
    same_bytes,
    span_elements,
)
from equiv.case import View
from equiv.dtypes import DTYPES
from equiv.fills import fill
from kvpack.spec import Operand

shapes = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)


def offsets(shape: tuple[int, ...], pitches: tuple[int, ...]) -> list[int]:
    """Where each element lies, in elements, by enumeration."""
    return [
        sum(i * p for i, p in zip(index, pitches, strict=True))
        for index in itertools.product(*map(range, shape))
    ]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = draw(shapes)
    return shape, tuple(draw(st.integers(0, 40)) for _ in shape)


# -- arithmetic of views ------------------------------------------------------------


@given(shapes)
def test_dense_pitches_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert dense_pitches(shape) == torch.empty(shape).stride()
    assert span_elements(shape, dense_pitches(shape)) == math.prod(shape)
    assert not has_gaps(shape, dense_pitches(shape))
    assert not overlaps(shape, dense_pitches(shape))


@given(layouts())
def test_span_by_enumeration(layout: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    places = offsets(*layout)
    assert span_elements(*layout) == (max(places) + 1 if places else 0)


@given(layouts())
def test_overlaps_misses_nothing(layout: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    places = offsets(*layout)
    if len(set(places)) < len(places):
        assert overlaps(*layout)


@given(shapes, st.permutations(range(3)), st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_overlaps_accuses_no_nested_layout(
    shape: tuple[int, ...], order: list[int], room: list[int]
) -> None:
    # Dimensions in any order, each with gaps: what strategies draw and deployments use.
    pitches, step = [0] * len(shape), 1
    for d in (d for d in order if d < len(shape)):
        pitches[d] = step
        step = step * max(shape[d], 1) + room[d]
    assert not overlaps(shape, pitches)


@given(layouts())
def test_gaps_by_enumeration(layout: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    assume(not overlaps(*layout))
    places = offsets(*layout)
    assert has_gaps(*layout) == (len(set(places)) < span_elements(*layout))


ROWS = Operand("q", (4, 3, 32), "bf16", align_bytes=16)


@pytest.mark.parametrize(
    ("view", "aligned"),
    [
        (None, True),
        (View((96, 32, 1)), True),
        (View((96, 32, 1), 16), True),
        (View((96, 32, 1), 8), False),
        (View((104, 32, 1)), True),
        (View((100, 32, 1)), False),
        (View((96, 33, 1)), False),
        (View((0, 32, 1)), True),
    ],
)
def test_alignment_of_base_and_pitches(view: View | None, *, aligned: bool) -> None:
    assert is_aligned(ROWS, view) is aligned


def test_the_pitch_of_a_dimension_of_one_element_is_not_in_use() -> None:
    assert is_aligned(Operand("q", (4, 1, 32), "bf16"), View((32, 5, 1)))
    assert is_aligned(Operand("q", (1, 1, 32), "bf16"), View((5, 5, 1)))


def test_pitches_count_where_the_last_dimension_is_one() -> None:
    assert not is_aligned(Operand("scale", (4, 1), "bf16"), View((3, 1)))


# -- operands -----------------------------------------------------------------------

VIEWS = {
    "dense": View((96, 32, 1)),
    "offset": View((96, 32, 1), 48),
    "gaps between rows": View((160, 48, 1)),
    "gaps between heads": View((96 + 16, 32, 1), 16),
    "permuted": View((32, 4 * 32, 1)),
    "permuted with gaps": View((40, 4 * 40 + 8, 1), 16),
    "one row for all": View((0, 32, 1)),
    "overlapping rows": View((64, 32, 1)),
    "every second element": View((192, 64, 2)),
}


@dataclass
class Laid:
    """Operands in an arena, painted, and the bits that they must keep."""

    operands: list[Operand]
    views: dict[str, View]
    colour: int = COLOURS[0]
    arena: Arena = field(default_factory=lambda: Arena("cpu"))

    def __post_init__(self) -> None:
        self.arena.place(self.operands, self.views)
        self.storage = {
            p.operand.name: fill("bits", p.storage_shape, p.dtype, 7, i)
            for i, p in enumerate(self.arena.placed)
        }
        self.bits = {p.operand.name: p.logical(self.storage[p.operand.name]) for p in self.placed}
        self.arena.paint(self.colour, self.storage)

    @property
    def placed(self) -> list[Placed]:
        return self.arena.placed

    def changed(self) -> list[tuple[str, int]]:
        return self.arena.changed(self.bits)

    def write(self, at: int) -> list[tuple[str, int]]:
        """Change one byte of the buffer, ask, and put it back."""
        self.arena.buffer[at] ^= 0xFF
        found = self.changed()
        self.arena.buffer[at] ^= 0xFF
        return found

    def element_bytes(self, i: int) -> set[int]:
        """Every byte of the buffer that belongs to an element of an operand."""
        p = self.placed[i]
        size = p.dtype.itemsize
        firsts = (p.start + size * o for o in offsets(p.operand.shape, p.pitches))
        return {first + b for first in firsts for b in range(size)}

    def where(self, found: tuple[str, int]) -> int:
        """The byte of the buffer that a report means."""
        name = found[0].removeprefix("band before ").removeprefix("band after ")
        name = name.removeprefix("gap of ")
        starts = {p.operand.name: p.start for p in self.placed}
        return starts[name] + found[1]


def one(view: View, dtype: str = "bf16") -> Laid:
    return Laid([Operand("q", (4, 3, 32), dtype)], {"q": view})


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", ["bf16", "e4m3", "fp32"])
def test_tensors_hold_the_elements(view: View, dtype: str) -> None:
    laid = one(view, dtype)
    tensor = laid.arena.tensors()["q"]
    assert tensor.shape == (4, 3, 32)
    assert tensor.stride() == view.pitches
    assert tensor.dtype == DTYPES[dtype].torch()
    assert tensor.data_ptr() % BASE == view.offset_bytes % BASE
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    seen = tensor.view(kind).numpy().view(DTYPES[dtype].bits)
    assert np.array_equal(seen, laid.bits["q"])
    assert np.array_equal(laid.arena.read(laid.arena.buffer, "q"), laid.bits["q"])
    assert laid.changed() == []
    assert laid.arena.holds(tensor)
    assert laid.arena.holds(tensor[1])
    assert not laid.arena.holds(tensor.clone())


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_every_byte_of_the_span_is_guarded(view: View) -> None:
    laid = one(view)
    p = laid.placed[0]
    own = laid.element_bytes(0)
    assert len(own) <= p.span_bytes
    for at in range(p.start, p.start + p.span_bytes, 7):
        name = "q" if at in own else "gap of q"
        assert laid.write(at) == [(name, at - p.start)]


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_the_bytes_before_and_after_are_guarded(view: View) -> None:
    laid = one(view)
    p = laid.placed[0]
    for distance in (1, 2, 15, 16, 511, 512, BAND - 1, BAND):
        assert laid.write(p.start - distance) == [("band before q", -distance)]
        end = p.start + p.span_bytes
        assert laid.write(end + distance - 1) == [("band after q", p.span_bytes + distance - 1)]


@st.composite
def several(draw: st.DrawFn) -> Laid:
    operands, views = [], {}
    for name in draw(st.sampled_from([("q",), ("q", "r"), ("q", "r", "s")])):
        dtype = draw(st.sampled_from(["bf16", "e4m3", "fp32"]))
        shape = (draw(st.integers(0, 5)), draw(st.integers(0, 5)), draw(st.integers(1, 9)))
        operands.append(Operand(name, shape, dtype))
        step, pitches = draw(st.integers(1, 2)), []
        for extent in reversed(shape):
            pitches.append(step if draw(st.integers(0, 9)) else 0)
            step = step * max(extent, 1) + draw(st.integers(0, 6))
        offset = DTYPES[dtype].itemsize * draw(st.integers(0, 140))
        views[name] = View(tuple(reversed(pitches)), offset)
    return Laid(operands, views)


@given(several(), st.data())
@settings(max_examples=150)
def test_a_byte_is_reported_where_it_was_written(laid: Laid, data: st.DataObject) -> None:
    assert laid.changed() == []
    i = data.draw(st.integers(0, len(laid.placed) - 1))
    p = laid.placed[i]
    at = data.draw(st.integers(p.start - BAND, p.start + p.span_bytes + BAND - 1))
    found = laid.write(at)
    assert [laid.where(f) for f in found] == [at]
    name = found[0][0]
    if p.start <= at < p.start + p.span_bytes:
        own = p.operand.name
        assert name == (own if at in laid.element_bytes(i) else f"gap of {own}")
    else:
        assert name.startswith("band ")
    assert laid.changed() == []


@pytest.mark.parametrize("offset", [0, 16, 496])
def test_no_byte_of_the_buffer_is_unguarded(offset: int) -> None:
    operands = [Operand("q", (3, 2, 20), "bf16"), Operand("r", (3, 1, 8), "bf16")]
    dense = {o.name: View(dense_pitches(o.shape), offset) for o in operands}
    laid = Laid(operands, dense)
    q, r = laid.placed
    between = range(q.start + q.span_bytes + BAND, r.start - BAND)
    places = {*range(q.start - BAND), *between, *range(0, laid.arena.used, 499)}
    assert [at for at in sorted(places) if not laid.write(at)] == []


@given(several(), st.data())
@settings(max_examples=60)
def test_one_write_over_everything_is_reported_for_each_operand(
    laid: Laid, data: st.DataObject
) -> None:
    del data
    laid.arena.buffer[: laid.arena.used] ^= 0xFF
    names = {name for name, _ in laid.changed()}
    for p in laid.placed:
        own = p.operand.name
        assert {f"band before {own}", f"band after {own}"} <= names
        assert own in names or not math.prod(p.operand.shape)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_the_other_colour_covers_all_but_the_elements(view: View) -> None:
    laid = one(view)
    first = laid.arena.buffer[: laid.arena.used].numpy().copy()
    laid.arena.buffer[: laid.arena.used] ^= 0xFF  # a candidate that runs wild
    laid.arena.paint(COLOURS[1], laid.storage, again=True)
    second = laid.arena.buffer[: laid.arena.used].numpy()
    assert laid.changed() == []
    assert np.array_equal(laid.arena.read(laid.arena.buffer, "q"), laid.bits["q"])
    p = laid.placed[0]
    own = np.zeros(laid.arena.used, bool)
    covered = range(p.start, p.start + p.span_bytes) if p.overlaps else laid.element_bytes(0)
    own[list(covered)] = True
    assert np.array_equal(first[own], second[own])
    assert set(first[~own].tolist()) == {COLOURS[0]}
    assert set(second[~own].tolist()) == {COLOURS[1]}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_what_the_op_may_write_is_back_in_the_other_colour(
    view: View, *, sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sparse:
        monkeypatch.setattr("equiv.arena.SPARSE_BYTES", 0)
    laid = Laid([Operand("q", (4, 3, 32), "bf16", mutable=True)], {"q": view})
    assert laid.arena.sparse == sparse
    laid.arena.tensors()["q"].zero_()
    assert not np.array_equal(laid.arena.read(laid.arena.buffer, "q"), laid.bits["q"])
    laid.arena.paint(COLOURS[1], laid.storage, again=True)
    assert np.array_equal(laid.arena.read(laid.arena.buffer, "q"), laid.bits["q"])


def test_colours_are_complements() -> None:
    assert COLOURS[0] ^ COLOURS[1] == 0xFF


def test_an_operand_that_the_op_may_write_is_guarded_around_its_elements() -> None:
    laid = Laid([Operand("q", (4, 3, 32), "bf16", mutable=True)], {"q": VIEWS["gaps between rows"]})
    p = laid.placed[0]
    assert laid.write(p.start) == []
    assert laid.write(p.start + 64) == [("gap of q", 64)]
    assert laid.write(p.start - 1) == [("band before q", -1)]


def test_a_gap_is_guarded_while_the_op_writes_the_elements() -> None:
    laid = Laid([Operand("q", (4, 3, 32), "bf16", mutable=True)], {"q": VIEWS["gaps between rows"]})
    p = laid.placed[0]
    laid.arena.buffer[p.start] ^= 0xFF
    assert laid.write(p.start + 64) == [("gap of q", 64)]


def test_what_the_op_wrote_is_not_looked_through_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("it may be billions of elements")

    laid = Laid([Operand("q", (4, 3, 32), "bf16", mutable=True)], {})
    laid.arena.tensors()["q"].zero_()
    monkeypatch.setattr(Arena, "read", read)
    assert laid.changed() == []


def test_the_buffer_is_kept_from_case_to_case() -> None:
    laid = one(VIEWS["dense"])
    pointer = laid.arena.buffer.data_ptr()
    laid.arena.place([Operand("r", (2, 2), "e4m3")], {})
    assert laid.arena.buffer.data_ptr() == pointer
    bits = {"r": fill("bits", (2, 2), DTYPES["e4m3"], 1, 0)}
    laid.arena.paint(COLOURS[0], bits)
    assert laid.arena.changed(bits) == []
    laid.arena.buffer[laid.arena.placed[0].start + 3] ^= 1
    assert laid.arena.changed(bits) == [("r", 3)]


def test_a_large_buffer_has_no_room_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    small = one(VIEWS["dense"]).arena
    assert small.buffer.numel() > small.used + BASE
    monkeypatch.setattr("equiv.arena.SPARE_BYTES", 0)
    large = one(VIEWS["dense"]).arena
    assert large.buffer.numel() == large.pristine.numel() <= large.used + BASE


def test_a_sparse_operand_is_read_and_compared() -> None:
    operand = Operand("q", (18, 2, 8), "bf16")
    laid = Laid([operand], {"q": View((1 << 28, 8, 1))})
    assert laid.arena.sparse
    tensor = laid.arena.tensors()["q"]
    assert tensor.stride(0) == 1 << 28
    assert np.array_equal(tensor.view(torch.int16).numpy().view(np.uint16), laid.bits["q"])
    assert laid.changed() == []
    tensor.view(torch.int16)[17, 1, 7] ^= 1
    assert [name for name, _ in laid.changed()] == ["q"]


@given(st.binary(max_size=64), st.data())
def test_same_bytes(raw: bytes, data: st.DataObject) -> None:
    a = torch.tensor(list(raw), dtype=torch.uint8)
    b = a.clone()
    assert same_bytes(a, b)
    if raw:
        b[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        assert not same_bytes(a, b)
        assert not same_bytes(a, a[:-1])


# -- outputs ------------------------------------------------------------------------


def outputs(*sizes: int) -> tuple[OutputArena, list[torch.Tensor]]:
    arena = OutputArena("cpu")
    arena.begin(COLOURS[0], sum(sizes) + 64)
    served = [arena.serve((n,), (1,), torch.uint8) for n in sizes]
    assert all(t is not None for t in served)
    return arena, [t for t in served if t is not None]


def test_outputs_are_poisoned() -> None:
    for colour in COLOURS:
        arena = OutputArena("cpu")
        arena.begin(colour, 4096)
        t = arena.serve((3, 5, 4), (20, 4, 1), torch.bfloat16)
        assert t is not None
        assert (t.shape, t.stride(), t.dtype) == ((3, 5, 4), (20, 4, 1), torch.bfloat16)
        assert set(t.view(torch.uint8).flatten().tolist()) == {colour}
        assert t.data_ptr() % BASE == 0
        assert arena.holds(t)
        assert arena.holds(t[1:])
        assert not arena.holds(torch.empty(3))


def test_a_second_round_poisons_what_the_first_one_left() -> None:
    arena, (t,) = outputs(100)
    t.fill_(0)
    arena.begin(COLOURS[1], 164)
    again = arena.serve((100,), (1,), torch.uint8)
    assert again is not None
    assert again.data_ptr() == t.data_ptr()
    assert set(again.tolist()) == {COLOURS[1]}


def test_what_does_not_fit_is_not_served() -> None:
    arena = OutputArena("cpu")
    arena.begin(COLOURS[0], 1000)
    assert arena.serve((1 << 24,), (1,), torch.uint8) is None
    assert arena.serve((1000,), (1,), torch.uint8) is not None
    assert arena.overrun() is None


def test_writes_inside_outputs_are_no_overrun() -> None:
    arena, served = outputs(1, 511, 512, 513, 0, 7)
    for t in served:
        t.fill_(0)
    assert arena.overrun() is None


@given(st.lists(st.integers(0, 1100), min_size=1, max_size=4), st.data())
@settings(max_examples=150)
def test_every_byte_around_outputs_is_guarded(sizes: list[int], data: st.DataObject) -> None:
    arena, _ = outputs(*sizes)
    assert arena.overrun() is None
    last = arena.served[-1]
    end = last.start + last.size + BAND
    at = data.draw(st.integers(0, end - 1))
    assert arena._buffer is not None
    arena._buffer[at] ^= 0xFF
    if any(s.start <= at < s.start + s.size for s in arena.served):
        assert arena.overrun() is None
        return
    found = arena.overrun()
    assert found is not None
    which, relative = found
    s = arena.served[which]
    assert at == (s.start if relative < 0 else s.start + s.size) + relative


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("by", [-1, 0, 15, 16])
def test_one_byte_past_an_output(which: int, by: int) -> None:
    arena, served = outputs(100, 1024, 33)
    s = arena.served[which]
    assert arena._buffer is not None
    arena._buffer[(s.start if by < 0 else s.start + s.size) + by] ^= 1
    assert arena.overrun() == (which, by)
    assert all(set(t.tolist()) == {COLOURS[0]} for t in served)
