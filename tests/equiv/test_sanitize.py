"""compute-sanitizer's reports, by a stand-in that prints what the tool prints."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
import torch

from equiv import sanitize, sanitized
from equiv.arena import span_elements
from equiv.case import Case
from equiv.dtypes import DTYPES
from equiv.errors import UsageError
from equiv.pairs import load_pair
from equiv.result import EQUAL

MEMCHECK = """\
========= COMPUTE-SANITIZER
bytegate: begin one
bytegate: end one
bytegate: begin two
========= Invalid __global__ read of size 1 bytes
=========     at hidden_peek+0x70
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f0000000200 is out of bounds
bytegate: end two
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
bytegate: begin one
========= Error: Race reported between Write access at pass+0x10 and Read access at pass+0x14
bytegate: end one
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = """\
========= COMPUTE-SANITIZER
bytegate: begin one
bytegate: end one
========= ERROR SUMMARY: 0 errors
"""


def test_what_a_tool_prints_is_read() -> None:
    errors, case, said, ended = sanitize.read(MEMCHECK)
    assert (errors, case, ended) == (1, "two", 2)
    assert said == ["Invalid __global__ read of size 1 bytes", "at hidden_peek+0x70"]
    errors, case, said, _ = sanitize.read(RACECHECK)
    assert (errors, case) == (1, "one")
    assert said[0].startswith("Error: Race reported between")
    assert sanitize.read(CLEAN) == (0, "", [], 1)


def test_cases_are_small_claim_equal_bytes_and_differ() -> None:
    pair = load_pair("kvpack")
    found = sanitize.chosen(pair, "cpu", "stock", 24)
    assert 18 <= len(found) <= 24
    assert len({c.lane for c in found}) == 3
    assert len({dict(c.point)["dtype"] for c in found}) > 1
    assert any(c.views for c in found)
    assert all(sanitize.claim_of(pair, c).outcome == EQUAL for c in found)


def test_an_operand_ends_with_its_last_element() -> None:
    pair = load_pair("kvpack")
    for case in sanitize.chosen(pair, "cpu", "stock", 60):
        made = sanitized.operands(pair, case, "cpu")
        views = dict(case.views)
        for operand in pair.operands(dict(case.point)):
            t = made[operand.name]
            size = DTYPES[operand.dtype].itemsize
            assert tuple(t.shape) == operand.shape
            last = t.storage_offset() + span_elements(operand.shape, t.stride())
            assert t.untyped_storage().nbytes() == last * size
            if operand.name in views:
                assert t.stride() == views[operand.name].pitches
        reference = pair.reference(made, dict(case.point))
        assert all(isinstance(x, torch.Tensor) for x in reference.values())


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in in the tool's place: it prints ``said`` beside it, and what it was given."""
    path = tmp_path / "compute-sanitizer"
    path.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys\n"
        "here = pathlib.Path(__file__).parent\n"
        "case = sys.argv[-1]\n"
        "text = (here / 'said').read_text().replace('one', case).replace('two', case)\n"
        "sys.stdout.write(text)\n"
        "sys.exit(int((here / 'code').read_text()))\n",
        encoding="utf-8",
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sanitize, "program", lambda: str(path))
    return tmp_path


def one_case() -> list[Case]:
    return sanitize.chosen(load_pair("kvpack"), "cpu", "stock", 3)[:1]


@pytest.mark.parametrize(
    ("said", "code", "state", "reason"),
    [
        (CLEAN, 0, "passed", ""),
        (MEMCHECK, 86, "failed", ""),
        (RACECHECK, 86, "failed", ""),
        ("Error: Device not supported\n", 1, "not covered", "Device not supported"),
        (CLEAN.replace("bytegate: end one\n", ""), 0, "not covered", "after 0 of 1 calls"),
        ("bytegate: unavailable Unavailable: no op here\n", 78, "not covered", "no op here"),
        (CLEAN, 9, "not covered", "ended with code 9"),
    ],
)
def test_a_process_that_did_not_run_every_call_is_never_clean(
    tool: Path, said: str, code: int, state: str, reason: str
) -> None:
    (tool / "said").write_text(said)
    (tool / "code").write_text(str(code))
    made = sanitize.under("memcheck", "kvpack", "triton", "cpu", None, one_case())
    assert made.state == state, made
    assert reason in made.reason


def test_a_finding_is_confirmed_by_its_case_alone(tool: Path) -> None:
    (tool / "said").write_text(MEMCHECK)
    (tool / "code").write_text("86")
    cases = one_case()
    made = sanitize.under("memcheck", "kvpack", "triton", "cpu", None, cases)
    assert sanitize.confirmed(made, "kvpack", "cpu", None, cases).case == made.case
    (tool / "said").write_text(CLEAN)
    again = sanitize.confirmed(made, "kvpack", "cpu", None, cases)
    assert (again.state, again.case) == ("failed", "")
    assert again.said[-1] == "by one of the cases together"


def test_verdicts() -> None:
    passed = sanitize.Report("triton", "memcheck", "passed", 3)
    failed = sanitize.Report("triton", "racecheck", "failed", 3)
    absent = sanitize.Report("triton", "initcheck", "not covered", 0)
    missed = sanitize.PlantedRow("K19", "", "memcheck", "missed", "")
    assert sanitize.judged([passed], [])[0] == "PASS"
    assert sanitize.judged([passed, absent], [])[0] == "NOT COVERED"
    assert sanitize.judged([passed, absent, failed], [])[0] == "FAIL"
    assert sanitize.judged([], [missed])[0] == "FAIL"
    assert sanitize.judged([], [])[0] == "NOT COVERED"


def test_it_needs_a_gpu_and_known_tools(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown tool 'memchek'"):
        sanitize.run(sanitize.Asked(tools=("memchek",), out=tmp_path))
    with pytest.raises(UsageError, match="run on a GPU host"):
        sanitize.run(sanitize.Asked(device="cpu", out=tmp_path))


def test_planted_faults_have_a_tool_each_and_a_twin() -> None:
    faults = load_pair("kvpack").sanitizer_faults
    assert {f.lane for f in faults} == set(sanitize.TOOLS)
    assert all(f.clean != f.faulty for f in faults)
