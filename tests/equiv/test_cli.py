"""The command line: exit codes, and bad input as one clear line with nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from equiv import cli, run
from equiv.cli import app, run_app
from equiv.errors import BytegateError, WorkerError
from equiv.evidence import json_schema

ROOT = Path(__file__).resolve().parents[2]
CASE = "kvpack/stock/cpu/shapes/T=3,H=2,dtype=bf16,fp8=1,pe=same,rope=64/-/bits.0/eager/-"

Bad = Callable[[str], str]
Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def files(folder: Path) -> Path:
    """Lay out things that can't be used."""
    (folder / "broken.py").write_text("def kernel(:\n", encoding="utf-8")
    (folder / "empty.py").write_text("", encoding="utf-8")
    (folder / "exits.py").write_text("raise SystemExit('two\\nlines')\n", encoding="utf-8")
    (folder / "file").write_text("", encoding="utf-8")
    (folder / "corrupt.toml").write_text("[[divergence\n", encoding="utf-8")
    (folder / "strange.toml").write_text("[[divergence]]\nid = 'X'\nfoo = 1\n", encoding="utf-8")
    (folder / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (folder / "cut.json").write_text('{"schema": "bytegate.equiv", "sch', encoding="utf-8")
    (folder / "other.json").write_text('{"schema": "something.else"}', encoding="utf-8")
    (folder / "list.json").write_text("[1, 2]", encoding="utf-8")
    (folder / "bare.json").write_text(
        json.dumps({"schema": "bytegate.equiv", "schema_version": 1, "verdict": "PASS"}),
        encoding="utf-8",
    )
    return folder


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """Run the command line in this process; return exit code, output, errors."""
    monkeypatch.delenv("BYTEGATE_TRACEBACK", raising=False)

    def call(*words: str) -> tuple[int, str, str]:
        code = run_app(app, list(words), "bytegate")
        out, err = capfd.readouterr()
        return code, out, err

    return call


BAD_INPUT: dict[str, tuple[tuple[str, ...], str]] = {
    "pair": (("--pair", "kvpakc"), "unknown pair 'kvpakc'"),
    "lane": (("--lane", "fast"), "unknown lane 'fast': expected one of patterns, "),
    "profile": (("--profile", "quick"), "unknown profile 'quick': expected one of dev, "),
    "candidate": (("--candidate", "vlmm"), "unknown candidate 'vlmm': pair kvpack has "),
    "candidate of a GPU": (("--candidate", "vllm"), "'vllm' runs on cuda alone"),
    "module": (("--candidate", "nowhere:f"), "No module named 'nowhere'"),
    "file": (("--candidate", "nowhere.py:f"), "there is no file nowhere.py"),
    "function": (("--candidate", "empty.py:f"), "f doesn't exist in empty.py"),
    "syntax": (("--candidate", "broken.py:kernel"), "SyntaxError"),
    "exit": (("--candidate", "exits.py:kernel"), "SystemExit: two lines"),
    "second candidate": (
        ("--candidate", "inductor", "--candidate", "empty.py:f"),
        "f doesn't exist in empty.py",
    ),
    "no GPU": (("--device", "cuda"), "sees 0 GPUs"),
    "device": (("--device", "tpu"), "unknown device 'tpu': expected cpu, cuda or cuda:N"),
    "negative seed": (("--seed", "-1"), "Invalid value for '--seed'"),
    "seed": (("--seed", "many"), "Invalid value for '--seed'"),
    "no ledger": (("--ledger", "nowhere.toml"), "can't read the ledger nowhere.toml"),
    "corrupt ledger": (("--ledger", "corrupt.toml"), "isn't valid TOML"),
    "strange ledger": (("--ledger", "strange.toml"), "entry 1 (X): unknown fields foo"),
    "binary ledger": (("--ledger", "binary.toml"), "can't read the ledger binary.toml"),
    "library": (("--library", "nowhere.so"), "--library nowhere.so: there is no such file"),
    "folder that is a file": (("--out", "file"), "can't write to the folder file"),
    "folder below a file": (("--out", "file/out"), "can't write to the folder file/out"),
    "unwritable folder": (("--out", "/proc/bytegate"), "can't write to the folder /proc/"),
    "option": (("--lanes", "shapes"), "No such option: --lanes"),
    "command": (("compare",), "No such command 'compare'"),
    "no case": (("repro",), "Missing argument "),
    "no line of a case": (("repro", "T=3"), "can't read the case 'T=3': expected 9 fields"),
    "case's number": (("repro", CASE.replace("bits.0", "bits.x")), "field fill is malformed"),
    "case's point": (("repro", CASE.replace("T=3", "T")), "field point is malformed"),
    "case's view": (("repro", CASE.replace("/-/bits", "/q=1/bits")), "field views is malformed"),
    "case's pair": (("repro", CASE.replace("kvpack", "vpack")), "unknown pair 'vpack'"),
    "case's mode": (("repro", CASE.replace("eager", "lazy")), "mode 'lazy' is unknown"),
    "case's axis": (("repro", CASE.replace("bf16", "bf8")), "dtype is 'bf8', expected one of"),
    "case's device": (("repro", CASE.replace("/cpu/", "/cuda/")), "sees 0 GPUs"),
    "case's candidate": (("repro", CASE.replace("stock", "stick")), "unknown candidate 'stick'"),
    "repro's ledger": (("repro", CASE, "--ledger", "corrupt.toml"), "isn't valid TOML"),
    "no evidence": (("show", "nowhere.json"), "can't read the evidence nowhere.json"),
    "cut evidence": (("show", "cut.json"), "can't read the evidence cut.json"),
    "other evidence": (("show", "other.json"), "expected bytegate.equiv version 1"),
    "no evidence at all": (("show", "list.json"), "expected bytegate.equiv version 1"),
    "damaged evidence": (("show", "bare.json"), "the evidence bare.json is damaged"),
    "a folder for evidence": (("show", "."), "can't read the evidence ."),
    "fault": (("faults", "--only", "K99"), "unknown fault K99: pair kvpack has K01, "),
    "faults' folder": (("faults", "--out", "file"), "can't write to the folder file"),
    "faults' profile": (("faults", "--profile", "quick"), "unknown profile 'quick'"),
    "faults' cases": (("faults", "--clean-cases", "-1"), "Invalid value for '--clean-cases'"),
}


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(
    what: str, files: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, message = BAD_INPUT[what]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = sorted(files.rglob("*"))
    code, out, err = said("equiv", *words)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("bytegate: ")
    assert message in line
    assert [p for p in sorted(files.rglob("*")) if p.is_file()] == [
        p for p in before if p.is_file()
    ]


@pytest.mark.parametrize(
    "error",
    [ValueError("two\nlines"), WorkerError("two\nlines"), MemoryError()],
    ids=lambda e: type(e).__name__,
)
def test_our_own_errors_are_one_line_and_exit_code_4(
    error: Exception, files: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(run, "run", fails)
    code, out, err = said("equiv", "--out", str(files / "out"))
    assert (code, out, len(err.splitlines())) == (4, "", 1)
    internal = not isinstance(error, BytegateError)
    assert ("set BYTEGATE_TRACEBACK=1 to see where" in err) == internal
    monkeypatch.setenv("BYTEGATE_TRACEBACK", "1")
    if internal:
        with pytest.raises(type(error)):
            run_app(app, ["equiv"], "bytegate")


def test_an_interruption_says_so(said: Said, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", fails)
    code, out, err = said("equiv", "--out", str(folder))
    assert (code, out, err) == (130, "", "bytegate: interrupted; no report was written\n")


def test_the_schema_is_printed(said: Said) -> None:
    code, out, err = said("equiv", "schema")
    assert (code, err) == (0, "")
    assert json.loads(out) == json_schema()


@pytest.mark.parametrize("words", [("--help",), ("equiv", "--help"), ("equiv", "repro", "--help")])
def test_help_is_no_error(words: tuple[str, ...], said: Said) -> None:
    code, out, err = said(*words)
    assert (code, err) == (0, "")
    assert "Usage: bytegate" in out


def test_a_command_is_written_down_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "run_app", lambda *_: 0)
    with pytest.raises(SystemExit) as e:
        cli.main(["equiv", "--out", "a b"])
    assert e.value.code == 0
    assert cli.command_line() == "bytegate equiv --out 'a b'"


# -- as a process -------------------------------------------------------------------


@pytest.fixture
def command(folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``python -m equiv`` in a folder of its own."""

    def call(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("BYTEGATE")}
        return subprocess.run(
            [sys.executable, "-m", "equiv", *words],
            cwd=folder,
            env={**inherited, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **variables},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return call


Command = Callable[..., subprocess.CompletedProcess[str]]


def test_pass_is_exit_code_0(command: Command, bad: Bad, folder: Path, said: Said) -> None:
    done = command("--lane", "alignment", "--candidate", bad("prints"), "--profile", "dev")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PASS  kvpack on cpu: ")
    assert "a kernel's own words" not in done.stdout + done.stderr
    assert "564 of 564 cases" in done.stderr or "done" in done.stderr
    made = json.loads((folder / "out/equiv/equiv.json").read_text(encoding="utf-8"))
    assert (made["verdict"], made["exit_code"], made["validated"]) == ("PASS", 0, True)
    assert made["command"].startswith("bytegate equiv --lane alignment --candidate ")
    code, out, err = said("equiv", "show", "out/equiv/equiv.json")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == done.stdout.splitlines()[0]


def test_a_failure_is_exit_code_1_with_a_line_that_repeats_it(
    command: Command, bad: Bad, folder: Path
) -> None:
    done = command("--lane", "alignment", "--candidate", bad("divergence"), "--out", "here")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("FAIL  ")
    made = json.loads((folder / "here/equiv.json").read_text(encoding="utf-8"))
    (found,) = [f for c in made["candidates"] for x in c["lanes"] for f in x["findings"]]
    assert found["repro"] in done.stdout
    assert "Repeat it with" in done.stdout


def test_bad_usage_is_exit_code_2(command: Command, folder: Path) -> None:
    done = command("--lane", "fast")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("bytegate: unknown lane 'fast': expected one of patterns, ")
    assert len(done.stderr.splitlines()) == 1
    assert list(folder.iterdir()) == []


def test_what_isn_t_covered_is_exit_code_4(command: Command) -> None:
    done = command("faults", "--only", "K18", "--clean-cases", "0")
    assert (done.returncode, done.stderr) == (4, "")
    assert done.stdout.startswith("NOT COVERED  ")
    assert "needs a GPU" in done.stdout


def test_a_lane_below_its_least_counts_is_exit_code_4(
    said: Said, bad: Bad, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from equiv import plans

    def needing(x: object, plan: plans.Plan) -> None:
        plans.alignment(x, plan)
        plan.least["mode=never"] = 1

    monkeypatch.setitem(plans.PLANS, "alignment", needing)
    code, out, _ = said(
        "equiv", "--lane", "alignment", "--candidate", bad("clean"), "--out", str(folder / "o")
    )
    assert code == 4
    assert out.startswith("NOT COVERED  ")
    assert "mode=never: 0 of 1" in out


def test_what_ends_the_process_while_it_is_loaded_is_no_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import typer

    ending = typer.Typer()

    @ending.command()
    def load() -> None:
        raise SystemExit(0)

    assert run_app(ending, [], "bytegate") == 2
    assert "SystemExit(0), so nothing was judged" in capsys.readouterr().err
