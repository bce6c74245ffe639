"""``bytegate perf``: the tail from given times, evidence that can't contradict itself, no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from equiv import candidates, cli, document, evidence
from equiv.command import run_app
from equiv.errors import BytegateError, NotCovered, UsageError
from equiv.execute import Loaded
from equiv.pairs import load_pair
from equiv.perf import record, report, tail
from equiv.perf.timing import Arm, Timing
from kvpack import stock
from kvpack.spec import Unavailable

PAIR = load_pair("kvpack")
ONLY = {"T": [64], "H": [1]}


def wrong(kv_nope: Any, k_pe: Any, use_fp8: bool) -> Any:  # noqa: FBT001
    k, v = stock.kv_pack(kv_nope, k_pe, use_fp8)
    return k.clone().zero_(), v


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float, ...]]:
    """Run arms on the CPU, once each, and give them the times that a test asks for."""
    given: dict[str, tuple[float, ...]] = {
        "stock": (8.0, 8.1, 8.0),
        "stock again": (8.1, 8.0, 8.0),
        "copy": (1.0, 1.0, 1.0),
        "triton": (2.0, 2.0, 2.0),
    }
    kernels: dict[str, Any] = {"triton": stock.kv_pack, "inductor": wrong, "vllm": "no vLLM here"}

    def measure(arms: Sequence[Arm], sets: int, *_: Any, **__: Any) -> dict[str, Timing]:
        return {
            arm.name: Timing(arm.name, given[arm.name], tuple(map(arm.work, range(sets))))
            for arm in arms
        }

    def load(_pair: Any, name: str, _device: str, _library: str | None) -> Loaded:
        if isinstance(kernels[name], str):
            raise Unavailable(kernels[name])
        return Loaded(name, kernels[name], "dispatch")

    monkeypatch.setattr(tail, "measure", measure)
    monkeypatch.setattr(tail, "input_sets", lambda _moved: 2)
    monkeypatch.setattr(tail, "copy_arm", lambda *_: Arm("copy", int))
    monkeypatch.setattr(tail.timing, "require_cuda", lambda _: torch.device("cpu"))
    monkeypatch.setattr(candidates, "load", load)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    properties = type("Properties", (), {"name": "a GPU"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return given


def measured(*names: str) -> tuple[record.Tail, list[str]]:
    return tail.run(PAIR, names, "cuda", None, ONLY)


def test_ratios_are_of_the_same_run_and_stock_again_is_chance(
    times: dict[str, tuple[float, ...]],
) -> None:
    made, missing = measured("stock", "triton")
    assert missing == []
    assert len(made.cells) == 4  # two dtypes, with and without fp8
    arms = {arm.name: arm for arm in made.cells[0].arms}
    assert list(arms) == ["stock", "triton", "stock again", "copy"]
    assert arms["triton"].time_to_stock.median == 0.25
    assert arms["triton"].share_of_copy.median == 0.5
    assert arms["triton"].resolved
    assert arms["triton"].identical is True
    assert arms["stock again"].time_to_stock.most == 8.1 / 8.0
    assert not arms["stock again"].resolved
    assert arms["copy"].identical is None


@pytest.mark.parametrize(
    ("triton", "resolved"),
    [
        ((8.05, 8.05, 8.05), False),  # inside of what stock does to itself
        ((7.0, 8.05, 7.0), False),  # one run of three is
        ((7.9, 7.9, 7.8), True),
        ((9.0, 9.0, 9.0), True),
    ],
)
def test_a_ratio_inside_of_chance_is_not_told_apart(
    times: dict[str, tuple[float, ...]],
    triton: tuple[float, ...],
    resolved: bool,  # noqa: FBT001 - pytest's
) -> None:
    times["triton"] = triton
    made, _ = measured("triton")
    assert [a.resolved for c in made.cells for a in c.arms if a.name == "triton"] == [resolved] * 4


def test_wrong_bytes_and_what_is_missing_are_said(times: dict[str, tuple[float, ...]]) -> None:
    times["inductor"] = (1.0, 1.0, 1.0)
    made, missing = measured("inductor", "vllm")
    assert missing == ["the tail of vllm: no vLLM here"]
    assert [a.identical for a in made.cells[0].arms] == [True, False, True, None]
    text = document.markdown(report.blocks(evidence_of(tail_=made, not_covered=missing)))
    assert "WRONG" in text
    assert "NOT COVERED: the tail of vllm" in text


def test_no_gpu_is_not_covered_and_bad_names_are_one_line() -> None:
    with pytest.raises(NotCovered, match="device time needs a GPU"):
        tail.run(PAIR, ["triton"], "cpu", None, {})
    with pytest.raises(UsageError, match="no dimension Q"):
        tail.points(PAIR, {"Q": [1]})
    with pytest.raises(UsageError, match="expected a dimension and values"):
        tail.sizes("T=many")
    assert tail.sizes("T=1,2") == ("T", [1, 2])
    chosen = tail.points(PAIR, {})
    assert {p["T"] for p in chosen} == {16_384, 65_536, 66_048}
    assert len({p["H"] for p in chosen}) == 1


# -- evidence -------------------------------------------------------------------------


def evidence_of(
    tail_: record.Tail | None = None,
    serving: record.Serving | None = None,
    not_covered: Sequence[str] = (),
) -> record.PerfEvidence:
    word, code = record.verdict_of(tail_, serving)
    return record.PerfEvidence(
        verdict=word,
        exit_code=code,
        tail=tail_,
        serving=serving,
        not_covered=list(not_covered),
        environment={},
        started="2026-01-01T00:00:00Z",
        seconds=1.0,
        command="perf",
        summary=record.summarised(tail_, serving, not_covered),
    )


METRIC = record.ServingMetric(
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
)


def served(*metrics: record.ServingMetric, invalid: Sequence[str] = ()) -> record.Serving:
    return record.Serving({}, "m", [], {}, {}, [], [], [], list(metrics), list(invalid))


def test_evidence_goes_out_and_comes_back(
    tmp_path: Path, times: dict[str, tuple[float, ...]]
) -> None:
    made = evidence_of(measured("triton")[0], served(METRIC))
    evidence.write(tmp_path / "perf.json", made)
    again = evidence.read(tmp_path / "perf.json", record.PerfEvidence)
    told = {"validated": again.validated, "content_sha256": again.content_sha256}
    assert again == dataclasses.replace(made, **told)


def test_the_summary_has_every_figure_with_its_chance(
    times: dict[str, tuple[float, ...]],
) -> None:
    times["inductor"] = (16.0, 16.0, 16.0)
    made, _ = measured("triton", "inductor")
    lines = record.summarised(made, served(METRIC), ["something"])
    stock = "of stock's time (stock itself 1.00 to 1.00)"
    told = "told apart in 4 of 4 sizes"
    slow = f"2.00 to 2.00 {stock}, 0.06 to 0.06 of a copy's bandwidth; {told}; WRONG BYTES in 4"
    assert lines == [
        f"tail, triton on a GPU: 0.25 to 0.25 {stock}, 0.50 to 0.50 of a copy's bandwidth; {told}",
        f"tail, inductor on a GPU: {slow}",
        "serving, median_ttft_ms: fused -10.0%, two launches of one route 0.1%: told apart",
        "not covered: something",
    ]
    broken = dataclasses.replace(evidence_of(made), summary=["ten times faster"])
    assert broken.contradictions() == ["the summary isn't that of the figures"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"resolved": False}, "resolved False"),
        ({"why_not": "noise"}, "resolved True"),
        ({"change": None}, "resolved without a figure"),
        ({"name": "p99_ttft_ms", "resolved": False, "why_not": "noise"}, "has a figure"),
    ],
)
def test_a_metric_that_contradicts_itself_is_refused(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    made = evidence_of(serving=served(dataclasses.replace(METRIC, **change)))
    with pytest.raises(BytegateError, match=says):
        evidence.write(tmp_path / "perf.json", made)
    assert not (tmp_path / "perf.json").exists()


def test_a_verdict_that_was_edited_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "perf.json"
    evidence.write(path, evidence_of())
    path.write_text(path.read_text("utf-8").replace("NOT COVERED", "MEASURED"), encoding="utf-8")
    with pytest.raises(UsageError, match=r"contradicts itself|is damaged"):
        evidence.read(path, record.PerfEvidence)


# -- the command ----------------------------------------------------------------------


def test_on_a_cpu_the_tail_is_not_covered_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["perf", "--part", "tail", "--device", "cpu", "--out", str(tmp_path)]
    assert run_app(cli.app, words, "bytegate") == 4
    assert "NOT COVERED: the tail: device time needs a GPU" in capsys.readouterr().out
    made = json.loads((tmp_path / "perf.json").read_text("utf-8"))
    assert made["verdict"] == "NOT COVERED"
    assert made["tail"] is None
    assert (tmp_path / "perf.md").read_text("utf-8").startswith("# bytegate perf: NOT COVERED")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--part", "speed"), "part 'speed': expected tail or serving"),
        (("--size", "T"), "expected a dimension and values"),
        (("--candidate", "fast"), "unknown candidate 'fast'"),
        (("--device", "tpu"), "unknown device 'tpu'"),
        (("--requests", "0"), "--requests"),
        (("--concurrency", "1,x"), "--concurrency '1,x': expected positive numbers"),
        (("--concurrency", "0"), "--concurrency '0': expected positive numbers"),
        (("--turns", "2", "--requests", "3"), "--turns: sessions say themselves"),
        (("--part", "serving", "--turn-tokens", "9"), "--turn-tokens 9: expected a positive"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["perf", "--part", "tail", "--out", str(tmp_path / "out"), *words]
    if "--part" in words:
        command = ["perf", *words]
    assert run_app(cli.app, command, "bytegate") == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out" / "perf.json").exists()
