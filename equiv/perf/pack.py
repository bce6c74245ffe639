"""How fast a pair's candidate is: beside a rival, the reference, and a copy of as many bytes.

For each cell (dtypes and dimensions of one case in the pair's domain) the arms are timed side by
side as ``equiv.perf.timing`` describes, twice: ``stream``, launch after launch of one arm, and
``alone``, with another kernel between any two. Ratios are in time: ``rival`` is the rival's time
over the candidate's, above 1 where the candidate is faster; ``copy`` is the share of a copy's
bandwidth, by a memory copy or a kernel, whichever is faster; ``again`` is the candidate timed
twice, the second over the first: how far from 1 a ratio is by chance.

Operands are contiguous, of normal random values; each arm allocates its results while it is
captured, so a replay allocates nothing. The candidate's bytes are compared with the reference's in
every cell: a wrong kernel's speed is nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equiv import candidates, document
from equiv.document import Block, Facts, Heading, Line, Table
from equiv.dtypes import DTYPES
from equiv.environment import collect
from equiv.errors import ExitCode, NotCovered, UsageError
from equiv.files import write_whole
from equiv.perf import timing
from equiv.perf.timing import Arm, Spread, Timing, copy_arm, input_sets, measure, speedup

SCHEMA = "bytegate.bench.pack"
SCHEMA_VERSION = 1

MODES = ("stream", "alone")
SAMPLES = 3
"""Samples of a run. Cells are many, and the spread of the runs says whether it is enough."""
GRID = (64, 256, 1_024, 4_096, 8_192, 32_768)
"""Values of the first dimension beside those of production: powers of two in between."""


@dataclass(frozen=True)
class Cell:
    """One case in one mode.

    Attributes
    ----------
    point : dimensions and axes of the case.
    mode : one of ``MODES``.
    bytes_moved : the fewest that the work needs, read and written, as the pair counts them.
    sets : input sets of a replay.
    identical : whether the candidate's bytes are the reference's, for every set.
    runs_s : for each arm its device seconds a launch, a figure a run.

    """

    point: dict[str, int | str]
    mode: str
    bytes_moved: int
    sets: int
    identical: bool
    runs_s: dict[str, list[float]]

    def ratio(self, arm: str) -> Spread | None:
        """Return an arm's time over the candidate's; None without that arm.

        ``"copy"`` is the faster of the copies.
        """
        if arm == "copy":
            copies = [name for name in self.runs_s if name.startswith("copy")]
            arm = min(copies, key=lambda name: timing.spread(self.runs_s[name]).median)
        if arm not in self.runs_s:
            return None
        ours, theirs = (Timing(name, tuple(self.runs_s[name])) for name in ("candidate", arm))
        return speedup(ours, theirs)


@dataclass(frozen=True)
class Bench:
    """``bench-pack.json``: the table, and where it was measured.

    Attributes
    ----------
    not_covered : what is missing, by name: a rival that can't run here.
    repetitions, samples : runs of a cell, and samples of a run.

    """

    pair: str
    candidate: str
    rival: str
    device: str
    cells: list[Cell]
    not_covered: list[str]
    repetitions: int
    samples: int
    environment: dict[str, Any]
    started: str
    seconds: float
    command: str
    schema: str = field(default=SCHEMA)
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def exit_code(self) -> ExitCode:
        """FAIL where bytes differ, INVALID where an arm is missing."""
        if not all(cell.identical for cell in self.cells):
            return ExitCode.FAIL
        return ExitCode.INVALID if self.not_covered or not self.cells else ExitCode.PASS


def points(pair: Any, only: Mapping[str, Sequence[int]]) -> list[dict[str, int | str]]:
    """Return the cases to time: the production dimensions and a grid, with every axis's values.

    Parameters
    ----------
    pair : an op pair with ``bytes_moved``.
    only : for some dimensions, the values to take instead.

    Raises
    ------
    UsageError : the pair doesn't say how many bytes it moves, or has no such dimension.

    """
    if not hasattr(pair, "bytes_moved"):
        raise UsageError(f"pair {pair.name} has no bytes_moved(point): nothing to compare with")
    unknown = only.keys() - pair.dims.keys()
    if unknown:
        raise UsageError(
            f"no dimension {min(unknown)}: pair {pair.name} has {', '.join(pair.dims)}"
        )
    values: dict[str, Sequence[int | str]] = {}
    for place, (name, dim) in enumerate(pair.dims.items()):
        grid = GRID if place == 0 else ()
        standard = sorted({*dim.production, *(n for n in grid if n <= dim.maximum)})
        values[name] = only.get(name, standard)
    values |= pair.domain_axes
    made = (
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    )
    return [point for point in made if pair.valid(point) and pair.rows(point)]


def run(  # noqa: PLR0913 - a command's options
    pair: Any,
    *,
    candidate: str,
    rival: str,
    device: str,
    library: str | None,
    only: Mapping[str, Sequence[int]],
    command: str,
    repetitions: int = timing.REPETITIONS,
    progress: Any = lambda line: None,  # noqa: ARG005 - called with every cell's line
) -> Bench:
    """Time every cell.

    Raises
    ------
    UsageError : bad names, or a candidate that can't be imported.
    NotCovered : no GPU, or the candidate can't run on it.

    """
    import torch

    chosen = points(pair, only)
    for name in (candidate, rival):
        candidates.check_name(pair, name)
    where = timing.require_cuda(device)
    began, started = time.perf_counter(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    kernels, not_covered = _load(pair, candidate, rival, str(where), library)
    cells = []
    with torch.cuda.device(where), torch.no_grad():
        for point in chosen:
            try:
                for cell in _cells(pair, kernels, point, where, repetitions):
                    cells.append(cell)
                    progress(_line(cell, rival))
            except torch.OutOfMemoryError:
                not_covered.append(f"{_named(point)}: needs more memory than the GPU has")
            torch.cuda.empty_cache()
    return Bench(
        pair=pair.name,
        candidate=candidate,
        rival=rival,
        device=str(where),
        cells=cells,
        not_covered=not_covered,
        repetitions=repetitions,
        samples=SAMPLES,
        environment=collect(str(where), library) | {"host_python": platform.python_version()},
        started=started,
        seconds=round(time.perf_counter() - began, 1),
        command=command,
    )


def _load(
    pair: Any, candidate: str, rival: str, device: str, library: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the kernels to call, and what is missing."""
    kernels: dict[str, Any] = {}
    missing = []
    for role, name in (("candidate", candidate), ("rival", rival)):
        try:
            kernels[role] = candidates.load(pair, name, device, library).kernel
        except RuntimeError as e:
            if role == "candidate":
                raise NotCovered(f"not covered: candidate {name}: {e}") from e
            missing.append(f"{name}: {e}")
    return kernels, missing


