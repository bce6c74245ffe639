"""Fills: what they contain, that they repeat, and that operands and seeds differ."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from equiv import fills
from equiv.dtypes import DTYPES, DType, decode
from equiv.fills import ALL_KINDS, KINDS, SWEEPS, TILE, fill, special_patterns, sweep, sweep8

SIXTEEN = ("bf16", "fp16")
FLOATS = [d for d in DTYPES.values() if d.is_float]
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(list(DTYPES.values()))
kinds = st.sampled_from(ALL_KINDS)

DIGESTS = {
    ("zero", "bf16"): "94a9d9531a44d73f",
    ("zero", "e4m3"): "037f96d1e8f31cc4",
    ("zero", "fp32"): "1ab4024d3166d888",
    ("one", "bf16"): "5f884f7ebcd37239",
    ("one", "e4m3"): "9f134073a3f7fd17",
    ("one", "fp32"): "3b38e0666c88dc96",
    ("bits", "bf16"): "3438341f3abee294",
    ("bits", "fp16"): "3438341f3abee294",
    ("bits", "e4m3"): "f9b26e2b28ac3c85",
    ("bits", "fp32"): "597f7506b5106fb1",
    ("near", "bf16"): "a12bc6f21612f540",
    ("near", "fp16"): "b4324bc0493a2317",
    ("near", "e4m3"): "f9b26e2b28ac3c85",
    ("near", "fp32"): "1c4ee1eaa6917b74",
    ("special", "bf16"): "d3c4d71a7b5c83e0",
    ("special", "fp16"): "d2b5a2235bcd37b1",
    ("special", "e4m3"): "848a9cafbfe16d4d",
    ("special", "fp32"): "624d13898074045f",
    ("tiled", "bf16"): "84af2c5c6cbfc6f7",
    ("tiled", "fp16"): "8e5b39a3fe1e435f",
    ("tiled", "e4m3"): "beccf002e2409a37",
    ("tiled", "fp32"): "6d919f083cc28a62",
    ("sweep", "bf16"): "9c822af9717576b4",
    ("sweep", "e4m3"): "1c1b7e3cb8d84694",
    ("sweep", "fp32"): "7de5e63b3bf5f1eb",
    ("sweep8", "bf16"): "66726d4ced6f1342",
    ("sweep8", "e4m3"): "a999d0479d326249",
    ("sweep8", "fp32"): "d570da023037cb0f",
    ("rows", "bf16"): "a2379e3ee93abb31",
    ("rows", "fp16"): "c79c8d0b32debe34",
    ("rows", "e4m3"): "da1bf760b6e052a3",
    ("rows", "fp32"): "e4661514be694d59",
}


def digest(kind: str, dtype: str) -> str:
    bits = fill(kind, (37, 64), DTYPES[dtype], 17, 1)
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(bits).tobytes())


@pytest.mark.parametrize(("kind", "dtype"), DIGESTS)
def test_bytes_are_the_same_on_every_machine(kind: str, dtype: str) -> None:
    assert digest(kind, dtype) == DIGESTS[kind, dtype]


@given(kinds, dtypes, seeds, st.integers(0, 3), st.lists(st.integers(0, 9), max_size=3))
def test_shape_dtype_and_repetition(
    kind: str, dtype: DType, seed: int, operand: int, shape: list[int]
) -> None:
    bits = fill(kind, tuple(shape), dtype, seed, operand)
    assert bits.shape == tuple(shape)
    assert bits.dtype == dtype.bits
    assert np.array_equal(bits, fill(kind, tuple(shape), dtype, seed, operand))


@given(st.sampled_from(["bits", "near", "special", "tiled"]), seeds, st.sampled_from(SIXTEEN))
def test_seeds_and_operands_give_other_streams(kind: str, seed: int, name: str) -> None:
    size, dtype = (512,), DTYPES[name]
    first = fill(kind, size, dtype, seed, 0)
    assert not np.array_equal(first, fill(kind, size, dtype, seed + 1, 0))
    assert not np.array_equal(first, fill(kind, size, dtype, seed, 1))


@given(st.sampled_from(["bits", "near", "special"]), dtypes, seeds, st.integers(0, 300))
def test_a_shorter_fill_is_a_prefix(kind: str, dtype: DType, seed: int, size: int) -> None:
    long = KINDS[kind](301, dtype, seed, 0)
    assert np.array_equal(KINDS[kind](size, dtype, seed, 0), long[:size])


@pytest.mark.parametrize("name", SIXTEEN)
def test_bits_are_spread_evenly(name: str) -> None:
    bits = fill("bits", (1 << 20,), DTYPES[name], 5, 0)
    counts = np.bincount(bits, minlength=1 << 16)  # 16 each on average, standard deviation 4
    assert counts.max() < 16 + 8 * 4
    assert (counts == 0).mean() < 1e-4
    for bit in range(16):
        assert abs((bits >> bit & 1).mean() - 0.5) < 0.005


@pytest.mark.parametrize("name", [*SIXTEEN, "fp32"])
def test_near_is_where_e4m3_rounds(name: str) -> None:
    dtype = DTYPES[name]
    bits = fill("near", (1 << 16,), dtype, 3, 1)
    values = np.array([decode(int(b), dtype) for b in bits[:4096]])
    assert np.isfinite(values).all()
    assert np.abs(values).min() >= 2.0**-12
    assert np.abs(values).max() < 2.0**11
    exponents = np.frexp(np.abs(values))[1] - 1
    assert set(range(-12, 11)) == set(exponents.tolist())
    assert 0.45 < (values < 0).mean() < 0.55
    mantissas = np.unique(bits & ((1 << dtype.mantissa_bits) - 1))
    assert len(mantissas) >= min(1 << dtype.mantissa_bits, 1 << 10)


def test_near_leaves_e4m3_and_integers_alone() -> None:
    for name in ("e4m3", "u8", "i32"):
        near = fill("near", (1 << 12,), DTYPES[name], 3, 1)
        assert np.array_equal(near, fill("bits", (1 << 12,), DTYPES[name], 3, 1))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_special_patterns_hold_the_corners(dtype: DType) -> None:
    found = special_patterns(dtype)
    assert list(found) == sorted(set(found))
    assert len(found) <= fills.SPECIAL_TABLE
    assert max(found) < 1 << 8 * dtype.itemsize
    sign = 1 << (dtype.exponent_bits + dtype.mantissa_bits)
    assert {p ^ sign for p in found} == set(found)
    values = [decode(p, dtype) for p in found]
    for wanted in (0.0, 1.0, 448.0) if dtype.name != "e4m3" else (0.0, 1.0):
        assert wanted in values
        assert -wanted in values
    assert sum(v != v for v in values) >= 2  # noqa: PLR0124 - NaN
    if dtype.name != "e4m3":
        assert float("inf") in values
        assert decode(1, dtype) in values, "the least number"


@pytest.mark.parametrize("name", SIXTEEN)
def test_special_patterns_hold_every_tie_of_e4m3_and_its_neighbours(name: str) -> None:
    dtype = DTYPES[name]
    found = set(special_patterns(dtype))
    codes = [decode(b, DTYPES["e4m3"]) for b in range(0x7F)]
    by_value = {decode(b, dtype): b for b in range(1 << 15)}
    for low, high in itertools.pairwise(codes):
        tie = by_value[(low + high) / 2]
        assert {tie - 1, tie, tie + 1} <= found, f"{low} and {high}"
    assert by_value[464.0] in found, "the tie between 448 and the overflow"


@pytest.mark.parametrize("name", ["u8", "i32", "i64"])
def test_special_patterns_of_integers_are_the_ends_of_their_range(name: str) -> None:
    top = 1 << (8 * DTYPES[name].itemsize - 1)
    assert set(special_patterns(DTYPES[name])) >= {0, 1, top - 1, top}


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3"])
def test_special_draws_every_special_pattern(name: str) -> None:
    bits = fill("special", (1 << 17,), DTYPES[name], 3, 0)
    assert set(np.unique(bits).tolist()) == set(special_patterns(DTYPES[name]))


def test_zero_and_one() -> None:
    for dtype in FLOATS:
        assert {decode(int(b), dtype) for b in fill("one", (5,), dtype, 1, 1)} == {1.0}
        assert not fill("zero", (5,), dtype, 1, 1).any()
    assert fill("one", (2,), DTYPES["i64"], 0, 0).tolist() == [1, 1]


def test_tiled_has_a_long_odd_period() -> None:
    size = TILE + 1000
    bits = fill("tiled", (size,), DTYPES["e4m3"], 3, 0)
    assert np.array_equal(bits[TILE:], bits[:1000])
    assert all(TILE % p for p in range(2, 2897)), "prime: 2897^2 is above it"


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_tiled_overflows_nowhere(dtype: DType) -> None:
    bits = fill("tiled", (1 << 14,), dtype, 3, 0)
    values = np.array([decode(int(b), dtype) for b in bits])
    assert np.isfinite(values).all()
    assert 128 < np.abs(values).max() < 256
    assert 0.45 < (values < 0).mean() < 0.55
    assert (np.abs(values) < 2.0**-6).any(), "subnormal in e4m3"


@pytest.mark.parametrize("name", ["bf16", "e4m3"])
@pytest.mark.parametrize("seed", [0, 1, 4_000_000_000])
def test_a_sweep_has_every_pattern_in_every_column(name: str, seed: int) -> None:
    dtype = DTYPES[name]
    count = 1 << 8 * dtype.itemsize
    bits = sweep(count, 9, dtype, seed)
    for column in bits.T:
        assert np.array_equal(np.sort(column), np.arange(count, dtype=dtype.bits))


@pytest.mark.parametrize("name", ["bf16", "e4m3"])
@pytest.mark.parametrize("seed", [0, 1, 4_000_000_000])
def test_a_small_sweep_has_every_pattern_in_every_group_of_8(name: str, seed: int) -> None:
    dtype = DTYPES[name]
    count = 1 << 8 * dtype.itemsize
    bits = sweep8(count // 8, 24, dtype, seed)
    for group in range(0, 24, 8):
        own = np.sort(bits[:, group : group + 8].reshape(-1))
        assert np.array_equal(own, np.arange(count, dtype=dtype.bits))


@pytest.mark.parametrize("kind", ["sweep", "sweep8"])
def test_a_sweep_starts_anywhere(kind: str) -> None:
    # Any run of as many rows has every pattern: not only the first one.
    dtype = DTYPES["e4m3"]
    rows, columns = (256, 1) if kind == "sweep" else (32, 8)
    bits = SWEEPS[kind](rows + 11, columns, dtype, 3)[11:]
    assert len(np.unique(bits)) == 256


@pytest.mark.parametrize("name", ["bf16", "e4m3"])
def test_rows_are_uniform_one_time_in_four(name: str) -> None:
    dtype = DTYPES[name]
    found = fill("rows", (1 << 15, 16), dtype, 3, 0)
    uniform = found[(found == found[:, :1]).all(axis=1), 0]
    assert 0.22 < len(uniform) / len(found) < 0.28
    assert 0.45 < (uniform == 0).mean() < 0.57
    assert set(uniform.tolist()) <= set(special_patterns(dtype))
    assert len(set(uniform.tolist())) > len(special_patterns(dtype)) // 2
    others = found[(found != found[:, :1]).any(axis=1)]
    assert len(np.unique(others)) > (1 << 8 * dtype.itemsize) // 2


def test_sweeps_have_other_neighbours_from_seed_to_seed() -> None:
    dtype = DTYPES["bf16"]
    pairs = {
        int(np.uint16(b[1]) - np.uint16(b[0]))
        for s in range(20)
        for b in [sweep(1, 2, dtype, s)[0]]
    }
    assert len(pairs) == 20


def test_sweeps_of_two_operands_differ() -> None:
    dtype = DTYPES["bf16"]
    assert not np.array_equal(
        fill("sweep", (64, 8), dtype, 3, 0), fill("sweep", (64, 8), dtype, 3, 1)
    )


@pytest.mark.parametrize("kind", SWEEPS)
def test_a_sweep_follows_the_last_dimension(kind: str) -> None:
    dtype = DTYPES["bf16"]
    whole = fill(kind, (5, 3, 16), dtype, 3, 0)
    assert np.array_equal(whole.reshape(15, 16), SWEEPS[kind](15, 16, dtype, 3))
