"""From results to a verdict."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from ppl import compare, evidence, judge
from ppl.evidence import PplEvidence
from ppl.simulate import BUDGET, RUNS, Noise, Results, base, noisy, results
from ppl.store import Floats, Observed
from ppl.verdict import Claim


def decide(made: Results, claim: Claim = "identical", margin: float | None = None) -> PplEvidence:
    found = judge.judge(made.records, made.load, claim=claim, margin=margin)
    assert evidence.contradictions(found) == []
    return found


def same(_text: int, _run: compare.Run, values: Floats) -> Floats:
    return values


def test_equal_bits_are_identical() -> None:
    made = decide(results(same))
    assert (made.verdict, made.exit_code) == ("IDENTICAL", 0)
    assert made.identity is not None
    assert made.identity.identical_tokens == made.identity.tokens == 4000
    assert made.identity.ulp == {"0": 4000}
    assert made.statistics is not None
    assert made.statistics.text_rate_bound == pytest.approx(0.2589, abs=1e-4)
    assert made.pooled_perplexity["stock"] == made.pooled_perplexity["fused"]
    assert len(made.not_covered) == 5


@pytest.mark.parametrize(
    ("arm", "row", "nats", "word", "says"),
    [
        ("fused", 250, 0.0, "INCONCLUSIVE", "all runs of stock are bit-equal"),
        ("fused", 250, 5.0, "INCONCLUSIVE", "all runs of stock are bit-equal"),
        ("fused", 50, 5.0, "INCONCLUSIVE", "all unexposed tokens of stock"),
        ("stock", 250, 5.0, "WITHIN_NOISE", "isn't told apart"),
    ],
)
def test_one_row_of_a_relaunch_is_noise_only_where_stock_shows_some(
    arm: str, row: int, nats: float, word: str, says: str
) -> None:
    """What only the fused arm does now and then is its own, as a race is."""

    def change(text: int, run: compare.Run, values: Floats) -> Floats:
        if text == 3 and run == (arm, 2, 1):
            values[row] = np.nextafter(values[row] - np.float32(nats), np.float32(-99))
        return values

    made = decide(results(change), margin=0.01)
    assert made.verdict == word
    assert says in made.decided.reasons[1]
    assert made.identity is not None
    assert made.identity.identical_texts == 9
    assert decide(results(change), "equivalent", 0.01).exit_code == 0


def test_a_fused_arm_that_scatters_beside_a_steady_stock_is_not_within_noise() -> None:
    rng = np.random.default_rng(0)

    def change(arms: tuple[str, ...]) -> Results:
        def of(_text: int, run: compare.Run, values: Floats) -> Floats:
            if run[0] in arms:
                values[BUDGET:] += rng.standard_normal(300).astype(np.float32) * np.float32(1e-5)
            return np.minimum(values, 0)

        return results(of)

    assert decide(change(("stock", "fused"))).verdict == "WITHIN_NOISE"
    made = decide(change(("fused",)))
    assert (made.verdict, made.exit_code) == ("INCONCLUSIVE", 3)
    assert "unlike 20 results of the fused arm" in made.decided.reasons[1]


def test_signed_zeros_are_not_bit_equal() -> None:
    def change(_text: int, run: compare.Run, values: Floats) -> Floats:
        values[5] = -0.0 if run[0] == "fused" else 0.0
        return values

    made = decide(results(change, texts=2))
    assert made.verdict != "IDENTICAL"
    assert made.identity is not None
    assert made.identity.ulp == {"0": 798, "signed zero": 2}


@pytest.mark.parametrize(("claim", "code"), [("identical", 1), ("equivalent", 0)])
def test_a_small_steady_difference_is_equivalent(claim: Claim, code: int) -> None:
    rng = np.random.default_rng(0)
    steady = {t: rng.standard_normal(300) * 1e-4 for t in range(10)}

    def change(text: int, run: compare.Run, values: Floats) -> Floats:
        if run[0] == "fused":
            values[BUDGET:] += steady[text].astype(np.float32)
        return np.minimum(values, 0)

    made = decide(results(change), claim)
    assert (made.verdict, made.exit_code) == ("EQUIVALENT", code)


def test_without_a_relaunch_noise_is_not_claimed() -> None:
    rng = np.random.default_rng(0)

    def change(_text: int, run: compare.Run, values: Floats) -> Floats:
        if run[0] == "fused":
            values[BUDGET:] += (rng.standard_normal(300) * 1e-5).astype(np.float32)
        return np.minimum(values, 0)

    made = results(change, runs=(("stock", 1, 1), ("fused", 1, 1)))
    assert decide(made).verdict == "INCONCLUSIVE"
    alone = decide(made, "equivalent")
    assert alone.verdict == "INCONCLUSIVE"  # no level holds against what a launch does to all
    assert "of these launches alone" in alone.decided.reasons[0]


def test_noise_of_launches_is_within_noise() -> None:
    made = decide(noisy(1, Noise(token=1e-5, launch_of_text=2e-5)))
    assert (made.verdict, made.exit_code) == ("WITHIN_NOISE", 0)


def test_three_margins_on_exposed_tokens_are_different_and_the_control_says_so() -> None:
    made = decide(noisy(2, Noise(shift=3e-4)), margin=1e-4)
    assert (made.verdict, made.exit_code) == ("DIFFERENT", 1)
    assert made.statistics is not None
    assert made.statistics.exposed.mean == pytest.approx(3e-4, rel=0.02)
    assert made.statistics.contrast is not None
    assert made.statistics.contrast.mean == pytest.approx(3e-4, rel=0.02)
    assert all(t.unexposed.differing == 0 for t in made.texts)


def test_wide_intervals_are_inconclusive() -> None:
    made = decide(noisy(3, Noise(launch_of_text=2e-3)), margin=1e-4)
    assert (made.verdict, made.exit_code) == ("INCONCLUSIVE", 3)
    rng = np.random.default_rng(3)
    apart = {t: np.float32(rng.standard_normal() * 2e-3) for t in range(10)}

    def change(text: int, run: compare.Run, values: Floats) -> Floats:
        values[BUDGET:] -= apart[text] * np.float32(run[0] == "fused")
        return np.minimum(values, 0)

    made = decide(results(change), margin=1e-4)
    assert made.decided.reasons[0].endswith("crosses +-0.0001: score more texts")


def test_the_largest_difference_and_its_place() -> None:
    def change(text: int, run: compare.Run, values: Floats) -> Floats:
        if text == 7 and run[0] == "fused":
            values[203] -= 2.0
        return values

    place = decide(results(change)).identity
    assert place is not None
    assert place.largest is not None
    assert (place.largest.text, place.largest.row, place.largest.exposed) == ("text7", 203, True)
    assert place.largest.rows_to_chunk_cut == 3
    assert place.largest.d_nats == pytest.approx(-2.0, rel=1e-6)


def test_simulated_relaunches_are_never_different() -> None:
    words: dict[str, int] = {}
    levels = ((1e-5, 0.0), (0.0, 1e-5), (2e-4, 0.0), (0.0, 2e-4), (2e-3, 2e-3))
    for seed in range(500):
        of_text, shared = levels[seed % len(levels)]
        noise = Noise(token=1e-3 * (seed % 2), launch_of_text=of_text, launch=shared)
        word = decide(noisy(seed, noise, rows=250), "identical").verdict
        words[word] = words.get(word, 0) + 1
    assert words.get("DIFFERENT", 0) == 0
    assert words.get("INVALID", 0) == 0
    assert words.get("EQUIVALENT", 0) <= 10
    assert words["WITHIN_NOISE"] >= 100


def altered(which: compare.Run, **facts: Any) -> Results:
    made = Results()
    for text in range(3):
        for run in RUNS:
            more = facts if run == which and text == 1 else {}
            made.add(f"text{text}", run, base(text), **more)
    return made


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"ids_sha256": "1" * 64}, "text text1: ids differ between runs"),
        ({"model": "other"}, "model differ"),
        ({"arguments": ("--enable-prefix-caching",)}, "arguments differ"),
        ({"versions": {"vllm": "1"}}, "versions differ"),
        ({"route": "stock"}, "both arms were asked for the same route, stock"),
        ({"budget": 50}, "text text1: plan differs between runs"),
        ({"observed": Observed(route="stock")}, "ran the route stock, asked for fused"),
        ({"observed": Observed(cached_tokens=16)}, "16 tokens came from a prefix cache"),
        ({"observed": Observed(preemptions=1)}, "preempted 1 times"),
        (
            {"observed": Observed(scheduler_chunks=(200, 201))},
            r"scheduler chunks \[200, 201\], planned \[100, 100, 100, 100, 1\]",
        ),
    ],
)
def test_what_is_amiss_makes_it_invalid(facts: dict[str, Any], says: str) -> None:
    made = decide(altered(("fused", 2, 1), **facts))
    assert (made.verdict, made.exit_code) == ("INVALID", 4)
    assert any(re.search(says, r) for r in made.decided.reasons)


def test_a_missing_result_and_a_missing_arm() -> None:
    made = results(same, texts=2)
    del made.records[2]
    assert decide(made).decided.reasons == ("text text0: no result of fused launch 1 repeat 1",)
    made.records[:] = [r for r in made.records if r.arm == "stock"]
    assert "no run of fused is stored" in decide(made).decided.reasons
    made.records.clear()
    assert decide(made).verdict == "INVALID"


@pytest.mark.parametrize("by", [-1, 1])
def test_rows_shifted_by_one_token_are_invalid(by: int) -> None:
    def change(text: int, run: compare.Run, values: Floats) -> Floats:
        return np.roll(values, by) if text == 1 and run == ("fused", 1, 1) else values

    made = decide(results(change))
    assert made.verdict == "INVALID"
    assert made.decided.reasons == ("text text1: fused launch 1 repeat 1 is shifted by one token",)


def test_texts_too_short_to_reach_the_path() -> None:
    made = decide(results(same, rows=80, exposed_from=80))
    assert made.verdict == "INVALID"
    assert "never reaches the path under test" in made.decided.reasons[0]


def test_one_text_alone() -> None:
    assert decide(results(same, texts=1)).verdict == "IDENTICAL"
    made = decide(noisy(0, Noise(token=1e-4), texts=1))
    assert (made.verdict, made.exit_code) == ("INCONCLUSIVE", 3)
    assert PplEvidence.model_validate_json(made.model_dump_json()) == made


def test_one_text_that_differs_says_by_how_much() -> None:
    def change(_text: int, run: compare.Run, values: Floats) -> Floats:
        if run[0] == "fused":
            values[150:250] -= 0.25
            values[203] -= 17.75
        return values

    one = decide(results(change, texts=1, runs=RUNS))
    assert (one.verdict, one.exit_code) == ("INCONCLUSIVE", 3)
    assert one.decided.reasons == (
        "one text has no interval (mean -0.142 nats): score more texts",
        "100 of 300 exposed tokens differ, by up to 18 nats",
    )
    assert "inf" not in " ".join(one.decided.reasons)
    assert decide(results(change, texts=4)).verdict == "DIFFERENT"


def test_differences_that_the_route_cannot_make_are_warned_about() -> None:
    def change(text: int, run: compare.Run, values: Floats) -> Floats:
        if text == 2 and run[0] == "fused":
            values[:50] -= 0.25
        return values

    assert decide(results(change)).warnings == [
        "50 unexposed tokens differ between the arms, which the route can't touch: text2"
    ]


def test_rows_in_another_order_are_invalid_though_their_mean_is_the_same() -> None:
    def change(text: int, run: compare.Run, values: Floats) -> Floats:
        if text == 1 and run[0] == "fused":
            values[200:300] = values[200:300].reshape(-1, 2)[:, ::-1].ravel()
        return values

    made = decide(results(change), "equivalent")
    assert (made.verdict, made.exit_code) == ("INVALID", 4)
    assert made.decided.reasons[0] == (
        "text text1: fused launch 1 repeat 1 has the rows in another order"
    )


@pytest.mark.parametrize("runs", [RUNS[2:], RUNS[2:3], RUNS[1:2], RUNS[:1]])
def test_one_text_scored_from_other_ids_is_invalid_by_name(runs: tuple[compare.Run, ...]) -> None:
    def change(text: int, run: compare.Run, values: Floats) -> Floats:
        return base(77) if text == 4 and run in runs else values

    made = decide(results(change), "equivalent")
    assert (made.verdict, made.exit_code) == ("INVALID", 4)
    arm, launch, repeat = next(r for r in RUNS[1:] if (r in runs) != (RUNS[0] in runs))
    says = f"text text4: {arm} launch {launch} repeat {repeat} is scored from other ids than stock"
    assert made.decided.reasons[0].startswith(says)
    assert all(r.startswith("text text4: ") for r in made.decided.reasons)


def test_roundings_of_untouched_rows_are_no_other_ids() -> None:
    rng = np.random.default_rng(1)

    def change(_text: int, _run: compare.Run, values: Floats) -> Floats:
        values += rng.standard_normal(len(values)).astype(np.float32) * np.float32(0.13)
        return np.minimum(values, 0)

    def flat(_text: int, _run: compare.Run, values: Floats) -> Floats:
        noise = rng.standard_normal(len(values)) * 1e-4  # a model whose weights say nothing
        return np.asarray(-np.log(2048) + noise, np.float32)

    for one in (change, flat):
        assert decide(results(one), "equivalent").verdict in {"INCONCLUSIVE", "WITHIN_NOISE"}


@pytest.mark.parametrize("which", RUNS)
def test_one_text_whose_ids_are_recorded_as_others_is_invalid(which: compare.Run) -> None:
    made = decide(altered(which, ids_sha256="1" * 64), "equivalent")
    assert (made.verdict, made.exit_code) == ("INVALID", 4)
    assert made.decided.reasons[0] == "text text1: ids differ between runs"


def test_values_that_rounding_exchanges_near_zero_are_no_other_order() -> None:
    def change(_text: int, run: compare.Run, values: Floats) -> Floats:
        tiny = [0.0, -1.2e-7, -2.4e-7, -1.2e-7]
        values[200:204] = tiny[::-1] if run[0] == "fused" else tiny
        return values

    assert decide(results(change), "equivalent").verdict == "EQUIVALENT"
