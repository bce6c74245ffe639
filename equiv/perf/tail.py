"""The tail itself: the stock ops, the candidates, and a copy of as many bytes, side by side.

Device times are those of ``equiv.perf.timing``. The stock arm is timed twice, as ``stock`` and
``stock again``: how far their ratio lies from 1 is what any ratio owes to chance.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from equiv import candidates
from equiv.dtypes import DTYPES
from equiv.errors import UsageError
from equiv.perf import timing
from equiv.perf.record import Ratio, Tail, TailArm, TailCell
from equiv.perf.timing import Arm, Timing, copy_arm, input_sets, measure, speedup

SIZES = 3
"""Values of the first dimension: the largest of production, which are chunks."""
STOCK, AGAIN, COPY = "stock", "stock again", "copy"


def points(pair: Any, only: Mapping[str, Sequence[int]]) -> list[dict[str, int | str]]:
    """Return the points to time, with every axis's values.

    The first dimension takes its largest production values, the others their middle one.

    Parameters
    ----------
    only : for some dimensions, the values to take instead.

    Raises
    ------
    UsageError : the pair has no such dimension, or doesn't say how many bytes it moves.

    """
    if not hasattr(pair, "bytes_moved"):
        raise UsageError(f"pair {pair.name} has no bytes_moved(point): nothing to compare with")
    unknown = only.keys() - pair.dims.keys()
    if unknown:
        names = ", ".join(pair.dims)
        raise UsageError(f"no dimension {min(unknown)}: pair {pair.name} has {names}")
    values: dict[str, Sequence[int | str]] = {}
    for place, (name, dim) in enumerate(pair.dims.items()):
        known = sorted(dim.production)
        chosen = known[-SIZES:] if place == 0 else known[len(known) // 2 :][:1]
        values[name] = only.get(name, chosen)
    values |= pair.domain_axes
    made = (
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    )
    return [point for point in made if pair.valid(point) and pair.rows(point)]


def sizes(text: str) -> tuple[str, list[int]]:
    """Read ``T=16384,65536``.

    Raises
    ------
    UsageError : it isn't a dimension and its values.

    """
    name, _, values = text.partition("=")
    try:
        return name, [int(value) for value in values.split(",")]
    except ValueError:
        raise UsageError(f"size {text!r}: expected a dimension and values: T=1,65536") from None


def run(
    pair: Any,
    names: Sequence[str],
    device: str,
    library: str | None,
    only: Mapping[str, Sequence[int]],
    *,
    repetitions: int = timing.REPETITIONS,
    progress: Any = lambda line: None,  # noqa: ARG005 - called with every cell's line
) -> tuple[Tail, list[str]]:
    """Time the tail.

    Parameters
    ----------
    names : candidates; one that can't run here is not covered, by name.

    Returns
    -------
    The cells, and what was not covered.

    Raises
    ------
    UsageError : bad names or points.
    NotCovered : no GPU.

    """
    import torch

    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    chosen = points(pair, only)
    for name in names:
        candidates.check_name(pair, name)
    where = timing.require_cuda(device)
    kernels: dict[str, Any] = {}
    missing = []
    for name in names:
        if name == STOCK:
            continue
        try:
            kernels[name] = candidates.load(pair, name, str(where), library).kernel
        except RuntimeError as e:
            missing.append(f"the tail of {name}: {' '.join(str(e).split())}")
    cells = []
    with torch.cuda.device(where), torch.no_grad():
        for point in chosen:
            cells.append(_cell(pair, kernels, point, where, repetitions))
            progress(line(cells[-1]))
            torch.cuda.empty_cache()
    model = torch.cuda.get_device_properties(where).name
    return Tail(pair.name, model, repetitions, timing.SAMPLES, cells, began), missing


def _cell(
    pair: Any,
    kernels: Mapping[str, Any],
    point: dict[str, int | str],
    device: Any,
    repetitions: int,
) -> TailCell:
    moved = pair.bytes_moved(point)
    sets = input_sets(moved)
    operands = [_operands(pair, point, device) for _ in range(sets)]

    def stock(i: int) -> Any:
        return pair.reference(operands[i], point)

    def arm(name: str, kernel: Any) -> Arm:
        return Arm(name, lambda i: pair.call(kernel, operands[i], point, None))

    arms = [Arm(STOCK, stock), *(arm(name, kernel) for name, kernel in kernels.items())]
    arms += [Arm(AGAIN, stock), copy_arm(moved, sets, device)]
    timings = measure(arms, sets, device, repetitions=repetitions)
    return TailCell(point, moved, sets, arms_of(timings, _identical(timings)))


def arms_of(timings: Mapping[str, Timing], identical: Mapping[str, bool]) -> list[TailArm]:
    """Return the arms with their ratios, each formed inside a run."""
    reference, copied = timings[STOCK], timings[COPY]
    chance = speedup(reference, timings[AGAIN])
    made = []
    for name, found in timings.items():
        to_stock = speedup(reference, found)
        share = speedup(found, copied)
        # Both orders of the two stock arms are chance.
        low, high = min(chance.least, 1 / chance.most), max(chance.most, 1 / chance.least)
        made.append(
            TailArm(
                name=name,
                launch_s=list(found.runs_s),
                time_to_stock=Ratio(to_stock.median, to_stock.least, to_stock.most),
                share_of_copy=Ratio(share.median, share.least, share.most),
                resolved=to_stock.most < low or to_stock.least > high,
                identical=identical.get(name),
            )
        )
    return made


def _operands(pair: Any, point: Mapping[str, int | str], device: Any) -> dict[str, Any]:
    import torch

    return {
        operand.name: torch.randn(operand.shape, device=device, dtype=DTYPES[operand.dtype].torch())
        for operand in pair.operands(point)
    }


def _identical(timings: Mapping[str, Timing]) -> dict[str, bool]:
    import torch

    def same(a: Any, b: Any) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))

    expected = timings[STOCK].outputs
    return {
        name: all(
            mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in theirs)
            for mine, theirs in zip(found.outputs, expected, strict=True)
        )
        for name, found in timings.items()
        if name != COPY
    }


def line(cell: TailCell) -> str:
    """Return a cell in one line."""
    where = ",".join(f"{name}={value}" for name, value in cell.point.items())
    stock = next(arm for arm in cell.arms if arm.name == STOCK)
    others = ", ".join(
        f"{arm.name} {arm.time_to_stock.median:.3f}"
        for arm in cell.arms
        if arm.name not in {STOCK, COPY}
    )
    launch_s = timing.spread(stock.launch_s).median
    return f"{where}: stock {launch_s * 1e6:.2f} us, in times of it: {others}"
