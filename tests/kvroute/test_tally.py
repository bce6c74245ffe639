"""The evidence: counts that can be read while the server runs and after it has ended."""

from __future__ import annotations

import json
import time
from pathlib import Path

from kvroute.tally import SCHEMA, Tally


def counted() -> Tally:
    tally = Tally()
    tally.note(route="fused", rank=1)
    tally.count_loop(chunks=3, continuations=1, empty=0, tokens=40)
    tally.count_pack("bfloat16", 40)
    return tally


def test_a_snapshot_is_plain_json() -> None:
    snapshot = counted().snapshot()
    assert json.loads(json.dumps(snapshot)) == snapshot
    assert snapshot["schema"] == SCHEMA
    assert (snapshot["calls"], snapshot["chunks"], snapshot["packs"]) == (1, 3, {"bfloat16": 1})


def test_the_file_follows_a_count_within_seconds(tmp_path: Path) -> None:
    tally = counted()
    tally.keep_in(tmp_path)
    tally.count_pack("bfloat16", 2)
    end = time.monotonic() + 10
    while not list(tmp_path.glob("route-1-*.json")) and time.monotonic() < end:
        time.sleep(0.05)
    (path,) = tmp_path.glob("route-1-*.json")
    assert json.loads(path.read_text(encoding="utf-8"))["pack_rows"] == 42


def test_a_process_that_built_no_layer_writes_no_file(tmp_path: Path) -> None:
    tally = Tally()
    tally.keep_in(tmp_path)
    tally.write()
    assert not list(tmp_path.iterdir())
