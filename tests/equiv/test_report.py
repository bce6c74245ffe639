"""The report: complete, copyable, and plain where it isn't read on a terminal."""

from __future__ import annotations

import dataclasses
import io
import itertools
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equiv import document, report
from equiv.evidence import (
    Candidate,
    EquivEvidence,
    FaultRow,
    FaultsEvidence,
    Finding,
    Lane,
    LedgerUse,
)
from equiv.lanes import LANES
from equiv.progress import BARS, EVERY_S, SHARE, Progress

CASE = (
    "kvpack/inductor/cpu/strides/T=3,H=2,dtype=bf16,fp8=1,pe=same,rope=64/"
    "kv_nope=528.264.1+32/bits.17/eager/kv_nope.5:7f80"
)
FOUND = CASE.replace("T=3", "T=16897")
REPRO = f"bytegate equiv repro {CASE}"
DETAIL = (
    "k: 5 bytes in 3 of 1,152 elements; first at token 1, head 0, column 130 (rope): "
    "expected 7f (+NaN), got fe (-448): NaN against a number"
)


def finding(**changes: Any) -> Finding:
    base = Finding(
        lane="strides",
        kind="divergence",
        case=CASE,
        found=FOUND,
        after_cases=1_234,
        detail=DETAIL,
        voices="the oracle agrees with the reference: the candidate is wrong",
        raised_in="",
        repro=REPRO,
        occurrences=2,
        set_elements=1,
    )
    return dataclasses.replace(base, **changes)


def lane(name: str = "shapes", **changes: Any) -> Lane:
    base = Lane(
        lane=name,
        state="passed",
        cases=1_520,
        enumerated=20,
        drawn=1_500,
        equal=1_500,
        refused=12,
        declared=8,
        undefined=0,
        oracle_checked=1_520,
        guarded=1_520,
        bytes_compared=12_340_000_000,
        seconds=7.25,
        kinds={"dtype=bf16": 800, "empty": 3},
        least={"empty": 1},
        ranges={"T": (0, 66_048), "rows": (0, 36_000)},
        median_rows=1_210,
        layouts_differ={"v": 40},
        missing=[],
        left_out=["28 production shapes above 36,000 rows"],
        bound=1 - 0.05 ** (1 / 1_500),
        findings=[],
        samples=[],
    )
    return dataclasses.replace(base, **changes)


USE = LedgerUse(
    "D1",
    "seen",
    444,
    605,
    38_158_802,
    {"bf16 k.nope": 30_512, "fp16 v": 14_720},
    "it saturates",
    "docs/x#d1",
)
PROOF = {
    "candidate_ok": True,
    "reference_ok": True,
    "executions": 3,
    "candidate": ["kv_pack_kernel"],
    "reference": ["aten::copy_"],
}
FAILING = lane("strides", state="failed", equal=1_498, bound=None, findings=[finding()])
ENVIRONMENT = {
    "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "triton": None},
    "libraries": [{"name": "_C.so", "sha256": "ab" * 32}],
    "device": {"name": "cpu"},
    "cpu": {"model": "AMD EPYC", "isa": ["avx2", "avx512f"], "torch_capability": "AVX512"},
    "suite": {"commit": "f73c3b4f04dd1186d9fde1cb097eb1097b8196c4", "dirty": True},
}


def made(verdict: str, code: int, *candidates: Candidate, **changes: Any) -> EquivEvidence:
    base = EquivEvidence(
        verdict=verdict,
        exit_code=code,
        pair="kvpack",
        profile="gate",
        device="cpu",
        seed=7,
        lanes=["shapes", "strides"],
        candidates=list(candidates),
        reference_ledger=[],
        not_covered=["no GPU: the pair on CUDA", "candidate vllm: runs on cuda alone"],
        distribution="hypothesis's draws at seed 7",
        environment=ENVIRONMENT,
        started="2026-11-30T03:45:30+00:00",
        seconds=182.4,
        command="bytegate equiv --profile gate",
    )
    return dataclasses.replace(base, **changes)


