"""One case again: what a report's line says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from equiv.case import parse
from equiv.errors import ExitCode, UsageError
from equiv.evidence import Candidate
from equiv.repro import repro

Line = Callable[..., str]
Bad = Callable[[str], str]


def test_a_clean_case(line: Line, bad: Bad) -> None:
    case = line(candidate=bad("clean"))
    done = repro(case)
    assert done.exit_code == ExitCode.PASS
    assert done.lines[:3] == [
        f"case      {case}",
        "operands  kv_nope [3, 2, 256] bf16, k_pe [3, 1, 64] bf16",
        "claim     equal",
    ]
    assert done.lines[3] == "result    equal: as claimed"
    assert done.lines[4].startswith("hashes    inputs ")


def test_a_divergence_says_where_and_who(line: Line, bad: Bad) -> None:
    done = repro(line(candidate=bad("divergence")))
    assert done.exit_code == ExitCode.FAIL
    assert "result    divergence: bytes differ from the reference" in done.lines
    assert any("first at token 2, head 1, column 127: expected " in text for text in done.lines)
    assert "oracle    the oracle agrees with the reference: the candidate is wrong" in done.lines


def test_an_exception_says_where(line: Line, bad: Bad) -> None:
    done = repro(line(candidate=bad("raised")))
    assert done.exit_code == ExitCode.FAIL
    assert "raised in bad_kernels:raised" in done.lines


@pytest.mark.parametrize(("name", "kind"), [("leaves", "crash"), ("exits", "raised")])
def test_a_kernel_that_ends_things_ends_a_worker_alone(
    name: str, kind: str, line: Line, bad: Bad
) -> None:
    done = repro(line(candidate=bad(name)))
    assert done.result is not None
    assert (done.result.status, done.exit_code) == (kind, ExitCode.FAIL)


def test_a_refusal_passes(line: Line, bad: Bad) -> None:
    done = repro(line(candidate=bad("clean"), dtype="fp32", fp8=0))
    assert done.exit_code == ExitCode.PASS
    assert "claim     refused" in done.lines
    off = repro(line(candidate=bad("clean"), views="k_pe=64.64.1+2"))
    assert "claim     refused (off the alignment)" in off.lines


def test_a_candidate_that_can_t_run_here_is_not_covered(line: Line) -> None:
    done = repro(line(candidate="vllm"))
    assert done.result is None
    assert done.exit_code == ExitCode.INVALID
    assert done.lines[-1].startswith("result    NOT COVERED: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidate": "nope"}, "unknown candidate 'nope'"),
        ({"candidate": "nowhere.py:f"}, "there is no file nowhere.py"),
        ({"mode": "graph"}, "mode 'graph' needs a GPU"),
        ({"dtype": "bf8"}, "dtype is 'bf8'"),
    ],
)
def test_a_case_that_can_t_be_run_is_bad_usage(
    changes: dict[str, str], message: str, line: Line
) -> None:
    with pytest.raises(UsageError, match=message):
        repro(line(**changes))


def test_a_library_that_isn_t_there_is_bad_usage(line: Line) -> None:
    with pytest.raises(UsageError, match=r"--library nope\.so: there is no such file"):
        repro(line(candidate="vllm"), library="nope.so")


def test_a_declared_difference_names_its_entry(folder: Path, line: Line, bad: Bad) -> None:
    name = bad("raised")
    (folder / "mine.toml").write_text(
        f"""
[[divergence]]
id = "M2"
pair = "kvpack"
candidates = ["{name}"]
devices = ["cpu"]
kind = "raised"
reason = "it does"
reference = "here"
""",
        encoding="utf-8",
    )
    done = repro(line(candidate=name), ledger_path=folder / "mine.toml")
    assert done.exit_code == ExitCode.PASS
    assert "result    declared: as claimed" in done.lines
    assert "ledger    M2: 1 elements or events" in done.lines


def test_what_a_campaign_found_is_found_again(campaign: Callable[..., Candidate], bad: Bad) -> None:
    made = campaign(bad("divergence"), "shapes", first_finding_only=True, shrink=True)
    (found,) = [f for x in made.lanes for f in x.findings]
    again = repro(found.case)
    assert again.result is not None
    assert (again.result.status, again.result.detail) == (found.kind, found.detail)
    assert str(parse(found.case)) == found.case
