"""The look-up tables of the planted faults: each differs from the right one where it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from kvpack.faults import kernel, tables

DTYPES = ("bf16", "fp16")
CPU = torch.device("cpu")


def patterns(dtype: str) -> np.ndarray[Any, Any]:
    every = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return every.view(ml_dtypes.bfloat16 if dtype == "bf16" else np.float16).astype(np.float64)


@pytest.fixture(params=["nan", "saturate"])
def overflow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    cached = [f for f in vars(tables).values() if hasattr(f, "cache_clear")]
    for f in cached:
        f.cache_clear()
    monkeypatch.setattr(tables, "cast_habits", lambda *_: (request.param, 0x7F, 0xFF))
    yield request.param
    monkeypatch.undo()
    for f in cached:
        f.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_conversions_differ_where_they_say(dtype: str, overflow: str) -> None:
    values = np.abs(patterns(dtype))
    right = tables.right(dtype, CPU).numpy()
    finite = values <= 464

    def wrong(table: kernel.Table) -> np.ndarray[Any, Any]:
        return np.asarray(table(dtype, CPU).numpy() != right)

    decoded = right.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    too_large = finite & (np.abs(decoded) > values)
    assert np.array_equal(wrong(tables.truncating), too_large)
    ties = wrong(tables.ties_away)
    assert ties.sum() == (128 if overflow == "nan" else 126)
    assert bool((values[ties] <= 464).all())
    assert np.array_equal(wrong(tables.other_overflow), values > 464)
    assert np.array_equal(wrong(tables.nan_to_max), np.isnan(values))
    assert wrong(tables.unsigned_zero).nonzero()[0].tolist() == [0x8000]
    assert wrong(tables.always_bf16).any() == (dtype == "fp16")
    assert wrong(tables.through_bf16).any() == (dtype == "fp16")
    assert wrong(tables.one_wrong).nonzero()[0].tolist() == [tables.ONE_PATTERN]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fnuz_is_the_other_format(dtype: str, overflow: str) -> None:
    values = patterns(dtype)
    table = tables.fnuz(dtype, CPU).numpy()
    numbers = np.abs(values) < 248
    expected = values[numbers].astype(np.float32).astype(ml_dtypes.float8_e4m3fnuz)
    assert np.array_equal(table[numbers], expected.view(np.uint8))
    assert set(table[np.isnan(values)].tolist()) == {0x80}
    above = set(table[values >= 248].tolist())
    assert above == ({0x80} if overflow == "nan" else {0x7F})
