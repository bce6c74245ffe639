"""Bursts: stock's own are the noise floor, a race in the fused arm stays one, strays are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

for name in ("scipy", "pydantic"):
    pytest.importorskip(name)

from ppl import judge, of_burst  # noqa: E402 - the packages decide first
from ppl.facts import Burst  # noqa: E402
from ppl.runs import Run  # noqa: E402
from ppl.simulate import base  # noqa: E402
from ppl.stats import tost  # noqa: E402
from ppl.store import Floats, Key, Observed, Store  # noqa: E402

Change = Callable[[int, Run, Floats], Floats]
TEXTS = 6
BURSTS: tuple[Run, ...] = tuple(
    (arm, launch, burst) for arm in ("stock", "fused") for launch in (1, 2) for burst in (1, 2, 3)
)
ALONE: tuple[Run, ...] = (("stock", 1, 1), ("fused", 1, 1))


def stored(folder: Path, change: Change, runs: tuple[Run, ...], ids: str = "0") -> Path:
    """Store what bursts of some texts gave, as a run does."""
    store = Store(folder)
    for text in range(TEXTS):
        for run in runs:
            arm, launch, repeat = run
            store.put(
                change(text, run, base(text)),
                key=Key(
                    text=f"text{text}",
                    ids_sha256=ids * 64,
                    tokens=401,
                    model="simulated",
                    arguments=(),
                    route=arm,
                    versions={},
                ),
                arm=arm,
                launch=launch,
                repeat=repeat,
                exposed_from=0,
                budget=100,
                observed=Observed(route=arm),
                request={},
                response={},
            )
    return folder


def judged(tmp_path: Path, change: Change, runs: tuple[Run, ...] = BURSTS) -> Burst:
    folder = stored(tmp_path / f"burst{len(list(tmp_path.iterdir()))}", change, runs)
    alone = stored(tmp_path / "alone", lambda _text, _run, values: values, ALONE)
    found = judge.stored([alone])
    made = of_burst.judged([folder], found, claim="identical", margin=None)
    assert made is not None
    return made


def rounding(scale: float = 1e-3, share: float = 1.0) -> Change:
    """Return what batching does: each burst's rows differ by roundings, from some row on."""

    def change(text: int, run: Run, values: Floats) -> Floats:
        seed = [text, run[1], run[2], int(run[0] == "fused")]
        rng = np.random.default_rng(seed)
        if rng.uniform() < share:
            first = int(rng.integers(0, len(values)))
            values[first:] += (rng.standard_normal(len(values) - first) * scale).astype(np.float32)
        return np.minimum(values, np.float32(0))

    return change


def and_then(first: Change, when: Callable[[int, Run], bool], by: float, rows: slice) -> Change:
    def change(text: int, run: Run, values: Floats) -> Floats:
        values = first(text, run, values)
        if when(text, run):
            values[rows] -= np.float32(by)
        return values

    return change


def test_bursts_of_equal_bits_are_identical(tmp_path: Path) -> None:
    made = judged(tmp_path, lambda _text, _run, values: values)
    assert (made.word, made.launches, made.bursts) == ("IDENTICAL", 2, 3)
    assert made.strays == ()
    assert made.floor_nats == 0


def test_what_batching_does_to_both_arms_is_noise(tmp_path: Path) -> None:
    made = judged(tmp_path, rounding(1e-3))
    assert made.word == "WITHIN_NOISE", made.reasons
    assert made.strays == ()
    assert made.within_nats is not None
    assert made.across_nats is not None
    assert made.within_nats[0] < made.across_nats[1] < 5 * made.within_nats[1]


def test_a_race_that_only_a_burst_shows_is_different(tmp_path: Path) -> None:
    wrong = and_then(rounding(1e-4), lambda _text, run: run[0] == "fused", 0.05, slice(100, None))
    made = judged(tmp_path, wrong)
    assert made.word == "DIFFERENT", made.reasons
    assert made.strays


def test_a_fused_arm_that_scatters_cannot_widen_the_margin(
    tmp_path: Path,
) -> None:
    def race(_text: int, run: Run) -> bool:
        return run[0] == "fused" and run[2] == 2

    made = judged(tmp_path, and_then(rounding(1e-5), race, 0.3, slice(350, None)))
    assert made.margin_nats == pytest.approx(1e-4)
    assert made.word == "DIFFERENT", made.reasons
    one = judged(
        tmp_path,
        and_then(rounding(1e-5), lambda t, r: race(t, r) and t == 1, 0.3, slice(350, None)),
    )
    assert one.margin_nats == pytest.approx(1e-4)
    assert one.word == "INCONCLUSIVE"
    assert any("--bursts" in r for r in one.reasons)


@pytest.mark.parametrize("arm", ["stock", "fused"])
def test_a_few_rows_that_are_grossly_wrong_are_named(arm: str, tmp_path: Path) -> None:
    """As vLLM 0.33 gave them for a scheduler's chunk of 69 tokens, on either route."""

    def once(text: int, run: Run) -> bool:
        return text == 4 and run == (arm, 2, 1)

    made = judged(tmp_path, and_then(rounding(1e-3), once, 3.0, slice(390, None)))
    (stray,) = made.strays
    assert stray.startswith(f"{arm} launch 2 burst 1, text text4: row 39")
    assert stray in made.reasons


def test_one_burst_of_stock_is_no_floor(tmp_path: Path) -> None:
    made = judged(tmp_path, rounding(0.5), (("stock", 1, 1), ("fused", 1, 1)))
    assert (made.word, made.floor_nats) == ("INCONCLUSIVE", None)
    assert any("give --bursts at least 2" in r for r in made.reasons)


def test_bursts_of_other_ids_are_invalid(tmp_path: Path) -> None:
    alone = stored(tmp_path / "alone", lambda _text, _run, values: values, ALONE, ids="1")
    folder = stored(tmp_path / "burst", lambda _text, _run, values: values, BURSTS)
    found = judge.stored([alone])
    made = of_burst.judged([folder], found, claim="identical", margin=None)
    assert made is not None
    assert made.word == "INVALID"
    assert made.reasons[0] == "text text0: ids differ between a burst and the same text alone"


def test_how_many_bursts_it_takes() -> None:
    wide = tost([3e-4, -2e-4, 1e-4, -1e-4], 1e-4)
    reach = max(abs(wide.low), abs(wide.high))
    n = of_burst.needed(wide, 1e-6, 3)
    assert n is not None
    assert reach * (3 / n) ** 0.5 < 1e-4 <= reach * (3 / (n - 1)) ** 0.5
    # A floor as wide as what is seen, cut at the largest margin: until the cut no longer binds.
    noisy = of_burst.needed(tost([3e-3, -2e-3, 1e-3, -1e-3], 1e-3), 1e-3, 3)
    assert noisy is not None
    assert 3 < noisy < of_burst.MOST_BURSTS
    assert of_burst.needed(tost([0.0, 0.0, 1e-5], 1e-4), 0.0, 3) == 3
    assert of_burst.needed(tost([10.0, -10.0], 1e-4), 0.0, 3) is None


def test_bursts_of_all_launches_are_numbered_as_one_row(tmp_path: Path) -> None:
    folder = stored(tmp_path / "burst", lambda _text, _run, values: values, BURSTS)
    runs = {r.run for _, r in of_burst.numbered(judge.stored([folder])).values()}
    assert runs == {(arm, n, 1) for arm in ("stock", "fused") for n in range(1, 7)}
