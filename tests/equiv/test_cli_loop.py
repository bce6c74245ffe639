"""`bytegate equiv` and the loop layer: when it runs, what is said, and the exit code of both."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equiv import cli, report, run
from equiv.cli import app, run_app
from equiv.errors import ExitCode, worst
from equiv.loop import api
from equiv.loop import report as loop_report
from equiv.stopping import Stop

Said = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0,), 0), ((0, 4), 4), ((4, 1), 1), ((3, 0), 3), ((3, 4), 4), ((4, 0, 1), 1)],
)
def test_the_worst_exit_code_speaks_for_all(codes: tuple[int, ...], expected: int) -> None:
    assert {worst(*order) for order in itertools.permutations(codes)} == {expected}


@pytest.fixture
def said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Said]:
    """Run `bytegate equiv` with both layers replaced; what they give is chosen."""

    def with_codes(pair: int, loop: int | Exception) -> Said:
        words = {0: "PASS", 1: "FAIL", 4: "NOT COVERED"}

        def run_loop(request: Any, *_: object) -> Any:
            assert request.out == tmp_path
            if isinstance(loop, Exception):
                raise loop
            return SimpleNamespace(exit_code=loop, verdict=words[loop])

        monkeypatch.setattr(run, "run", lambda *_: SimpleNamespace(exit_code=pair))
        monkeypatch.setattr(report, "show_equiv", lambda *_: None)
        monkeypatch.setattr(api, "run_loop", run_loop)
        monkeypatch.setattr(loop_report, "show_loop", lambda *_: None)

        def call(*options: str) -> tuple[int, str, str]:
            code = run_app(app, ["equiv", "--out", str(tmp_path), *options], "bytegate")
            return code, *capsys.readouterr()

        return call

    return with_codes


@pytest.mark.parametrize(
    ("pair", "loop", "code", "end"),
    [
        (0, 0, 0, "PASS  the pair PASS, vLLM's loop PASS; exit code 0"),
        (1, 0, 1, "FAIL  the pair FAIL, vLLM's loop PASS; exit code 1"),
        (0, 1, 1, "FAIL  the pair PASS, vLLM's loop FAIL; exit code 1"),
        (4, 0, 4, "NOT COVERED  the pair NOT COVERED, vLLM's loop PASS; exit code 4"),
        (0, 4, 4, "NOT COVERED  the pair PASS, vLLM's loop NOT COVERED; exit code 4"),
        (1, 4, 1, "FAIL  the pair FAIL, vLLM's loop NOT COVERED; exit code 1"),
    ],
)
def test_the_last_line_is_of_both_layers(
    said: Callable[..., Said], pair: int, loop: int, code: int, end: str
) -> None:
    found, out, _ = said(pair, loop)()
    assert (found, out.splitlines()[-1]) == (code, end)


def test_without_vllm_the_loop_is_not_covered_and_decides_only_where_it_was_asked_for(
    said: Callable[..., Said],
) -> None:
    call = said(0, api.LoopUnavailable("the loop layer can't run here: vLLM is not installed"))
    code, out, _ = call()
    line = "NOT COVERED  the loop layer can't run here: vLLM is not installed"
    assert (code, line in out) == (0, True)
    code, out, _ = call("--loop")
    assert (code, line in out) == (4, True)


@pytest.mark.parametrize(
    "narrow",
    [("--candidate", "triton"), ("--lane", "sizes"), ("--pair", "other"), ("--no-loop",)],
    ids=" ".join,
)
def test_a_run_of_something_in_particular_leaves_the_loop_out_and_says_so(
    said: Callable[..., Said], narrow: tuple[str, ...]
) -> None:
    call = said(0, AssertionError("the loop ran"))
    code, out, _ = call(*narrow)
    assert (code, out) == (0, "The loop layer wasn't asked for: --loop, or bytegate loop\n")


def test_a_loop_that_was_asked_for_runs_beside_a_candidate(said: Callable[..., Said]) -> None:
    code, out, _ = said(0, 1)("--candidate", "triton", "--loop")
    assert (code, out.splitlines()[-1][:4]) == (1, "FAIL")


def test_the_texts_and_the_servers_have_their_place_at_the_roof(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["texts", "--help"], ["ppl", "compare", "--help"], ["loop", "--help"]):
        assert run_app(cli.app, words, "bytegate") == ExitCode.PASS
    assert "bytegate loop" in capsys.readouterr().out


def test_a_loop_run_is_shown_again_from_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    made = api.run_loop(api.LoopRequest(lanes=("strides",), out=tmp_path, device="cpu"))
    loop_report.show_loop(made, tmp_path / "loop.json")
    first = capsys.readouterr().out
    assert first.startswith("PASS  vLLM's loop with pack fused on cpu: ")
    assert first.splitlines()[-1] == f"PASS  exit code 0; evidence in {tmp_path / 'loop.json'}"
    assert "the wheel's own" in first
    words = ["equiv", "show", str(tmp_path / "loop.json")]
    assert run_app(app, words, "bytegate") == 0
    assert capsys.readouterr().out == first
    assert run_app(app, [*words, "--markdown"], "bytegate") == 0
    assert "# bytegate loop: fused on cpu" in capsys.readouterr().out
    text = json.loads((tmp_path / "loop.json").read_text(encoding="utf-8"))
    text["lanes"][0]["state"] = "failed"
    (tmp_path / "loop.json").write_text(json.dumps(text), encoding="utf-8")
    assert run_app(app, words, "bytegate") == ExitCode.USAGE
    assert "contradicts itself" in capsys.readouterr().err


def test_a_pair_s_run_that_was_stopped_has_no_loop_after_it(
    said: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = said(0, AssertionError("the loop ran"))

    def stopped(request: Any, _: object, stop: Stop) -> Any:
        assert request.replaces == ("loop.json", "loop.xml")
        stop.signal = "SIGTERM"
        return SimpleNamespace(exit_code=0)

    monkeypatch.setattr(run, "run", stopped)
    monkeypatch.setattr(cli, "ignore", lambda *_: None)
    code, out, err = call("--loop")
    assert (code, out.strip()) == (
        4,
        "NOT COVERED  the loop layer wasn't begun: stopped by SIGTERM",
    )
    assert err.startswith("bytegate: stopped by SIGTERM; what ran until then is in ")
