"""Recorded cases, run again: their hashes, and whether they still pass or fail.

Inputs follow from the case alone, so their hash must come out anywhere. Outputs are the stock ops':
theirs is compared where the device is of the same kind and torch (for the loop vLLM as well) of the
same version; elsewhere it isn't covered.
"""

from __future__ import annotations

import random
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from equiv import environment
from equiv.case import Case, parse
from equiv.document import counted
from equiv.errors import BytegateError, UsageError
from equiv.gate.collect import Piece
from equiv.result import PASSING, Result

Told = tuple[str, Literal["holds", "differs", "not covered"], str]
"""What was looked at, how it came out, and details."""

SECONDS = 120.0
"""After which no further case of a file is started."""
ONE_BY_ONE = ("edges", "ragged", "fp8", "real", "strides")
"""Lanes of the loop whose cases run by themselves."""


def rerun(piece: Piece, pick: random.Random, count: int, library: str | None) -> Iterator[Told]:
    """Run a random sample of a file's cases again."""
    if piece.layer == "kernel":
        lanes = [x for c in piece.made.candidates for x in c.lanes]
        yield from _sources(piece)
        yield from _kernel(
            piece, _some([s for x in lanes for s in x.samples], pick, count), library
        )
        yield from _findings(
            piece, _some([f for x in lanes for f in x.findings], pick, count), library
        )
    elif piece.layer == "loop":
        samples = [s for x in piece.made.lanes if x.lane in ONE_BY_ONE for s in x.samples]
        yield from _loop(piece, _some(samples, pick, count))
    elif piece.layer == "kernel_faults":
        rows = [r for r in piece.made.faults if r.outcome == "caught" and r.smallest]
        yield from _faults(piece, _some(rows, pick, count), library)
    else:
        yield "planted faults, on their smallest cases", "not covered", "each needs vLLM changed"


def _some(items: list[Any], pick: random.Random, count: int) -> list[Any]:
    return pick.sample(items, min(count, len(items)))


@dataclass
class Tally:
    """What came of cases that ran again; ``elsewhere`` says why outputs can't be compared."""

    elsewhere: str
    inputs: int = 0
    outputs: int = 0
    passes: int = 0
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)
    """Candidates that can't be had here, so that stock ran alone."""

    def add(self, sample: Any, result: Any, *, outputs: bool, passes: bool) -> None:
        """Compare one result with what was recorded.

        ``outputs`` and ``passes`` say whether those are to be compared at all.
        """
        line = sample.case
        if passes and not self.elsewhere:
            self.passes += 1
            if result.failed:
                what = f"{sample.status} was recorded, and it fails: {result.detail}"
                self.wrong.append(f"{line}: {what}")
                return
        if not result.input_hash:
            self.left.append(f"{line}: {result.status}, so there is no hash")
            return
        self.inputs += 1
        if result.input_hash != sample.input_hash:
            what = f"inputs are {result.input_hash}, recorded {sample.input_hash}"
            self.wrong.append(f"{line}: {what}")
        elif outputs and not self.elsewhere:
            self.outputs += 1
            if result.output_hash != sample.output_hash:
                what = f"outputs are {result.output_hash}, recorded {sample.output_hash}"
                self.wrong.append(f"{line}: {what}")

    def told(self) -> Iterator[Told]:
        """Yield what came of it."""
        for line in self.wrong:
            yield "a recorded case", "differs", line
        if self.inputs and not self.wrong:
            yield "inputs of recorded cases", "holds", f"{self.inputs} of a random sample"
        if self.outputs and not self.wrong:
            text = f"{self.outputs} of them; with its candidate {self.passes} passed again"
            yield "stock's outputs in recorded cases", "holds", text
        if self.elsewhere:
            yield "stock's outputs in recorded cases", "not covered", self.elsewhere
        if self.absent:
            text = f"{', '.join(sorted(self.absent))} can't be had here: stock ran alone"
            yield "candidates of recorded cases", "not covered", text
        if self.left:
            text = f"{counted(len(self.left), 'case')} not compared: {self.left[0]}"
            yield "recorded cases", "not covered", text


# -- whether outputs can be compared -------------------------------------------------------


def _part(found: Mapping[str, Any], part: str, name: str) -> str:
    inner = found.get(part)
    value = inner.get(name) if isinstance(inner, dict) else None
    return str(value).split(" (")[0]


def elsewhere(there: Mapping[str, Any], device: str, names: Iterable[str] = ("torch",)) -> str:
    """Say why outputs made there can't be compared with outputs made here; empty where they can."""
    here = environment.collect(device, None)
    made_on = "cuda" if _part(there, "device", "name").startswith("cuda") else "cpu"
    if made_on != device.partition(":")[0]:
        return f"made on {made_on}, and this is {device}"
    where = ("device", "model") if made_on == "cuda" else ("cpu", "torch_capability")
    kinds = [_part(e, *where) for e in (there, here)]
    if kinds[0] != kinds[1]:
        return f"made on {kinds[0]}, and this is {kinds[1]}"
    for name in names:
        versions = [_part(e, "versions", name) for e in (there, here)]
        if versions[0] != versions[1]:
            return f"made with {name} {versions[0]}, and here is {versions[1]}"
    return ""


def _device_here(recorded: str) -> str:
    """Return the device to run a case on: of the recorded kind where there is one."""
    import torch

    return "cuda:0" if recorded.startswith("cuda") and torch.cuda.is_available() else "cpu"


# -- the kernel layer ----------------------------------------------------------------------