def _cells(
    pair: Any,
    kernels: Mapping[str, Any],
    point: dict[str, int | str],
    device: Any,
    repetitions: int,
) -> Iterator[Cell]:
    """Time one case in each mode."""
    moved = pair.bytes_moved(point)
    sets = input_sets(moved)
    operands = [_operands(pair, point, device) for _ in range(sets)]

    def arm(name: str, kernel: Any) -> Arm:
        return Arm(name, lambda i: pair.call(kernel, operands[i], point, None))

    arms = [arm(name, kernel) for name, kernel in kernels.items()]
    arms.append(arm("again", kernels["candidate"]))
    arms.append(Arm("reference", lambda i: pair.reference(operands[i], point)))
    arms += [copy_arm(moved, sets, device, by_kernel=by_kernel) for by_kernel in (False, True)]
    for mode in MODES:
        alone = mode == "alone"
        found = measure(arms, sets, device, repetitions=repetitions, samples=SAMPLES, alone=alone)
        yield Cell(
            point=point,
            mode=mode,
            bytes_moved=moved,
            sets=sets,
            identical=_identical(found["candidate"].outputs, found["reference"].outputs),
            runs_s={name: [round(s, 11) for s in one.runs_s] for name, one in found.items()},
        )


def _operands(pair: Any, point: Mapping[str, int | str], device: Any) -> dict[str, Any]:
    import torch

    return {
        operand.name: torch.randn(operand.shape, device=device, dtype=DTYPES[operand.dtype].torch())
        for operand in pair.operands(point)
    }


