"""The pack's share of serving's time: the formula, and what it isn't given for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from equiv import document, evidence
from equiv.errors import BytegateError, NotCovered, UsageError
from equiv.perf import record, report, run, share
from ppl import perf_cli

ONE = record.Ratio(1.0, 1.0, 1.0)


def arm(name: str, *seconds: float) -> record.TailArm:
    return record.TailArm(name, list(seconds), ONE, ONE, resolved=False, identical=True)


def cell(
    rows: int, stock_s: float, vllm_s: float, heads: int = 16, fp8: int = 0
) -> record.TailCell:
    point: dict[str, int | str] = {"T": rows, "H": heads, "dtype": "bf16", "fp8": fp8}
    arms = [
        arm("stock", stock_s, 9.0, 0.0),  # their median
        arm("stock again", stock_s),
        arm("copy", stock_s),
        arm("vllm", vllm_s),
    ]
    return record.TailCell(point, 1, 2, arms)


def tail_of(*cells: record.TailCell) -> record.Tail:
    return record.Tail("kvpack", "a GPU", 3, 5, list(cells))


TAIL = tail_of(
    cell(1000, 2e-3, 1e-3),
    cell(3000, 4e-3, 2e-3),
    cell(1000, 9.0, 9.0, fp8=1),
    cell(1000, 9.0, 9.0, heads=8),
)
STOCK = {"chunks": 100, "context_tokens": 200_000, "packs": 0, "pack_rows": 0, "ranks": 8}
FUSED = STOCK | {"packs": 100, "pack_rows": 100_000}


def one(
    route: str, launch: int, counters: dict[str, int], wall_s: float = 0.5
) -> record.ServingRun:
    return record.ServingRun(
        route, launch, 1, 4, 0, {}, concurrency=70, wall_s=wall_s, counters=counters
    )


LOAD = {
    "input_tokens": 96,
    "output_tokens": 8,
    "requests": 8,
    "concurrency": 8,
    "repeats": 2,
    "sessions": 8,
    "shared_tokens": 64,
    "turns": 1,
    "turn_tokens": 32,
}


def served(*runs: record.ServingRun) -> record.Serving:
    return record.Serving(
        routes={"stock": "stock", "fused": "fused"},
        model="m",
        arguments=[],
        versions={},
        load=LOAD,
        order=[],
        packs=[],
        runs=list(runs),
        metrics=[],
        invalid=[],
        heads=16,
        kinds=["bfloat16"],
    )


SERVED = served(
    one("stock", 1, STOCK),
    one("stock", 2, STOCK, 1.0),
    one("fused", 1, FUSED),
    one("fused", 2, FUSED),
)


def test_packs_times_their_time_over_the_ranks_seconds() -> None:
    (stock, fused), missing = share.estimate("kvpack", TAIL, SERVED)
    assert missing == []
    # 2,000 rows lie halfway between the sizes: 3 ms; 100 packs on 8 ranks for half a second.
    assert (stock.route, stock.arm, stock.packs, stock.rows) == ("stock", "stock", 200, 400_000)
    assert stock.pack_s == pytest.approx(3e-3)
    assert stock.launches == pytest.approx([0.3 / 4, 0.3 / 8])
    assert stock.share == pytest.approx((0.3 / 4 + 0.3 / 8) / 2)
    assert fused.arm == "vllm"
    assert fused.pack_s == pytest.approx(1e-3)
    assert fused.share == pytest.approx(0.1 / 4)


def test_the_fp8_packs_have_the_fp8_times() -> None:
    serving = dataclasses.replace(SERVED, kinds=["bfloat16>float8_e4m3fn"])
    thousand = {**STOCK, "context_tokens": 100_000}
    serving = dataclasses.replace(serving, runs=[one("stock", 1, thousand)])
    (stock,), missing = share.estimate("kvpack", TAIL, serving)
    assert stock.pack_s == pytest.approx(9.0)
    assert missing == ["the pack's share of the time at 70, fused: there is no run"]


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [(999, None), (1000, 2.0), (2000, 3.0), (3000, 4.0), (3001, None), (2500.0, 3.5)],
)
def test_times_are_not_guessed_outside_of_those_measured(
    rows: float, seconds: float | None
) -> None:
    assert share.interpolated(rows, {1000: 2.0, 3000: 4.0}) == seconds


def with_counters(**change: int) -> record.Serving:
    runs = [dataclasses.replace(r, counters={**r.counters, **change}) for r in SERVED.runs]
    return dataclasses.replace(SERVED, runs=runs)


@pytest.mark.parametrize(
    ("pair", "tail", "serving", "says"),
    [
        ("kvpack", None, SERVED, "the tail wasn't measured"),
        ("kvpack", tail_of(), SERVED, "the tail wasn't measured"),
        ("k3insert", TAIL, SERVED, "the tail is that of k3insert"),
        ("kvpack", TAIL, dataclasses.replace(SERVED, heads=None), "tells the heads of a rank"),
        ("kvpack", TAIL, dataclasses.replace(SERVED, heads=12), "--size H=12"),
        ("kvpack", TAIL, dataclasses.replace(SERVED, kinds=[]), "packs of kinds []"),
        ("kvpack", TAIL, dataclasses.replace(SERVED, kinds=["bfloat16", "float16"]), "of kinds"),
        ("kvpack", TAIL, with_counters(context_tokens=99, pack_rows=99), "timed from 1,000 to 3,0"),
        ("kvpack", TAIL, with_counters(ranks=0), "lacks counters or its time"),
        (
            "kvpack",
            TAIL,
            dataclasses.replace(SERVED, routes={"stock": "stock", "fused": "my:pack"}),
            "the pack's share of the time at 70, fused: the tail has no arm my:pack",
        ),
    ],
)
def test_what_it_is_not_given_for_is_named(
    pair: str, tail: record.Tail | None, serving: record.Serving, says: str
) -> None:
    shares, missing = share.estimate(pair, tail, serving)
    assert {s.route for s in shares} <= {"stock"}
    assert says in missing[-1]
    assert missing[-1].startswith("the pack's share of the time")


# -- in the evidence --------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., record.PerfEvidence]:
    """Run ``perf`` with a tail and serving that are given."""

    def tail_run(*_: object, **__: object) -> tuple[record.Tail, list[str]]:
        return TAIL, []

    def made(serving: record.Serving | None, *, gpu: bool = True) -> record.PerfEvidence:
        def no_gpu(*_: object, **__: object) -> None:
            raise NotCovered("not covered: device time needs a GPU")

        monkeypatch.setattr(run.tail, "run", tail_run if gpu else no_gpu)

        def serve(_: run.Progress) -> record.Serving:
            if serving is None:
                raise KeyboardInterrupt
            return serving

        asked = run.Asked("kvpack", [], "cpu", None, tmp_path, "perf", serving=serve)
        return run.run(asked, lambda _: None)

    return made


def test_it_is_in_the_evidence_and_the_report(
    measured: Callable[..., record.PerfEvidence], tmp_path: Path
) -> None:
    made = measured(SERVED)
    assert [s.route for s in made.shares] == ["stock", "fused"]
    assert "the pack's share at 70, fused: 2.50% of the time, an estimate" in made.summary
    assert evidence.read(tmp_path / "perf.json", record.PerfEvidence).shares == made.shares
    said = (tmp_path / "perf.md").read_text("utf-8")
    assert "The pack's share of the time, an estimate" in said
    assert "2.50%" in said


def test_without_a_gpu_it_is_not_covered_by_name(
    measured: Callable[..., record.PerfEvidence],
) -> None:
    made = measured(
        dataclasses.replace(SERVED, not_covered=["the prefix cache's hits: none"]), gpu=False
    )
    assert made.shares == []
    assert made.not_covered[-2:] == [
        "the prefix cache's hits: none",
        "the pack's share of the time: the tail wasn't measured, which takes a GPU and --part tail",
    ]


def test_the_tail_outlives_a_run_that_is_cut_off_while_it_serves(
    measured: Callable[..., record.PerfEvidence], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        measured(None)
    left = evidence.read(tmp_path / "perf.json", record.PerfEvidence)
    assert left.tail == measured(SERVED).tail
    assert left.serving is None
    assert (
        left.not_covered[-1] == "serving: cut off before its last launch; the same command goes on"
    )


def test_serving_that_is_invalid_has_none(measured: Callable[..., record.PerfEvidence]) -> None:
    made = measured(dataclasses.replace(SERVED, invalid=["no"]))
    assert (made.verdict, made.shares) == ("INVALID", [])
    twin = measured(SERVED)
    wrong = dataclasses.replace(made, shares=twin.shares)
    assert "the pack's share without serving that is valid" in wrong.contradictions()


def test_a_share_that_is_no_mean_is_refused(
    measured: Callable[..., record.PerfEvidence], tmp_path: Path
) -> None:
    made = measured(SERVED)
    other = [dataclasses.replace(s, share=0.9) for s in made.shares]
    summary = record.summarised(made.tail, made.serving, made.not_covered, other)
    with pytest.raises(BytegateError, match="no mean of its launches"):
        evidence.write(
            tmp_path / "x.json", dataclasses.replace(made, shares=other, summary=summary)
        )


LEVEL = record.ServingMetric(
    name="median_ttft_ms",
    unit="ms",
    better="lower",
    stock=10.0,
    fused=9.0,
    change=-0.1,
    noise=0.001,
    launches={"stock": [10.0, 10.0], "fused": [9.0, 9.0]},
    resolved=True,
    why_not="",
    concurrency=8,
)


def test_tables_are_by_level_rising(measured: Callable[..., record.PerfEvidence]) -> None:
    high = dataclasses.replace(LEVEL, concurrency=70)
    cached = {"cache_queries": 200, "cache_hits": 150}
    runs = [dataclasses.replace(r, counters=r.counters | cached) for r in SERVED.runs]
    serving = dataclasses.replace(
        SERVED, runs=runs, metrics=[high, LEVEL], loads=[LOAD], prefix_caching=True
    )
    made = measured(serving)
    said = document.markdown(report.blocks(made))
    assert said.index("### 8 at a time") < said.index("### 70 at a time")
    assert "8 sessions of 1 turns, 64 tokens shared + 32 a turn" in said
    assert "on; of the prompts' tokens at 70 75.0% to 75.0% were there" in said
    assert any(line.startswith("serving at 8, median_ttft_ms: fused") for line in made.summary)


NEW = {
    "run": ("concurrency", "wall_s", "counters"),
    "metric": ("concurrency",),
    "serving": (
        *("loads", "prefix_caching", "not_covered", "heads", "kinds"),
        *("sessions", "launched"),
    ),
}


def test_a_file_from_before_levels_is_still_read(
    measured: Callable[..., record.PerfEvidence], tmp_path: Path
) -> None:
    old = dataclasses.replace(LEVEL, concurrency=0)
    load = {k: LOAD[k] for k in ("input_tokens", "output_tokens", "requests", "concurrency")}
    serving = dataclasses.replace(SERVED, metrics=[old], load=load | {"repeats": 2}, heads=None)
    raw = json.loads(json.dumps(dataclasses.asdict(measured(serving, gpu=False))))
    raw["not_covered"] = raw["not_covered"][:1]
    raw["summary"] = [
        "serving, median_ttft_ms: fused -10.0%, two launches of one route 0.1%: told apart",
        f"not covered: {raw['not_covered'][0]}",
    ]
    del raw["shares"]
    for name in NEW["serving"]:
        del raw["serving"][name]
    for kind in ("run", "metric"):
        for each in raw["serving"][f"{kind}s"]:
            for name in NEW[kind]:
                del each[name]
    raw["validated"] = True
    path = tmp_path / "old.json"
    path.write_text(evidence.seal.sealed(json.dumps(raw)), encoding="utf-8")
    made = evidence.read(path, record.PerfEvidence)
    assert made.serving is not None
    assert made.serving.prefix_caching is None
    said = document.markdown(report.blocks(made))
    assert "at a time, 2 times a launch" in said
    assert "### " not in said
    path.write_text(path.read_text("utf-8").replace('"heads"', '"hats"').replace("0.1%", "9.1%"))
    with pytest.raises(UsageError):
        evidence.read(path, record.PerfEvidence)


def test_levels_are_read_from_lists_and_repeats() -> None:
    assert perf_cli.levels_of(["1,8", "70"]) == [1, 8, 70]
    for words in (["1,"], ["0"], ["-1"], ["x"]):
        with pytest.raises(UsageError, match="--concurrency"):
            perf_cli.levels_of(words)
