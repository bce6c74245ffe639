"""Element types: values against numpy and ml_dtypes, pattern by pattern, and the words for them."""

from __future__ import annotations

import itertools
import math
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equiv.dtypes import DTYPES, DType, decode, describe, dtype_of, explain, ulp_distance

INDEPENDENT = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn}
FLOATS = [d for d in DTYPES.values() if d.is_float]

floats = st.sampled_from(FLOATS)


def patterns(dtype: DType) -> st.SearchStrategy[int]:
    return st.integers(0, (1 << 8 * dtype.itemsize) - 1)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_decode_agrees_on_every_pattern(name: str) -> None:
    dtype = DTYPES[name]
    bits = np.arange(1 << 8 * dtype.itemsize, dtype=dtype.bits)
    values = np.array([decode(int(b), dtype) for b in bits])
    with np.errstate(invalid="ignore"):  # signalling NaNs
        right = bits.view(INDEPENDENT[name]).astype(np.float64)
    assert np.array_equal(values, right, equal_nan=True)
    numbers = ~np.isnan(right)
    assert np.array_equal(np.signbit(values[numbers]), np.signbit(right[numbers]))


@given(st.integers(0, 2**32 - 1))
def test_decode_agrees_with_struct_on_fp32(bits: int) -> None:
    (right,) = struct.unpack("<f", struct.pack("<I", bits))
    value = decode(bits, DTYPES["fp32"])
    assert value == right or (math.isnan(value) and math.isnan(right))
    assert math.isnan(right) or math.copysign(1, value) == math.copysign(1, right)


@pytest.mark.parametrize("name", DTYPES)
def test_sizes_are_those_of_torch(name: str) -> None:
    dtype = DTYPES[name]
    assert dtype.torch().itemsize == dtype.itemsize
    assert dtype.torch().is_floating_point == dtype.is_float
    if dtype.is_float:
        assert 1 + dtype.exponent_bits + dtype.mantissa_bits == 8 * dtype.itemsize


@pytest.mark.parametrize("name", DTYPES)
def test_names_of_cases_and_of_torch_are_found(name: str) -> None:
    dtype = DTYPES[name]
    assert dtype_of(name) is dtype_of(dtype.torch_name) is dtype_of(str(dtype.torch())) is dtype


def test_an_unknown_dtype_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"float64.*bf16, fp16"):
        dtype_of("float64")


@pytest.mark.parametrize(
    ("name", "bits", "words"),
    [
        ("e4m3", 0x7F, "7f (+NaN)"),
        ("e4m3", 0xFF, "ff (-NaN)"),
        ("e4m3", 0x80, "80 (-0.0)"),
        ("e4m3", 0x00, "00 (0)"),
        ("e4m3", 0x7E, "7e (448)"),
        ("bf16", 0xFF80, "ff80 (-inf)"),
        ("bf16", 0x3F80, "3f80 (1)"),
        ("fp16", 0xFE00, "fe00 (-NaN)"),
        ("fp16", 0x0001, "0001 (5.96046e-08)"),
        ("u8", 0x0A, "0a (10)"),
    ],
)
def test_describe(name: str, bits: int, words: str) -> None:
    assert describe(bits, DTYPES[name]) == words


@pytest.mark.parametrize(
    ("name", "a", "b", "words"),
    [
        ("e4m3", 0x7F, 0x7E, "NaN against a number"),
        ("e4m3", 0xFE, 0xFF, "NaN against a number"),
        ("e4m3", 0x7F, 0xFF, "both NaN, other sign or payload"),
        ("bf16", 0x7F81, 0x7FC0, "both NaN, other sign or payload"),
        ("e4m3", 0x00, 0x80, "zeros of opposite sign"),
        ("e4m3", 0x01, 0x81, "2 ULP apart"),
        ("e4m3", 0x38, 0x39, "1 ULP apart"),
        ("fp16", 0x7BFF, 0x7C00, "1 ULP apart"),
    ],
)
def test_explain(name: str, a: int, b: int, words: str) -> None:
    assert explain(a, b, DTYPES[name]) == words


@pytest.mark.parametrize("name", INDEPENDENT)
def test_neighbours_are_one_ulp_apart(name: str) -> None:
    dtype = DTYPES[name]
    by_value = {}
    for bits in range(1 << 8 * dtype.itemsize):
        value = decode(bits, dtype)
        if not math.isnan(value):
            by_value[value] = bits  # 0.0 and -0.0 are one key
    line = [by_value[v] for v in sorted(by_value)]
    assert {ulp_distance(a, b, dtype) for a, b in itertools.pairwise(line)} == {1}


@given(st.data(), floats)
def test_ulp_distance_is_a_distance(data: st.DataObject, dtype: DType) -> None:
    a, b, c = (data.draw(patterns(dtype)) for _ in range(3))
    if any(math.isnan(decode(x, dtype)) for x in (a, b, c)):
        assert ulp_distance(a, b, dtype) is None or not math.isnan(decode(a, dtype))
        return
    ab, bc, ac = (ulp_distance(*p, dtype) for p in ((a, b), (b, c), (a, c)))
    assert ab is not None
    assert bc is not None
    assert ac is not None
    assert ab == ulp_distance(b, a, dtype)
    assert ac <= ab + bc
    assert (ab == 0) == (decode(a, dtype) == decode(b, dtype))


@given(st.data(), floats)
def test_ulp_distance_is_none_for_nan_alone(data: st.DataObject, dtype: DType) -> None:
    a, b = data.draw(patterns(dtype)), data.draw(patterns(dtype))
    nan = math.isnan(decode(a, dtype)) or math.isnan(decode(b, dtype))
    assert (ulp_distance(a, b, dtype) is None) == nan