def candidate(name: str, state: str, *lanes: Lane, **changes: Any) -> Candidate:
    base = Candidate(name, state, "", "dispatch", PROOF, list(lanes), [], 0, 0)
    return dataclasses.replace(base, **changes)


ABSENT = Candidate("vllm", "not covered", "runs on cuda alone", "", {}, [], [], 0, 0)
GOOD = made("PASS", 0, ABSENT, candidate("triton", "passed", lane(), ledger=[USE]))
BAD = made("FAIL", 1, ABSENT, candidate("inductor", "failed", lane(), FAILING))
FAULTS = FaultsEvidence(
    verdict="FAIL",
    exit_code=1,
    pair="kvpack",
    profile="gate",
    device="cpu",
    seed=0,
    faults=[
        FaultRow(
            *(
                "K01",
                "halves swapped",
                "caught",
                "shapes",
                3,
                CASE,
                "divergence",
                DETAIL,
                "clean",
                0.5,
            ),
            candidate="kvpack.faults.k01:faulty",
        ),
        FaultRow("K02", "odd tail", "missed", "", 900, "", "", "no lane failed", "", 9.0, "k02:f"),
        FaultRow("K17", "no wait", "not_covered", "", 0, "", "", "needs a GPU", "", 0.0, "k17:f"),
    ],
    false_alarms={
        "cases": 10_000,
        "alarms": [{"candidate": "twin", "case": CASE, "kind": "divergence", "detail": DETAIL}],
        "candidates": {"stock": 5_000, "twin": 5_000},
    },
    environment=ENVIRONMENT,
    started="2026-11-30T03:45:30+00:00",
    seconds=120.0,
    command="bytegate equiv faults",
)


