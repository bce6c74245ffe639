"""Stored results: whole, checked, and never taken for another's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppl.errors import PplError, Stale
from ppl.store import Key, Record, Store, check

VALUES = -np.arange(1, 400, dtype=np.float32) / 100


def key(**facts: Any) -> Key:
    given: dict[str, Any] = {
        "text": "hamlet",
        "ids_sha256": "0" * 64,
        "tokens": 400,
        "model": "small",
        "arguments": ("-x",),
        "route": "stock",
        "versions": {"vllm": "0.33.0"},
    }
    return Key(**{**given, **facts})


def put(store: Store, **facts: Any) -> Record:
    given: dict[str, Any] = {
        "key": key(),
        "arm": "stock",
        "launch": 1,
        "repeat": 1,
        "exposed_from": 100,
        "budget": 100,
    }
    return store.put(facts.pop("values", VALUES), **{**given, **facts})


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = put(store, request={"max_tokens": 1}, response={"wall_s": 0.5})
    again = Store(tmp_path)
    assert again.find(key(), "stock", 1, 1) == record
    assert list(again.records()) == [record]
    assert again.values(record).tobytes() == VALUES.tobytes()
    assert again.find(key(), "stock", 2, 1) is None
    assert again.find(key(text="alice"), "stock", 1, 1) is None


@pytest.mark.parametrize(
    "facts",
    [
        {"ids_sha256": "1" * 64},
        {"tokens": 401},
        {"model": "large"},
        {"arguments": ("-y",)},
        {"route": "fused"},
        {"versions": {"vllm": "0.32.0"}},
    ],
)
def test_a_stale_result_is_refused_by_name(tmp_path: Path, facts: dict[str, Any]) -> None:
    store = Store(tmp_path)
    put(store)
    with pytest.raises(Stale, match=rf"is stale: {next(iter(facts))} differ") as e:
        store.find(key(**facts), "stock", 1, 1)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("row", "value", "says"),
    [
        (7, np.nan, "NaN or infinite, the first at row 7"),
        (0, -np.inf, "NaN or infinite"),
        (3, -9999.0, "a sentinel"),
        (398, 0.5, "above 0, the first at row 398"),
    ],
)
def test_what_may_not_be_averaged_is_not_stored(
    tmp_path: Path, row: int, value: float, says: str
) -> None:
    values = VALUES.copy()
    values[row] = value
    with pytest.raises(PplError, match=says):
        put(Store(tmp_path), values=values)
    assert not list(tmp_path.rglob("*.json"))


def test_short_or_other_arrays_are_refused() -> None:
    with pytest.raises(PplError, match="398 rows for 400 tokens, expected one fewer"):
        check(VALUES[:-1], 400, "x")
    with pytest.raises(PplError, match="float64"):
        check(VALUES.astype(np.float64), 400, "x")
    with pytest.raises(PplError, match="2 dimensions"):
        check(VALUES[None], 400, "x")


def test_damage_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = put(store)
    array = next(tmp_path.rglob("*.f32"))
    data = bytearray(array.read_bytes())
    data[5] ^= 1
    array.write_bytes(data)
    with pytest.raises(PplError, match="is damaged"):
        store.values(record)
    array.unlink()
    with pytest.raises(PplError, match="can't read"):
        store.values(record)
    path = next(tmp_path.rglob("*.json"))
    copy = path.with_name("stock-2-1.json")
    copy.write_bytes(path.read_bytes())
    with pytest.raises(PplError, match="holds the record of another run"):
        list(store.records())
    copy.unlink()
    path.write_text(path.read_text(encoding="utf-8")[:50], encoding="utf-8")
    with pytest.raises(PplError, match="is damaged"):
        list(store.records())


def test_texts_with_like_names_do_not_meet(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in ("a/b", "a_b", "a b"):
        put(store, key=key(text=name))
    assert sorted(r.key.text for r in store.records()) == ["a b", "a/b", "a_b"]


WRITER = """
import itertools, sys
from pathlib import Path
import numpy as np
from ppl.store import Key, Store
store = Store(Path(sys.argv[1]))
print("ready", flush=True)
for n in itertools.count(1):
    facts = dict(text="t", ids_sha256="0" * 64, tokens=20001, model="m", arguments=())
    values = -np.full(20000, n, np.float32) / 1000
    store.put(values, key=Key(**facts, route="stock", versions={}), arm="stock",
              launch=n, repeat=1, exposed_from=1, budget=1)
"""


def test_a_writer_that_is_killed_leaves_whole_results(tmp_path: Path) -> None:
    for round_ in range(5):
        folder = tmp_path / str(round_)
        command = [sys.executable, "-c", WRITER, str(folder)]
        root = str(Path(__file__).parents[2])
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.05 + 0.013 * round_)
            writer.kill()
        store = Store(folder)
        for record in store.records():
            assert store.values(record)[0] == -np.float32(record.launch) / 1000
