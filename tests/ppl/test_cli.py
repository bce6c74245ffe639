"""``bytegate ppl compare`` on stored results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from equiv.command import run_app
from ppl import bench, evidence, judge
from ppl.cli import ppl_app
from ppl.errors import PplError
from ppl.simulate import RUNS, base
from ppl.store import Key, Observed, Store

ROOT = Path(__file__).parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ppl", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        check=False,
    )


def fill(folder: Path, arm: str, shift: float = 0.0) -> Path:
    store = Store(folder)
    for text in range(10):
        for which, launch, repeat in RUNS:
            if which != arm:
                continue
            values = base(text)
            values[100:] -= np.float32(shift)
            key = Key(
                text=f"text{text}",
                ids_sha256="0" * 64,
                tokens=401,
                model="m",
                arguments=(),
                route=arm,
                versions={},
            )
            store.put(
                values,
                key=key,
                arm=arm,
                launch=launch,
                repeat=repeat,
                exposed_from=100,
                budget=100,
                observed=Observed(route=arm),
            )
    return folder


def test_two_folders_to_a_verdict(tmp_path: Path) -> None:
    stock = fill(tmp_path / "a", "stock")
    fused = fill(tmp_path / "b", "fused")
    done = run("compare", str(stock), str(fused), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "bytegate ppl: IDENTICAL" in done.stdout
    assert "4,000 of 4,000" in done.stdout
    made = evidence.read(tmp_path / "out" / "ppl.json")
    assert made.verdict == "IDENTICAL"
    assert '"verdict": "IDENTICAL"' in (tmp_path / "out" / "ppl.json").read_text("utf-8")
    assert (tmp_path / "out" / "ppl.md").read_text("utf-8").startswith("# bytegate ppl: IDENTICAL")


def test_a_difference_exits_1_and_a_wide_margin_passes(tmp_path: Path) -> None:
    fill(tmp_path, "stock")
    fill(tmp_path, "fused", shift=3e-4)
    words = ["compare", str(tmp_path), "--out", str(tmp_path / "out")]
    assert run(*words).returncode == 1
    assert run(*words, "--claim", "equivalent", "--margin", "0.001").returncode == 0
    assert run(*words, "--margin", "0.001").returncode == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("compare", "nowhere"), "nowhere holds no stored results"),
        (("compare", ".", "--claim", "alike"), "claim 'alike': expected identical or equivalent"),
        (("compare", ".", "--margin", "-1"), "margin -1.0: expected a positive number of nats"),
        (("compare",), "Missing argument"),
        (("run", "--stock", "http://a:1"), "--stock and --fused belong together"),
        (("--stock", "a", "--fused", "http://b:1"), "--stock a: expected http://HOST:PORT"),
        (("--stock", "http://a:1", "--fused", "http://a:1/"), "are the same address, http://a:1"),
        (
            ("--stock", "http://u:pass@a:1", "--fused", "http://u:pass@a:1"),
            "are the same address, http://a:1",
        ),
        (
            ("--stock", "http://a:1", "--fused", "http://b:1", "--model", "m"),
            "--model launches servers",
        ),
        (("--claim", "alike"), "claim 'alike'"),
        (("--margin", "0"), "margin 0.0: expected a positive"),
        (("--tokens", "many"), "--tokens many: expected LEAST-MOST"),
        (("--tokens", "9-3"), "--tokens 9-3: expected LEAST-MOST"),
        (("--launches", "0"), "expected at least 1"),
        (("--api-key-env", "NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE: this variable isn't set"),
        (("--texts", "no-such-text", "--stock", "http://a:1", "--fused", "http://b:1"), "expected"),
        (("--no-such-option",), "--no-such-option"),
        (("compare", ".", "--margin", "wide"), "--margin"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(ppl_app, list(words), "bytegate ppl") == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_report_stands_beside_its_results_and_spares_those_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def compare(*words: object) -> int:
        return run_app(ppl_app, ["compare", *map(str, words)], "bytegate ppl")

    for name, shift in (("a", 0.0), ("b", 3e-4)):
        fill(tmp_path / name, "stock")
        fill(tmp_path / name, "fused", shift)
    assert compare("a") == 0
    assert evidence.read(tmp_path / "a" / "compare" / "ppl.json").verdict == "IDENTICAL"
    assert not (tmp_path / "out").exists()
    before = (tmp_path / "a" / "compare" / "ppl.json").read_bytes()
    capsys.readouterr()
    for out, held in (("a/compare", "the report of other"), ("a", "the results of another")):
        assert compare("b", "--out", out) == 2
        assert f"{out} holds {held}" in capsys.readouterr().err
    assert (tmp_path / "a" / "compare" / "ppl.json").read_bytes() == before
    assert not (tmp_path / "a" / "ppl.json").exists()
    assert compare("b", "--out", "elsewhere") == compare("b", "--out", "b") == 1
    assert compare("a", "--claim", "equivalent") == 0  # of the same results
    (tmp_path / "elsewhere" / "ppl.json").write_text("{", encoding="utf-8")
    assert compare("b", "--out", "elsewhere") == 2


def test_results_that_no_run_stored_are_not_covered_by_name(tmp_path: Path) -> None:
    fill(tmp_path, "stock")
    fill(tmp_path, "fused")
    made = judge.compare_stored([tmp_path])
    assert made.verdict == "IDENTICAL"
    assert made.not_covered[0].startswith(
        "whether the results are whole: 40 of 40 are without a run.json"
    )


def test_folders_that_overlap(tmp_path: Path) -> None:
    stock = fill(tmp_path / "a", "stock")
    done = run("compare", str(stock), str(stock))
    assert done.returncode == 2
    assert "give folders that don't overlap" in done.stderr


def test_evidence_that_was_edited_is_noticed(tmp_path: Path) -> None:
    fill(tmp_path, "stock")
    fill(tmp_path, "fused", shift=3e-4)
    run("compare", str(tmp_path), "--out", str(tmp_path / "out"))
    path = tmp_path / "out" / "ppl.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("DIFFERENT", "IDENTICAL"), encoding="utf-8")
    with pytest.raises(PplError, match=r"contradicts itself|is damaged"):
        evidence.read(path)
    path.write_text(text[:200], encoding="utf-8")
    with pytest.raises(PplError, match="is damaged"):
        evidence.read(path)


def test_the_schema_is_exported() -> None:
    done = run("schema")
    assert done.returncode == 0
    assert '"schema"' in done.stdout


def test_the_benchmark_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "MOST_S", 200.0)  # the machine may be shared
    assert bench.main(["100000"]) == 0
    assert "100,000 stored tokens compared" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["0"], ["3", "4"], ["many"]])
def test_bench_takes_a_number_of_tokens(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "expected a number of tokens, or client" in said
