"""Each fault that a CPU can show fails the gate with its layer and reason; harmless changes don't.

Some of each kind run always; the whole catalogue is nightly (``pytest -m nightly
tests/gate/test_catalogue.py``, or ``python tests/gate/catalogue.py`` for the table).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import catalogue
import pytest
from evidence_tree import candidate, equiv, finding, lane

from equiv import evidence
from kvroute.faults import LOOP_TITLES

ALWAYS = (
    *("K04", "K06", "K15", "K16", "K06-clean", "N01"),
    *("L07", "L07-clean"),
    *("S-clean", "S01", "S02", "S04", "S06", "S11"),
)
"""Rows that run before a merge: one of a kind."""
NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM to run its loop"
)
NEEDS_CLIENT = pytest.mark.skipif(
    any(importlib.util.find_spec(x) is None for x in ("httpx2", "polars", "stamina")),
    reason="needs bytegate[ppl] to ask servers",
)


def marks(row: catalogue.Row) -> list[pytest.MarkDecorator]:
    found = [NEEDS_VLLM] if row.id.startswith("L") or row.id.endswith("-loop") else []
    found += [NEEDS_CLIENT] if row.id.startswith("S") else []
    return found if row.id in ALWAYS else [*found, pytest.mark.nightly]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder where hypothesis keeps no examples yet."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "row", [pytest.param(r, id=r.id, marks=marks(r)) for r in catalogue.rows()]
)
def test_the_gate_says_what_it_has_to(row: catalogue.Row, tmp_path: Path) -> None:
    done = catalogue.run(row, tmp_path / "row")
    assert not done.problem, done


def test_the_rows_are_the_whole_catalogue() -> None:
    found = {r.id for r in catalogue.rows()} | set(catalogue.LEFT_OUT)
    kernels = {f.id for f in (*catalogue.PAIR.faults, *catalogue.PAIR.harmless)}
    servers = {f"S{i:02}" for i in range(1, 13)}
    assert not (kernels | set(LOOP_TITLES) | servers) - found
    assert set(ALWAYS) <= found
    failing = {r.id for r in catalogue.rows() if r.code}
    assert {f.id for f in catalogue.PAIR.faults} - set(catalogue.LEFT_OUT) <= failing
    assert set(LOOP_TITLES) <= failing


SAYS = "kernel on cpu: failed: a:b, lane shapes: divergence: "


@pytest.mark.parametrize(
    ("found", "code", "says", "problem"),
    [
        ("divergence", 1, (SAYS,), ""),
        ("unwritten", 1, (SAYS,), "it says"),
        ("", 1, (SAYS,), "exit code 0, expected 1"),
        ("", 0, (), ""),
        ("divergence", 0, (), "exit code 1, expected 0"),
    ],
)
def test_a_row_that_comes_out_otherwise_is_a_problem(
    found: str, code: int, says: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    def make(folder: Path) -> dict[str, str]:
        one = lane("shapes", state="failed", equal=87, findings=[finding(found)])
        who = candidate("a:b", lanes=[one if found else lane("shapes")])
        bad = {"verdict": "FAIL", "exit_code": 1} if found else {}
        if found:
            who = candidate("a:b", lanes=[one], state="failed")
        evidence.write(folder / "equiv" / "equiv.json", equiv(candidates=[who], **bad))
        return {"kernel": 'candidates = ["a:b"]\nlanes = ["shapes"]'}

    done = catalogue.run(catalogue.Row("X", "made up", make, code, says), tmp_path / "row")
    assert done.problem.startswith(problem)
    assert bool(done.problem) == bool(problem)
