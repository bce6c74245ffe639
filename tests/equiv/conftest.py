"""What tests of the engine share: a quick profile, campaigns and cases in a folder of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from equiv import candidates
from equiv.campaign import Options, run_candidate
from equiv.case import Case, parse
from equiv.evidence import Candidate
from equiv.execute import Executor, Loaded
from equiv.lanes import Target
from equiv.pairs import OpPair, load_pair
from equiv.profiles import PROFILES
from equiv.result import Result

BAD = Path(__file__).with_name("bad_kernels.py")
QUICK = replace(
    PROFILES["dev"],
    draws={"shapes": 24, "strides": 40, "modes": 12},
    max_rows=4_000,
    drawn_rows=2_000,
    shrink_seconds=20.0,
)
"""A profile of few and small cases. Its lanes lack their least counts of large ones, by name."""

Campaign = Callable[..., Candidate]


@pytest.fixture(scope="session")
def pair() -> OpPair:
    return load_pair("kvpack")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of the test's own, where hypothesis keeps no examples yet."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bad() -> Callable[[str], str]:
    """Name a bad kernel as a candidate is named on the command line."""
    return lambda name: f"{BAD}:{name}"


@pytest.fixture
def campaign(pair: OpPair, folder: Path) -> Campaign:
    """Run lanes of one candidate in a worker process, as a run does."""
    del folder

    def run(name: str, *lanes: str, **changes: Any) -> Candidate:
        options = Options(
            pair=pair,
            target=Target("cpu"),
            profile=QUICK,
            seed=0,
            lanes=lanes,
            shrink=False,
        )
        return run_candidate(name, replace(options, **changes))[0]

    return run


@pytest.fixture
def run_here(pair: OpPair) -> Callable[..., Result]:
    """Run one case in this process: a candidate's name or function, and what to change."""

    def run(candidate: Any, line: str | Case, **changes: Any) -> Result:
        case = parse(line) if isinstance(line, str) else line
        which = changes.pop("pair", pair)
        entries = changes.pop("entries", ())
        if isinstance(candidate, str):
            loaded = candidates.load(which, candidate, "cpu", None)
        else:
            loaded = Loaded("own", candidate, changes.pop("guard", "dispatch"), **changes)
        return Executor(which, loaded, "cpu", entries).run(case)

    return run


@pytest.fixture
def second_pair() -> Iterator[Any]:
    """Return the module of the pair that lives in a package of its own."""
    where = str(Path(__file__).with_name("second_pair"))
    sys.path.insert(0, where)
    try:
        import scale_add.pair

        yield scale_add.pair
    finally:
        sys.path.remove(where)


def case_line(lane: str = "shapes", views: str = "-", **changes: Any) -> str:
    """Write a case of kvpack down: ``T=3,H=2`` in bf16 with fp8 unless changed."""
    fields = {"T": 3, "H": 2, "dtype": "bf16", "fp8": 1, "pe": "same", "rope": 64}
    rest = {"fill": "bits.0", "mode": "eager", "set": "-", "candidate": "stock"}
    rest |= {k: changes.pop(k) for k in list(changes) if k in rest}
    fields |= changes
    point = ",".join(f"{k}={v}" for k, v in fields.items())
    head = f"kvpack/{rest['candidate']}/cpu/{lane}/{point}/{views}"
    return f"{head}/{rest['fill']}/{rest['mode']}/{rest['set']}"


@pytest.fixture
def line() -> Callable[..., str]:
    return case_line
