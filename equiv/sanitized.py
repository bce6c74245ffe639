"""What runs under compute-sanitizer: calls of one candidate, each operand in memory of its own.

``python -m equiv.sanitized PAIR CANDIDATE DEVICE LIBRARY CASE...`` (``-``: no library). An
operand's allocation ends with its last element, so that memcheck sees a read past it, which a
guard band would hide. Everything in it was written by one copy from the host, so that initcheck
sees no reads but the candidate's. A line before and after each call tells a report which case it
belongs to. Nothing is compared: the lanes do that.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from equiv import candidates
from equiv.arena import BASE, COLOURS, Placed, dense_pitches, has_gaps, overlaps, span_elements
from equiv.case import Case, View, parse
from equiv.domain import claim_of
from equiv.dtypes import DTYPES
from equiv.fills import fill
from equiv.pairs import add_checkout_paths, load_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equiv.pairs import Operand, OpPair

BEGIN, END = "bytegate: begin", "bytegate: end"
UNAVAILABLE = "bytegate: unavailable"
CANT_RUN = 78
"""Exit code where the candidate isn't to be had here."""


def operands(pair: OpPair, case: Case, device: str) -> dict[str, torch.Tensor]:
    """Return a case's operands, each in an allocation that ends with its last element."""
    found = {}
    views = dict(case.views)
    for i, operand in enumerate(claim_of(pair, case).operands):
        found[operand.name] = _alone(operand, views.get(operand.name), case, i, device)
    return found


def _alone(
    operand: Operand, view: View | None, case: Case, number: int, device: str
) -> torch.Tensor:
    dtype = DTYPES[operand.dtype]
    pitches = view.pitches if view else dense_pitches(operand.shape)
    offset = view.offset_bytes % BASE if view else 0
    span = span_elements(operand.shape, pitches) * dtype.itemsize
    twice = overlaps(operand.shape, pitches)
    placed = Placed(operand, dtype, pitches, offset, span, has_gaps(operand.shape, pitches), twice)
    host = np.full(offset + max(span, dtype.itemsize), COLOURS[0], np.uint8)
    elements = fill(case.fill.kind, placed.storage_shape, dtype, case.fill.seed, number)
    steps = (dtype.itemsize,) if twice else tuple(p * dtype.itemsize for p in pitches)
    inside = np.ndarray(placed.storage_shape, elements.dtype, host, offset, steps)
    inside[...] = elements
    logical = placed.logical(inside) if twice else inside
    for name, index, value in case.overrides:
        if name == operand.name:
            logical[np.unravel_index(index, logical.shape)] = value
    storage = torch.from_numpy(host).to(device)
    return torch.as_strided(storage[offset:].view(dtype.torch()), operand.shape, pitches)


def call(pair: OpPair, loaded: Any, case: Case, device: str) -> None:
    """Call the candidate once; without one the stock statements, the control of the tool itself."""
    point = claim_of(pair, case).point
    tensors = operands(pair, case, device)
    out = None
    if loaded is not None and loaded.guard == "out":
        out = {
            o.name: torch.empty(o.shape, dtype=DTYPES[o.dtype].torch(), device=device)
            for o in pair.outputs(point)
        }
    torch.cuda.synchronize()
    _say(f"{BEGIN} {case}")
    try:
        if loaded is None:
            pair.reference(tensors, point)
        else:
            pair.call(loaded.kernel, tensors, point, out)
        torch.cuda.synchronize()
    finally:
        _say(f"{END} {case}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(words: Sequence[str]) -> int:
    """Run the cases; the exit code is 0 unless the candidate can't run at all."""
    name, candidate, device, library, *lines = words
    add_checkout_paths()
    pair = load_pair(name)
    try:
        loaded = None
        if candidate != "stock":
            loaded = candidates.load(pair, candidate, device, None if library == "-" else library)
    except Exception as e:  # noqa: BLE001 - it is the answer
        _say(f"{UNAVAILABLE} {type(e).__name__}: {' '.join(str(e).split())}")
        return CANT_RUN
    for line in lines:
        call(pair, loaded, parse(line), device)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