class Screen(io.StringIO):
    """A text file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(evidence: EquivEvidence | FaultsEvidence, file: io.StringIO | None = None) -> str:
    file = file or io.StringIO()
    if isinstance(evidence, FaultsEvidence):
        report.show_faults(evidence, Path("out/faults.json"), file)
    else:
        report.show_equiv(evidence, Path("out/equiv.json"), file)
    return file.getvalue()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def row(text: str, first: str) -> list[str]:
    """The cells of the table row that starts with a word."""
    line = next(x for x in text.splitlines() if re.match(rf"(\|| *) *{first}\b", x))
    return [c for c in re.split(r"\s{2,}|\s\|\s|^\| | \|$", line.strip()) if c]


# -- what it says -------------------------------------------------------------------


def test_the_first_line_is_the_verdict_and_so_is_the_last() -> None:
    lines = shown(GOOD).splitlines()
    assert lines[0] == (
        "PASS  kvpack on cpu: triton gives the reference's bytes, but for D1 of the ledger "
        "in the lanes shapes and strides alone, 2 of 6; 1,520 cases, 12.34 GB compared (profile "
        "gate, seed 7, 182 s)"
    )
    assert lines[-1] == "PASS  exit code 0; evidence in out/equiv.json"
    lines = shown(BAD).splitlines()
    assert lines[0].startswith("FAIL  kvpack on cpu: 1 finding in inductor; 3,040 cases, 24.68 GB")
    assert lines[-1] == "FAIL  exit code 1; evidence in out/equiv.json"


def test_a_verdict_says_why() -> None:
    gone = dataclasses.replace(USE, state="gone")
    reason = "declared divergence D1 is gone"
    c = candidate("triton", "failed", lane(), ledger=[gone], reason=reason)
    assert f"0 findings in triton; triton: {reason};" in shown(made("FAIL", 1, c))
    lacking = candidate(
        "triton", "not covered", lane(state="not covered", missing=["empty: 0 of 1"])
    )
    assert "lacks: triton, shapes" in shown(made("NOT COVERED", 4, lacking)).splitlines()[0]
    text = shown(made("FAIL", 1, candidate("a", "passed", lane()), reference_ledger=[gone]))
    assert "0 findings in the reference; stock: D1 is gone;" in text.splitlines()[0]


def test_each_lane_is_a_row() -> None:
    for text in (shown(BAD), report.markdown(BAD)):
        columns = row(text, "lane")
        assert columns == [
            *("lane", "state", "cases", "drawn", "GB", "equal", "refused", "declared"),
            *("failing", "median rows", "bound", "s"),
        ]
        assert row(text, "shapes") == [
            *("shapes", "passed", "1,520", "1,500", "12.34", "1,500", "12", "8"),
            *("0", "1,210", "0.2 %", "7.2"),
        ]
        assert row(text, "strides") == [
            *("strides", "failed", "1,520", "1,500", "12.34", "1,498", "12", "8"),
            *("2", "1,210", "-", "7.2"),
        ]


def test_rare_columns_appear_where_they_count() -> None:
    assert "failing" not in row(shown(GOOD), "lane")
    assert "undefined" not in row(shown(GOOD), "lane")
    odd = made("PASS", 0, candidate("a", "passed", lane(undefined=3, equal=1_497)))
    assert "undefined" in row(shown(odd), "lane")


def test_what_is_not_covered_is_named_once() -> None:
    for text in (shown(GOOD), report.markdown(GOOD)):
        assert text.count("no GPU: the pair on CUDA") == 1
        assert text.count("28 production shapes") == 1
        assert "triton, shapes: 28 production shapes above 36,000 rows" in text
    named = made(
        "PASS",
        0,
        candidate("a", "passed", lane()),
        not_covered=["a, shapes: 28 production shapes above 36,000 rows"],
    )
    assert shown(named).count("28 production shapes") == 1


def test_a_finding_is_told_in_full() -> None:
    for text in (shown(BAD), report.markdown(BAD)):
        assert "Finding 1 of 1: inductor, lane strides" in text
        assert CASE in text
        assert FOUND in text
        assert DETAIL in text.replace("\\", "")
        assert "the oracle agrees with the reference: the candidate is wrong" in text
        assert "first after 1,234 cases, in 2 cases of the lane" in text
        assert "zeros, with 1 element set" in text
        assert "bytes differ from the reference" in text


def test_an_exception_names_its_place() -> None:
    f = finding(kind="raised", raised_in="my.kernel:pack", voices="", set_elements=None, found=CASE)
    text = shown(made("FAIL", 1, candidate("a", "failed", lane(findings=[f], state="failed"))))
    assert re.search(r"raised in +my\.kernel:pack", text)
    assert "oracle" not in text.partition("Finding 1")[2]
    assert "inputs" not in text.partition("Finding 1")[2]
    assert "first as" not in text


def test_what_was_not_shrunk_says_why() -> None:
    why = "a hang takes too long to run into it again and again"
    f = finding(kind="hang", voices="", set_elements=None, not_shrunk=why)
    text = shown(made("FAIL", 1, candidate("a", "failed", lane(findings=[f], state="failed"))))
    assert re.search(rf"not shrunk +{why}", text)
    assert "not shrunk" not in shown(BAD)


@pytest.mark.parametrize(
    ("ran", "says"),
    [
        (["patterns"], " in the lane patterns alone, 1 of 6;"),
        (["patterns", "modes"], " in the lanes patterns and modes alone, 2 of 6;"),
        (list(LANES), "but for D1 of the ledger; "),
    ],
)
def test_a_headline_says_that_it_is_of_some_lanes(ran: list[str], says: str) -> None:
    some = dataclasses.replace(GOOD, lanes=ran)
    assert says in report.verdict_sentence(some)
    assert ("alone" in report.verdict_sentence(some)) == (len(ran) < len(LANES))


def test_the_ledger_is_counted_by_dtype_and_place() -> None:
    for text in (shown(GOOD), report.markdown(GOOD)):
        assert row(text, r"triton +\|? *D1") == [
            *("triton", "D1", "seen", "444", "605", "38,158,802"),
            "bf16 k.nope 30,512, fp16 v 14,720",
        ]
        assert "D1: it saturates (docs/x#d1)" in text
    reference = made("PASS", 0, candidate("a", "passed", lane()), reference_ledger=[USE])
    assert row(shown(reference), "stock")[:3] == ["stock", "D1", "seen"]


def test_the_bound_comes_with_its_distribution() -> None:
    for text in (shown(BAD), report.markdown(BAD)):
        assert "inductor, strides: " not in text.partition("What the bound means")[2][:500]
        assert "inductor, shapes: 0.2 % after 1,500 draws; T 0 to 66,048, rows 0 to 36,000" in text
        assert "Drawn from: hypothesis's draws at seed 7." in text
        assert "1 - 0.05^(1/n)" in text
    nothing = made("FAIL", 1, candidate("a", "failed", FAILING))
    assert "What the bound means" not in shown(nothing)


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        (
            PROOF,
            "its own kernel ran, counted 3 times by itself; no fused kernel ran in the reference",
        ),
        ({"candidate_ok": False, "reference_ok": True}, "its own kernel does NOT show; no fused"),
        ({"candidate_ok": True, "reference_ok": False}, "a fused kernel ran in the REFERENCE"),
        ({"candidate_ok": None, "reference_ok": True}, "no kernel of a known name to look for"),
        ({"error": "the worker died", "candidate_ok": None}, "none: the worker died"),
        ({}, "no kernel of a known name to look for; the reference wasn't profiled"),
    ],
)
def test_the_proof_is_a_sentence(proof: dict[str, Any], words: str) -> None:
    assert words in report.proof_sentence(proof)
    assert words in shown(made("PASS", 0, candidate("a", "passed", lane(), proof=proof)))


def test_lost_workers_and_other_layouts_are_told() -> None:
    text = shown(
        made("PASS", 0, candidate("a", "passed", lane(), lane("modes"), crashes=2, hangs=1))
    )
    assert re.search("workers lost +2 to crashes, 1 to hangs", text)
    assert "other pitches than the reference's, with equal bytes: v in 80 cases" in text


def test_the_environment_is_a_line_on_a_terminal_and_a_table_in_markdown() -> None:
    line = "Python 3.11.7, torch 2.13.0+cpu, AMD EPYC (AVX512), commit f73c3b4f04dd with changes"
    assert line in shown(GOOD).splitlines()
    text = report.markdown(GOOD)
    assert "| versions, torch | 2.13.0+cpu |" in text
    assert "| versions, triton | none |" in text
    assert f"| libraries 1, sha256 | {'ab' * 32} |" in text
    assert "| cpu, isa | avx2, avx512f |" in text
    assert "- **command** `bytegate equiv --profile gate`" in text


def test_an_environment_of_failed_probes_is_no_obstacle() -> None:
    broken: dict[str, Any] = {"versions": "failed: x", "suite": None, "cpu": [], "device": "failed"}
    environments: list[dict[str, Any]] = [{}, broken]
    for found in environments:
        text = shown(dataclasses.replace(GOOD, environment=found))
        assert "no commit known" in text
        assert report.markdown(dataclasses.replace(GOOD, environment=found))


# -- how it is written --------------------------------------------------------------


@pytest.mark.parametrize("evidence", [GOOD, BAD, FAULTS], ids=["good", "bad", "faults"])
@pytest.mark.parametrize("columns", ["20", "80"])
def test_without_a_terminal_nothing_is_coloured_or_wrapped(
    monkeypatch: pytest.MonkeyPatch, evidence: EquivEvidence | FaultsEvidence, columns: str
) -> None:
    wide = shown(evidence)
    for name, value in (("COLUMNS", columns), ("FORCE_COLOR", "1"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    text = shown(evidence)
    assert text == wide
    assert "\x1b" not in text
    assert not re.search(r" $", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) > 80


def test_a_terminal_has_colours_and_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "70")
    text = shown(BAD, Screen())
    assert "\x1b[" in text
    table = [x for x in plain(text).splitlines() if re.match(r"  (shapes|strides|─)", x)]
    assert table
    assert max(map(len, table)) <= 70


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "70")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", shown(BAD, Screen()))


@pytest.mark.parametrize("columns", ["20", "80", "300"])
@pytest.mark.parametrize("screen", [True, False])
def test_what_is_to_be_copied_is_never_broken(
    monkeypatch: pytest.MonkeyPatch, columns: str, *, screen: bool
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = plain(shown(BAD, Screen() if screen else None))
    assert REPRO in [x.strip() for x in text.splitlines()]
    assert any(CASE in x for x in text.splitlines())
    faults = plain(shown(FAULTS, Screen() if screen else None))
    assert any(re.search(rf"^ *K01 +{re.escape(CASE)}$", x) for x in faults.splitlines())


def test_markdown_keeps_the_command_in_a_block_of_its_own() -> None:
    assert f"\n```text\n{REPRO}\n```\n" in report.markdown(BAD)


def test_an_encoding_without_lines_is_no_obstacle() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    report.show_equiv(BAD, None, file)
    file.flush()
    assert raw.getvalue().startswith(b"FAIL  kvpack on cpu")
    assert REPRO.encode() in raw.getvalue()


@given(st.text(st.characters(), max_size=40))
def test_no_text_moves_the_cursor_or_breaks_a_line(detail: str) -> None:
    bad = made("FAIL", 1, candidate("a", "failed", lane(findings=[finding(detail=detail)])))
    lines = len(shown(BAD).splitlines())
    text = shown(bad)
    text.encode()
    assert all(c.isprintable() or c == "\n" for c in text)
    assert abs(len(text.splitlines()) - lines) < 12
    markdown = report.markdown(bad)
    assert all(c.isprintable() or c == "\n" for c in markdown)
    assert f"\n```text\n{REPRO}\n```\n" in markdown


@given(st.from_regex("[ -~]{1,30}", fullmatch=True))
def test_markdown_code_holds_any_text(text: str) -> None:
    span = document.code(text)
    ticks = re.match("`+", span)
    assert ticks is not None
    fence = ticks.group()
    if set(text) != {"`"}:  # of which nobody makes a case
        inside = span[len(fence) : -len(fence)]
        assert fence not in re.findall("`+", inside)
        assert text in inside
    block = document.markdown([document.Exact((text,))])
    assert f"\n{text}\n" in block


def test_a_fact_without_a_label_belongs_to_the_one_before_it() -> None:
    facts = document.Facts((("K01", "a case"), ("", "what it said")))
    assert document.markdown([facts]).splitlines()[-2:] == ["- **K01** a case", "  - what it said"]


def test_markdown_tables_keep_their_columns() -> None:
    table = document.Table(("a", "b"), (("x|y", "`z`"), ("*w*", "<b>")), ("b",))
    lines = document.markdown([table]).splitlines()
    assert lines[1] == "| --- | ---: |"
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in lines)
    assert "\\*w\\*" in lines[3]
    assert "\\<b\\>" in lines[3]


# -- planted faults -----------------------------------------------------------------


def test_faults_are_a_table() -> None:
    for text in (shown(FAULTS), report.markdown(FAULTS)):
        assert "1 fault caught, 1 missed, 1 not covered; 1 false alarm in 10,000 cases" in text
        assert row(text, "K01")[:5] == ["K01", "halves swapped", "caught", "shapes", "3"]
        assert row(text, "K02")[:4] == ["K02", "odd tail", "missed", "-"]
        assert "K02, missed: no lane failed" in text
        assert "K17, not covered: needs a GPU" in text
        assert CASE in text
        assert row(text, "stock") == ["stock", "5,000", "0"]
        assert row(text, r"twin +\|? *5,000") == ["twin", "5,000", "1"]


def test_no_false_alarm_run_is_no_obstacle() -> None:
    bare = dataclasses.replace(FAULTS, faults=[], false_alarms={})
    assert "0 false alarms in 0 cases" in shown(bare)
    assert report.markdown(bare)


# -- progress -----------------------------------------------------------------------


class Clock:
    """Seconds that pass when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_few_lines() -> None:
    file, clock = io.StringIO(), Clock()
    with Progress(file, clock) as progress:
        for i in range(3_600):
            clock.now = float(i)
            progress("triton", "shapes", i, 4_000)
    lines = file.getvalue().splitlines()
    assert lines[0] == "[    0 s] triton, shapes: 0 of 4,000 cases"
    assert lines[-1] == "[ 3599 s] triton, shapes: 3,599 of 4,000 cases"
    seconds = [float(x[1:6]) for x in lines]
    waits = [b - a for a, b in itertools.pairwise(seconds)]
    assert min(waits[:-1]) >= EVERY_S
    assert max(waits) < 3_600 / SHARE + 2
    assert len(lines) < 120


