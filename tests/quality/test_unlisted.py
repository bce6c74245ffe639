"""Does the suite find faults that its catalogue doesn't list, within the gate profile's budget?

Each runs as anyone's kernel does, in the lane that should see it and then in the others. The clean
twin has to pass the case on which it failed. Beside it: no clean kernel may be flagged.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from equiv import ledger, pool
from equiv.campaign import Options, run_candidate
from equiv.case import parse
from equiv.environment import versions
from equiv.evidence import Candidate, Finding
from equiv.lanes import LANES, Target
from equiv.pairs import OpPair, load_pair
from equiv.pool import Worker
from equiv.profiles import PROFILES
from equiv.worker import spec_of
from kvpack.faults.catalogue import HARMLESS, UNLISTED
from kvpack.spec import Fault

GATE = PROFILES["gate"]
CLEAN = "kvpack.faults.kernel:kv_pack"
MORE = Path(__file__).with_name("more_faults.py")

MORE_FAULTS = {
    "squeezed_in_place": ("modes", "input_changed"),
    "reseeded": ("modes", "global_state"),
    "flushing": ("modes", "global_state"),
    "less_precise": ("modes", "global_state"),
    "set_up_once": ("modes", "global_state"),
    "autocast_left_on": ("modes", "global_state"),
    "training_only": ("modes", "raised"),
    "stale_dispatch": ("patterns", "divergence"),
    "stale_plan": ("strides", ""),
    "miscompiled": ("patterns", "divergence"),
    "pending_negation": ("shapes", "wrong_type"),
    "tile_and_one": ("shapes", "divergence"),
    "full_tiles": ("shapes", "divergence"),
    "third_pass": ("shapes", "divergence"),
    "float_index": ("shapes", "divergence"),
    "forty_one_heads": ("shapes", "divergence"),
    "short_warp": ("shapes", "divergence"),
    "pitch_of_the_head": ("strides", ""),
    "pitch_in_16_bits": ("sizes", ""),
    "aligned_to_128": ("strides", "divergence"),
    "base_in_32_bits": ("sizes", ""),
    "two_nans": ("shapes", "divergence"),
    "zero_beside_a_tie": ("shapes", "divergence"),
    "all_zero_token": ("shapes", "divergence"),
}
"""Fault to the lane that should see it, and the kind of finding where that is certain."""

Hunt = Callable[..., Candidate]


@pytest.fixture(scope="module")
def pair() -> OpPair:
    return load_pair("kvpack")


@pytest.fixture
def hunt(pair: OpPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hunt:
    """Run the gate profile's lanes until one finds something."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pool, "HANG_S", 3.0)  # a hang is one after 20 s too
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(name: str, first: str) -> Candidate:
        options = Options(
            pair=pair,
            target=Target("cpu"),
            profile=GATE,
            seed=0,
            lanes=(first, *[x for x in LANES if x != first]),
            entries=ledger.load(),
            versions=versions(),
            first_finding_only=True,
            shrink=False,
        )
        return run_candidate(name, options)[0]

    return run


@pytest.fixture(scope="module")
def twin(pair: OpPair) -> Iterator[Worker]:
    """Keep one worker for the clean kernel, which is the twin of all."""
    with Worker(pair, spec_of(pair, CLEAN, "cpu")) as worker:
        yield worker


def caught(made: Candidate, first: str) -> Finding:
    """Return the one finding, in the lane that should have it."""
    (found,) = [f for x in made.lanes for f in x.findings]
    assert found.lane == first
    (lane,) = made.lanes
    assert lane.seconds < 3 * GATE.lane_seconds
    return found


@pytest.mark.parametrize("fault", [f for f in UNLISTED if not f.needs], ids=lambda f: f.id)
def test_an_unlisted_fault_is_found(fault: Fault, hunt: Hunt, twin: Worker) -> None:
    assert fault.clean == CLEAN
    found = caught(hunt(fault.faulty, fault.lane), fault.lane)
    assert twin.run(parse(found.case).with_(candidate=CLEAN)).status == "equal"


@pytest.mark.parametrize("name", MORE_FAULTS)
def test_another_fault_is_found(name: str, hunt: Hunt, twin: Worker) -> None:
    lane, kind = MORE_FAULTS[name]
    found = caught(hunt(f"{MORE}:{name}", lane), lane)
    assert found.kind == kind or not kind
    assert twin.run(parse(found.case).with_(candidate=CLEAN)).status == "equal"


def test_those_that_need_a_gpu_are_named() -> None:
    assert [f.id for f in UNLISTED if f.needs] == ["U33", "U34", "U35"]
    assert all(f.needs == "cuda" for f in UNLISTED if f.needs)


# -- false alarms -------------------------------------------------------------------


@pytest.fixture
def campaign(pair: OpPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hunt:
    """Run drawn cases of a kernel that has no fault."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, **draws: int) -> Candidate:
        profile = replace(GATE, draws=draws, lane_seconds=60.0)
        options = Options(pair, Target("cpu"), profile, 1, tuple(draws), drawn_only=True)
        return run_candidate(name, options)[0]

    return run


def alarms(made: Candidate) -> list[tuple[str, str, str]]:
    return [(f.kind, f.case, f.detail) for x in made.lanes for f in x.findings]


def test_the_reference_against_itself_raises_no_alarm(campaign: Hunt) -> None:
    start = time.monotonic()
    made = campaign("stock", shapes=230, strides=230, modes=40)
    assert sum(x.cases for x in made.lanes) == 500
    assert alarms(made) == []
    assert {x.lane: x.equal for x in made.lanes} == {"shapes": 230, "strides": 230, "modes": 40}
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("variant", HARMLESS, ids=lambda f: f.id)
def test_a_harmless_variant_raises_no_alarm(variant: Fault, campaign: Hunt) -> None:
    made = campaign(variant.faulty, shapes=16, strides=24, modes=8)
    assert alarms(made) == []
    assert sum(x.equal for x in made.lanes) == 48