def _kernel(piece: Piece, samples: list[Any], library: str | None) -> Iterator[Told]:
    if not samples:
        yield "recorded cases", "not covered", "none has a hash"
        return
    device = _device_here(piece.made.device)
    tally = Tally(elsewhere(piece.environment, device))
    own_ledger = "--ledger" in shlex.split(piece.made.command)
    start = time.monotonic()
    for s in samples:
        if time.monotonic() - start > SECONDS:
            tally.left.append(f"{s.case}: not started after {SECONDS:.0f} s")
            continue
        try:
            case, whole = _case(s.case, device)
            result, as_recorded = _run(case, library)
        except BytegateError as e:
            tally.left.append(f"{s.case}: {e}")
            continue
        if case is not None and not as_recorded:
            tally.absent.add(case.candidate)
        tally.add(s, result, outputs=whole, passes=whole and as_recorded and not own_ledger)
    yield from tally.told()


def _sources(piece: Piece) -> Iterator[Told]:
    """Compare the sources of somebody's own kernels with what was recorded of them."""
    from equiv.candidates import source_sha256

    for c in piece.made.candidates:
        here = source_sha256(c.name) if c.source_sha256 else ""
        what = f"the source of {c.name}"
        if here and here != c.source_sha256:
            yield what, "differs", f"it is {here[:12]} here, and {c.source_sha256[:12]} is recorded"
        elif here:
            yield what, "holds", here[:12]
        elif c.source_sha256:
            yield what, "not covered", "it isn't here"


def _findings(piece: Piece, rows: list[Any], library: str | None) -> Iterator[Told]:
    """Run the cases of findings again: each must fail again, where its candidate can be had."""
    device = _device_here(piece.made.device)
    if not rows or device.partition(":")[0] != str(piece.made.device).partition(":")[0]:
        return
    failed = 0
    for f in rows:
        try:
            result, as_recorded = _run(_case(f.case, device)[0], library)
        except BytegateError:
            continue
        if as_recorded and result.status in PASSING:
            yield "a finding", "differs", f"its case passes: {f.case}"
        elif as_recorded:
            failed += 1
    if failed:
        yield "findings", "holds", f"{failed} of {len(rows)} picked fail again"


def _case(line: str, device: str) -> tuple[Case | None, bool]:
    """Return a recorded case to run here, and whether its outputs are those recorded."""
    from equiv.modes import CUDA_MODES

    case = parse(line)
    if case.device == device or (case.device.startswith("cuda") and device.startswith("cuda")):
        return case, True
    if case.mode in CUDA_MODES:  # its inputs change from replay to replay
        return None, False
    return case.with_(device=device), False


def _run(case: Case | None, library: str | None) -> tuple[Result, bool]:
    """Run a case, with its candidate where that can be had here, else stock against itself."""
    from equiv import candidates, ledger
    from equiv.pairs import load_pair
    from equiv.pool import Unavailable, Worker
    from equiv.worker import spec_of

    if case is None:
        return Result("undefined"), False
    pair = load_pair(case.pair)
    versions = environment.versions(library)
    for name in dict.fromkeys((case.candidate, "stock")):
        known = pair.candidates.get(name)
        if known is not None and case.device.partition(":")[0] not in known.devices:
            continue
        one = case.with_(candidate=name)
        entries = ledger.applying(ledger.load(), pair.name, name, case.device, versions)
        try:
            candidates.check_name(pair, name)
            spec = spec_of(pair, name, case.device, library=library, entries=entries)
            with Worker(pair, spec) as worker:
                return worker.run(one), name == case.candidate
        except (Unavailable, UsageError):
            continue
    raise UsageError(f"neither {case.candidate} nor stock can run here")


def _faults(piece: Piece, rows: list[Any], library: str | None) -> Iterator[Told]:
    what = "planted faults, on their smallest cases"
    device = _device_here(piece.made.device)
    if device.partition(":")[0] != str(piece.made.device).partition(":")[0]:
        yield what, "not covered", f"they ran on {piece.made.device}, and this is {device}"
        return
    found = 0
    for r in rows:
        case, _ = _case(r.smallest, device)
        result, as_recorded = _run(case, library)
        if not as_recorded:
            yield f"fault {r.id}", "not covered", f"{r.candidate} can't be had here"
        elif result.status in PASSING:
            yield f"fault {r.id}", "differs", f"its smallest case passes: {r.smallest}"
        else:
            found += 1
    if found:
        yield what, "holds", f"{found} of {len(rows)} picked fail again"


# -- the loop layer ------------------------------------------------------------------------


def _loop(piece: Piece, samples: list[Any]) -> Iterator[Told]:
    from equiv.loop import api, case
    from equiv.loop.run import run

    device = _device_here(piece.made.device)
    if device.partition(":")[0] != str(piece.made.device).partition(":")[0]:
        yield "recorded cases", "not covered", f"made on {piece.made.device}, and this is {device}"
        return
    try:
        api.prepare(device, ())
    except BytegateError as e:
        yield "recorded cases", "not covered", str(e)
        return
    tally = Tally(elsewhere(piece.environment, device, ("torch", "vllm")))
    here = environment.collect(device, None)
    models = [str((e.get("cpu") or {}).get("model")) for e in (piece.environment, here)]
    if not tally.elsewhere and device == "cpu" and models[0] != models[1]:
        tally.elsewhere = f"made on {models[0]}, and this is {models[1]}"  # sums in another order
    for s in samples:
        try:
            one = case.parse(s.case)
            pack, _ = api.load_pack(one.pack, device)
        except BytegateError as e:
            tally.left.append(f"{s.case}: {e}")
            continue
        tally.add(s, run(one, pack), outputs=True, passes=True)
    yield from tally.told()