def test_a_new_lane_does_not_wait_long() -> None:
    file, clock = io.StringIO(), Clock()
    with Progress(file, clock) as progress:
        progress("triton", "shapes", 16, 400)
        clock.now = 1_000.0
        progress("triton", "shapes", 400, 400)
        clock.now = 1_000.0 + EVERY_S
        progress("triton", "modes", 16, 80)
        assert file.getvalue().splitlines()[-1] == "[ 1005 s] triton, modes: 16 of 80 cases"


def test_each_lane_is_mentioned_with_its_last_count() -> None:
    file, clock = io.StringIO(), Clock()
    lanes = [(f"c{i}", lane) for i in range(9) for lane in ("shapes", "modes")]
    with Progress(file, clock) as progress:
        for i, (name, lane_name) in enumerate(lanes):
            clock.now = 2.0 * i
            progress(name, lane_name, 16, 32)
            progress(name, lane_name, 31, 32)
    text = file.getvalue()
    for name, lane_name in lanes:
        assert text.count(f"{name}, {lane_name}: 31 of 32 cases") == 1
    assert len(text.splitlines()) <= 2 + 2 * len(lanes) / EVERY_S


@pytest.mark.parametrize("screen", [True, False])
def test_campaigns_may_run_side_by_side(monkeypatch: pytest.MonkeyPatch, *, screen: bool) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    file = Screen() if screen else io.StringIO()
    with Progress(file) as progress, ThreadPoolExecutor(8) as pool:

        def campaign(name: str) -> None:
            for i in range(0, 401, 16):
                progress(name, "shapes", i, 400)

        list(pool.map(campaign, [f"c{i}" for i in range(12)]))
        assert len(progress._bars) <= BARS
    assert screen or all("c" + str(i) in file.getvalue() for i in range(12))


def test_no_call_no_line() -> None:
    file = io.StringIO()
    with Progress(file):
        pass
    assert file.getvalue() == ""


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    file = Screen()
    with Progress(file) as progress:
        progress("triton", "shapes", 16, 400)
        progress("triton", "shapes", 400, 400)
        time.sleep(0.25)  # rich draws ten times a second
        progress("[bold]x", "modes", 3, 0)
    text = plain(file.getvalue())
    assert "triton, shapes" in text
    assert "400/400" in text
    assert "[bold]x, modes" in text


def test_an_interruption_passes_through() -> None:
    file = io.StringIO()

    def campaign() -> None:
        with Progress(file) as progress:
            progress("triton", "shapes", 16, 400)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        campaign()
    assert "triton, shapes: 16 of 400 cases" in file.getvalue()
