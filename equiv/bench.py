"""``python -m equiv.bench``: how fast the suite is, measured, not asserted.

``equiv`` counts structured cases a second on one core, everything on (drawing, arena, both colours,
hashes, oracle, comparison), for the candidate ``inductor``, and runs the same cases as one
parametrised pytest item each beside it. ``pack`` times a kernel on a GPU (``equiv.perf.pack``).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from hypothesis import find
from hypothesis.errors import NoSuchExample

from equiv.command import run_app
from equiv.errors import UsageError
from equiv.lanes import Lanes, Target
from equiv.pairs import add_checkout_paths, load_pair
from equiv.pool import Worker
from equiv.profiles import PROFILES, settings_of
from equiv.worker import spec_of

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Benchmarks of the suite and of the kernels.",
)


@app.callback()
def root() -> None:
    """Benchmarks of the suite and of the kernels."""


ITEMS = """
import os
import sys

sys.path[:0] = {paths!r}
import pytest
import torch

from equiv import candidates, case
from equiv.execute import Executor
from equiv.pairs import load_pair

torch.set_num_threads(1)
pair = load_pair({pair!r})
executor = Executor(pair, candidates.load(pair, {candidate!r}, "cpu", None), "cpu", [])
LINES = open({lines!r}).read().split()


@pytest.mark.parametrize("line", LINES)
def test_case(line):
    assert not executor.run(case.parse(line)).failed
"""


@app.command()
def equiv(
    candidate: Annotated[str, typer.Option(help="Candidate to run.")] = "inductor",
    pair: Annotated[str, typer.Option(help="Registered op pair.")] = "kvpack",
    cases: Annotated[int, typer.Option(min=50, help="Drawn cases to time.")] = 2_000,
    items: Annotated[int, typer.Option(min=10, help="Of them, run as pytest items.")] = 300,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Structured cases a second on one core, beside the same cases as pytest items."""
    made = load_pair(pair)
    core = _one_core()
    lanes = Lanes(made, Target("cpu"), PROFILES["gate"], candidate, 0)
    plan = lanes.plan("strides")
    spec = spec_of(made, candidate, "cpu")
    lines: list[str] = []
    rows: list[int] = []
    failed: list[str] = []
    moved = 0
    with Worker(made, spec) as worker:
        for case in plan.explicit:  # whatever is compiled on first use
            worker.run(case)
        start = time.perf_counter()
        stop = [False]

        def run(case: Any) -> bool:
            nonlocal moved
            if stop[0] or len(lines) >= cases:
                stop[0] = True
                return False
            result = worker.run(case)
            lines.append(str(case))
            rows.append(made.rows(dict(case.point)))
            moved += result.bytes_compared
            if result.failed:
                failed.append(str(case))
            return False

        assert plan.drawn is not None
        options = settings_of(PROFILES["gate"], cases)
        with contextlib.suppress(NoSuchExample):
            find(plan.drawn, run, settings=options, random=Random(0))
        seconds = time.perf_counter() - start
    some = lines[: min(items, len(lines))]
    item_seconds = _as_items(pair, candidate, some)
    figures = {
        "candidate": candidate,
        "core": core,
        "cases": len(lines),
        "cases_per_s": round(len(lines) / seconds, 1),
        "median_rows": int(statistics.median(rows)),
        "gigabytes_compared": round(moved / 1e9, 2),
        "failed": len(failed),
        "pytest_items": len(some),
        "pytest_items_per_s": round(len(some) / item_seconds, 1),
        "ratio": round(len(lines) / seconds / (len(some) / item_seconds), 2),
    }
    for name, value in figures.items():
        sys.stdout.write(f"{name:20} {value}\n")
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(1 if failed else 0)


def _one_core() -> int:
    """Bind this process and those it starts to one core."""
    if not hasattr(os, "sched_setaffinity"):
        msg = "the benchmark binds itself to one core, which this system can't"
        raise UsageError(msg)
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def _as_items(pair: str, candidate: str, lines: list[str]) -> float:
    """Run cases as one parametrised pytest item each; return wall seconds, start-up not counted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "lines.txt").write_text("\n".join(lines), encoding="utf-8")
        source = ITEMS.format(
            paths=[p for p in sys.path if p],
            pair=pair,
            candidate=candidate,
            lines=str(path / "lines.txt"),
        )
        (path / "test_items.py").write_text(source, encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            folder,
        ]
        command += [
            "-c",
            os.devnull,
            "--durations=0",
            "--durations-min=0",
            str(path / "test_items.py"),
        ]
        junit = path / "items.xml"
        command += [f"--junitxml={junit}"]
        done = subprocess.run(  # noqa: S603 - our own interpreter and file
            command, capture_output=True, text=True, check=False, cwd=folder
        )
        if done.returncode:
            msg = f"the pytest items failed: {' '.join(done.stdout.split())[-300:]}"
            raise UsageError(msg)
        import xml.etree.ElementTree as ET

        suite = ET.parse(junit).getroot().find("testsuite")  # noqa: S314 - our own file
        assert suite is not None
        return float(suite.get("time", "nan"))


@app.command()
def loop(
    cases: Annotated[int, typer.Option(min=20, help="Drawn cases to time, for each D.")] = 300,
) -> None:
    """Loop cases a second on one core, drawn by hypothesis (``equiv.loop.bench``)."""
    from equiv.loop.bench import report

    sys.stdout.write(report(cases))


@app.command()
def pack(
    candidate: Annotated[str, typer.Option(help="Candidate to time.")] = "triton",
    rival: Annotated[str, typer.Option(help="Candidate to compare it with.")] = "vllm",
    pair: Annotated[str, typer.Option(help="Registered op pair.")] = "kvpack",
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
    library: Annotated[str | None, typer.Option(help="File with the rival's ops.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Sizes, such as T=1,65536. May be repeated.")
    ] = None,
    runs: Annotated[int, typer.Option(min=5, help="Runs of a cell.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder for JSON and Markdown.")] = Path("out/bench"),
) -> None:
    """Time a kernel on a GPU beside another, the stock ops and a copy; worst ratio first."""
    from equiv import document
    from equiv.evidence import check_folder
    from equiv.perf import pack as bench_pack

    check_folder(out)
    made = bench_pack.run(
        load_pair(pair),
        candidate=candidate,
        rival=rival,
        device=device,
        library=library,
        only=dict(map(_sizes, only or [])),
        command=shlex.join(["python", "-m", "equiv.bench", *sys.argv[1:]]),
        repetitions=runs,
        progress=lambda line: sys.stderr.write(f"{line}\n"),
    )
    document.show(bench_pack.blocks(made), sys.stdout)
    data, text = bench_pack.write(made, out)
    sys.stdout.write(f"in {data} and {text}\n")
    raise typer.Exit(int(made.exit_code))


def _sizes(text: str) -> tuple[str, list[int]]:
    """Read ``T=1,65536``."""
    name, _, values = text.partition("=")
    try:
        return name, [int(value) for value in values.split(",")]
    except ValueError:
        raise UsageError(f"--only {text!r}: expected a dimension and sizes, as T=1,65536") from None


@app.command()
def ppl(
    tokens: Annotated[int, typer.Option(min=1000, help="Stored log-probabilities.")] = 10_000_000,
) -> None:
    """Seconds and memory to compare, test and report stored results (``ppl.bench``)."""
    from ppl.bench import main as measure

    raise typer.Exit(measure([str(tokens)]))


def main() -> None:
    """Run the benchmark command line; errors are one line, as everywhere."""
    add_checkout_paths()
    sys.exit(run_app(app, sys.argv[1:], "bench"))


if __name__ == "__main__":
    main()
