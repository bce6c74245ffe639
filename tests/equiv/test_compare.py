"""The one comparison: every differing bit is seen, counted and placed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equiv.compare import Difference, differing, part_of, place_of, summarise, voices
from equiv.dtypes import DTYPES
from kvpack.spec import Output

AXES = ("token", "head", "column")
KEY = Output("k", (4, 2, 192), "e4m3", AXES, {"nope": (0, 128), "rope": (128, 192)})
VALUE = Output("v", (4, 2, 128), "bf16", AXES)


def zeros(output: Output) -> np.ndarray:
    return np.zeros(output.shape, dtype=DTYPES[output.dtype].bits)


def test_equal_bits_have_no_mask() -> None:
    a = np.arange(256, dtype=np.uint8)
    assert differing(a, a.copy()) is None
    assert differing(np.zeros((0, 3), np.uint8), np.zeros((0, 3), np.uint8)) is None


@pytest.mark.parametrize(("a", "b"), [(0x7F, 0xFF), (0x00, 0x80), (0x7E, 0x7F)])
def test_what_torch_takes_for_equal_is_seen(a: int, b: int) -> None:
    mask = differing(np.array([a], np.uint8), np.array([b], np.uint8))
    assert mask is not None
    assert mask.all()


def test_what_torch_takes_for_different_is_equal() -> None:
    nan = torch.full((3,), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert not torch.equal(nan.float(), nan.float())
    bits = nan.view(torch.uint8).numpy()
    assert differing(bits, bits.copy()) is None


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.zeros(3, np.uint8), np.zeros(4, np.uint8)),
        (np.zeros((1, 3), np.uint8), np.zeros(3, np.uint8)),
        (np.zeros(3, np.uint8), np.zeros(3, np.uint16)),
    ],
)
def test_other_shapes_or_sizes_are_an_error(a: np.ndarray, b: np.ndarray) -> None:
    with pytest.raises(ValueError, match="can't compare"):
        differing(a, b)


@given(
    st.sampled_from([KEY, VALUE]),
    st.dictionaries(st.integers(0, 1023), st.integers(1, 255), min_size=1, max_size=6),
)
def test_every_changed_byte_is_counted_and_the_first_is_placed(
    output: Output, changes: dict[int, int]
) -> None:
    expected = zeros(output)
    actual = expected.copy()
    raw = actual.reshape(-1).view(np.uint8)
    for at, bits in changes.items():
        raw[at] ^= bits
    mask = differing(expected, actual)
    assert mask is not None
    found = summarise(output, expected, actual, mask)
    size = expected.itemsize
    elements = sorted({at // size for at in changes})
    assert (found.bytes, found.elements) == (len(changes), len(elements))
    assert found.total_elements == expected.size
    assert found.index == np.unravel_index(elements[0], output.shape)
    assert found.expected == 0
    assert found.actual == int(actual.reshape(-1)[elements[0]])
    assert found.output == output.name
    assert found.dtype == output.dtype


def test_only_what_the_mask_holds_is_summarised() -> None:
    expected, actual = zeros(KEY), zeros(KEY)
    actual[0, 0, 5] = 1
    actual[1, 1, 130] = 0xFF
    mask = np.zeros(KEY.shape, bool)
    mask[1, 1, 130] = True
    found = summarise(KEY, expected, actual, mask)
    assert (found.elements, found.bytes, found.index) == (1, 1, (1, 1, 130))
    assert found.place == "token 1, head 1, column 130 (rope)"


def test_a_part_of_an_output_is_placed_in_the_whole() -> None:
    expected, actual = zeros(KEY)[2:], zeros(KEY)[2:]
    actual[1, 0, 191] = 1
    mask = differing(expected, actual)
    assert mask is not None
    found = summarise(KEY, expected, actual, mask, start=2)
    assert found.index == (3, 0, 191)
    assert found.place == "token 3, head 0, column 191 (rope)"
    assert (found.expected, found.actual) == (0, 1)
    assert found.total_elements == 4 * 2 * 192


@pytest.mark.parametrize(
    ("index", "place"),
    [
        ((0, 0, 0), "token 0, head 0, column 0 (nope)"),
        ((3, 1, 127), "token 3, head 1, column 127 (nope)"),
        ((3, 1, 128), "token 3, head 1, column 128 (rope)"),
        ((3, 1, 191), "token 3, head 1, column 191 (rope)"),
    ],
)
def test_place_and_part(index: tuple[int, int, int], place: str) -> None:
    assert place_of(KEY, index) == place
    assert part_of(KEY, index[-1]) == ("k.nope" if index[-1] < 128 else "k.rope")
    assert place_of(VALUE, (1, 0, 7)) == "token 1, head 0, column 7"
    assert part_of(VALUE, 7) == "v"


def test_the_sentence_says_everything() -> None:
    found = Difference(
        "k", 3, 5, 1536, (1, 0, 130), "token 1, head 0, column 130 (rope)", 0x7F, 0xFE, "e4m3"
    )
    assert found.sentence() == (
        "k: 5 bytes in 3 of 1,536 elements; first at token 1, head 0, column 130 (rope): "
        "expected 7f (+NaN), got fe (-448): NaN against a number"
    )


@pytest.mark.parametrize(
    ("stock", "kernel", "oracle", "words"),
    [
        (1, 2, 1, "the oracle agrees with the reference: the candidate is wrong"),
        (1, 2, 2, "the oracle agrees with the candidate: the reference departs from the model"),
        (1, 2, 0x7E, "the oracle agrees with neither (it says 7e)"),
        (1, 1, 0x7E, "the oracle agrees with neither (it says 7e)"),
        (1, 1, 1, "the oracle agrees with both"),
    ],
)
def test_three_voices(stock: int, kernel: int, oracle: int, words: str) -> None:
    assert voices(stock, kernel, oracle) == words