def _identical(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> bool:
    import torch

    def same(a: Any, b: Any) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        bits = torch.uint8 if a.element_size() == 1 else torch.int16
        return bool(torch.equal(a.view(bits), b.view(bits)))

    return all(
        mine.keys() == reference.keys() and all(same(mine[name], reference[name]) for name in mine)
        for mine, reference in zip(ours, theirs, strict=True)
    )


# -- what a person reads --------------------------------------------------------------


def worst_first(made: Bench) -> list[Cell]:
    """Return the cells by the rival's time over the candidate's, the least first."""

    def key(cell: Cell) -> float:
        found = cell.ratio("rival") or cell.ratio("reference")
        assert found is not None
        return found.median

    return sorted(made.cells, key=key)


def blocks(made: Bench) -> Iterator[Block]:
    """Make the report: the verdict, the largest size for each width, and every cell."""
    yield Line(_sentence(made), made.exit_code.name)
    yield Facts(
        (
            ("device", str(made.environment.get("device", {}).get("model", made.device))),
            ("arms", f"{made.candidate} beside {made.rival}, the reference and a copy"),
            ("runs", f"{made.repetitions}, each the median of {made.samples} samples of an arm"),
            ("ratios", "median (least to most of the runs); copy is the share of its bandwidth"),
        )
    )
    for missing in made.not_covered:
        yield Line(missing, "NOT COVERED")
    first = next(iter(made.cells[0].point)) if made.cells else ""
    large = [c for c in made.cells if c.point[first] == 1 << 16 and c.mode == "stream"]
    if large:
        yield Heading(f"{first} = 65,536, launches in a stream")
        yield _table(made, large)
    yield Heading("Every cell, worst ratio first")
    yield _table(made, worst_first(made))


def _sentence(made: Bench) -> str:
    wrong = sum(not cell.identical for cell in made.cells)
    ratios = [found.median for cell in made.cells if (found := cell.ratio("rival"))]
    slower = sum(ratio < 1 for ratio in ratios)
    bytes_of = "in every cell" if not wrong else f"but for {wrong} cells"
    speed = (
        f"{made.rival} takes {min(ratios):.3f} to {max(ratios):.3f} times as long, "
        f"and is faster in {slower} of {len(ratios)} cells"
        if ratios
        else "no rival to compare with"
    )
    return f"{made.candidate}: the reference's bytes {bytes_of}; {speed} ({made.seconds:,.0f} s)"


def _table(made: Bench, cells: Sequence[Cell]) -> Table:
    names = [n for n in cells[0].point if len({cell.point[n] for cell in made.cells}) > 1]
    numbers = ("us", "GB/s", "rival", "copy", "reference", "again")
    rows = []
    for cell in cells:
        launch_s = timing.spread(cell.runs_s["candidate"]).median
        ratios = [_ratio(cell.ratio(arm)) for arm in numbers[2:]]
        figures = (f"{launch_s * 1e6:.2f}", f"{cell.bytes_moved / launch_s / 1e9:,.0f}")
        rows.append((*(str(cell.point[n]) for n in names), cell.mode, *figures, *ratios))
    return Table((*names, "mode", *numbers), tuple(rows), numbers)


def _ratio(found: Spread | None) -> str:
    return f"{found.median:.3f} ({found.least:.3f} to {found.most:.3f})" if found else "-"


def _named(point: Mapping[str, int | str]) -> str:
    return ",".join(f"{name}={value}" for name, value in point.items())


def _line(cell: Cell, rival: str) -> str:
    launch_s = timing.spread(cell.runs_s["candidate"]).median
    copy, other = cell.ratio("copy"), cell.ratio("rival")
    beside = f", {rival} {other.median:.3f}" if other else ""
    wrong = "" if cell.identical else ", WRONG BYTES"
    share = f"{copy.median:.3f} of a copy" if copy else ""
    return f"{_named(cell.point)} {cell.mode}: {launch_s * 1e6:.2f} us, {share}{beside}{wrong}"


def write(made: Bench, folder: Path) -> tuple[Path, Path]:
    """Write ``bench-pack.json``, a cell a line, and ``bench-pack.md``; return their paths."""
    paths = folder / "bench-pack.json", folder / "bench-pack.md"
    title = Heading(f"bytegate bench pack: {made.candidate} of {made.pair} on {made.device}", 1)
    text = document.markdown([title, *blocks(made)])
    fields = dataclasses.asdict(made)
    cells = ",\n  ".join(json.dumps(cell, allow_nan=False) for cell in fields.pop("cells"))
    data = json.dumps(fields, indent=1, allow_nan=False).removesuffix("\n}")
    data += f',\n "cells": [\n  {cells}\n ]\n}}'
    for path, content in zip(paths, (data + "\n", text), strict=True):
        write_whole(path, content.encode())
    return paths
